/* SPDX-License-Identifier: MIT */
/* save/sums.c - CRC-32 of pieces, and of what they make together. */
#include "save/sums.h"

#include <stdlib.h>
#include <zlib.h>

#include "base/crc32.h"
#include "index/layout.h"

enum { JOIN_AT = 1 << 14, JOIN_MAX = 1 << 18 /* of 24 bytes each */ };

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

static int by_place(const void *a, const void *b)
{
    const struct sums_piece *x = a, *y = b;

    if (x->file != y->file)
        return x->file < y->file ? -1 : 1;
    return (x->at > y->at) - (x->at < y->at);
}

/* Pieces that follow each other become one. */
static void join_pieces(struct sums *s)
{
    size_t n = 0;

    qsort(s->piece, s->count, sizeof *s->piece, by_place);
    for (size_t i = 1; i < s->count; i++) {
        struct sums_piece *last = &s->piece[n];
        const struct sums_piece *next = &s->piece[i];

        if (last->file != next->file || last->at + last->len != next->at) {
            s->piece[++n] = *next;
            continue;
        }
        sums_append(&last->crc, next->crc, next->len);
        last->len += next->len;
    }
    s->count = n + 1;
}

/* A stream of small writes makes many pieces: they are joined before they take much memory. */
static bool make_room(struct sums *s)
{
    size_t cap = s->cap ? s->cap * 2 : 1024;
    struct sums_piece *grown;

    if (s->count == s->cap && s->joins && s->cap >= JOIN_AT) {
        join_pieces(s);
        if (s->count > s->cap / 2)
            cap = s->cap < JOIN_MAX ? cap : 0;
    }
    if (s->count < s->cap)
        return true;
    if (cap == 0)
        return false;
    grown = reallocarray(s->piece, cap, sizeof *grown);
    if (!grown)
        return false;
    s->piece = grown;
    s->cap = cap;
    return true;
}

void sums_add_crc(struct sums *s, uint32_t file, uint64_t at, uint64_t len,
                  uint32_t crc)
{
    const struct sums_piece p = {.file = file, .crc = crc, .at = at, .len = len};

    pthread_mutex_lock(&s->lock);
    if (make_room(s))
        s->piece[s->count++] = p;
    else
        s->lost = true;
    pthread_mutex_unlock(&s->lock);
}

void sums_add(struct sums *s, uint32_t file, uint64_t at, const void *data,
              uint64_t len)
{
    sums_add_crc(s, file, at, len, crc32_zip(0, data, (size_t)len));
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

const struct sums_piece *sums_from(const struct sums *s, uint32_t file, uint64_t at)
{
    size_t i = find_piece(s, file, at);

    return i < s->count && s->piece[i].file == file ? &s->piece[i] : NULL;
}

void sums_append(uint32_t *crc, uint32_t more, uint64_t len)
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
        sums_append(crc, p->crc, p->len);
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
            sums_append(&crc, crc32_zip(0, p->data, (size_t)p->len), p->len);
        else if (p->kind != LAYOUT_BOX ||
                 !append_box(s, file, p->at, p->at + p->len, &crc))
            return false;
        at += p->len;
    }
    *out = crc;
    return true;
}
