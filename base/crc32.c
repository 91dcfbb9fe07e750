/* SPDX-License-Identifier: MIT */
/* base/crc32.c - CRC-32 by multiplication without carry where the processor has it. */
#include "base/crc32.h"

#include <zlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { WIDE = 128, FOLD = 64, STEP = 16 };

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

/* The same, 128 bytes at a time: two products in one. `len` is 128 at least. */
__attribute__((target("avx2,vpclmulqdq,pclmul,sse4.1"))) static uint32_t
by_wide_folding(uint32_t crc, const unsigned char *p, size_t len)
{
    const __m256i by128 =
        _mm256_broadcastsi128_si256(_mm_set_epi64x(0x14a7fe880, 0x1e88ef372));
    const __m128i by16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m256i x[4];
    __m128i y;

    for (int i = 0; i < 4; i++)
        x[i] = _mm256_loadu_si256((const __m256i *)(const void *)(p + 2 * i * STEP));
    x[0] = _mm256_xor_si256(x[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)crc)));
    for (p += WIDE, len -= WIDE; len >= WIDE; p += WIDE, len -= WIDE)
        for (int i = 0; i < 4; i++) {
            const void *next = p + 2 * i * STEP;

            x[i] = _mm256_xor_si256(
                _mm256_xor_si256(_mm256_clmulepi64_epi128(x[i], by128, 0x00),
                                 _mm256_clmulepi64_epi128(x[i], by128, 0x11)),
                _mm256_loadu_si256((const __m256i *)next));
        }
    y = fold(_mm256_castsi256_si128(x[0]), by16, _mm256_extracti128_si256(x[0], 1));
    for (int i = 1; i < 4; i++) {
        y = fold(y, by16, _mm256_castsi256_si128(x[i]));
        y = fold(y, by16, _mm256_extracti128_si256(x[i], 1));
    }
    for (; len >= STEP; p += STEP, len -= STEP)
        y = fold(y, by16, load(p));
    return reduce(y, by16);
}

#endif

static uint32_t plain(uint32_t crc, const void *data, size_t len)
{
    return len ? (uint32_t)crc32_z(crc, data, len) : crc;
}

#if defined(__x86_64__)
static uint32_t folded(uint32_t crc, const void *data, size_t len)
{
    size_t part = len >= FOLD ? len - len % STEP : 0;

    if (part)
        crc = ~by_folding(~crc, data, part);
    return plain(crc, (const char *)data + part, len - part);
}

static uint32_t folded_wide(uint32_t crc, const void *data, size_t len)
{
    size_t part = len - len % STEP;

    if (len < WIDE)
        return folded(crc, data, len);
    crc = ~by_wide_folding(~crc, data, part);
    return plain(crc, (const char *)data + part, len - part);
}
#endif

crc32_fn *crc32_way(unsigned i)
{
#if defined(__x86_64__)
    bool folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");

    if (i == 1 && folds)
        return folded;
    if (i == 2 && folds && wide)
        return folded_wide;
#endif
    return i == 0 ? plain : NULL;
}

uint32_t crc32_zip(uint32_t crc, const void *data, size_t len)
{
    crc32_fn *way = crc32_way(2);

    if (!way)
        way = crc32_way(1);
    return way ? way(crc, data, len) : plain(crc, data, len);
}
