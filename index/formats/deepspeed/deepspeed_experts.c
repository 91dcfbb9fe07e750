/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_experts.c - the global names of experts that ranks share. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

/*
 * Each rank names its own experts from 0 on; expert files have global numbers. Ranks r, r +
 * sets, r + 2 sets, ... share the experts of set r (DeepSpeed 0.19.8: get_ep_ranks() in
 * runtime/zero/stage_1_and_2.py, _save_moe_checkpoint() in runtime/engine.py).
 */
static const char marker[] = ".deepspeed_moe.experts.deepspeed_experts.";

enum { MAX_LAYERS = 4096, MAX_DIGITS = 8 };

/* "LAYER" MARKER "3" "REST" */
struct expert_name {
    size_t layer;       /* bytes before the marker */
    size_t number, end; /* where the digits are */
    uint64_t local;
};

static bool take_apart(const struct ds_param *x, struct expert_name *out)
{
    const char *found = memmem(x->name, x->len, marker, sizeof marker - 1);

    if (!found)
        return false;
    out->layer = (size_t)(found - x->name);
    out->number = out->end = out->layer + sizeof marker - 1;
    out->local = 0;
    while (out->end < x->len && out->end - out->number < MAX_DIGITS &&
           isdigit((unsigned char)x->name[out->end]))
        out->local = out->local * 10 + (uint64_t)(x->name[out->end++] - '0');
    return out->end > out->number && out->end < x->len && x->name[out->end] == '.';
}

static struct ds_experts *find_layer(const struct ds_part *p, const struct ds_param *x,
                                     const struct expert_name *n)
{
    for (size_t i = p->nexperts; i-- > 0;)
        if (p->experts[i].len == n->layer &&
            memcmp(p->experts[i].layer, x->name, n->layer) == 0)
            return &p->experts[i];
    return NULL;
}

static int count_expert(struct ds_scan *s, struct ds_part *p, const struct ds_param *x,
                        struct err *e)
{
    struct expert_name n;
    struct ds_experts *layer;
    char text[200];

    if (!take_apart(x, &n)) {
        err_set(e, ENOTSUP,
                "%s: only some ranks share it, and it is no expert of "
                "DeepSpeed's MoE layer",
                ds_text(x->name, x->len, text, sizeof text));
        return err_hint(e, "convert it with DeepSpeed's ds_to_universal.py");
    }
    if (!p->experts)
        p->experts = arena_array(s->arena, MAX_LAYERS, sizeof *p->experts);
    if (!p->experts)
        return err_nomem(e);
    layer = find_layer(p, x, &n);
    if (!layer && p->nexperts == MAX_LAYERS)
        return err_set(e, ENOTSUP, "more than %d layers of experts", MAX_LAYERS);
    if (!layer) {
        layer = &p->experts[p->nexperts++];
        *layer = (struct ds_experts){.layer = x->name, .len = n.layer};
    }
    layer->local = MAX(layer->local, n.local + 1);
    layer->sets = MAX(layer->sets, (uint64_t)ds_sets(p, x->group));
    return 0;
}

/* Then other ranks than those above share the experts. */
static int refuse_other_order(const struct ds_part *p, struct err *e)
{
    struct pv config, value;

    if (!ds_get_some(&p->root, "ds_config", &config) ||
        !ds_get(&config, "use_data_before_expert_parallelism", &value) ||
        value.kind != PV_BOOL || !value.b)
        return 0;
    return err_set(e, ENOTSUP,
                   "%s: use_data_before_expert_parallelism is not supported",
                   p->model.path);
}

/* ---- how many experts a rank has ---- */

/*
 * The number of experts, where all layers have one: `num_experts` has an entry a layer, in an
 * order that is not told (DeepSpeed until 0.5: one number).
 */
static bool same_number(const struct ds_part *p, uint64_t *out)
{
    struct pv list, one;
    uint64_t n;

    if (!ds_get_some(&p->root, "num_experts", &list))
        return false;
    if (list.kind != PV_LIST)
        return pv_u64(&list, out);
    for (size_t i = 0; i < pv_count(&list); i++) {
        one = pv_at(&list, i);
        if (!pv_u64(&one, &n) || (i > 0 && n != *out))
            return false;
        *out = n;
    }
    return pv_count(&list) > 0;
}

/* ds_file_fn: the names in an expert's file have its global number. */
static int take_file(void *user, size_t i UNUSED, const struct torch_file *f,
                     struct err *e UNUSED)
{
    const struct ds_part *p = user;
    struct pv root = torch_zip_root(f->zip), items;

    if (!torch_mapping(&root, &items) || items.kind != PV_DICT)
        return 0;
    for (size_t k = 0; k < pv_count(&items); k++) {
        struct pv key = pv_key_at(&items, k);
        struct ds_experts *layer;
        struct expert_name n;
        struct ds_param x = {0};

        if (key.kind != PV_STR)
            continue;
        x.name = pv_bytes(&key, &x.len);
        layer = take_apart(&x, &n) ? find_layer(p, &x, &n) : NULL;
        if (layer)
            layer->total = MAX(layer->total, n.local + 1);
    }
    return 0;
}

/*
 * Experts that are not trained are in no group: the highest number of those that are does not
 * tell how many a rank has, and a wrong count would give the next ranks' experts other names.
 */
static int count_totals(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    const struct ds_files *files = &s->files;
    uint64_t total;

    if (!same_number(p, &total))
        return ds_each_file(s, &files->file[files->begin[DS_EXPERT]],
                            ds_files_of(files, DS_EXPERT), take_file, p, e);
    for (size_t i = 0; i < p->nexperts; i++)
        p->experts[i].total = total;
    return 0;
}

static int set_local(struct ds_experts *layer, struct err *e)
{
    char text[200];

    ds_text(layer->layer, layer->len, text, sizeof text);
    if (layer->total == 0) {
        err_set(e, ENOTSUP, "%s: nothing tells how many experts it has", text);
        return err_hint(e, "num_experts of the model states does, or the files "
                           "layer_L_expert_E_mp_rank_00_model_states.pt");
    }
    if (layer->total % layer->sets != 0 || layer->total / layer->sets < layer->local)
        return err_set(e, EBADMSG,
                       "%s: %" PRIu64 " experts are not on %" PRIu64
                       " ranks with %" PRIu64 " or more each",
                       text, layer->total, layer->sets, layer->local);
    layer->local = layer->total / layer->sets;
    return 0;
}

int ds_experts_count(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    bool joined = false;

    for (size_t i = 0; i < p->nparams; i++) {
        int rc = ds_autoep_join(p, &p->param[i], e);

        if (rc < 0)
            return rc;
        if (rc == 0 && ds_sets(p, p->param[i].group) > 1)
            TRY(count_expert(s, p, &p->param[i], e));
        joined = joined || rc > 0;
    }
    if (joined || p->nexperts > 0)
        TRY(refuse_other_order(p, e));
    if (p->nexperts == 0)
        return 0;
    TRY(count_totals(s, p, e));
    for (size_t i = 0; i < p->nexperts; i++)
        TRY(set_local(&p->experts[i], e));
    return 0;
}

int ds_expert_name(const struct ds_part *p, const struct ds_param *x, uint32_t set,
                   struct buf *out, struct err *e)
{
    const struct ds_experts *layer = NULL;
    struct expert_name n;

    buf_clear(out);
    if (set > 0 && take_apart(x, &n))
        layer = find_layer(p, x, &n);
    if (layer) {
        buf_add(out, x->name, n.number);
        buf_addf(out, "%" PRIu64, n.local + set * layer->local);
        buf_add(out, x->name + n.end, x->len - n.end);
    } else {
        buf_add(out, x->name, x->len);
    }
    return buf_failed(out) ? err_nomem(e) : 0;
}
