/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_ranks.h - one scan of Megatron-LM's rank files, and its ranks. */
#ifndef UFS_INDEX_FORMATS_MEGATRON_RANKS_H
#define UFS_INDEX_FORMATS_MEGATRON_RANKS_H

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/megatron/megatron.h"
#include "index/formats/megatron/megatron_rules.h"
#include "index/formats/ranks/rank_tensors.h"
#include "index/formats/torch/torch_file.h"

struct buf;
struct pv;
struct scan_context;
struct sink;
struct torch_tensor;

enum { MEGATRON_MAX_VIRTUAL = 64 };

/* The directory of one rank, "mp_rank_01_003". */
struct rank {
    uint32_t p, e, t;
    unsigned numbers; /* in its name */
    char dir[40];
    char path[320]; /* of its model_optim_rng.pt */
    struct torch_file file;
    struct arena *arena; /* while it is loaded */
    struct rank_tensors
        model[MEGATRON_MAX_VIRTUAL]; /* several with virtual pipelines */
    struct err err;                  /* code 0: it was loaded */
};

/* What args tell, beside the topology. */
struct legacy_args {
    uint64_t layers, heads, groups, experts, expert_tensor;
    uint64_t channels;                   /* of a head of keys and values */
    uint64_t q_rank, kv_rank, positions; /* of multi-latent attention */
    bool known, gated, untied;
    bool
        extended; /* moe_extended_tp: each expert is cut over tensor and expert ranks */
};

/* Layers of one kind ("decoder.layers."): how many each stage has, and what is before. */
struct layer_kind {
    struct layer_kind *next;
    const char *prefix;
    size_t len;
    uint64_t *count, *first; /* by stage: v * pipeline + p */
};

/* Tensors that something is to be said of: how many, and the first one's name. */
struct legacy_note {
    uint64_t count;
    char first[128];
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
    /*
     * The entry of a file's outermost dict that is the model, "" where that dict is itself;
     * several: the models of virtual pipelines are the entries model0, model1, ...
     */
    const char *entry;
    bool several;
    const char *optimizer; /* the entry of that dict that is role optimizer */
    /*
     * NULL, or how another framework than Megatron-LM cuts the tensor that tensor rank 0 has
     * as `x`, where Megatron-LM would by `rule`. All ranks have parts of one shape then.
     */
    enum megatron_rule (*rule)(struct legacy *l, const struct rank_tensor *x,
                               enum megatron_rule rule);
    const void *user; /* of rule() */
    struct layer_kind *kinds;
    struct legacy_note unknown, unlike; /* tensors that are shown as they are stored */
    uint64_t tied;                      /* copies that are not shown */
};

/* -EBADMSG when two directories are of one rank. */
int legacy_sort(struct legacy *l, struct err *e);

/* The rank, or NULL: its directory is missing. */
struct rank *legacy_rank(const struct legacy *l, uint32_t t, uint32_t p, uint32_t e);

/*
 * The first tensor rank whose directory is there, of a stage and expert rank; NULL: none. With
 * experts of their own tensor parallelism not every pair of ranks has one.
 */
struct rank *legacy_rank_any(const struct legacy *l, uint32_t p, uint32_t e);

/* Loads the file and finds its tensors; damage is r->err, other errors are returned. */
int legacy_load(struct legacy *l, struct rank *r, struct err *e);
void legacy_unload(struct rank *r);

/* The name of the entry that is model `v`, "" for the outermost dict itself. */
enum { LEGACY_ENTRY = 24 };
void legacy_entry(const struct legacy *l, uint32_t v, char name[LEGACY_ENTRY]);

/* Appends "FILE:ENTRY.", which comes before a name in that model. */
void legacy_place(const struct legacy *l, const struct rank *r, uint32_t v,
                  struct buf *out);

/* Model `v` in the file of a rank that is loaded; false: there is none. */
bool legacy_model(const struct legacy *l, const struct rank *r, uint32_t v,
                  struct pv *out);

/* For object_to_json(): tensors are told elsewhere. */
const char *legacy_no_key(void *user, const char *path, size_t path_len,
                          const struct torch_tensor *tensor);

/*
 * Fills l->kinds from the first tensor rank of each stage. -EBADMSG when one is not there
 * or cannot be read, -ENOTSUP when a stage has layers without tensors.
 */
int legacy_count_layers(struct legacy *l, struct err *e);

/* How many layers of a kind the stages have together. */
uint64_t legacy_layers(const struct legacy *l, const struct layer_kind *k);

/* Reports the model of all ranks of a stage, which are loaded. */
int legacy_merge_stage(struct legacy *l, uint32_t p, struct err *e);

/* Loads each stage's ranks, reports the model and all else that is in their files. */
int legacy_report_stages(struct legacy *l, struct err *e);

/* Tells what could not be merged. */
int legacy_warn_unknown(struct legacy *l, struct err *e);

#endif
