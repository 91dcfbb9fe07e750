/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_unnoted.c - what AutoTP did to parameters that it did not note. */
#include "index/formats/deepspeed/deepspeed_cut.h"

#include <string.h>

static const char weight[] = ".weight";
static const char bias[] = ".bias";

static bool ends_with(const char *name, size_t len, const char *end)
{
    size_t n = strlen(end);

    return len > n && memcmp(name + len - n, end, n) == 0;
}

/* Is the last part of a module's name one of these? */
static bool is_called(const char *name, size_t len, const char *const *names, size_t n)
{
    const char *dot = memrchr(name, '.', len);
    size_t at = dot ? (size_t)(dot + 1 - name) : 0;

    for (size_t i = 0; i < n; i++)
        if (strlen(names[i]) == len - at && memcmp(name + at, names[i], len - at) == 0)
            return true;
    return false;
}

/* Layers that AutoTP cuts by rows, where it cuts them: none has several weights in it. */
static bool is_by_rows(const char *module, size_t len)
{
    static const char *const names[] = {
        "q_proj",    "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj",
        "kv_b_proj", "w1",     "w3",     "fc1",       "wi",      "wi_0",
        "wi_1",      "query",  "key",    "value",
    };

    return is_called(module, len, names, ARRAY_SIZE(names));
}

/* Embeddings lie outside the layers that it replaces. */
static bool is_embedding(const char *module, size_t len)
{
    static const char *const names[] = {
        "embed_tokens",    "wte", "wpe", "word_embeddings", "tok_embeddings",
        "embed_positions",
    };

    return is_called(module, len, names, ARRAY_SIZE(names));
}

/* Replaced it is noted as cut by columns; by rows only in 0.19.4 and 0.19.5. */
static bool is_head(const char *module, size_t len)
{
    static const char *const names[] = {"lm_head", "embed_out"};

    return is_called(module, len, names, ARRAY_SIZE(names));
}

static bool is_noted(struct ds_notes *n, enum ds_note kind, const char *module,
                     size_t len)
{
    struct ds_pattern *ignored;
    char name[512];

    if (len + sizeof weight > sizeof name)
        return false;
    memcpy(name, module, len);
    memcpy(name + len, weight, sizeof weight);
    return ds_patterns_find(&n->kind[kind], name, len + sizeof weight - 1, &n->effort,
                            &ignored) > 0;
}

/* It replaces layers with a matrix; their bias is cut by rows as the matrix is, or not. */
static enum rank_rule of_bias(struct ds_notes *n, const char *module, size_t len)
{
    if (is_noted(n, DS_NOTE_COLUMNS, module, len) ||
        is_noted(n, DS_NOTE_SAME, module, len))
        return RANK_SAME;
    if (is_noted(n, DS_NOTE_SUBS, module, len))
        return RANK_UNKNOWN;
    if (is_by_rows(module, len))
        return RANK_ROWS;
    return memmem(module, len, "norm", 4) ? RANK_SAME : RANK_UNKNOWN;
}

enum rank_rule ds_cut_unnoted(struct ds_notes *n, const char *name, size_t len,
                              uint32_t nd)
{
    if (nd == 1 && ends_with(name, len, bias))
        return of_bias(n, name, len - (sizeof bias - 1));
    if (nd <= 1)
        return RANK_SAME; /* norms and the like: no layer that it replaces has one */
    if (!ends_with(name, len, weight))
        return RANK_UNKNOWN;
    len -= sizeof weight - 1;
    if (is_by_rows(name, len))
        return RANK_ROWS;
    if (n->left)
        return is_head(name, len) ? RANK_ROWS : RANK_UNKNOWN;
    return is_embedding(name, len) || is_head(name, len) ? RANK_SAME : RANK_UNKNOWN;
}
