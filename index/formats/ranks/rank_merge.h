/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/rank_merge.h - one tensor put together of what the ranks' files have. */
#ifndef UFS_INDEX_FORMATS_RANKS_RANK_MERGE_H
#define UFS_INDEX_FORMATS_RANKS_RANK_MERGE_H

#include "index/formats/ranks/rank_boxes.h"
#include "index/formats/ranks/rank_tensors.h"

struct err;
struct sink;
struct sink_tensor;
struct torch_file;

/* How tensor-parallel ranks have cut a tensor. */
enum rank_rule {
    RANK_UNKNOWN, /* nothing tells: not for rank_merge() */
    RANK_SAME,    /* every rank has all of it */
    RANK_ROWS,    /* dimension 0 */
    RANK_COLUMNS, /* dimension 1 */
    RANK_HALVES, /* dimension 0: each rank has [a; b], the whole is all a, then all b */
    RANK_THIRDS, /* the same of three */
    RANK_SUM,    /* the whole is the sum of what the ranks have */
};

/* What one rank has. */
struct rank_part {
    const struct torch_file *file;
    const struct rank_tensor *x; /* NULL: nothing */
    const char *why;             /* then: in words */
};

/* The cut of ROWS, COLUMNS, HALVES and THIRDS. */
struct rank_cut rank_rule_cut(enum rank_rule rule);

/*
 * Are the pieces alike but along the cut, and can they be cut so? *whole: the size of the
 * whole along the axis.
 */
bool rank_parts_fit(const struct rank_part *part, uint32_t n,
                    const struct rank_cut *cut, uint64_t *whole);

/* The chunks of one rank's piece, `before` along the axis, of `whole`. */
int rank_part_report(struct sink *sink, const struct rank_part *part,
                     const struct rank_cut *cut, uint64_t before, uint64_t whole,
                     struct err *e);

/*
 * Reports the tensor of n > 0 ranks: `t` says key, part, role and wrapper, the rest is
 * filled in. What is missing or does not fit is its fault. Copies of RANK_SAME are for
 * `verify` to compare, sums are made when they are read. -EEXIST when that key is there
 * already.
 */
int rank_merge(struct sink *sink, enum rank_rule rule, const struct rank_part *part,
               uint32_t n, struct sink_tensor *t, struct err *e);

/* Reports one rank's tensor as its file has it, whatever it is a piece of. */
int rank_report_alone(struct sink *sink, const struct rank_part *part,
                      struct sink_tensor *t, struct err *e);

#endif
