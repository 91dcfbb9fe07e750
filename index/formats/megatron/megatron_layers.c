/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_layers.c - which layers each stage of Megatron-LM's ranks has. */
#include "index/formats/megatron/megatron_ranks.h"

#include <errno.h>
#include <string.h>

#include "base/keyset.h"
#include "index/formats/megatron/megatron_rules.h"

enum { MAX_LAYERS = 1 << 20 /* numbers of layers that are believed */ };

static struct layer_kind *kind_for(struct legacy *l, const char *prefix, size_t len)
{
    size_t stages = (size_t)l->models * l->pipeline;
    struct layer_kind *k = l->kinds;

    while (k && (k->len != len || memcmp(k->prefix, prefix, len) != 0))
        k = k->next;
    if (k)
        return k;
    k = arena_alloc(l->arena, sizeof *k);
    if (!k)
        return NULL;
    k->prefix = arena_memdup(l->arena, prefix, len);
    k->len = len;
    k->count = arena_array(l->arena, stages, sizeof *k->count);
    k->first = arena_array(l->arena, stages, sizeof *k->first);
    if (!k->prefix || !k->count || !k->first)
        return NULL;
    k->next = l->kinds;
    l->kinds = k;
    return k;
}

/* Counts the layers of one model of a stage; each must be there once from 0 on. */
struct counting {
    struct keyset seen;
    size_t stage;
};

static int count_layer(struct legacy *l, struct counting *k,
                       const struct rank_tensor *x, struct err *e)
{
    struct megatron_name name;
    struct layer_kind *kind;

    megatron_name(x->name, x->len, &name);
    if (name.layer.len == 0)
        return 0;
    if (name.layer.value >= MAX_LAYERS)
        return err_set(e, EBADMSG, "a layer of number %" PRIu64, name.layer.value);
    kind = kind_for(l, x->name, name.layer.at);
    if (!kind)
        return err_nomem(e);
    kind->count[k->stage] = MAX(kind->count[k->stage], name.layer.value + 1);
    return keyset_add(&k->seen, x->name, name.layer.at + name.layer.len) < 0
               ? err_nomem(e)
               : 0;
}

/* Layers without any tensor leave gaps: how many a stage has is then told by args only. */
static int check_gaps(struct legacy *l, const struct counting *k, uint32_t p,
                      struct err *e)
{
    size_t stages = (size_t)l->models * l->pipeline;
    uint64_t sum = 0;

    for (struct layer_kind *kind = l->kinds; kind; kind = kind->next)
        sum += kind->count[k->stage];
    if (sum == k->seen.count)
        return 0;
    if (stages == 1)
        return 0; /* the numbers are those of the whole model */
    return err_set(e, ENOTSUP,
                   "pipeline rank %" PRIu32
                   " has layers without tensors: which numbers "
                   "the layers of the next ones have is not told",
                   p);
}

static int count_model(struct legacy *l, const struct rank *r, uint32_t v,
                       struct err *e)
{
    struct counting k = {.stage = (size_t)v * l->pipeline + r->p};
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < r->model[v].count; i++)
        rc = count_layer(l, &k, &r->model[v].tensor[i], e);
    if (rc == 0)
        rc = check_gaps(l, &k, r->p, e);
    keyset_release(&k.seen);
    return rc;
}

static int count_stage(struct legacy *l, uint32_t p, struct err *e)
{
    struct rank *r = legacy_rank(l, 0, p, 0);
    int rc = 0;

    if (!r)
        return err_set(e, EBADMSG, "pipeline rank %" PRIu32 " is missing", p);
    TRY(legacy_load(l, r, e));
    if (r->err.code) {
        *e = r->err;
        rc = err_wrap(e, "%s", r->path);
    }
    for (uint32_t v = 0; rc == 0 && v < l->models; v++)
        rc = count_model(l, r, v, e);
    legacy_unload(r);
    return rc;
}

/*
 * Stages have the layers in order, and with virtual pipelines all first models have those
 * before all second ones.
 */
int legacy_count_layers(struct legacy *l, struct err *e)
{
    for (uint32_t p = 0; p < l->pipeline; p++)
        TRY(count_stage(l, p, e));
    for (struct layer_kind *k = l->kinds; k; k = k->next) {
        uint64_t sum = 0;

        for (size_t i = 0; i < (size_t)l->models * l->pipeline; i++) {
            k->first[i] = sum;
            sum += k->count[i];
        }
    }
    return 0;
}

uint64_t legacy_layers(const struct legacy *l, const struct layer_kind *k)
{
    size_t last = (size_t)l->models * l->pipeline - 1;

    return k->first[last] + k->count[last];
}
