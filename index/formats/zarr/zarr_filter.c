/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_filter.c - numcodecs' filters, undone as NumPy does it. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/zarr/zarr_decode.h"
#include "index/formats/zarr/zarr_priv.h"

/* ---- numbers ---- */

struct number {
    unsigned bytes;
    char kind;
    bool swap;
};

static uint64_t get_number(const struct number *t, const unsigned char *p)
{
    uint64_t v = 0;

    for (unsigned i = 0; i < t->bytes; i++)
        v |= (uint64_t)p[t->swap ? t->bytes - 1 - i : i] << 8 * i;
    if (t->kind == 'i' && t->bytes < 8 && v >> (8 * t->bytes - 1))
        v |= UINT64_MAX << 8 * t->bytes;
    return v;
}

static void put_number(const struct number *t, uint64_t v, unsigned char *p)
{
    for (unsigned i = 0; i < t->bytes; i++)
        p[t->swap ? t->bytes - 1 - i : i] = (unsigned char)(v >> 8 * i);
}

/* NumPy's cumsum: of floats rounded after each element. */
static uint64_t add_number(const struct number *t, uint64_t sum, uint64_t v)
{
    if (t->kind != 'f')
        return sum + v;
    if (t->bytes == 4) {
        uint32_t bits = (uint32_t)sum, more = (uint32_t)v;
        float a, b;

        memcpy(&a, &bits, sizeof a);
        memcpy(&b, &more, sizeof b);
        a += b;
        memcpy(&bits, &a, sizeof bits);
        return bits;
    } else {
        double a, b;

        memcpy(&a, &sum, sizeof a);
        memcpy(&b, &v, sizeof b);
        a += b;
        memcpy(&sum, &a, sizeof sum);
        return sum;
    }
}

/* Both types of a filter, how many elements there are, and room for them. */
static int begin_numbers(const struct zarr_codec *c, struct zarr_input *in,
                         struct zarr_output *out, struct number *to,
                         struct number *from, size_t *n, struct err *e)
{
    if (!zarr_number_type(c->arg[0], &to->bytes, &to->kind, &to->swap) ||
        !zarr_number_type(c->arg[1], &from->bytes, &from->kind, &from->swap))
        return err_set(e, EBADMSG, "a filter of unknown types");
    TRY(zarr_input_all(in, e));
    *n = in->len / from->bytes;
    if (in->len % from->bytes != 0 || *n > out->max / to->bytes)
        return err_set(e, EBADMSG, "%zu bytes of %s for a chunk of %zu", in->len,
                       c->arg[1], out->max);
    return zarr_output_room(out, *n * to->bytes, e);
}

/* ---- delta ---- */

static int decode_delta(const struct zarr_codec *codec, struct zarr_input *in,
                        struct zarr_output *out, struct err *e)
{
    struct number to, from;
    uint64_t sum = 0;
    size_t n;

    TRY(begin_numbers(codec, in, out, &to, &from, &n, e));
    for (size_t i = 0; i < n; i++) {
        uint64_t v = get_number(&from, in->data + i * from.bytes);

        sum = i == 0 ? v : add_number(&from, sum, v);
        put_number(&to, sum, out->data + i * to.bytes);
    }
    out->len = n * to.bytes;
    return 0;
}

/* ---- other types: astype, quantize, fixedscaleoffset ---- */

static double float_of(const struct number *t, uint64_t bits)
{
    uint32_t low = (uint32_t)bits;
    float narrow;
    double wide;

    if (t->kind == 'i')
        return (double)(int64_t)bits;
    if (t->kind == 'u')
        return (double)bits;
    if (t->bytes == 4) {
        memcpy(&narrow, &low, sizeof narrow);
        return narrow;
    }
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

static uint64_t bits_of_double(double v)
{
    uint64_t bits;

    memcpy(&bits, &v, sizeof bits);
    return bits;
}

static uint64_t bits_of_float(float v)
{
    uint32_t bits;

    memcpy(&bits, &v, sizeof bits);
    return bits;
}

/* Towards zero. What the type has no number for is another one on each processor. */
static int round_to(const struct number *t, double v, uint64_t *out, struct err *e)
{
    double end = ldexp(1, (int)(8 * t->bytes) - (t->kind == 'i'));

    v = trunc(v);
    if (!(v < end && (t->kind == 'i' ? v >= -end : v >= 0)))
        return err_set(e, EBADMSG, "a filter gives %g for an integer of %u bytes", v,
                       t->bytes);
    *out = t->kind == 'i' ? (uint64_t)(int64_t)v : (uint64_t)v;
    return 0;
}

static int from_float(const struct number *to, double v, uint64_t *out, struct err *e)
{
    if (to->kind != 'f')
        return round_to(to, v, out, e);
    *out = to->bytes == 4 ? bits_of_float((float)v) : bits_of_double(v);
    return 0;
}

/* As NumPy's astype(). */
static int cast(const struct number *to, const struct number *from, uint64_t *v,
                struct err *e)
{
    if (from->kind == 'f')
        return from_float(to, float_of(from, *v), v, e);
    if (to->kind != 'f')
        return 0; /* put_number() cuts it */
    if (to->bytes == 8)
        *v = bits_of_double(float_of(from, *v));
    else /* at once: rounded twice it may be another number */
        *v = bits_of_float(from->kind == 'i' ? (float)(int64_t)*v : (float)*v);
    return 0;
}

/* NumPy divides integers as doubles, and floats as what they are. */
static int unscale(const struct zarr_codec *c, const struct number *to,
                   const struct number *from, uint64_t *v, struct err *e)
{
    double wide = float_of(from, *v);

    if (from->kind == 'f' && from->bytes == 4) {
        float narrow = (float)wide / (float)c->scale;

        narrow += (float)c->offset;
        wide = narrow;
    } else {
        wide = wide / c->scale;
        wide += c->offset;
    }
    return from_float(to, wide, v, e);
}

static int decode_numbers(const struct zarr_codec *c, struct zarr_input *in,
                          struct zarr_output *out, struct err *e)
{
    struct number to, from;
    size_t n;

    TRY(begin_numbers(c, in, out, &to, &from, &n, e));
    for (size_t i = 0; i < n; i++) {
        uint64_t v = get_number(&from, in->data + i * from.bytes);

        if (c->kind == ZARR_CAST ? cast(&to, &from, &v, e) < 0
                                 : unscale(c, &to, &from, &v, e) < 0)
            return -e->code;
        put_number(&to, v, out->data + i * to.bytes);
    }
    out->len = n * to.bytes;
    return 0;
}

/* ---- bytes and bits ---- */

/* First the first bytes of all elements, then the second ones, ... */
static int decode_shuffle(const struct zarr_codec *c, struct zarr_input *in,
                          struct zarr_output *out, struct err *e)
{
    size_t bytes = strtoul(c->arg[0], NULL, 10), n;

    TRY(zarr_input_all(in, e));
    if (bytes == 0 || in->len % bytes != 0)
        return err_set(e, EBADMSG, "%zu bytes are no shuffled elements of %s", in->len,
                       c->arg[0]);
    TRY(zarr_output_room(out, in->len, e));
    n = in->len / bytes;
    for (size_t k = 0; k < bytes; k++)
        for (size_t i = 0; i < n; i++)
            out->data[i * bytes + k] = in->data[k * n + i];
    out->len = in->len;
    return 0;
}

/* The number of bits that are none, then eight booleans a byte, the highest bit first. */
static int decode_packbits(struct zarr_input *in, struct zarr_output *out,
                           struct err *e)
{
    size_t n;

    TRY(zarr_input_all(in, e));
    if (in->len == 0 || in->data[0] > 7 || (in->len == 1 && in->data[0] > 0))
        return err_set(e, EBADMSG, "%zu bytes are no packed bits", in->len);
    n = (in->len - 1) * 8 - in->data[0];
    TRY(zarr_output_room(out, n, e));
    for (size_t i = 0; i < n; i++)
        out->data[i] = in->data[1 + i / 8] >> (7 - i % 8) & 1;
    out->len = n;
    return 0;
}

int zarr_filter(const struct zarr_codec *c, struct zarr_input *in,
                struct zarr_output *out, struct err *e)
{
    switch (c->kind) {
    case ZARR_DELTA:
        return decode_delta(c, in, out, e);
    case ZARR_SHUFFLE:
        return decode_shuffle(c, in, out, e);
    case ZARR_PACKBITS:
        return decode_packbits(in, out, e);
    default:
        return decode_numbers(c, in, out, e);
    }
}
