/* SPDX-License-Identifier: MIT */
/* index/chunk.c - chunks of a tensor as the index stores them: one blob of varints. */
#include "index/chunk.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"

/*
 * The blob: the count, then for each chunk
 *
 *   tag       flags (3 bits), HAS_STEP, HAS_FIRST, HAS_PARAM, HAS_WHOLE,
 *             encoding (the bits above)
 *   file      as a difference to the chunk before
 *   offset    as a difference to the end of the piece before
 *   length    as a difference to the length before
 *   start     nd differences to the start before
 *   size      nd differences to the size before
 *   first     with HAS_FIRST
 *   step      with HAS_STEP: nd signed numbers
 *   param     with HAS_PARAM: its length and bytes; length 0: as the chunk's before
 *   whole     with HAS_WHOLE: 1 + its number of dimensions, and these; 0: as the one before
 *
 * all as LEB128. Differences wrap at 2^64 and are signed (zigzag), so that neighbours in
 * a grid or in a file take a byte each: a million tiles of a matrix are 12 bytes apiece.
 * Before the first chunk everything is 0.
 */

/* The bits of the tag. */
enum {
    CHUNK_FLAG_BITS = CHUNK_SWAP | CHUNK_CONJ | CHUNK_NEG,
    CHUNK_HAS_STEP = 8,
    CHUNK_HAS_FIRST = 16,
    CHUNK_HAS_PARAM = 32,
    CHUNK_HAS_WHOLE = 64,
    CHUNK_ENCODING_SHIFT = 7,
    CHUNK_PARAM_MAX = 64 << 10, /* keys are shorter, see index/names.h */
};

struct unpacker {
    const unsigned char *data;
    size_t len, pos;
    bool bad; /* a number was cut or too long; then all that follow read as 0 */
};

static uint64_t unpack_number(struct unpacker *u)
{
    uint64_t v = 0;

    if (!u->bad && !varint_get(u->data, u->len, &u->pos, &v))
        u->bad = true;
    return u->bad ? 0 : v;
}

static uint64_t unpack_delta(struct unpacker *u, uint64_t before)
{
    return before + (uint64_t)unzigzag(unpack_number(u));
}

/* Bytes that a packed chunk takes at least: how many there can be. */
static uint64_t chunk_packed_min(uint32_t nd)
{
    return 4 + 2 * (uint64_t)nd;
}

static void add_delta(struct buf *b, uint64_t now, uint64_t before)
{
    buf_add_varint(b, zigzag((int64_t)(now - before)));
}

static bool same_param(const struct chunk *a, const struct chunk *b)
{
    return a->param && b->param && a->param_len == b->param_len &&
           memcmp(a->param, b->param, a->param_len) == 0;
}

static void pack_param(struct buf *b, const struct chunk *c, const struct chunk *prev)
{
    uint32_t len = same_param(c, prev) ? 0 : c->param_len;

    buf_add_varint(b, len);
    buf_add(b, c->param, len);
}

static bool same_whole(const struct chunk *a, const struct chunk *b)
{
    return a->whole && b->whole && a->whole_nd == b->whole_nd &&
           memcmp(a->whole, b->whole, a->whole_nd * sizeof *a->whole) == 0;
}

static void pack_whole(struct buf *b, const struct chunk *c, const struct chunk *prev)
{
    bool same = same_whole(c, prev);

    buf_add_varint(b, same ? 0 : c->whole_nd + 1);
    for (uint32_t k = 0; !same && k < c->whole_nd; k++)
        buf_add_varint(b, c->whole[k]);
}

static void pack_one(struct buf *b, const struct chunk *c, const struct chunk *prev,
                     uint32_t nd)
{
    uint64_t tag = c->flags | (uint64_t)c->encoding << CHUNK_ENCODING_SHIFT;

    tag |= c->step ? CHUNK_HAS_STEP : 0;
    tag |= c->first ? CHUNK_HAS_FIRST : 0;
    tag |= c->param ? CHUNK_HAS_PARAM : 0;
    tag |= c->whole ? CHUNK_HAS_WHOLE : 0;
    buf_add_varint(b, tag);
    add_delta(b, c->file, prev->file);
    add_delta(b, c->offset, prev->offset + prev->length);
    add_delta(b, c->length, prev->length);
    for (uint32_t k = 0; k < nd; k++)
        add_delta(b, c->start[k], prev->start[k]);
    for (uint32_t k = 0; k < nd; k++)
        add_delta(b, c->size[k], prev->size[k]);
    if (c->first)
        buf_add_varint(b, c->first);
    for (uint32_t k = 0; c->step && k < nd; k++)
        buf_add_varint(b, zigzag(c->step[k]));
    if (c->param)
        pack_param(b, c, prev);
    if (c->whole)
        pack_whole(b, c, prev);
}

int chunks_pack(const struct chunk *c, size_t n, uint32_t nd, struct buf *out,
                struct err *e)
{
    static const uint64_t zeros[SHAPE_MAX_DIMS];
    struct chunk prev = {.start = zeros, .size = zeros};
    int ret;

    if (nd > SHAPE_MAX_DIMS)
        return err_set(e, EINVAL, "%u dimensions, the most is %d", nd, SHAPE_MAX_DIMS);
    buf_add_varint(out, n);
    for (size_t i = 0; i < n; i++) {
        if (c[i].flags & ~CHUNK_FLAG_BITS)
            return err_set(e, EINVAL, "chunk %zu has unknown flags %#x", i, c[i].flags);
        if (c[i].whole && c[i].whole_nd > SHAPE_MAX_DIMS)
            return err_set(e, EINVAL, "chunk %zu has a piece of %u dimensions", i,
                           c[i].whole_nd);
        if (c[i].param && (!c[i].param_len || c[i].param_len > CHUNK_PARAM_MAX))
            return err_set(e, EINVAL, "chunk %zu has a parameter of %u bytes", i,
                           c[i].param_len);
        pack_one(out, &c[i], &prev, nd);
        prev = c[i];
    }
    ret = buf_failed(out);
    return ret < 0 ? err_set(e, -ret, "%zu chunks do not fit into the index", n) : 0;
}

/* The parameter lies in the blob. */
static int unpack_param(struct unpacker *u, const struct chunk *prev, struct chunk *c,
                        struct err *e)
{
    uint64_t len = unpack_number(u);

    if (len == 0 && !u->bad && prev->param) {
        c->param = prev->param;
        c->param_len = prev->param_len;
        return 0;
    }
    if (u->bad || len == 0 || len > CHUNK_PARAM_MAX || len > u->len - u->pos)
        return err_set(e, EBADMSG, "a parameter of %" PRIu64 " bytes", len);
    c->param = (const char *)u->data + u->pos;
    c->param_len = (uint32_t)len;
    u->pos += (size_t)len;
    return 0;
}

static int unpack_whole(struct unpacker *u, const struct chunk *prev,
                        struct chunk_room *r, struct err *e)
{
    struct chunk *c = &r->chunk;
    uint64_t nd = unpack_number(u);

    if (nd == 0 && !u->bad && prev->whole) {
        c->whole = prev->whole;
        c->whole_nd = prev->whole_nd;
        return 0;
    }
    if (u->bad || nd == 0 || nd > SHAPE_MAX_DIMS + 1)
        return err_set(e, EBADMSG, "a piece of impossible shape");
    for (uint64_t k = 0; k + 1 < nd; k++)
        r->whole[k] = unpack_number(u);
    c->whole = r->whole;
    c->whole_nd = (uint32_t)nd - 1;
    return 0;
}

int chunk_blob_begin(const void *data, size_t len, uint32_t nd, struct chunk_blob *out,
                     struct chunk_room *r, struct err *e)
{
    struct unpacker u = {.data = data, .len = len};
    uint64_t count = unpack_number(&u);

    if (nd > SHAPE_MAX_DIMS)
        return err_set(e, EBADMSG, "%u dimensions, the most is %d", nd, SHAPE_MAX_DIMS);
    if (u.bad || count > (len - u.pos) / chunk_packed_min(nd))
        return err_set(e, EBADMSG, "%zu bytes cannot hold %" PRIu64 " chunks", len,
                       count);
    *out = (struct chunk_blob){.data = data, .len = len, .n = (size_t)count, .nd = nd};
    r->chunk = (struct chunk){.start = r->start, .size = r->size};
    memset(r->start, 0, nd * sizeof *r->start);
    memset(r->size, 0, nd * sizeof *r->size);
    r->next = 0;
    r->pos = u.pos;
    return 0;
}

static int unpack_one(const struct chunk_blob *b, struct unpacker *u,
                      struct chunk_room *r, struct err *e)
{
    const struct chunk prev = r->chunk;
    struct chunk *c = &r->chunk;
    uint64_t tag = unpack_number(u), file = unpack_delta(u, prev.file);

    if (file > UINT32_MAX || tag >> CHUNK_ENCODING_SHIFT > UINT8_MAX)
        return err_set(e, EBADMSG, "impossible file %" PRIu64 " or encoding %" PRIu64,
                       file, tag >> CHUNK_ENCODING_SHIFT);
    *c = (struct chunk){.file = (uint32_t)file,
                        .encoding = (uint8_t)(tag >> CHUNK_ENCODING_SHIFT),
                        .flags = tag & CHUNK_FLAG_BITS,
                        .start = r->start,
                        .size = r->size};
    c->offset = unpack_delta(u, prev.offset + prev.length);
    c->length = unpack_delta(u, prev.length);
    for (uint32_t k = 0; k < b->nd; k++)
        r->start[k] = unpack_delta(u, r->start[k]);
    for (uint32_t k = 0; k < b->nd; k++)
        r->size[k] = unpack_delta(u, r->size[k]);
    if (tag & CHUNK_HAS_FIRST)
        c->first = unpack_number(u);
    for (uint32_t k = 0; tag & CHUNK_HAS_STEP && k < b->nd; k++)
        r->step[k] = unzigzag(unpack_number(u));
    c->step = tag & CHUNK_HAS_STEP ? r->step : NULL;
    if (tag & CHUNK_HAS_PARAM)
        TRY(unpack_param(u, &prev, c, e));
    return tag & CHUNK_HAS_WHOLE ? unpack_whole(u, &prev, r, e) : 0;
}

int chunk_blob_next(const struct chunk_blob *b, struct chunk_room *r, struct err *e)
{
    struct unpacker u = {.data = b->data, .len = b->len, .pos = r->pos};
    int ret = unpack_one(b, &u, r, e);

    if (ret == 0 && u.bad)
        ret = err_set(e, EBADMSG, "cut or malformed at byte %zu", u.pos);
    if (ret < 0)
        return err_wrap(e, "chunk %zu of %zu", r->next, b->n);
    r->pos = u.pos;
    r->next++;
    return 0;
}

int chunk_blob_end(const struct chunk_blob *b, const struct chunk_room *r,
                   struct err *e)
{
    if (r->pos != b->len)
        return err_set(e, EBADMSG, "%zu bytes behind the last chunk", b->len - r->pos);
    return 0;
}

/* Copies numbers that most chunks share with the one before, whose copy is `last`. */
static const uint64_t *keep_whole(struct arena *a, const struct chunk *c,
                                  const struct chunk *last)
{
    if (same_whole(c, last))
        return last->whole;
    return (const uint64_t *)(const void *)arena_memdup(
        a, c->whole, c->whole_nd ? c->whole_nd * sizeof *c->whole : 1);
}

/* Out of the room into the arena; start and size into `box`, nd of each. */
static int keep_chunk(struct arena *a, const struct chunk *c, const struct chunk *last,
                      uint32_t nd, uint64_t *box, struct chunk *out, struct err *e)
{
    *out = *c;
    memcpy(box, c->start, nd * sizeof *box);
    memcpy(box + nd, c->size, nd * sizeof *box);
    out->start = box;
    out->size = box + nd;
    if (c->step)
        out->step = (const int64_t *)(const void *)arena_memdup(
            a, c->step, nd ? nd * sizeof *c->step : 1);
    if (c->param)
        out->param =
            same_param(c, last) ? last->param : arena_memdup(a, c->param, c->param_len);
    if (c->whole)
        out->whole = keep_whole(a, c, last);
    return !out->step == !c->step && !out->param == !c->param &&
                   !out->whole == !c->whole
               ? 0
               : err_nomem(e);
}

int chunks_unpack(struct arena *a, const void *data, size_t len, uint32_t nd,
                  const struct chunk **out, size_t *n, struct err *e)
{
    static const struct chunk none;
    struct chunk_room room;
    struct chunk_blob blob;
    struct chunk *c;
    uint64_t *box;
    int ret = chunk_blob_begin(data, len, nd, &blob, &room, e);

    if (ret < 0)
        return ret;
    c = arena_array(a, blob.n ? blob.n : 1, sizeof *c);
    box = arena_array(a, blob.n * 2 * nd + 1, sizeof *box);
    if (!c || !box)
        return err_nomem(e);
    for (size_t i = 0; ret == 0 && i < blob.n; i++) {
        ret = chunk_blob_next(&blob, &room, e);
        if (ret == 0)
            ret = keep_chunk(a, &room.chunk, i ? &c[i - 1] : &none, nd,
                             box + i * 2 * nd, &c[i], e);
    }
    if (ret == 0)
        ret = chunk_blob_end(&blob, &room, e);
    if (ret < 0)
        return ret;
    *out = c;
    *n = blob.n;
    return 0;
}

int chunk_steps(const struct chunk *c, uint32_t nd, uint64_t units, int64_t *step,
                struct err *e)
{
    __int128 low = 0, high = 0, unit = 1;

    memset(step, 0, nd * sizeof *step);
    for (uint32_t k = 0; k < nd; k++)
        if (c->size[k] == 0)
            return 0; /* nothing is read */
    for (uint32_t k = nd; k-- > 0;) {
        __int128 reach;

        step[k] = c->step ? c->step[k] : (int64_t)unit;
        unit *= c->size[k];
        reach = (__int128)(c->size[k] - 1) * step[k];
        if (unit > INT64_MAX || reach > INT64_MAX || reach < INT64_MIN)
            return err_set(e, EBADMSG, "a box that reaches past what is stored");
        *(reach < 0 ? &low : &high) += reach;
    }
    if (low + c->first < 0 || high + c->first >= units)
        return err_set(e, EBADMSG, "a box that reaches past what is stored");
    return 0;
}
