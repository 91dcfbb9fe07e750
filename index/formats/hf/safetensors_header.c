/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_header.c - the header of a safetensors file, read strictly. */
#include "index/formats/hf/safetensors_header.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/json.h"
#include "base/vec.h"
#include "remote/source.h"

enum {
    FIRST_TENSORS = 64,
    /*
     * An entry costs at least 50 bytes of text and 56 of ours, a dimension 2 and 8: ten
     * times the text is never needed.
     */
    MEMORY_FACTOR = 10,
    MEMORY_FLOOR = 1 << 16,
    /* As the reference: unknown members may nest; what we need has depth 4. */
    MAX_DEPTH = 128,
};

static const char metadata_key[] = "__metadata__";

bool safetensors_is_pt(const struct safetensors_header *h)
{
    return h->format && strcmp(h->format, "pt") == 0;
}

void safetensors_header_release(struct safetensors_header *h)
{
    free(h->tensor);
    arena_free(h->arena);
    *h = (struct safetensors_header){0};
}

void safetensors_shape(const struct safetensors_tensor *t, struct shape *out)
{
    out->nd = t->nd;
    if (t->nd > 0)
        memcpy(out->dim, t->dim, t->nd * sizeof *t->dim);
}

struct parser {
    struct safetensors_header h;
    size_t cap;
};

static void parser_release(struct parser *p)
{
    safetensors_header_release(&p->h);
}

/* Keeps __metadata__; what holds NUL is passed over. */
static int keep_notes(struct parser *p, const struct json *map, struct err *e)
{
    struct safetensors_header *h = &p->h;

    h->note = arena_array(h->arena, json_count(map), sizeof *h->note);
    if (!h->note && json_count(map) > 0)
        return err_nomem(e);
    for (const struct json *v = json_first(map); v; v = json_next(v)) {
        struct safetensors_note *n = &h->note[h->notes];
        const char *text;

        if (!json_string(v, &text))
            continue;
        n->name = arena_memdup(h->arena, json_key(v), strlen(json_key(v)));
        n->text = arena_memdup(h->arena, text, strlen(text));
        if (!n->name || !n->text)
            return err_nomem(e);
        h->notes++;
    }
    return 0;
}

const char *safetensors_note(const struct safetensors_header *h, const char *name)
{
    for (size_t i = 0; i < h->notes; i++)
        if (strcmp(h->note[i].name, name) == 0)
            return h->note[i].text;
    return NULL;
}

static int take_metadata(struct parser *p, const struct json *map, struct err *e)
{
    if (json_kind(map) == JSON_NULL) /* none, to safetensors 0.8 */
        return 0;
    if (json_kind(map) != JSON_OBJECT)
        return err_set(e, EBADMSG, "__metadata__ is no object");
    for (const struct json *v = json_first(map); v; v = json_next(v))
        if (json_kind(v) != JSON_STRING)
            return err_set(e, EBADMSG, "__metadata__: \"%.100s\" is no text",
                           json_key(v));
    TRY(keep_notes(p, map, e));
    p->h.format = safetensors_note(&p->h, "format");
    p->h.dcp_version = safetensors_note(&p->h, "DCP_VERSION");
    p->h.nanotron_version = safetensors_note(&p->h, "version");
    p->h.nanotron_shape = safetensors_note(&p->h, "unsharded_shape");
    p->h.nanotron_slices = safetensors_note(&p->h, "local_global_slices_pairs");
    p->h.dcp_sharding = safetensors_note(&p->h, "DCP_SHARDING_INFO");
    return 0;
}

static int take_dtype(struct safetensors_tensor *t, const struct json *v, struct err *e)
{
    const char *name;

    if (!json_string(v, &name))
        return err_set(e, EBADMSG, v ? "dtype is no text" : "it has no dtype");
    t->dtype = dtype_from_name(name);
    if (t->dtype == DTYPE_NONE || !dtype_in_safetensors(t->dtype))
        return err_set(e, EBADMSG, "unknown dtype \"%.40s\"", name);
    return 0;
}

static int take_shape(struct parser *p, struct safetensors_tensor *t,
                      const struct json *v, struct err *e)
{
    uint64_t *dim;
    size_t n;

    if (!v || json_kind(v) != JSON_ARRAY)
        return err_set(e, EBADMSG, v ? "shape is no list" : "it has no shape");
    n = json_count(v);
    if (n > SHAPE_MAX_DIMS)
        return err_set(e, EBADMSG, "%zu dimensions, more than %d", n, SHAPE_MAX_DIMS);
    dim = arena_array(p->h.arena, n, sizeof *dim);
    if (!dim)
        return err_nomem(e);
    t->nd = (uint32_t)n;
    t->dim = dim;
    for (v = json_first(v); v; v = json_next(v))
        if (!json_u64(v, dim++))
            return err_set(e, EBADMSG, "a dimension is no whole number below 2^53");
    return 0;
}

static int take_offsets(struct safetensors_tensor *t, const struct json *v,
                        struct err *e)
{
    const struct json *first = json_first(v);

    if (!v || json_kind(v) != JSON_ARRAY || json_count(v) != 2)
        return err_set(e, EBADMSG, v ? "data_offsets is no pair" : "no data_offsets");
    if (!json_u64(first, &t->begin) || !json_u64(json_next(first), &t->end))
        return err_set(e, EBADMSG, "an offset is no whole number below 2^53");
    if (t->end < t->begin)
        return err_set(e, EBADMSG,
                       "data bytes %" PRIu64 "..%" PRIu64 " end before "
                       "they begin",
                       t->begin, t->end);
    return 0;
}

/* Shape and dtype must need just the bytes that the offsets give. */
static int check_bytes(const struct safetensors_tensor *t, struct err *e)
{
    struct shape shape;
    uint64_t bytes;

    safetensors_shape(t, &shape);
    if (shape_bytes(&shape, t->dtype, &bytes, e) < 0) {
        e->code = EBADMSG; /* too large for us is damage in a file */
        return -EBADMSG;
    }
    if (bytes != t->end - t->begin)
        return err_set(e, EBADMSG,
                       "shape and dtype need %" PRIu64 " bytes, data bytes %" PRIu64
                       "..%" PRIu64 " are %" PRIu64,
                       bytes, t->begin, t->end, t->end - t->begin);
    return 0;
}

static struct safetensors_tensor *add_tensor(struct parser *p)
{
    if (!VEC_ROOM(p->h.tensor, p->h.count, p->cap))
        return NULL;
    return &p->h.tensor[p->h.count++];
}

static int take_tensor(struct parser *p, const char *name, size_t len,
                       const struct json *v, struct err *e)
{
    struct safetensors_tensor *t = add_tensor(p);

    if (!t)
        return err_nomem(e);
    *t = (struct safetensors_tensor){.name_len = len};
    t->name = arena_memdup(p->h.arena, name, len);
    if (!t->name)
        return err_nomem(e);
    if (json_kind(v) != JSON_OBJECT)
        return err_set(e, EBADMSG, "its entry is no object");
    TRY(take_dtype(t, json_get(v, "dtype"), e));
    TRY(take_shape(p, t, json_get(v, "shape"), e));
    TRY(take_offsets(t, json_get(v, "data_offsets"), e));
    return check_bytes(t, e);
}

static int take_member(void *user, const char *key, size_t len,
                       const struct json *value, struct err *e)
{
    struct parser *p = user;

    if (len == sizeof metadata_key - 1 && memcmp(key, metadata_key, len) == 0)
        return take_metadata(p, value, e);
    if (take_tensor(p, key, len, value, e) < 0)
        return err_wrap(e, "tensor \"%.200s\"", key);
    return 0;
}

static int compare_names(const struct safetensors_tensor *x,
                         const struct safetensors_tensor *y)
{
    size_t len = MIN(x->name_len, y->name_len);
    int order = len ? memcmp(x->name, y->name, len) : 0;

    return order ? order : (x->name_len > y->name_len) - (x->name_len < y->name_len);
}

/* By place in the data; empty ones before what starts at the same byte, then by name. */
static int compare(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;

    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end)
        return x->end < y->end ? -1 : 1;
    return compare_names(x, y);
}

/* Every byte of the data belongs to exactly one tensor. */
static int check_coverage(struct safetensors_header *h, uint64_t data_size,
                          struct err *e)
{
    uint64_t at = 0;

    if (h->count > 0)
        qsort(h->tensor, h->count, sizeof *h->tensor, compare);
    for (size_t i = 0; i < h->count; i++) {
        const struct safetensors_tensor *t = &h->tensor[i];

        if (t->begin != at)
            return err_set(e, EBADMSG,
                           "tensor \"%.200s\" starts at data byte %" PRIu64
                           ", the ones before end at %" PRIu64 ": %s",
                           t->name, t->begin, at,
                           t->begin > at ? "a hole" : "an overlap");
        at = t->end;
    }
    if (at > data_size)
        return err_set(e, EBADMSG,
                       "the tensors need %" PRIu64
                       " bytes of data, the file has %" PRIu64 ": it is cut",
                       at, data_size);
    if (at < data_size)
        return err_set(e, EBADMSG, "%" PRIu64 " bytes behind the last tensor",
                       data_size - at);
    return 0;
}

int safetensors_parse(const char *text, size_t len, uint64_t data_size,
                      struct safetensors_header *out, struct err *e)
{
    static const struct json_limits limits = {
        .bytes = SAFETENSORS_MAX_HEADER, .depth = MAX_DEPTH, .nul_ok = true};
    CLEANUP(parser_release) struct parser p = {0};

    if (len > SAFETENSORS_MAX_HEADER)
        return err_set(e, EBADMSG, "a header of %zu bytes, more than %d", len,
                       SAFETENSORS_MAX_HEADER);
    p.h.arena = arena_new(MEMORY_FLOOR + len * MEMORY_FACTOR);
    if (!p.h.arena)
        return err_nomem(e);
    if (json_each_member(text, len, &limits, take_member, &p, e) < 0 ||
        check_coverage(&p.h, data_size, e) < 0)
        return err_wrap(e, "header");
    p.h.data = SAFETENSORS_PREFIX + len;
    *out = p.h;
    p.h = (struct safetensors_header){0};
    return 0;
}

/* The header's length, checked against the image's. */
static int read_length(struct source *src, uint64_t off, uint64_t size, size_t *out,
                       struct err *e)
{
    unsigned char prefix[SAFETENSORS_PREFIX];
    uint64_t n;

    if (size < sizeof prefix)
        return err_set(e, EBADMSG, "%" PRIu64 " bytes are too few for a header", size);
    TRY(source_read(src, off, sizeof prefix, prefix, e));
    n = get_le64(prefix);
    if (memcmp(prefix, "version ", sizeof prefix) == 0) { /* 2.3 EB of header */
        err_set(e, EBADMSG, "a Git LFS pointer, not the file itself");
        return err_hint(e, "git lfs pull");
    }
    if (n > SAFETENSORS_MAX_HEADER)
        return err_set(e, EBADMSG,
                       "byte %" PRIu64 ": a header of %" PRIu64 " bytes, more than %d",
                       off, n, SAFETENSORS_MAX_HEADER);
    if (n > size - sizeof prefix)
        return err_set(e, EBADMSG,
                       "byte %" PRIu64 ": a header of %" PRIu64
                       " bytes, but only %" PRIu64 " follow",
                       off, n, size - sizeof prefix);
    *out = (size_t)n;
    return 0;
}

int safetensors_read(struct source *src, uint64_t off, uint64_t size,
                     struct safetensors_header *out, struct err *e)
{
    CLEANUP_FREE char *text = NULL;
    size_t n = 0;

    if (range_outside(off, size, src->size))
        return err_set(e, EBADMSG, "bytes %" PRIu64 "+%" PRIu64 " are not in the file",
                       off, size);
    TRY(read_length(src, off, size, &n, e));
    text = malloc(n + 1);
    if (!text)
        return err_nomem(e);
    TRY(source_read(src, off + SAFETENSORS_PREFIX, n, text, e));
    if (safetensors_parse(text, n, size - SAFETENSORS_PREFIX - n, out, e) < 0)
        return err_wrap(e, "byte %" PRIu64, off + SAFETENSORS_PREFIX);
    return 0;
}

const struct safetensors_tensor *safetensors_find(const struct safetensors_header *h,
                                                  const char *name, size_t len)
{
    for (size_t i = 0; i < h->count; i++)
        if (h->tensor[i].name_len == len && memcmp(h->tensor[i].name, name, len) == 0)
            return &h->tensor[i];
    return NULL;
}

bool safetensors_magic(const unsigned char *head, size_t len, uint64_t size)
{
    uint64_t n;

    if (len < SAFETENSORS_PREFIX + 1 || size < SAFETENSORS_PREFIX)
        return false;
    n = get_le64(head);
    return n <= SAFETENSORS_MAX_HEADER && n <= size - SAFETENSORS_PREFIX &&
           memchr("{ \t\r\n", head[SAFETENSORS_PREFIX], 5);
}

/* Does the chunk describe this tensor, or a box of it? Unit strides of the box. */
static int check_chunk(const struct chunk *c, const struct chunk_tensor *t,
                       const struct safetensors_tensor *stored, int64_t *step,
                       struct err *e)
{
    const uint64_t *want = c->whole;
    uint32_t nd = c->whole_nd;
    struct shape shape, units;
    uint64_t n = 0;

    if (stored->dtype != t->dtype)
        return err_set(e, EBADMSG, "its dtype is %s, the metadata say %s",
                       dtype_name(stored->dtype), dtype_name(t->dtype));
    safetensors_shape(stored, &shape);
    TRY(shape_units(&shape, stored->dtype, &units, e));
    TRY(shape_elements(&units, &n, e));
    if (!c->step && !c->first) {
        want = c->size;
        nd = t->units->nd;
    }
    if (want &&
        (units.nd != nd || (nd > 0 && memcmp(units.dim, want, nd * sizeof *want) != 0)))
        return err_set(e, EBADMSG, "its shape is not that of the chunk");
    return chunk_steps(c, t->units->nd, n, step, e);
}

static int codec_resolve(struct source *shard, const struct chunk *c,
                         const struct chunk_tensor *t,
                         struct decoded_cache *decoded UNUSED, struct chunk_place *out,
                         struct err *e)
{
    CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
    const struct safetensors_tensor *stored;
    int64_t unit = dtype_unit(t->dtype);

    TRY(safetensors_read(shard, c->offset, c->length, &h, e));
    stored = safetensors_find(&h, t->key, t->key_len);
    if (!stored)
        return err_set(e, EBADMSG, "no tensor \"%.200s\" in it", t->key);
    if (check_chunk(c, t, stored, out->step, e) < 0)
        return err_wrap(e, "tensor \"%.200s\"", t->key);
    out->base = c->offset + h.data + stored->begin + c->first * (uint64_t)unit;
    for (uint32_t k = 0; k < t->units->nd; k++)
        out->step[k] *= unit; /* within the stored bytes: no overflow */
    out->flags = c->flags;
    out->src = source_get(shard);
    return 0;
}

const struct chunk_codec safetensors_codec = {
    .encoding = CHUNK_SAFETENSORS,
    .name = "safetensors",
    .resolve = codec_resolve,
};
