/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_graph.c - values of DeepSpeed's pickles. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/torch/torch_walk.h"
#include "index/key_text.h"

bool ds_get(const struct pv *mapping, const char *key, struct pv *out)
{
    struct pv items;

    return torch_mapping(mapping, &items) && items.kind == PV_DICT &&
           pv_dict_get(&items, key, out);
}

bool ds_get_some(const struct pv *mapping, const char *key, struct pv *out)
{
    return ds_get(mapping, key, out) && out->kind != PV_NONE;
}

bool ds_zero_option(const struct pv *root, const char *key, struct pv *out)
{
    struct pv config, zero;

    return ds_get_some(root, "ds_config", &config) &&
           ds_get_some(&config, "zero_optimization", &zero) &&
           ds_get_some(&zero, key, out);
}

bool ds_number(const struct pv *v, uint64_t *out)
{
    struct pv class, args, first;

    if (v->kind != PV_OBJECT)
        return pv_u64(v, out);
    class = pv_class(v);
    args = pv_args(v);
    if (!pv_is(&class, "deepspeed.runtime.zero.config", "ZeroStageEnum") ||
        pv_count(&args) != 1)
        return false;
    first = pv_at(&args, 0);
    return pv_u64(&first, out);
}

/* The items of what stands for a shape. */
static bool shape_items(const struct pv *v, struct pv *items)
{
    struct pv args;

    *items = *v;
    if (v->kind == PV_OBJECT) {
        args = pv_args(v);
        if (!pv_is(v, "torch", "Size") || pv_count(&args) != 1)
            return false;
        *items = pv_at(&args, 0);
    }
    return items->kind == PV_TUPLE || items->kind == PV_LIST;
}

int ds_shape(struct arena *a, const struct pv *v, struct ds_param *out, struct err *e)
{
    struct shape shape;
    struct err why = {0};
    struct pv items;
    uint64_t *dim;

    if (!shape_items(v, &items) || pv_count(&items) > SHAPE_MAX_DIMS)
        return err_set(e, EBADMSG, "it has no shape");
    shape.nd = (uint32_t)pv_count(&items);
    for (uint32_t k = 0; k < shape.nd; k++) {
        struct pv item = pv_at(&items, k);

        if (!pv_u64(&item, &shape.dim[k]))
            return err_set(e, EBADMSG, "dimension %u of its shape is no size", k);
    }
    if (shape_elements(&shape, &out->elements, &why) < 0)
        return err_set(e, EBADMSG, "its shape: %s", why.text);
    dim = arena_array(a, MAX(shape.nd, 1U), sizeof *dim);
    if (!dim)
        return err_nomem(e);
    memcpy(dim, shape.dim, shape.nd * sizeof *dim);
    out->dim = dim;
    out->nd = shape.nd;
    return 0;
}

const char *ds_text(const char *name, size_t len, char *dst, size_t size)
{
    return key_text(dst, size, name, len);
}
