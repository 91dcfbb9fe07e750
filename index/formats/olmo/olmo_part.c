/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_part.c - one folder of early OLMo-core: metadata.json, rank files. */
#include "index/formats/olmo/olmo_part.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/formats/flat_boxes.h"
#include "index/formats/format.h"
#include "index/formats/olmo/olmo_metadata.h"
#include "index/formats/olmo/olmo_pickle.h"
#include "index/formats/hf/safetensors_files.h"

enum {
    MAX_METADATA = 1 << 29, /* as olmo_metadata_parse() */
    HEAD = 4096,
    FIRST_BOXES = 64,
    MAX_NUMBERS =
        1 << 25,       /* of a tensor's boxes: 8 million of them in two dimensions */
    EMPTY_HEADER = 64, /* "{}" and blanks */
};

static const char METADATA[] = "metadata.json";

/* ---- bids ---- */

int olmo_part_find(struct listing *l)
{
    const struct listing_entry *entry = listing_find(l, METADATA);
    char head[HEAD];
    size_t got = 0;

    if (!entry || entry->st.kind != ENTRY_FILE ||
        listing_peek(l, METADATA, head, sizeof head, &got) < 0)
        return 0;
    return olmo_metadata_sniff(head, got);
}

int olmo_part_add(struct sink *sink, const char *dir, struct err *e)
{
    TRY(sink_part(sink, dir, e));
    return sink_watch(sink, dir, e);
}

/* ---- the files ---- */

/* The tensors of a rank file, sorted by name. */
struct names {
    const struct safetensors_tensor **t;
};

/* A box of a tensor and where it lies. */
struct box {
    uint32_t file;
    size_t order; /* of two equal boxes the later one counts */
    size_t at;    /* in part.number: start, then size */
    uint64_t offset, length;
};

struct part {
    const struct scan_context *c;
    struct sink *sink;
    const struct olmo_part_how *how;
    struct listing *listing; /* of the folder */
    struct olmo_metadata m;
    struct safetensors_files files;
    struct names *names; /* one a file */
    bool optimizer;      /* it holds an optimizer's state, whatever it is called */
    struct olmo_pickles pickles;
    /* Of the tensor at work. */
    struct shape shape;
    struct box *box;
    size_t nbox, box_cap;
    uint64_t *number;
    size_t nnumber, number_cap;
};

static void part_release(struct part *p)
{
    for (size_t i = 0; p->names && i < p->files.count; i++)
        free(p->names[i].t);
    for (size_t i = 0; i < p->files.count; i++)
        free((void *)(uintptr_t)p->files.file[i].name);
    free(p->names);
    free(p->box);
    free(p->number);
    olmo_pickles_release(&p->pickles);
    safetensors_files_release(&p->files);
    olmo_metadata_release(&p->m);
}

/* "model/rank_0.safetensors": a path relative to the checkpoint's directory. */
static char *path_in_part(const struct part *p, const char *name, struct err *e)
{
    char path[PATH_MAX];
    char *copy;

    if (store_join(p->how->dir, name, path, sizeof path) < 0) {
        err_set(e, ENAMETOOLONG, "%s/%.200s: the path is too long", p->how->dir, name);
        return NULL;
    }
    copy = strdup(path);
    if (!copy)
        err_nomem(e);
    return copy;
}

static int compare_names(const void *a, const void *b)
{
    const struct safetensors_tensor *const *x = a, *const *y = b;
    int order = memcmp((*x)->name, (*y)->name, MIN((*x)->name_len, (*y)->name_len));

    return order
               ? order
               : ((*x)->name_len > (*y)->name_len) - ((*x)->name_len < (*y)->name_len);
}

static int sort_names(struct part *p, size_t file)
{
    const struct safetensors_header *h = &p->files.file[file].h;
    const struct safetensors_tensor **t = calloc(h->count + 1, sizeof *t);

    if (!t)
        return -ENOMEM;
    for (size_t i = 0; i < h->count; i++)
        t[i] = &h->tensor[i];
    qsort(t, h->count, sizeof *t, compare_names);
    p->names[file].t = t;
    return 0;
}

static const struct safetensors_tensor *find_in(const struct part *p, uint32_t file,
                                                const char *key)
{
    const struct safetensors_tensor want = {.name = key, .name_len = strlen(key)};
    const struct safetensors_tensor *w = &want, **found = NULL;

    if (p->names[file].t)
        found = bsearch(&w, p->names[file].t, p->files.file[file].h.count, sizeof w,
                        compare_names);
    return found ? *found : NULL;
}

/* Every listed file, also one that holds nothing: that it is missing is worth a warning. */
static int read_files(struct part *p, struct err *e)
{
    TRY(safetensors_files_new(&p->files, p->m.nfiles, e));
    p->names = calloc(p->m.nfiles + 1, sizeof *p->names);
    if (!p->names)
        return err_nomem(e);
    for (size_t i = 0; i < p->m.nfiles; i++) {
        struct safetensors_file *f = &p->files.file[i];
        const char *name = p->m.file[i];

        if (store_name_is_safe(name, strlen(name)))
            f->name = path_in_part(p, name, e);
        else
            f->name = strdup(name);
        if (!f->name)
            return e->code ? -e->code : err_nomem(e);
        if (!store_name_is_safe(name, strlen(name)))
            f->fault = "metadata.json names a file that is never opened";
    }
    TRY(safetensors_files_read(p->c, p->sink, &p->files, e));
    for (size_t i = 0; i < p->files.count; i++)
        if (p->files.file[i].read && sort_names(p, i) < 0)
            return err_nomem(e);
    return 0;
}

/* ---- boxes of one tensor ---- */

static uint64_t *new_box(struct part *p, const struct box *box, struct err *e)
{
    size_t numbers = 2 * (size_t)p->shape.nd;

    if (!VEC_ROOM(p->box, p->nbox, p->box_cap)) {
        err_nomem(e);
        return NULL;
    }
    if (p->number_cap - p->nnumber < numbers || !p->number) {
        size_t cap = MAX(p->number_cap * 2, p->nnumber + numbers + FIRST_BOXES);
        uint64_t *more = reallocarray(p->number, cap, sizeof *more);

        if (!more) {
            err_nomem(e);
            return NULL;
        }
        p->number = more;
        p->number_cap = cap;
    }
    p->box[p->nbox] = *box;
    p->box[p->nbox].order = p->nbox;
    p->box[p->nbox++].at = p->nnumber;
    p->nnumber += numbers;
    return p->number + p->nnumber - numbers;
}

static uint64_t volume_of(const uint64_t *size, uint32_t nd)
{
    uint64_t v = 1;

    for (uint32_t k = 0; k < nd; k++)
        v *= size[k]; /* within the tensor, whose elements were counted */
    return v;
}

static int add_box(struct part *p, struct box *box, const uint64_t *start,
                   const uint64_t *size, unsigned unit, struct err *e)
{
    uint32_t nd = p->shape.nd;
    uint64_t *at;

    if (p->nnumber > MAX_NUMBERS)
        return sink_fault(p->sink, "it is in more than %zu pieces", p->nbox) < 0
                   ? err_nomem(e)
                   : 0;
    box->length = volume_of(size, nd) * unit;
    at = new_box(p, box, e);
    if (!at)
        return -e->code;
    if (nd > 0) {
        memcpy(at, start, nd * sizeof *at);
        memcpy(at + nd, size, nd * sizeof *at);
    }
    return 0;
}

/* A range of row-major elements; each box of it is one run of them as well. */
static int add_range(struct part *p, const struct box *from, const uint64_t *range,
                     unsigned unit, struct err *e)
{
    struct flat_boxes f;
    struct flat_box fb;

    if (!flat_boxes_begin(&f, &p->shape, range[0], range[1]))
        return sink_fault(p->sink, "an interval is not within the tensor") < 0
                   ? err_nomem(e)
                   : 0;
    while (flat_boxes_next(&f, &fb)) {
        struct box box = {.file = from->file, .offset = from->offset + fb.first * unit};

        TRY(add_box(p, &box, fb.start, fb.size, unit, e));
    }
    return 0;
}

static uint64_t elements_of(const struct part *p, const struct olmo_piece *piece)
{
    uint64_t n = 0;

    if (piece->box)
        return volume_of(piece->at + p->shape.nd, p->shape.nd);
    for (uint32_t i = 0; i < piece->count; i++)
        if (add_overflows(n, piece->at[2 * (size_t)i + 1] - piece->at[2 * (size_t)i],
                          &n))
            return UINT64_MAX;
    return n;
}

/* Why the piece cannot be taken from what the file holds under its key; false then. */
static bool check_stored(struct part *p, const struct olmo_tensor *t,
                         const struct olmo_piece *piece, enum dtype dtype, int *rc)
{
    const struct safetensors_file *f = &p->files.file[piece->file];
    const struct safetensors_tensor *x;

    if (f->fault)
        *rc = sink_fault(p->sink, "%s: \"%.200s\"", f->fault, f->name);
    else if (f->missing)
        *rc = sink_fault(p->sink, "%.200s is missing", f->name);
    else if (!f->read)
        *rc = sink_fault(p->sink, "%s", f->err.text);
    else if (!(x = find_in(p, piece->file, t->key)))
        *rc = sink_fault(p->sink, "%.200s does not hold it, although %s says so",
                         f->name, METADATA);
    else if (x->dtype != dtype)
        *rc = sink_fault(p->sink, "it is %s in %.200s, and %s elsewhere",
                         dtype_name(x->dtype), f->name, dtype_name(dtype));
    else if (x->nd != 1)
        *rc = sink_fault(p->sink, "%.200s has it in %u dimensions: pieces have one",
                         f->name, x->nd);
    else if (x->dim[0] < elements_of(p, piece))
        *rc = sink_fault(p->sink,
                         "%.200s has %" PRIu64 " elements of it, %s wants %" PRIu64,
                         f->name, x->dim[0], METADATA, elements_of(p, piece));
    else
        return true;
    return false;
}

static int add_piece(struct part *p, const struct olmo_tensor *t,
                     const struct olmo_piece *piece, enum dtype dtype, struct err *e)
{
    const struct safetensors_file *f = &p->files.file[piece->file];
    unsigned unit = dtype_unit(dtype);
    struct box box = {.file = f->number};
    int rc = 0;

    if (!check_stored(p, t, piece, dtype, &rc))
        return rc < 0 ? err_nomem(e) : 0;
    box.offset = f->h.data + find_in(p, piece->file, t->key)->begin;
    if (piece->box)
        return add_box(p, &box, piece->at, piece->at + p->shape.nd, unit, e);
    for (uint32_t i = 0; i < piece->count; i++) {
        const uint64_t *range = piece->at + 2 * (size_t)i;

        TRY(add_range(p, &box, range, unit, e));
        box.offset += (range[1] - range[0]) * unit;
    }
    return 0;
}

/* ---- replicas ---- */

static int compare_places(const struct part *p, const struct box *x,
                          const struct box *y)
{
    const uint64_t *a = p->number + x->at, *b = p->number + y->at;

    for (uint32_t k = 0; k < 2 * p->shape.nd; k++)
        if (a[k] != b[k])
            return a[k] < b[k] ? -1 : 1;
    return 0;
}

static int compare_boxes(const void *a, const void *b, void *user)
{
    const struct box *x = a, *y = b;
    int order = compare_places(user, x, y);

    return order ? order : (x->order > y->order) - (x->order < y->order);
}

/*
 * Boxes that were saved by several ranks: the loader writes one over the other, so the
 * last one counts. Boxes that overlap and are not equal were never saved by OLMo-core:
 * the sink makes them a fault.
 */
static int put_boxes(struct part *p, struct err *e)
{
    if (p->nbox > 1)
        qsort_r(p->box, p->nbox, sizeof *p->box, compare_boxes, p);
    for (size_t i = 0; i < p->nbox; i++) {
        const struct box *b = &p->box[i];
        const struct chunk c = {
            .file = b->file,
            .offset = b->offset,
            .length = b->length,
            .start = p->number + b->at,
            .size = p->number + b->at + p->shape.nd,
        };

        if (i + 1 < p->nbox && compare_places(p, b, b + 1) == 0)
            continue;
        TRY(sink_chunk(p->sink, &c, e));
    }
    return 0;
}

/* The first file that has all of it ends the loader's search; else all files count. */
static int put_pieces(struct part *p, const struct olmo_tensor *t, enum dtype dtype,
                      struct err *e)
{
    const struct olmo_piece *piece = t->piece;
    size_t n = t->npieces;

    for (size_t i = 0; i < t->npieces; i++) {
        if (olmo_piece_is_whole(t, &t->piece[i])) {
            piece = &t->piece[i];
            n = 1;
            break;
        }
    }
    p->nbox = p->nnumber = 0;
    for (size_t i = 0; i < n; i++)
        TRY(add_piece(p, t, &piece[i], dtype, e));
    return put_boxes(p, e);
}

/* ---- tensors ---- */

/* metadata.json of 23 March 2024 does not tell: what the first file says that has it. */
static enum dtype stored_dtype(const struct part *p, const struct olmo_tensor *t)
{
    for (uint32_t i = 0; t->dtype == DTYPE_NONE && i < p->files.count; i++) {
        const struct safetensors_tensor *x = find_in(p, i, t->key);

        if (x)
            return x->dtype;
    }
    return t->dtype;
}

/* Names that OLMo-core gives to pickles that it puts into tensors of bytes. */
static bool is_pickle(const struct part *p, const struct olmo_tensor *t,
                      enum dtype dtype)
{
    static const char group[] = "param_group";
    size_t n = strlen(group);

    if (!p->optimizer || dtype != DTYPE_U8 || t->nd != 1)
        return false;
    if (strcmp(t->key, "state_keys") == 0)
        return true;
    return strncmp(t->key, group, n) == 0 && t->key[n] &&
           strspn(t->key + n, "0123456789") == strlen(t->key + n);
}

/* A pickle that lies in one piece is shown as an object too. */
static int note_pickle(struct part *p, const struct olmo_tensor *t, struct err *e)
{
    struct olmo_pickle pickle = {.key = t->key, .length = t->elements};

    if (t->fault || p->nbox == 0 || p->box[p->nbox - 1].length != t->elements)
        return sink_warning(p->sink, "object", "%s%s%s: the pickle is not in one piece",
                            p->how->dir, p->how->dir[0] ? "/" : "", t->key) < 0
                   ? err_nomem(e)
                   : 0;
    for (size_t i = 0; i < p->files.count; i++)
        if (p->files.file[i].read &&
            p->files.file[i].number == p->box[p->nbox - 1].file)
            pickle.file = &p->files.file[i];
    pickle.offset = p->box[p->nbox - 1].offset;
    return olmo_pickles_add(&p->pickles, &pickle, e);
}

static int add_unknown(struct part *p, struct sink_tensor *out, const char *fault,
                       struct err *e)
{
    static const struct shape none = {.nd = 1};

    out->dtype = DTYPE_U8;
    out->shape = &none;
    TRY(sink_tensor_begin(p->sink, out, e));
    if (sink_fault(p->sink, "%s", fault) < 0)
        return err_nomem(e);
    return sink_tensor_end(p->sink, e);
}

static int add_tensor(struct part *p, const struct olmo_tensor *t, struct err *e)
{
    enum dtype dtype = stored_dtype(p, t);
    bool pickle = is_pickle(p, t, dtype);
    struct sink_tensor out = {.key = t->key,
                              .key_len = strlen(t->key),
                              .part = p->how->part,
                              .dtype = dtype,
                              .shape = &p->shape,
                              .role = pickle         ? ROLE_OTHER
                                      : p->optimizer ? ROLE_OPTIMIZER
                                                     : p->how->role};

    olmo_shape(t, &p->shape);
    if (dtype == DTYPE_NONE || (t->fault && !t->dim))
        return add_unknown(p, &out, t->fault ? t->fault : "no file tells its dtype", e);
    TRY(sink_tensor_begin(p->sink, &out, e));
    p->nbox = 0;
    if (t->fault ? sink_fault(p->sink, "%s", t->fault) < 0
                 : put_pieces(p, t, dtype, e) < 0)
        return e->code ? -e->code : err_nomem(e);
    if (pickle)
        TRY(note_pickle(p, t, e));
    return sink_tensor_end(p->sink, e);
}

static int add_tensors(struct part *p, struct err *e)
{
    for (size_t i = 0; i < p->m.count; i++)
        TRY(add_tensor(p, &p->m.tensor[i], e));
    return 0;
}

/* An optimizer's state is told by its own keys where the folder's name does not. */
static bool holds_optimizer(const struct part *p)
{
    bool keys = false, groups = false;

    for (size_t i = 0; i < p->m.count; i++) {
        keys |= strcmp(p->m.tensor[i].key, "state_keys") == 0;
        groups |= strcmp(p->m.tensor[i].key, "num_param_groups") == 0;
    }
    return keys && groups;
}

/* ---- what stands beside ---- */

static bool is_listed(const struct part *p, const char *name)
{
    for (size_t i = 0; i < p->m.nfiles; i++)
        if (strcmp(p->m.file[i], name) == 0)
            return true;
    return false;
}

/* A rank that owns nothing writes a header without tensors, and is not always listed. */
static bool is_empty(struct listing *l, const char *name)
{
    unsigned char head[EMPTY_HEADER];
    size_t got = 0;

    if (listing_find(l, name)->st.id.size > sizeof head ||
        listing_peek(l, name, head, sizeof head, &got) < 0 || got < 10)
        return false;
    return memcmp(head + 8, "{}", 2) == 0;
}

/* N of rank_N.safetensors, and 1; or 0. */
static uint64_t rank_end(const char *name)
{
    char *end;
    unsigned long rank;

    if (strncmp(name, "rank_", 5) != 0 || !isdigit((unsigned char)name[5]) ||
        strlen(name) > 32)
        return 0;
    rank = strtoul(name + 5, &end, 10);
    return strcmp(end, ".safetensors") == 0 && rank < UINT32_MAX ? rank + 1 : 0;
}

/*
 * Rank files that metadata.json does not name are left over from an earlier save by more
 * ranks into the same folder.
 */
static int hide_rest(struct part *p, struct olmo_part_told *told, struct err *e)
{
    const char *first = NULL;
    size_t stale = 0;

    for (size_t i = 0; i < listing_count(p->listing); i++) {
        const struct listing_entry *entry = listing_at(p->listing, i);
        uint64_t end = rank_end(entry->name);
        CLEANUP_FREE char *path = NULL;

        if (entry->st.kind != ENTRY_FILE || end == 0)
            continue;
        if (!is_listed(p, entry->name)) {
            path = path_in_part(p, entry->name, e);
            if (!path || sink_hide(p->sink, path, false, e) < 0)
                return -e->code;
            if (!is_empty(p->listing, entry->name)) {
                first = first ? first : entry->name;
                stale++;
                continue;
            }
        }
        told->ranks = MAX(told->ranks, end);
    }
    told->files = p->m.nfiles;
    if (stale == 0)
        return 0;
    return sink_warning(p->sink, "stale-file",
                        "%zu rank files belong to no tensor, the first is %s%s%s",
                        stale, p->how->dir, p->how->dir[0] ? "/" : "", first) < 0
               ? err_nomem(e)
               : 0;
}

/* A damaged file that no tensor needs is told all the same. */
static int warn_damaged(struct part *p, struct err *e)
{
    for (size_t i = 0; i < p->files.count; i++) {
        const struct safetensors_file *f = &p->files.file[i];

        if (!f->fault && !f->missing && !f->read &&
            sink_warning(p->sink, "damaged-file", "%s", f->err.text) < 0)
            return err_nomem(e);
    }
    return 0;
}

/* ---- the folder ---- */

static int read_metadata(struct part *p, struct olmo_part_told *told, struct err *e)
{
    CLEANUP_FREE char *text = NULL, *name = path_in_part(p, METADATA, e);
    size_t len;

    if (!name)
        return -e->code;
    if (store_join(p->c->dir, name, told->metadata, sizeof told->metadata) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", name);
    p->listing = listing_below(p->c->listing, p->how->dir);
    if (!p->listing || !listing_find(p->listing, METADATA))
        return err_set(e, ENOENT, "there is no %s", name);
    /* First watched, then read: also a damaged one is read anew when it changes. */
    TRY(sink_hide(p->sink, name, true, e));
    if (listing_read(p->listing, METADATA, MAX_METADATA, &text, &len, e) < 0 ||
        olmo_metadata_parse(text, len, &p->m, e) < 0)
        return err_wrap(e, "%s", name);
    told->legacy = p->m.legacy;
    return 0;
}

int olmo_part_report(const struct scan_context *c, struct sink *sink,
                     const struct olmo_part_how *how, struct olmo_part_told *told,
                     struct err *e)
{
    CLEANUP(part_release)
    struct part p = {.c = c, .sink = sink, .how = how};

    *told = (struct olmo_part_told){0};
    TRY(read_metadata(&p, told, e));
    TRY(read_files(&p, e));
    p.optimizer = how->role == ROLE_OPTIMIZER || (how->role < 0 && holds_optimizer(&p));
    TRY(add_tensors(&p, e));
    TRY(warn_damaged(&p, e));
    TRY(hide_rest(&p, told, e));
    return olmo_pickles_report(c, sink, how->part, &p.pickles, e);
}
