/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_tied.c - which layers of a pipeline are tied modules. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

/*
 * A layer's parameters are called "2.weight" in the optimizer, but those of a TiedLayerSpec
 * "tied_modules.KEY.weight" (DeepSpeed, runtime/pipe/module.py), and no file tells which
 * layer KEY is. It is told by names and shapes: the layer has none of its own, and all that
 * a tied module has. Where two could be meant (equal modules, or frozen layers that look
 * like one), nothing is decided.
 */

enum { MAX_TIED = 64 }; /* modules; every layer is held against each */

static const char tied[] = "tied_modules.";

struct module {
    const char *key; /* "tied_modules.KEY." */
    size_t len;
    size_t params;  /* trained ones */
    size_t matches; /* layers that could be it */
    uint32_t layer; /* the last of them */
};

struct search {
    struct ds_scan *s;
    struct module module[MAX_TIED];
    size_t n;
    bool too_many;
    struct keyset params;  /* names with their shapes */
    struct buf name;       /* scratch */
    struct ds_file *layer; /* malloc: those that are not in s->own */
    size_t nlayers;
};

/* A name and a shape as one key of the set. */
static int set_name(struct search *x, const char *prefix, size_t prefix_len,
                    const char *name, size_t len, const uint64_t *dim, uint32_t nd,
                    struct err *e)
{
    buf_clear(&x->name);
    buf_add(&x->name, prefix, prefix_len);
    buf_add(&x->name, name, len);
    buf_addc(&x->name, '\0');
    if (nd > 0)
        buf_add(&x->name, dim, nd * sizeof *dim);
    return buf_failed(&x->name) ? err_nomem(e) : 0;
}

/* ---- the modules ---- */

static struct module *module_of(struct search *x, const struct ds_param *p)
{
    const char *dot;
    size_t len;

    if (p->len < sizeof tied || memcmp(p->name, tied, sizeof tied - 1) != 0)
        return NULL;
    dot = memchr(p->name + sizeof tied - 1, '.', p->len - (sizeof tied - 1));
    if (!dot)
        return NULL;
    len = (size_t)(dot - p->name) + 1;
    for (size_t i = 0; i < x->n; i++)
        if (x->module[i].len == len && memcmp(x->module[i].key, p->name, len) == 0)
            return &x->module[i];
    if (x->n == MAX_TIED) {
        x->too_many = true;
        return NULL;
    }
    x->module[x->n] = (struct module){.key = p->name, .len = len};
    return &x->module[x->n++];
}

static int find_modules(struct search *x, struct err *e)
{
    for (size_t i = 0; i < x->s->nparts; i++) {
        const struct ds_part *p = &x->s->part[i];

        for (size_t k = 0; p->nranks > 0 && k < p->nparams; k++) {
            struct module *m = module_of(x, &p->param[k]);
            int rc;

            if (!m)
                continue;
            TRY(set_name(x, p->param[k].name, p->param[k].len, "", 0, p->param[k].dim,
                         p->param[k].nd, e));
            rc = keyset_add(&x->params, x->name.data, x->name.len);
            if (rc < 0)
                return err_nomem(e);
            m->params += rc > 0; /* once for all stages that have it */
        }
    }
    return 0;
}

/* ---- layers without parameters of their own ---- */

int ds_own_layer(struct ds_scan *s, const char *name, size_t len, struct err *e)
{
    uint32_t n = 0;
    size_t i = 0;

    for (; i < len && i < 9 && name[i] >= '0' && name[i] <= '9'; i++)
        n = 10 * n + (uint32_t)(name[i] - '0');
    if (i > 0 && i < len && name[i] == '.' && keyset_add(&s->own, &n, sizeof n) < 0)
        return err_nomem(e);
    return 0;
}

static int find_own(struct ds_scan *s, struct err *e)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < s->nparts; i++) {
        const struct ds_part *p = &s->part[i];

        for (size_t k = 0; rc == 0 && k < p->nparams; k++)
            rc = ds_own_layer(s, p->param[k].name, p->param[k].len, e);
        for (size_t k = 0; rc == 0 && k < p->nfrozen; k++)
            rc = ds_own_layer(s, p->frozen[k].name, p->frozen[k].len, e);
    }
    return rc;
}

static int find_layers(struct search *x, struct err *e)
{
    const struct ds_scan *s = x->s;
    size_t n = ds_files_of(&s->files, DS_LAYER);

    x->layer = calloc(MAX(n, (size_t)1), sizeof *x->layer);
    if (!x->layer)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++) {
        const struct ds_file *f = ds_files_at(&s->files, DS_LAYER, i);

        if (!keyset_has(&s->own, &f->layer, sizeof f->layer))
            x->layer[x->nlayers++] = *f;
    }
    return 0;
}

/* ---- which is which ---- */

/* 1: the tensors of the layer are those of the module. */
static int is_module(struct search *x, const struct module *m,
                     const struct torch_file *f, const struct pv *items, struct err *e)
{
    size_t params = 0;

    for (size_t i = 0; i < pv_count(items); i++) {
        struct pv key = pv_key_at(items, i), value = pv_value_at(items, i);
        struct torch_tensor t;
        struct err why = {0};
        const char *name;
        size_t len;

        if (key.kind != PV_STR || torch_zip_tensor(f->zip, &value, &t, &why) <= 0)
            return 0;
        name = pv_bytes(&key, &len);
        TRY(set_name(x, m->key, m->len, name, len, t.shape.dim, t.shape.nd, e));
        if (keyset_has(&x->params, x->name.data, x->name.len))
            params++;
        else if (!keyset_has(&x->s->buffers, x->name.data, m->len + len))
            return 0;
    }
    return params > 0 && params == m->params;
}

/* ds_file_fn */
static int match_layer(void *user, size_t i, const struct torch_file *f, struct err *e)
{
    struct search *x = user;
    struct pv root = torch_zip_root(f->zip), items;
    struct module *last = NULL;

    if (!torch_mapping(&root, &items) || items.kind != PV_DICT)
        return 0;
    for (size_t k = 0; k < x->n; k++) {
        int rc = is_module(x, &x->module[k], f, &items, e);

        if (rc < 0)
            return rc;
        if (rc == 0)
            continue;
        x->module[k].matches++;
        x->module[k].layer = x->layer[i].layer;
        if (last) { /* equal modules: neither is told */
            last->matches++;
            x->module[k].matches++;
        }
        last = &x->module[k];
    }
    return 0;
}

static int note(struct search *x, struct err *e)
{
    struct ds_scan *s = x->s;

    s->tied = arena_array(s->arena, MAX(x->n, (size_t)1), sizeof *s->tied);
    if (!s->tied)
        return err_nomem(e);
    for (size_t i = 0; i < x->n; i++)
        if (x->module[i].matches == 1)
            s->tied[s->ntied++] = (struct ds_tied){.layer = x->module[i].layer,
                                                   .name = x->module[i].key,
                                                   .len = x->module[i].len};
    return 0;
}

int ds_tied_find(struct ds_scan *s, struct err *e)
{
    struct search x = {.s = s};
    int rc = 0;

    if (ds_files_of(&s->files, DS_LAYER) > 0 &&
        ((rc = find_own(s, e)) < 0 || (rc = find_modules(&x, e)) < 0))
        goto out;
    if (rc == 0 && x.n > 0 && !x.too_many)
        rc = find_layers(&x, e);
    if (rc == 0 && x.nlayers > 0)
        rc = ds_each_file(s, x.layer, x.nlayers, match_layer, &x, e);
    if (rc == 0 && x.nlayers > 0)
        rc = note(&x, e);
out:
    keyset_release(&x.params);
    buf_release(&x.name);
    free(x.layer);
    return rc;
}

const struct ds_tied *ds_tied_of(const struct ds_scan *s, uint32_t layer)
{
    for (size_t i = 0; i < s->ntied; i++)
        if (s->tied[i].layer == layer)
            return &s->tied[i];
    return NULL;
}
