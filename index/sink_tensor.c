/* SPDX-License-Identifier: MIT */
/* index/sink_tensor.c - tensors and chunks that a driver reports, checked and staged. */
#include "index/sink_priv.h"

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/interrupt.h"
#include "base/vec.h"
#include "index/catalog_rows.h"
#include "index/catalog_write.h"
#include "index/key_text.h"
#include "index/names.h"
#include "index/plan.h"

#include <xxhash.h>

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    KEPT_BYTES = 1 << 20, /* of memory from tensor to tensor */
    LOOK_EVERY = 1024,    /* chunks, whether time is up */
};

void tensor_release(struct open_tensor *t)
{
    buf_release(&t->key);
    buf_release(&t->codec_key);
    buf_release(&t->attributes);
    buf_release(&t->fault);
    free(t->chunk);
    free(t->box);
}

static const char *tensor_key(const struct open_tensor *t)
{
    return t->key.data + t->part_len + 1;
}

static size_t tensor_key_len(const struct open_tensor *t)
{
    return t->key.len - t->part_len - 1;
}

/* The text of the first fault is kept. */
static void PRINTF(2, 3) set_fault(struct open_tensor *t, const char *fmt, ...)
{
    char text[1200];
    va_list args;

    if (t->fault.len > 0)
        return;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    buf_adds(&t->fault, text[0] ? text : "unknown fault");
}

int sink_fault(struct sink *s, const char *fmt, ...)
{
    char text[1100];
    va_list args;

    assert(s->t.open);
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (s->t.untyped) /* the driver knows why */
        buf_clear(&s->t.fault);
    s->t.untyped = false;
    set_fault(&s->t, "%s", text);
    return buf_failed(&s->t.fault);
}

/* Empties what the last tensor left; memory that only a large one needs goes back. */
static void tensor_clear(struct open_tensor *t)
{
    if (t->chunk_cap * sizeof *t->chunk > KEPT_BYTES) {
        free(steal(&t->chunk));
        t->chunk_cap = 0;
    }
    if (t->box_cap * sizeof *t->box > KEPT_BYTES) {
        free(steal(&t->box));
        t->box_cap = 0;
    }
    buf_clear(&t->key);
    buf_clear(&t->codec_key);
    buf_clear(&t->attributes);
    buf_clear(&t->fault);
    *t = (struct open_tensor){
        .key = t->key,
        .codec_key = t->codec_key,
        .attributes = t->attributes,
        .fault = t->fault,
        .chunk = t->chunk,
        .chunk_cap = t->chunk_cap,
        .box = t->box,
        .box_cap = t->box_cap,
    };
}

static int copy_texts(struct open_tensor *t, const struct sink_tensor *in,
                      struct err *e)
{
    t->has_part = in->part != NULL;
    t->part_len = in->part ? strlen(in->part) : 0;
    buf_add(&t->key, in->part ? in->part : "", t->part_len);
    buf_addc(&t->key, '\0');
    buf_add(&t->key, in->key, in->key_len);
    t->has_codec_key = in->codec_key != NULL;
    if (in->codec_key)
        buf_adds(&t->codec_key, in->codec_key);
    t->has_attributes = in->attributes != NULL;
    if (in->attributes)
        buf_adds(&t->attributes, in->attributes);
    return buf_failed(&t->key) || buf_failed(&t->codec_key) ||
                   buf_failed(&t->attributes)
               ? err_nomem(e)
               : 0;
}

/* Only then can two tensors have one key. */
static void note_part(struct sink *s, const struct open_tensor *t)
{
    uint64_t part = XXH3_64bits_withSeed(t->key.data, t->part_len, t->has_part);

    if (s->tensors == 0)
        s->first_part = part;
    s->many_parts |= part != s->first_part;
}

/* A shape that no tensor can have is a fault; the tensor then has no bytes. */
static void take_shape(struct open_tensor *t, const struct sink_tensor *in)
{
    struct err e = {0};

    t->dtype = (unsigned)in->dtype < DTYPE_COUNT ? in->dtype : DTYPE_NONE;
    t->stored = (unsigned)in->stored < DTYPE_COUNT ? in->stored : DTYPE_NONE;
    if (t->stored == DTYPE_NONE)
        t->stored = t->dtype;
    t->shape = *in->shape;
    t->has_units = shape_bytes(&t->shape, t->dtype, &t->bytes, &e) == 0 &&
                   shape_units(&t->shape, t->stored, &t->units, &e) == 0;
    if (!t->has_units) {
        t->bytes = 0;
        t->untyped = t->dtype == DTYPE_NONE;
        set_fault(t, "%s", e.text);
    }
}

int sink_tensor_begin(struct sink *s, const struct sink_tensor *in, struct err *e)
{
    struct open_tensor *t = &s->t;
    char key[200];
    int rc;

    assert(!t->open && in->shape->nd <= SHAPE_MAX_DIMS);
    TRY(interrupt_check_late(e));
    if (s->tensors == s->max_tensors)
        return err_set(e, EFBIG, "more than %" PRIu64 " tensors", s->max_tensors);
    /* One long part of a path, which a file has once, may stand in the keys of many. */
    s->key_bytes += in->key_len;
    if (s->key_bytes > s->max_keys + SINK_KEY_EACH * s->tensors)
        return err_set(e, EFBIG, "keys of tensors that are %" PRIu64 " bytes together",
                       s->key_bytes);
    tensor_clear(t);
    TRY(copy_texts(t, in, e));
    rc = keyset_add(&s->keys, t->key.data, t->key.len);
    if (rc < 0)
        return err_nomem(e);
    if (rc == 0)
        return err_set(e, EEXIST, "key %s is there twice",
                       key_text(key, sizeof key, in->key, in->key_len));
    note_part(s, t);
    take_shape(t, in);
    t->wrapper = in->wrapper < in->key_len ? in->wrapper : 0;
    t->modules =
        in->modules && name_has_modules(in->key + t->wrapper, in->key_len - t->wrapper);
    t->role = in->role;
    t->open = true;
    s->tensors++;
    return 0;
}

/* Which bytes of which file: hashed, and added up so that the order does not matter. */
static void note_identity(struct open_tensor *t, const struct sink_file *f,
                          const struct chunk *c)
{
    uint64_t v[5 + 3 * SHAPE_MAX_DIMS] = {f->identity, c->offset, c->length, c->first,
                                          (uint64_t)c->encoding << 8 | c->flags};
    uint32_t nd = t->has_units ? t->units.nd : 0;
    size_t n = 5;

    for (uint32_t k = 0; k < nd; k++) {
        v[n++] = c->start[k];
        v[n++] = c->size[k];
        if (c->step)
            v[n++] = (uint64_t)c->step[k];
    }
    if (c->param)
        v[4] ^= XXH3_64bits(c->param, c->param_len);
    t->identity += XXH3_64bits(v, n * sizeof *v);
}

/* Does the file have the bytes? */
static int check_file(struct sink *s, const struct sink_file *f, const struct chunk *c,
                      struct err *e)
{
    struct open_tensor *t = &s->t;
    char path[300];
    uint64_t end;

    if (t->fault.len > 0 ||
        (f->problem == 0 && !range_outside(c->offset, c->length, f->size)))
        return 0;
    TRY(sink_files_name(&s->files, c->file, strlen(s->path), path, sizeof path, e));
    if (f->problem == ENOENT)
        set_fault(t, "shard %s is missing", path);
    else if (f->problem != 0)
        set_fault(t, "shard %s cannot be read: %s", path, strerror(f->problem));
    else if (add_overflows(c->offset, c->length, &end))
        set_fault(t,
                  "shard %s ends at byte %" PRIu64 ", chunk needs bytes from %" PRIu64,
                  path, f->size, c->offset);
    else
        set_fault(t,
                  "shard %s ends at byte %" PRIu64 ", chunk needs bytes %" PRIu64
                  " to %" PRIu64,
                  path, f->size, c->offset, end);
    return 0;
}

/* First and last unit of the piece that a strided box touches; false: out of range. */
static bool strided_extent(const struct chunk *c, uint32_t nd, uint64_t *end)
{
    __int128 low = c->first, high = c->first;

    for (uint32_t k = 0; k < nd; k++) {
        __int128 span;

        if (c->size[k] > INT64_MAX)
            return false;
        span = (__int128)(c->size[k] - 1) * c->step[k];
        *(span < 0 ? &low : &high) += span;
        if (low < INT64_MIN || high >= INT64_MAX)
            return false;
    }
    if (low < 0)
        return false;
    *end = (uint64_t)high + 1;
    return true;
}

/* Is a plain piece as long as its box says? */
static void check_length(struct open_tensor *t, const struct chunk *c)
{
    unsigned unit = dtype_unit(t->stored);
    uint64_t volume = 1, end, bytes;
    bool wide = false;

    if (c->encoding != CHUNK_PLAIN)
        return;
    for (uint32_t k = 0; k < t->units.nd; k++) {
        if (c->size[k] == 0)
            return; /* covers nothing, whatever else it says */
    }
    for (uint32_t k = 0; k < t->units.nd; k++)
        wide |= mul_overflows(volume, c->size[k], &volume);
    if (wide) {
        set_fault(t, "a chunk has more than 2^64 elements");
        return;
    }
    if (c->step ? !strided_extent(c, t->units.nd, &end)
                : add_overflows(c->first, volume, &end)) {
        set_fault(t, "the steps of a chunk lead out of its piece");
        return;
    }
    if (mul_overflows(end, unit, &bytes) || bytes > c->length ||
        (!c->step && !c->first && bytes != c->length))
        set_fault(t,
                  "a chunk at byte %" PRIu64 " has %" PRIu64
                  " bytes, its box of %" PRIu64 " elements needs %" PRIu64
                  " elements of %u",
                  c->offset, c->length, volume, end, unit);
}

/* Room for one more chunk and its numbers. */
static int make_room(struct open_tensor *t, size_t numbers, struct err *e)
{
    if (!VEC_ROOM(t->chunk, t->nchunk, t->chunk_cap))
        return err_nomem(e);
    if (numbers > t->box_cap - t->nbox) {
        size_t cap = MAX(t->box_cap + t->box_cap / 2, t->nbox + numbers + 64);
        uint64_t *bigger = reallocarray(t->box, cap, sizeof *bigger);

        if (!bigger)
            return err_nomem(e);
        t->box = bigger;
        t->box_cap = cap;
    }
    return 0;
}

/* Keeps a copy; start, size and step are set to point into box by point_chunks(). */
static int keep_chunk(struct open_tensor *t, const struct chunk *c, struct err *e)
{
    uint32_t nd = t->units.nd;
    size_t numbers = (c->step ? 3 : 2) * (size_t)nd;

    TRY(make_room(t, numbers, e));
    t->chunk[t->nchunk++] = *c;
    if (nd > 0) {
        memcpy(t->box + t->nbox, c->start, nd * sizeof *t->box);
        memcpy(t->box + t->nbox + nd, c->size, nd * sizeof *t->box);
        if (c->step)
            memcpy(t->box + t->nbox + 2 * (size_t)nd, c->step, nd * sizeof *t->box);
    }
    t->nbox += numbers;
    return 0;
}

int sink_chunk(struct sink *s, const struct chunk *c, struct err *e)
{
    struct open_tensor *t = &s->t;
    struct sink_file *f;
    int rc;

    assert(t->open);
    if (c->file >= s->files.count)
        return err_set(e, EINVAL, "chunk in file %u of %u", c->file, s->files.count);
    f = &s->files.file[c->file];
    if (f->last_tensor != s->tensors) {
        f->last_tensor = (uint32_t)s->tensors;
        f->tensors++;
        rights_add(&t->rights, &f->rights);
    }
    if (++t->chunks % LOOK_EVERY == 0)
        TRY(interrupt_check_late(e));
    t->beyond |= c->offset > INT64_MAX || c->length > INT64_MAX - c->offset;
    note_identity(t, f, c);
    rc = check_file(s, f, c, e);
    if (rc < 0 || !t->has_units)
        return rc;
    if (t->chunks > s->max_chunks) {
        set_fault(t, "more than %" PRIu64 " chunks", s->max_chunks);
        return 0;
    }
    check_length(t, c);
    return keep_chunk(t, c, e);
}

static void point_chunks(struct open_tensor *t)
{
    static const uint64_t none[1]; /* a tensor without dimensions has no numbers */
    uint32_t nd = t->units.nd;
    const uint64_t *box = t->box ? t->box : none;

    for (size_t i = 0; i < t->nchunk; i++) {
        struct chunk *c = &t->chunk[i];

        c->start = box;
        c->size = box + nd;
        if (c->step)
            c->step = (const int64_t *)(box + 2 * (size_t)nd);
        box += (c->step ? 3 : 2) * (size_t)nd;
    }
}

/* By the first element, in row-major order: what opens such a tensor need not sort. */
static int by_start(const void *a, const void *b, void *user)
{
    const struct chunk *x = a, *y = b;
    const uint32_t *nd = user;

    for (uint32_t k = 0; k < *nd; k++)
        if (x->start[k] != y->start[k])
            return x->start[k] < y->start[k] ? -1 : 1;
    return 0;
}

static void sort_chunks(struct open_tensor *t)
{
    for (size_t i = 1; i < t->nchunk; i++) {
        if (by_start(&t->chunk[i - 1], &t->chunk[i], &t->units.nd) <= 0)
            continue;
        qsort_r(t->chunk, t->nchunk, sizeof *t->chunk, by_start, &t->units.nd);
        return;
    }
}

/* Most tensors: one chunk that is all of it. */
static bool is_one_box(const struct open_tensor *t)
{
    if (t->nchunk != 1)
        return false;
    for (uint32_t k = 0; k < t->units.nd; k++)
        if (t->chunk[0].start[k] != 0 || t->chunk[0].size[k] != t->units.dim[k])
            return false;
    return true;
}

/* What the plan says against the chunks is a fault; only -ENOMEM is returned. */
static int check_cover(struct open_tensor *t, bool *covered, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = NULL;
    struct plan_builder *b;
    const struct plan *p;
    struct err why = {0};
    int rc;

    *covered = true;
    if (is_one_box(t))
        return 0;
    a = arena_new(SIZE_MAX); /* the number of chunks has a ceiling */
    if (!a)
        return err_nomem(e);
    rc = plan_begin(a, &t->units, dtype_unit(t->stored), &b, &why);
    if (rc == 0)
        rc = plan_take(b, t->chunk, t->nchunk, &why);
    if (rc == 0)
        rc = plan_finish(b, &p, &why);
    if (rc == -ENOMEM)
        return err_nomem(e);
    if (rc < 0) {
        *covered = false;
        set_fault(t, "%s", why.text);
    }
    return 0;
}

/* Is the tensor all of one plain piece, as a safetensors file has it? */
static int64_t single_file(const struct open_tensor *t)
{
    bool own_key = !t->has_codec_key ||
                   (t->codec_key.len == tensor_key_len(t) &&
                    memcmp(t->codec_key.data, tensor_key(t), t->codec_key.len) == 0);

    if (t->chunks != 1 || t->nchunk != 1 || t->fault.len > 0 || !own_key)
        return -1;
    if (t->stored != t->dtype || t->chunk[0].encoding != CHUNK_PLAIN ||
        t->chunk[0].flags || t->chunk[0].step)
        return -1; /* a parameter is for codecs: a plain piece has none */
    return t->chunk[0].file;
}

static enum role tensor_role(const struct open_tensor *t)
{
    if (t->role >= ROLE_MODEL && t->role <= ROLE_OTHER)
        return (enum role)t->role;
    return role_of(t->has_part ? t->key.data : NULL, tensor_key(t), tensor_key_len(t));
}

static int put_tensor(struct sink *s, struct err *e)
{
    const struct open_tensor *t = &s->t;
    const struct stage_tensor row = {
        .key = tensor_key(t),
        .key_len = tensor_key_len(t),
        .part = t->has_part ? t->key.data : NULL,
        .wrapper = t->wrapper | (t->modules ? WRAPPER_MODULES : 0),
        .dtype = t->dtype,
        .stored = t->stored,
        .shape = &t->shape,
        .role = tensor_role(t),
        .bytes = t->bytes,
        .chunks = t->chunks,
        .fault = t->fault.len > 0 ? t->fault.data : NULL,
        .codec_key = t->has_codec_key ? t->codec_key.data : NULL,
        .codec_key_len = t->codec_key.len,
        .attributes = t->has_attributes ? t->attributes.data : NULL,
        .identity = t->identity,
        .rights = t->rights,
        .single_file = single_file(t),
        .rule = s->rule_now,
        .first_file = t->nchunk > 0 ? (int64_t)t->chunk[0].file : -1,
        .pieces = s->pieces.data,
        .pieces_len = s->pieces.len,
    };

    s->tells_loss |= row.fault != NULL;
    s->model += row.role == ROLE_MODEL;
    s->model_empty +=
        row.role == ROLE_MODEL && !row.fault && t->shape.nd == 1 &&
        t->shape.dim[0] == 0 &&
        (t->dtype == DTYPE_F32 || t->dtype == DTYPE_F16 || t->dtype == DTYPE_BF16);
    return stage_tensor(s->stage, &row, e);
}

/* 1: the filter has taken the tensor. One that passes is there to stay. */
static int offer(struct sink *s, struct err *e)
{
    const struct open_tensor *t = &s->t;
    const struct sink_taken taken = {
        .key = tensor_key(t),
        .key_len = tensor_key_len(t),
        .part = t->has_part ? t->key.data : NULL,
        .wrapper = t->wrapper,
        .modules = t->modules,
        .dtype = t->dtype,
        .shape = &t->shape,
        .role = tensor_role(t),
        .codec_key = t->has_codec_key ? t->codec_key.data : NULL,
        .codec_key_len = t->codec_key.len,
        .attributes = t->has_attributes ? t->attributes.data : NULL,
        .fault = t->fault.len > 0 ? t->fault.data : NULL,
        .pieces = s->pieces.data,
        .pieces_len = s->pieces.len,
    };
    int rc = s->filter->take(s->filter, &taken, e);

    if (rc == 0 && keyset_add(&s->passed, t->key.data, t->key.len) < 0)
        return err_nomem(e);
    return rc;
}

int sink_tensor_end(struct sink *s, struct err *e)
{
    struct open_tensor *t = &s->t;
    bool covered = false;
    int rc = 0;

    assert(t->open);
    t->open = false;
    if (s->pieces.cap > KEPT_BYTES)
        buf_release(&s->pieces);
    buf_clear(&s->pieces);
    if (t->has_units) {
        point_chunks(t);
        sort_chunks(t);
        rc = check_cover(t, &covered, e);
    }
    /* Chunks that are no plan are of no use to anyone. */
    if (rc == 0 && covered && !t->beyond)
        rc = chunks_pack(t->chunk, t->nchunk, t->units.nd, &s->pieces, e);
    if (rc == 0 && buf_failed(&t->fault))
        rc = err_nomem(e);
    if (rc == 0 && s->filter)
        rc = offer(s, e);
    if (rc == 0)
        rc = sink_rule_settle(s, e);
    if (rc == 0)
        rc = put_tensor(s, e);
    tensor_clear(t);
    return MIN(rc, 0);
}

int sink_tensor_plain(struct sink *s, const struct sink_tensor *in, uint32_t file,
                      uint64_t offset, struct err *e)
{
    static const uint64_t zeros[SHAPE_MAX_DIMS];
    int rc = sink_tensor_begin(s, in, e);
    const struct chunk c = {.file = file,
                            .offset = offset,
                            .length = s->t.bytes,
                            .start = zeros,
                            .size = s->t.units.dim};

    if (rc == 0)
        rc = sink_chunk(s, &c, e);
    if (rc == 0)
        return sink_tensor_end(s, e);
    s->t.open = false;
    return rc;
}
