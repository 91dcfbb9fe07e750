/* SPDX-License-Identifier: MIT */
/* index/formats/hf/train_ranks.h - Accelerate's state dicts in a torch.save file a rank. */
#ifndef UFS_INDEX_FORMATS_HF_TRAIN_RANKS_H
#define UFS_INDEX_FORMATS_HF_TRAIN_RANKS_H

#include "base/base.h"
#include "index/formats/hf/train_parts.h"

struct err;
struct listing;
struct rank_set_how;
struct scan_context;
struct sink;

enum {
    TRAIN_MAX_RANK_SETS = 32
}; /* models and optimizers of one Accelerator: 1 or 2 */

/* The files of one model or optimizer. */
struct train_rank_set {
    enum train_kind kind; /* TRAIN_MODEL_RANK, TRAIN_MODEL_LOCAL, TRAIN_OPTIM_RANK */
    uint64_t index;
    uint64_t files, ranks; /* ranks: as the names tell */
};

/* Puts a file into its set. -E2BIG: there are more than TRAIN_MAX_RANK_SETS. */
int train_rank_sets_add(struct train_rank_set *sets, size_t *count,
                        const struct train_part *part);

/*
 * Reports all of a set, merged (rank_set.h). `how` is borrowed. Errors are those of
 * rank_set_load().
 */
int train_ranks_report(const struct scan_context *c, struct sink *sink,
                       const struct train_rank_set *set, const struct rank_set_how *how,
                       struct err *e);

#endif
