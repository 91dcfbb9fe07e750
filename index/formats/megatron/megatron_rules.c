/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_rules.c - what a parameter's name tells in Megatron-LM's rank files. */
#include "index/formats/megatron/megatron_rules.h"

#include <ctype.h>
#include <string.h>

enum { MAX_DIGITS = 9 };

/*
 * Ends of names: of Megatron Core, of Megatron-LM before it and of its BERT and T5. What is
 * cut in ways that the name does not tell (Mamba's mixer, MLA's down projections, which
 * megatron_merge.c goes by sizes for) is in no rule.
 */
static const struct {
    const char *end;
    enum megatron_rule rule;
} rules[] = {
    {"linear_qkv.weight", MEGATRON_QKV},
    {"linear_qkv.bias", MEGATRON_QKV},
    {"query_key_value.weight", MEGATRON_QKV},
    {"query_key_value.bias", MEGATRON_QKV},
    {"linear_q.weight", MEGATRON_ROWS},
    {"linear_q.bias", MEGATRON_ROWS},
    {"linear_kv.weight", MEGATRON_ROWS},
    {"linear_kv.bias", MEGATRON_ROWS},
    {"linear_q_proj.weight", MEGATRON_ROWS},
    {"linear_q_up_proj.weight", MEGATRON_ROWS},
    {"linear_kv_up_proj.weight", MEGATRON_ROWS},
    {"word_embeddings.weight", MEGATRON_ROWS},
    {"word_embeddings_for_head.weight", MEGATRON_ROWS},
    {"output_layer.weight", MEGATRON_ROWS},
    {"output_layer.bias", MEGATRON_ROWS},
    {"attention.query.weight", MEGATRON_ROWS},
    {"attention.query.bias", MEGATRON_ROWS},
    {"attention.key_value.weight", MEGATRON_KV},
    {"attention.key_value.bias", MEGATRON_KV},
    {"lm_head.bias", MEGATRON_ROWS},
    {"linear_fc1.weight", MEGATRON_FC1},
    {"linear_fc1.bias", MEGATRON_FC1},
    {"dense_h_to_4h.weight", MEGATRON_FC1},
    {"dense_h_to_4h.bias", MEGATRON_FC1},
    {"linear_proj.weight", MEGATRON_COLUMNS},
    {"linear_fc2.weight", MEGATRON_COLUMNS},
    {"dense_4h_to_h.weight", MEGATRON_COLUMNS},
    {"attention.dense.weight", MEGATRON_COLUMNS},
    {"linear_proj.bias", MEGATRON_SAME},
    {"linear_fc2.bias", MEGATRON_SAME},
    {"dense_4h_to_h.bias", MEGATRON_SAME},
    {"attention.dense.bias", MEGATRON_SAME},
    {"lm_head.dense.weight", MEGATRON_SAME},
    {"lm_head.dense.bias", MEGATRON_SAME},
    {"pooler.dense.weight", MEGATRON_SAME},
    {"pooler.dense.bias", MEGATRON_SAME},
    {"binary_head.weight", MEGATRON_SAME},
    {"binary_head.bias", MEGATRON_SAME},
    {"position_embeddings.weight", MEGATRON_SAME},
    {"tokentype_embeddings.weight", MEGATRON_SAME},
    {"router.weight", MEGATRON_SAME},
    {"router.bias", MEGATRON_SAME},
    {"router.expert_bias", MEGATRON_SAME},
    {"rotary_pos_emb.inv_freq", MEGATRON_SAME},
    {"layer_norm_weight", MEGATRON_SAME},
    {"layer_norm_bias", MEGATRON_SAME},
    {"shared_experts.gate_weight", MEGATRON_SAME},
    /* Since 2023 (megatron/legacy/model/transformer.py, bert_model.py of Core 0.6). */
    {"input_norm.weight", MEGATRON_SAME},
    {"input_norm.bias", MEGATRON_SAME},
    {"post_attention_norm.weight", MEGATRON_SAME},
    {"post_attention_norm.bias", MEGATRON_SAME},
    {"post_inter_attention_norm.weight", MEGATRON_SAME},
    {"post_inter_attention_norm.bias", MEGATRON_SAME},
    {"final_norm.weight", MEGATRON_SAME},
    {"final_norm.bias", MEGATRON_SAME},
    {"lm_head.norm.weight", MEGATRON_SAME},
    {"lm_head.norm.bias", MEGATRON_SAME},
    /* Of the layers that predict several tokens (Core 0.12 on). */
    {"eh_proj.weight", MEGATRON_ROWS},
    {"enorm.weight", MEGATRON_SAME},
    {"enorm.bias", MEGATRON_SAME},
    {"hnorm.weight", MEGATRON_SAME},
    {"hnorm.bias", MEGATRON_SAME},
    {"layernorm.weight", MEGATRON_SAME},
    {"layernorm.bias", MEGATRON_SAME},
};

bool megatron_name_ends(const char *name, size_t len, const char *end)
{
    size_t n = strlen(end);
    bool longer =
        strncmp(end, "layernorm", 9) == 0 || strncmp(end, "attention", 9) == 0;

    if (len < n || memcmp(name + len - n, end, n) != 0)
        return false;
    return len == n || name[len - n - 1] == '.' || (longer && name[len - n - 1] == '_');
}

static enum megatron_rule rule_of(const char *name, size_t len)
{
    for (size_t i = 0; i < ARRAY_SIZE(rules); i++)
        if (megatron_name_ends(name, len, rules[i].end))
            return rules[i].rule;
    return MEGATRON_UNKNOWN;
}

static bool take_number(const char *name, size_t len, size_t at,
                        struct megatron_number *out)
{
    size_t n = 0;

    *out = (struct megatron_number){.at = at};
    while (at + n < len && n < MAX_DIGITS && isdigit((unsigned char)name[at + n]))
        out->value = out->value * 10 + (uint64_t)(name[at + n++] - '0');
    out->len = n;
    return n > 0 && (n == 1 || name[at] != '0');
}

/* The number between `mark` and the next dot; `mark` starts a part of the name. */
static void number_after(const char *name, size_t len, const char *mark,
                         struct megatron_number *out)
{
    size_t n = strlen(mark);

    for (size_t at = 0; at + n < len; at++) {
        if ((at > 0 && name[at - 1] != '.') || memcmp(name + at, mark, n) != 0)
            continue;
        if (take_number(name, len, at + n, out) && out->at + out->len < len &&
            name[out->at + out->len] == '.')
            return;
    }
    *out = (struct megatron_number){0};
}

/* Grouped experts of Transformer Engine: "experts.linear_fc1.weight3". */
static bool grouped_expert(const char *name, size_t len, struct megatron_number *out)
{
    static const char *const marks[] = {
        "experts.linear_fc1.weight", "experts.linear_fc1.bias",
        "experts.linear_fc2.weight", "experts.linear_fc2.bias"};
    size_t at = len;

    while (at > 0 && isdigit((unsigned char)name[at - 1]))
        at--;
    for (size_t i = 0; i < ARRAY_SIZE(marks); i++) {
        size_t n = strlen(marks[i]);

        if (at < len && megatron_name_ends(name, at, marks[i]) &&
            (at == n || name[at - n - 1] == '.'))
            return take_number(name, len, at, out) && out->at + out->len == len;
    }
    return false;
}

void megatron_name(const char *name, size_t len, struct megatron_name *out)
{
    *out = (struct megatron_name){0};
    number_after(name, len, "layers.", &out->layer);
    number_after(name, len, "local_experts.", &out->expert);
    if (out->expert.len == 0 && grouped_expert(name, len, &out->expert)) {
        out->rule = rule_of(name, out->expert.at);
        return;
    }
    if (out->expert.len == 0)
        out->expert = (struct megatron_number){0};
    out->rule = rule_of(name, len);
}
