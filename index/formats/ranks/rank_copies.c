/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/rank_copies.c - a tensor that several ranks hold whole, or a summand of. */
#include "index/formats/ranks/rank_copies.h"

#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "base/checked.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "index/formats/ranks/float_kind.h"
#include "remote/decoded.h"
#include "remote/source.h"

enum {
    BLOCK = 256 << 10,   /* of each place at a time */
    MAX_PLACES = 1 << 16 /* ranks that have one tensor */
};

void rank_copies_add(struct buf *list, uint32_t file, uint64_t offset)
{
    buf_addf(list, "%s%" PRIu32 " %" PRIu64, list->len ? " " : "", file, offset);
}

/* ---- the list ---- */

struct place {
    struct source *src;
    uint64_t offset;
};

struct places {
    struct place *place; /* malloc */
    size_t count, cap;
};

static void places_release(struct places *p)
{
    for (size_t i = 0; i < p->count; i++)
        source_put(p->place[i].src);
    free(p->place);
}

/* Takes the reference over. */
static int add_place(struct places *p, struct source *src, uint64_t offset,
                     uint64_t len, struct err *e)
{
    size_t cap = p->cap ? p->cap * 2 : 8;

    if (p->count == p->cap && p->count < MAX_PLACES) {
        struct place *grown = reallocarray(p->place, cap, sizeof *grown);

        if (grown) {
            p->place = grown;
            p->cap = cap;
        }
    }
    if (p->count == p->cap) {
        source_put(src);
        return err_nomem(e);
    }
    p->place[p->count++] = (struct place){src, offset};
    if (range_outside(offset, len, src->size))
        return err_set(e, EBADMSG,
                       "%s: it should be bytes %" PRIu64 "+%" PRIu64
                       ", the file has %" PRIu64,
                       src->name, offset, len, src->size);
    return 0;
}

static bool take_number(const char **p, const char *end, uint64_t *out)
{
    const char *start = *p;

    *out = 0;
    while (*p < end && **p >= '0' && **p <= '9') {
        if (mul_overflows(*out, 10, out) ||
            add_overflows(*out, (uint64_t)(**p - '0'), out))
            return false;
        (*p)++;
    }
    return *p > start && (*p == end || **p == ' ');
}

int rank_copies_next(const char **p, const char *end, uint32_t *file, uint64_t *offset)
{
    uint64_t number;

    if (*p == end)
        return 0;
    if (!take_number(p, end, &number) || number > UINT32_MAX || *p == end ||
        *(*p)++ != ' ' || !take_number(p, end, offset))
        return -EBADMSG;
    *p += *p < end;
    *file = (uint32_t)number;
    return 1;
}

/* Opens all of the list; the chunk's own place is the first one. */
static int open_places(struct source *shard, const struct chunk *c,
                       const struct chunk_tensor *t, struct places *out, struct err *e)
{
    const char *p = t->key, *end = t->key + t->key_len;
    uint64_t offset;
    uint32_t file;
    int more;

    TRY(add_place(out, source_get(shard), c->offset, c->length, e));
    if (!t->open)
        return err_set(e, ENOTSUP, "other files cannot be opened here");
    while ((more = rank_copies_next(&p, end, &file, &offset)) != 0) {
        struct source *src = NULL;

        if (more < 0 || out->count == MAX_PLACES)
            return err_set(e, EBADMSG, "the index does not say where it is");
        TRY(t->open(t->user, file, &src, e));
        TRY(add_place(out, src, offset, c->length, e));
    }
    return 0;
}

static int check_places(const struct places *p, struct err *e)
{
    for (size_t i = 0; i < p->count; i++)
        TRY(source_check(p->place[i].src, e));
    return 0;
}

/* ---- where it lies ---- */

/* The bytes of the piece are in `src` from byte `base` on. */
static int lay_out(const struct chunk *c, const struct chunk_tensor *t,
                   struct source *src, uint64_t base, struct chunk_place *out,
                   struct err *e)
{
    unsigned unit = dtype_unit(t->dtype);

    TRY(chunk_steps(c, t->units->nd, c->length / unit, out->step, e));
    for (uint32_t k = 0; k < t->units->nd; k++)
        if (__builtin_mul_overflow(out->step[k], (int64_t)unit, &out->step[k]))
            return err_set(e, EBADMSG, "a box that reaches past what is stored");
    out->flags = c->flags;
    out->src = source_get(src);
    out->base = base + c->first * unit;
    return 0;
}

static int copies_resolve(struct source *shard, const struct chunk *c,
                          const struct chunk_tensor *t,
                          struct decoded_cache *decoded UNUSED, struct chunk_place *out,
                          struct err *e)
{
    return lay_out(c, t, shard, c->offset, out, e);
}

static int compare_place(const struct place *x, const struct place *y, uint64_t len,
                         char *a, char *b, struct err *e)
{
    for (uint64_t at = 0; at < len; at += BLOCK) {
        size_t n = (size_t)MIN(len - at, (uint64_t)BLOCK);

        TRY(source_read(x->src, x->offset + at, n, a, e));
        TRY(source_read(y->src, y->offset + at, n, b, e));
        for (size_t i = 0; i < n; i++)
            if (a[i] != b[i])
                return err_set(e, EBADMSG,
                               "the copies in %s and %s differ from byte %" PRIu64
                               " on",
                               x->src->name, y->src->name, at + i);
    }
    return 0;
}

static int copies_compare(struct source *shard, const struct chunk *c,
                          const struct chunk_tensor *t, struct err *e)
{
    CLEANUP(places_release) struct places p = {0};
    CLEANUP_FREE char *a = malloc(BLOCK), *b = malloc(BLOCK);

    if (!a || !b)
        return err_nomem(e);
    TRY(open_places(shard, c, t, &p, e));
    for (size_t i = 1; i < p.count; i++)
        TRY(compare_place(&p.place[0], &p.place[i], c->length, a, b, e));
    TRY(check_places(&p, e));
    return 1;
}

const struct chunk_codec codec_copies = {
    .encoding = CHUNK_COPIES,
    .name = "copies",
    .resolve = copies_resolve,
    .compare = copies_compare,
};

/* ---- sums ---- */

bool rank_sum_adds(enum dtype d)
{
    return float_kind_of(d);
}

/*
 * sum[] += x[], in a type of more than twice the bits, then rounded: the same as one exact
 * addition that is rounded once. 16-bit sums are rounded to float on their way, which
 * changes nothing.
 */
static void add_block(const struct float_kind *k, unsigned unit, char *sum,
                      const char *x, size_t n)
{
    for (size_t i = 0; i < n; i += unit)
        k->store(sum + i, k->load(sum + i) + k->load(x + i));
}

/* sum[] /= by, rounded once as torch does it: doubles have the bits for that. */
static void divide_block(const struct float_kind *k, unsigned unit, char *sum,
                         double by, size_t n)
{
    for (size_t i = 0; i < n; i += unit)
        k->store(sum + i, k->load(sum + i) / by);
}

struct summing {
    const struct places *places;
    const struct float_kind *kind;
    unsigned unit;
    bool mean;
};

static int sum_block(const struct summing *s, uint64_t at, size_t n, char *sum, char *x,
                     struct err *e)
{
    memset(sum, 0, n); /* torch's sum() begins with 0 as well: -0 + -0 becomes 0 */
    for (size_t i = 0; i < s->places->count; i++) {
        const struct place *p = &s->places->place[i];

        TRY(source_read(p->src, p->offset + at, n, x, e));
        add_block(s->kind, s->unit, sum, x, n);
    }
    if (s->mean)
        divide_block(s->kind, s->unit, sum, (double)s->places->count, n);
    return 0;
}

/* decode_fn */
static int sum_to_file(void *user, struct source *in, int fd, uint64_t limit,
                       uint64_t *size, struct err *e)
{
    const struct summing *s = user;
    CLEANUP_FREE char *sum = malloc(BLOCK), *x = malloc(BLOCK);

    if (!sum || !x)
        return err_nomem(e);
    if (in->size > limit)
        return err_set(e, EFBIG, "a sum of %" PRIu64 " bytes", in->size);
    for (uint64_t at = 0; at < in->size; at += BLOCK) {
        size_t n = (size_t)MIN(in->size - at, (uint64_t)BLOCK);

        TRY(sum_block(s, at, n, sum, x, e));
        TRY(write_all(fd, sum, n, e));
    }
    *size = in->size;
    return check_places(s->places, e);
}

/* The cache knows one file: what all of them are goes into its numbers. */
static struct decoded_key key_of(const struct places *p, const struct chunk *c)
{
    struct decoded_key key = {
        .off = c->offset, .len = c->length, .encoding = c->encoding};

    for (size_t i = 0; i < p->count; i++) {
        const struct file_id *id = &p->place[i].src->id;
        uint64_t v[] = {key.dev,
                        key.ino,
                        id->dev,
                        id->ino,
                        id->size,
                        (uint64_t)id->mtime_ns,
                        (uint64_t)id->ctime_ns,
                        p->place[i].offset};
        XXH128_hash_t hash = XXH3_128bits(v, sizeof v);

        key.dev = hash.low64;
        key.ino = hash.high64;
    }
    return key;
}

static int sum_resolve(struct source *shard, const struct chunk *c,
                       const struct chunk_tensor *t, struct decoded_cache *decoded,
                       struct chunk_place *out, struct err *e)
{
    CLEANUP(places_release) struct places p = {0};
    CLEANUP(source_putp) struct source *window = NULL, *sum = NULL;
    struct summing s = {.places = &p,
                        .kind = float_kind_of(t->dtype),
                        .unit = dtype_unit(t->dtype),
                        .mean = c->encoding == CHUNK_MEAN};
    struct decoded_key key;

    if (!decoded)
        return err_set(e, ENOTSUP, "a sum, and there is no place to keep it");
    if (!s.kind || c->length % s.unit != 0)
        return err_set(e, EBADMSG, "a sum of elements that cannot be added");
    TRY(open_places(shard, c, t, &p, e));
    TRY(source_window(shard, c->offset, c->length, &window, e));
    key = key_of(&p, c);
    TRY(decoded_get(decoded, &key, window, c->length, sum_to_file, &s, &sum, e));
    if (sum->size != c->length)
        return err_set(e, EBADMSG, "a sum of %" PRIu64 " bytes, not %" PRIu64,
                       sum->size, c->length);
    out->decoded = true;
    return lay_out(c, t, sum, 0, out, e);
}

const struct chunk_codec codec_sum = {
    .encoding = CHUNK_SUM,
    .name = "sum",
    .decodes = true,
    .resolve = sum_resolve,
};

const struct chunk_codec codec_mean = {
    .encoding = CHUNK_MEAN,
    .name = "mean",
    .decodes = true,
    .resolve = sum_resolve,
};
