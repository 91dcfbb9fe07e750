/* SPDX-License-Identifier: MIT */
/* base/buf.c - bytes that grow up to a ceiling. */
#include "base/buf.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

enum { DEFAULT_MAX = 1 << 30, FIRST_CAP = 64 };

void buf_release(struct buf *b)
{
    free(b->data);
    *b = (struct buf){.max = b->max};
}

void buf_clear(struct buf *b)
{
    b->len = 0;
    b->failed = 0;
    if (b->data)
        b->data[0] = '\0';
}

static int fail(struct buf *b, int code)
{
    b->failed = code;
    return -code;
}

/* Makes room for `len` more bytes and the NUL. */
static int reserve(struct buf *b, size_t len)
{
    size_t max = b->max ? b->max : DEFAULT_MAX, cap;
    char *data;

    if (b->failed)
        return -b->failed;
    if (b->len > max || len > max - b->len)
        return fail(b, EFBIG);
    if (len < b->cap - b->len) /* strictly: the NUL */
        return 0;
    cap = MAX(b->len + len, b->cap > max / 2 ? max : b->cap * 2);
    cap = MAX(cap, (size_t)FIRST_CAP - 1);
    if (cap == SIZE_MAX || !(data = realloc(b->data, cap + 1)))
        return fail(b, ENOMEM);
    b->data = data;
    b->cap = cap + 1;
    return 0;
}

void *buf_grow(struct buf *b, size_t len)
{
    char *p;

    if (reserve(b, len) < 0)
        return NULL;
    p = b->data + b->len;
    b->len += len;
    b->data[b->len] = '\0';
    return p;
}

int buf_add(struct buf *b, const void *data, size_t len)
{
    char *p = buf_grow(b, len);

    if (!p)
        return -b->failed;
    if (len > 0)
        memcpy(p, data, len);
    return 0;
}

int buf_adds(struct buf *b, const char *text)
{
    return buf_add(b, text, strlen(text));
}

int buf_addc(struct buf *b, char c)
{
    return buf_add(b, &c, 1);
}

int buf_addf(struct buf *b, const char *fmt, ...)
{
    size_t max = b->max ? b->max : DEFAULT_MAX;
    size_t room = b->data && !b->failed ? b->cap - b->len : 0;
    va_list args;
    char *p;
    int len;

    va_start(args, fmt);
    len = vsnprintf(room ? b->data + b->len : NULL, room, fmt, args);
    va_end(args);
    if (len >= 0 && (size_t)len < room && b->len + (size_t)len <= max) {
        b->len += (size_t)len; /* the room that there is was enough */
        return 0;
    }
    if (room)
        b->data[b->len] = '\0';
    if (len < 0)
        return fail(b, ENOMEM);
    p = buf_grow(b, (size_t)len);
    if (!p)
        return -b->failed;
    va_start(args, fmt);
    vsnprintf(p, (size_t)len + 1, fmt, args);
    va_end(args);
    return 0;
}

int buf_add_varint(struct buf *b, uint64_t v)
{
    unsigned char bytes[10];
    size_t n = 0;

    while (v >= 0x80) {
        bytes[n++] = (unsigned char)(v | 0x80);
        v >>= 7;
    }
    bytes[n++] = (unsigned char)v;
    return buf_add(b, bytes, n);
}

/* Appends what stands for one character that cannot be copied as it is. */
static int add_escape(struct buf *b, unsigned char c)
{
    switch (c) {
    case '"':
        return buf_adds(b, "\\\"");
    case '\\':
        return buf_adds(b, "\\\\");
    case '\n':
        return buf_adds(b, "\\n");
    case '\r':
        return buf_adds(b, "\\r");
    case '\t':
        return buf_adds(b, "\\t");
    default:
        if (c < 0x20)
            return buf_addf(b, "\\u%04x", c);
        return buf_adds(b, "\xef\xbf\xbd"); /* U+FFFD */
    }
}

int buf_add_json(struct buf *b, const char *text, size_t len)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t copied = 0, i = 0;

    buf_addc(b, '"');
    while (i < len) {
        size_t n = utf8_char(p + i, len - i);

        if (n > 0 && p[i] >= 0x20 && p[i] != '"' && p[i] != '\\') {
            i += n;
            continue;
        }
        buf_add(b, p + copied, i - copied);
        add_escape(b, p[i]);
        copied = ++i;
    }
    buf_add(b, p + copied, len - copied);
    return buf_addc(b, '"');
}

char *buf_steal(struct buf *b, size_t *len)
{
    char *data;

    if (len)
        *len = 0;
    if (!buf_grow(b, 0)) { /* an empty buffer gives "" */
        buf_release(b);
        return NULL;
    }
    if (len)
        *len = b->len;
    data = steal(&b->data);
    buf_release(b);
    return data;
}

bool varint_get(const unsigned char *data, size_t len, size_t *pos, uint64_t *out)
{
    uint64_t v = 0;
    size_t at = *pos;

    for (unsigned shift = 0; shift < 64; shift += 7) {
        unsigned char c;

        if (at >= len)
            return false;
        c = data[at++];
        if (shift == 63 && c > 1) /* the tenth byte has one bit left */
            return false;
        v |= (uint64_t)(c & 0x7f) << shift;
        if (!(c & 0x80)) {
            *pos = at;
            *out = v;
            return true;
        }
    }
    return false;
}
