/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed.h - a DeepSpeed directory reported as a part of a composite. */
#ifndef UFS_INDEX_FORMATS_DEEPSPEED_DEEPSPEED_H
#define UFS_INDEX_FORMATS_DEEPSPEED_DEEPSPEED_H

#include <limits.h>

#include "base/base.h"
#include "index/formats/ranks/rank_merge.h"
#include "index/sink.h"

struct err;
struct listing;
struct rank_file;
struct scan_context;

/* What the names of a directory tell. */
struct deepspeed_found {
    bool universal;   /* zero/NAME/fp32.pt: a universal checkpoint */
    bool layers;      /* layer_LL-model_TT-model_states.pt: saved by a pipeline */
    uint32_t optim;   /* *_optim_states.pt */
    uint32_t model;   /* *_model_states.pt of ranks */
    const char *name; /* one of the files; borrowed from the listing */
};

/*
 * For bids: is it the directory of one save (global_stepN, or any tag), not the one above
 * that has the file `latest`?
 */
bool deepspeed_find(struct listing *l, struct deepspeed_found *out);

/* How the directory is shown. All zero: it is the whole checkpoint. */
struct deepspeed_how {
    const char *dir;  /* relative to the checkpoint's directory; NULL or "": itself */
    const char *part; /* sink_tensor.part of all tensors, or NULL */
    /*
     * enum role of NAME, the full weights (fp32 where there are masters): ROLE_MODEL, or
     * ROLE_OTHER where the caller has the model from elsewhere already.
     */
    int weights;
    const char *object; /* before the keys of objects, or NULL */
    /*
     * NULL, or: only the optimizer's files are reported, of a pipeline whose module the
     * caller has: masters are optimizer.state.NAME.fp32. Tells how n tensor-parallel ranks,
     * which have the parameters of these names and shapes, have cut `x` of one of them.
     * Of sums, and where it is not known, each rank's is mp_rank_RR/KEY.
     */
    enum rank_rule (*rule)(const struct rank_tensor *x, const struct rank_file *files,
                           uint32_t n);
};

/* What the files told. */
struct deepspeed_told {
    const char *format; /* "deepspeed-zero2", "deepspeed-universal", ...; static */
    uint64_t files, data_ranks, model_ranks;
    uint64_t tensor_ranks; /* of the model ranks: that slice tensors; 0: not told */
    bool has_step;
    int64_t step;
    char version[32];        /* of DeepSpeed, or "" */
    char metadata[PATH_MAX]; /* the first file of model states, relative to the store */
};

/*
 * Reports all tensors, objects and oddities of the directory and hides its files; does not
 * declare it a part (sink_part). Keys are NAME for the full weights, module.NAME for the
 * copy that the model computed with (stages 0 to 2), optimizer.state.NAME.STATE, and
 * FILE:PATH for what else is a tensor. `told` is filled in as far as it got, also on
 * failure: -EBADMSG where anything could come out wrong, -ENOTSUP for layouts that are
 * refused by name.
 */
int deepspeed_report(const struct scan_context *c, struct sink *sink,
                     const struct deepspeed_how *how, struct deepspeed_told *told,
                     struct err *e);

#endif
