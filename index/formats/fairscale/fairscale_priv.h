/* SPDX-License-Identifier: MIT */
/* index/formats/fairscale/fairscale_priv.h - the shards of a model part, and flat parameters in them. */
#ifndef UFS_INDEX_FORMATS_FAIRSCALE_FAIRSCALE_PRIV_H
#define UFS_INDEX_FORMATS_FAIRSCALE_FAIRSCALE_PRIV_H

#include "base/arena.h"
#include "base/buf.h"
#include "index/formats/fairscale/fairscale_metadata.h"
#include "index/formats/fairscale/fairscale_names.h"
#include "index/formats/ranks/rank_files.h"
#include "index/sink.h"

struct scan_context;

/* What the file of one rank has beside the tensors of its model. */
struct shard {
    struct rank_tensors optim; /* of last_optimizer_state */
    uint64_t *padding;         /* by parameter; NULL: nothing was read */
};

/* The shards of one model-parallel part. */
struct model_part {
    uint32_t number, shards;
    struct rank_file *file; /* by shard */
    struct shard *shard;
    struct fairscale_metadata meta; /* of the first one that can be read */
    const struct rank_file *first;  /* that one, or NULL */
    bool named;               /* the optimizer's numbers are those of meta.param */
    struct flat_piece *piece; /* room for one of each shard */
};

struct fairscale {
    const struct scan_context *c;
    struct sink *sink;
    struct arena *arena;
    const char *main; /* a file of the checkpoint */
    struct shard_name name;
    struct model_part *part; /* by number */
    uint32_t parts;
    bool has_step;
    int64_t step;
    uint64_t raw, own, unknown; /* tensors that are shown as they are stored */
    char first_unknown[128];
};

/* The elements [begin, begin + count) of a flat tensor: what one rank has of it. */
struct flat_piece {
    const struct rank_file *file;
    const struct rank_tensor *x; /* NULL: the file has none, or is missing */
    uint64_t begin, count;
};

/* A flat tensor, put together of all ranks'. */
struct flat_tensor {
    const struct flat_piece *piece;
    uint32_t pieces;
    const struct rank_tensor *like; /* one that is there, or NULL */
    uint64_t have, total;           /* elements: of all these ranks, and of the whole */
    char why[300];                  /* why it cannot be read; "": it can */
};

/*
 * Finds what the ranks have of parameter p of a part under the name `key`: of their models,
 * or of their optimizers. It stands until the next call for that part.
 */
void flat_tensor_find(struct model_part *part, size_t p, bool optimizer,
                      const char *key, size_t len, struct flat_tensor *out);

/* The same of one rank alone, where each has a parameter of its own. */
void flat_tensor_own(struct model_part *part, size_t p, uint32_t shard,
                     struct flat_tensor *out);

/*
 * Reports a member as a tensor: `t` says key, part and role. -EEXIST when that key is there
 * already.
 */
int flat_member_report(struct sink *sink, const struct flat_tensor *flat,
                       const struct flat_member *m, struct sink_tensor *t,
                       struct err *e);

/* One model part's member of a tensor that parts have cut. */
struct flat_slice {
    struct flat_tensor flat;
    const struct flat_member *m;
};

/* Reports the tensor that n parts have cut by `rule` (RANK_SAME: the first one's). */
int flat_slices_report(struct sink *sink, enum rank_rule rule,
                       const struct flat_slice *slice, uint32_t n,
                       struct sink_tensor *t, struct err *e);

/* Reports what one part holds; of several parts each under its own keys. */
int fairscale_report_part(struct fairscale *f, struct model_part *part, struct err *e);

/* Reports what several parts are pieces of. */
int fairscale_merge_parts(struct fairscale *f, struct err *e);

/* "12.exp_avg" of the optimizer's "state.12.exp_avg": the number, and where the rest starts. */
bool fairscale_state_name(const struct rank_tensor *x, uint64_t *number,
                          const char **rest);

#endif
