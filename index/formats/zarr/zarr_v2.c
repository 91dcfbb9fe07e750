/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_v2.c - the `.zarray` of zarr version 2. */
#include "index/formats/zarr/zarr_array.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/formats/zarr/zarr_priv.h"

static bool is_null(const struct json *v)
{
    return !v || json_kind(v) == JSON_NULL;
}

/* ---- the type of elements ---- */

struct type_name {
    const char *name;
    enum dtype dtype;
};

static enum dtype find_type(const struct type_name *t, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(t[i].name, name) == 0)
            return t[i].dtype;
    return DTYPE_NONE;
}

/* NumPy's letters, which stand behind one of '<', '>' and '|'. */
static enum dtype dtype_of_letters(const char *name)
{
    static const struct type_name known[] = {
        {"b1", DTYPE_BOOL}, {"i1", DTYPE_I8},   {"u1", DTYPE_U8},    {"i2", DTYPE_I16},
        {"u2", DTYPE_U16},  {"i4", DTYPE_I32},  {"u4", DTYPE_U32},   {"i8", DTYPE_I64},
        {"u8", DTYPE_U64},  {"f2", DTYPE_F16},  {"f4", DTYPE_F32},   {"f8", DTYPE_F64},
        {"c8", DTYPE_C64},  {"V2", DTYPE_BF16}, {"c16", DTYPE_C128},
    };

    return find_type(known, ARRAY_SIZE(known), name);
}

/* What tensorstore writes (0.1.86), bare; always little-endian. */
static enum dtype dtype_of_word(const char *name)
{
    static const struct type_name known[] = {
        {"bfloat16", DTYPE_BF16},
        {"float8_e4m3fn", DTYPE_F8_E4M3},
        {"float8_e5m2", DTYPE_F8_E5M2},
        {"float8_e4m3fnuz", DTYPE_F8_E4M3FNUZ},
        {"float8_e5m2fnuz", DTYPE_F8_E5M2FNUZ},
    };

    return find_type(known, ARRAY_SIZE(known), name);
}

/* tensorstore 0.1.86: four and two bits lie in a byte each, integers with their sign. */
bool zarr_take_byte_type(struct zarr_array *a, const char *name)
{
    static const char *const unnamed[] = {
        "int2",
        "uint2",
        "int4",
        "uint4",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
    };

    if (strcmp(name, "float8_e8m0fnu") == 0) {
        a->dtype = DTYPE_F8_E8M0;
        return true;
    }
    for (size_t i = 0; i < ARRAY_SIZE(unnamed); i++) {
        if (strcmp(name, unnamed[i]) == 0) {
            a->dtype = DTYPE_U8;
            a->numpy_dtype = unnamed[i];
            return true;
        }
    }
    return false;
}

static void take_dtype(struct zarr_array *a, const struct json *v, bool *is_void)
{
    const char *text = "";
    enum dtype dtype;
    char order;

    if (!json_string(v, &text)) {
        zarr_refuse(a, "structured element types are not supported");
        return;
    }
    order = text[0];
    if (order == '<' || order == '>' || order == '|')
        dtype = dtype_of_letters(text + 1);
    else if (zarr_take_byte_type(a, text))
        return;
    else
        dtype = dtype_of_word(text);
    if (dtype == DTYPE_NONE) {
        zarr_refuse(a, "element type \"%.40s\" is not supported", text);
        return;
    }
    *is_void = text[1] == 'V';
    if (order == '|' && dtype_component(dtype) > 1 && !*is_void)
        zarr_refuse(a, "element type \"%.40s\" has no byte order", text);
    a->dtype = dtype;
    a->big_endian = order == '>' && dtype_component(dtype) > 1;
}

/* ---- shapes, keys, codecs ---- */

static void take_shapes(struct zarr_array *a, const struct json *doc)
{
    struct shape shape, chunk;

    if (!zarr_take_dims(json_get(doc, "shape"), &shape))
        zarr_refuse(a, "shape is no list of numbers from 0 to 2^53");
    else
        a->shape = shape;
    if (!zarr_take_dims(json_get(doc, "chunks"), &chunk))
        zarr_refuse(a, "chunks is no list of numbers from 0 to 2^53");
    else
        a->grid_chunk = chunk;
}

static void take_order(struct zarr_array *a, const struct json *doc)
{
    const char *text = "";
    uint32_t nd = a->shape.nd;

    if (!json_string(json_get(doc, "order"), &text) ||
        (strcmp(text, "C") != 0 && strcmp(text, "F") != 0)) {
        zarr_refuse(a, "order \"%.8s\" is neither C nor F", text);
        return;
    }
    for (uint32_t k = 0; k < nd; k++)
        a->order[k] = (uint8_t)(text[0] == 'F' ? nd - 1 - k : k);
}

static void take_separator(struct zarr_array *a, const struct json *doc)
{
    const struct json *v = json_get(doc, "dimension_separator");
    const char *text = "";

    a->separator = '.';
    if (is_null(v))
        return;
    if (!json_string(v, &text) || (strcmp(text, ".") != 0 && strcmp(text, "/") != 0))
        zarr_refuse(a, "dimension_separator is neither \".\" nor \"/\"");
    else
        a->separator = text[0];
}

static void take_codec(struct zarr_array *a, const struct json *v, const char *what)
{
    const char *name;

    if (json_kind(v) != JSON_OBJECT || !json_string(json_get(v, "id"), &name))
        zarr_refuse(a, "a %s without an id", what);
    else
        zarr_take_codec(a, &a->chain, name, v, what);
}

/* Filters are applied in their order, then the compressor. */
static void take_codecs(struct zarr_array *a, const struct json *doc)
{
    const struct json *filters = json_get(doc, "filters");
    const struct json *compressor = json_get(doc, "compressor");

    if (!is_null(filters) && json_kind(filters) != JSON_ARRAY) {
        zarr_refuse(a, "filters are no list");
        return;
    }
    for (const struct json *v = is_null(filters) ? NULL : json_first(filters); v;
         v = json_next(v))
        take_codec(a, v, "filter");
    if (!is_null(compressor))
        take_codec(a, compressor, "compressor");
    zarr_chain_reverse(&a->chain);
}

static void take_document(struct zarr_array *a, const struct json *doc,
                          const char *text, size_t len)
{
    const struct json *fill = json_get(doc, "fill_value");
    bool is_void = false;
    uint64_t version = 0;

    if (json_kind(doc) != JSON_OBJECT) {
        zarr_refuse(a, "its .zarray is no JSON object");
        return;
    }
    if (!json_u64(json_get(doc, "zarr_format"), &version) || version != 2)
        zarr_refuse(a,
                    "its .zarray is not of zarr_format 2, the only one of a .zarray");
    take_dtype(a, json_get(doc, "dtype"), &is_void);
    take_shapes(a, doc);
    take_order(a, doc);
    take_separator(a, doc);
    take_codecs(a, doc);
    zarr_settle(a);
    if (!a->why[0] && !is_null(fill))
        zarr_take_fill(a, fill, text, len, is_void);
}

int zarr_parse_v2(const char *text, size_t len, struct zarr_array *out, struct err *e)
{
    static const struct json_limits limits = {.bytes = ZARR_MAX_JSON};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0};

    *out = (struct zarr_array){.format = 2, .dtype = DTYPE_U8, .shape.nd = 1};
    if (json_parse(text, len, &limits, &doc, &why) == 0)
        take_document(out, doc, text, len);
    else if (why.code == ENOMEM)
        return err_nomem(e);
    else
        zarr_refuse(out, "its .zarray: %.200s", why.text);
    return 0;
}
