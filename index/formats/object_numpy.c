/* SPDX-License-Identifier: MIT */
/* index/formats/object_numpy.c - bytes, NumPy scalars and arrays found in pickles. */
#include "index/formats/object_json_priv.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/utf8.h"

void object_bytes_release(struct object_bytes *b)
{
    free(b->own);
    *b = (struct object_bytes){0};
}

/* Each character of the text is one byte. */
static int from_latin1(const struct pv *text, struct object_bytes *out)
{
    size_t len, n = 0;
    const char *s = pv_bytes(text, &len);
    char *own = malloc(len + 1);

    if (!own)
        return -ENOMEM;
    for (size_t i = 0; i < len; n++) {
        unsigned char c = (unsigned char)s[i];

        if (c < 0x80) {
            own[n] = s[i++];
        } else if ((c == 0xc2 || c == 0xc3) && utf8_char(s + i, len - i) == 2) {
            own[n] = (char)(c << 6 | ((unsigned char)s[i + 1] & 0x3f));
            i += 2;
        } else {
            free(own);
            return 0;
        }
    }
    *out = (struct object_bytes){.data = own, .len = n, .own = own};
    return 1;
}

static bool is_builtin(const struct pv *v, const char *name)
{
    return pv_is(v, "builtins", name) || pv_is(v, "__builtin__", name);
}

static bool is_latin1(const struct pv *v)
{
    return pv_str_is(v, "latin1") || pv_str_is(v, "latin-1");
}

/* Bytes themselves, or encode(): what the constructors may be given. */
static int plain_bytes(const struct pv *v, struct object_bytes *out)
{
    struct pv args, text, codec;
    size_t len;

    if (v->kind == PV_BYTES) {
        *out = (struct object_bytes){.data = pv_bytes(v, &len)};
        out->len = len;
        return 1;
    }
    if (v->kind != PV_OBJECT || !pv_is(v, "_codecs", "encode"))
        return 0;
    args = pv_args(v);
    if (pv_count(&args) != 2)
        return 0;
    text = pv_at(&args, 0);
    codec = pv_at(&args, 1);
    return text.kind == PV_STR && is_latin1(&codec) ? from_latin1(&text, out) : 0;
}

int object_bytes(const struct pv *v, struct object_bytes *out)
{
    struct pv args, first, codec;
    int rc = plain_bytes(v, out);

    if (rc != 0)
        return rc;
    if (v->kind != PV_OBJECT ||
        (!is_builtin(v, "bytes") && !is_builtin(v, "bytearray")))
        return 0;
    args = pv_args(v);
    if (pv_count(&args) == 0) {
        *out = (struct object_bytes){.data = ""};
        return 1;
    }
    first = pv_at(&args, 0);
    if (pv_count(&args) == 1)
        return plain_bytes(&first, out);
    codec = pv_at(&args, 1);
    return first.kind == PV_STR && is_latin1(&codec) ? from_latin1(&first, out) : 0;
}

/* "f4", "u1", "V2": a kind and a size, and nothing else. */
static bool parse_code(const struct pv *v, struct object_dtype *out)
{
    const char *s;
    size_t len;
    uint64_t size = 0;

    if (v->kind != PV_STR && v->kind != PV_BYTES)
        return false;
    s = pv_bytes(v, &len);
    if (len < 2 || len > 8 || !memchr("biufcVSU", s[0], 8))
        return false;
    for (size_t i = 1; i < len; i++) {
        if (s[i] < '0' || s[i] > '9')
            return false;
        size = size * 10 + (uint64_t)(s[i] - '0');
    }
    out->kind = s[0];
    out->size = (uint32_t)(s[0] == 'U' ? size * 4 : size);
    snprintf(out->descr + 1, sizeof out->descr - 1, "%.*s", (int)len, s);
    return true;
}

bool object_dtype(const struct pv *v, struct object_dtype *out)
{
    struct pv args, state, order, fields;

    if (v->kind != PV_OBJECT || !pv_is(v, "numpy", "dtype"))
        return false;
    args = pv_args(v);
    state = pv_state(v);
    if (pv_count(&args) < 1 || state.kind != PV_TUPLE || pv_count(&state) < 5)
        return false;
    /* (version, order, subarray, names, fields, ...): only plain elements here. */
    order = pv_at(&state, 2);
    fields = pv_at(&state, 4);
    if (order.kind != PV_NONE || fields.kind != PV_NONE)
        return false;
    fields = pv_at(&args, 0);
    order = pv_at(&state, 1);
    *out = (struct object_dtype){0};
    if (!parse_code(&fields, out))
        return false;
    out->big = pv_str_is(&order, ">");
    if (!out->big && !pv_str_is(&order, "<") && !pv_str_is(&order, "=") &&
        !pv_str_is(&order, "|"))
        return false;
    out->descr[0] = out->big ? '>' : pv_str_is(&order, "|") ? '|' : '<';
    return true;
}

static double half_to_double(uint16_t bits)
{
    int exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
    double value;

    if (exponent == 31)
        value = fraction ? (double)NAN : (double)INFINITY;
    else if (exponent == 0)
        value = ldexp(fraction, -24);
    else
        value = ldexp(fraction + 1024, exponent - 25);
    return bits & 0x8000 ? -value : value;
}

static bool to_float(uint64_t bits, uint32_t size, double *out)
{
    uint32_t low = (uint32_t)bits;
    float single;

    if (size == 2) {
        *out = half_to_double((uint16_t)bits);
    } else if (size == 4) {
        memcpy(&single, &low, sizeof single);
        *out = (double)single;
    } else {
        memcpy(out, &bits, sizeof *out);
    }
    return size >= 2;
}

static bool to_number(const struct object_dtype *d, const char *data,
                      struct object_number *out)
{
    uint64_t bits = 0;

    for (uint32_t i = 0; i < d->size; i++) {
        uint32_t at = d->big ? i : d->size - 1 - i;

        bits = bits << 8 | (unsigned char)data[at];
    }
    switch (d->kind) {
    case 'b':
        *out = (struct object_number){.kind = OBJECT_BOOL, .b = bits != 0};
        return d->size == 1;
    case 'u':
        *out = (struct object_number){.kind = OBJECT_UINT, .u = bits};
        return true;
    case 'i':
        *out = (struct object_number){.kind = OBJECT_INT,
                                      .i = (int64_t)(bits << (64 - 8 * d->size)) >>
                                           (64 - 8 * d->size)};
        return true;
    case 'f':
        out->kind = OBJECT_FLOAT;
        return to_float(bits, d->size, &out->f);
    default:
        return false;
    }
}

static bool is_multiarray(const struct pv *v, const char *name)
{
    return pv_is(v, "numpy._core.multiarray", name) ||
           pv_is(v, "numpy.core.multiarray", name);
}

int object_number(const struct pv *v, struct object_number *out)
{
    CLEANUP(object_bytes_release) struct object_bytes data = {0};
    struct object_dtype d;
    struct pv args, type, value;
    int rc;

    if (v->kind != PV_OBJECT || !is_multiarray(v, "scalar"))
        return 0;
    args = pv_args(v);
    if (pv_count(&args) != 2)
        return 0;
    type = pv_at(&args, 0);
    value = pv_at(&args, 1);
    if (!object_dtype(&type, &d))
        return 0;
    rc = object_bytes(&value, &data);
    if (rc <= 0)
        return rc;
    return (d.size == 1 || d.size == 2 || d.size == 4 || d.size == 8) &&
           data.len == d.size && to_number(&d, data.data, out);
}

/* The data is as long as shape and element say. */
static bool sizes_agree(const struct object_array *a)
{
    uint64_t bytes = a->dtype.size, dim;

    if (a->shape.kind != PV_TUPLE || pv_count(&a->shape) > 64)
        return false;
    for (size_t i = 0; i < pv_count(&a->shape); i++) {
        struct pv item = pv_at(&a->shape, i);

        if (!pv_u64(&item, &dim) || mul_overflows(bytes, dim, &bytes))
            return false;
    }
    return bytes == a->data.len;
}

/* _reconstruct(ndarray, (0,), b'b'), then (version, shape, dtype, fortran, data). */
static int from_state(const struct pv *v, struct object_array *out)
{
    struct pv args = pv_args(v), state = pv_state(v), type, fortran, data;

    if (pv_count(&args) != 3 || state.kind != PV_TUPLE || pv_count(&state) != 5)
        return 0;
    type = pv_at(&args, 0);
    if (type.kind != PV_GLOBAL || !pv_is(&type, "numpy", "ndarray"))
        return 0;
    out->shape = pv_at(&state, 1);
    type = pv_at(&state, 2);
    fortran = pv_at(&state, 3);
    data = pv_at(&state, 4);
    out->fortran =
        fortran.kind == PV_BOOL ? fortran.b : fortran.kind == PV_INT && fortran.i;
    return object_dtype(&type, &out->dtype) ? object_bytes(&data, &out->data) : 0;
}

/* Protocol 5: _frombuffer(data, dtype, shape, 'C'). */
static int from_buffer(const struct pv *v, struct object_array *out)
{
    struct pv args = pv_args(v), type, order, data;

    if (pv_count(&args) != 4)
        return 0;
    data = pv_at(&args, 0);
    type = pv_at(&args, 1);
    out->shape = pv_at(&args, 2);
    order = pv_at(&args, 3);
    out->fortran = pv_str_is(&order, "F");
    return object_dtype(&type, &out->dtype) ? object_bytes(&data, &out->data) : 0;
}

int object_array(const struct pv *v, struct object_array *out)
{
    int rc = 0;

    *out = (struct object_array){0};
    if (v->kind != PV_OBJECT)
        return 0;
    if (is_multiarray(v, "_reconstruct"))
        rc = from_state(v, out);
    else if (pv_is(v, "numpy._core.numeric", "_frombuffer") ||
             pv_is(v, "numpy.core.numeric", "_frombuffer"))
        rc = from_buffer(v, out);
    if (rc > 0 && sizes_agree(out))
        return 1;
    object_bytes_release(&out->data);
    return rc < 0 ? rc : 0;
}
