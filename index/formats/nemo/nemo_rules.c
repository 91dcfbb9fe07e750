/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_rules.c - how NeMo 1's tensor ranks cut a parameter, by name and sizes. */
#include "index/formats/nemo/nemo_rules.h"

#include <string.h>

/* The size of a dimension of the whole tensor, in terms of the configuration. */
enum extent {
    ANY,      /* not told: the vocabulary as it was padded, experts, positions */
    HIDDEN,   /* hidden_size */
    FFN,      /* ffn_hidden_size */
    FC1_OWN,  /* the same, twice where the activation is fast-*glu */
    FC1_CORE, /* twice where it is *glu */
    HEADS,    /* num_attention_heads */
    PROJ,     /* heads x channels */
    KV,       /* twice that */
    QKV_OWN,  /* three times: NeMo's modules know no groups of queries */
    QKV_CORE, /* (heads + 2 groups) x channels */
    ONE,
};

/*
 * Ends of names in NeMo's own modules (nemo/collections/nlp/modules/common/megatron of
 * 1.23: attention.py, mlp.py, language_model.py, token_level_encoder_decoder.py; 1.0 to
 * 1.23 have the same), in Transformer Engine's layer that stands for them, and in
 * Megatron Core's. Rule MEGATRON_UNKNOWN: as Megatron-LM has it. Normformer's norm
 * within the MLP is of each rank's part of the features alone: no whole one does the
 * same, and it is not here. What has one dimension is compared with the first.
 */
static const struct {
    const char *end;
    enum megatron_rule rule;
    enum extent dim[2];
} known[] = {
    {"word_embeddings.weight", MEGATRON_UNKNOWN, {ANY, HIDDEN}},
    {"word_embeddings_for_head.weight", MEGATRON_UNKNOWN, {ANY, HIDDEN}},
    {"output_layer.weight", MEGATRON_UNKNOWN, {ANY, HIDDEN}},
    {"tokens_head.weight", MEGATRON_ROWS, {ANY, HIDDEN}},
    {"tokens_head.bias", MEGATRON_ROWS, {ANY, ANY}},
    {"lm_head.bias", MEGATRON_UNKNOWN, {ANY, ANY}},
    {"query_key_value.weight", MEGATRON_UNKNOWN, {QKV_OWN, HIDDEN}},
    {"query_key_value.bias", MEGATRON_UNKNOWN, {QKV_OWN, ANY}},
    {"layernorm_qkv.weight", MEGATRON_QKV, {QKV_OWN, HIDDEN}},
    {"layernorm_qkv.bias", MEGATRON_QKV, {QKV_OWN, ANY}},
    {"linear_qkv.weight", MEGATRON_UNKNOWN, {QKV_CORE, HIDDEN}},
    {"linear_qkv.bias", MEGATRON_UNKNOWN, {QKV_CORE, ANY}},
    {"attention.query.weight", MEGATRON_UNKNOWN, {PROJ, HIDDEN}},
    {"attention.query.bias", MEGATRON_UNKNOWN, {PROJ, ANY}},
    {"attention.key_value.weight", MEGATRON_UNKNOWN, {KV, HIDDEN}},
    {"attention.key_value.bias", MEGATRON_UNKNOWN, {KV, ANY}},
    {"attention.dense.weight", MEGATRON_UNKNOWN, {HIDDEN, PROJ}},
    {"attention.proj.weight", MEGATRON_COLUMNS, {HIDDEN, PROJ}},
    {"attention.proj.bias", MEGATRON_SAME, {HIDDEN, ANY}},
    {"linear_proj.weight", MEGATRON_UNKNOWN, {HIDDEN, PROJ}},
    {"head_scale_tensor", MEGATRON_COLUMNS, {ONE, HEADS}},
    {"dense_h_to_4h.weight", MEGATRON_UNKNOWN, {FC1_OWN, HIDDEN}},
    {"dense_h_to_4h.bias", MEGATRON_UNKNOWN, {FC1_OWN, ANY}},
    {"dense_h_to_4h_2.weight", MEGATRON_ROWS, {FFN, HIDDEN}},
    {"dense_h_to_4h_2.bias", MEGATRON_ROWS, {FFN, ANY}},
    {"layernorm_mlp.fc1_weight", MEGATRON_ROWS, {FFN, HIDDEN}},
    {"layernorm_mlp.fc1_bias", MEGATRON_ROWS, {FFN, ANY}},
    {"linear_fc1.weight", MEGATRON_UNKNOWN, {FC1_CORE, HIDDEN}},
    {"linear_fc1.bias", MEGATRON_UNKNOWN, {FC1_CORE, ANY}},
    {"dense_4h_to_h.weight", MEGATRON_UNKNOWN, {HIDDEN, FFN}},
    {"layernorm_mlp.fc2_weight", MEGATRON_COLUMNS, {HIDDEN, FFN}},
    {"layernorm_mlp.fc2_bias", MEGATRON_SAME, {HIDDEN, ANY}},
    {"linear_fc2.weight", MEGATRON_UNKNOWN, {HIDDEN, FFN}},
    {"router.weight", MEGATRON_UNKNOWN, {ANY, HIDDEN}},
    {"post_attention_normformer_norm.weight", MEGATRON_SAME, {HIDDEN, ANY}},
    {"post_attention_normformer_norm.bias", MEGATRON_SAME, {HIDDEN, ANY}},
    {"post_inter_attention_normformer_norm.weight", MEGATRON_SAME, {HIDDEN, ANY}},
    {"post_inter_attention_normformer_norm.bias", MEGATRON_SAME, {HIDDEN, ANY}},
    {"relative_position_embedding.weight", MEGATRON_SAME, {ANY, HEADS}},
    {"embedding.position_embeddings", MEGATRON_SAME, {ANY, HIDDEN}},
};

/* 0: the configuration does not tell. */
static uint64_t size_of(const struct nemo_sizes *s, enum extent extent)
{
    switch (extent) {
    case HIDDEN:
        return s->hidden;
    case FFN:
        return s->ffn;
    case FC1_OWN:
        return s->ffn * (s->fast ? 2 : 1);
    case FC1_CORE:
        return s->ffn * (s->glu ? 2 : 1);
    case HEADS:
        return s->heads;
    case PROJ:
        return s->heads * s->channels;
    case KV:
        return 2 * s->heads * s->channels;
    case QKV_OWN:
        return 3 * s->heads * s->channels;
    case QKV_CORE:
        return s->groups ? (s->heads + 2 * s->groups) * s->channels : 0;
    case ONE:
        return 1;
    case ANY:
        break;
    }
    return 0;
}

/* What Megatron-LM has by the name, as this model has it. */
static enum megatron_rule settle(const struct nemo_config *c,
                                 const struct nemo_sizes *s, const char *name,
                                 size_t len, enum megatron_rule rule)
{
    bool core = memmem(name, len, "linear_", strlen("linear_"));

    /* With fewer groups than ranks keys and values are repeated. */
    if (rule == MEGATRON_QKV && core)
        return s->groups >= c->tensor ? MEGATRON_ROWS : MEGATRON_UNKNOWN;
    if (rule == MEGATRON_QKV)
        return c->old_qkv ? MEGATRON_THIRDS : MEGATRON_ROWS;
    if (rule == MEGATRON_KV)
        return c->old_qkv ? MEGATRON_HALVES : MEGATRON_ROWS;
    if (rule == MEGATRON_FC1 && !s->activation)
        return MEGATRON_UNKNOWN;
    if (rule == MEGATRON_FC1)
        return (core ? s->glu : s->fast) ? MEGATRON_HALVES : MEGATRON_ROWS;
    /* SwitchMLP's is a RowParallelLinear. */
    if (!c->megatron_core && megatron_name_ends(name, len, "router.weight"))
        return MEGATRON_COLUMNS;
    return rule;
}

/* The dimension that is cut; 2: none. */
static uint32_t axis_of(enum megatron_rule rule)
{
    if (rule == MEGATRON_COLUMNS)
        return 1;
    return rule == MEGATRON_SAME ? 2 : 0;
}

static enum megatron_rule held(const struct nemo_config *c, const struct nemo_sizes *s,
                               const enum extent extent[2], const uint64_t *dim,
                               uint32_t nd, enum megatron_rule rule)
{
    uint32_t axis = axis_of(rule);

    if (nd == 0 || (axis < 2 && axis >= nd))
        return MEGATRON_UNLIKE;
    for (uint32_t i = 0; i < 2 && i < nd; i++) {
        uint64_t whole = size_of(s, extent[i]), parts = i == axis ? c->tensor : 1;

        if (extent[i] == ANY)
            continue;
        if (whole == 0)
            return MEGATRON_UNKNOWN;
        if (whole % parts != 0 || dim[i] != whole / parts)
            return MEGATRON_UNLIKE;
    }
    return rule;
}

enum megatron_rule nemo_rule(const struct nemo_config *config, const char *name,
                             size_t len, const uint64_t *dim, uint32_t nd,
                             enum megatron_rule rule)
{
    const struct nemo_sizes *s = nemo_config_sizes(config, name, len);

    if (config->tensor == 1)
        return MEGATRON_SAME;
    for (size_t i = 0; i < ARRAY_SIZE(known); i++) {
        if (!megatron_name_ends(name, len, known[i].end))
            continue;
        rule = settle(config, s, name, len, known[i].rule ? known[i].rule : rule);
        return rule ? held(config, s, known[i].dim, dim, nd, rule) : rule;
    }
    /* A cut that no size can confirm is none. */
    return rule == MEGATRON_SAME ? rule : MEGATRON_UNKNOWN;
}
