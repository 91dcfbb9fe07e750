/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/rank_set.c - reads a file a rank, and keeps where pieces are. */
#include "index/formats/rankfiles/rank_set_priv.h"

#include <errno.h>
#include <search.h>
#include <stdio.h>
#include <string.h>

#include "base/pool.h"
#include "base/vec.h"
#include "index/formats/format.h"

enum {
    MAX_MEMORY = 1 << 30, /* of a set: some 8 million pieces */
    FREE_MEMORY = 4 << 20,
    MAX_FILES = 1 << 16, /* ranks of the largest runs: some 10^4 */
};

/* ---- the set ---- */

int rank_set_new(const struct scan_context *c, struct sink *sink,
                 const struct rank_set_how *how, struct rank_set **out, struct err *e)
{
    struct rank_set *s = calloc(1, sizeof *s);

    if (!s)
        return err_nomem(e);
    s->c = c;
    s->sink = sink;
    s->how = how;
    s->last = &s->entry;
    s->budget = FREE_MEMORY;
    s->arena = arena_new(MAX_MEMORY);
    if (!s->arena) {
        rank_set_free(s);
        return err_nomem(e);
    }
    *out = s;
    return 0;
}

static void keep_node(void *p)
{
    (void)p; /* entries are in the arena */
}

static void close_file(struct rank_file *f)
{
    torch_file_close(&f->file);
    safetensors_header_release(&f->header);
    f->header = (struct safetensors_header){0};
}

void rank_set_free(struct rank_set *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < s->nfiles; i++) {
        close_file(&s->file[i]);
        free(s->file[i].path);
        free(s->file[i].why);
    }
    free(s->file);
    tdestroy(s->by_path, keep_node);
    arena_free(s->arena);
    free(s);
}

void rank_set_freep(struct rank_set **s)
{
    rank_set_free(*s);
    *s = NULL;
}

int rank_set_add(struct rank_set *s, const char *path, struct err *e)
{
    struct rank_file *f;

    if (s->nfiles == MAX_FILES)
        return err_set(e, EFBIG, "more than %d files", MAX_FILES);
    if (!VEC_ROOM(s->file, s->nfiles, s->cap))
        return err_nomem(e);
    f = &s->file[s->nfiles];
    *f = (struct rank_file){.path = strdup(path)};
    if (!f->path)
        return err_nomem(e);
    s->nfiles++;
    return 0;
}

int rank_set_add_safetensors(struct rank_set *s, const char *path, struct err *e)
{
    TRY(rank_set_add(s, path, e));
    s->file[s->nfiles - 1].safetensors = true;
    return 0;
}

void rank_set_expect(struct rank_set *s, uint64_t missing)
{
    s->missing = missing;
}

/* ---- tensors ---- */

static int compare_entries(const void *a, const void *b)
{
    const struct rank_entry *x = a, *y = b;
    int r = memcmp(x->path, y->path, MIN(x->len, y->len));

    return r ? r : (x->len > y->len) - (x->len < y->len);
}

static struct rank_entry *new_entry(struct rank_set *s, const char *path, size_t len)
{
    struct rank_entry *t = arena_alloc(s->arena, sizeof *t);

    if (!t)
        return NULL;
    t->path = arena_memdup(s->arena, path, len);
    t->len = len;
    t->last = &t->piece;
    if (!t->path || !tsearch(t, &s->by_path, compare_entries))
        return NULL;
    *s->last = t;
    s->last = &t->next;
    s->count++;
    return t;
}

/* The tensor of this path, new when it was not met yet; NULL: out of memory. */
static struct rank_entry *entry_of(struct rank_set *s, const char *path, size_t len)
{
    struct rank_entry want = {.path = path, .len = len}, *next = s->cursor;
    struct rank_entry *const *found;

    if (!next || compare_entries(next, &want) != 0) {
        found = tfind(&want, &s->by_path, compare_entries);
        next = found ? *found : new_entry(s, path, len);
    }
    s->cursor = next ? next->next : NULL;
    return next;
}

int rank_entry_fault(struct rank_set *s, struct rank_entry *t, uint32_t file,
                     const char *why, struct err *e)
{
    char text[512];

    if (t->why)
        return 0;
    snprintf(text, sizeof text, "%.200s: %s", s->file[file].path, why);
    t->why = arena_memdup(s->arena, text, strlen(text));
    return t->why ? 0 : err_nomem(e);
}

int rank_entry_piece(struct rank_set *s, struct rank_entry *t, uint32_t file,
                     const struct torch_tensor *x, const uint64_t *start, struct err *e)
{
    size_t nd = x->shape.nd, row = nd * sizeof(uint64_t);
    struct rank_piece *p = arena_alloc(s->arena, sizeof *p + 3 * row);

    if (!p)
        return err_nomem(e);
    p->file = file;
    p->crc = x->crc;
    p->dtype = (uint8_t)x->dtype;
    p->flags = x->flags;
    p->nd = (uint8_t)nd;
    p->data = x->data;
    p->data_len = x->data_len;
    p->first = x->storage_offset;
    p->packed = x->packed;
    if (nd > 0) {
        if (start)
            memcpy(p->number, start, row);
        memcpy(p->number + nd, x->shape.dim, row);
        memcpy(p->number + 2 * nd, x->stride, row);
    }
    *t->last = p;
    t->last = &p->next;
    t->npieces++;
    return 0;
}

void rank_piece_open(const struct rank_piece *p, struct torch_tensor *out)
{
    *out = (struct torch_tensor){
        .dtype = (enum dtype)p->dtype,
        .shape = {.nd = p->nd},
        .storage_offset = p->first,
        .data = p->data,
        .data_len = p->data_len,
        .packed = p->packed,
        .crc = p->crc,
        .flags = p->flags,
    };
    memcpy(out->shape.dim, p->number + p->nd, p->nd * sizeof *p->number);
    memcpy(out->stride, p->number + 2 * (size_t)p->nd, p->nd * sizeof *p->number);
}

/* Are all bytes of the storage elements of the piece? */
static bool is_whole_storage(const struct rank_piece *p)
{
    uint64_t elements = 1;

    for (uint32_t k = 0; k < p->nd; k++)
        elements *= rank_piece_size(p)[k]; /* below 2^63: it was read */
    return elements * dtype_unit((enum dtype)p->dtype) == p->data_len;
}

int rank_piece_equal(const struct rank_piece *a, const struct rank_piece *b)
{
    size_t sizes = (size_t)a->nd * sizeof *a->number;

    if (a->nd != b->nd || a->dtype != b->dtype ||
        memcmp(rank_piece_size(a), rank_piece_size(b), sizes) != 0)
        return 0;
    if (a->first != b->first || a->flags != b->flags || a->data_len != b->data_len ||
        memcmp(rank_piece_size(a) + a->nd, rank_piece_size(b) + b->nd, sizes) != 0)
        return -1;
    if (a->data_len == 0)
        return 1;
    if (a->crc == 0 || b->crc == 0) /* none was kept */
        return -1;
    if (a->crc == b->crc)
        return 1;
    return is_whole_storage(a) ? 0 : -1;
}

/* ---- what a tensor is ---- */

static int set_shape(struct rank_set *s, struct rank_entry *t, enum dtype dtype,
                     const struct shape *shape, struct err *e)
{
    t->dtype = dtype;
    t->nd = shape->nd;
    t->dim = arena_array(s->arena, (size_t)shape->nd + 1, sizeof *t->dim);
    if (!t->dim)
        return err_nomem(e);
    memcpy(t->dim, shape->dim, shape->nd * sizeof *t->dim);
    return 0;
}

static bool same_shape(const struct rank_entry *t, enum dtype dtype,
                       const struct shape *shape)
{
    return t->dtype == dtype && t->nd == shape->nd &&
           (t->nd == 0 || memcmp(t->dim, shape->dim, t->nd * sizeof *t->dim) == 0);
}

int rank_entry_learn(struct rank_set *s, struct rank_entry *t, enum dtype dtype,
                     const struct shape *shape, bool *same, struct err *e)
{
    if (t->dtype == DTYPE_NONE)
        TRY(set_shape(s, t, dtype, shape, e));
    *same = same_shape(t, dtype, shape);
    return 0;
}

int rank_entry_shape(struct rank_set *s, struct rank_entry *t, uint32_t file,
                     enum dtype dtype, const struct shape *shape, struct err *e)
{
    bool same;

    TRY(rank_entry_learn(s, t, dtype, shape, &same, e));
    return same ? 0
                : rank_entry_fault(s, t, file, "other ranks have another shape or type",
                                   e);
}

int rank_entry_meet(struct rank_set *s, uint32_t file, const char *path, size_t len,
                    bool distributed, struct rank_entry **out, struct err *e)
{
    struct rank_entry *t;

    *out = NULL;
    if (arena_used(s->arena) > s->budget)
        return err_set(e, EFBIG,
                       "too many tensors for its size: references multiply "
                       "them");
    t = entry_of(s, path, len);
    if (!t)
        return err_nomem(e);
    if (t->last_file == file + 1)
        return rank_entry_fault(s, t, file, "two tensors have this name", e);
    if (t->last_file > 0 && t->distributed != distributed)
        TRY(rank_entry_fault(s, t, file, "it is whole in one file, a shard in another",
                             e));
    t->last_file = file + 1;
    *out = t;
    return 0;
}

int rank_set_fault(struct rank_set *s, uint32_t file, const char *path, size_t len,
                   const char *why, struct err *e)
{
    struct rank_entry *t;

    if (rank_entry_meet(s, file, path, len, true, &t, e) < 0 || !t)
        return -e->code;
    s->distributed = t->distributed = true;
    return rank_entry_fault(s, t, file, why, e);
}

int rank_set_require(struct rank_set *s, const char *path, size_t len, struct err *e)
{
    static const char why[] = "no rank's file that can be read has it";
    struct rank_entry *t = entry_of(s, path, len);

    if (!t)
        return err_nomem(e);
    if (t->last_file > 0 || t->why)
        return 0;
    t->distributed = true;
    t->why = arena_memdup(s->arena, why, sizeof why - 1);
    return t->why ? 0 : err_nomem(e);
}

/* ---- objects ---- */

static int add_text(struct buf *b, const char *text, size_t len)
{
    return buf_add(b, text, len) < 0 ? -ENOMEM : 0;
}

/* The key under which a plain or merged tensor is shown. */
static int shown_key(const struct rank_set *s, const char *path, size_t len,
                     struct buf *key)
{
    return s->how->rename ? s->how->rename(s->how->user, path, len, key)
                          : add_text(key, path, len);
}

struct objects {
    const struct rank_set *s;
    const char *file; /* of slices: FILE:PATH; NULL: what is shown once */
};

static int key_of_path(void *user, const char *path, size_t len, struct buf *key)
{
    const struct objects *o = user;

    if (!o->file)
        return shown_key(o->s, path, len, key);
    buf_adds(key, o->file);
    buf_addc(key, ':');
    return add_text(key, path, len);
}

/* What is no tensor, of the first file; and of each one where tensors are shown for each. */
static int report_objects(struct rank_set *s, const struct rank_file *f, bool first,
                          struct err *e)
{
    static const char *const same[] = {"param_groups", NULL};
    CLEANUP(buf_release) struct buf prefix = {0};
    struct objects o = {.s = s,
                        .file = rank_set_is_flat(s) || s->how->own ? f->path : NULL};
    struct torch_report how = {.prefix = "",
                               .entries = true,
                               .role = ROLE_OTHER,
                               .elsewhere = key_of_path,
                               .user = &o};

    if (first && !s->how->own) {
        how.object = s->how->object;
    } else if (o.file) {
        buf_addf(&prefix, "%s:", f->path);
        if (buf_failed(&prefix))
            return err_nomem(e);
        how.object = prefix.data;
        how.skip = s->how->own ? NULL : same;
    } else {
        return 0;
    }
    return torch_file_report_loaded(s->sink, &f->file, &how, e);
}

/* Where entries of the outermost dict are merged: those, and what each rank has. */
static int report_entries(struct rank_set *s, const struct rank_file *f, bool first,
                          struct err *e)
{
    CLEANUP(buf_release) struct buf prefix = {0};
    struct objects o = {.s = s};
    struct torch_report merged = {.prefix = "",
                                  .entries = true,
                                  .role = ROLE_OTHER,
                                  .object = s->how->object,
                                  .elsewhere = key_of_path,
                                  .user = &o};
    struct torch_report own = {
        .entries = true, .role = ROLE_OTHER, .skip = s->how->merged};

    for (const char *const *name = s->how->merged; first && *name; name++) {
        merged.only = *name;
        TRY(torch_file_report_loaded(s->sink, &f->file, &merged, e));
    }
    buf_addf(&prefix, "%s:", f->path);
    if (buf_failed(&prefix))
        return err_nomem(e);
    own.object = prefix.data;
    return torch_file_report_loaded(s->sink, &f->file, &own, e);
}

static int give_up(struct rank_set *s, struct rank_file *f, struct err *e)
{
    if (!torch_file_is_damaged(f->err.code)) {
        return err_copy(e, &f->err);
    }
    f->why = strdup(f->err.text);
    if (!f->why ||
        sink_warning(s->sink, f->err.code == ENOENT ? "missing-file" : "damaged-file",
                     "%s", f->err.text) < 0)
        return err_nomem(e);
    return 0;
}

static int collect(struct rank_set *s, uint32_t i, struct err *e)
{
    return s->file[i].safetensors ? rank_image_collect(s, i, e)
                                  : rank_collect_file(s, i, e);
}

static int take_file(struct rank_set *s, uint32_t i, struct err *e)
{
    struct rank_file *f = &s->file[i];
    int taken = f->err.code == 0 ? collect(s, i, &f->err) : -f->err.code;

    if (taken >= 0) {
        bool first = s->read++ == 0;

        if (f->safetensors)
            return 0;
        if (first && s->how->on_first) {
            TRY(rank_set_settle(s, e));
            TRY(s->how->on_first(s->how->user, &f->file, e));
        }
        if (taken > 0)
            return 0;
        return s->how->merged ? report_entries(s, f, first, e)
                              : report_objects(s, f, first, e);
    }
    err_wrap(&f->err, "%s", f->path);
    return give_up(s, f, e);
}

/* ---- all files ---- */

struct batch {
    struct rank_set *s;
    size_t first;
};

static int load_nth(void *user, size_t i, struct err *e)
{
    const struct batch *b = user;
    struct rank_file *f = &b->s->file[b->first + i];

    (void)e;
    if (f->err.code == 0 && f->safetensors)
        rank_image_load(b->s->c, f, &f->err);
    else if (f->err.code == 0)
        torch_file_load(b->s->c, &f->file, &f->err);
    return 0;
}

static int load_batch(struct rank_set *s, size_t first, size_t n, struct err *e)
{
    struct batch b = {.s = s, .first = first};

    for (size_t i = first; i < first + n; i++) {
        struct rank_file *f = &s->file[i];

        f->file.path = f->path;
        if (torch_file_register(s->sink, &f->file, &f->err) < 0 &&
            !torch_file_is_damaged(f->err.code)) {
            return err_copy(e, &f->err);
        }
    }
    TRY(pool_each(s->c->pool, n, load_nth, &b, e));
    for (size_t i = first; i < first + n; i++) {
        TRY(take_file(s, (uint32_t)i, e));
        close_file(&s->file[i]);
    }
    return 0;
}

/* Graphs are large; so that they are not all held, some files are read at a time. */
static size_t batch_size(const struct rank_set *s)
{
    return s->c->pool ? pool_threads(s->c->pool) + (size_t)1 : 1;
}

int rank_set_load(struct rank_set *s, struct err *e)
{
    size_t step = batch_size(s);

    for (size_t i = 0; i < s->nfiles; i += step)
        TRY(load_batch(s, i, MIN(step, s->nfiles - i), e));
    if (s->nfiles > 0 && s->read == 0) {
        return err_copy(e, &s->file[0].err);
    }
    if (s->missing > 0 &&
        sink_warning(s->sink, "missing-file",
                     "%" PRIu64 " of %" PRIu64 " ranks' files are missing beside %s",
                     s->missing, rank_set_world(s),
                     s->nfiles > 0 ? s->file[0].path : "none") < 0)
        return err_nomem(e);
    if (s->how->on_read)
        TRY(s->how->on_read(s->how->user, s, e));
    return rank_set_settle(s, e);
}

/* ---- what was found ---- */

size_t rank_set_count(const struct rank_set *s)
{
    return s->count;
}

bool rank_set_is_distributed(const struct rank_set *s)
{
    return s->distributed;
}

const struct dist_mesh *rank_set_mesh(const struct rank_set *s)
{
    return &s->mesh;
}
