/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_config.c - what a NeMo model's configuration tells of its ranks and sizes. */
#include "index/formats/nemo/nemo_config.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"

enum { MAX_SIZE = 1 << 30 }; /* of any number that is believed: their products fit */

static bool is_told(const struct json *v)
{
    return v && json_kind(v) != JSON_NULL;
}

/* False when it stands there and is no number, or none to be believed: not `none` then. */
static bool take_number(const struct json *v, const char *name, uint64_t none,
                        uint64_t *out)
{
    const struct json *value = json_get(v, name);
    bool ok = !is_told(value) || (json_u64(value, out) && *out > 0 && *out <= MAX_SIZE);

    if (!ok)
        *out = 0;
    else if (!is_told(value))
        *out = none;
    return ok;
}

/* Of a setting that is a truth; `other` where it is not told. */
static bool take_truth(const struct json *v, const char *name, bool other)
{
    bool is;

    return json_bool(json_get(v, name), &is) ? is : other;
}

/* ---- sizes ---- */

static bool starts(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

static bool ends(const char *text, const char *with)
{
    size_t n = strlen(text), end = strlen(with);

    return n >= end && strcmp(text + n - end, with) == 0;
}

static void take_activation(const struct json *v, struct nemo_sizes *out)
{
    const struct json *value = json_get(v, "activation");
    const char *text = "gelu"; /* cfg.get('activation', 'gelu') */

    out->activation = !is_told(value) || json_string(value, &text);
    out->glu = ends(text, "glu");
    out->fast = starts(text, "fast-") && out->glu;
}

/* What is left out of a product is not told either. */
static void take_sizes(const struct json *v, struct nemo_sizes *out)
{
    *out = (struct nemo_sizes){0};
    take_number(v, "num_layers", 0, &out->layers);
    take_number(v, "hidden_size", 0, &out->hidden);
    take_number(v, "num_attention_heads", 0, &out->heads);
    take_number(v, "ffn_hidden_size", 4 * out->hidden, &out->ffn);
    take_number(v, "num_query_groups", out->heads, &out->groups);
    take_number(v, "kv_channels",
                out->heads && out->hidden % out->heads == 0 ? out->hidden / out->heads
                                                            : 0,
                &out->channels);
    take_activation(v, out);
}

static bool names_part(const char *name, size_t len, const char *part)
{
    return memmem(name, len, part, strlen(part));
}

const struct nemo_sizes *nemo_config_sizes(const struct nemo_config *c,
                                           const char *name, size_t len)
{
    if (!c->stacks)
        return &c->model;
    /* "enc_dec_model.encoder_embedding.", "enc_dec_model.enc_dec_model.decoder.model." */
    if (names_part(name, len, ".decoder.") || names_part(name, len, ".decoder_"))
        return &c->decoder;
    return &c->encoder;
}

static bool same_sizes(const struct nemo_sizes *a, const struct nemo_sizes *b)
{
    return a->layers == b->layers && a->hidden == b->hidden && a->ffn == b->ffn &&
           a->heads == b->heads && a->groups == b->groups &&
           a->channels == b->channels && a->activation == b->activation &&
           a->fast == b->fast && a->glu == b->glu;
}

bool nemo_config_same(const struct nemo_config *a, const struct nemo_config *b)
{
    return a->tensor == b->tensor && a->pipeline == b->pipeline &&
           a->virtual_pipeline == b->virtual_pipeline && a->expert == b->expert &&
           a->untied == b->untied && a->megatron_core == b->megatron_core &&
           a->old_qkv == b->old_qkv && a->stacks == b->stacks &&
           same_sizes(&a->model, &b->model) && same_sizes(&a->encoder, &b->encoder) &&
           same_sizes(&a->decoder, &b->decoder);
}

/* ---- ranks ---- */

static int take_ranks(const struct json *v, struct nemo_config *out, struct err *e)
{
    if (!take_number(v, "tensor_model_parallel_size", 0, &out->tensor) ||
        !take_number(v, "pipeline_model_parallel_size", 1, &out->pipeline) ||
        !take_number(v, "virtual_pipeline_model_parallel_size", 1,
                     &out->virtual_pipeline) ||
        !take_number(v, "expert_model_parallel_size", 1, &out->expert) ||
        out->tensor == 0)
        return err_set(e, EBADMSG,
                       "the configuration does not tell tensor_model_parallel_size and "
                       "pipeline_model_parallel_size");
    return 0;
}

int nemo_config_learn(const struct json *v, struct nemo_config *out, struct err *e)
{
    const struct json *encoder = json_get(v, "encoder");
    const struct json *decoder = json_get(v, "decoder");

    *out = (struct nemo_config){0};
    TRY(take_ranks(v, out, e));
    out->megatron_core = take_truth(v, "mcore_gpt", false) ||
                         take_truth(v, "mcore_bert", false) ||
                         take_truth(v, "mcore_t5", false);
    out->untied = !take_truth(v, "share_embeddings_and_output_weights", true) ||
                  !take_truth(v, "share_token_embeddings", true);
    out->old_qkv = take_truth(v, "megatron_legacy", false);
    take_sizes(v, &out->model);
    out->stacks = is_told(encoder) && is_told(decoder);
    if (out->stacks) {
        take_sizes(encoder, &out->encoder);
        take_sizes(decoder, &out->decoder);
    }
    return 0;
}
