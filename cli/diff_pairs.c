/* SPDX-License-Identifier: MIT */
/* cli/diff_pairs.c - names of both sides, sorted and merged. */
#include "cli/diff_pairs.h"

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

int pair_tensors(const struct tensor_list *a, const struct tensor_list *b,
                 struct tensor_pair **out, size_t *n, struct err *e)
{
    CLEANUP_FREE struct named *na = names_of(a);
    CLEANUP_FREE struct named *nb = names_of(b);

    *out = calloc(a->n + b->n + 1, sizeof **out);
    if (!na || !nb || !*out)
        return err_nomem(e);
    *n = merge(na, a->n, nb, b->n, *out);
    return 0;
}
