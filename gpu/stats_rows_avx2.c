/* SPDX-License-Identifier: MIT */
/* gpu/stats_rows_avx2.c - the passes of stats_rows.h by vectors of 256 bits. */
#include "gpu/stats_rows.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <math.h>

/* Sixteen sums in four vectors, and back for what is left. */
#define AVX2 __attribute__((target("avx2")))

enum { QUADS = STATS_LANES / 4, BYTES = 32 };

AVX2 static void lanes_store(struct row_lanes *l, const __m256d sum[QUADS])
{
    for (int k = 0; k < QUADS; k++)
        _mm256_storeu_pd(l->sum + 4 * k, sum[k]);
}

AVX2 static void ends_f32(const float *v, size_t n, struct row_ends *out)
{
    __m256 low = _mm256_set1_ps(v[0]), high = low;
    __m256d sum[QUADS] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                          _mm256_setzero_pd()};
    __m256i zero = _mm256_setzero_si256();
    float lows[8], highs[8];
    uint32_t zeros[8];
    struct row_lanes l;
    size_t i = 0;

    for (; i + STATS_LANES <= n; i += STATS_LANES) {
        for (int k = 0; k < 2; k++) {
            __m256 x = _mm256_loadu_ps(v + i + 8 * k);

            low = _mm256_min_ps(x, low);
            high = _mm256_max_ps(x, high);
            zero = _mm256_sub_epi32(zero, _mm256_castps_si256(_mm256_cmp_ps(
                                              x, _mm256_setzero_ps(), _CMP_EQ_OQ)));
        }
        for (int k = 0; k < QUADS; k++)
            sum[k] =
                _mm256_add_pd(sum[k], _mm256_cvtps_pd(_mm_loadu_ps(v + i + 4 * k)));
    }
    lanes_store(&l, sum);
    _mm256_storeu_ps(lows, low);
    _mm256_storeu_ps(highs, high);
    _mm256_storeu_si256((__m256i *)(void *)zeros, zero);
    *out = (struct row_ends){.min = lows[0], .max = highs[0]};
    for (int k = 0; k < 8; k++) {
        out->min = lows[k] < out->min ? lows[k] : out->min;
        out->max = highs[k] > out->max ? highs[k] : out->max;
        out->zero += zeros[k];
    }
    for (; i < n; i++)
        row_ends_add(out, &l, i, (double)v[i]);
    out->sum = row_lanes_sum(&l);
}

AVX2 static void ends_f64(const double *v, size_t n, struct row_ends *out)
{
    __m256d low = _mm256_set1_pd(v[0]), high = low;
    __m256d sum[QUADS] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                          _mm256_setzero_pd()};
    __m256i zero = _mm256_setzero_si256();
    double lows[4], highs[4];
    uint64_t zeros[4];
    struct row_lanes l;
    size_t i = 0;

    for (; i + STATS_LANES <= n; i += STATS_LANES) {
        for (int k = 0; k < QUADS; k++) {
            __m256d x = _mm256_loadu_pd(v + i + 4 * k);

            low = _mm256_min_pd(x, low);
            high = _mm256_max_pd(x, high);
            zero = _mm256_sub_epi64(zero, _mm256_castpd_si256(_mm256_cmp_pd(
                                              x, _mm256_setzero_pd(), _CMP_EQ_OQ)));
            sum[k] = _mm256_add_pd(sum[k], x);
        }
    }
    lanes_store(&l, sum);
    _mm256_storeu_pd(lows, low);
    _mm256_storeu_pd(highs, high);
    _mm256_storeu_si256((__m256i *)(void *)zeros, zero);
    *out = (struct row_ends){.min = lows[0], .max = highs[0]};
    for (int k = 0; k < 4; k++) {
        out->min = lows[k] < out->min ? lows[k] : out->min;
        out->max = highs[k] > out->max ? highs[k] : out->max;
        out->zero += zeros[k];
    }
    for (; i < n; i++)
        row_ends_add(out, &l, i, v[i]);
    out->sum = row_lanes_sum(&l);
}

/* floor(x * factor), where what is too small for the product is below zero all the same. */
AVX2 static inline __m256i floor_f32(__m256 x, __m256 factor)
{
    __m256 y = _mm256_mul_ps(x, factor), none = _mm256_setzero_ps();
    __m256 lost = _mm256_and_ps(_mm256_cmp_ps(y, none, _CMP_EQ_OQ),
                                _mm256_cmp_ps(x, none, _CMP_LT_OQ));

    return _mm256_add_epi32(_mm256_cvttps_epi32(_mm256_floor_ps(y)),
                            _mm256_castps_si256(lost));
}

AVX2 static inline __m128i floor_f64(__m256d x, __m256d factor)
{
    __m256d y = _mm256_mul_pd(x, factor), none = _mm256_setzero_pd();
    __m256d lost = _mm256_and_pd(_mm256_cmp_pd(y, none, _CMP_EQ_OQ),
                                 _mm256_cmp_pd(x, none, _CMP_LT_OQ));
    __m256i wide = _mm256_castpd_si256(lost);
    __m128i low = _mm256_castsi256_si128(wide),
            high = _mm256_extracti128_si256(wide, 1);

    return _mm_add_epi32(_mm256_cvttpd_epi32(_mm256_floor_pd(y)),
                         _mm_castps_si128(_mm_shuffle_ps(
                             _mm_castsi128_ps(low), _mm_castsi128_ps(high), 0x88)));
}

AVX2 static double bins_f32(const float *v, size_t n, double mean,
                            const struct row_grid *g, uint8_t *bin)
{
    const __m256 factor = _mm256_set1_ps(ldexpf(1, -g->exponent));
    const __m256i first = _mm256_set1_epi32(g->first);
    const __m256d middle = _mm256_set1_pd(mean);
    __m256d sum[QUADS] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                          _mm256_setzero_pd()};
    struct row_lanes l;
    size_t i = 0;

    for (; i + STATS_LANES <= n; i += STATS_LANES) {
        __m256i a = floor_f32(_mm256_loadu_ps(v + i), factor);
        __m256i b = floor_f32(_mm256_loadu_ps(v + i + 8), factor);
        __m256i both =
            _mm256_packs_epi32(_mm256_sub_epi32(a, first), _mm256_sub_epi32(b, first));

        for (int k = 0; k < QUADS; k++) {
            __m256d apart =
                _mm256_sub_pd(_mm256_cvtps_pd(_mm_loadu_ps(v + i + 4 * k)), middle);

            sum[k] = _mm256_add_pd(sum[k], _mm256_mul_pd(apart, apart));
        }
        both = _mm256_permute4x64_epi64(both, 0xd8);
        _mm_storeu_si128((__m128i *)(void *)(bin + i),
                         _mm_packus_epi16(_mm256_castsi256_si128(both),
                                          _mm256_extracti128_si256(both, 1)));
    }
    lanes_store(&l, sum);
    for (; i < n; i++)
        l.sum[i % STATS_LANES] +=
            stats_rows_portable.bins_f32(v + i, 1, mean, g, bin + i);
    return row_lanes_sum(&l);
}

AVX2 static double bins_f64(const double *v, size_t n, double mean,
                            const struct row_grid *g, uint8_t *bin)
{
    const __m256d factor = _mm256_set1_pd(ldexp(1, -g->exponent));
    const __m128i first = _mm_set1_epi32(g->first);
    const __m256d middle = _mm256_set1_pd(mean);
    __m256d sum[QUADS] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                          _mm256_setzero_pd()};
    struct row_lanes l;
    size_t i = 0;

    for (; i + STATS_LANES <= n; i += STATS_LANES) {
        __m128i at[QUADS];

        for (int k = 0; k < QUADS; k++) {
            __m256d x = _mm256_loadu_pd(v + i + 4 * k);
            __m256d apart = _mm256_sub_pd(x, middle);

            at[k] = _mm_sub_epi32(floor_f64(x, factor), first);
            sum[k] = _mm256_add_pd(sum[k], _mm256_mul_pd(apart, apart));
        }
        _mm_storeu_si128((__m128i *)(void *)(bin + i),
                         _mm_packus_epi16(_mm_packs_epi32(at[0], at[1]),
                                          _mm_packs_epi32(at[2], at[3])));
    }
    lanes_store(&l, sum);
    for (; i < n; i++)
        l.sum[i % STATS_LANES] +=
            stats_rows_portable.bins_f64(v + i, 1, mean, g, bin + i);
    return row_lanes_sum(&l);
}

/*
 * Eight bins at a time: a byte that counts down takes at most STATS_BLOCK / 32 steps, which
 * it holds, and is added up once.
 */
_Static_assert(STATS_BLOCK / BYTES <= UINT8_MAX, "a byte counts a block");

AVX2 static uint64_t sum_of_bytes(__m256i v)
{
    uint64_t part[4];

    _mm256_storeu_si256((__m256i *)(void *)part,
                        _mm256_sad_epu8(v, _mm256_setzero_si256()));
    return part[0] + part[1] + part[2] + part[3];
}

AVX2 static void count_eight(const uint8_t *bin, size_t n, unsigned first,
                             uint64_t out[8])
{
    __m256i some[8], which[8];

    for (unsigned k = 0; k < 8; k++) {
        some[k] = _mm256_setzero_si256();
        which[k] = _mm256_set1_epi8((char)(first + k));
    }
    for (size_t i = 0; i < n; i += BYTES) {
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(bin + i));

        for (unsigned k = 0; k < 8; k++)
            some[k] = _mm256_sub_epi8(some[k], _mm256_cmpeq_epi8(b, which[k]));
    }
    for (unsigned k = 0; k < 8; k++)
        out[k] = sum_of_bytes(some[k]);
}

static void count(const uint8_t *bin, size_t n, unsigned bins, uint64_t *out)
{
    stats_rows_count(bin, n, bins, out, BYTES, count_eight);
}

const struct stats_rows stats_rows_avx2 = {
    .ends_f32 = ends_f32,
    .ends_f64 = ends_f64,
    .bins_f32 = bins_f32,
    .bins_f64 = bins_f64,
    .count = count,
};

#endif
