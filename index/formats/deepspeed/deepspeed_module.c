/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_module.c - the copy that the model computed with. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

int ds_see(struct ds_scan *s, const char *name, size_t len, struct err *e)
{
    int rc = keyset_add(&s->seen, name, len);

    return rc < 0 ? err_nomem(e) : rc;
}

/* ---- one file of it ---- */

struct module {
    struct ds_scan *s;
    const struct torch_file *f;
    const char *layer; /* "layer_02/", or NULL: a module's names */
    uint32_t number;   /* of the layer */
    uint64_t hollow;   /* placeholders that nothing else stands for */
    struct buf key;
};

static int report(struct module *m, const char *prefix, const struct torch_item *item,
                  int role, struct err *e)
{
    static const struct shape none = {.nd = 1};
    struct sink_tensor t = {.part = m->s->how->part, .role = role};

    buf_clear(&m->key);
    buf_adds(&m->key, prefix);
    buf_add(&m->key, item->key, item->key_len);
    if (buf_failed(&m->key))
        return err_nomem(e);
    t.key = m->key.data ? m->key.data : "";
    t.key_len = m->key.len;
    if (item->tensor) {
        int rc = torch_file_tensor(m->s->sink, m->f, item->tensor, &t, e);

        if (rc != -EEXIST)
            return rc;
        *e = (struct err){0};
        t.shape = &item->tensor->shape;
    } else {
        t.dtype = DTYPE_U8;
        t.shape = &none;
    }
    TRY(ds_begin(m->s, m->f->path, &t, e));
    if (sink_fault(m->s->sink, "%s", item->tensor ? "its key is taken" : item->why) < 0)
        return err_nomem(e);
    return sink_tensor_end(m->s->sink, e);
}

static bool is_empty(const struct torch_item *item)
{
    const struct shape *shape = item->tensor ? &item->tensor->shape : NULL;

    return shape && shape->nd == 1 && shape->dim[0] == 0;
}

/* One expert of a tensor that is there as a whole (AutoEP). */
static bool is_of_whole(const struct ds_scan *s, const struct torch_item *item)
{
    size_t len = s->nparts > 0 ? ds_autoep_whole(s->part, item->key, item->key_len) : 0;

    return len > 0 && keyset_has(&s->seen, item->key, len);
}

/*
 * A tensor of the module: it is NAME where there is no master of it (buffers, frozen ones,
 * all of stage 0), and module.NAME where stages 0 to 2 keep a copy.
 */
static int add_item(void *user, const struct torch_item *item, struct err *e)
{
    struct module *m = user;
    int seen;

    if (m->s->stage == 3 && is_empty(item)) {
        m->hollow += !keyset_has(&m->s->seen, item->key, item->key_len);
        return 0;
    }
    seen = is_of_whole(m->s, item) ? 0 : ds_see(m->s, item->key, item->key_len, e);
    if (seen < 0)
        return seen;
    if (seen > 0)
        TRY(report(m, "", item, m->s->how->weights, e));
    if (seen > 0 && m->s->stage == 3)
        return 0;
    return report(m, "module.", item, ROLE_OTHER, e);
}

/* Values that are no tensors: "_extra_state" of some layers. */
static int add_object(struct module *m, const char *name, size_t len,
                      const struct pv *v, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0}, path = {0};
    struct ds_entry x = {.f = m->f, .prefix = m->layer ? m->layer : "module."};

    buf_adds(&key, x.prefix);
    buf_add(&key, name, len);
    buf_add(&path, name, len);
    buf_addc(&path, '\0');
    if (buf_failed(&key) || buf_failed(&path))
        return err_nomem(e);
    x.path = path.data;
    return ds_entry_object(m->s, &x, key.data, v, e);
}

static int add_entry(struct module *m, struct torch_walk *w, const struct pv *key,
                     const struct pv *value, struct err *e)
{
    uint64_t others = w->others;
    const char *name;
    size_t len;

    if (key->kind != PV_STR)
        return err_set(e, EBADMSG, "%s: a name of the module is no text", m->f->path);
    name = pv_bytes(key, &len);
    buf_clear(&w->key);
    buf_clear(&w->path);
    buf_add(&w->key, name, len);
    buf_add(&w->path, name, len);
    if (torch_walk_value(w, *value, e) < 0)
        return err_wrap(e, "%s", m->f->path);
    return w->others > others ? add_object(m, name, len, value, e) : 0;
}

static int add_dict(struct module *m, const struct pv *items, torch_item_fn *fn,
                    struct err *e)
{
    CLEANUP(torch_walk_release)
    struct torch_walk w = {.zip = m->f->zip,
                           .fn = fn,
                           .user = m,
                           .key = {.max = TORCH_MAX_PATH},
                           .path = {.max = TORCH_MAX_PATH}};

    for (size_t i = 0; items->kind == PV_DICT && i < pv_count(items); i++) {
        struct pv key = pv_key_at(items, i), value = pv_value_at(items, i);

        TRY(add_entry(m, &w, &key, &value, e));
    }
    return 0;
}

int ds_report_module(struct ds_scan *s, const struct torch_file *f,
                     const struct pv *dict, struct err *e)
{
    struct module m = {.s = s, .f = f};
    int rc = add_dict(&m, dict, add_item, e);

    buf_release(&m.key);
    if (rc == 0 && m.hollow > 0 &&
        sink_warning(s->sink, "no-weights",
                     "%s: %" PRIu64 " parameters are named there and stored nowhere",
                     f->path, m.hollow) < 0)
        return err_nomem(e);
    return rc;
}

/* torch_item_fn */
static int skip_item(void *user UNUSED, const struct torch_item *item UNUSED,
                     struct err *e UNUSED)
{
    return 0;
}

int ds_module_objects(struct ds_scan *s, const struct torch_file *f,
                      const struct pv *dict, struct err *e)
{
    struct module m = {.s = s, .f = f};
    int rc = add_dict(&m, dict, skip_item, e);

    buf_release(&m.key);
    return rc;
}

/* ---- layers of a pipeline ---- */

/*
 * Buffers and frozen parameters have no masters, and are NAME as well. No file names the
 * latter: they are what else is in a layer that has something of its own number. (One
 * that has not may be a tied module, which is frozen as a whole.)
 */
static bool is_named(const struct module *m, const struct ds_tied *tied,
                     const char *name, size_t len)
{
    const struct ds_scan *s = m->s;

    if (keyset_has(&s->buffers, name, len))
        return true;
    return !tied && s->nparts > 0 && s->part[0].has_shapes && s->part[0].nranks > 0 &&
           keyset_has(&s->own, &m->number, sizeof m->number);
}

/* torch_item_fn */
static int add_layer_item(void *user, const struct torch_item *item, struct err *e)
{
    struct module *m = user;
    const struct ds_tied *tied = ds_tied_of(m->s, m->number);
    CLEANUP(buf_release) struct buf name = {0};
    struct torch_item named = *item;
    bool master;

    if (tied)
        buf_add(&name, tied->name, tied->len);
    else
        buf_addf(&name, "%u.", m->number);
    buf_add(&name, item->key, item->key_len);
    if (buf_failed(&name))
        return err_nomem(e);
    master = keyset_has(&m->s->seen, name.data, name.len);
    if (!master && is_named(m, tied, name.data, name.len)) {
        TRY(ds_see(m->s, name.data, name.len, e));
        named.key = name.data;
        named.key_len = name.len;
        TRY(report(m, "", &named, m->s->how->weights, e));
        master = true;
    }
    return report(m, m->layer, item, master ? ROLE_OTHER : m->s->how->weights, e);
}

int ds_report_layer(struct ds_scan *s, const struct torch_file *f, uint32_t layer,
                    struct err *e)
{
    char prefix[32];
    struct module m = {.s = s, .f = f, .layer = prefix, .number = layer};
    struct pv root = torch_zip_root(f->zip), items;
    int rc;

    snprintf(prefix, sizeof prefix, "layer_%02u/", layer);
    if (!torch_mapping(&root, &items))
        return err_set(e, EBADMSG, "%s: the object is no dict", f->path);
    rc = add_dict(&m, &items, add_layer_item, e);
    buf_release(&m.key);
    return rc;
}

/* ---- tied names ---- */

static int warn_tied(struct ds_scan *s, const struct pv *alias, const struct pv *owner,
                     struct err *e)
{
    char text[2][200] = {"?", "?"};
    const char *name;
    size_t len;

    name = pv_bytes(alias, &len);
    ds_text(name, len, text[0], sizeof text[0]);
    if (owner->kind == PV_STR) {
        name = pv_bytes(owner, &len);
        ds_text(name, len, text[1], sizeof text[1]);
    }
    if (sink_warning(s->sink, "tied", "%s is tied to %s, which does not exist", text[0],
                     text[1]) < 0)
        return err_nomem(e);
    return 0;
}

static int module_names(const struct ds_part *p, struct keyset *out, struct err *e)
{
    for (size_t i = 0; p->module.kind == PV_DICT && i < pv_count(&p->module); i++) {
        struct pv key = pv_key_at(&p->module, i);
        const char *name;
        size_t len;

        if (key.kind != PV_STR)
            continue;
        name = pv_bytes(&key, &len);
        if (keyset_add(out, name, len) < 0)
            return err_nomem(e);
    }
    return 0;
}

/* A parameter or, in stage 3, a frozen one, with elements of that name. */
static const struct ds_param *find_own(const struct ds_scan *s, const struct ds_part *p,
                                       const char *name, size_t len)
{
    const struct ds_param *x = ds_param_find(p, name, len);

    return x || s->stage < 3 ? x : ds_frozen_find(p, name, len);
}

/*
 * DeepSpeed never notes what has elements of its own, and its converter drops those. (By the
 * address of its elements it tells what is shared: parameters that have none have one.)
 */
static int refuse_tied(const struct ds_part *p, const char *name, size_t len,
                       struct err *e)
{
    char text[200];

    ds_text(name, len, text, sizeof text);
    return err_set(e, EBADMSG, "%s: shared_params: %s is a parameter of its own",
                   p->model.path, text);
}

static int add_tied(struct ds_scan *s, struct ds_part *p, const struct keyset *module,
                    const struct pv *alias, const struct pv *owner, struct err *e)
{
    const struct ds_param *x = NULL, *frozen = NULL, *own;
    const char *name;
    size_t len;

    if (alias->kind != PV_STR)
        return 0;
    if (owner->kind == PV_STR) {
        name = pv_bytes(owner, &len);
        x = ds_param_find(p, name, len);
        frozen = s->stage == 3 ? ds_frozen_find(p, name, len) : NULL;
    }
    name = pv_bytes(alias, &len);
    own = find_own(s, p, name, len);
    if (own && (x || frozen) && own != x && own != frozen)
        return own->elements == 0 || (x ? x : frozen)->elements == 0
                   ? 0
                   : refuse_tied(p, name, len, e);
    if (x && p->nranks > 0)
        return ds_report_alias(s, p, x, name, len, e);
    if (frozen)
        return ds_report_frozen_alias(s, p, frozen, name, len, e);
    /* Frozen ones of other stages are in the module under both names. */
    if (keyset_has(&s->seen, name, len) ||
        (s->stage < 3 && keyset_has(module, name, len)))
        return 0;
    return warn_tied(s, alias, owner, e);
}

int ds_report_tied(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    struct keyset module = {0};
    struct pv shared, items;
    int rc;

    if (!ds_get_some(&p->root, "shared_params", &shared) ||
        !torch_mapping(&shared, &items) || items.kind != PV_DICT)
        return 0;
    rc = module_names(p, &module, e);
    for (size_t i = 0; rc == 0 && i < pv_count(&items); i++) {
        struct pv alias = pv_key_at(&items, i), owner = pv_value_at(&items, i);

        rc = add_tied(s, p, &module, &alias, &owner, e);
    }
    keyset_release(&module);
    return rc;
}
