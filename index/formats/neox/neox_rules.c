/* SPDX-License-Identifier: MIT */
/* index/formats/neox/neox_rules.c - how GPT-NeoX and Megatron-DeepSpeed cut their tensors. */
#include "index/formats/neox/neox_rules.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "index/formats/name_take.h"
#include "index/formats/ranks/rank_files.h"

enum {
    MAX_NAME = 512,
    MAX_NUMBER = 99999, /* of a layer or a rank */
};

/* What the end of a name tells. */
enum kind {
    KIND_UNKNOWN,
    KIND_SAME,
    KIND_ROWS,
    KIND_COLUMNS,
    KIND_UP,   /* rows, of one projection or of two that are fused */
    KIND_BIAS, /* of a row-parallel layer */
};

/*
 * GPT-NeoX of 2021 to 2025 (tools/ckpts/convert_neox_to_hf.py has the same lists), its
 * Llama-like layers (w1, w2, w3; linear1, linear2), and Megatron-DeepSpeed, as BLOOM.
 */
static const struct {
    const char *end;
    enum kind kind;
} kinds[] = {
    {"word_embeddings.weight", KIND_ROWS},
    {"final_linear.weight", KIND_ROWS},
    {"final_linear.bias", KIND_ROWS},
    {"lm_head.weight", KIND_ROWS},
    {"attention.query_key_value.weight", KIND_ROWS},
    {"attention.query_key_value.bias", KIND_ROWS},
    {"self_attention.query_key_value.weight", KIND_ROWS},
    {"self_attention.query_key_value.bias", KIND_ROWS},
    {"mlp.dense_h_to_4h.weight", KIND_UP},
    {"mlp.dense_h_to_4h.bias", KIND_UP},
    {"mlp.linear1.weight", KIND_UP},
    {"mlp.linear1.bias", KIND_UP},
    {"mlp.w1.weight", KIND_ROWS},
    {"mlp.w1.bias", KIND_ROWS},
    {"mlp.w3.weight", KIND_ROWS},
    {"mlp.w3.bias", KIND_ROWS},
    {"attention.dense.weight", KIND_COLUMNS},
    {"self_attention.dense.weight", KIND_COLUMNS},
    {"mlp.dense_4h_to_h.weight", KIND_COLUMNS},
    {"mlp.linear2.weight", KIND_COLUMNS},
    {"mlp.w2.weight", KIND_COLUMNS},
    {"attention.dense.bias", KIND_BIAS},
    {"self_attention.dense.bias", KIND_BIAS},
    {"mlp.dense_4h_to_h.bias", KIND_BIAS},
    {"mlp.linear2.bias", KIND_BIAS},
    {"mlp.w2.bias", KIND_BIAS},
    /*
     * Layers of Transformer Engine (2024). Their row-parallel biases are in no rule: each
     * rank has all of it, and GPT-NeoX's converter adds them up.
     */
    {"attention.qkv.weight", KIND_ROWS},
    {"attention.qkv.bias", KIND_ROWS},
    {"attention.proj.weight", KIND_COLUMNS},
    {"mlp.fc1_weight", KIND_UP},
    {"mlp.fc1_bias", KIND_UP},
    {"mlp.fc2_weight", KIND_COLUMNS},
    {"mlp.layer_norm_weight", KIND_SAME},
    {"mlp.layer_norm_bias", KIND_SAME},
    /* Dropless experts (2025): whole ones on each rank, the rows of all one behind the other. */
    {"mlp.experts.mlp.w1", KIND_ROWS},
    {"mlp.experts.mlp.w2", KIND_ROWS},
    {"mlp.experts.mlp.w3", KIND_ROWS},
    {"mlp.router.layer.weight", KIND_SAME},
    {"position_embeddings.weight", KIND_SAME},
    {"rotary_emb.inv_freq", KIND_SAME},
    /* "input_layernorm.weight", "post_attention_layernorm.scale", "norm.weight" */
    {"norm.weight", KIND_SAME},
    {"norm.bias", KIND_SAME},
    {"norm.scale", KIND_SAME},
};

static bool ends_in(const char *name, size_t len, const char *end)
{
    size_t n = strlen(end);

    if (len < n || memcmp(name + len - n, end, n) != 0)
        return false;
    return len == n || name[len - n - 1] == '.' || strncmp(end, "norm.", 5) == 0;
}

static enum kind kind_of(const struct rank_tensor *x)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        if (ends_in(x->name, x->len, kinds[i].end))
            return kinds[i].kind;
    /* The layer of the last norm alone has nothing else. */
    if (x->nd == 1 && ((x->len == 6 && memcmp(x->name, "weight", 6) == 0) ||
                       (x->len == 4 && memcmp(x->name, "bias", 4) == 0)))
        return KIND_SAME;
    return KIND_UNKNOWN;
}

enum neox_dialect neox_dialect(const char *name, size_t len)
{
    static const char neox[] = "attention.dense.weight";
    static const char megatron[] = "self_attention.dense.weight";

    if (ends_in(name, len, megatron))
        return NEOX_MEGATRON;
    return ends_in(name, len, neox) ? NEOX_GPT_NEOX : NEOX_NEITHER;
}

/* All ranks' size of the tensor of that name along an axis; 0: not all have it. */
static uint64_t whole_size(const struct rank_file *file, uint32_t n, const char *name,
                           size_t len, uint32_t axis)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < n; i++) {
        const struct rank_tensor *x = rank_tensors_find(&file[i].tensors, name, len);

        if (!x || x->why || x->nd <= axis || x->dim[axis] > UINT64_MAX / 2 - sum)
            return 0;
        sum += x->dim[axis];
    }
    return sum;
}

/* The name of the down projection beside this up projection. */
static bool down_name(const struct rank_tensor *up, char *name, size_t size)
{
    static const char *const pairs[][2] = {{"dense_h_to_4h.", "dense_4h_to_h.weight"},
                                           {"linear1.", "linear2.weight"},
                                           {"fc1_", "fc2_weight"}};

    for (size_t i = 0; i < ARRAY_SIZE(pairs); i++) {
        const char *at = memmem(up->name, up->len, pairs[i][0], strlen(pairs[i][0]));

        if (at)
            return snprintf(name, size, "%.*s%s", (int)(at - up->name), up->name,
                            pairs[i][1]) < (int)size;
    }
    return false;
}

/* With a gate each rank's rows are [a; b], twice what the down projection takes. */
static enum rank_rule up_rule(const struct rank_tensor *x, const struct rank_file *file,
                              uint32_t n)
{
    char name[MAX_NAME];
    uint64_t rows, columns;

    if (x->len >= MAX_NAME / 2 || !down_name(x, name, sizeof name))
        return RANK_UNKNOWN;
    rows = whole_size(file, n, x->name, x->len, 0);
    columns = whole_size(file, n, name, strlen(name), 1);
    if (rows == 0 || rows == columns) /* 0: a rank's is missing, which is told */
        return RANK_ROWS;
    return rows / 2 == columns && rows % 2 == 0 ? RANK_HALVES : RANK_UNKNOWN;
}

static enum rank_rule bias_rule(const struct rank_tensor *x, enum neox_dialect dialect)
{
    if (ends_in(x->name, x->len, "self_attention.dense.bias"))
        return RANK_SAME;
    switch (dialect) {
    case NEOX_GPT_NEOX:
        return RANK_SUM;
    case NEOX_MEGATRON:
        return RANK_SAME;
    case NEOX_NEITHER:
        break;
    }
    return RANK_UNKNOWN;
}

enum rank_rule neox_rule(const struct rank_tensor *x, const struct rank_file *file,
                         uint32_t n, enum neox_dialect dialect)
{
    switch (kind_of(x)) {
    case KIND_SAME:
        return RANK_SAME;
    case KIND_ROWS:
        return RANK_ROWS;
    case KIND_COLUMNS:
        return RANK_COLUMNS;
    case KIND_UP:
        return up_rule(x, file, n);
    case KIND_BIAS:
        return bias_rule(x, dialect);
    case KIND_UNKNOWN:
        break;
    }
    return RANK_UNKNOWN;
}

/* ---- names of files ---- */

/* Two digits or more. */
static bool take_number(const char **p, uint32_t *out)
{
    const char *start = *p;

    for (*out = 0; isdigit((unsigned char)**p) && *out <= MAX_NUMBER; (*p)++)
        *out = *out * 10 + (uint32_t)(**p - '0');
    return *p - start >= 2 && *out <= MAX_NUMBER;
}

bool neox_layer_name(const char *name, uint32_t *layer, uint32_t *rank, int *digits)
{
    const char *p = name, *start;

    if (!name_take(&p, "layer_"))
        return false;
    start = p;
    if (!take_number(&p, layer))
        return false;
    *digits = (int)(p - start);
    return name_take(&p, "-model_") && take_number(&p, rank) &&
           strcmp(p, "-model_states.pt") == 0;
}

bool neox_rank_name(const char *name, uint32_t *rank)
{
    const char *p = name;

    return name_take(&p, "mp_rank_") && take_number(&p, rank) &&
           strcmp(p, "_model_states.pt") == 0;
}
