/* SPDX-License-Identifier: MIT */
/* index/formats/fairscale/fairscale_metadata.c - shard_metadata: what flat parameters are made of. */
#include "index/formats/fairscale/fairscale_metadata.h"

#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

enum { MAX_NAME = 4096 };

struct reader {
    struct arena *arena;
    struct fairscale_metadata *out;
    size_t param_cap, alias_cap;
    const char *path; /* of the FSDP unit */
    size_t path_len;
};

/* ---- values ---- */

static bool is_list(const struct pv *v)
{
    return v->kind == PV_LIST || v->kind == PV_TUPLE;
}

static bool get(const struct pv *dict, const char *key, struct pv *out)
{
    struct pv items;

    return torch_mapping(dict, &items) && items.kind == PV_DICT &&
           pv_dict_get(&items, key, out);
}

static bool get_list(const struct pv *dict, const char *key, struct pv *out)
{
    return get(dict, key, out) && is_list(out);
}

/* A tuple, or torch.Size(tuple). */
static bool read_shape(const struct pv *v, struct arena *a, struct flat_member *out)
{
    struct pv list = *v, args;
    uint64_t *dim;

    if (v->kind == PV_OBJECT && pv_is(v, "torch", "Size")) {
        args = pv_args(v);
        if (pv_count(&args) != 1)
            return false;
        list = pv_at(&args, 0);
    }
    if (!is_list(&list) || pv_count(&list) > SHAPE_MAX_DIMS)
        return false;
    out->nd = (uint32_t)pv_count(&list);
    dim = arena_array(a, (size_t)out->nd + 1, sizeof *dim);
    for (uint32_t i = 0; dim && i < out->nd; i++) {
        struct pv item = pv_at(&list, i);

        if (!pv_u64(&item, &dim[i]))
            return false;
    }
    out->dim = dim;
    return dim;
}

/* "PATH.NAME" in the arena; false: no text, or no memory. */
static bool join(struct reader *r, const struct pv *name, const char **out, size_t *len)
{
    CLEANUP(buf_release) struct buf b = {.max = MAX_NAME};
    const char *text;
    size_t n;

    if (name->kind != PV_STR)
        return false;
    text = pv_bytes(name, &n);
    buf_add(&b, r->path, r->path_len);
    if (r->path_len > 0)
        buf_addc(&b, '.');
    buf_add(&b, text, n);
    if (buf_failed(&b))
        return false;
    *out = arena_memdup(r->arena, b.len ? b.data : "", b.len);
    *len = b.len;
    return *out;
}

static bool copy_text(struct reader *r, const struct pv *v, const char **out,
                      size_t *len)
{
    const char *text;

    if (v->kind != PV_STR)
        return false;
    text = pv_bytes(v, len);
    *out = arena_memdup(r->arena, text, *len);
    return *out;
}

/* ---- one flat parameter ---- */

static bool read_member(struct reader *r, struct flat_param *p, const struct pv *name,
                        const struct pv *shape, const struct pv *numel)
{
    struct flat_member *m = &p->member[p->members++];
    struct shape s;
    struct err ignored = {0};
    uint64_t elements;

    m->begin = p->total;
    if (!join(r, name, &m->name, &m->len) || !read_shape(shape, r->arena, m) ||
        !pv_u64(numel, &m->count) || add_overflows(p->total, m->count, &p->total) ||
        p->total > INT64_MAX)
        return false;
    s.nd = m->nd;
    memcpy(s.dim, m->dim, m->nd * sizeof *m->dim);
    return shape_elements(&s, &elements, &ignored) == 0 && elements == m->count;
}

static uint64_t hash_layout(const struct flat_param *p)
{
    uint64_t hash = XXH3_64bits(p->key, p->key_len);

    for (size_t i = 0; i < p->members; i++) {
        const struct flat_member *m = &p->member[i];

        hash = XXH3_64bits_withSeed(m->name, m->len, hash);
        hash = XXH3_64bits_withSeed(m->dim, m->nd * sizeof *m->dim, hash + m->nd);
    }
    return hash + p->own;
}

static int read_param(struct reader *r, struct flat_param *p, const struct pv *v,
                      struct err *e)
{
    struct pv names, shapes, numels, padding;
    size_t n;

    if (!get_list(v, "names", &names) || !get_list(v, "shapes", &shapes) ||
        !get_list(v, "numels", &numels) || !get(v, "padding", &padding))
        return err_set(e, EBADMSG, "names, shapes, numels or padding is missing");
    n = pv_count(&names);
    if (pv_count(&shapes) != n || pv_count(&numels) != n ||
        !pv_u64(&padding, &p->padding))
        return err_set(e, EBADMSG, "names, shapes and numels are not of one length");
    p->member = arena_array(r->arena, n + 1, sizeof *p->member);
    if (!p->member)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++) {
        struct pv name = pv_at(&names, i), shape = pv_at(&shapes, i),
                  numel = pv_at(&numels, i);

        if (!read_member(r, p, &name, &shape, &numel))
            return err_set(e, EBADMSG, "member %zu: name, shape and numel do not fit",
                           i);
    }
    p->layout = hash_layout(p);
    return 0;
}

/* Room for one more of `size` bytes, all that were there copied; NULL: no memory. */
static void *grow(struct arena *a, void *old, size_t count, size_t *cap, size_t size)
{
    void *grown;

    if (count < *cap)
        return old;
    *cap = *cap ? *cap * 2 : 64;
    grown = arena_array(a, *cap, size);
    if (grown && count > 0)
        memcpy(grown, old, count * size);
    return grown;
}

/* ---- units ---- */

static int read_params(struct reader *r, const struct pv *unit, bool own, struct err *e)
{
    struct fairscale_metadata *m = r->out;
    struct pv params, items;

    if (!get(unit, "params", &params) || !torch_mapping(&params, &items))
        return err_set(e, EBADMSG, "params is no dict");
    for (size_t i = 0; i < pv_count(&items); i++) {
        struct pv key = pv_key_at(&items, i), value = pv_value_at(&items, i);
        struct flat_param p = {.own = own};

        if (!join(r, &key, &p.key, &p.key_len))
            return err_set(e, EBADMSG, "a name of params is no text");
        if (read_param(r, &p, &value, e) < 0)
            return err_wrap(e, "%.200s", p.key);
        m->param = grow(r->arena, m->param, m->params, &r->param_cap, sizeof p);
        if (!m->param)
            return err_nomem(e);
        m->param[m->params++] = p;
    }
    return 0;
}

/* Pairs (stored, alias) of full names. */
static int read_aliases(struct reader *r, const struct pv *unit, struct err *e)
{
    struct fairscale_metadata *m = r->out;
    struct pv list;

    if (!get_list(unit, "shared_param_info", &list))
        return 0;
    for (size_t i = 0; i < pv_count(&list); i++) {
        struct pv pair = pv_at(&list, i), first, second;
        struct flat_alias alias;

        if (!is_list(&pair) || pv_count(&pair) != 2)
            return err_set(e, EBADMSG, "shared_param_info has no pairs");
        first = pv_at(&pair, 0);
        second = pv_at(&pair, 1);
        if (!copy_text(r, &first, &alias.stored, &alias.stored_len) ||
            !copy_text(r, &second, &alias.alias, &alias.alias_len))
            return err_set(e, EBADMSG, "shared_param_info has no names");
        m->alias = grow(r->arena, m->alias, m->aliases, &r->alias_cap, sizeof alias);
        if (!m->alias)
            return err_nomem(e);
        m->alias[m->aliases++] = alias;
    }
    return 0;
}

static int read_unit(struct reader *r, const struct pv *unit, struct err *e)
{
    struct pv path, own = {.kind = PV_NONE};

    if (!get(unit, "fsdp_path", &path) || !copy_text(r, &path, &r->path, &r->path_len))
        return err_set(e, EBADMSG, "fsdp_path is no text");
    if (!get(unit, "no_broadcast_optim_state", &own))
        own.kind = PV_NONE;
    if (read_params(r, unit, own.kind == PV_BOOL && own.b, e) < 0 ||
        read_aliases(r, unit, e) < 0)
        return err_wrap(e, "unit \"%.200s\"", r->path);
    return 0;
}

static int read_buffers(struct reader *r, const struct pv *v, struct err *e)
{
    struct fairscale_metadata *m = r->out;
    struct pv list;

    if (!get_list(v, "buffer_names", &list))
        return 0;
    m->buffer = arena_array(r->arena, pv_count(&list) + 1, sizeof *m->buffer);
    if (!m->buffer)
        return err_nomem(e);
    for (; m->buffers < pv_count(&list); m->buffers++) {
        struct pv name = pv_at(&list, m->buffers);
        struct flat_name *b = &m->buffer[m->buffers];

        if (!copy_text(r, &name, &b->name, &b->len))
            return err_set(e, EBADMSG, "a name of a buffer is no text");
    }
    return 0;
}

/* ---- by name ---- */

static int compare_names(const char *a, size_t a_len, const char *b, size_t b_len)
{
    int r = memcmp(a, b, MIN(a_len, b_len));

    return r ? r : (a_len > b_len) - (a_len < b_len);
}

static int by_name(const void *a, const void *b)
{
    const struct flat_member *const *x = a, *const *y = b;

    return compare_names((*x)->name, (*x)->len, (*y)->name, (*y)->len);
}

static int index_members(struct reader *r, struct err *e)
{
    struct fairscale_metadata *m = r->out;

    for (size_t p = 0; p < m->params; p++)
        m->members += m->param[p].members;
    m->by_name = arena_array(r->arena, m->members + 1, sizeof *m->by_name);
    if (!m->by_name)
        return err_nomem(e);
    m->members = 0;
    for (size_t p = 0; p < m->params; p++)
        for (size_t i = 0; i < m->param[p].members; i++) {
            m->param[p].member[i].param = p;
            m->by_name[m->members++] = &m->param[p].member[i];
        }
    if (m->members > 0)
        qsort(m->by_name, m->members, sizeof *m->by_name, by_name);
    for (size_t i = 1; i < m->members; i++)
        if (by_name(&m->by_name[i - 1], &m->by_name[i]) == 0)
            return err_set(e, EBADMSG, "shard_metadata has %.200s twice",
                           m->by_name[i]->name);
    return 0;
}

const struct flat_member *fairscale_member(const struct fairscale_metadata *m,
                                           const char *name, size_t len)
{
    const struct flat_member key = {.name = name, .len = len}, *want = &key, **found;

    if (m->members == 0)
        return NULL;
    found = bsearch(&want, m->by_name, m->members, sizeof *m->by_name, by_name);
    return found ? *found : NULL;
}

int fairscale_metadata_read(const struct pv *v, struct arena *a,
                            struct fairscale_metadata *out, struct err *e)
{
    struct reader r = {.arena = a, .out = out};
    struct pv units;

    *out = (struct fairscale_metadata){0};
    if (!get_list(v, "param_metadata", &units))
        return err_set(e, EBADMSG, "shard_metadata has no param_metadata");
    for (size_t i = 0; i < pv_count(&units); i++) {
        struct pv unit = pv_at(&units, i);

        if (read_unit(&r, &unit, e) < 0)
            return err_wrap(e, "shard_metadata");
    }
    TRY(read_buffers(&r, v, e));
    return index_members(&r, e);
}
