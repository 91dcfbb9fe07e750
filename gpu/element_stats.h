/* SPDX-License-Identifier: MIT */
/* gpu/element_stats.h - what the numbers of a tensor add up to, in one pass. */
#ifndef UFS_GPU_ELEMENT_STATS_H
#define UFS_GPU_ELEMENT_STATS_H

#include "gpu/elements.h"

enum { STATS_BINS_MAX = 24 }; /* bins of the histogram */

/*
 * Of a part of a tensor, or of all of it; starts as element_stats_init() makes it. Minimum,
 * maximum, mean and deviation are those of the finite numbers. All in doubles, by blocks
 * whose means and squares are put together (Chan, Golub, LeVeque), so that a large mean
 * costs no digits; the same windows in the same order give the same bits, whatever number
 * of threads read them, on any processor.
 */
struct element_stats {
    uint64_t numbers, nan, inf, zero; /* numbers: with nan and inf */
    double min, max, mean;
    double squares; /* sum of (x - mean)^2 */
    bool wide;      /* of I64 and U64, whose ends doubles do not hold: */
    uint64_t low,
        high; /* their minimum and maximum, I64 with the top bit turned over */
    /*
     * Bin i counts x of [first + i, first + i + 1) * 2^exponent. The width is the least
     * power of two that covers all numbers with STATS_BINS_MAX bins, and not less than
     * 2^-11 of the largest: it grows by doubling, which puts each two bins together and so
     * stays exact.
     */
    int exponent, first;
    unsigned bins;
    uint64_t bin[STATS_BINS_MAX];
};

void element_stats_init(struct element_stats *s);

/* Adds `units` storage units at src. */
void element_stats_add(struct element_stats *s, const struct element_decoder *d,
                       const void *src, size_t units);

/*
 * Numbers of which the i-th occurs count[i] times. Finite ones; floats hold them exactly,
 * and each product with its count is exact in a double: up to 2^29 numbers in all.
 */
struct counted_number {
    float value;
    uint32_t count;
};
void element_stats_add_counted(struct element_stats *s, const struct counted_number *v,
                               size_t n);

/* Adds what `from` holds behind what `s` holds. */
void element_stats_merge(struct element_stats *s, const struct element_stats *from);

uint64_t element_stats_finite(const struct element_stats *s);

/* Of all numbers, not of a sample (numpy's ddof=0); 0 of none. */
double element_stats_std(const struct element_stats *s);

/* Bins of equal width, from `from` on: none without a finite number. Counts are exact. */
struct stats_histogram {
    double from, width;
    unsigned n;
    uint64_t count[STATS_BINS_MAX];
};
void element_stats_histogram(const struct element_stats *s,
                             struct stats_histogram *out);

/* Minimum (or maximum) as text that reads back the same. Returns dst. */
const char *element_stats_end(const struct element_stats *s, enum dtype d, bool high,
                              char dst[40]);

#endif
