/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/optim_names.c - which parameter an optimizer's number stands for. */
#include "index/formats/rankfiles/optim_names.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

enum { MAX_PARAMETERS = 1 << 24 };

static const char STATE[] = "state.";

void optim_names_release(struct optim_names *n)
{
    free(n->name);
    free(n->own);
    *n = (struct optim_names){0};
}

static void forget(struct optim_names *n)
{
    n->count = 0;
}

/* ---- paths ---- */

/* "state.7.exp_avg": 7, and where what follows the number begins. */
static bool parse_path(const char *path, size_t len, size_t *number, size_t *rest)
{
    size_t at = sizeof STATE - 1;

    if (len <= at || memcmp(path, STATE, at) != 0 || !isdigit((unsigned char)path[at]))
        return false;
    for (*number = 0; at < len && isdigit((unsigned char)path[at]); at++) {
        *number = *number * 10 + (size_t)(path[at] - '0');
        if (*number > MAX_PARAMETERS)
            return false;
    }
    *rest = at;
    return at < len && path[at] == '.';
}

int optim_names_rename(const struct optim_names *n, const char *path, size_t len,
                       struct buf *key)
{
    size_t number, rest;

    if (n->count > 0 && parse_path(path, len, &number, &rest) && number < n->count &&
        n->name[number]) {
        buf_adds(key, STATE);
        buf_adds(key, n->name[number]);
        path += rest;
        len -= rest;
    }
    return buf_add(key, path, len) < 0 ? -ENOMEM : 0;
}

int optim_names_json(const struct optim_names *n, struct buf *out)
{
    const char *comma = "";

    buf_addc(out, '{');
    for (size_t i = 0; i < n->count; i++) {
        if (!n->name[i])
            continue;
        buf_addf(out, "%s\"%zu\": ", comma, i);
        buf_add_json(out, n->name[i], strlen(n->name[i]));
        comma = ", ";
    }
    buf_addc(out, '}');
    return buf_failed(out) ? -ENOMEM : 0;
}

/* ---- names that the groups tell ---- */

struct groups {
    struct pv list;
    size_t count;
    size_t parameters; /* of all */
    size_t text;       /* bytes of all names with a NUL each */
    bool named;        /* each parameter has one */
    bool counted;      /* the numbers are 0, 1, 2, ... in this order */
};

static bool group_lists(const struct pv *group, struct pv *params, struct pv *names)
{
    struct pv items;

    if (!torch_mapping(group, &items) || items.kind != PV_DICT ||
        !pv_dict_get(&items, "params", params) || params->kind != PV_LIST)
        return false;
    if (!pv_dict_get(&items, "param_names", names) || names->kind != PV_LIST ||
        pv_count(names) != pv_count(params))
        names->kind = PV_NONE;
    return true;
}

static bool measure_group(struct groups *g, const struct pv *group)
{
    struct pv params, names;

    if (!group_lists(group, &params, &names))
        return false;
    for (size_t i = 0; i < pv_count(&params); i++) {
        struct pv number = pv_at(&params, i), name = {.kind = PV_NONE};
        const char *text = NULL;
        uint64_t value;
        size_t len = 0;

        if (!pv_u64(&number, &value) || g->parameters == MAX_PARAMETERS)
            return false;
        g->counted &= value == g->parameters++;
        if (names.kind == PV_LIST)
            name = pv_at(&names, i);
        if (name.kind == PV_STR)
            text = pv_bytes(&name, &len);
        if (text && !memchr(text, '\0', len))
            g->text += len + 1;
        else
            g->named = false;
    }
    return true;
}

/* False: no list of groups of numbered parameters. */
static bool measure_groups(const struct pv *root, struct groups *g)
{
    struct pv items;

    *g = (struct groups){.named = true, .counted = true};
    if (!torch_mapping(root, &items) || items.kind != PV_DICT ||
        !pv_dict_get(&items, "param_groups", &g->list) || g->list.kind != PV_LIST)
        return false;
    g->count = pv_count(&g->list);
    for (size_t i = 0; i < g->count; i++) {
        struct pv group = pv_at(&g->list, i);

        if (!measure_group(g, &group))
            return false;
    }
    return g->parameters > 0;
}

static int allocate(struct optim_names *n, size_t count, size_t text, struct err *e)
{
    n->name = calloc(count, sizeof *n->name);
    n->own = malloc(text + 1);
    if (!n->name || !n->own)
        return err_nomem(e);
    n->count = count;
    return 0;
}

static int take_names(struct optim_names *n, const struct groups *g, struct err *e)
{
    char *to;

    TRY(allocate(n, g->parameters, g->text, e));
    to = n->own;
    for (size_t i = 0; i < g->count; i++) {
        struct pv group = pv_at(&g->list, i), params, names;

        if (!group_lists(&group, &params, &names))
            continue;
        for (size_t k = 0; k < pv_count(&params); k++) {
            struct pv number = pv_at(&params, k), name = pv_at(&names, k);
            size_t len;
            const char *text = pv_bytes(&name, &len);

            memcpy(to, text, len);
            to[len] = '\0';
            /* Numbers that are not 0, 1, 2, ... are nothing that torch writes. */
            if (number.i >= 0 && (uint64_t)number.i < n->count)
                n->name[number.i] = to;
            to += len + 1;
        }
    }
    return 0;
}

/* ---- names by the order of the model ---- */

/* Parameters of the model, in order; `all`: also what is not distributed. */
static size_t list_parameters(const struct rank_set *model, bool all, const char **name)
{
    size_t n = 0;

    for (size_t i = 0; i < rank_set_count(model); i++) {
        struct rank_set_tensor t;

        rank_set_at(model, i, &t);
        if (t.alias || !(all || t.distributed))
            continue;
        if (name)
            name[n] = t.path;
        n++;
    }
    return n;
}

static int take_order(struct optim_names *n, const struct groups *g, struct err *e)
{
    bool all = list_parameters(n->model, false, NULL) != g->parameters;

    if (all && list_parameters(n->model, true, NULL) != g->parameters)
        return 0;
    TRY(allocate(n, g->parameters, 0, e));
    list_parameters(n->model, all, n->name);
    return 0;
}

/* ---- proof ---- */

struct parameter {
    const char *name;
    struct rank_set_tensor t;
};

static int compare_names(const void *a, const void *b)
{
    const struct parameter *x = a, *y = b;

    return strcmp(x->name, y->name);
}

/* The optimizer's tensor of as many dimensions as its parameter has its shape as well. */
static bool fits(const struct optim_names *n, const struct parameter *all, size_t count,
                 const struct rank_set_tensor *t)
{
    const struct parameter *p;
    struct parameter key;
    size_t number, rest;

    if (!t->distributed || t->nd == 0 || t->dtype == DTYPE_NONE ||
        !parse_path(t->path, t->len, &number, &rest))
        return true;
    if (number >= n->count || !n->name[number])
        return false;
    key.name = n->name[number];
    p = bsearch(&key, all, count, sizeof *all, compare_names);
    return !p || p->t.nd != t->nd ||
           memcmp(p->t.dim, t->dim, t->nd * sizeof *t->dim) == 0;
}

static int prove(struct optim_names *n, const struct rank_set *optim, struct err *e)
{
    size_t count = n->model ? rank_set_count(n->model) : 0;
    CLEANUP_FREE struct parameter *all = calloc(count + 1, sizeof *all);

    if (!all)
        return err_nomem(e);
    for (size_t i = 0; i < count; i++) {
        rank_set_at(n->model, i, &all[i].t);
        all[i].name = all[i].t.path;
    }
    qsort(all, count, sizeof *all, compare_names);
    for (size_t i = 0; n->count > 0 && i < rank_set_count(optim); i++) {
        struct rank_set_tensor t;

        rank_set_at(optim, i, &t);
        if (!fits(n, all, count, &t))
            forget(n);
    }
    return 0;
}

/* Some trainers save names in place of numbers. */
static bool is_numbered(const struct rank_set *optim)
{
    struct rank_set_tensor t;
    size_t number, rest;

    for (size_t i = 0; i < rank_set_count(optim); i++) {
        rank_set_at(optim, i, &t);
        if (parse_path(t.path, t.len, &number, &rest))
            return true;
    }
    return false;
}

static int find(struct optim_names *n, const struct rank_set *optim,
                const struct pv *root, struct err *e)
{
    struct groups g;
    int rc = 0;

    if (!measure_groups(root, &g))
        return 0;
    n->several = g.count > 1 && !g.named;
    if (g.named)
        rc = take_names(n, &g, e);
    else if (g.count == 1 && g.counted && n->model)
        rc = take_order(n, &g, e);
    return rc < 0 ? rc : prove(n, optim, e);
}

int optim_names_find(struct optim_names *n, const struct rank_set *model,
                     const struct rank_set *optim, const struct pv *root, struct err *e)
{
    *n = (struct optim_names){.model = model};
    if (!is_numbered(optim))
        return 0;
    TRY(find(n, optim, root, e));
    n->numbered = n->count == 0;
    return 0;
}
