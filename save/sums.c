/* SPDX-License-Identifier: MIT */
/* save/sums.c - CRC-32 of pieces, and of what they make together. */
#include "save/sums.h"

#include <stdlib.h>
#include <zlib.h>

#include "index/layout.h"

#if defined(__x86_64__)
#include <wmmintrin.h>

#include <smmintrin.h>
#endif

enum { FOLD = 64, STEP = 16 };

/* ---- one piece ---- */

#if defined(__x86_64__)
__attribute__((target("pclmul,sse4.1"))) static __m128i fold(__m128i x, __m128i by,
                                                             __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(x, by, 0x00);

    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x11), low), next);
}

static __m128i load(const unsigned char *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

/* 128 bits to 32, by the polynomial's inverse (Barrett). */
__attribute__((target("pclmul,sse4.1"))) static uint32_t reduce(__m128i x, __m128i by)
{
    const __m128i low = _mm_setr_epi32(-1, 0, -1, 0);
    const __m128i last = _mm_set_epi64x(0, 0x163cd6124);
    const __m128i poly = _mm_set_epi64x(0x1f7011641, 0x1db710641);
    __m128i y = _mm_clmulepi64_si128(x, by, 0x10);

    x = _mm_xor_si128(_mm_srli_si128(x, 8), y);
    y = _mm_srli_si128(x, 4);
    x = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(x, low), last, 0x00), y);
    y = _mm_clmulepi64_si128(_mm_and_si128(x, low), poly, 0x10);
    y = _mm_clmulepi64_si128(_mm_and_si128(y, low), poly, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(x, y), 1);
}

/*
 * Folds 64 bytes at a time, then 16: `len` is a multiple of 16, and 64 at least. The
 * constants are powers of x modulo the polynomial 0x104c11db7, bits reversed (Gopal and
 * others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel 2009).
 */
__attribute__((target("pclmul,sse4.1"))) static uint32_t
by_folding(uint32_t crc, const unsigned char *p, size_t len)
{
    const __m128i by64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i by16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i x[4];

    for (int i = 0; i < 4; i++)
        x[i] = load(p + i * STEP);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)crc));
    for (p += FOLD, len -= FOLD; len >= FOLD; p += FOLD, len -= FOLD)
        for (int i = 0; i < 4; i++)
            x[i] = fold(x[i], by64, load(p + i * STEP));
    for (int i = 1; i < 4; i++)
        x[0] = fold(x[0], by16, x[i]);
    for (; len >= STEP; p += STEP, len -= STEP)
        x[0] = fold(x[0], by16, load(p));
    return reduce(x[0], by16);
}
#endif

uint32_t sums_crc32(uint32_t crc, const void *data, size_t len)
{
    const unsigned char *p = data;

#if defined(__x86_64__)
    if (len >= FOLD && __builtin_cpu_supports("pclmul") &&
        __builtin_cpu_supports("sse4.1")) {
        size_t part = len - len % STEP;

        crc = ~by_folding(~crc, p, part);
        p += part;
        len -= part;
    }
#endif
    return len ? (uint32_t)crc32_z(crc, p, len) : crc;
}

/* ---- all of them ---- */

void sums_init(struct sums *s)
{
    *s = (struct sums){0};
    pthread_mutex_init(&s->lock, NULL);
}

void sums_release(struct sums *s)
{
    free(s->piece);
    pthread_mutex_destroy(&s->lock);
}

static bool make_room(struct sums *s)
{
    size_t cap = s->cap ? s->cap * 2 : 1024;
    struct sums_piece *grown;

    if (s->count < s->cap)
        return true;
    grown = reallocarray(s->piece, cap, sizeof *grown);
    if (!grown)
        return false;
    s->piece = grown;
    s->cap = cap;
    return true;
}

void sums_add(struct sums *s, uint32_t file, uint64_t at, const void *data,
              uint64_t len)
{
    const struct sums_piece p = {
        .file = file, .crc = sums_crc32(0, data, (size_t)len), .at = at, .len = len};

    pthread_mutex_lock(&s->lock);
    if (make_room(s))
        s->piece[s->count++] = p;
    else
        s->lost = true;
    pthread_mutex_unlock(&s->lock);
}

static int by_place(const void *a, const void *b)
{
    const struct sums_piece *x = a, *y = b;

    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    return (x->at > y->at) - (x->at < y->at);
}

void sums_settle(struct sums *s)
{
    if (s->count > 1)
        qsort(s->piece, s->count, sizeof *s->piece, by_place);
}

/* The first piece that starts at `at` of the file or behind. */
static size_t find_piece(const struct sums *s, uint32_t file, uint64_t at)
{
    const struct sums_piece want = {.file = file, .at = at};
    size_t low = 0, high = s->count;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (by_place(&s->piece[mid], &want) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static void append(uint32_t *crc, uint32_t more, uint64_t len)
{
    *crc = (uint32_t)crc32_combine64(*crc, more, (off_t)len);
}

static bool append_box(const struct sums *s, uint32_t file, uint64_t at, uint64_t end,
                       uint32_t *crc)
{
    for (size_t i = find_piece(s, file, at); at < end; i++) {
        const struct sums_piece *p = &s->piece[i];

        if (i == s->count || p->file != file || p->at != at || p->len > end - at)
            return false;
        append(crc, p->crc, p->len);
        at += p->len;
    }
    return true;
}

static size_t find_layout_piece(const struct layout_file_info *f, uint64_t at)
{
    size_t low = 0, high = f->pieces;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (f->piece[mid].at < at)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

bool sums_find(const struct sums *s, uint32_t file, const struct layout_file_info *f,
               uint64_t from, uint64_t len, uint32_t *out)
{
    uint64_t at = from;
    uint32_t crc = 0;

    if (s->lost)
        return false;
    for (size_t i = find_layout_piece(f, from); at < from + len; i++) {
        const struct layout_piece *p = i < f->pieces ? &f->piece[i] : NULL;

        if (!p || p->at != at || p->len > from + len - at)
            return false;
        if (p->kind == LAYOUT_LITERAL)
            append(&crc, sums_crc32(0, p->data, (size_t)p->len), p->len);
        else if (p->kind != LAYOUT_BOX ||
                 !append_box(s, file, p->at, p->at + p->len, &crc))
            return false;
        at += p->len;
    }
    *out = crc;
    return true;
}
