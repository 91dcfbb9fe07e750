/* SPDX-License-Identifier: MIT */
/* index/formats/fairscale/fairscale_names.c - names of files of metaseq and fairseq, and of parameters. */
#include "index/formats/fairscale/fairscale_names.h"

#include <ctype.h>
#include <string.h>

enum { MAX_NUMBER = 99999 };

/* The number that ends before `end`, and the text before it; false: not so. */
static bool number_before(const char *name, size_t *end, const char *text,
                          uint32_t *out)
{
    size_t at = *end, n = strlen(text);

    while (at > 0 && isdigit((unsigned char)name[at - 1]))
        at--;
    if (at == *end || *end - at > 6 || at < n || memcmp(name + at - n, text, n) != 0)
        return false;
    *out = 0;
    for (size_t i = at; i < *end; i++)
        *out = *out * 10 + (uint32_t)(name[i] - '0');
    *end = at - n;
    return *out <= MAX_NUMBER;
}

bool shard_name(const char *name, struct shard_name *out)
{
    size_t end = strlen(name);

    *out = (struct shard_name){0};
    if (strncmp(name, "checkpoint", 10) != 0 || end < 3 ||
        strcmp(name + end - 3, ".pt") != 0)
        return false;
    end -= 3;
    if (!number_before(name, &end, "-shard", &out->shard))
        return false;
    out->stem = end;
    out->has_part = number_before(name, &end, "-model_part-", &out->part);
    out->stem = end;
    return end >= 10;
}

bool shard_same_stem(const char *a, const struct shard_name *x, const char *b,
                     const struct shard_name *y)
{
    return x->stem == y->stem && x->has_part == y->has_part &&
           memcmp(a, b, x->stem) == 0;
}

/* ---- parameters ---- */

static const struct {
    const char *end;
    enum rank_rule rule;
} rules[] = {
    {"embed_tokens.weight", RANK_ROWS},
    {"fc1.weight", RANK_ROWS},
    {"fc1.bias", RANK_ROWS},
    {"fc2.weight", RANK_COLUMNS},
    {"fc2.bias", RANK_SAME},
    {"qkv_proj.weight", RANK_THIRDS},
    {"qkv_proj.bias", RANK_THIRDS},
    {"q_proj.weight", RANK_ROWS},
    {"q_proj.bias", RANK_ROWS},
    {"k_proj.weight", RANK_ROWS},
    {"k_proj.bias", RANK_ROWS},
    {"v_proj.weight", RANK_ROWS},
    {"v_proj.bias", RANK_ROWS},
    {"out_proj.weight", RANK_COLUMNS},
    {"out_proj.bias", RANK_SAME},
    {"embed_positions.weight", RANK_SAME},
    {"version", RANK_SAME},
    /* "self_attn_layer_norm.weight", "final_layer_norm.bias", "layer_norm.weight" */
    {"layer_norm.weight", RANK_SAME},
    {"layer_norm.bias", RANK_SAME},
};

enum rank_rule metaseq_rule(const char *name, size_t len)
{
    for (size_t i = 0; i < ARRAY_SIZE(rules); i++) {
        size_t n = strlen(rules[i].end);

        if (len < n || memcmp(name + len - n, rules[i].end, n) != 0)
            continue;
        if (len == n || name[len - n - 1] == '.' ||
            (strncmp(rules[i].end, "layer_norm", 10) == 0 && name[len - n - 1] == '_'))
            return rules[i].rule;
    }
    return RANK_UNKNOWN;
}
