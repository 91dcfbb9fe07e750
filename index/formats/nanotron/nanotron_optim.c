/* SPDX-License-Identifier: MIT */
/* index/formats/nanotron/nanotron_optim.c - the ranks' optimizers, put together by the weights' slices. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/keyset.h"
#include "base/vec.h"
#include "index/formats/format.h"
#include "index/formats/nanotron/nanotron_priv.h"
#include "index/formats/ranks/rank_files.h"
#include "index/formats/torch/torch_walk.h"

enum {
    MAX_CONFIG = 512 << 20, /* offsets of all parameters, as JSON */
    MAX_VALUES = 40000000,
    MAX_NUMBER = 100000000, /* of a parameter in the optimizer */
};

static const char DIR[] = "optimizer";
static const char CONFIG[] = "optimizer_config.json";
static const char ACCUMULATOR[] = "gradient_accumulator";

/* ---- the files ---- */

/* A rank's file beside its tensors: which parameter each number is. */
struct opt_file {
    struct nano_ranks rank;
    struct rank_tensors accumulator; /* by parameter's name */
    struct opt_name {
        uint64_t number;
        const char *name;
        size_t len;
    } * name; /* malloc; by number */
    size_t names;
};

/* One tensor of one rank. */
struct entry {
    const char *name; /* of the parameter */
    size_t len;
    const char *state; /* "exp_avg" */
    size_t state_len;
    uint32_t file;
    const struct rank_tensor *x;
    bool accumulator;
};

/* Where ZeRO-1 has cut the parameters' local pieces. */
struct offsets {
    const char *name;
    const struct json *ranks;
};

struct optim {
    struct nano *n;
    struct rank_file *file;
    struct opt_file *more; /* by file */
    uint32_t files;
    struct json *config;
    struct offsets *offset; /* malloc; by name */
    size_t offsets;
    struct entry *entry; /* malloc; by name, state and rank */
    size_t entries, cap;
};

static void optim_release(struct optim *o)
{
    for (uint32_t i = 0; o->more && i < o->files; i++) {
        rank_tensors_release(&o->more[i].accumulator);
        free(o->more[i].name);
    }
    rank_files_free(o->file, o->files);
    free(o->more);
    free(o->offset);
    free(o->entry);
    json_free(o->config);
}

/* Left from an older save, see check_saves(): its states are of other slices. */
static int warn_others(const struct optim *o, uint32_t others, const char *first,
                       struct err *e)
{
    if (others > 0 &&
        sink_warning(o->n->sink, "unlisted-file",
                     "%" PRIu32
                     " files of the optimizer as %s/%s are of a save by other "
                     "numbers of ranks than model/: they are not shown",
                     others, DIR, first) < 0)
        return err_nomem(e);
    return 0;
}

static int find_files(struct optim *o, struct err *e)
{
    struct listing *l = listing_sub(o->n->c->listing, DIR);
    const char *other = NULL;
    struct nano_ranks rank;
    uint32_t count = 0, others = 0;

    for (size_t i = 0; i < listing_count(l); i++)
        count += listing_at(l, i)->st.kind == ENTRY_FILE &&
                 nano_optimizer_name(listing_at(l, i)->name, &rank);
    o->file = rank_files_new(count);
    o->more = calloc((size_t)count + 1, sizeof *o->more);
    if (!o->file || !o->more)
        return err_nomem(e);
    for (size_t i = 0; i < listing_count(l) && o->files < count; i++) {
        const struct listing_entry *entry = listing_at(l, i);
        char path[PATH_MAX];

        if (entry->st.kind != ENTRY_FILE || !nano_optimizer_name(entry->name, &rank))
            continue;
        if (!nano_same_save(o->n, &rank)) {
            other = other ? other : entry->name;
            others++;
            continue;
        }
        if (store_join(DIR, entry->name, path, sizeof path) < 0)
            return err_set(e, ENAMETOOLONG, "%s: the path is too long", entry->name);
        o->file[o->files].file.path = arena_memdup(o->n->arena, path, strlen(path));
        if (!o->file[o->files].file.path)
            return err_nomem(e);
        o->more[o->files++].rank = rank;
        nano_learn_ranks(o->n, &rank);
        o->n->zero |= rank.dp.is;
    }
    return warn_others(o, others, other, e);
}

/* ---- optimizer_config.json ---- */

static int compare_offsets(const void *a, const void *b)
{
    const struct offsets *x = a, *y = b;

    return strcmp(x->name, y->name);
}

static int index_offsets(struct optim *o, struct err *e)
{
    const struct json *map =
        json_get(json_get(o->config, "configs"), "param_name_to_dp_rank_offsets");

    o->offset = calloc(json_count(map) + 1, sizeof *o->offset);
    if (!o->offset)
        return err_nomem(e);
    for (const struct json *v = json_first(map); v; v = json_next(v))
        o->offset[o->offsets++] = (struct offsets){json_key(v), v};
    if (o->offsets > 0)
        qsort(o->offset, o->offsets, sizeof *o->offset, compare_offsets);
    return 0;
}

/* Without it the pieces of ZeRO-1 have no place, which is told by each. */
static int read_config(struct optim *o, struct err *e)
{
    static const struct json_limits limits = {
        .bytes = MAX_CONFIG, .values = MAX_VALUES, .python = true};
    struct listing *l = listing_sub(o->n->c->listing, DIR);
    CLEANUP_FREE char *text = NULL;
    struct err why = {0};
    size_t len;

    if (!listing_find(l, CONFIG))
        return 0;
    TRY(sink_watch(o->n->sink, "optimizer/optimizer_config.json", e));
    if (listing_read(l, CONFIG, MAX_CONFIG, &text, &len, &why) == 0 &&
        json_parse(text, len, &limits, &o->config, &why) == 0)
        return index_offsets(o, e);
    if (why.code == ENOMEM || why.code == ESTALE) {
        return err_copy(e, &why);
    }
    return sink_warning(o->n->sink, "damaged-file", "%s/%s: %s", DIR, CONFIG,
                        why.text) < 0
               ? err_nomem(e)
               : 0;
}

/* A number, or its digits as text. */
static bool take_u64(const struct json *v, uint64_t *out)
{
    const char *text;
    char *end;

    if (json_u64(v, out))
        return true;
    if (!json_string(v, &text) || text[0] < '0' || text[0] > '9' || strlen(text) > 18)
        return false;
    *out = strtoull(text, &end, 10);
    return *end == '\0';
}

/* [start, stop] of a parameter's piece of this data-parallel rank. */
static bool find_offsets(const struct optim *o, const struct entry *x, uint32_t dp,
                         uint64_t *start, uint64_t *stop)
{
    CLEANUP_FREE char *name = strndup(x->name, x->len);
    struct offsets key = {.name = name}, *found = NULL;
    const struct json *pair;
    char rank[16];

    if (name && o->offsets > 0)
        found = bsearch(&key, o->offset, o->offsets, sizeof key, compare_offsets);
    if (!found)
        return false;
    snprintf(rank, sizeof rank, "%" PRIu32, dp);
    pair = json_get(found->ranks, rank);
    return pair && json_kind(pair) == JSON_ARRAY && json_count(pair) == 2 &&
           take_u64(json_first(pair), start) &&
           take_u64(json_next(json_first(pair)), stop) && *start <= *stop;
}

/* ---- one file's content ---- */

static int compare_numbers(const void *a, const void *b)
{
    const struct opt_name *x = a, *y = b;

    return (x->number > y->number) - (x->number < y->number);
}

/* "names": {number: parameter}. */
static int read_names(struct optim *o, struct opt_file *f, const struct pv *items,
                      struct err *e)
{
    struct pv v, map;

    if (!pv_dict_get(items, "names", &v) || !torch_mapping(&v, &map) ||
        map.kind != PV_DICT)
        return err_set(e, EBADMSG, "it has no names of parameters");
    f->name = calloc(pv_count(&map) + 1, sizeof *f->name);
    if (!f->name)
        return err_nomem(e);
    for (size_t i = 0; i < pv_count(&map); i++) {
        struct pv key = pv_key_at(&map, i), name = pv_value_at(&map, i);
        struct opt_name *x = &f->name[f->names];
        const char *text;

        if (!pv_u64(&key, &x->number) || name.kind != PV_STR)
            return err_set(e, EBADMSG, "its names of parameters are none");
        text = pv_bytes(&name, &x->len);
        x->name = arena_memdup(o->n->arena, text, x->len);
        if (!x->name)
            return err_nomem(e);
        f->names++;
    }
    if (f->names > 0)
        qsort(f->name, f->names, sizeof *f->name, compare_numbers);
    return 0;
}

static int report_objects(struct optim *o, const struct rank_file *f, struct err *e)
{
    static const char *const skip[] = {"state", ACCUMULATOR, NULL};
    CLEANUP(buf_release) struct buf object = {0};
    struct torch_report how = {.role = ROLE_OTHER, .entries = true, .skip = skip};

    buf_addf(&object, "%s:", f->file.path);
    if (buf_failed(&object))
        return err_nomem(e);
    how.object = object.data;
    return torch_file_report_loaded(o->n->sink, &f->file, &how, e);
}

/* rank_file_fn */
static int collect(void *user, size_t i, struct rank_file *f, struct err *e)
{
    struct optim *o = user;
    struct opt_file *more = &o->more[i];
    struct pv root = torch_zip_root(f->file.zip), items, v;

    if (!torch_mapping(&root, &items) || items.kind != PV_DICT ||
        !pv_dict_get(&items, "state", &v))
        return err_set(e, EBADMSG, "it holds no state");
    TRY(read_names(o, more, &items, e));
    TRY(rank_tensors_collect(f->file.zip, &v, o->n->arena, &f->tensors, e));
    if (pv_dict_get(&items, ACCUMULATOR, &v) && v.kind != PV_NONE)
        TRY(rank_tensors_collect(f->file.zip, &v, o->n->arena, &more->accumulator, e));
    return report_objects(o, f, e);
}

/* ---- entries ---- */

/* "12.exp_avg": the parameter of number 12. */
static bool name_state(const struct opt_file *f, const struct rank_tensor *x,
                       struct entry *out)
{
    struct opt_name key = {0}, *found;
    size_t at = 0;

    while (at < x->len && x->name[at] >= '0' && x->name[at] <= '9' &&
           key.number < MAX_NUMBER)
        key.number = key.number * 10 + (uint64_t)(x->name[at++] - '0');
    if (at == 0 || at + 1 >= x->len || x->name[at] != '.' || f->names == 0)
        return false;
    found = bsearch(&key, f->name, f->names, sizeof key, compare_numbers);
    if (!found)
        return false;
    out->name = found->name;
    out->len = found->len;
    out->state = x->name + at + 1;
    out->state_len = x->len - at - 1;
    return true;
}

static bool name_accumulator(const struct rank_tensor *x, struct entry *out)
{
    out->name = x->name;
    out->len = x->len;
    out->state = ACCUMULATOR;
    out->state_len = sizeof ACCUMULATOR - 1;
    out->accumulator = true;
    return true;
}

/* nanotron saves each parameter that the optimizer has a name and a state of. */
static int note_lost(struct nano *n, const struct entry *x, struct err *e)
{
    int rc = keyset_add(&n->lost, x->name, x->len);

    if (rc > 0 && !n->first_lost)
        n->first_lost = arena_memdup(n->arena, x->name, x->len);
    return rc < 0 || !n->first_lost ? err_nomem(e) : 0;
}

/* What belongs to no parameter is shown as the file has it. */
static int report_raw(struct optim *o, const struct entry *x, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    const struct rank_file *f = &o->file[x->file];
    const struct rank_part part = {.file = &f->file, .x = x->x};
    struct sink_tensor t = {.role = ROLE_OPTIMIZER};

    buf_addf(&key, "%s:%s.", f->file.path, x->accumulator ? ACCUMULATOR : "state");
    buf_add(&key, x->x->name, x->x->len);
    if (buf_failed(&key))
        return err_nomem(e);
    t.key = key.data;
    t.key_len = key.len;
    o->n->unnamed++;
    return rank_report_alone(o->n->sink, &part, &t, e);
}

static int add_entry(struct optim *o, const struct entry *x, struct err *e)
{
    if (!VEC_ROOM(o->entry, o->entries, o->cap))
        return err_nomem(e);
    o->entry[o->entries++] = *x;
    return 0;
}

static int add_entries(struct optim *o, uint32_t file, const struct rank_tensors *t,
                       bool accumulator, struct err *e)
{
    for (size_t i = 0; i < t->count; i++) {
        struct entry x = {.file = file, .x = &t->tensor[i], .accumulator = accumulator};
        bool named = accumulator ? name_accumulator(x.x, &x)
                                 : name_state(&o->more[file], x.x, &x);

        bool there = named && nano_weight_find(o->n, x.name, x.len);

        if (named && !there && !accumulator)
            TRY(note_lost(o->n, &x, e));
        TRY(there ? add_entry(o, &x, e) : report_raw(o, &x, e));
    }
    return 0;
}

static int compare_texts(const char *a, size_t a_len, const char *b, size_t b_len)
{
    int r = memcmp(a, b, MIN(a_len, b_len));

    return r ? r : (a_len > b_len) - (a_len < b_len);
}

static int compare_tensors(const struct entry *x, const struct entry *y)
{
    int r = compare_texts(x->name, x->len, y->name, y->len);

    return r ? r : compare_texts(x->state, x->state_len, y->state, y->state_len);
}

/* By tensor, then by rank: the pieces of one data-parallel group stand together. */
static int compare_entries(const void *a, const void *b, void *user)
{
    const struct entry *x = a, *y = b;
    const struct optim *o = user;
    const struct nano_ranks *p = &o->more[x->file].rank, *q = &o->more[y->file].rank;
    int r = compare_tensors(x, y);

    if (r)
        return r;
    if (p->tp.at != q->tp.at)
        return p->tp.at < q->tp.at ? -1 : 1;
    if (p->ep.at != q->ep.at)
        return p->ep.at < q->ep.at ? -1 : 1;
    if (p->pp.at != q->pp.at)
        return p->pp.at < q->pp.at ? -1 : 1;
    return p->dp.at < q->dp.at ? -1 : p->dp.at > q->dp.at;
}

/* ---- one tensor ---- */

/* Entries [0, n) of one tensor; those of one (tp, ep, pp) follow each other. */
struct merge {
    struct optim *o;
    const struct nano_weight *w;
    const struct entry *entry;
    size_t n;
    struct keyset seen; /* slices that were reported */
};

static bool same_group(const struct optim *o, const struct entry *x,
                       const struct entry *y)
{
    const struct nano_ranks *p = &o->more[x->file].rank, *q = &o->more[y->file].rank;

    return p->tp.at == q->tp.at && p->ep.at == q->ep.at && p->pp.at == q->pp.at;
}

static int fault(const struct merge *m, const struct entry *x, const char *why,
                 struct err *e)
{
    return sink_fault(m->o->n->sink, "%s: %s", m->o->file[x->file].file.path, why) < 0
               ? err_nomem(e)
               : 0;
}

/* A rank's local piece, whole: without ZeRO. */
static int report_local(const struct merge *m, const struct entry *x,
                        const struct nano_file *f, struct err *e)
{
    struct chunk c;

    if (x->x->nd != f->nd ||
        (f->nd > 0 && memcmp(x->x->dim, f->dim, f->nd * sizeof *f->dim) != 0))
        return fault(m, x, "its shape is not that of the rank's parameter", e);
    rank_tensor_chunk(x->x, m->o->file[x->file].file.number, &c);
    return rank_boxes_report(m->o->n->sink, &f->boxes, &c, e);
}

/* A range of the local piece's elements: ZeRO-1. */
static int report_range(const struct merge *m, const struct entry *x,
                        const struct nano_file *f, struct err *e)
{
    uint64_t start, stop;
    struct shape local;
    struct err bad = {0};
    struct chunk c;

    if (!find_offsets(m->o, x, m->o->more[x->file].rank.dp.at, &start, &stop))
        return fault(m, x, "optimizer_config.json does not tell its offsets", e);
    if (x->x->nd != 1 || x->x->dim[0] != stop - start)
        return fault(m, x, "it is not as long as its offsets tell", e);
    nano_file_shape(f, &local);
    rank_tensor_chunk(x->x, m->o->file[x->file].file.number, &c);
    if (rank_boxes_report_flat(m->o->n->sink, &f->boxes, &local, start, stop - start,
                               &c, &bad) == 0)
        return 0;
    if (bad.code == EBADMSG)
        return fault(m, x, bad.text, e);
    return err_copy(e, &bad);
}

static int report_entry(const struct merge *m, const struct entry *x,
                        const struct nano_file *f, struct err *e)
{
    if (x->x->why)
        return fault(m, x, x->x->why, e);
    if (x->x->dtype != m->entry[0].x->dtype || dtype_bits(x->x->dtype) % 8 != 0)
        return fault(m, x, "its type is not that of the other ranks'", e);
    return m->o->more[x->file].rank.dp.is ? report_range(m, x, f, e)
                                          : report_local(m, x, f, e);
}

/* The pieces of one slice; ranks that have the same slice have copies. */
static int report_group(struct merge *m, size_t from, size_t to, struct err *e)
{
    const struct nano_ranks *rank = &m->o->more[m->entry[from].file].rank;
    const struct nano_file *f = nano_weight_of(m->w, rank);
    CLEANUP(buf_release) struct buf key = {0};
    int r;

    if (!f || !f->placed)
        return fault(m, &m->entry[from],
                     "no file of model/ tells which slice of the parameter it is", e);
    if (m->w->jumbled)
        return fault(m, &m->entry[from],
                     "the files of model/ have the parameter's slices in another order "
                     "than their ranks: which of them is this rank's is not to be told",
                     e);
    TRY(nano_boxes_key(&f->boxes, &key, e));
    r = keyset_add(&m->seen, key.len ? key.data : "", key.len);
    if (r < 0)
        return err_nomem(e);
    for (size_t i = from; r > 0 && i < to; i++)
        TRY(report_entry(m, &m->entry[i], f, e));
    return 0;
}

/* A rank's file that is lost or damaged: what is missed is told by its name. */
static int tell_lost(const struct merge *m, struct err *e)
{
    for (uint32_t i = 0; i < m->o->files; i++) {
        const struct rank_file *f = &m->o->file[i];

        if (f->err.code)
            return sink_fault(m->o->n->sink, "%s cannot be read", f->file.path) < 0
                       ? err_nomem(e)
                       : 0;
    }
    return 0;
}

/* Is all of the parameter covered by the groups that there are? Only for words. */
static bool lacks_groups(const struct merge *m)
{
    size_t groups = 0, want = m->w->whole ? 1 : m->w->files;

    for (size_t i = 0; i < m->n; i++)
        groups += i == 0 || !same_group(m->o, &m->entry[i - 1], &m->entry[i]);
    return groups < want;
}

static int report_pieces(struct merge *m, struct err *e)
{
    for (size_t from = 0, to; from < m->n; from = to) {
        for (to = from + 1;
             to < m->n && same_group(m->o, &m->entry[from], &m->entry[to]); to++)
            ;
        TRY(report_group(m, from, to, e));
    }
    return lacks_groups(m) ? tell_lost(m, e) : 0;
}

/* One number for a parameter ("step"), the same on all ranks. */
static int report_scalar(const struct merge *m, struct sink_tensor *t, struct err *e)
{
    struct rank_part *part = calloc(m->n, sizeof *part);
    int r;

    if (!part)
        return err_nomem(e);
    for (size_t i = 0; i < m->n; i++)
        part[i] = (struct rank_part){.file = &m->o->file[m->entry[i].file].file,
                                     .x = m->entry[i].x};
    r = rank_merge(m->o->n->sink, RANK_SAME, part, (uint32_t)m->n, t, e);
    free(part);
    return r;
}

static bool is_scalar(const struct merge *m)
{
    for (size_t i = 0; i < m->n; i++)
        if (m->entry[i].x->why || m->entry[i].x->nd != 0)
            return false;
    return true;
}

static int report_tensor(struct merge *m, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    struct sink_tensor t = {.part = DIR, .role = ROLE_OPTIMIZER};
    static const struct shape none = {.nd = 1};

    buf_add(&key, m->entry->name, m->entry->len);
    buf_addc(&key, '.');
    buf_add(&key, m->entry->state, m->entry->state_len);
    if (buf_failed(&key))
        return err_nomem(e);
    t.key = key.data;
    t.key_len = key.len;
    if (is_scalar(m))
        return report_scalar(m, &t, e);
    t.dtype = m->entry[0].x->why ? DTYPE_U8 : m->entry[0].x->dtype;
    t.shape = m->w->shaped ? m->w->shape : &none;
    TRY(sink_tensor_begin(m->o->n->sink, &t, e));
    TRY(report_pieces(m, e));
    return sink_tensor_end(m->o->n->sink, e);
}

static int report_tensors(struct optim *o, struct err *e)
{
    for (size_t from = 0, to; from < o->entries; from = to) {
        const struct entry *x = &o->entry[from];
        struct merge m = {.o = o, .entry = x};
        int r;

        for (to = from + 1; to < o->entries && compare_tensors(x, &o->entry[to]) == 0;
             to++)
            ;
        m.n = to - from;
        m.w = nano_weight_find(o->n, x->name, x->len);
        r = report_tensor(&m, e);
        keyset_release(&m.seen);
        if (r < 0)
            return r;
    }
    return 0;
}

static int report(struct optim *o, struct err *e)
{
    TRY(find_files(o, e));
    TRY(read_config(o, e));
    TRY(rank_files_load(o->n->c, o->n->sink, o->file, o->files, collect, o, e));
    for (uint32_t i = 0; i < o->files; i++)
        if (!o->file[i].err.code) {
            TRY(add_entries(o, i, &o->file[i].tensors, false, e));
            TRY(add_entries(o, i, &o->more[i].accumulator, true, e));
        }
    if (o->entries > 0)
        qsort_r(o->entry, o->entries, sizeof *o->entry, compare_entries, o);
    return report_tensors(o, e);
}

int nano_optimizer_report(struct nano *n, struct err *e)
{
    CLEANUP(optim_release) struct optim o = {.n = n};

    return listing_sub(n->c->listing, DIR) ? report(&o, e) : 0;
}
