/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_array.c - the .zarray of a tensor in Megatron's zarr backend. */
#include "index/formats/megatron/megatron.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"

/* The first reason stands. */
static void PRINTF(2, 3) refuse(struct megatron_array *a, const char *fmt, ...)
{
    va_list ap;

    if (a->why[0])
        return;
    va_start(ap, fmt);
    vsnprintf(a->why, sizeof a->why, fmt, ap);
    va_end(ap);
}

/* NumPy's letters. */
static enum dtype dtype_of_letters(const char *text)
{
    static const struct {
        const char *letters;
        enum dtype dtype;
    } known[] = {
        {"b1", DTYPE_BOOL}, {"i1", DTYPE_I8},   {"u1", DTYPE_U8},    {"i2", DTYPE_I16},
        {"u2", DTYPE_U16},  {"i4", DTYPE_I32},  {"u4", DTYPE_U32},   {"i8", DTYPE_I64},
        {"u8", DTYPE_U64},  {"f2", DTYPE_F16},  {"f4", DTYPE_F32},   {"f8", DTYPE_F64},
        {"c8", DTYPE_C64},  {"V2", DTYPE_BF16}, {"c16", DTYPE_C128},
    };

    for (size_t i = 0; i < ARRAY_SIZE(known); i++)
        if (strcmp(known[i].letters, text) == 0)
            return known[i].dtype;
    return DTYPE_NONE;
}

/*
 * NumPy has no bfloat16: the array is written as "<V2", and Megatron then patches the text
 * to "bfloat16".
 */
static void take_dtype(struct megatron_array *a, const struct json *v)
{
    const char *text = "";
    char order;

    json_string(v, &text);
    order = text[0] == '<' || text[0] == '>' || text[0] == '|' ? *text++ : '|';
    a->dtype = strcmp(text, "bfloat16") == 0 ? DTYPE_BF16 : dtype_of_letters(text);
    if (a->dtype == DTYPE_NONE)
        refuse(a, "element type \"%.40s\" is not supported", text);
    else
        a->big_endian = order == '>' && dtype_component(a->dtype) > 1;
}

static bool take_dims(const struct json *v, struct shape *out)
{
    *out = (struct shape){0};
    if (!v || json_kind(v) != JSON_ARRAY || json_count(v) > SHAPE_MAX_DIMS)
        return false;
    for (v = json_first(v); v; v = json_next(v))
        if (!json_u64(v, &out->dim[out->nd++]))
            return false;
    return true;
}

static void take_shapes(struct megatron_array *a, const struct json *doc)
{
    struct err why = {0};

    if (!take_dims(json_get(doc, "shape"), &a->shape) ||
        !take_dims(json_get(doc, "chunks"), &a->chunk) || a->shape.nd != a->chunk.nd) {
        a->shape = (struct shape){.nd = 1};
        a->chunk = (struct shape){.nd = 1};
        refuse(a, "shape and chunks are no lists of as many numbers");
        return;
    }
    for (uint32_t k = 0; k < a->chunk.nd; k++)
        if (a->chunk.dim[k] == 0)
            refuse(a, "a chunk of no elements");
    if (!a->why[0] && shape_bytes(&a->chunk, a->dtype, &a->bytes, &why) < 0)
        refuse(a, "its chunks: %s", why.text);
}

static bool is_null(const struct json *v)
{
    return !v || json_kind(v) == JSON_NULL;
}

/* What Megatron never writes. */
static void check_coding(struct megatron_array *a, const struct json *doc)
{
    const struct json *filters = json_get(doc, "filters"), *id;
    const char *text = ".";
    uint64_t version;

    if (!json_u64(json_get(doc, "zarr_format"), &version) || version != 2)
        refuse(a, "its .zarray is not of zarr_format 2");
    if (!is_null(json_get(doc, "compressor"))) {
        id = json_get(json_get(doc, "compressor"), "id");
        text = "unknown";
        json_string(id, &text);
        refuse(a, "compressor \"%.40s\" is not supported in Megatron's zarr", text);
    }
    if (!is_null(filters) &&
        (json_kind(filters) != JSON_ARRAY || json_count(filters) > 0))
        refuse(a, "filters are not supported in Megatron's zarr");
    if (!json_string(json_get(doc, "order"), &text) || strcmp(text, "C") != 0)
        refuse(a, "its chunks are not in C order");
    text = ".";
    if (!is_null(json_get(doc, "dimension_separator")))
        json_string(json_get(doc, "dimension_separator"), &text);
    if (strcmp(text, ".") != 0)
        refuse(a, "dimension_separator \"%.8s\" is not supported in Megatron's zarr",
               text);
}

static void take_array(struct megatron_array *a, const struct json *doc)
{
    uint64_t step = 1;

    take_dtype(a, json_get(doc, "dtype"));
    take_shapes(a, doc);
    check_coding(a, doc);
    if (a->why[0])
        return;
    for (uint32_t k = a->chunk.nd; k-- > 0; step *= a->chunk.dim[k])
        a->step[k] = (int64_t)step;
}

int megatron_array_parse(const char *text, size_t len, struct megatron_array *out,
                         struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0};

    *out = (struct megatron_array){.shape.nd = 1};
    if (json_parse(text, len, NULL, &doc, &why) == 0)
        take_array(out, doc);
    else if (why.code == ENOMEM)
        return err_nomem(e);
    else
        refuse(out, "its .zarray: %s", why.text);
    return 0;
}
