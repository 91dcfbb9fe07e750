/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_config.h - what a NeMo model's configuration tells of its ranks and sizes. */
#ifndef UFS_INDEX_FORMATS_NEMO_CONFIG_H
#define UFS_INDEX_FORMATS_NEMO_CONFIG_H

#include "base/base.h"

struct err;
struct json;

/* Of one stack of layers; 0: not told. */
struct nemo_sizes {
    uint64_t layers, hidden, ffn, heads, groups;
    uint64_t channels; /* of a head */
    bool activation;   /* is told: */
    bool fast;         /* NeMo's own dense_h_to_4h is gated: [w; v] */
    bool glu;          /* Megatron Core's linear_fc1 is */
};

struct nemo_config {
    uint64_t tensor, pipeline, virtual_pipeline, expert;
    bool untied;        /* the head is no copy of the embedding */
    bool megatron_core; /* else the model is of NeMo's own modules */
    bool old_qkv;       /* megatron_legacy: a rank's rows are [q; k; v] */
    /* Of all layers, or of T5's two stacks, where the configuration has them apart. */
    struct nemo_sizes model, encoder, decoder;
    bool stacks;
};

/*
 * From the tree of model_config.yaml. Defaults are those of NeMo 1.23
 * (models/language_modeling/megatron_gpt_model.py, megatron_base_model.py). -EBADMSG when
 * it does not tell how many ranks there are, or not by numbers.
 */
int nemo_config_learn(const struct json *v, struct nemo_config *out, struct err *e);

/* Do both tell the same? */
bool nemo_config_same(const struct nemo_config *a, const struct nemo_config *b);

/* The sizes of the stack that a tensor is of, by its name. */
const struct nemo_sizes *nemo_config_sizes(const struct nemo_config *c,
                                           const char *name, size_t len);

#endif
