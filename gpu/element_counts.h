/* SPDX-License-Identifier: MIT */
/* gpu/element_counts.h - how often each pattern of a short element type occurs. */
#ifndef UFS_GPU_ELEMENT_COUNTS_H
#define UFS_GPU_ELEMENT_COUNTS_H

#include "gpu/element_stats.h"

struct element_counts;

/*
 * Types of one and two bytes have so few patterns that counting them costs less than
 * computing with each element: what they add up to is then computed from the counts, the
 * same on every processor.
 */
bool element_is_counted(const struct element_decoder *d);

/* All counts are 0. About 1 MiB; NULL: out of memory. Belongs to one thread at a time. */
struct element_counts *element_counts_new(void);
void element_counts_free(struct element_counts *c); /* NULL is fine */

/* Counts `units` storage units at src: 2^28 at most until they are taken. */
void element_counts_add(struct element_counts *c, const struct element_decoder *d,
                        const void *src, size_t units);

/* Adds what was counted since the last time, all by this decoder, to `s`; it is 0 again. */
void element_counts_take(struct element_counts *c, const struct element_decoder *d,
                         struct element_stats *s);

#endif
