/* SPDX-License-Identifier: MIT */
/* cli/diff_pairs.c - names of both sides, sorted and merged. */
#include "cli/diff_pairs.h"

#include <stdlib.h>
#include <string.h>

struct named {
    const char *name;
    size_t len;
    bool model;
    const struct listed_tensor *tensor;
};

static int compare_names(const void *x, const void *y)
{
    const struct named *a = x, *b = y;
    int order;

    if (a->model != b->model)
        return a->model ? -1 : 1;
    order = memcmp(a->name, b->name, MIN(a->len, b->len));
    if (order == 0)
        order = (a->len > b->len) - (a->len < b->len);
    return order;
}

static void name_all(const struct tensor_list *l, bool drop, struct named *out)
{
    for (size_t i = 0; i < l->n; i++) {
        const struct listed_tensor *t = &l->row[i];
        bool model = t->role == ROLE_MODEL;
        size_t wrapper = model && drop ? t->wrapper : 0;

        out[i] = (struct named){.name = t->key + wrapper,
                                .len = t->key_len - wrapper,
                                .model = model,
                                .tensor = t};
        if (model && drop && t->own) {
            out[i].name = t->own;
            out[i].len = t->own_len;
        }
    }
    qsort(out, l->n, sizeof *out, compare_names);
}

/* Sorted names of one side; NULL: out of memory. */
static struct named *names_of(const struct tensor_list *l)
{
    struct named *names = calloc(l->n + 1, sizeof *names);
    bool meet = false;

    if (!names)
        return NULL;
    name_all(l, true, names);
    for (size_t i = 1; i < l->n; i++)
        meet |= compare_names(&names[i - 1], &names[i]) == 0;
    if (meet)
        name_all(l, false, names);
    return names;
}

static size_t merge(const struct named *a, size_t na, const struct named *b, size_t nb,
                    struct tensor_pair *out)
{
    size_t i = 0, j = 0, n = 0;

    while (i < na || j < nb) {
        int order = i == na ? 1 : j == nb ? -1 : compare_names(&a[i], &b[j]);
        const struct named *one = order <= 0 ? &a[i] : &b[j];

        out[n++] = (struct tensor_pair){.name = one->name,
                                        .name_len = one->len,
                                        .a = order <= 0 ? a[i].tensor : NULL,
                                        .b = order >= 0 ? b[j].tensor : NULL};
        i += order <= 0;
        j += order >= 0;
    }
    return n;
}

static int compare_keys(const void *x, const void *y)
{
    const struct listed_tensor *a = *(const struct listed_tensor *const *)x;
    const struct listed_tensor *b = *(const struct listed_tensor *const *)y;
    int order = memcmp(a->key, b->key, MIN(a->key_len, b->key_len));

    return order ? order : (a->key_len > b->key_len) - (a->key_len < b->key_len);
}

/* The model's tensors of b that met none of a by name, sorted by key. */
static size_t alone_in_b(const struct tensor_pair *pair, size_t n,
                         const struct listed_tensor **out)
{
    size_t m = 0;

    for (size_t i = 0; i < n; i++)
        if (!pair[i].a && pair[i].b->role == ROLE_MODEL)
            out[m++] = pair[i].b;
    qsort(out, m, sizeof *out, compare_keys);
    return m;
}

/* Takes out of b's tensors those that met one by key: each of them has a pair of its own. */
static size_t without_met(struct tensor_pair *pair, size_t n,
                          const struct listed_tensor **alone, const bool *met, size_t m)
{
    size_t left = 0;

    for (size_t i = 0; i < n; i++) {
        const struct listed_tensor **at = NULL;

        if (!pair[i].a && pair[i].b->role == ROLE_MODEL)
            at = bsearch(&pair[i].b, alone, m, sizeof *alone, compare_keys);
        if (!at || !met[at - alone])
            pair[left++] = pair[i];
    }
    return left;
}

/* What met nothing by name meets by key: not every format tells the wrapper (.npz has none). */
static int meet_by_key(struct tensor_pair *pair, size_t *n, struct err *e)
{
    CLEANUP_FREE const struct listed_tensor **alone = calloc(*n + 1, sizeof *alone);
    CLEANUP_FREE bool *met = calloc(*n + 1, sizeof *met);
    size_t m;

    if (!alone || !met)
        return err_nomem(e);
    m = alone_in_b(pair, *n, alone);
    for (size_t i = 0; i < *n; i++) {
        const struct listed_tensor **at;

        if (pair[i].b || pair[i].a->role != ROLE_MODEL)
            continue;
        at = bsearch(&pair[i].a, alone, m, sizeof *alone, compare_keys);
        if (at) {
            pair[i].b = *at;
            met[at - alone] = true;
        }
    }
    *n = without_met(pair, *n, alone, met, m);
    return 0;
}

int pair_tensors(const struct tensor_list *a, const struct tensor_list *b,
                 struct tensor_pair **out, size_t *n, struct err *e)
{
    CLEANUP_FREE struct named *na = names_of(a);
    CLEANUP_FREE struct named *nb = names_of(b);

    *out = calloc(a->n + b->n + 1, sizeof **out);
    if (!na || !nb || !*out)
        return err_nomem(e);
    *n = merge(na, a->n, nb, b->n, *out);
    return meet_by_key(*out, n, e);
}
