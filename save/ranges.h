/* SPDX-License-Identifier: MIT */
/* save/ranges.h - a set of byte ranges: sorted, disjoint, never adjacent. */
#ifndef UFS_SAVE_RANGES_H
#define UFS_SAVE_RANGES_H

#include "base/base.h"

/* [from, to) */
struct range {
    uint64_t from, to;
};

/* All zero: empty. */
struct ranges {
    struct range *range;
    size_t count, cap;
};

void ranges_release(struct ranges *r);

/* Forgets all, and keeps the memory. */
void ranges_clear(struct ranges *r);

/* Adds or removes [from, to); to <= from is nothing. 0 or -ENOMEM (the set is as it was). */
int ranges_add(struct ranges *r, uint64_t from, uint64_t to);
int ranges_remove(struct ranges *r, uint64_t from, uint64_t to);

/* *dst becomes a copy of *src. 0 or -ENOMEM (*dst is as it was). */
int ranges_copy(struct ranges *dst, const struct ranges *src);

/* Are all of these bytes in the set? Is any? An empty range: true, false. */
bool ranges_hold(const struct ranges *r, uint64_t from, uint64_t to);
bool ranges_meet(const struct ranges *r, uint64_t from, uint64_t to);

/* The sum of all lengths. */
uint64_t ranges_bytes(const struct ranges *r);

/*
 * The next range of [*at, end) that is not in the set; *at moves behind it. False: there is
 * none. `for (uint64_t at = 0; ranges_next_gap(r, &at, size, &gap);)`
 */
bool ranges_next_gap(const struct ranges *r, uint64_t *at, uint64_t end,
                     struct range *gap);

#endif
