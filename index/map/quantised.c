/* SPDX-License-Identifier: MIT */
/* index/map/quantised.c - tells from names, types and config.json that weights are quantised. */
#include "index/map/quantised.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "index/dtype.h"
#include "index/key_text.h"

/* The last part of a key, without the dot before it. */
struct tail {
    const char *text;
    size_t len, at; /* where it begins in the key */
};

static struct tail tail_of(const char *key, size_t len)
{
    const char *dot = len > 0 ? memrchr(key, '.', len) : NULL;
    size_t at = dot ? (size_t)(dot - key) + 1 : 0;

    return (struct tail){.text = key + at, .len = len - at, .at = at};
}

static bool tail_is(const struct tail *t, const char *text)
{
    return t->len == strlen(text) && memcmp(t->text, text, t->len) == 0;
}

static bool tail_ends(const struct tail *t, const char *text)
{
    size_t n = strlen(text);

    return t->len >= n && memcmp(t->text + t->len - n, text, n) == 0;
}

/*
 * Last parts that only quantising libraries give: GPTQ and AWQ, compressed-tensors and
 * ModelOpt, bitsandbytes, HQQ, torchao, quanto, ExLlama, AQLM, VPTQ, QuIP.
 */
static bool is_name_of_codes(const struct tail *t)
{
    static const char *const names[] = {
        "qweight",
        "qzeros",
        "weight_packed",
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "weight_zero_point",
        "weight_global_scale",
        "SCB",
        "absmax",
        "nested_absmax",
        "quant_map",
        "W_q",
        "_weight_qdata",
        "_weight_scale",
        "qdata",
        "int_data",
        "q_weight",
        "q_scale",
        "codebooks",
        "Qidxs",
        "scale_weight",
        "scaled_fp8",
        "packed_weight",
    };
    static const char marks[] = "bitsandbytes__";

    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (tail_is(t, names[i]))
            return true;
    return t->len >= sizeof marks - 1 && memcmp(t->text, marks, sizeof marks - 1) == 0;
}

static bool is_small_float(enum dtype d)
{
    return d == DTYPE_F8_E4M3 || d == DTYPE_F8_E5M2 || d == DTYPE_F8_E4M3FNUZ ||
           d == DTYPE_F8_E5M2FNUZ;
}

/* Types that hold blocks' scales or less than a byte: in no model that is not quantised. */
static bool is_type_of_codes(enum dtype d)
{
    return d == DTYPE_F8_E8M0 || d == DTYPE_F4 || d == DTYPE_F6_E2M3 ||
           d == DTYPE_F6_E3M2;
}

static bool is_whole(enum dtype d)
{
    return d == DTYPE_U8 || d == DTYPE_I8 || d == DTYPE_I16 || d == DTYPE_U16 ||
           d == DTYPE_I32 || d == DTYPE_U32;
}

/* MXFP4 of GPT-OSS: gate_up_proj_blocks beside gate_up_proj_scales. */
static bool is_blocks(const struct sink_taken *t, const struct tail *tail)
{
    return t->dtype == DTYPE_U8 &&
           (tail_ends(tail, "_blocks") || tail_ends(tail, "_scales"));
}

/* A weight of whole numbers: LLM.int8, MLX, and all that packs codes into words. */
static bool is_whole_weight(const struct sink_taken *t, const struct tail *tail)
{
    return is_whole(t->dtype) && t->shape->nd > 0 && tail_is(tail, "weight");
}

/* ggml's blocks, which the reader of GGUF marks. */
static bool is_ggml(const struct sink_taken *t)
{
    return t->attributes && t->dtype == DTYPE_U8 &&
           strstr(t->attributes, "\"gguf_type\"");
}

static bool is_scales(const struct tail *t)
{
    static const char *const ends[] = {"scale", "scales", "scale_inv", "scales_inv"};

    for (size_t i = 0; i < ARRAY_SIZE(ends); i++)
        if (tail_ends(t, ends[i]))
            return true;
    return false;
}

static void found(struct quantised *q, const struct sink_taken *t)
{
    if (!q->found[0])
        key_text(q->found, sizeof q->found, t->key, t->key_len);
}

/* The module that a tensor is of: "a.b" of "a.b.weight", and of "a.b.weight.scale". */
static size_t module_of(const struct sink_taken *t)
{
    size_t at = tail_of(t->key, t->key_len).at;
    struct tail above = tail_of(t->key, at > 0 ? at - 1 : 0);

    return tail_is(&above, "weight") ? above.at : at;
}

/* Codes and scales of one module: whatever they are called. */
static int note_pair(struct quantised *q, const struct sink_taken *t,
                     const struct tail *tail)
{
    bool codes = is_small_float(t->dtype) || (is_whole(t->dtype) && t->shape->nd > 1);
    size_t module = module_of(t);

    if (is_scales(tail)) {
        if (keyset_has(&q->codes, t->key, module))
            found(q, t);
        return MIN(keyset_add(&q->scales, t->key, module), 0);
    }
    if (!codes)
        return 0;
    if (keyset_has(&q->scales, t->key, module))
        found(q, t);
    return MIN(keyset_add(&q->codes, t->key, module), 0);
}

int quantised_note(struct quantised *q, const struct sink_taken *t)
{
    struct tail tail = tail_of(t->key, t->key_len);

    if (q->found[0])
        return 0;
    if (is_name_of_codes(&tail) || is_type_of_codes(t->dtype) || is_blocks(t, &tail) ||
        is_whole_weight(t, &tail) || is_ggml(t))
        found(q, t);
    return q->found[0] ? 0 : note_pair(q, t, &tail);
}

/* {"quant_method": "gptq", ...}, of the model or of its text model. */
void quantised_note_config(struct quantised *q, const struct json *config)
{
    static const char *const names[] = {"quantization_config", "compression_config"};
    const struct json *text = json_get(config, "text_config");
    const char *method;

    for (size_t i = 0; i < 2 * ARRAY_SIZE(names); i++) {
        const struct json *v = json_get(i % 2 ? text : config, names[i / 2]);

        if (q->found[0] || !v || json_kind(v) != JSON_OBJECT || !json_first(v))
            continue;
        if (!json_string(json_get(v, "quant_method"), &method))
            method = "unknown";
        snprintf(q->found, sizeof q->found, "%s of config.json: %.40s", names[i / 2],
                 method);
    }
}

void quantised_release(struct quantised *q)
{
    keyset_release(&q->codes);
    keyset_release(&q->scales);
}
