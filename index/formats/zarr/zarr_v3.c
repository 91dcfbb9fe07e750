/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_v3.c - the `zarr.json` of an array of zarr version 3. */
#include "index/formats/zarr/zarr_array.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/formats/zarr/zarr_priv.h"

/* Something that has a name and perhaps a configuration: an object or a bare string. */
struct named {
    const char *name;
    const struct json *config; /* NULL: none */
};

static bool take_named(const struct json *v, struct named *out)
{
    *out = (struct named){.name = ""};
    if (!v)
        return false;
    if (json_kind(v) == JSON_STRING)
        return json_string(v, &out->name);
    out->config = json_get(v, "configuration");
    return json_string(json_get(v, "name"), &out->name) &&
           (!out->config || json_kind(out->config) == JSON_OBJECT);
}

/* ---- the type of elements ---- */

static void take_dtype(struct zarr_array *a, const struct json *v)
{
    static const struct {
        const char *name;
        enum dtype dtype;
    } known[] = {
        {"bool", DTYPE_BOOL},
        {"int8", DTYPE_I8},
        {"int16", DTYPE_I16},
        {"int32", DTYPE_I32},
        {"int64", DTYPE_I64},
        {"uint8", DTYPE_U8},
        {"uint16", DTYPE_U16},
        {"uint32", DTYPE_U32},
        {"uint64", DTYPE_U64},
        {"float16", DTYPE_F16},
        {"bfloat16", DTYPE_BF16},
        {"float32", DTYPE_F32},
        {"float64", DTYPE_F64},
        {"complex64", DTYPE_C64},
        {"complex128", DTYPE_C128},
        {"float8_e4m3fn", DTYPE_F8_E4M3},
        {"float8_e5m2", DTYPE_F8_E5M2},
        {"float8_e4m3fnuz", DTYPE_F8_E4M3FNUZ},
        {"float8_e5m2fnuz", DTYPE_F8_E5M2FNUZ},
    };
    struct named type;

    if (!take_named(v, &type)) {
        zarr_refuse(a, "data_type has no name");
        return;
    }
    for (size_t i = 0; i < ARRAY_SIZE(known) && !type.config; i++) {
        if (strcmp(known[i].name, type.name) == 0) {
            a->dtype = known[i].dtype;
            return;
        }
    }
    if (type.config || !zarr_take_byte_type(a, type.name))
        zarr_refuse(a, "element type \"%.40s\" is not supported", type.name);
}

/* ---- shapes and keys ---- */

static void take_shapes(struct zarr_array *a, const struct json *doc)
{
    struct named grid;
    struct shape shape;

    if (!zarr_take_dims(json_get(doc, "shape"), &shape))
        zarr_refuse(a, "shape is no list of numbers from 0 to 2^53");
    else
        a->shape = shape;
    if (!take_named(json_get(doc, "chunk_grid"), &grid) ||
        strcmp(grid.name, "regular") != 0)
        zarr_refuse(a, "chunk_grid \"%.40s\" is not supported", grid.name);
    else if (!zarr_take_dims(json_get(grid.config, "chunk_shape"), &shape))
        zarr_refuse(a, "chunk_shape is no list of numbers from 0 to 2^53");
    else
        a->grid_chunk = shape;
}

static void take_keys(struct zarr_array *a, const struct json *doc)
{
    const struct json *separator;
    const char *text;
    struct named keys;

    if (!take_named(json_get(doc, "chunk_key_encoding"), &keys) ||
        (strcmp(keys.name, "default") != 0 && strcmp(keys.name, "v2") != 0)) {
        zarr_refuse(a, "chunk_key_encoding \"%.40s\" is not supported", keys.name);
        return;
    }
    a->key_prefix = strcmp(keys.name, "default") == 0;
    a->separator = a->key_prefix ? '/' : '.';
    separator = json_get(keys.config, "separator");
    if (!separator)
        return;
    if (!json_string(separator, &text) ||
        (strcmp(text, ".") != 0 && strcmp(text, "/") != 0))
        zarr_refuse(a, "the separator of chunk keys is neither \".\" nor \"/\"");
    else
        a->separator = text[0];
}

/* ---- codecs ---- */

/* Where in a list of codecs we are. */
struct codecs {
    struct zarr_array *a;
    struct zarr_chain *chain;
    bool to_bytes; /* elements are bytes from here on */
    bool inside;   /* a shard */
    bool transposed, delta;
};

static bool is_permutation(const struct shape *order, uint32_t nd)
{
    uint64_t seen = 0;

    if (order->nd != nd)
        return false;
    for (uint32_t k = 0; k < nd; k++) {
        if (order->dim[k] >= nd || seen & 1ull << order->dim[k])
            return false;
        seen |= 1ull << order->dim[k];
    }
    return true;
}

/* A list; in drafts of the specification also "C" and "F". */
static bool transpose_order(const struct json *v, uint32_t nd, struct shape *out)
{
    const char *text;

    if (zarr_take_dims(v, out))
        return is_permutation(out, nd);
    if (!json_string(v, &text) || (strcmp(text, "C") != 0 && strcmp(text, "F") != 0))
        return false;
    out->nd = nd;
    for (uint32_t k = 0; k < nd; k++)
        out->dim[k] = text[0] == 'F' ? nd - 1 - k : k;
    return true;
}

static void take_transpose(struct codecs *x, const struct json *config)
{
    uint8_t before[SHAPE_MAX_DIMS];
    struct shape order;

    if (!transpose_order(json_get(config, "order"), x->a->shape.nd, &order)) {
        zarr_refuse(x->a, "the order of transpose is no permutation");
        return;
    }
    memcpy(before, x->a->order, sizeof before);
    for (uint32_t k = 0; k < order.nd; k++)
        x->a->order[k] = before[order.dim[k]];
    x->transposed = true;
}

static bool take_endian(const struct json *config, bool *big)
{
    const char *text;

    *big = false;
    if (!json_string(json_get(config, "endian"), &text))
        return false;
    *big = strcmp(text, "big") == 0;
    return *big || strcmp(text, "little") == 0;
}

static void take_bytes(struct codecs *x, const struct json *config)
{
    bool known = take_endian(config, &x->a->big_endian);
    bool one_byte = dtype_component(x->a->dtype) == 1;

    if (!known && (!one_byte || json_get(config, "endian")))
        zarr_refuse(x->a, "codec \"bytes\" has no endian that is little or big");
    if (one_byte)
        x->a->big_endian = false;
    x->to_bytes = true;
}

static void take_codecs(struct codecs *x, const struct json *list);

/* The index of a shard has a size that is known: no compression. */
static void take_index_codecs(struct zarr_array *a, const struct json *list)
{
    const struct json *v = list ? json_first(list) : NULL;
    struct named codec;

    if (!v || json_kind(list) != JSON_ARRAY || !take_named(v, &codec) ||
        strcmp(codec.name, "bytes") != 0 ||
        !take_endian(codec.config, &a->index_big_endian)) {
        zarr_refuse(a, "index_codecs do not begin with bytes of an endian");
        return;
    }
    for (v = json_next(v); v; v = json_next(v)) {
        if (!take_named(v, &codec) || strcmp(codec.name, "crc32c") != 0 ||
            a->index_chain.n > 0)
            zarr_refuse(a, "index codec \"%.40s\" is not supported", codec.name);
        else
            a->index_chain.codec[a->index_chain.n++].kind = ZARR_CRC32C;
    }
}

static void take_index_location(struct zarr_array *a, const struct json *v)
{
    const char *text = "end";

    if (v && (!json_string(v, &text) ||
              (strcmp(text, "start") != 0 && strcmp(text, "end") != 0)))
        zarr_refuse(a, "index_location is neither start nor end");
    a->index_at_start = strcmp(text, "start") == 0;
}

/* chunk_shape counts along the dimensions as they are stored. */
static void take_inner_shape(struct zarr_array *a, const struct json *v)
{
    struct shape stored;

    if (!zarr_take_dims(v, &stored) || stored.nd != a->shape.nd) {
        zarr_refuse(a, "chunks inside a shard have not the dimensions of the array");
        return;
    }
    memcpy(a->shard_order, a->order, sizeof a->shard_order);
    a->inner.nd = stored.nd;
    for (uint32_t k = 0; k < stored.nd; k++)
        a->inner.dim[a->order[k]] = stored.dim[k];
}

static void take_sharding(struct codecs *x, const struct json *config)
{
    struct zarr_array *a = x->a;
    struct codecs inside = {.a = a, .chain = &a->chain, .inside = true};

    if (x->inside) {
        zarr_refuse(a, "shards inside shards are not supported");
        return;
    }
    a->sharded = true;
    x->to_bytes = true;
    take_inner_shape(a, json_get(config, "chunk_shape"));
    take_index_codecs(a, json_get(config, "index_codecs"));
    take_index_location(a, json_get(config, "index_location"));
    take_codecs(&inside, json_get(config, "codecs"));
}

static bool is_delta(const char *name)
{
    return strcmp(name, "numcodecs.delta") == 0;
}

/* Elements to elements: in front of what makes bytes of them. */
static void take_on_elements(struct codecs *x, const struct named *codec)
{
    if (strcmp(codec->name, "transpose") == 0) {
        take_transpose(x, codec->config);
    } else if (is_delta(codec->name)) {
        zarr_take_codec(x->a, x->chain, codec->name, codec->config, "codec");
        x->delta = true;
    } else if (strcmp(codec->name, "bytes") == 0 ||
               strcmp(codec->name, "endian") == 0) {
        take_bytes(x, codec->config);
    } else if (strcmp(codec->name, "sharding_indexed") == 0) {
        take_sharding(x, codec->config);
    } else {
        zarr_refuse(x->a, "codec \"%.60s\" is not supported where elements are",
                    codec->name);
    }
}

static void take_on_bytes(struct codecs *x, const struct named *codec)
{
    if (x->a->sharded && !x->inside)
        zarr_refuse(x->a, "codec \"%.60s\" over whole shards is not supported",
                    codec->name);
    else if (is_delta(codec->name))
        zarr_refuse(x->a, "codec \"%.60s\" is not supported where bytes are",
                    codec->name);
    else
        zarr_take_codec(x->a, x->chain, codec->name, codec->config, "codec");
}

static void take_codecs(struct codecs *x, const struct json *list)
{
    struct named codec;

    if (!list || json_kind(list) != JSON_ARRAY) {
        zarr_refuse(x->a, "codecs are no list");
        return;
    }
    for (const struct json *v = json_first(list); v && !x->a->why[0];
         v = json_next(v)) {
        if (!take_named(v, &codec))
            zarr_refuse(x->a, "a codec without a name");
        else if (x->to_bytes)
            take_on_bytes(x, &codec);
        else
            take_on_elements(x, &codec);
    }
    if (!x->to_bytes)
        zarr_refuse(x->a, "no codec makes bytes of the elements");
    /* NumPy flattens a transposed view in the order of its memory. */
    if (x->delta && (x->transposed || x->a->big_endian || x->a->sharded))
        zarr_refuse(x->a, "delta is supported alone, on little-endian elements");
}

/* ---- the document ---- */

/* What is not known must say that it may be passed over. */
static void check_members(struct zarr_array *a, const struct json *doc)
{
    static const char *const known[] = {
        "zarr_format",        "node_type",           "shape",
        "data_type",          "chunk_grid",          "codecs",
        "fill_value",         "attributes",          "dimension_names",
        "chunk_key_encoding", "storage_transformers"};

    for (const struct json *v = json_first(doc); v; v = json_next(v)) {
        bool must = true, found = false;

        for (size_t i = 0; i < ARRAY_SIZE(known); i++)
            found |= strcmp(json_key(v), known[i]) == 0;
        if (!found && (json_kind(v) != JSON_OBJECT ||
                       !json_bool(json_get(v, "must_understand"), &must) || must))
            zarr_refuse(a, "extension \"%.60s\" is not supported", json_key(v));
    }
}

static void check_transformers(struct zarr_array *a, const struct json *v)
{
    if (v && (json_kind(v) != JSON_ARRAY || json_count(v) > 0))
        zarr_refuse(a, "storage transformers are not supported");
}

static void take_document(struct zarr_array *a, const struct json *doc,
                          const char *text, size_t len)
{
    const struct json *fill = json_get(doc, "fill_value");
    struct codecs codecs = {.a = a, .chain = &a->chain};
    const char *type = "";
    uint64_t version = 0;

    if (json_kind(doc) != JSON_OBJECT) {
        zarr_refuse(a, "its zarr.json is no JSON object");
        return;
    }
    if (!json_u64(json_get(doc, "zarr_format"), &version) || version != 3)
        zarr_refuse(a, "its zarr.json is not of zarr_format 3, the only one of it");
    if (!json_string(json_get(doc, "node_type"), &type) || strcmp(type, "array") != 0)
        zarr_refuse(a, "node_type \"%.40s\" is not array", type);
    take_dtype(a, json_get(doc, "data_type"));
    take_shapes(a, doc);
    take_keys(a, doc);
    for (uint32_t k = 0; k < a->shape.nd; k++)
        a->order[k] = (uint8_t)k;
    if (!a->why[0])
        take_codecs(&codecs, json_get(doc, "codecs"));
    zarr_chain_reverse(&a->chain);
    check_transformers(a, json_get(doc, "storage_transformers"));
    check_members(a, doc);
    zarr_settle(a);
    if (!a->why[0] && fill && json_kind(fill) != JSON_NULL)
        zarr_take_fill(a, fill, text, len, false);
}

int zarr_parse_v3(const char *text, size_t len, struct zarr_array *out, struct err *e)
{
    static const struct json_limits limits = {.bytes = ZARR_MAX_JSON};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0};

    *out = (struct zarr_array){.format = 3, .dtype = DTYPE_U8, .shape.nd = 1};
    if (json_parse(text, len, &limits, &doc, &why) == 0)
        take_document(out, doc, text, len);
    else if (why.code == ENOMEM)
        return err_nomem(e);
    else
        zarr_refuse(out, "its zarr.json: %.200s", why.text);
    return 0;
}
