/* SPDX-License-Identifier: MIT */
/* gpu/stats_rows_avx512.c - the passes of stats_rows.h by vectors of 512 bits. */
#include "gpu/stats_rows.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <math.h>

/*
 * Without the address sanitizer: what its runtime keeps of stacks for uses after a return is
 * aligned to 32 bytes by gcc 12, and these vectors to 64.
 */
#define AVX512 __attribute__((target("avx512f,avx512bw"), no_sanitize_address))

/* Sixteen sums in two vectors, and back for what is left. */
enum { HALVES = STATS_LANES / 8, BYTES = 64 };

AVX512 static void lanes_store(struct row_lanes *l, const __m512d sum[HALVES])
{
    for (int k = 0; k < HALVES; k++)
        _mm512_storeu_pd(l->sum + 8 * k, sum[k]);
}

AVX512 static void ends_f32(const float *v, size_t n, struct row_ends *out)
{
    __m512 low = _mm512_set1_ps(v[0]), high = low;
    __m512d sum[HALVES] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    struct row_lanes l;
    uint64_t zero = 0;
    size_t i = 0;

    for (; i + STATS_LANES <= n; i += STATS_LANES) {
        __m512 x = _mm512_loadu_ps(v + i);

        low = _mm512_min_ps(x, low);
        high = _mm512_max_ps(x, high);
        zero += (unsigned)__builtin_popcount(
            _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ));
        for (int k = 0; k < HALVES; k++)
            sum[k] =
                _mm512_add_pd(sum[k], _mm512_cvtps_pd(_mm256_loadu_ps(v + i + 8 * k)));
    }
    lanes_store(&l, sum);
    *out = (struct row_ends){.min = (double)_mm512_reduce_min_ps(low),
                             .max = (double)_mm512_reduce_max_ps(high),
                             .zero = zero};
    for (; i < n; i++)
        row_ends_add(out, &l, i, (double)v[i]);
    out->sum = row_lanes_sum(&l);
}

AVX512 static void ends_f64(const double *v, size_t n, struct row_ends *out)
{
    __m512d low = _mm512_set1_pd(v[0]), high = low;
    __m512d sum[HALVES] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    struct row_lanes l;
    uint64_t zero = 0;
    size_t i = 0;

    for (; i + STATS_LANES <= n; i += STATS_LANES) {
        for (int k = 0; k < HALVES; k++) {
            __m512d x = _mm512_loadu_pd(v + i + 8 * k);

            low = _mm512_min_pd(x, low);
            high = _mm512_max_pd(x, high);
            zero += (unsigned)__builtin_popcount(
                _mm512_cmp_pd_mask(x, _mm512_setzero_pd(), _CMP_EQ_OQ));
            sum[k] = _mm512_add_pd(sum[k], x);
        }
    }
    lanes_store(&l, sum);
    *out = (struct row_ends){.min = _mm512_reduce_min_pd(low),
                             .max = _mm512_reduce_max_pd(high),
                             .zero = zero};
    for (; i < n; i++)
        row_ends_add(out, &l, i, v[i]);
    out->sum = row_lanes_sum(&l);
}

enum { DOWN = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC };

/* What is too small for the product is below zero all the same. */
AVX512 static double bins_f32(const float *v, size_t n, double mean,
                              const struct row_grid *g, uint8_t *bin)
{
    const __m512 factor = _mm512_set1_ps(ldexpf(1, -g->exponent)),
                 none = _mm512_setzero_ps();
    const __m512i first = _mm512_set1_epi32(g->first), one = _mm512_set1_epi32(1);
    const __m512d middle = _mm512_set1_pd(mean);
    __m512d sum[HALVES] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    struct row_lanes l;
    size_t i = 0;

    for (; i + STATS_LANES <= n; i += STATS_LANES) {
        __m512 x = _mm512_loadu_ps(v + i), y = _mm512_mul_ps(x, factor);
        __m512i at = _mm512_sub_epi32(_mm512_cvt_roundps_epi32(y, DOWN), first);
        __mmask16 lost = _mm512_mask_cmp_ps_mask(
            _mm512_cmp_ps_mask(y, none, _CMP_EQ_OQ), x, none, _CMP_LT_OQ);

        at = _mm512_mask_sub_epi32(at, lost, at, one);
        _mm_storeu_si128((__m128i *)(void *)(bin + i), _mm512_cvtepi32_epi8(at));
        for (int k = 0; k < HALVES; k++) {
            __m512d apart =
                _mm512_sub_pd(_mm512_cvtps_pd(_mm256_loadu_ps(v + i + 8 * k)), middle);

            sum[k] = _mm512_add_pd(sum[k], _mm512_mul_pd(apart, apart));
        }
    }
    lanes_store(&l, sum);
    for (; i < n; i++)
        l.sum[i % STATS_LANES] +=
            stats_rows_portable.bins_f32(v + i, 1, mean, g, bin + i);
    return row_lanes_sum(&l);
}

AVX512 static double bins_f64(const double *v, size_t n, double mean,
                              const struct row_grid *g, uint8_t *bin)
{
    const __m512d factor = _mm512_set1_pd(ldexp(1, -g->exponent)),
                  none = _mm512_setzero_pd(), middle = _mm512_set1_pd(mean);
    const __m512i first = _mm512_set1_epi64(g->first), one = _mm512_set1_epi64(1);
    __m512d sum[HALVES] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
    struct row_lanes l;
    size_t i = 0;

    for (; i + STATS_LANES <= n; i += STATS_LANES) {
        for (int k = 0; k < HALVES; k++) {
            __m512d x = _mm512_loadu_pd(v + i + 8 * k), y = _mm512_mul_pd(x, factor);
            __m512d apart = _mm512_sub_pd(x, middle);
            __m256i down = _mm512_cvt_roundpd_epi32(y, DOWN);
            __m512i at = _mm512_sub_epi64(_mm512_cvtepi32_epi64(down), first);
            __mmask8 lost = _mm512_mask_cmp_pd_mask(
                _mm512_cmp_pd_mask(y, none, _CMP_EQ_OQ), x, none, _CMP_LT_OQ);

            at = _mm512_mask_sub_epi64(at, lost, at, one);
            _mm_storel_epi64((__m128i *)(void *)(bin + i + 8 * k),
                             _mm512_cvtepi64_epi8(at));
            sum[k] = _mm512_add_pd(sum[k], _mm512_mul_pd(apart, apart));
        }
    }
    lanes_store(&l, sum);
    for (; i < n; i++)
        l.sum[i % STATS_LANES] +=
            stats_rows_portable.bins_f64(v + i, 1, mean, g, bin + i);
    return row_lanes_sum(&l);
}

/* Eight bins at a time; a byte counts up once a step at most, and is added up once. */
_Static_assert(STATS_BLOCK / BYTES <= UINT8_MAX, "a byte counts a block");

AVX512 static void count_eight(const uint8_t *bin, size_t n, unsigned first,
                               uint64_t out[8])
{
    const __m512i one = _mm512_set1_epi8(1);
    __m512i some[8], which[8];

    for (unsigned k = 0; k < 8; k++) {
        some[k] = _mm512_setzero_si512();
        which[k] = _mm512_set1_epi8((char)(first + k));
    }
    for (size_t i = 0; i < n; i += BYTES) {
        __m512i b = _mm512_loadu_si512(bin + i);

        for (unsigned k = 0; k < 8; k++)
            some[k] = _mm512_mask_add_epi8(some[k], _mm512_cmpeq_epi8_mask(b, which[k]),
                                           some[k], one);
    }
    for (unsigned k = 0; k < 8; k++)
        out[k] = (uint64_t)_mm512_reduce_add_epi64(
            _mm512_sad_epu8(some[k], _mm512_setzero_si512()));
}

static void count(const uint8_t *bin, size_t n, unsigned bins, uint64_t *out)
{
    stats_rows_count(bin, n, bins, out, BYTES, count_eight);
}

const struct stats_rows stats_rows_avx512 = {
    .ends_f32 = ends_f32,
    .ends_f64 = ends_f64,
    .bins_f32 = bins_f32,
    .bins_f64 = bins_f64,
    .count = count,
};

#endif
