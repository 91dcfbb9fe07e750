/* SPDX-License-Identifier: MIT */
/* index/chunk.c - chunks of a tensor as the index stores them: one blob of varints. */
#include "index/chunk.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/chunk_priv.h"

/*
 * The blob: the count, then for each chunk (the tag's bits: index/chunk_priv.h)
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

static int unpack_step(struct unpacker *u, uint32_t nd, struct arena *a,
                       struct chunk *c, struct err *e)
{
    int64_t *step = arena_array(a, nd ? nd : 1, sizeof *step);

    if (!step)
        return err_nomem(e);
    for (uint32_t k = 0; k < nd; k++)
        step[k] = unzigzag(unpack_number(u));
    c->step = step;
    return 0;
}

/* The parameter, in an arena that outlives the blob. */
static int unpack_param(struct unpacker *u, const struct chunk *prev, struct arena *a,
                        struct chunk *c, struct err *e)
{
    uint64_t len = unpack_number(u);

    if (len == 0 && !u->bad && prev->param) {
        c->param = prev->param;
        c->param_len = prev->param_len;
        return 0;
    }
    if (u->bad || len == 0 || len > CHUNK_PARAM_MAX || len > u->len - u->pos)
        return err_set(e, EBADMSG, "a parameter of %" PRIu64 " bytes", len);
    c->param = arena_memdup(a, u->data + u->pos, (size_t)len);
    c->param_len = (uint32_t)len;
    u->pos += (size_t)len;
    return c->param ? 0 : err_nomem(e);
}

static int unpack_whole(struct unpacker *u, const struct chunk *prev, struct arena *a,
                        struct chunk *c, struct err *e)
{
    uint64_t nd = unpack_number(u), *whole;

    if (nd == 0 && !u->bad && prev->whole) {
        c->whole = prev->whole;
        c->whole_nd = prev->whole_nd;
        return 0;
    }
    if (u->bad || nd == 0 || nd > SHAPE_MAX_DIMS + 1)
        return err_set(e, EBADMSG, "a piece of impossible shape");
    whole = arena_array(a, (size_t)nd, sizeof *whole);
    if (!whole)
        return err_nomem(e);
    for (uint64_t k = 0; k + 1 < nd; k++)
        whole[k] = unpack_number(u);
    c->whole = whole;
    c->whole_nd = (uint32_t)nd - 1;
    return 0;
}

/* start and size of all chunks lie in one array, two rows of nd a chunk. */
static int unpack_one(struct unpacker *u, const struct chunk *prev, uint64_t *box,
                      uint32_t nd, struct arena *a, struct chunk *c, struct err *e)
{
    uint64_t tag = unpack_number(u), file = unpack_delta(u, prev->file);

    if (file > UINT32_MAX || tag >> CHUNK_ENCODING_SHIFT > UINT8_MAX)
        return err_set(e, EBADMSG, "impossible file %" PRIu64 " or encoding %" PRIu64,
                       file, tag >> CHUNK_ENCODING_SHIFT);
    c->file = (uint32_t)file;
    c->encoding = (uint8_t)(tag >> CHUNK_ENCODING_SHIFT);
    c->flags = tag & CHUNK_FLAG_BITS;
    c->offset = unpack_delta(u, prev->offset + prev->length);
    c->length = unpack_delta(u, prev->length);
    for (uint32_t k = 0; k < nd; k++)
        box[k] = unpack_delta(u, prev->start[k]);
    for (uint32_t k = 0; k < nd; k++)
        box[nd + k] = unpack_delta(u, prev->size[k]);
    c->start = box;
    c->size = box + nd;
    c->first = tag & CHUNK_HAS_FIRST ? unpack_number(u) : 0;
    if (tag & CHUNK_HAS_STEP && unpack_step(u, nd, a, c, e) < 0)
        return -e->code;
    if (tag & CHUNK_HAS_PARAM && unpack_param(u, prev, a, c, e) < 0)
        return -e->code;
    return tag & CHUNK_HAS_WHOLE ? unpack_whole(u, prev, a, c, e) : 0;
}

/* The bytes behind the count say how many chunks there can be at most. */
static int check_count(const struct unpacker *u, uint64_t count, uint32_t nd,
                       struct err *e)
{
    if (u->bad || count > (u->len - u->pos) / chunk_packed_min(nd))
        return err_set(e, EBADMSG, "%zu bytes cannot hold %" PRIu64 " chunks", u->len,
                       count);
    return 0;
}

int chunks_unpack(struct arena *a, const void *data, size_t len, uint32_t nd,
                  const struct chunk **out, size_t *n, struct err *e)
{
    static const uint64_t zeros[SHAPE_MAX_DIMS];
    const struct chunk none = {.start = zeros, .size = zeros};
    struct unpacker u = {.data = data, .len = len};
    struct chunk *c;
    uint64_t *box, count = unpack_number(&u);

    if (nd > SHAPE_MAX_DIMS)
        return err_set(e, EBADMSG, "%u dimensions, the most is %d", nd, SHAPE_MAX_DIMS);
    if (check_count(&u, count, nd, e) < 0)
        return -EBADMSG;
    c = arena_array(a, count ? count : 1, sizeof *c);
    box = arena_array(a, count * 2 * nd + 1, sizeof *box);
    if (!c || !box)
        return err_nomem(e);
    for (size_t i = 0; i < count; i++) {
        int ret =
            unpack_one(&u, i ? &c[i - 1] : &none, box + i * 2 * nd, nd, a, &c[i], e);

        if (ret == 0 && u.bad)
            ret = err_set(e, EBADMSG, "cut or malformed at byte %zu", u.pos);
        if (ret < 0)
            return err_wrap(e, "chunk %zu of %" PRIu64, i, count);
    }
    if (u.pos != len)
        return err_set(e, EBADMSG, "%zu bytes behind the last chunk", len - u.pos);
    *out = c;
    *n = count;
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
