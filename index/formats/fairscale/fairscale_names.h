/* SPDX-License-Identifier: MIT */
/* index/formats/fairscale/fairscale_names.h - names of files of metaseq and fairseq, and of parameters. */
#ifndef UFS_INDEX_FORMATS_FAIRSCALE_FAIRSCALE_NAMES_H
#define UFS_INDEX_FORMATS_FAIRSCALE_FAIRSCALE_NAMES_H

#include "index/formats/ranks/rank_merge.h"

/* "checkpoint_3-model_part-0-shard1.pt": metaseq; "checkpoint_last-shard1.pt": fairseq. */
struct shard_name {
    size_t stem; /* bytes of "checkpoint_3" */
    bool has_part;
    uint32_t part, shard;
};

bool shard_name(const char *name, struct shard_name *out);

/* Are both of one checkpoint? */
bool shard_same_stem(const char *a, const struct shard_name *x, const char *b,
                     const struct shard_name *y);

/*
 * How metaseq's model parallelism cuts a parameter (metaseq/scripts/reshard_mp.py): q, k and v
 * are fused in each part. RANK_UNKNOWN: the name does not tell.
 */
enum rank_rule metaseq_rule(const char *name, size_t len);

#endif
