/* SPDX-License-Identifier: MIT */
/* index/formats/gguf/gguf_header.c - what stands before the data of a GGUF file. */
#include "index/formats/gguf/gguf_header.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "base/keyset.h"
#include "index/formats/gguf/gguf_input.h"
#include "index/formats/gguf/gguf_value.h"
#include "remote/source.h"

enum {
    MAX_NAME = 64 << 10,  /* ggml's own limit is 64 bytes, that of keys 64 KiB */
    MAX_MEMORY = 1 << 30, /* of tensors: some 100 bytes each */
    MAX_TENSORS = 4 * 1000 * 1000,
    LEAST_ENTRY = 8 + 4 + 1, /* an entry of the metadata */
    LEAST_TENSOR = 8 + 4 + 4 + 8,
    DEFAULT_ALIGNMENT = 32,
    MAX_ALIGNMENT = 1 << 30,
};

static const char magic[] = "GGUF";

bool gguf_sniff(const void *head, size_t len)
{
    return len >= 8 && memcmp(head, magic, 4) == 0;
}

void gguf_header_release(struct gguf_header *h)
{
    arena_free(h->arena);
    *h = (struct gguf_header){0};
}

struct reader {
    struct gguf_input in;
    struct gguf_header *h;
    struct gguf_value value;
    struct buf key;
    struct keyset seen; /* keys of the metadata; of tensors' names the sink knows */
    gguf_value_fn *fn;
    void *user;
};

static void reader_release(struct reader *r)
{
    gguf_input_end(&r->in);
    gguf_value_release(&r->value);
    buf_release(&r->key);
    keyset_release(&r->seen);
}

static int bad(const struct reader *r, const char *what, struct err *e)
{
    return gguf_bad(&r->in, what, e);
}

/* ---- the first bytes ---- */

/*
 * Files of big-endian machines have all numbers the other way round, also the version, by
 * which they are known; the magic is the same.
 */
static int read_version(struct reader *r, struct err *e)
{
    uint64_t first, version;

    TRY(gguf_take(&r->in, 4, &first, e));
    if (memcmp(r->in.window, magic, 4) != 0)
        return bad(r, "it does not begin with GGUF", e);
    TRY(gguf_take(&r->in, 4, &version, e));
    if ((version & 0xffff) == 0 && version != 0) {
        r->in.big_endian = r->h->big_endian = true;
        version = __builtin_bswap32((uint32_t)version);
    }
    r->h->version = (uint32_t)version;
    if (version == 2 || version == 3)
        return 0;
    err_set(e, ENOTSUP, "%s: GGUF version %" PRIu64 " is not supported",
            r->in.src->name, version);
    return err_hint(e, "versions 2 and 3 are");
}

/* ---- metadata ---- */

static bool key_is(const struct reader *r, const char *name)
{
    return r->key.len == strlen(name) && memcmp(r->key.data, name, r->key.len) == 0;
}

static int take_alignment(struct reader *r, uint64_t kind, struct err *e)
{
    uint64_t n = r->value.number;

    if (kind != GGUF_U32 || n == 0 || n > MAX_ALIGNMENT || (n & (n - 1)) != 0)
        return bad(r, "general.alignment is no power of 2", e);
    r->h->alignment = n;
    r->h->has_alignment = true;
    return 0;
}

/* What is of use to ourselves. */
static int learn(struct reader *r, uint64_t kind, struct err *e)
{
    struct gguf_header *h = r->h;
    const struct gguf_value *v = &r->value;

    if (key_is(r, "general.alignment"))
        return take_alignment(r, kind, e);
    if (key_is(r, "general.architecture") && v->is_text &&
        v->text.len < sizeof h->architecture &&
        !memchr(v->text.data, '\0', v->text.len))
        memcpy(h->architecture, v->text.data, v->text.len + 1);
    if (key_is(r, "split.no") && v->is_number)
        h->split_no = v->number;
    if (key_is(r, "split.count") && v->is_number) {
        h->has_split = v->number > 0;
        h->split_count = v->number;
    }
    if (key_is(r, "split.tensors.count") && v->is_number) {
        h->has_split_tensors = true;
        h->split_tensors = v->number;
    }
    return 0;
}

static int check_name(const struct reader *r, struct err *e)
{
    if (r->key.len == 0 || memchr(r->key.data, '\0', r->key.len))
        return bad(r, "a name is empty or holds NUL", e);
    return 0;
}

static int check_new(struct reader *r, struct err *e)
{
    int rc = keyset_add(&r->seen, r->key.data, r->key.len);

    if (rc < 0)
        return err_nomem(e);
    return rc == 0 ? bad(r, "a key of the metadata is there twice", e) : 0;
}

static int read_entry(struct reader *r, struct err *e)
{
    uint64_t kind;

    TRY(gguf_take_string(&r->in, MAX_NAME, &r->key, e));
    TRY(check_name(r, e));
    TRY(check_new(r, e));
    TRY(gguf_take(&r->in, 4, &kind, e));
    TRY(gguf_value_read(&r->in, kind, &r->value, e));
    TRY(learn(r, kind, e));
    if (!r->fn)
        return 0;
    return r->fn(r->user, r->key.data, r->key.len, r->value.json.data,
                 r->value.json.len, e);
}

static int read_entries(struct reader *r, uint64_t count, struct err *e)
{
    if (count > gguf_input_left(&r->in) / LEAST_ENTRY)
        return bad(r, "more entries of metadata than the file has bytes", e);
    for (uint64_t i = 0; i < count; i++)
        TRY(read_entry(r, e));
    r->h->odd_bools = r->value.odd_bools;
    return 0;
}

/* ---- tensors ---- */

static int read_dims(struct reader *r, struct gguf_tensor *t, struct err *e)
{
    uint64_t nd, elements = 1;

    TRY(gguf_take(&r->in, 4, &nd, e));
    if (nd > GGUF_MAX_DIMS)
        return bad(r, "a tensor of more than 4 dimensions", e);
    t->nd = (uint32_t)nd;
    for (uint32_t i = 0; i < t->nd; i++)
        TRY(gguf_take(&r->in, 8, &t->dim[i], e));
    for (uint32_t i = 0; i < t->nd; i++)
        if (mul_overflows(elements, t->dim[i], &elements) || elements > INT64_MAX)
            return bad(r, "a tensor of more than 2^63 elements", e);
    return 0;
}

static int read_tensor(struct reader *r, struct gguf_tensor *t, struct err *e)
{
    uint64_t type;

    TRY(gguf_take_string(&r->in, MAX_NAME, &r->key, e));
    TRY(check_name(r, e));
    TRY(read_dims(r, t, e));
    TRY(gguf_take(&r->in, 4, &type, e));
    TRY(gguf_take(&r->in, 8, &t->offset, e));
    t->type = (uint32_t)type;
    t->name = arena_memdup(r->h->arena, r->key.data, r->key.len);
    t->name_len = r->key.len;
    return t->name ? 0 : err_nomem(e);
}

static int read_tensors(struct reader *r, uint64_t count, struct err *e)
{
    struct gguf_header *h = r->h;

    if (count > gguf_input_left(&r->in) / LEAST_TENSOR)
        return bad(r, "more tensors than the file has bytes", e);
    if (count > MAX_TENSORS)
        return err_set(e, EFBIG, "%s: more than %d tensors", r->in.src->name,
                       MAX_TENSORS);
    h->tensor = arena_array(h->arena, (size_t)count, sizeof *h->tensor);
    if (!h->tensor && count > 0)
        return err_nomem(e);
    for (; h->count < count; h->count++)
        TRY(read_tensor(r, &h->tensor[h->count], e));
    return 0;
}

/* ---- all of it ---- */

static int read_header(struct reader *r, struct err *e)
{
    uint64_t tensors, entries;
    struct gguf_header *h = r->h;

    h->alignment = DEFAULT_ALIGNMENT;
    h->arena = arena_new(MAX_MEMORY);
    if (!h->arena)
        return err_nomem(e);
    TRY(gguf_input_begin(&r->in, r->in.src, e));
    TRY(read_version(r, e));
    TRY(gguf_take(&r->in, 8, &tensors, e));
    TRY(gguf_take(&r->in, 8, &entries, e));
    if (tensors > gguf_input_left(&r->in) / LEAST_TENSOR)
        return bad(r, "more tensors than the file has bytes", e);
    TRY(read_entries(r, entries, e));
    TRY(read_tensors(r, tensors, e));
    h->end = r->in.pos;
    gguf_header_align(h, h->alignment);
    return 0;
}

void gguf_header_align(struct gguf_header *h, uint64_t alignment)
{
    h->alignment = alignment;
    h->data = (h->end + alignment - 1) / alignment * alignment;
}

int gguf_header_read(struct source *src, gguf_value_fn *fn, void *user,
                     struct gguf_header *out, struct err *e)
{
    struct reader r = {.in.src = src, .h = out, .fn = fn, .user = user};
    int rc;

    *out = (struct gguf_header){0};
    r.key.max = MAX_NAME;
    rc = read_header(&r, e);
    reader_release(&r);
    if (rc < 0)
        gguf_header_release(out);
    return rc;
}
