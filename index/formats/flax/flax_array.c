/* SPDX-License-Identifier: MIT */
/* index/formats/flax/flax_array.c - arrays as flax packs them, whole or in chunks. */
#include "index/formats/flax/flax_array.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/checked.h"
#include "base/err.h"
#include "remote/source.h"

enum {
    MAX_CHUNKS = 1 << 20, /* of 1 GiB each where flax wrote them */
    MAX_KEY = 32,         /* "shape", "chunks", numbers */
};

const char flax_chunked_mark[] = "__msgpack_chunked_array__";

/*
 * Names of NumPy and ml_dtypes (numpy.dtype.name), which flax writes. The last ones have
 * no name in safetensors; ml_dtypes keeps each of their elements in a byte of its own.
 */
static const struct {
    const char *name;
    enum dtype dtype;
    bool is_raw;
} types[] = {
    {"float32", DTYPE_F32, false},
    {"bfloat16", DTYPE_BF16, false},
    {"float16", DTYPE_F16, false},
    {"float64", DTYPE_F64, false},
    {"int64", DTYPE_I64, false},
    {"int32", DTYPE_I32, false},
    {"int16", DTYPE_I16, false},
    {"int8", DTYPE_I8, false},
    {"uint64", DTYPE_U64, false},
    {"uint32", DTYPE_U32, false},
    {"uint16", DTYPE_U16, false},
    {"uint8", DTYPE_U8, false},
    {"bool", DTYPE_BOOL, false},
    {"complex64", DTYPE_C64, false},
    {"complex128", DTYPE_C128, false},
    {"float8_e4m3fn", DTYPE_F8_E4M3, false},
    {"float8_e5m2", DTYPE_F8_E5M2, false},
    {"float8_e8m0fnu", DTYPE_F8_E8M0, false},
    {"float8_e4m3fnuz", DTYPE_F8_E4M3FNUZ, false},
    {"float8_e5m2fnuz", DTYPE_F8_E5M2FNUZ, false},
    {"float8_e3m4", DTYPE_U8, true},
    {"float8_e4m3", DTYPE_U8, true},
    {"float8_e4m3b11fnuz", DTYPE_U8, true},
    {"float4_e2m1fn", DTYPE_U8, true},
    {"float6_e2m3fn", DTYPE_U8, true},
    {"float6_e3m2fn", DTYPE_U8, true},
    {"int4", DTYPE_U8, true},
    {"uint4", DTYPE_U8, true},
    {"int2", DTYPE_U8, true},
    {"uint2", DTYPE_U8, true},
};

void flax_array_release(struct flax_array *a)
{
    free(a->piece);
    *a = (struct flax_array){0};
}

static int bad(const struct msgpack *m, const char *what, struct err *e)
{
    return err_set(e, EBADMSG, "%s: byte %" PRIu64 ": %s", m->src->name, m->pos, what);
}

static int add_piece(struct flax_array *a, const struct flax_piece *p, struct err *e)
{
    struct flax_piece *grown = reallocarray(a->piece, a->count + 1, sizeof *grown);

    if (!grown)
        return err_nomem(e);
    a->piece = grown;
    a->piece[a->count++] = *p;
    return 0;
}

static void find_type(struct flax_array *a)
{
    for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
        if (strcmp(types[i].name, a->name) != 0)
            continue;
        a->dtype = types[i].dtype;
        a->is_raw = types[i].is_raw;
    }
}

/* A dimension: an integer >= 0. */
static int read_dim(struct msgpack *m, uint64_t *out, struct err *e)
{
    struct msgpack_value v;

    TRY(msgpack_need(m, &v, e));
    if (v.kind != MSGPACK_INT || v.i < 0)
        return bad(m, "a dimension of an array is no number", e);
    *out = (uint64_t)v.i;
    return 0;
}

static int read_shape(struct msgpack *m, struct shape *out, struct err *e)
{
    struct msgpack_value v;

    TRY(msgpack_need(m, &v, e));
    if (v.kind != MSGPACK_ARRAY)
        return bad(m, "the shape of an array is no array", e);
    if (v.len > SHAPE_MAX_DIMS)
        return bad(m, "an array of more than 64 dimensions", e);
    out->nd = (uint32_t)v.len;
    for (uint32_t i = 0; i < out->nd; i++)
        TRY(read_dim(m, &out->dim[i], e));
    return 0;
}

static int read_name(struct msgpack *m, char name[FLAX_DTYPE_NAME], struct err *e)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct msgpack_value v;

    TRY(msgpack_need(m, &v, e));
    if ((v.kind != MSGPACK_STR && v.kind != MSGPACK_BIN) || v.len >= FLAX_DTYPE_NAME)
        return bad(m, "the type of an array is no name", e);
    TRY(msgpack_bytes(m, &v, FLAX_DTYPE_NAME, &text, e));
    if (text.len == 0 || memchr(text.data, '\0', text.len))
        return bad(m, "the type of an array is no name", e);
    memcpy(name, text.data, text.len);
    name[text.len] = '\0';
    return 0;
}

/* [shape, name, bytes], and nothing behind it. */
static int read_fields(struct msgpack *m, struct flax_array *a, struct err *e)
{
    struct msgpack_value v;

    TRY(msgpack_need(m, &v, e));
    if (v.kind != MSGPACK_ARRAY || v.len != 3)
        return bad(m, "an array is not [shape, type, bytes]", e);
    TRY(read_shape(m, &a->shape, e));
    TRY(read_name(m, a->name, e));
    TRY(msgpack_need(m, &v, e));
    if (v.kind != MSGPACK_BIN && v.kind != MSGPACK_STR)
        return bad(m, "the bytes of an array are something else", e);
    if (m->pos != m->end)
        return bad(m, "something is behind the bytes of an array", e);
    find_type(a);
    return add_piece(a, &(struct flax_piece){v.at, v.len}, e);
}

/* Have shape and type as many bytes as there are? */
static void check_size(struct flax_array *a)
{
    struct err ignored = {0};
    uint64_t want, have = 0;

    if (a->dtype == DTYPE_NONE)
        return;
    for (size_t i = 0; i < a->count; i++)
        have += a->piece[i].len; /* all within one file */
    if (shape_bytes(&a->shape, a->dtype, &want, &ignored) < 0)
        a->fault = "its shape has more than 2^63 elements";
    else if (want != have)
        a->fault = "it has not as many bytes as its shape and type need";
}

int flax_array_read(const struct msgpack *m, const struct msgpack_value *v,
                    struct flax_array *out, struct err *e)
{
    struct msgpack in;

    *out = (struct flax_array){0};
    msgpack_enter(m, v, &in);
    if (read_fields(&in, out, e) < 0) {
        flax_array_release(out);
        return -e->code;
    }
    check_size(out);
    return 0;
}

/* ---- chunks ---- */

static int read_key(struct msgpack *m, char key[MAX_KEY + 1], struct err *e)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct msgpack_value v;

    TRY(msgpack_need(m, &v, e));
    if (v.kind != MSGPACK_STR || v.len == 0 || v.len > MAX_KEY)
        return bad(m, "a chunked array has an entry that flax does not write", e);
    TRY(msgpack_bytes(m, &v, MAX_KEY, &text, e));
    memcpy(key, text.data, text.len);
    key[text.len] = '\0';
    return 0;
}

/* flax makes tuples maps with the keys "0", "1", ...; JAX may have sorted those as text. */
static int read_position(struct msgpack *m, uint64_t count, uint64_t *out,
                         struct err *e)
{
    char key[MAX_KEY + 1], again[MAX_KEY + 1];

    TRY(read_key(m, key, e));
    *out = strtoull(key, NULL, 10);
    snprintf(again, sizeof again, "%" PRIu64, *out);
    if (strcmp(key, again) != 0 || *out >= count)
        return bad(m, "a position in a chunked array is out of place", e);
    return 0;
}

static int read_positions(struct msgpack *m, uint64_t max, uint64_t *count,
                          struct err *e)
{
    struct msgpack_value v;

    TRY(msgpack_need(m, &v, e));
    if (v.kind != MSGPACK_MAP || v.len > max)
        return bad(m, "shape or chunks of a chunked array are no map of positions", e);
    *count = v.len;
    return 0;
}

static int read_chunked_shape(struct msgpack *m, struct shape *out, struct err *e)
{
    uint64_t seen = 0, n = 0, i;

    TRY(read_positions(m, SHAPE_MAX_DIMS, &n, e));
    out->nd = (uint32_t)n;
    for (uint64_t k = 0; k < n; k++) {
        TRY(read_position(m, n, &i, e));
        TRY(read_dim(m, &out->dim[i], e));
        seen |= UINT64_C(1) << i;
    }
    if (seen != (n == 64 ? UINT64_MAX : (UINT64_C(1) << n) - 1))
        return bad(m, "a dimension of a chunked array is missing", e);
    return 0;
}

/* All chunks have the type of the first one. */
static int take_chunk(struct msgpack *m, struct flax_array *a, uint64_t i,
                      struct err *e)
{
    CLEANUP(flax_array_release) struct flax_array chunk = {0};
    struct msgpack_value v;

    TRY(msgpack_need(m, &v, e));
    if (v.kind != MSGPACK_EXT || v.ext != FLAX_EXT_ARRAY)
        return bad(m, "a chunk of an array is no array", e);
    TRY(flax_array_read(m, &v, &chunk, e));
    if (a->name[0] && strcmp(a->name, chunk.name) != 0)
        return bad(m, "chunks of an array have different types", e);
    if (a->piece[i].off)
        return bad(m, "a chunk of an array is there twice", e);
    memcpy(a->name, chunk.name, sizeof a->name);
    a->dtype = chunk.dtype;
    a->is_raw = chunk.is_raw;
    if (chunk.fault || chunk.shape.nd != 1)
        a->fault = chunk.fault ? chunk.fault : "a chunk of it is not flat";
    a->piece[i] = chunk.piece[0];
    return 0;
}

static int read_chunks(struct msgpack *m, struct flax_array *a, struct err *e)
{
    uint64_t n = 0, i;

    TRY(read_positions(m, MAX_CHUNKS, &n, e));
    if (n == 0 || a->piece)
        return bad(m, "a chunked array without chunks, or with two lists of them", e);
    a->piece = calloc((size_t)n, sizeof *a->piece);
    if (!a->piece)
        return err_nomem(e);
    a->count = (size_t)n;
    for (uint64_t k = 0; k < n; k++) {
        TRY(read_position(m, n, &i, e));
        TRY(take_chunk(m, a, i, e));
    }
    return 0; /* n different positions below n: all of them */
}

static int read_chunked(struct msgpack *m, uint64_t pairs, struct flax_array *a,
                        struct err *e)
{
    bool has_shape = false;
    struct msgpack_value v;
    char key[MAX_KEY + 1];

    TRY(msgpack_need(m, &v, e));
    if (v.kind != MSGPACK_BOOL || pairs != 3)
        return bad(m, "a chunked array that flax does not write", e);
    for (uint64_t i = 1; i < pairs; i++) {
        TRY(read_key(m, key, e));
        if (strcmp(key, "shape") == 0 && !has_shape) {
            has_shape = true;
            TRY(read_chunked_shape(m, &a->shape, e));
        } else if (strcmp(key, "chunks") != 0) {
            return bad(m, "a chunked array has an entry that flax does not write", e);
        } else {
            TRY(read_chunks(m, a, e));
        }
    }
    return has_shape && a->piece ? 0 : bad(m, "a chunked array lacks an entry", e);
}

int flax_chunked_read(struct msgpack *m, uint64_t pairs, struct flax_array *out,
                      struct err *e)
{
    *out = (struct flax_array){0};
    if (read_chunked(m, pairs, out, e) < 0) {
        flax_array_release(out);
        return -e->code;
    }
    if (!out->fault)
        check_size(out);
    return 0;
}
