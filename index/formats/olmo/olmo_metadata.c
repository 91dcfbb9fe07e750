/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_metadata.c - metadata.json of early OLMo-core: which file has what. */
#include "index/formats/olmo/olmo_metadata.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/json.h"
#include "base/vec.h"
#include "index/formats/dcp/dcp_intern.h"
#include "index/formats/torch/torch_zip.h"

enum {
    MAX_TEXT = 1 << 29, /* 1024 ranks of a 70B model with its optimizer: 300 MB */
    MAX_ARENA = 1 << 30,
    FIRST_TENSORS = 256,
};

/* What is at work while the text is read. */
struct parser {
    struct olmo_metadata *m;
    struct arena *arena;
    struct intern files;
    size_t cap; /* of m->tensor, which is malloc until the end */
    /* Of the tensor at work. */
    struct olmo_tensor *t;
    struct shape shape;
    bool no_memory;
};

/* Sets the tensor's fault; the first one is kept. false, for the caller to return. */
static bool PRINTF(2, 3) bad(struct parser *p, const char *fmt, ...)
{
    char text[512];
    va_list ap;

    if (p->t->fault)
        return false;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    p->t->fault = arena_memdup(p->arena, text, strlen(text));
    p->no_memory |= !p->t->fault;
    return false;
}

static void *take(struct parser *p, size_t count, size_t size)
{
    void *mem = arena_array(p->arena, count, size);

    p->no_memory |= !mem;
    return mem;
}

static bool is_null(const struct json *v)
{
    return !v || json_kind(v) == JSON_NULL;
}

/* ---- shape and dtype ---- */

/* Numbers of a list into dst[0..max); false when it is no list of that many at most. */
static bool read_numbers(const struct json *list, uint64_t *dst, uint32_t max,
                         uint32_t *count)
{
    *count = 0;
    if (!list || json_kind(list) != JSON_ARRAY)
        return false;
    for (const struct json *v = json_first(list); v; v = json_next(v))
        if (*count == max || !json_u64(v, &dst[(*count)++]))
            return false;
    return true;
}

static bool read_shape(struct parser *p, const struct json *v)
{
    struct err why = {0};
    uint64_t *dim;

    if (!read_numbers(v, p->shape.dim, SHAPE_MAX_DIMS, &p->shape.nd)) {
        p->shape.nd = 0;
        return bad(p, "metadata.json gives no shape");
    }
    dim = take(p, p->shape.nd + 1, sizeof *dim);
    if (!dim)
        return false;
    memcpy(dim, p->shape.dim, p->shape.nd * sizeof *dim);
    p->t->dim = dim;
    p->t->nd = p->shape.nd;
    if (shape_elements(&p->shape, &p->t->elements, &why) < 0)
        return bad(p, "%s", why.text);
    return true;
}

/* "F32", or "torch.float32", which no release wrote but which says as much. */
static enum dtype dtype_of_text(const char *text)
{
    enum dtype d = dtype_from_name(text);

    if (d == DTYPE_NONE && strncmp(text, "torch.", 6) == 0)
        d = torch_dtype_of_name(text + 6);
    return d;
}

static bool read_dtype(struct parser *p, const struct json *v)
{
    const char *text;

    if (is_null(v))
        return true;
    if (!json_string(v, &text))
        return bad(p, "metadata.json gives a dtype that is no text");
    p->t->dtype = dtype_of_text(text);
    if (p->t->dtype == DTYPE_NONE)
        return bad(p, "metadata.json gives the dtype \"%.100s\", which is not known",
                   text);
    if (dtype_bits(p->t->dtype) % 8 != 0)
        return bad(p, "dtype %s has no whole bytes", text);
    return true;
}

/* ---- where the elements lie ---- */

static bool bad_interval(struct parser *p, const char *file)
{
    return bad(p,
               "metadata.json, %.200s: an interval of elements is no pair of numbers "
               "that count up to %" PRIu64,
               file, p->t->elements);
}

/* Behind the last interval of the piece, or joined with it. Empty ones are dropped. */
static void add_interval(struct olmo_piece *piece, uint64_t *at, uint64_t begin,
                         uint64_t end)
{
    if (begin == end)
        return;
    if (piece->count > 0 && at[2 * (size_t)piece->count - 1] == begin) {
        at[2 * (size_t)piece->count - 1] = end;
        return;
    }
    at[2 * (size_t)piece->count] = begin;
    at[2 * (size_t)piece->count + 1] = end;
    piece->count++;
}

static bool take_interval(struct parser *p, const char *file, const struct json *pair,
                          struct olmo_piece *piece, uint64_t *at)
{
    uint64_t ends[2];
    uint32_t n;

    if (!read_numbers(pair, ends, 2, &n) || n != 2 || ends[0] > ends[1] ||
        ends[1] > p->t->elements)
        return bad_interval(p, file);
    add_interval(piece, at, ends[0], ends[1]);
    return true;
}

/* [[a, b], ...]; before 7 May 2024 one pair alone: [a, b]. */
static bool read_intervals(struct parser *p, const char *file, const struct json *v,
                           struct olmo_piece *piece)
{
    const struct json *first = json_first(v);
    uint64_t *at;
    size_t n = json_count(v);

    if (json_kind(v) != JSON_ARRAY || n > UINT32_MAX / 2)
        return bad_interval(p, file);
    at = take(p, MAX(n, 1), 2 * sizeof *at);
    if (!at)
        return false;
    piece->at = at;
    if (first && json_kind(first) == JSON_NUMBER)
        return take_interval(p, file, v, piece, at);
    for (v = first; v; v = json_next(v))
        if (!take_interval(p, file, v, piece, at))
            return false;
    return true;
}

static bool read_box(struct parser *p, const char *file, const struct json *size,
                     const struct json *start, struct olmo_piece *piece)
{
    uint64_t volume = 1, *at = take(p, p->shape.nd + 1, 2 * sizeof *at);
    uint32_t nd = p->shape.nd, n;

    if (!at)
        return false;
    piece->box = true;
    piece->at = at;
    if (!read_numbers(start, at, nd, &n) || n != nd ||
        !read_numbers(size, at + nd, nd, &n) || n != nd)
        return bad(
            p,
            "metadata.json, %.200s: local_shape and global_offset are no lists of "
            "%u numbers",
            file, nd);
    for (uint32_t k = 0; k < nd; k++)
        volume = at[nd + k] ? volume : 0;
    piece->count = volume > 0;
    /* The offset of an empty box may be anything. */
    for (uint32_t k = 0; k < nd && volume > 0; k++)
        if (range_outside(at[k], at[nd + k], p->shape.dim[k]))
            return bad(p, "metadata.json, %.200s: the box is not within the tensor",
                       file);
    return true;
}

static bool read_spec(struct parser *p, const char *file, const struct json *v,
                      struct olmo_piece *piece)
{
    const struct json *flat, *size, *start;

    if (json_kind(v) == JSON_ARRAY)
        return read_intervals(p, file, v, piece);
    flat = json_get(v, "flattened_offsets");
    size = json_get(v, "local_shape");
    start = json_get(v, "global_offset");
    if (is_null(flat) && is_null(size) && is_null(start))
        return bad(p,
                   "metadata.json, %.200s: neither flattened_offsets nor local_shape "
                   "tell which elements it has",
                   file);
    if (!is_null(flat) && (!is_null(size) || !is_null(start)))
        return bad(p, "metadata.json, %.200s: both flattened_offsets and local_shape",
                   file);
    return is_null(flat) ? read_box(p, file, size, start, piece)
                         : read_intervals(p, file, flat, piece);
}

static bool intern_file(struct parser *p, const char *name, uint32_t *number)
{
    if (intern_add(&p->files, name, strlen(name), number) == 0)
        return true;
    p->no_memory = true;
    return false;
}

static bool read_pieces(struct parser *p, const struct json *files)
{
    struct olmo_tensor *t = p->t;

    if (!files || json_kind(files) != JSON_OBJECT)
        return bad(p, "metadata.json does not say which files it is in");
    t->piece = take(p, json_count(files) + 1, sizeof *t->piece);
    if (!t->piece)
        return false;
    for (const struct json *v = json_first(files); v; v = json_next(v)) {
        struct olmo_piece *piece = &t->piece[t->npieces];

        if (!intern_file(p, json_key(v), &piece->file))
            return false;
        /* A tensor without elements needs nothing, whatever is said of it. */
        if (t->elements == 0)
            continue;
        if (!read_spec(p, json_key(v), v, piece))
            return false;
        if (piece->count > 0)
            t->npieces++;
        else
            *piece = (struct olmo_piece){0};
    }
    return true;
}

/* ---- one tensor ---- */

static bool read_tensor(struct parser *p, const struct json *v)
{
    const struct json *now = json_get(v, "shard_spec_per_file");
    const struct json *before = json_get(v, "flattened_offsets_per_file");

    p->m->legacy |= before != NULL;
    if (!read_shape(p, json_get(v, "shape")) || !read_dtype(p, json_get(v, "dtype")))
        return false;
    if (!is_null(now) && !is_null(before))
        return bad(p, "metadata.json says twice which files it is in");
    return read_pieces(p, is_null(now) ? before : now);
}

static struct olmo_tensor *new_tensor(struct parser *p)
{
    struct olmo_metadata *m = p->m;

    if (!VEC_ROOM(m->tensor, m->count, p->cap))
        return NULL;
    m->tensor[m->count] = (struct olmo_tensor){0};
    return &m->tensor[m->count++];
}

static int take_tensor(void *user, const char *key, size_t key_len,
                       const struct json *value, struct err *e)
{
    struct parser *p = user;

    p->t = new_tensor(p);
    p->shape.nd = 0;
    if (!p->t)
        return err_nomem(e);
    p->t->key = arena_memdup(p->arena, key, key_len);
    if (!p->t->key)
        return err_nomem(e);
    if (!read_tensor(p, value))
        p->t->npieces = 0;
    return p->no_memory ? err_nomem(e) : 0;
}

/* ---- the whole ---- */

static int take_files(struct parser *p, struct err *e)
{
    struct olmo_metadata *m = p->m;

    m->file = take(p, p->files.count + 1, sizeof *m->file);
    if (!m->file)
        return err_nomem(e);
    for (uint32_t i = 0; i < p->files.count; i++) {
        size_t len;
        const char *name = intern_get(&p->files, i, &len);

        m->file[i] = arena_memdup(p->arena, name, len);
        if (!m->file[i])
            return err_nomem(e);
    }
    m->nfiles = p->files.count;
    return 0;
}

void olmo_metadata_release(struct olmo_metadata *m)
{
    free(m->tensor);
    arena_free(m->arena);
    *m = (struct olmo_metadata){0};
}

int olmo_metadata_parse(const char *text, size_t len, struct olmo_metadata *out,
                        struct err *e)
{
    const struct json_limits limits = {.bytes = MAX_TEXT};
    struct parser p = {.m = out, .arena = arena_new(MAX_ARENA)};
    int rc = p.arena ? 0 : err_nomem(e);

    *out = (struct olmo_metadata){.arena = p.arena};
    if (rc == 0)
        rc = json_each_member_of(text, len, &limits, "tensors", take_tensor, &p, e);
    if (rc == 0)
        rc = take_files(&p, e);
    intern_release(&p.files);
    if (rc < 0)
        olmo_metadata_release(out);
    return rc;
}

void olmo_shape(const struct olmo_tensor *t, struct shape *out)
{
    out->nd = t->nd;
    if (t->nd > 0)
        memcpy(out->dim, t->dim, t->nd * sizeof *t->dim);
}

bool olmo_piece_is_whole(const struct olmo_tensor *t, const struct olmo_piece *p)
{
    if (!p->box)
        return p->count == 1 && p->at[0] == 0 && p->at[1] == t->elements;
    for (uint32_t k = 0; k < t->nd; k++)
        if (p->at[t->nd + k] != t->dim[k])
            return false;
    return true;
}

/* ---- bids ---- */

/* Steps over blanks and then over `text`; NULL when that does not stand there. */
static const char *expect(const char *s, const char *end, const char *text)
{
    size_t len = strlen(text);

    while (s && s < end && strchr(" \t\r\n", *s) && *s)
        s++;
    if (!s || (size_t)(end - s) < len || memcmp(s, text, len) != 0)
        return NULL;
    return s + len;
}

/* Text that was lost, and no JSON of somebody else. Of an empty file the save has not ended. */
static bool is_damaged(const char *head, size_t len)
{
    return len > 0 && !expect(head, head + len, "{");
}

int olmo_metadata_sniff(const char *head, size_t len)
{
    static const char *const words[] = {"\"shard_spec_per_file\"",
                                        "\"flattened_offsets_per_file\""};
    static const char *const start[] = {"{", "\"tensors\"", ":", "{"};
    const char *s = head, *end = head + len;

    /* Nobody else has these words: damage before them makes it no other format. */
    for (size_t i = 0; i < ARRAY_SIZE(words); i++)
        if (memmem(head, len, words[i], strlen(words[i])))
            return 2;
    for (size_t i = 0; i < ARRAY_SIZE(start); i++)
        s = expect(s, end, start[i]);
    return s || is_damaged(head, len);
}
