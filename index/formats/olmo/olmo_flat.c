/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_flat.c - which ranges of parameters a rank of OLMo's type local holds. */
#include "index/formats/olmo/olmo_flat.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/rankfiles/dist_tensor.h"
#include "index/formats/torch/torch_walk.h"

static const char WRAPPED[] = "_fsdp_wrapped_module.";

struct read {
    struct torch_zip *zip;
    olmo_flat_fn *fn;
    void *user;
    struct buf name; /* of the module, with its dot, then of the parameter */
    size_t prefix;   /* how long the module's is */
    uint64_t left;   /* so many modules and parameters the pickle can hold honestly */
};

/* One handle: a flat parameter, and what FSDP noted of it. */
struct handle {
    struct pv fqns, shapes;
    struct pv infos;          /* PV_NONE: torch 2.0 */
    struct pv first, offsets; /* torch 2.0 */
    struct torch_tensor x;
    uint64_t used; /* elements without the padding at their end */
};

static int bad(struct err *e, const char *what)
{
    return err_set(e, EBADMSG, "a flat parameter %s", what);
}

/* Each takes a byte and more of the pickle, unless references multiply them. */
static int count_one(struct read *r, struct err *e)
{
    if (r->left == 0)
        return err_set(e, EFBIG,
                       "too many parameters for its size: references multiply them");
    r->left--;
    return 0;
}

static bool is_list(const struct pv *v)
{
    return v->kind == PV_LIST || v->kind == PV_TUPLE;
}

static bool get(const struct pv *dict, const char *name, struct pv *out)
{
    char key[64] = "flat_param.";

    strncat(key, name, sizeof key - strlen(key) - 1);
    return pv_dict_get(dict, key, out);
}

/* ---- a handle ---- */

static int read_data(struct read *r, const struct pv *dict, struct handle *h,
                     struct err *e)
{
    struct pv data, padded;
    uint64_t padding, has;
    int rc;

    if (!get(dict, "data", &data) || !get(dict, "_shard_numel_padded", &padded) ||
        !pv_u64(&padded, &padding))
        return bad(e, "without its data or its padding");
    rc = torch_zip_tensor(r->zip, &data, &h->x, e);
    if (rc <= 0)
        return rc < 0 ? rc : bad(e, "that is no tensor");
    if (h->x.shape.nd != 1 || shape_elements(&h->x.shape, &has, e) < 0 || padding > has)
        return bad(e, "whose padding is longer than it is");
    h->used = has - padding;
    return 0;
}

static int read_handle(struct read *r, const struct pv *dict, struct handle *h,
                       struct err *e)
{
    struct pv indices;

    *h = (struct handle){.infos = {.kind = PV_NONE}};
    if (dict->kind != PV_DICT || !get(dict, "_fqns", &h->fqns) ||
        !get(dict, "_shapes", &h->shapes) || !is_list(&h->fqns) ||
        !is_list(&h->shapes) || pv_count(&h->fqns) != pv_count(&h->shapes))
        return bad(e, "without names and shapes");
    if (get(dict, "_shard_param_infos", &h->infos)) {
        if (!is_list(&h->infos) || pv_count(&h->infos) != pv_count(&h->fqns))
            return bad(e, "whose _shard_param_infos are not those of its names");
    } else if (!get(dict, "_shard_indices", &indices) ||
               !get(dict, "_shard_param_offsets", &h->offsets) || !is_list(&indices) ||
               !is_list(&h->offsets) || pv_count(&indices) != 2) {
        return bad(e, "that does not tell which elements a rank has");
    } else {
        h->first = pv_at(&indices, 0);
    }
    return read_data(r, dict, h, e);
}

/* ---- a parameter ---- */

/* _ShardParamInfo(in_shard, offset, numel, first and last element of the parameter) */
static int take_info(const struct pv *info, struct olmo_flat *f, struct err *e)
{
    struct pv args = pv_args(info), in, v[4];
    uint64_t n[4];

    if (info->kind != PV_OBJECT || pv_count(&args) != 5)
        return bad(e, "with a _shard_param_infos of another kind");
    in = pv_at(&args, 0);
    if (in.kind != PV_BOOL)
        return bad(e, "with a _shard_param_infos of another kind");
    if (!in.b)
        return 0;
    for (size_t i = 0; i < 4; i++) {
        v[i] = pv_at(&args, i + 1);
        if (!pv_u64(&v[i], &n[i]))
            return bad(e, "with a place that is no number");
    }
    if (n[3] < n[2] || n[3] - n[2] + 1 != n[1])
        return bad(e, "whose places contradict each other");
    f->offset = n[0];
    f->count = n[1];
    f->begin = n[2];
    return 0;
}

/*
 * The i-th parameter by the notes of torch 2.0: (first, last) of those that the rank has,
 * which are the parameters from `first` on; their elements follow each other.
 */
static int take_offsets(const struct handle *h, size_t i, uint64_t *at,
                        struct olmo_flat *f, struct err *e)
{
    uint64_t first, place[2];
    struct pv pair;
    uint32_t n = 0;

    if (pv_count(&h->offsets) == 0)
        return 0;
    if (!pv_u64(&h->first, &first) ||
        range_outside(first, pv_count(&h->offsets), pv_count(&h->fqns)))
        return bad(e, "whose _shard_indices are not those of its names");
    if (i < first || i - first >= pv_count(&h->offsets))
        return 0;
    pair = pv_at(&h->offsets, i - first);
    if (!dist_numbers(&pair, place, 2, &n) || n != 2 || place[1] < place[0] ||
        place[1] == UINT64_MAX)
        return bad(e, "whose places contradict each other");
    f->begin = place[0];
    f->count = place[1] - place[0] + 1;
    f->offset = *at;
    return add_overflows(*at, f->count, at) ? bad(e, "that is too long") : 0;
}

static int name_parameter(struct read *r, const struct pv *fqn, struct err *e)
{
    const char *text;
    size_t len;

    if (fqn->kind != PV_STR)
        return bad(e, "with a name that is no text");
    text = pv_bytes(fqn, &len);
    r->name.len = r->prefix;
    return buf_add(&r->name, text, len) < 0 ? err_nomem(e) : 0;
}

static int read_parameter(struct read *r, const struct handle *h, size_t i,
                          uint64_t *at, struct err *e)
{
    struct pv fqn = pv_at(&h->fqns, i), shape = pv_at(&h->shapes, i);
    struct olmo_flat f = {.x = h->x};
    struct pv info;
    int rc;

    TRY(count_one(r, e));
    if (!dist_numbers(&shape, f.shape.dim, SHAPE_MAX_DIMS, &f.shape.nd))
        return bad(e, "with an impossible shape");
    TRY(name_parameter(r, &fqn, e));
    if (h->infos.kind != PV_NONE) {
        info = pv_at(&h->infos, i);
        rc = take_info(&info, &f, e);
    } else {
        rc = take_offsets(h, i, at, &f, e);
    }
    if (rc < 0)
        return rc;
    if (range_outside(f.offset, f.count, h->used))
        return bad(e, "that has fewer elements than its notes tell");
    f.name = r->name.data ? r->name.data : "";
    f.len = r->name.len;
    return r->fn(r->user, &f, e);
}

/* ---- a module ---- */

int olmo_flat_name(const struct pv *name, struct buf *out)
{
    const size_t skip = sizeof WRAPPED - 1;
    const char *text, *found;
    size_t len;

    text = pv_bytes(name, &len);
    while ((found = memmem(text, len, WRAPPED, skip))) {
        buf_add(out, text, (size_t)(found - text));
        len -= (size_t)(found - text) + skip;
        text = found + skip;
    }
    buf_add(out, text, len);
    return buf_failed(out) ? -ENOMEM : 0;
}

static int name_module(struct read *r, const struct pv *name, struct err *e)
{
    if (name->kind != PV_STR)
        return err_set(e, EBADMSG, "a module without a name");
    buf_clear(&r->name);
    if (olmo_flat_name(name, &r->name) < 0)
        return err_nomem(e);
    if (r->name.len > 0)
        buf_addc(&r->name, '.');
    r->prefix = r->name.len;
    return buf_failed(&r->name) ? err_nomem(e) : 0;
}

/*
 * From torch 2.0 on a module of FSDP has one handle at most. OLMo 0.2.5 with torch 2.2 wrote
 * those of all modules as the root's (olmo/checkpoint.py, _fsdp_handles): names are without
 * their modules then, and its own loader cannot read that.
 */
static int read_module(struct read *r, const struct pv *module, struct err *e)
{
    struct pv name, handles, dict;
    struct handle h;
    uint64_t at = 0;

    TRY(count_one(r, e));
    if (module->kind != PV_DICT || !pv_dict_get(module, "name", &name) ||
        !pv_dict_get(module, "handles", &handles) || handles.kind != PV_LIST)
        return err_set(e, EBADMSG, "a module without its handles");
    if (pv_count(&handles) > 1) {
        err_set(
            e, ENOTSUP,
            "a module with several flat parameters, as OLMo 0.2 wrote them with torch "
            "2.2: of which modules they are was lost");
        return err_hint(e, "the full checkpoint of that step is read");
    }
    if (pv_count(&handles) == 0)
        return 0;
    dict = pv_at(&handles, 0);
    TRY(name_module(r, &name, e));
    TRY(read_handle(r, &dict, &h, e));
    for (size_t i = 0; i < pv_count(&h.fqns); i++)
        TRY(read_parameter(r, &h, i, &at, e));
    return 0;
}

int olmo_flat_read(struct torch_zip *zip, olmo_flat_fn *fn, void *user, struct err *e)
{
    struct read r = {.zip = zip,
                     .fn = fn,
                     .user = user,
                     .left = torch_zip_pickle_len(zip),
                     .name = {.max = 2 * (size_t)TORCH_MAX_PATH}};
    struct pv root = torch_zip_root(zip), modules, module;
    int rc = 0;

    if (root.kind != PV_DICT || !pv_dict_get(&root, "modules", &modules) ||
        modules.kind != PV_LIST)
        return err_set(e, EBADMSG, "it holds no list of modules");
    for (size_t i = 0; rc == 0 && i < pv_count(&modules); i++) {
        module = pv_at(&modules, i);
        rc = read_module(&r, &module, e);
    }
    buf_release(&r.name);
    return rc;
}
