/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_autoep.c - layers of experts that AutoEP made of a model's own. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"

/*
 * AutoEP (DeepSpeed 0.19) has all experts of a rank in one tensor, [experts, ...], of which
 * stages 1 and 2 keep masters and states under one name on all ranks; its experts' files
 * have the copy, an expert each: PREFIX.w1.12. Source: 0.19.8, _save_moe_checkpoint() in
 * runtime/engine.py, checkpoint/autoep_affine.py.
 */
enum { MAX_LAYERS = 1024 }; /* each name is held against all */

static bool number(const struct pv *dict, const char *key, uint64_t *out)
{
    struct pv v;

    return ds_get(dict, key, &v) && pv_u64(&v, out);
}

/* The k-th rank, and the experts from k * local on, in their order? */
static bool is_rank(const struct pv *one, uint64_t k, uint64_t local)
{
    uint64_t rank, expert;
    struct pv list, v;

    if (!number(one, "rank", &rank) || rank != k || !ds_get(one, "experts", &list) ||
        list.kind != PV_LIST || pv_count(&list) != local)
        return false;
    for (size_t n = 0; n < pv_count(&list); n++) {
        v = pv_at(&list, n);
        if (!pv_u64(&v, &expert) || expert != k * local + n)
            return false;
    }
    return true;
}

/* Without a descriptor (before it was written) experts lie one behind the other. */
static bool in_order(const struct pv *layer, const struct ds_autoep *x)
{
    struct pv placement, ranks;
    uint64_t version;

    if (!ds_get_some(layer, "expert_placement", &placement))
        return true;
    if (!number(&placement, "version", &version) || version != 1 ||
        !ds_get(&placement, "ranks", &ranks) || ranks.kind != PV_LIST ||
        pv_count(&ranks) != x->sets)
        return false;
    for (size_t k = 0; k < pv_count(&ranks); k++) {
        struct pv one = pv_at(&ranks, k);

        if (!is_rank(&one, k, x->local))
            return false;
    }
    return true;
}

/* NULL, or why its experts cannot be joined. */
static const char *judge(const struct pv *layer, struct ds_autoep *x)
{
    uint64_t all;

    if (!number(layer, "num_experts", &x->total) ||
        !number(layer, "num_local_experts", &x->local) ||
        !number(layer, "ep_size", &x->sets))
        return "ds_autoep_layers does not tell the number of its experts";
    if (x->local == 0 || mul_overflows(x->local, x->sets, &all) || all != x->total)
        return "ds_autoep_layers has other experts than those of its ranks";
    return in_order(layer, x) ? NULL
                              : "experts in another order than the ranks' are not "
                                "supported";
}

int ds_autoep_take(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    struct pv layers;

    if ((!ds_get_some(&p->root, "ds_autoep_layers", &layers) &&
         !ds_get_some(&p->root, "autoep_layers", &layers)) ||
        layers.kind != PV_LIST)
        return 0;
    if (pv_count(&layers) > MAX_LAYERS)
        return err_set(e, ENOTSUP, "%s: more than %d layers of experts", p->model.path,
                       MAX_LAYERS);
    p->autoep =
        arena_array(s->arena, MAX(pv_count(&layers), (size_t)1), sizeof *p->autoep);
    if (!p->autoep)
        return err_nomem(e);
    for (size_t i = 0; i < pv_count(&layers); i++) {
        struct pv layer = pv_at(&layers, i), prefix;
        struct ds_autoep *x = &p->autoep[p->nautoep];

        if (!ds_get(&layer, "expert_key_prefix", &prefix) || prefix.kind != PV_STR)
            continue;
        x->prefix = pv_bytes(&prefix, &x->len);
        x->why = judge(&layer, x);
        p->nautoep++;
    }
    return 0;
}

/* ".w1", ".w2" or ".w3"; *end: behind it. */
static bool is_weight(const char *name, size_t len, size_t *end)
{
    *end = 3;
    return len >= 3 && name[0] == '.' && name[1] == 'w' && name[2] >= '1' &&
           name[2] <= '3';
}

static const struct ds_autoep *find(const struct ds_part *p, const char *name,
                                    size_t len, size_t *end)
{
    for (size_t i = 0; i < p->nautoep; i++) {
        const struct ds_autoep *x = &p->autoep[i];

        if (len > x->len && memcmp(name, x->prefix, x->len) == 0 &&
            is_weight(name + x->len, len - x->len, end)) {
            *end += x->len;
            return x;
        }
    }
    return NULL;
}

const struct ds_autoep *ds_autoep_find(const struct ds_part *p, const char *name,
                                       size_t len)
{
    size_t end;
    const struct ds_autoep *x = find(p, name, len, &end);

    return x && end == len ? x : NULL;
}

size_t ds_autoep_whole(const struct ds_part *p, const char *name, size_t len)
{
    size_t end, at;

    if (!find(p, name, len, &end) || end + 1 >= len || name[end] != '.')
        return 0;
    for (at = end + 1; at < len && isdigit((unsigned char)name[at]); at++)
        ;
    return at == len ? end : 0;
}

int ds_autoep_join(const struct ds_part *p, struct ds_param *x, struct err *e)
{
    const struct ds_autoep *layer = ds_autoep_find(p, x->name, x->len);
    uint32_t sets = ds_sets(p, x->group);
    uint64_t ignored;
    char text[200];

    if (!layer)
        return 0;
    ds_text(x->name, x->len, text, sizeof text);
    if (layer->why)
        return err_set(e, ENOTSUP, "%s: %s", text, layer->why);
    if (layer->sets != sets || x->nd == 0 || x->dim[0] != layer->local ||
        mul_overflows(x->elements, sets, &ignored))
        return err_set(e, EBADMSG,
                       "%s: it is not of %" PRIu64 " experts on each of %" PRIu64
                       " ranks, as its layer is",
                       text, layer->local, layer->sets);
    x->joined = sets;
    return 1;
}
