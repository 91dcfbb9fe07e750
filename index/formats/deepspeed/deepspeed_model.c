/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_model.c - what *_model_states.pt tells of the parameters. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

static int compare_names(const void *a, const void *b)
{
    const struct ds_param *x = *(const struct ds_param *const *)a;
    const struct ds_param *y = *(const struct ds_param *const *)b;
    int order = memcmp(x->name, y->name, MIN(x->len, y->len));

    return order ? order : (x->len > y->len) - (x->len < y->len);
}

static const struct ds_param *find(const struct ds_param *const *by_name, size_t n,
                                   const char *name, size_t len)
{
    const struct ds_param want = {.name = name, .len = len}, *key = &want;
    const struct ds_param *const *found =
        n > 0 ? bsearch(&key, by_name, n, sizeof *by_name, compare_names) : NULL;

    return found ? *found : NULL;
}

const struct ds_param *ds_param_find(const struct ds_part *p, const char *name,
                                     size_t len)
{
    return find(p->by_name, p->nparams, name, len);
}

const struct ds_param *ds_frozen_find(const struct ds_part *p, const char *name,
                                      size_t len)
{
    return find(p->frozen_by_name, p->nfrozen, name, len);
}

/* One "NAME: torch.Size" of param_shapes or frozen_param_shapes. */
static int take_param(struct ds_scan *s, const struct pv *items, size_t i,
                      struct ds_param *out, struct err *e)
{
    struct pv key = pv_key_at(items, i), value = pv_value_at(items, i);
    char text[200];

    if (key.kind != PV_STR)
        return err_set(e, EBADMSG, "a parameter's name is no text");
    out->name = pv_bytes(&key, &out->len);
    if (ds_shape(s->arena, &value, out, e) < 0)
        return err_wrap(e, "%s", ds_text(out->name, out->len, text, sizeof text));
    return 0;
}

static int take_list(struct ds_scan *s, const struct pv *mapping, uint32_t group,
                     struct ds_param *out, size_t *n, struct err *e)
{
    struct pv items;

    if (!torch_mapping(mapping, &items))
        return err_set(e, EBADMSG, "group %u is no dict", group);
    for (size_t i = 0; items.kind == PV_DICT && i < pv_count(&items); i++) {
        struct ds_param *p = &out[*n];

        TRY(take_param(s, &items, i, p, e));
        p->group = group;
        ++*n;
    }
    return 0;
}

static size_t count_items(const struct pv *mapping)
{
    struct pv items;

    return torch_mapping(mapping, &items) && items.kind == PV_DICT ? pv_count(&items)
                                                                   : 0;
}

/* A list of dicts, one a group; until 0.3.16 one dict. */
static int take_shapes(struct ds_scan *s, struct ds_part *p, const struct pv *lists,
                       struct err *e)
{
    bool one = lists->kind != PV_LIST && lists->kind != PV_TUPLE;
    size_t n = one ? 1 : pv_count(lists), total = 0;

    if (n > UINT32_MAX)
        return err_set(e, EBADMSG, "%zu groups", n);
    p->nlists = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        struct pv list = one ? *lists : pv_at(lists, i);

        total += count_items(&list);
    }
    p->param = arena_array(s->arena, MAX(total, (size_t)1), sizeof *p->param);
    if (!p->param)
        return err_nomem(e);
    for (uint32_t i = 0; i < p->nlists; i++) {
        struct pv list = one ? *lists : pv_at(lists, i);

        TRY(take_list(s, &list, i, p->param, &p->nparams, e));
    }
    return 0;
}

/* A name twice would be two answers to one question. */
static int index_names(struct ds_scan *s, const struct ds_param *param, size_t n,
                       const struct ds_param ***out, struct err *e)
{
    const struct ds_param **by_name =
        arena_array(s->arena, MAX(n, (size_t)1), sizeof *by_name);
    char text[200];

    if (!by_name)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++)
        by_name[i] = &param[i];
    qsort(by_name, n, sizeof *by_name, compare_names);
    for (size_t i = 1; i < n; i++)
        if (compare_names(&by_name[i - 1], &by_name[i]) == 0)
            return err_set(
                e, EBADMSG, "%s is there twice",
                ds_text(by_name[i]->name, by_name[i]->len, text, sizeof text));
    *out = by_name;
    return 0;
}

int ds_params_index(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    return index_names(s, p->param, p->nparams, &p->by_name, e);
}

static int take_params(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    struct pv lists;

    p->has_shapes = ds_get_some(&p->root, "param_shapes", &lists);
    if (!p->has_shapes)
        return 0;
    if (take_shapes(s, p, &lists, e) < 0 || ds_params_index(s, p, e) < 0)
        return err_wrap(e, "%s: param_shapes", p->model.path);
    return 0;
}

static int take_frozen(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    struct pv shapes;

    if (!ds_get_some(&p->root, "frozen_param_shapes", &shapes))
        return 0;
    p->frozen =
        arena_array(s->arena, MAX(count_items(&shapes), (size_t)1), sizeof *p->frozen);
    if (!p->frozen)
        return err_nomem(e);
    if (take_list(s, &shapes, 0, p->frozen, &p->nfrozen, e) < 0 ||
        index_names(s, p->frozen, p->nfrozen, &p->frozen_by_name, e) < 0)
        return err_wrap(e, "%s: frozen_param_shapes", p->model.path);
    return 0;
}

/* ---- what is refused ---- */

/* AutoEP cuts experts over groups of their own (DeepSpeed 0.19, "zero3_partitioned"). */
static bool has_partitioned_experts(const struct pv *root)
{
    static const char *const keys[] = {"ds_autoep_layers", "autoep_layers"};
    struct pv layers, format;

    for (size_t k = 0; k < ARRAY_SIZE(keys); k++) {
        if (!ds_get_some(root, keys[k], &layers) || layers.kind != PV_LIST)
            continue;
        for (size_t i = 0; i < pv_count(&layers); i++) {
            struct pv layer = pv_at(&layers, i);

            if (ds_get(&layer, "checkpoint_format", &format) && format.kind == PV_STR &&
                pv_str_is(&format, "zero3_partitioned"))
                return true;
        }
    }
    return false;
}

static int refuse(const struct ds_part *p, struct err *e)
{
    struct pv ignored;

    if (has_partitioned_experts(&p->root)) {
        err_set(e, ENOTSUP,
                "%s: AutoEP experts that ZeRO 3 partitioned are not supported",
                p->model.path);
        return err_hint(e, "convert it with DeepSpeed's ds_to_universal.py");
    }
    if (ds_get_some(&p->root, "folding", &ignored))
        return err_set(e, ENOTSUP, "%s: AutoEP folded with AutoTP is not supported",
                       p->model.path);
    return 0;
}

/* ---- the file ---- */

static int open_file(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    char path[PATH_MAX];

    if (store_join(s->how->dir ? s->how->dir : "", p->files->name, path, sizeof path) <
        0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", p->files->name);
    p->model.path = arena_memdup(s->arena, path, strlen(path));
    if (!p->model.path)
        return err_nomem(e);
    if (torch_file_register(s->sink, &p->model, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    if (torch_file_load(s->c, &p->model, e) < 0)
        return err_wrap(e, "%s", path);
    return 0;
}

int ds_model_open(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    struct pv root, items;

    TRY(open_file(s, p, e));
    root = torch_zip_root(p->model.zip);
    if (!torch_mapping(&root, &p->root) || p->root.kind != PV_DICT)
        return err_set(e, EBADMSG, "%s: the object is no dict", p->model.path);
    p->module = (struct pv){.kind = PV_NONE};
    if (ds_get(&p->root, "module", &root) && torch_mapping(&root, &items))
        p->module = items;
    TRY(refuse(p, e));
    TRY(ds_autoep_take(s, p, e));
    TRY(take_params(s, p, e));
    return take_frozen(s, p, e);
}
