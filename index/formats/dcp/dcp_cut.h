/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_cut.h - which box of which tensor a rank gets when one is written. */
#ifndef UFS_INDEX_FORMATS_DCP_DCP_CUT_H
#define UFS_INDEX_FORMATS_DCP_DCP_CUT_H

#include "base/base.h"
#include "index/shape.h"

struct arena;
struct err;
struct layout_cuts;
struct layout_input;
struct layout_options;

/*
 * Ranks stand in a grid of along[0] rows and along[1] columns; rank = row * along[1] +
 * column. Dimension 0 is cut for the rows and dimension 1 for the columns, each as
 * torch.chunk does it (and FSDP2 with it: torch/distributed/fsdp/_fully_shard,
 * Shard(0)): pieces of ceil(size / ranks), the last one smaller, none for the ranks
 * behind. A tensor that brings its cuts (struct layout_cuts) keeps them, where the
 * format holds any boxes. What cannot be cut (0-d, or without elements) is whole on the
 * rank that has the fewest bytes; what has no dimension 1 is on one column, the one
 * with the fewest.
 */
struct dcp_cut {
    uint32_t along[2], ranks;
    const size_t *chosen; /* tensors of the input that are written, in its order */
    size_t count;
    uint32_t *home; /* of each: the rank of what is whole, the column of what is 1-d */
    const struct layout_cuts **own; /* of each: those that it keeps, or NULL */
    const struct layout_batch *
        *batch; /* of each, or NULL: batches are cut each by itself */
    /* The numbers that files of a rank have, each once, ascending; 0 is the first. */
    uint32_t *number, numbers;
};

struct dcp_share {
    uint32_t rank, number; /* of its file: the rank's files are numbered */
    uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS]; /* units */
};

/*
 * -EINVAL: more ranks than anyone has. `chosen` is borrowed, the lists are the arena's.
 * `keeps`: cuts that tensors bring are kept.
 */
int dcp_cut_new(const struct layout_input *in, const struct layout_options *o,
                bool keeps, const size_t *chosen, size_t count, struct arena *a,
                struct dcp_cut *out, struct err *e);

/*
 * Boxes of the i-th chosen tensor, which has this shape in units; all of them have
 * elements, or it has none.
 */
uint64_t dcp_shares(const struct dcp_cut *cut, size_t i, const struct shape *units);

/* Box n of the i-th chosen tensor, in row-major order of the grid or as they were cut. */
void dcp_share(const struct dcp_cut *cut, size_t i, const struct shape *units,
               uint64_t n, struct dcp_share *out);

/* Which one of all files: a rank's, of this number; less than dcp_files(). */
size_t dcp_file_of(const struct dcp_cut *cut, uint32_t rank, uint32_t number);
size_t dcp_files(const struct dcp_cut *cut);

/* All ranks. */
static inline uint32_t dcp_ranks(const struct dcp_cut *cut)
{
    return cut->ranks;
}

#endif
