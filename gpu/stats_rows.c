/* SPDX-License-Identifier: MIT */
/* gpu/stats_rows.c - the passes in plain C, and the choice between them and vectors. */
#include "gpu/stats_rows.h"

#include <math.h>

double row_lanes_sum(const struct row_lanes *l)
{
    double sum = 0;

    for (int k = 0; k < STATS_LANES; k++)
        sum += l->sum[k];
    return sum;
}

#define ENDS_ROW(NAME, TYPE)                                                           \
    static void NAME(const TYPE *v, size_t n, struct row_ends *out)                    \
    {                                                                                  \
        struct row_lanes l = {0};                                                      \
        TYPE low = v[0], high = v[0];                                                  \
        uint64_t zero = 0;                                                             \
                                                                                       \
        for (size_t i = 0; i < n; i++) {                                               \
            low = v[i] < low ? v[i] : low;                                             \
            high = v[i] > high ? v[i] : high;                                          \
            zero += v[i] == 0;                                                         \
            l.sum[i % STATS_LANES] += (double)v[i];                                    \
        }                                                                              \
        *out = (struct row_ends){                                                      \
            .min = low, .max = high, .sum = row_lanes_sum(&l), .zero = zero};          \
    }

ENDS_ROW(ends_f32, float)
ENDS_ROW(ends_f64, double)

/* What is too small for the product is in the bin of 0, or in the one below. */
#define BINS_ROW(NAME, TYPE, LDEXP)                                                    \
    static double NAME(const TYPE *v, size_t n, double mean, const struct row_grid *g, \
                       uint8_t *bin)                                                   \
    {                                                                                  \
        const TYPE factor = LDEXP(1, -g->exponent);                                    \
        struct row_lanes l = {0};                                                      \
                                                                                       \
        for (size_t i = 0; i < n; i++) {                                               \
            double apart = (double)v[i] - mean;                                        \
            TYPE x = v[i] * factor;                                                    \
            int whole = (int)x;                                                        \
                                                                                       \
            whole -= x < (TYPE)whole || (x == 0 && v[i] < 0); /* floor() */            \
            bin[i] = (uint8_t)(whole - g->first);                                      \
            l.sum[i % STATS_LANES] += apart * apart;                                   \
        }                                                                              \
        return row_lanes_sum(&l);                                                      \
    }

BINS_ROW(bins_f32, float, ldexpf)
BINS_ROW(bins_f64, double, ldexp)

static void count(const uint8_t *bin, size_t n, unsigned bins, uint64_t *out)
{
    uint32_t some[256] = {0};

    for (size_t i = 0; i < n; i++)
        some[bin[i]]++;
    for (unsigned k = 0; k < bins; k++)
        out[k] += some[k];
}

void stats_rows_count(const uint8_t *bin, size_t n, unsigned bins, uint64_t *out,
                      size_t step,
                      void (*eight)(const uint8_t *bin, size_t n, unsigned first,
                                    uint64_t out[8]))
{
    size_t whole = n - n % step;

    for (unsigned first = 0; first < bins; first += 8) {
        uint64_t some[8];

        eight(bin, whole, first, some);
        for (unsigned k = 0; k < MIN(8u, bins - first); k++)
            out[first + k] += some[k];
    }
    count(bin + whole, n - whole, bins, out);
}

const struct stats_rows stats_rows_portable = {
    .ends_f32 = ends_f32,
    .ends_f64 = ends_f64,
    .bins_f32 = bins_f32,
    .bins_f64 = bins_f64,
    .count = count,
};

const struct stats_rows *stats_rows_way(unsigned i)
{
    if (i == 0)
        return &stats_rows_portable;
#if defined(__x86_64__)
    if (i == 1 && __builtin_cpu_supports("avx2"))
        return &stats_rows_avx2;
    if (i == 2 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw"))
        return &stats_rows_avx512;
#endif
    return NULL;
}

const struct stats_rows *stats_rows_best(void)
{
    const struct stats_rows *best = NULL;

    for (unsigned i = STATS_WAYS; !best && i-- > 0;)
        best = stats_rows_way(i);
    return best;
}
