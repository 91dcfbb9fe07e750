/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_ranks.c - the file of one rank of Megatron-LM: its tensors. */
#include "index/formats/megatron/megatron_ranks.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "index/formats/format.h"
#include "index/formats/torch/torch_walk.h"
#include "index/formats/torch/torch_zip.h"
#include "index/sink.h"

enum { MAX_MEMORY = 512 << 20 }; /* names and shapes of one rank */

static int compare_ranks(const void *a, const void *b)
{
    const struct rank *x = a, *y = b;

    if (x->p != y->p)
        return x->p < y->p ? -1 : 1;
    if (x->e != y->e)
        return x->e < y->e ? -1 : 1;
    return x->t < y->t ? -1 : x->t > y->t;
}

int legacy_sort(struct legacy *l, struct err *e)
{
    qsort(l->rank, l->nranks, sizeof *l->rank, compare_ranks);
    for (size_t i = 1; i < l->nranks; i++)
        if (compare_ranks(&l->rank[i - 1], &l->rank[i]) == 0)
            return err_set(e, EBADMSG, "%s and %s are of one rank", l->rank[i - 1].dir,
                           l->rank[i].dir);
    return 0;
}

struct rank *legacy_rank(const struct legacy *l, uint32_t t, uint32_t p, uint32_t e)
{
    const struct rank key = {.p = p, .e = e, .t = t};

    return l->nranks ? bsearch(&key, l->rank, l->nranks, sizeof key, compare_ranks)
                     : NULL;
}

/* ---- collecting ---- */

struct collect {
    struct rank *r;
    struct rank_model *m;
    size_t cap;
};

static struct rank_tensor *add_tensor(struct collect *k, struct err *e)
{
    struct rank_model *m = k->m;

    if (m->count == k->cap) {
        size_t cap = k->cap ? k->cap * 2 : 256;
        struct rank_tensor *grown = reallocarray(m->tensor, cap, sizeof *grown);

        if (!grown) {
            err_nomem(e);
            return NULL;
        }
        m->tensor = grown;
        k->cap = cap;
    }
    m->tensor[m->count] = (struct rank_tensor){0};
    return &m->tensor[m->count++];
}

static int keep(struct arena *a, const struct torch_tensor *x, struct rank_tensor *out,
                struct err *e)
{
    out->dtype = x->dtype;
    out->flags = x->flags;
    out->nd = x->shape.nd;
    out->crc = x->crc;
    out->data = x->data;
    out->data_len = x->data_len;
    out->first = x->storage_offset;
    out->packed = x->packed;
    out->dim = arena_array(a, (size_t)out->nd + 1, sizeof *out->dim);
    out->stride = arena_array(a, (size_t)out->nd + 1, sizeof *out->stride);
    if (!out->dim || !out->stride)
        return err_nomem(e);
    memcpy(out->dim, x->shape.dim, out->nd * sizeof *out->dim);
    memcpy(out->stride, x->stride, out->nd * sizeof *out->stride);
    return 0;
}

/* torch_item_fn */
static int collect_item(void *user, const struct torch_item *item, struct err *e)
{
    struct collect *k = user;
    struct rank_tensor *t = add_tensor(k, e);

    if (!t)
        return -e->code;
    t->name = arena_memdup(k->r->arena, item->key, item->key_len);
    t->len = item->key_len;
    if (!item->tensor)
        t->why = arena_memdup(k->r->arena, item->why, strlen(item->why));
    if (!t->name || (!item->tensor && !t->why))
        return err_nomem(e);
    return item->tensor ? keep(k->r->arena, item->tensor, t, e) : 0;
}

static int compare_names(const void *a, const void *b)
{
    const struct rank_tensor *x = a, *y = b;
    int r = memcmp(x->name, y->name, MIN(x->len, y->len));

    return r ? r : (x->len > y->len) - (x->len < y->len);
}

const struct rank_tensor *rank_find(const struct rank_model *m, const char *name,
                                    size_t len)
{
    const struct rank_tensor key = {.name = name, .len = len};

    return m->count ? bsearch(&key, m->tensor, m->count, sizeof key, compare_names)
                    : NULL;
}

void rank_tensor_open(const struct rank_tensor *x, struct torch_tensor *out)
{
    *out = (struct torch_tensor){
        .dtype = x->dtype,
        .shape = {.nd = x->nd},
        .storage_offset = x->first,
        .data = x->data,
        .data_len = x->data_len,
        .packed = x->packed,
        .crc = x->crc,
        .flags = x->flags,
    };
    memcpy(out->shape.dim, x->dim, x->nd * sizeof *x->dim);
    memcpy(out->stride, x->stride, x->nd * sizeof *x->stride);
}

/* ---- loading ---- */

/* Two tensors of one name: a reader could not tell which. */
static int check_names(const struct rank_model *m, struct err *e)
{
    for (size_t i = 1; i < m->count; i++)
        if (compare_names(&m->tensor[i - 1], &m->tensor[i]) == 0)
            return err_set(e, EBADMSG, "its model has two tensors %.*s",
                           (int)MIN(m->tensor[i].len, (size_t)256), m->tensor[i].name);
    return 0;
}

static int collect_model(struct rank *r, struct rank_model *m, const struct pv *v,
                         struct err *e)
{
    struct collect k = {.r = r, .m = m};
    CLEANUP(torch_walk_release)
    struct torch_walk w = {.zip = r->file.zip,
                           .fn = collect_item,
                           .user = &k,
                           .key = {.max = TORCH_MAX_PATH},
                           .path = {.max = TORCH_MAX_PATH}};

    if (torch_walk_value(&w, *v, e) < 0)
        return -e->code;
    if (w.too_deep > 0 || w.unnamed > 0)
        return err_set(e, EBADMSG, "its model is nested too deep");
    if (m->count > 0)
        qsort(m->tensor, m->count, sizeof *m->tensor, compare_names);
    return check_names(m, e);
}

static int collect_models(const struct legacy *l, struct rank *r, struct err *e)
{
    struct pv root = torch_zip_root(r->file.zip), items, model;
    char name[16];

    if (!torch_mapping(&root, &items) || items.kind != PV_DICT)
        return err_set(e, EBADMSG, "it holds no dict");
    for (uint32_t v = 0; v < l->models; v++) {
        snprintf(name, sizeof name, "model%" PRIu32, v);
        if (!pv_dict_get(&items, l->several ? name : "model", &model))
            return err_set(e, EBADMSG, "it holds no %s", l->several ? name : "model");
        if (collect_model(r, &r->model[v], &model, e) < 0)
            return -e->code;
    }
    return 0;
}

int legacy_load(struct legacy *l, struct rank *r, struct err *e)
{
    r->err = (struct err){0};
    r->file.path = r->path;
    r->arena = arena_new(MAX_MEMORY);
    if (!r->arena)
        return err_nomem(e);
    if (torch_file_register(l->sink, &r->file, &r->err) == 0 &&
        torch_file_load(l->c, &r->file, &r->err) == 0)
        collect_models(l, r, &r->err);
    if (r->err.code == ENOMEM) {
        *e = r->err;
        return -e->code;
    }
    return 0;
}

void legacy_unload(struct rank *r)
{
    for (size_t v = 0; v < MEGATRON_MAX_VIRTUAL; v++) {
        free(r->model[v].tensor);
        r->model[v] = (struct rank_model){0};
    }
    arena_free(r->arena);
    r->arena = NULL;
    torch_file_close(&r->file);
}
