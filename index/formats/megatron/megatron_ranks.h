/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_ranks.h - one scan of Megatron-LM's rank files, and its ranks. */
#ifndef UFS_INDEX_FORMATS_MEGATRON_RANKS_H
#define UFS_INDEX_FORMATS_MEGATRON_RANKS_H

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/megatron/megatron.h"
#include "index/formats/ranks/rank_tensors.h"
#include "index/formats/torch/torch_file.h"

struct scan_context;
struct sink;

enum { MEGATRON_MAX_VIRTUAL = 64 };

/* The directory of one rank, "mp_rank_01_003". */
struct rank {
    uint32_t p, e, t;
    unsigned numbers; /* in its name */
    char dir[40];
    char path[64]; /* of its model_optim_rng.pt */
    struct torch_file file;
    struct arena *arena; /* while it is loaded */
    struct rank_tensors
        model[MEGATRON_MAX_VIRTUAL]; /* several with virtual pipelines */
    struct err err;                  /* code 0: it was loaded */
};

/* What args tell, beside the topology. */
struct legacy_args {
    uint64_t layers, heads, groups, experts, expert_tensor;
    bool known, gated, untied;
};

/* Layers of one kind ("decoder.layers."): how many each stage has, and what is before. */
struct layer_kind {
    struct layer_kind *next;
    const char *prefix;
    size_t len;
    uint64_t *count, *first; /* by stage: v * pipeline + p */
};

struct legacy {
    const struct scan_context *c;
    struct sink *sink;
    struct arena *arena;
    struct megatron_facts facts;
    struct legacy_args args;
    double version;    /* checkpoint_version */
    struct rank *rank; /* by p, e, t, once legacy_sort() was called */
    size_t nranks;
    uint32_t tensor, pipeline, expert, models;
    bool several; /* models are called model0, model1, ... */
    struct layer_kind *kinds;
    uint64_t unknown, tied; /* tensors shown as they are stored; copies that are not */
    char first_unknown[128];
};

/* -EBADMSG when two directories are of one rank. */
int legacy_sort(struct legacy *l, struct err *e);

/* The rank, or NULL: its directory is missing. */
struct rank *legacy_rank(const struct legacy *l, uint32_t t, uint32_t p, uint32_t e);

/* Loads the file and finds its tensors; what is wrong is r->err. */
int legacy_load(struct legacy *l, struct rank *r, struct err *e);
void legacy_unload(struct rank *r);

/* Reports the model of all ranks of a stage, which are loaded. */
int legacy_merge_stage(struct legacy *l, uint32_t p, struct err *e);

#endif
