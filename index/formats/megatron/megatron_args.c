/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_args.c - Megatron-LM's arguments in Megatron Bridge's terms. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "index/formats/megatron/megatron.h"

/*
 * What a person wants to know of a model, by the name that Bridge's GPTModelProvider has
 * for it (megatron/bridge/training/mlm_compat/arguments.py, 0.2: _transformer_config_from_args
 * and the model providers). NULL: the same name.
 */
static const struct term {
    const char *arg, *bridge;
    bool inverse; /* a flag that says the contrary */
} terms[] = {
    {"num_layers", NULL, false},
    {"hidden_size", NULL, false},
    {"ffn_hidden_size", NULL, false},
    {"num_attention_heads", NULL, false},
    {"kv_channels", NULL, false},
    {"num_experts", "num_moe_experts", false},
    {"moe_router_topk", NULL, false},
    {"moe_ffn_hidden_size", NULL, false},
    {"normalization", NULL, false},
    {"norm_epsilon", "layernorm_epsilon", false},
    {"apply_layernorm_1p", "layernorm_zero_centered_gamma", false},
    {"add_bias_linear", NULL, false},
    {"add_qkv_bias", NULL, false},
    {"qk_layernorm", NULL, false},
    {"position_embedding_type", NULL, false},
    {"rotary_base", NULL, false},
    {"rotary_percent", NULL, false},
    {"rotary_interleaved", NULL, false},
    {"moe_mlp_glu_interleave_size", NULL, false},
    {"seq_length", NULL, false},
    {"padded_vocab_size", "vocab_size", false},
    {"untie_embeddings_and_output_weights", "share_embeddings_and_output_weights",
     true},
    {"params_dtype", NULL, false},
    {"attention_dropout", NULL, false},
    {"hidden_dropout", NULL, false},
};

/* What run_config.yaml has, and Megatron-LM only as a part of other arguments. */
static const char *const more_terms[] = {"num_query_groups", "gated_linear_unit"};

static bool is_term(const char *name, size_t len)
{
    const char *known;

    for (size_t i = 0; i < ARRAY_SIZE(terms) + ARRAY_SIZE(more_terms); i++) {
        known = i >= ARRAY_SIZE(terms) ? more_terms[i - ARRAY_SIZE(terms)]
                : terms[i].bridge      ? terms[i].bridge
                                       : terms[i].arg;
        if (strlen(known) == len && memcmp(known, name, len) == 0)
            return true;
    }
    return false;
}

static void add_name(struct buf *out, const char *name)
{
    buf_adds(out, out->len && out->data[out->len - 1] != '{' ? ", " : "");
    buf_add_json(out, name, strlen(name));
    buf_adds(out, ": ");
}

/* A torch.dtype or an enum stands as an opaque object with its name in it. */
static bool add_value(struct buf *out, const char *name, const struct json *v,
                      bool inverse)
{
    const char *text;
    double number;
    int64_t whole;
    bool flag;

    if (!v || json_kind(v) == JSON_NULL)
        return false;
    if (json_kind(v) == JSON_OBJECT)
        v = json_get(v, "value") ? json_get(v, "value") : json_get(v, "class");
    if (json_bool(v, &flag)) {
        add_name(out, name);
        buf_adds(out, flag != inverse ? "true" : "false");
    } else if (json_i64(v, &whole)) {
        add_name(out, name);
        buf_addf(out, "%" PRId64, whole);
    } else if (json_double(v, &number)) {
        add_name(out, name);
        buf_addf(out, "%.9g", number);
    } else if (json_string(v, &text)) {
        add_name(out, name);
        buf_add_json(out, text, strlen(text));
    } else {
        return false;
    }
    return true;
}

/* Grouped queries are a flag and a number there, one number here. */
static void add_groups(struct buf *out, const struct json *args)
{
    bool grouped = false;

    if (json_bool(json_get(args, "group_query_attention"), &grouped) && grouped)
        add_value(out, "num_query_groups", json_get(args, "num_query_groups"), false);
    else
        add_value(out, "num_query_groups", json_get(args, "num_attention_heads"),
                  false);
}

static void add_activation(struct buf *out, const struct json *args)
{
    bool gated = false, squared = false;

    if (!json_get(args, "swiglu")) /* older than the flag, or not all of the args */
        return;
    json_bool(json_get(args, "swiglu"), &gated);
    json_bool(json_get(args, "squared_relu"), &squared);
    add_name(out, "gated_linear_unit");
    buf_adds(out, gated ? "true" : "false");
    add_name(out, "activation_func");
    buf_adds(out, gated ? "\"silu\"" : squared ? "\"squared_relu\"" : "\"gelu\"");
}

/* As PyYAML writes numbers, truths and words without quotes. */
static bool is_plain(const char *value, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!isalnum((unsigned char)value[i]) && !strchr("_.+-", value[i]))
            return false;
    return len > 0;
}

/* A number or a truth as JSON has it; all else is text. */
static void add_scalar(struct buf *out, const char *text)
{
    char *int_end, *end;
    long long whole = strtoll(text, &int_end, 10);
    double number = strtod(text, &end);

    if (strcmp(text, "true") == 0 || strcmp(text, "false") == 0)
        buf_adds(out, text);
    else if (!*int_end)
        buf_addf(out, "%lld", whole);
    else if (!*end && isfinite(number) && !strpbrk(text, "xX"))
        buf_addf(out, "%.9g", number);
    else
        buf_add_json(out, text, strlen(text));
}

void megatron_model_setting(const char *name, size_t name_len, const char *value,
                            size_t len, struct buf *out)
{
    char key[64], text[64];

    if (!is_term(name, name_len) || name_len >= sizeof key || !is_plain(value, len) ||
        len >= sizeof text)
        return;
    snprintf(key, sizeof key, "%.*s", (int)name_len, name);
    snprintf(text, sizeof text, "%.*s", (int)len, value);
    if (strcmp(text, "null") == 0)
        return;
    add_name(out, key);
    add_scalar(out, text);
}

void megatron_model_terms(const struct json *args, struct buf *out)
{
    buf_addc(out, '{');
    for (size_t i = 0; i < ARRAY_SIZE(terms); i++)
        add_value(out, terms[i].bridge ? terms[i].bridge : terms[i].arg,
                  json_get(args, terms[i].arg), terms[i].inverse);
    add_groups(out, args);
    add_activation(out, args);
    buf_addc(out, '}');
}
