/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron.h - what the readers of Megatron Core's backends share. */
#ifndef UFS_INDEX_FORMATS_MEGATRON_H
#define UFS_INDEX_FORMATS_MEGATRON_H

#include "base/base.h"
#include "base/buf.h"
#include "index/dtype.h"
#include "index/shape.h"

struct err;
struct json;
struct scan_context;
struct sink;

/* What the files tell of how the job was cut; 0: nothing. */
struct megatron_facts {
    uint64_t world, tensor, pipeline, expert, context, virtual_pipeline, data;
    bool has_iteration;
    int64_t iteration;
    bool has_args;       /* written by Megatron-LM's training script */
    bool has_config;     /* run_config.yaml: by Megatron Bridge */
    char model[2048];    /* JSON: args of Megatron-LM in Bridge's terms, or "" */
    char settings[2048]; /* the same of run_config.yaml, or "" */
    char optimizer[64];  /* how the optimizer's state is cut: "dp_reshardable" */
};

/*
 * The name of one cell of a sharded object, "rng_state/shard_0.1_2.2": offsets in a grid
 * of that shape. Megatron Core up to 0.7 cut the last size off the names of its zarr
 * backend ("rng_state/shard_0.1_2"); then size[n - 1] is 0.
 */
enum { MEGATRON_MAX_GRID = 16 };
struct megatron_cell {
    size_t key; /* bytes before "/shard_" */
    size_t n;
    uint64_t offset[MEGATRON_MAX_GRID], size[MEGATRON_MAX_GRID];
};

/* False when it is no such name. */
bool megatron_cell(const char *name, size_t len, struct megatron_cell *out);

/* Some objects have a cell a rank: what their names tell of the job. */
void megatron_learn_cell(struct megatron_facts *f, const char *name, size_t len);

/* From the common state, as JSON of objects.json. */
void megatron_learn_common(struct megatron_facts *f, const char *json, size_t len);

/*
 * What args of Megatron-LM (the state of the Namespace, as objects.json has it) say of the
 * model, as a JSON object in the terms of Megatron Bridge.
 */
void megatron_model_terms(const struct json *args, struct buf *out);

/*
 * The same for one line of run_config.yaml, which has these terms: adds a member to the
 * object that `out` begins with '{', or nothing where it is no such term or has no value.
 */
void megatron_model_setting(const char *name, size_t name_len, const char *value,
                            size_t len, struct buf *out);

/* From the text of a run_config.yaml. */
void megatron_learn_config(struct megatron_facts *f, const char *text, size_t len);

/* Settings of the model, as JSON; NULL: the files tell none. */
const char *megatron_settings(const struct megatron_facts *f);

/* The members of a topology that are known, each with ", " before it. */
void megatron_topology(const struct megatron_facts *f, struct buf *out);

/* "optimizer." and "chained_0.optimizer.": enum role; else -1. */
int megatron_role(const char *key, size_t len);

/* Reports tensors and objects of the zarr backend. */
int megatron_zarr_report(const struct scan_context *c, struct sink *sink,
                         struct megatron_facts *facts, struct err *e);

#endif
