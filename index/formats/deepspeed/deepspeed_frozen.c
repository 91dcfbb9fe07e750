/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_frozen.c - frozen parameters, whole or in parts. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

/* Sources: DeepSpeed 0.19.8, _zero2_merge_frozen_params(), _zero3_merge_frozen_params(). */

/*
 * The fragment of the i-th frozen parameter: 1 when it is a tensor. Both dicts are made by
 * one loop, so that it stands at the same place.
 */
static int fragment_of(const struct torch_file *f, const struct pv *root, size_t i,
                       const struct ds_param *x, struct torch_tensor *out,
                       struct err *why)
{
    struct pv fragments, items, key, value;
    const char *name;
    size_t len;

    if (!ds_get_some(root, "frozen_param_fragments", &fragments) ||
        !torch_mapping(&fragments, &items) || items.kind != PV_DICT ||
        i >= pv_count(&items))
        return 0;
    key = pv_key_at(&items, i);
    value = pv_value_at(&items, i);
    if (key.kind != PV_STR)
        return 0;
    name = pv_bytes(&key, &len);
    if (len != x->len || memcmp(name, x->name, len) != 0)
        return 0;
    return torch_zip_tensor(f->zip, &value, out, why);
}

/* ---- stage 2: whole ---- */

static bool has_shape(const struct torch_tensor *t, const struct ds_param *x)
{
    return t->shape.nd == x->nd &&
           memcmp(t->shape.dim, x->dim, x->nd * sizeof *x->dim) == 0;
}

static int report_fault(struct ds_scan *s, struct ds_part *p, const struct ds_param *x,
                        const char *why, struct err *e)
{
    struct shape shape;
    struct sink_tensor t = {.key = x->name,
                            .key_len = x->len,
                            .part = s->how->part,
                            .role = s->how->weights,
                            .dtype = DTYPE_F32,
                            .shape = &shape};

    ds_shape_of(x, &shape);
    TRY(ds_begin(s, p->model.path, &t, e));
    if (sink_fault(s->sink, "%s", why) < 0)
        return err_nomem(e);
    return sink_tensor_end(s->sink, e);
}

static int report_whole(struct ds_scan *s, struct ds_part *p, size_t i, struct err *e)
{
    const struct ds_param *x = &p->frozen[i];
    struct torch_tensor tensor;
    struct err why = {0};
    struct sink_tensor t = {.key = x->name,
                            .key_len = x->len,
                            .part = s->how->part,
                            .role = s->how->weights};
    const struct ds_autoep *layer = ds_autoep_find(p, x->name, x->len);
    int rc;

    /* The first rank's experts alone; the experts' files have all. */
    if (layer && layer->sets > 1)
        return 0;
    rc = ds_see(s, x->name, x->len, e);
    if (rc <= 0)
        return rc;
    rc = fragment_of(&p->model, &p->root, i, x, &tensor, &why);
    if (rc == -ENOMEM)
        return err_nomem(e);
    if (rc <= 0)
        return report_fault(s, p, x, rc < 0 ? why.text : "it has no fragment", e);
    if (!has_shape(&tensor, x))
        return report_fault(s, p, x, "its fragment has another shape", e);
    return torch_file_tensor(s->sink, &p->model, &tensor, &t, e);
}

/* ---- stage 3: a part a rank ---- */

static void take_fragments(struct ds_part *p, size_t r, const struct torch_file *f,
                           const struct pv *root)
{
    p->fragment_file[r] = f->number;
    for (size_t i = 0; i < p->nfrozen; i++) {
        struct ds_flat *flat = &p->fragment[r * p->nfrozen + i];
        struct torch_tensor x;
        struct err ignored = {0};

        if (fragment_of(f, root, i, &p->frozen[i], &x, &ignored) <= 0 || x.packed ||
            x.shape.nd != 1 || (x.shape.dim[0] > 1 && x.stride[0] != 1))
            continue;
        *flat = (struct ds_flat){
            .at = x.data + x.storage_offset * dtype_unit(x.dtype),
            .count = x.shape.dim[0],
            .kind = DS_FLAT_VECTOR,
            .dtype = (uint8_t)x.dtype,
            .flags = x.flags,
        };
    }
}

static int add_part(struct ds_scan *s, const struct ds_part *p, size_t r, size_t i,
                    const struct shape *shape, uint64_t part, struct ds_runs *runs,
                    struct err *e)
{
    const struct ds_flat *flat = &p->fragment[r * p->nfrozen + i];
    const struct ds_flat *first = &p->fragment[i];
    uint64_t n = p->frozen[i].elements;
    struct ds_piece piece = {.file = p->fragment_file[r],
                             .at = flat->at,
                             .begin = r * part,
                             .count = r * part < n ? MIN(part, n - r * part) : 0,
                             .flags = flat->flags};

    /*
     * Codes of 8 bits; their scales are an attribute, which the copy that is saved has lost
     * (0.17.6 and 0.19.8, _partition_param(), _get_param_fragment_func()).
     */
    if (p->quantised && flat->kind == DS_FLAT_VECTOR && flat->dtype == DTYPE_I8)
        return sink_fault(s->sink, "it is quantised, and its scales were not saved") < 0
                   ? err_nomem(e)
                   : 0;
    /* All are of one length: another one would shift those of the ranks behind. */
    if (flat->kind == DS_FLAT_VECTOR && flat->dtype == first->dtype &&
        flat->count == part) {
        if (piece.count == 0)
            return 0;
        return runs ? ds_runs_add(runs, &piece, e)
                    : ds_add_piece(s, shape, (enum dtype)flat->dtype, &piece, e);
    }
    if (sink_fault(s->sink,
                   "rank %zu has %" PRIu64 " elements of it, its part has %" PRIu64, r,
                   flat->count, part) < 0)
        return err_nomem(e);
    return 0;
}

static int add_parts(struct ds_scan *s, const struct ds_part *p, size_t i,
                     struct ds_runs *runs, struct err *e)
{
    uint64_t n = p->frozen[i].elements, part = n / p->nmodels + (n % p->nmodels > 0);
    struct shape shape;

    ds_shape_of(&p->frozen[i], &shape);
    for (size_t r = 0; r < p->nmodels; r++)
        TRY(add_part(s, p, r, i, &shape, part, runs, e));
    return 0;
}

enum dtype ds_frozen_type(const struct ds_part *p, size_t i)
{
    const struct ds_flat *flat = &p->fragment[i];

    return flat->kind == DS_FLAT_VECTOR ? (enum dtype)flat->dtype : DTYPE_F32;
}

static int report_parts(struct ds_scan *s, const struct ds_part *p, size_t i,
                        const char *name, size_t len, struct err *e)
{
    struct shape shape;
    struct sink_tensor t = {.key = name,
                            .key_len = len,
                            .part = s->how->part,
                            .role = s->how->weights,
                            .shape = &shape};
    int seen = ds_see(s, name, len, e);

    if (seen <= 0)
        return seen;
    ds_shape_of(&p->frozen[i], &shape);
    t.dtype = ds_frozen_type(p, i);
    TRY(ds_begin(s, p->model.path, &t, e));
    TRY(add_parts(s, p, i, NULL, e));
    return sink_tensor_end(s->sink, e);
}

int ds_frozen_runs(struct ds_scan *s, const struct ds_part *p, size_t i,
                   struct ds_runs *out, struct err *e)
{
    return add_parts(s, p, i, out, e);
}

struct reading {
    struct ds_scan *s;
    struct ds_part *p;
};

/* ds_file_fn: model states of the second rank and those behind it */
static int read_model(void *user, size_t i, const struct torch_file *f, struct err *e)
{
    struct reading *x = user;
    struct pv root = torch_zip_root(f->zip), items;

    if (!torch_mapping(&root, &items))
        return err_set(e, EBADMSG, "%s: the object is no dict", f->path);
    take_fragments(x->p, i + 1, f, &items);
    return ds_rank_objects(x->s, f, e);
}

int ds_frozen_read(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    struct reading x = {s, p};
    struct pv option;
    uint64_t n;

    p->quantised =
        ds_zero_option(&p->root, "zero_quantized_nontrainable_weights", &option) &&
        option.kind == PV_BOOL && option.b;
    if (mul_overflows(p->nmodels, MAX(p->nfrozen, (size_t)1), &n))
        return err_set(e, EBADMSG, "too many frozen parameters");
    p->fragment = arena_array(s->arena, n, sizeof *p->fragment);
    p->fragment_file = arena_array(s->arena, p->nmodels, sizeof *p->fragment_file);
    if (!p->fragment || !p->fragment_file)
        return err_nomem(e);
    take_fragments(p, 0, &p->model, &p->root);
    return ds_each_file(s, p->files + 1, p->nmodels - 1, read_model, &x, e);
}

static int report_sharded(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    TRY(ds_frozen_read(s, p, e));
    for (size_t i = 0; i < p->nfrozen; i++)
        TRY(report_parts(s, p, i, p->frozen[i].name, p->frozen[i].len, e));
    return 0;
}

int ds_report_frozen(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    if (s->stage == 3)
        return report_sharded(s, p, e);
    for (size_t i = 0; i < p->nfrozen; i++)
        TRY(report_whole(s, p, i, e));
    return 0;
}

int ds_report_frozen_alias(struct ds_scan *s, const struct ds_part *p,
                           const struct ds_param *x, const char *name, size_t len,
                           struct err *e)
{
    return report_parts(s, p, (size_t)(x - p->frozen), name, len, e);
}
