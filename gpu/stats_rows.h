/* SPDX-License-Identifier: MIT */
/* gpu/stats_rows.h - passes over one block of finite numbers: what element_stats.c adds up. */
#ifndef UFS_GPU_STATS_ROWS_H
#define UFS_GPU_STATS_ROWS_H

#include "base/base.h"

enum {
    STATS_BLOCK =
        4096, /* numbers at a time: they stay in the first cache for all passes */
    /*
     * Sums side by side, number i to lane i % STATS_LANES, put together in the order of
     * lanes: so every processor gives the same bits.
     */
    STATS_LANES = 16,
};

struct row_ends {
    double min, max, sum;
    uint64_t zero;
};

/* Bin k counts x of [first + k, first + k + 1) * 2^exponent. */
struct row_grid {
    int exponent, first;
};

/*
 * A set of them for all processors and others by vectors; `n` is 1 to STATS_BLOCK. A sum of
 * numbers that are not all finite is not finite (of F64: nor is one that is too large), and
 * then the other ends mean nothing.
 */
struct stats_rows {
    void (*ends_f32)(const float *v, size_t n, struct row_ends *out);
    void (*ends_f64)(const double *v, size_t n, struct row_ends *out);

    /*
     * The number of each one's bin to bin[0..n), and the sum of (x - mean)^2. Every number
     * is within the grid, within 2^11 times 2^exponent of zero; of F32 the exponent is
     * from -126 to 126.
     */
    double (*bins_f32)(const float *v, size_t n, double mean, const struct row_grid *g,
                       uint8_t *bin);
    double (*bins_f64)(const double *v, size_t n, double mean, const struct row_grid *g,
                       uint8_t *bin);

    /* count[k] += how many of bin[0..n) are k, for k below `bins` <= 256. */
    void (*count)(const uint8_t *bin, size_t n, unsigned bins, uint64_t *count);
};

extern const struct stats_rows stats_rows_portable;

/* The fastest that this processor runs. */
const struct stats_rows *stats_rows_best(void);

/* Of STATS_WAYS, the slowest first; NULL: not on this processor. */
enum { STATS_WAYS = 3 };
const struct stats_rows *stats_rows_way(unsigned i);

/* For those by vectors: the lanes of what is left behind its last whole step. */
struct row_lanes {
    double sum[STATS_LANES];
};
double row_lanes_sum(const struct row_lanes *l);

/* Number i of them. */
static inline void row_ends_add(struct row_ends *out, struct row_lanes *l, size_t i,
                                double x)
{
    out->min = MIN(out->min, x);
    out->max = MAX(out->max, x);
    out->zero += x == 0;
    l->sum[i % STATS_LANES] += x;
}

/* The same: as count(), by `step` bins at a time, `eight` of their values at a time. */
void stats_rows_count(const uint8_t *bin, size_t n, unsigned bins, uint64_t *count,
                      size_t step,
                      void (*eight)(const uint8_t *bin, size_t n, unsigned first,
                                    uint64_t out[8]));

#if defined(__x86_64__)
extern const struct stats_rows stats_rows_avx2, stats_rows_avx512;
#endif

#endif
