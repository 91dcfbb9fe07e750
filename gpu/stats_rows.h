/* SPDX-License-Identifier: MIT */
/* gpu/stats_rows.h - passes over one block of finite numbers: what element_stats.c adds up. */
#ifndef UFS_GPU_STATS_ROWS_H
#define UFS_GPU_STATS_ROWS_H

#include "base/base.h"

enum {
    /* numbers at a time: they stay in the first cache for all passes */
    STATS_BLOCK = 4096,
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
 * In all of these `n` is 1 to STATS_BLOCK. A sum of numbers that are not all finite is not
 * finite (of F64: nor is one that is too large), and then the other ends mean nothing.
 */
void stats_ends_f32(const float *v, size_t n, struct row_ends *out);
void stats_ends_f64(const double *v, size_t n, struct row_ends *out);

/*
 * The number of each one's bin to bin[0..n), and the sum of (x - mean)^2. Every number is
 * within the grid, within 2^11 times 2^exponent of zero; of F32 the exponent is from -126
 * to 126.
 */
double stats_bins_f32(const float *v, size_t n, double mean, const struct row_grid *g,
                      uint8_t *bin);
double stats_bins_f64(const double *v, size_t n, double mean, const struct row_grid *g,
                      uint8_t *bin);

/* count[k] += how many of bin[0..n) are k, for k below `bins` <= 256. */
void stats_count(const uint8_t *bin, size_t n, unsigned bins, uint64_t *count);

#endif
