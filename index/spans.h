/* SPDX-License-Identifier: MIT */
/* index/spans.h - few large reads that cover many small runs. */
#ifndef UFS_INDEX_SPANS_H
#define UFS_INDEX_SPANS_H

#include "base/base.h"

struct err;
struct plan_run;

/* Bytes [off, off + len) of the source that runs call `tag`. */
struct span {
    uint32_t tag;
    uint64_t off, len;
};

struct span_list {
    struct span *span; /* malloc; sorted by tag, then offset; no two overlap */
    size_t count;
};

void span_list_release(struct span_list *l);

/*
 * Covers all runs; two are joined when at most `gap` bytes lie between them, and no span
 * is longer than `max` unless one run is, or runs that overlap (0: no limit). A strided
 * run (count > 1) counts as its copies, each joined by the same rule. Time is
 * n log n in the copies, memory that of runs and spans.
 */
int spans_cover(const struct plan_run *run, size_t n, uint64_t gap, uint64_t max,
                struct span_list *out, struct err *e);

/* The span that holds byte `off` of source `tag` (it is covered), by binary search. */
size_t spans_find(const struct span_list *l, uint32_t tag, uint64_t off);

#endif
