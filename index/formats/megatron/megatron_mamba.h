/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_mamba.h - how tensor ranks have cut Mamba's mixer. */
#ifndef UFS_INDEX_FORMATS_MEGATRON_MAMBA_H
#define UFS_INDEX_FORMATS_MEGATRON_MAMBA_H

#include "base/base.h"

struct rank_tensor;
struct rank_tensors;

enum mamba_cut {
    MAMBA_NONE,    /* no tensor of a mixer, or its sizes are not a mixer's */
    MAMBA_ROWS,    /* dimension 0 */
    MAMBA_COLUMNS, /* dimension 1 */
    MAMBA_BLOCKS,  /* dimension 0: each rank has its part of each block */
};

enum { MAMBA_MAX_BLOCKS = 5 };

struct mamba_blocks {
    size_t count;
    uint64_t rows[MAMBA_MAX_BLOCKS]; /* of one rank */
};

/*
 * Goes by the sizes of the mixer's other tensors on the same rank; *blocks is filled in for
 * MAMBA_BLOCKS.
 */
enum mamba_cut megatron_mamba_cut(const struct rank_tensors *model,
                                  const struct rank_tensor *x,
                                  struct mamba_blocks *blocks);

#endif
