/* SPDX-License-Identifier: MIT */
/* index/formats/llama/llama_rules.c - how Meta's Llama is cut, by its names and params.json. */
#include "index/formats/llama/llama_rules.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/json.h"

/*
 * Ends of names in meta-llama/llama's and llama3's model.py (ColumnParallelLinear,
 * RowParallelLinear, VocabParallelEmbedding or ParallelEmbedding of fairscale). Mixtures of
 * experts and vision towers are cut in other ways and stand in no rule.
 */
static const struct {
    const char *end;
    enum llama_kind kind;
} kinds[] = {
    {"tok_embeddings.weight", LLAMA_EMBEDDING},
    {"attention.wq.weight", LLAMA_QUERY},
    {"attention.wk.weight", LLAMA_KEY_VALUE},
    {"attention.wv.weight", LLAMA_KEY_VALUE},
    {"attention.wo.weight", LLAMA_OUT},
    {"feed_forward.w1.weight", LLAMA_ROWS},
    {"feed_forward.w3.weight", LLAMA_ROWS},
    {"feed_forward.w2.weight", LLAMA_COLUMNS},
    {"output.weight", LLAMA_ROWS},
    {"attention_norm.weight", LLAMA_SAME},
    {"ffn_norm.weight", LLAMA_SAME},
    {"norm.weight", LLAMA_SAME},
    {"rope.freqs", LLAMA_SAME},
};

enum llama_kind llama_kind(const char *name, size_t len)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        size_t n = strlen(kinds[i].end);

        if (len >= n && memcmp(name + len - n, kinds[i].end, n) == 0 &&
            (len == n || name[len - n - 1] == '.'))
            return kinds[i].kind;
    }
    return LLAMA_UNKNOWN;
}

enum rank_rule llama_rule(enum llama_kind kind, const struct rank_tensor *x,
                          uint64_t width)
{
    switch (kind) {
    case LLAMA_EMBEDDING:
        if (width == 0 || x->nd != 2)
            return RANK_UNKNOWN;
        return x->dim[1] == width ? RANK_ROWS : RANK_COLUMNS;
    case LLAMA_QUERY:
    case LLAMA_KEY_VALUE:
    case LLAMA_ROWS:
        return RANK_ROWS;
    case LLAMA_OUT:
    case LLAMA_COLUMNS:
        return RANK_COLUMNS;
    case LLAMA_SAME:
        return RANK_SAME;
    case LLAMA_UNKNOWN:
        break;
    }
    return RANK_UNKNOWN;
}

static uint64_t product(uint64_t a, uint64_t b)
{
    uint64_t out;

    return mul_overflows(a, b, &out) ? 0 : out;
}

uint64_t llama_whole(enum llama_kind kind, const struct llama_params *p)
{
    if (kind == LLAMA_QUERY || kind == LLAMA_OUT)
        return product(p->heads, p->head_dim);
    return kind == LLAMA_KEY_VALUE ? product(p->kv_heads, p->head_dim) : 0;
}

static uint64_t number(const struct json *doc, const char *name)
{
    uint64_t v;

    return json_u64(json_get(doc, name), &v) ? v : 0;
}

int llama_params_parse(const char *text, size_t len, struct llama_params *out,
                       struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;

    *out = (struct llama_params){0};
    TRY(json_parse(text, len, &json_python, &doc, e));
    if (json_kind(doc) != JSON_OBJECT)
        return err_set(e, EBADMSG, "no JSON object");
    out->dim = number(doc, "dim");
    out->layers = number(doc, "n_layers");
    out->heads = number(doc, "n_heads");
    out->kv_heads = number(doc, "n_kv_heads");
    out->head_dim = number(doc, "head_dim"); /* Mistral's; Meta has dim / n_heads */
    if (out->kv_heads == 0)
        out->kv_heads = out->heads;
    if (out->head_dim == 0 && out->heads > 0)
        out->head_dim = out->dim / out->heads;
    return 0;
}
