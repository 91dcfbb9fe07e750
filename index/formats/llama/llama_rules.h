/* SPDX-License-Identifier: MIT */
/* index/formats/llama/llama_rules.h - how Meta's Llama is cut, by its names and params.json. */
#ifndef UFS_INDEX_FORMATS_LLAMA_LLAMA_RULES_H
#define UFS_INDEX_FORMATS_LLAMA_LLAMA_RULES_H

#include "base/base.h"
#include "index/formats/ranks/rank_merge.h"

struct err;

/* params.json; 0: it does not tell. */
struct llama_params {
    uint64_t dim, layers, heads, kv_heads, head_dim;
};

/* -EBADMSG when it is no JSON object. */
int llama_params_parse(const char *text, size_t len, struct llama_params *out,
                       struct err *e);

/* What a tensor is in the model. */
enum llama_kind {
    LLAMA_UNKNOWN,
    LLAMA_EMBEDDING, /* cut along the model's width, since Llama 3 along the vocabulary */
    LLAMA_QUERY,     /* heads x head_dim rows */
    LLAMA_KEY_VALUE, /* kv_heads x head_dim rows */
    LLAMA_OUT,       /* heads x head_dim columns */
    LLAMA_ROWS,
    LLAMA_COLUMNS,
    LLAMA_SAME,
};

enum llama_kind llama_kind(const char *name, size_t len);

/*
 * How ranks have cut it, of which the first one has `x`. `width`: of the model, 0: unknown.
 */
enum rank_rule llama_rule(enum llama_kind kind, const struct rank_tensor *x,
                          uint64_t width);

/* How large the whole is along the cut, 0: params do not tell. */
uint64_t llama_whole(enum llama_kind kind, const struct llama_params *p);

#endif
