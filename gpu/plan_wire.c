/* SPDX-License-Identifier: MIT */
/* gpu/plan_wire.c - reads the plan of a tensor that another process has written. */
#include "gpu/plan_wire.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/endian.h"
#include "base/err.h"
#include "gpu/cast.h"
#include "gpu/plan_wire_priv.h"
#include "index/chunk.h"

struct cursor {
    const unsigned char *data;
    size_t len, pos;
    bool cut; /* something was beyond the end; then all numbers are 0 */
};

static const unsigned char *take(struct cursor *c, uint64_t len)
{
    const unsigned char *at = c->data + c->pos;

    if (c->cut || len > c->len - c->pos) {
        c->cut = true;
        return NULL;
    }
    c->pos += (size_t)len;
    return at;
}

static uint64_t take_u64(struct cursor *c)
{
    const unsigned char *at = take(c, 8);

    return at ? get_le64(at) : 0;
}

static uint32_t take_u32(struct cursor *c)
{
    const unsigned char *at = take(c, 4);

    return at ? get_le32(at) : 0;
}

static bool all_zero(const unsigned char *at, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (at[i])
            return false;
    return true;
}

/* `len` bytes and the zeros behind them. */
static int take_text(struct cursor *c, struct arena *a, uint64_t len, const char **out,
                     struct err *e)
{
    const unsigned char *at = take(c, len);
    const unsigned char *pad = take(c, -len & 7);

    if (!at || !pad)
        return err_set(e, EBADMSG, "cut at byte %zu", c->pos);
    if (!all_zero(pad, -len & 7))
        return err_set(e, EBADMSG, "a text is not padded with zeros at byte %zu",
                       c->pos);
    *out = arena_memdup(a, at, (size_t)len);
    return *out ? 0 : err_nomem(e);
}

static int take_dtype(struct cursor *c, enum dtype *out, struct err *e)
{
    const unsigned char *at = take(c, WIRE_NAME);
    char name[WIRE_NAME + 1] = {0};

    if (at)
        memcpy(name, at, WIRE_NAME);
    *out = dtype_from_name(name);
    if (*out == DTYPE_NONE || !all_zero(at + strlen(name), WIRE_NAME - strlen(name)))
        return err_set(e, EBADMSG, "an unknown element type");
    return 0;
}

/* The numbers of elements in the file, before anything is allocated for them. */
struct counts {
    uint64_t flags, sources, pieces, key_len;
    uint32_t nd, piece_nd;
};

static int check_counts(const struct cursor *c, const struct counts *n, struct err *e)
{
    size_t left = c->len - c->pos;

    if (n->flags > 1 || (n->flags && (n->sources || n->pieces)))
        return err_set(e, EBADMSG, "unknown flags %#" PRIx64, n->flags);
    if (n->nd > SHAPE_MAX_DIMS || n->piece_nd > SHAPE_MAX_DIMS)
        return err_set(e, EBADMSG, "%u dimensions, the most is %d",
                       MAX(n->nd, n->piece_nd), SHAPE_MAX_DIMS);
    if (n->sources > left / WIRE_SOURCE || n->pieces > left / WIRE_PIECE ||
        n->key_len > left)
        return err_set(e, EBADMSG,
                       "%zu bytes cannot hold %" PRIu64 " sources and %" PRIu64
                       " pieces",
                       c->len, n->sources, n->pieces);
    return 0;
}

static int take_shape(struct cursor *c, const struct counts *n, struct plan_wire *p,
                      struct err *e)
{
    uint64_t bytes;

    p->shape.nd = n->nd;
    for (uint32_t k = 0; k < n->nd; k++)
        p->shape.dim[k] = take_u64(c);
    if (shape_units(&p->shape, p->stored, &p->units, e) < 0 ||
        shape_bytes(&p->shape, p->dtype, &bytes, e) < 0)
        return err_set(e, EBADMSG, "an impossible shape");
    if (p->units.nd != n->piece_nd)
        return err_set(e, EBADMSG, "pieces of %u dimensions, the tensor has %u",
                       n->piece_nd, p->units.nd);
    if (bytes != p->bytes)
        return err_set(e, EBADMSG, "a tensor of %" PRIu64 " bytes says it has %" PRIu64,
                       bytes, p->bytes);
    return 0;
}

static int take_head(struct cursor *c, struct arena *a, struct counts *n,
                     struct plan_wire *p, struct err *e)
{
    const unsigned char *magic = take(c, 8);
    uint64_t length = take_u64(c);

    if (!magic || memcmp(magic, WIRE_MAGIC, 8) != 0)
        return err_set(e, EBADMSG, "not a plan of a version that is known");
    if (length != c->len)
        return err_set(e, EBADMSG, "%zu bytes of %" PRIu64, c->len, length);
    n->flags = take_u64(c);
    p->bytes = take_u64(c);
    if (c->len < WIRE_HEAD)
        return err_set(e, EBADMSG, "cut at byte %zu", c->len);
    TRY(take_dtype(c, &p->dtype, e));
    TRY(take_dtype(c, &p->stored, e));
    if (p->dtype != p->stored && !cast_possible(p->stored, p->dtype))
        return err_set(e, EBADMSG, "a cast of %s to %s", dtype_name(p->stored),
                       dtype_name(p->dtype));
    n->nd = take_u32(c);
    n->piece_nd = take_u32(c);
    n->sources = take_u64(c);
    n->pieces = take_u64(c);
    n->key_len = take_u64(c);
    TRY(check_counts(c, n, e));
    TRY(take_shape(c, n, p, e));
    p->through = n->flags;
    p->key_len = (size_t)n->key_len;
    return take_text(c, a, n->key_len, &p->key, e);
}

static int take_source(struct cursor *c, struct arena *a, struct wire_source *s,
                       struct err *e)
{
    uint64_t len;

    s->size = take_u64(c);
    s->mtime_ns = (int64_t)take_u64(c);
    len = take_u64(c);
    if (len >= PATH_MAX || take_text(c, a, len, &s->path, e) < 0)
        return err_set(e, EBADMSG, "a path is cut or too long");
    if (s->path[0] != '/' || strlen(s->path) != len)
        return err_set(e, EBADMSG, "a path that is not absolute");
    if (s->size > INT64_MAX)
        return err_set(e, EBADMSG, "a file of more than 2^63 bytes");
    return 0;
}

/* A row of `nd` numbers, in the arena. */
static uint64_t *take_row(struct cursor *c, struct arena *a, uint32_t nd)
{
    uint64_t *row = arena_array(a, nd + 1, sizeof *row);

    for (uint32_t k = 0; row && k < nd; k++)
        row[k] = take_u64(c);
    return row;
}

static int take_piece(struct cursor *c, struct arena *a, const struct plan_wire *p,
                      struct wire_piece *out, struct err *e)
{
    const unsigned char *head, *value;

    out->source = take_u32(c);
    head = take(c, 4);
    out->base = take_u64(c);
    value = take(c, WIRE_VALUE);
    out->start = take_row(c, a, p->units.nd);
    out->size = take_row(c, a, p->units.nd);
    out->step = (const int64_t *)take_row(c, a, p->units.nd);
    if (!out->start || !out->size || !out->step)
        return err_nomem(e);
    if (c->cut)
        return err_set(e, EBADMSG, "cut at byte %zu", c->pos);
    if (head[0] > 1 || head[1] & ~(CHUNK_SWAP | CHUNK_CONJ | CHUNK_NEG) || head[2] ||
        head[3])
        return err_set(e, EBADMSG, "an unknown kind of piece");
    if (out->source >= p->sources)
        return err_set(e, EBADMSG, "source %u of %zu", out->source, p->sources);
    out->fill = head[0];
    out->flags = head[1];
    memcpy(out->value, value, WIRE_VALUE);
    return 0;
}

int wire_parse(struct arena *a, const void *data, size_t len, struct plan_wire *out,
               struct err *e)
{
    struct cursor c = {.data = data, .len = len};
    struct counts n = {0};
    int ret;

    *out = (struct plan_wire){0};
    ret = take_head(&c, a, &n, out, e);
    if (ret < 0)
        return err_wrap(e, "plan");
    out->source = arena_array(a, (size_t)n.sources + 1, sizeof *out->source);
    out->piece = arena_array(a, (size_t)n.pieces + 1, sizeof *out->piece);
    if (!out->source || !out->piece)
        return err_nomem(e);
    while (ret == 0 && out->sources < n.sources) {
        ret = take_source(&c, a, &out->source[out->sources], e);
        out->sources += ret == 0;
    }
    if (ret < 0)
        return err_wrap(e, "plan, source %zu", out->sources);
    while (ret == 0 && out->pieces < n.pieces) {
        ret = take_piece(&c, a, out, &out->piece[out->pieces], e);
        out->pieces += ret == 0;
    }
    if (ret < 0)
        return err_wrap(e, "plan, piece %zu", out->pieces);
    if (c.pos != len)
        return err_set(e, EBADMSG, "plan: %zu bytes behind the last piece",
                       len - c.pos);
    return 0;
}
