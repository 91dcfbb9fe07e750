/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_notes.c - parameters of groups by the ranks' own notes. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/formats/torch/torch_walk.h"

/*
 * Until 0.15.4 model states have no param_shapes where there are experts. Each rank then
 * notes which parameters its partitions have, in their order (param_slice_mappings,
 * DeepSpeed, runtime/zero/stage_1_and_2.py), and model states tell their shapes. Ranks that
 * share other experts have parameters of the same local names.
 *
 * Until 0.13 the notes of a group that fewer ranks share than there are (experts) are wrong:
 * partitions were reckoned as if all ranks had one each, so that parameters lack in them.
 * Notes that do not name all elements of a group tell nothing.
 *
 * With round_robin_gradients the notes are those of the order before parameters were dealt
 * out to the partitions (see place_dealt() in deepspeed_layout.c), and nothing in the files
 * tells that they were. So some elements of both orders are read and held against what the
 * model computed with, which is the master rounded.
 */

enum {
    MAX_GROUPS = 1 << 16,
    PROBES = 8, /* parameters of a group that are held against the copy, the longest */
    BYTES_A_BYTE = 16, /* of the pickle: honest notes take as much as their names */
};

/* A parameter of the first set of ranks. */
struct noted {
    const char *name;
    size_t len;
    size_t order; /* in which it was met */
    uint32_t group;
    uint64_t elements; /* of all fragments */
    uint32_t nd;
    const uint64_t *dim;  /* NULL: not found yet */
    struct ds_place copy; /* what the model computed with */
    uint64_t at[2];       /* element of the group: as noted, and dealt out */
    size_t dealt;         /* place in that order */
};

struct notes {
    struct ds_scan *s;
    struct ds_part *p;
    bool useless; /* they do not tell */
    uint32_t ngroups;
    uint64_t *count;          /* partitions of each group */
    uint64_t *stored;         /* elements of them */
    struct ds_place **master; /* of each group: its partitions */
    size_t *last;      /* of each group: 1 + the parameter that was met last, 0: none */
    struct noted *all; /* malloc */
    size_t n, cap;
    uint64_t
        left; /* bytes that notes of the file may take, which references multiply */
};

static int give_up(struct notes *x)
{
    x->useless = true;
    return 0;
}

/* ---- what ranks note ---- */

static bool partitions_of(const struct pv *counts, uint32_t g, uint64_t *out)
{
    bool list = counts->kind == PV_LIST || counts->kind == PV_TUPLE;
    struct pv one = *counts;

    if (list && g >= pv_count(counts))
        return false;
    if (list)
        one = pv_at(counts, g);
    return pv_u64(&one, out) && *out > 0;
}

static int begin(struct notes *x, size_t ngroups, const struct pv *counts,
                 struct err *e)
{
    if (ngroups == 0 || ngroups > MAX_GROUPS)
        return give_up(x);
    x->ngroups = (uint32_t)ngroups;
    x->count = arena_array(x->s->arena, ngroups, sizeof *x->count);
    x->stored = arena_array(x->s->arena, ngroups, sizeof *x->stored);
    x->master = arena_array(x->s->arena, ngroups, sizeof *x->master);
    x->last = arena_array(x->s->arena, ngroups, sizeof *x->last);
    if (!x->count || !x->stored || !x->master || !x->last)
        return err_nomem(e);
    for (uint32_t g = 0; g < x->ngroups; g++) {
        if (!partitions_of(counts, g, &x->count[g]) || x->p->nranks % x->count[g] != 0)
            return give_up(x);
        x->master[g] = arena_array(x->s->arena, x->count[g], sizeof **x->master);
        if (!x->master[g])
            return err_nomem(e);
    }
    return 0;
}

/* All ranks have the groups of the first one. */
static bool same_counts(const struct notes *x, size_t ngroups, const struct pv *counts)
{
    uint64_t n;

    if (ngroups != x->ngroups)
        return false;
    for (uint32_t g = 0; g < x->ngroups; g++)
        if (!partitions_of(counts, g, &n) || n != x->count[g])
            return false;
    return true;
}

static int append(struct notes *x, uint32_t g, const char *name, size_t len,
                  struct err *e)
{
    if (!VEC_ROOM(x->all, x->n, x->cap))
        return err_nomem(e);
    x->all[x->n] = (struct noted){.name = arena_memdup(x->s->arena, name, len),
                                  .len = len,
                                  .order = x->n,
                                  .group = g};
    if (!x->all[x->n].name)
        return err_nomem(e);
    x->last[g] = ++x->n;
    return 0;
}

/* A fragment: of the parameter that the rank before ended with, or of the next one. */
static int take_note(struct notes *x, uint32_t g, const struct pv *key,
                     const struct pv *value, struct err *e)
{
    struct pv state = pv_state(value), numel;
    struct noted *last = x->last[g] > 0 ? &x->all[x->last[g] - 1] : NULL;
    const char *name;
    uint64_t n;
    size_t len;

    if (key->kind != PV_STR || value->kind != PV_OBJECT || state.kind != PV_DICT ||
        !pv_dict_get(&state, "numel", &numel) || !pv_u64(&numel, &n))
        return give_up(x);
    name = pv_bytes(key, &len);
    if (len >= x->left)
        return give_up(x);
    x->left -= len + 1;
    if (!last || last->len != len || memcmp(last->name, name, len) != 0) {
        TRY(append(x, g, name, len, e));
        last = &x->all[x->n - 1];
    }
    return add_overflows(last->elements, n, &last->elements) ? give_up(x) : 0;
}

/* Where the elements of a tensor lie, if they do one behind the other. */
static struct ds_place place_of(const struct torch_file *f,
                                const struct torch_tensor *t, uint64_t count)
{
    uint64_t stride = 1; /* wraps only where there is no element */
    bool plain = t->packed == 0 && t->flags == 0;

    for (uint32_t k = t->shape.nd; k-- > 0 && plain;) {
        plain = (uint64_t)t->stride[k] == stride || t->shape.dim[k] <= 1;
        stride *= t->shape.dim[k];
    }
    return (struct ds_place){.path = plain ? f->path : NULL,
                             .file = f->number,
                             .at = t->data + t->storage_offset * dtype_unit(t->dtype),
                             .count = count,
                             .dtype = t->dtype};
}

/* Notes a rank's partition, the k-th; false: it is no tensor. */
static bool add_stored(struct notes *x, const struct torch_file *f,
                       const struct pv *groups, uint32_t g, uint64_t k)
{
    struct pv v = pv_at(groups, g);
    struct torch_tensor t;
    struct err why = {0};
    uint64_t n;

    if (torch_zip_tensor(f->zip, &v, &t, &why) <= 0 ||
        shape_elements(&t.shape, &n, &why) < 0 ||
        add_overflows(x->stored[g], n, &x->stored[g]))
        return false;
    x->master[g][k] = place_of(f, &t, n);
    return true;
}

/* ds_file_fn */
static int take_rank(void *user, size_t r, const struct torch_file *f, struct err *e)
{
    struct notes *x = user;
    struct pv root = torch_zip_root(f->zip), dict, counts, list, groups, items, v;
    uint64_t stage, sets;

    if (x->useless)
        return 0;
    if (!ds_get_some(&root, "optimizer_state_dict", &dict) ||
        !ds_get_some(&dict, "partition_count", &counts) ||
        !ds_get_some(&dict, "param_slice_mappings", &list) || list.kind != PV_LIST ||
        !ds_get_some(&dict, "single_partition_of_fp32_groups", &groups) ||
        groups.kind != PV_LIST || pv_count(&groups) != pv_count(&list) ||
        (ds_get_some(&dict, "zero_stage", &v) && (!ds_number(&v, &stage) || stage > 2)))
        return give_up(x);
    if (r == 0)
        TRY(begin(x, pv_count(&list), &counts, e));
    if (x->useless || !same_counts(x, pv_count(&list), &counts))
        return give_up(x);
    x->left = BYTES_A_BYTE * torch_zip_pickle_len(f->zip);
    for (uint32_t g = 0; g < x->ngroups; g++) {
        v = pv_at(&list, g);
        if (!torch_mapping(&v, &items) ||
            (items.kind != PV_DICT && items.kind != PV_NONE))
            return give_up(x);
        sets = x->p->nranks / x->count[g];
        if (r % sets != 0 || items.kind == PV_NONE)
            continue; /* another set of ranks */
        if (!add_stored(x, f, &groups, g, r / sets))
            return give_up(x);
        for (size_t i = 0; i < pv_count(&items) && !x->useless; i++) {
            struct pv key = pv_key_at(&items, i), value = pv_value_at(&items, i);

            TRY(take_note(x, g, &key, &value, e));
        }
    }
    return 0;
}

/* ---- shapes ---- */

static int compare_names(const void *a, const void *b)
{
    const struct noted *x = a, *y = b;
    int order = memcmp(x->name, y->name, MIN(x->len, y->len));

    return order ? order : (x->len > y->len) - (x->len < y->len);
}

static int compare_places(const void *a, const void *b)
{
    const struct noted *x = a, *y = b;

    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

/* A dict {NAME: tensor} of model states. */
static int take_shapes(struct notes *x, const struct torch_file *f,
                       const struct pv *items, struct err *e)
{
    for (size_t i = 0; items->kind == PV_DICT && i < pv_count(items); i++) {
        struct pv key = pv_key_at(items, i), value = pv_value_at(items, i);
        struct noted want = {0}, *found;
        struct torch_tensor t;
        struct err why = {0};
        uint64_t n, *dim;

        if (key.kind != PV_STR)
            continue;
        want.name = pv_bytes(&key, &want.len);
        found = bsearch(&want, x->all, x->n, sizeof want, compare_names);
        if (!found || found->dim || torch_zip_tensor(f->zip, &value, &t, &why) <= 0 ||
            shape_elements(&t.shape, &n, &why) < 0 || n != found->elements)
            continue;
        dim = arena_array(x->s->arena, (size_t)t.shape.nd + 1, sizeof *dim);
        if (!dim)
            return err_nomem(e);
        memcpy(dim, t.shape.dim, t.shape.nd * sizeof *dim);
        found->nd = t.shape.nd;
        found->dim = dim;
        found->copy = place_of(f, &t, n);
    }
    return 0;
}

/* ds_file_fn */
static int take_expert(void *user, size_t i UNUSED, const struct torch_file *f,
                       struct err *e)
{
    struct pv root = torch_zip_root(f->zip), items;

    return torch_mapping(&root, &items) ? take_shapes(user, f, &items, e) : 0;
}

static int find_shapes(struct notes *x, struct err *e)
{
    const struct ds_files *files = &x->s->files;

    qsort(x->all, x->n, sizeof *x->all, compare_names);
    for (size_t i = 1; i < x->n; i++)
        if (compare_names(&x->all[i - 1], &x->all[i]) == 0)
            return give_up(x);
    TRY(take_shapes(x, &x->p->model, &x->p->module, e));
    TRY(ds_each_file(x->s, &files->file[files->begin[DS_EXPERT]],
                     ds_files_of(files, DS_EXPERT), take_expert, x, e));
    for (size_t i = 0; i < x->n; i++)
        if (!x->all[i].dim)
            return give_up(x);
    return 0;
}

/* ---- as param_shapes would tell it ---- */

/* Each group is named to its end, but for the padding. */
static int name_all(const struct notes *x, bool *out, struct err *e)
{
    uint64_t *named = arena_array(x->s->arena, x->ngroups, sizeof *named);

    if (!named)
        return err_nomem(e);
    for (size_t i = 0; i < x->n; i++)
        if (add_overflows(named[x->all[i].group], x->all[i].elements,
                          &named[x->all[i].group]))
            named[x->all[i].group] = UINT64_MAX; /* the layout refuses it */
    *out = true;
    for (uint32_t g = 0; g < x->ngroups; g++)
        *out &= x->last[g] > 0 &&
                (x->stored[g] <= named[g] || x->stored[g] - named[g] < 2 * x->count[g]);
    return 0;
}

/* ---- the order ---- */

/* Both places of the parameters [lo, hi), which are one group. */
static void place(struct notes *x, size_t lo, size_t hi)
{
    size_t n = hi - lo;
    size_t hands = (size_t)MIN(x->count[x->all[lo].group], (uint64_t)n);
    uint64_t at[2] = {0, 0};

    for (size_t i = lo; i < hi; i++) {
        x->all[i].at[0] = at[0];
        at[0] += x->all[i].elements; /* name_all() has added them up */
    }
    for (size_t hand = 0, k = 0; hand < hands; hand++)
        for (size_t i = hand; i < n; i += hands) {
            x->all[lo + i].at[1] = at[1];
            x->all[lo + i].dealt = k++;
            at[1] += x->all[lo + i].elements;
        }
}

/* The longest parameters that lie elsewhere when they are dealt out. */
static size_t choose(const struct notes *x, size_t lo, size_t hi, size_t out[PROBES])
{
    size_t n = 0;

    for (size_t i = lo; i < hi; i++) {
        size_t k = n;

        if (x->all[i].at[0] == x->all[i].at[1] || x->all[i].elements == 0)
            continue;
        while (k > 0 && x->all[out[k - 1]].elements < x->all[i].elements)
            k--;
        if (k == PROBES)
            continue;
        n = MIN(n + 1, (size_t)PROBES);
        memmove(&out[k + 1], &out[k], (n - k - 1) * sizeof *out);
        out[k] = i;
    }
    return n;
}

/* Is the parameter at this place? From its first element on, and from its middle. */
static int is_at(struct notes *x, const struct noted *v, uint64_t at, struct err *e)
{
    const struct ds_place *parts = x->master[v->group];
    uint64_t length = parts[0].count;

    for (int half = 0; half < 2; half++) {
        uint64_t from = half ? v->elements / 2 : 0, k, off;
        int rc;

        if (length == 0)
            return 0;
        k = (at + from) / length;
        off = (at + from) % length;
        if (k >= x->count[v->group] || off >= parts[k].count ||
            !ds_probe_can(&parts[k], &v->copy))
            return 0;
        rc = ds_probe(x->s, &parts[k], off, &v->copy, from,
                      (size_t)MIN(MIN(parts[k].count - off, v->elements - from),
                                  (uint64_t)DS_PROBE),
                      e);
        if (rc <= 0)
            return rc;
    }
    return 1;
}

/* 0 or 1: the order that all probes of a group fit, which begins at `lo`; 2: none does. */
static int order_of(struct notes *x, size_t lo, size_t hi, struct err *e)
{
    size_t probe[PROBES], n = choose(x, lo, hi, probe);

    for (int order = 0; order < 2; order++) {
        int rc = 1;

        for (size_t i = 0; rc > 0 && i < n; i++)
            rc = is_at(x, &x->all[probe[i]], x->all[probe[i]].at[order], e);
        if (rc != 0)
            return rc < 0 ? rc : order;
    }
    return 2;
}

/* Sorts the parameters as they lie. */
static int put_in_order(struct notes *x, struct err *e)
{
    qsort(x->all, x->n, sizeof *x->all, compare_places);
    for (size_t lo = 0, hi; lo < x->n && !x->useless; lo = hi) {
        int order;

        for (hi = lo; hi < x->n && x->all[hi].group == x->all[lo].group;)
            hi++;
        place(x, lo, hi);
        order = order_of(x, lo, hi, e);
        if (order < 0)
            return order;
        if (order == 2)
            give_up(x);
        for (size_t i = lo; order == 1 && i < hi; i++)
            x->all[i].order = x->all[i].dealt;
    }
    qsort(x->all, x->n, sizeof *x->all, compare_places);
    return 0;
}

static int fill(struct notes *x, struct err *e)
{
    struct ds_part *p = x->p;
    bool all = false;

    TRY(name_all(x, &all, e));
    if (!all)
        return 0;
    TRY(put_in_order(x, e));
    if (x->useless)
        return 0;
    p->param = arena_array(x->s->arena, x->n, sizeof *p->param);
    if (!p->param)
        return err_nomem(e);
    for (size_t i = 0; i < x->n; i++)
        p->param[i] = (struct ds_param){.name = x->all[i].name,
                                        .len = x->all[i].len,
                                        .dim = x->all[i].dim,
                                        .nd = x->all[i].nd,
                                        .group = x->all[i].group,
                                        .elements = x->all[i].elements};
    p->nparams = x->n;
    p->nlists = x->ngroups;
    TRY(ds_params_index(x->s, p, e));
    p->has_shapes = true;
    return 0;
}

int ds_notes_read(struct ds_scan *s, struct ds_part *p, struct err *e)
{
    struct notes x = {.s = s, .p = p};
    int rc;

    if (p->has_shapes || p->nranks == 0 || p->files->sharded)
        return 0;
    rc = ds_each_file(s, p->optim, p->nranks, take_rank, &x, e);
    if (rc == 0 && !x.useless && x.n > 0)
        rc = find_shapes(&x, e);
    if (rc == 0 && !x.useless && x.n > 0)
        rc = fill(&x, e);
    free(x.all);
    return rc;
}
