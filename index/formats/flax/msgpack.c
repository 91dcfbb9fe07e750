/* SPDX-License-Identifier: MIT */
/* index/formats/flax/msgpack.c - MessagePack read value by value, without its long bytes. */
#include "index/formats/flax/msgpack.h"

#include <errno.h>
#include <string.h>

#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "remote/source.h"

const char *msgpack_kind_name(enum msgpack_kind kind)
{
    static const char *const names[] = {
        "nil",  "a boolean", "an integer",         "an integer", "a number",
        "text", "raw bytes", "an extension value", "an array",   "a map"};

    return names[kind];
}

int msgpack_init(struct msgpack *m, struct source *src, uint64_t off, uint64_t len,
                 struct err *e)
{
    if (range_outside(off, len, src->size))
        return err_set(e, EBADMSG,
                       "%s: bytes %" PRIu64 "+%" PRIu64 " lie outside its %" PRIu64,
                       src->name, off, len, src->size);
    m->src = src;
    m->pos = m->start = off;
    m->end = off + len;
    m->have = 0;
    return 0;
}

static int cut(const struct msgpack *m, struct err *e)
{
    return err_set(e, EBADMSG, "%s: byte %" PRIu64 ": MessagePack is cut off",
                   m->src->name, m->pos);
}

/* The next n bytes (at most 9), which are stepped over. */
static int take(struct msgpack *m, size_t n, const unsigned char **out, struct err *e)
{
    if (n > m->end - m->pos)
        return cut(m, e);
    if (m->pos < m->start || m->pos + n > m->start + m->have) {
        size_t len = (size_t)MIN((uint64_t)sizeof m->window, m->end - m->pos);
        int rc = source_read(m->src, m->pos, len, m->window, e);

        m->start = m->pos;
        m->have = rc < 0 ? 0 : len;
        if (rc < 0)
            return rc;
    }
    *out = m->window + (m->pos - m->start);
    m->pos += n;
    return 0;
}

/* A big-endian number of 1, 2, 4 or 8 bytes. */
static int take_number(struct msgpack *m, size_t size, uint64_t *out, struct err *e)
{
    const unsigned char *p;
    int rc = take(m, size, &p, e);

    *out = 0;
    for (size_t i = 0; rc == 0 && i < size; i++)
        *out = *out << 8 | p[i];
    return rc;
}

/* ---- values by their first byte ---- */

static int take_uint(struct msgpack *m, size_t size, struct msgpack_value *out,
                     struct err *e)
{
    uint64_t u;
    int rc = take_number(m, size, &u, e);

    out->kind = u > INT64_MAX ? MSGPACK_UINT : MSGPACK_INT;
    out->u = u;
    return rc;
}

static int take_int(struct msgpack *m, size_t size, struct msgpack_value *out,
                    struct err *e)
{
    uint64_t u;
    int rc = take_number(m, size, &u, e);
    unsigned shift = 64 - 8 * (unsigned)size;

    out->kind = MSGPACK_INT;
    out->i = (int64_t)(u << shift) >> shift;
    return rc;
}

static int take_float(struct msgpack *m, size_t size, struct msgpack_value *out,
                      struct err *e)
{
    uint64_t u;
    int rc = take_number(m, size, &u, e);
    uint32_t narrow = (uint32_t)u;
    float f;

    out->kind = MSGPACK_FLOAT;
    if (size == sizeof f) {
        memcpy(&f, &narrow, sizeof f);
        out->f = (double)f;
    } else {
        memcpy(&out->f, &u, sizeof u);
    }
    return rc;
}

/* `len` bytes follow; for EXT its type stands before them. */
static int step_over(struct msgpack *m, enum msgpack_kind kind, uint64_t len,
                     struct msgpack_value *out, struct err *e)
{
    uint64_t type = 0;
    int rc = kind == MSGPACK_EXT ? take_number(m, 1, &type, e) : 0;

    if (rc < 0)
        return rc;
    if (len > m->end - m->pos)
        return err_set(
            e, EBADMSG,
            "%s: byte %" PRIu64 ": %s of %" PRIu64 " bytes, %" PRIu64 " are left",
            m->src->name, m->pos, msgpack_kind_name(kind), len, m->end - m->pos);
    out->kind = kind;
    out->ext = (int8_t)(uint8_t)type;
    out->at = m->pos;
    out->len = len;
    m->pos += len;
    return 0;
}

static int take_bytes(struct msgpack *m, enum msgpack_kind kind, size_t size,
                      struct msgpack_value *out, struct err *e)
{
    uint64_t len;
    int rc = take_number(m, size, &len, e);

    return rc < 0 ? rc : step_over(m, kind, len, out, e);
}

/* Each value takes at least a byte: larger counts are lies. */
static int container(struct msgpack *m, enum msgpack_kind kind, uint64_t len,
                     struct msgpack_value *out, struct err *e)
{
    uint64_t left = m->end - m->pos, least = kind == MSGPACK_MAP ? 2 * len : len;

    if (least > left)
        return err_set(e, EBADMSG,
                       "%s: byte %" PRIu64 ": %s of %" PRIu64 " entries, %" PRIu64
                       " bytes are left",
                       m->src->name, m->pos, msgpack_kind_name(kind), len, left);
    out->kind = kind;
    out->at = m->pos;
    out->len = len;
    return 0;
}

static int take_container(struct msgpack *m, enum msgpack_kind kind, size_t size,
                          struct msgpack_value *out, struct err *e)
{
    uint64_t len;
    int rc = take_number(m, size, &len, e);

    return rc < 0 ? rc : container(m, kind, len, out, e);
}

/* First bytes 0xc0 to 0xdf. */
static int take_marked(struct msgpack *m, unsigned char first,
                       struct msgpack_value *out, struct err *e)
{
    switch (first) {
    case 0xc0:
        out->kind = MSGPACK_NIL;
        return 0;
    case 0xc2:
    case 0xc3:
        out->kind = MSGPACK_BOOL;
        out->b = first == 0xc3;
        return 0;
    case 0xc4:
    case 0xc5:
    case 0xc6:
        return take_bytes(m, MSGPACK_BIN, (size_t)1 << (first - 0xc4), out, e);
    case 0xc7:
    case 0xc8:
    case 0xc9:
        return take_bytes(m, MSGPACK_EXT, (size_t)1 << (first - 0xc7), out, e);
    case 0xca:
    case 0xcb:
        return take_float(m, (size_t)4 << (first - 0xca), out, e);
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf:
        return take_uint(m, (size_t)1 << (first - 0xcc), out, e);
    case 0xd0:
    case 0xd1:
    case 0xd2:
    case 0xd3:
        return take_int(m, (size_t)1 << (first - 0xd0), out, e);
    case 0xd4:
    case 0xd5:
    case 0xd6:
    case 0xd7:
    case 0xd8:
        return step_over(m, MSGPACK_EXT, (uint64_t)1 << (first - 0xd4), out, e);
    case 0xd9:
    case 0xda:
    case 0xdb:
        return take_bytes(m, MSGPACK_STR, (size_t)1 << (first - 0xd9), out, e);
    case 0xdc:
    case 0xdd:
        return take_container(m, MSGPACK_ARRAY, (size_t)2 << (first - 0xdc), out, e);
    case 0xde:
    case 0xdf:
        return take_container(m, MSGPACK_MAP, (size_t)2 << (first - 0xde), out, e);
    default:
        return err_set(e, EBADMSG, "%s: byte %" PRIu64 ": 0x%02x is no MessagePack",
                       m->src->name, m->pos - 1, first);
    }
}

int msgpack_need(struct msgpack *m, struct msgpack_value *out, struct err *e)
{
    const unsigned char *p;
    unsigned char first;

    *out = (struct msgpack_value){.kind = MSGPACK_INT};
    TRY(take(m, 1, &p, e));
    first = *p;
    if (first < 0x80)
        out->i = first;
    else if (first < 0x90)
        return container(m, MSGPACK_MAP, first & 15, out, e);
    else if (first < 0xa0)
        return container(m, MSGPACK_ARRAY, first & 15, out, e);
    else if (first < 0xc0)
        return step_over(m, MSGPACK_STR, first & 31, out, e);
    else if (first < 0xe0)
        return take_marked(m, first, out, e);
    else
        out->i = (int64_t)first - 0x100;
    return 0;
}

int msgpack_next(struct msgpack *m, struct msgpack_value *out, struct err *e)
{
    if (m->pos == m->end)
        return 0;
    TRY(msgpack_need(m, out, e));
    return 1;
}

int msgpack_bytes(const struct msgpack *m, const struct msgpack_value *v, size_t max,
                  struct buf *out, struct err *e)
{
    void *dst;

    if (v->len > max)
        return err_set(e, EFBIG,
                       "%s: byte %" PRIu64 ": %s of %" PRIu64 " bytes, more than %zu",
                       m->src->name, v->at, msgpack_kind_name(v->kind), v->len, max);
    dst = buf_grow(out, (size_t)v->len);
    if (!dst)
        return err_nomem(e);
    if (v->at >= m->start && v->at + v->len <= m->start + m->have) {
        memcpy(dst, m->window + (v->at - m->start), (size_t)v->len);
        return 0;
    }
    return source_read(m->src, v->at, (size_t)v->len, dst, e);
}

void msgpack_enter(const struct msgpack *m, const struct msgpack_value *v,
                   struct msgpack *out)
{
    *out = *m;
    out->pos = v->at;
    out->end = v->at + v->len;
}
