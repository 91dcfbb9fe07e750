/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_key.c - what a key of a dict is called in the path of a tensor. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/torch/torch_walk.h"

enum {
    MAX_TUPLES = 4, /* one in the other */
    MAX_TEXT = 512, /* bytes with quotes: what many keys hold costs no more for each */
};

/* Python's repr(): as few digits as give the same double, with a point or an exponent. */
static int add_double(struct buf *out, double f)
{
    char text[400];
    int digits = 1, exponent;

    if (isnan(f))
        return buf_adds(out, "nan");
    if (isinf(f))
        return buf_adds(out, f < 0 ? "-inf" : "inf");
    do
        snprintf(text, sizeof text, "%.*e", digits - 1, f);
    while (strtod(text, NULL) != f && digits++ < 17);
    exponent = atoi(strchr(text, 'e') + 1);
    if (exponent >= -4 && exponent < 16)
        snprintf(text, sizeof text, "%.*f", MAX(digits - 1 - exponent, 1), f);
    return buf_adds(out, text);
}

/* Within a tuple text has quotes: Python's, but that it keeps all of what is not ASCII. */
static int add_quoted(struct buf *out, const struct pv *v)
{
    size_t len;
    const unsigned char *s = (const unsigned char *)pv_bytes(v, &len);
    char quote = memchr(s, '\'', len) && !memchr(s, '"', len) ? '"' : '\'';

    if (v->kind == PV_BYTES)
        buf_addc(out, 'b');
    buf_addc(out, quote);
    for (size_t i = 0; i < len && !out->failed; i++) {
        if (s[i] == '\\' || s[i] == quote)
            buf_addf(out, "\\%c", s[i]);
        else if (s[i] == '\n' || s[i] == '\r' || s[i] == '\t')
            buf_addf(out, "\\%c", s[i] == '\n' ? 'n' : s[i] == '\r' ? 'r' : 't');
        else if (s[i] < ' ' || s[i] == 0x7f || (s[i] > 0x7f && v->kind == PV_BYTES))
            buf_addf(out, "\\x%02x", s[i]);
        else
            buf_addc(out, (char)s[i]);
    }
    return buf_addc(out, quote);
}

static int add_plain(struct buf *out, const struct pv *v)
{
    const char *s, *name;
    size_t len;

    if (v->kind == PV_NONE)
        return buf_adds(out, "None");
    if (v->kind == PV_BOOL)
        return buf_adds(out, v->b ? "True" : "False");
    if (v->kind == PV_INT)
        return buf_addf(out, "%" PRId64, v->i);
    if (v->kind == PV_FLOAT)
        return add_double(out, v->f);
    if (v->kind == PV_GLOBAL) {
        pv_global(v, &s, &name);
        return buf_addf(out, "%s.%s", s, name);
    }
    s = pv_bytes(v, &len);
    return buf_add(out, s, len);
}

static bool is_plain(const struct pv *v)
{
    return v->kind == PV_NONE || v->kind == PV_BOOL || v->kind == PV_INT ||
           v->kind == PV_FLOAT || v->kind == PV_GLOBAL || v->kind == PV_BIGINT;
}

static bool is_quoted(const struct pv *v)
{
    size_t len;

    if (v->kind != PV_STR && v->kind != PV_BYTES)
        return false;
    pv_bytes(v, &len);
    return len <= MAX_TEXT;
}

/* False: a tuple that holds something else, or too much. */
static bool add_tuple(struct buf *out, const struct pv *tuple)
{
    struct {
        struct pv v;
        size_t i;
    } open[MAX_TUPLES] = {{.v = *tuple}};
    size_t n = 1;

    buf_addc(out, '(');
    while (n > 0 && !out->failed) {
        size_t i = open[n - 1].i++, count = pv_count(&open[n - 1].v);
        struct pv item;

        if (i == count) {
            buf_adds(out, count == 1 ? ",)" : ")");
            n--;
            continue;
        }
        if (i > 0)
            buf_adds(out, ", ");
        item = pv_at(&open[n - 1].v, i);
        if (is_quoted(&item)) {
            add_quoted(out, &item);
        } else if (is_plain(&item) && item.kind != PV_GLOBAL) {
            add_plain(out, &item);
        } else if (item.kind == PV_TUPLE && n < MAX_TUPLES) {
            buf_addc(out, '(');
            open[n].v = item;
            open[n++].i = 0;
        } else {
            return false;
        }
    }
    return !out->failed;
}

int torch_key_part(const struct pv *key, size_t i, struct buf *out)
{
    CLEANUP(buf_release) struct buf tuple = {.max = MAX_TEXT};

    if (key->kind == PV_STR || is_plain(key))
        return add_plain(out, key);
    if (is_quoted(key))
        return add_quoted(out, key);
    if (key->kind == PV_TUPLE && add_tuple(&tuple, key))
        return buf_add(out, tuple.data, tuple.len);
    if (tuple.failed == ENOMEM)
        return -ENOMEM;
    return buf_addf(out, "%zu", i);
}
