/* SPDX-License-Identifier: MIT */
/*
 * gpu/stats_rows.c - the passes of stats_rows.h, in loops that compilers turn into vectors.
 *
 * However wide these are, a sum is kept in STATS_LANES: that fixes the order of additions,
 * and with it the bits.
 */
#include "gpu/stats_rows.h"

#include <math.h>

#include "gpu/vectors.h"

static double lanes_sum(const double lane[STATS_LANES])
{
    double sum = 0;

    for (int k = 0; k < STATS_LANES; k++)
        sum += lane[k];
    return sum;
}

#define ENDS_STEP(X)                                                                   \
    low[k] = (X) < low[k] ? (X) : low[k];                                              \
    high[k] = (X) > high[k] ? (X) : high[k];                                           \
    zero[k] += (X) == 0;                                                               \
    sum[k] += (double)(X);

/* COUNT is as wide as TYPE: compares of one are added to the other. */
#define ENDS(NAME, TYPE, COUNT)                                                        \
    WIDE_VECTORS void NAME(const TYPE *v, size_t n, struct row_ends *out)              \
    {                                                                                  \
        TYPE low[STATS_LANES], high[STATS_LANES];                                      \
        COUNT zero[STATS_LANES] = {0};                                                 \
        double sum[STATS_LANES] = {0};                                                 \
        size_t whole = n - n % STATS_LANES;                                            \
                                                                                       \
        for (int k = 0; k < STATS_LANES; k++)                                          \
            low[k] = high[k] = v[0];                                                   \
        for (size_t i = 0; i < whole; i += STATS_LANES)                                \
            for (int k = 0; k < STATS_LANES; k++) {                                    \
                ENDS_STEP(v[i + k])                                                    \
            }                                                                          \
        for (size_t k = 0; k < n - whole; k++) {                                       \
            ENDS_STEP(v[whole + k])                                                    \
        }                                                                              \
        *out =                                                                         \
            (struct row_ends){.min = low[0], .max = high[0], .sum = lanes_sum(sum)};   \
        for (int k = 0; k < STATS_LANES; k++) {                                        \
            out->min = MIN(out->min, (double)low[k]);                                  \
            out->max = MAX(out->max, (double)high[k]);                                 \
            out->zero += zero[k];                                                      \
        }                                                                              \
    }

ENDS(stats_ends_f32, float, uint32_t)
ENDS(stats_ends_f64, double, uint64_t)

/* floor(v * factor); what is too small for the product keeps its sign as it is. */
#define BINS(NAME, TYPE, LDEXP)                                                        \
    WIDE_VECTORS double NAME(const TYPE *v, size_t n, double mean,                     \
                             const struct row_grid *g, uint8_t *bin)                   \
    {                                                                                  \
        const TYPE factor = LDEXP(1, -g->exponent);                                    \
        const int first = g->first;                                                    \
        double sum[STATS_LANES] = {0};                                                 \
        size_t whole = n - n % STATS_LANES;                                            \
                                                                                       \
        for (size_t i = 0; i < n; i++) {                                               \
            TYPE x = v[i] * factor == 0 ? v[i] : v[i] * factor;                        \
            int down = (int)x;                                                         \
                                                                                       \
            bin[i] = (uint8_t)(down - (x < (TYPE)down ? first + 1 : first));           \
        }                                                                              \
        for (size_t i = 0; i < whole; i += STATS_LANES)                                \
            for (int k = 0; k < STATS_LANES; k++)                                      \
                sum[k] += ((double)v[i + k] - mean) * ((double)v[i + k] - mean);       \
        for (size_t k = 0; k < n - whole; k++)                                         \
            sum[k] += ((double)v[whole + k] - mean) * ((double)v[whole + k] - mean);   \
        return lanes_sum(sum);                                                         \
    }

BINS(stats_bins_f32, float, ldexpf)
BINS(stats_bins_f64, double, ldexp)

/* A few bins at a time, each by bytes side by side that are added up once per block. */
enum { ROWS = 4, COLUMNS = 32 };
_Static_assert(STATS_BLOCK / COLUMNS <= UINT8_MAX, "a byte counts a block");

WIDE_VECTORS void stats_count(const uint8_t *bin, size_t n, unsigned bins,
                              uint64_t *count)
{
    size_t whole = n - n % COLUMNS;

    for (unsigned first = 0; first < bins; first += ROWS) {
        uint8_t some[ROWS][COLUMNS] = {0};

        for (size_t i = 0; i < whole; i += COLUMNS)
            for (unsigned b = 0; b < ROWS; b++)
                for (int k = 0; k < COLUMNS; k++)
                    some[b][k] =
                        (uint8_t)(some[b][k] + (bin[i + k] == (uint8_t)(first + b)));
        for (unsigned b = 0; b < MIN((unsigned)ROWS, bins - first); b++) {
            uint64_t all = 0;

            for (int k = 0; k < COLUMNS; k++)
                all += some[b][k];
            for (size_t i = whole; i < n; i++)
                all += bin[i] == first + b;
            count[first + b] += all;
        }
    }
}
