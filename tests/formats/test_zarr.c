/* SPDX-License-Identifier: MIT */
/* tests/formats/test_zarr.c - zarr arrays and groups: metadata word by word, grids, trees. */
#include "made.h"

#include <errno.h>
#include <lz4.h>
#include <stdio.h>
#include <string.h>

#include "base/endian.h"
#include "base/err.h"
#include "base/pool.h"
#include "gpu/reader.h"
#include "index/formats/format.h"
#include "index/formats/zarr/zarr_array.h"
#include "index/formats/zarr/zarr_priv.h"
#include "index/formats/zstd_fail.h"
#include "remote/open_files.h"
#include "remote/source.h"
#include "tests/unit/unit.h"

/* ---- metadata ---- */

static const char v2_text[] = "{\"zarr_format\": 2, \"shape\": %s, \"chunks\": %s, "
                              "\"dtype\": %s, \"order\": \"C\", \"compressor\": null, "
                              "\"filters\": null, \"fill_value\": %s%s}";

static const char v3_text[] =
    "{\"zarr_format\": 3, \"node_type\": \"array\", \"shape\": %s, \"chunk_grid\": "
    "{\"name\": \"regular\", \"configuration\": {\"chunk_shape\": %s}}, \"data_type\": %s, "
    "\"fill_value\": %s, \"chunk_key_encoding\": {\"name\": \"default\"}, "
    "\"codecs\": [{\"name\": \"bytes\", \"configuration\": {\"endian\": \"little\"}}]%s}";

static struct zarr_array parse(unsigned format, const char *text)
{
    struct zarr_array a;
    struct err e = {0};

    if (format == 2)
        assert_ok(zarr_parse_v2(text, strlen(text), &a, &e), &e);
    else
        assert_ok(zarr_parse_v3(text, strlen(text), &a, &e), &e);
    return a;
}

static struct zarr_array parse_type(unsigned format, const char *dtype,
                                    const char *fill)
{
    char text[2000];

    snprintf(text, sizeof text, format == 2 ? v2_text : v3_text, "[4]", "[2]", dtype,
             fill, "");
    return parse(format, text);
}

/* Every type by its name, and the bits of its fill value. */
static void test_fill_values(void **state)
{
    static const struct {
        unsigned format;
        const char *dtype, *fill;
        enum dtype want;
        uint64_t bits; /* the first eight bytes */
    } cases[] = {
        {2, "\"|b1\"", "true", DTYPE_BOOL, 1},
        {2, "\"|b1\"", "0", DTYPE_BOOL, 0},
        {2, "\"|i1\"", "-128", DTYPE_I8, 0xffffffffffffff80},
        {2, "\"|u1\"", "255", DTYPE_U8, 255},
        {2, "\"<i2\"", "-2", DTYPE_I16, 0xfffffffffffffffe},
        {2, "\">u2\"", "65535", DTYPE_U16, 65535},
        {2, "\"<i4\"", "-2147483648", DTYPE_I32, 0xffffffff80000000},
        {2, "\"<u4\"", "3.0", DTYPE_U32, 3},
        {2, "\"<i8\"", "-9223372036854775808", DTYPE_I64, 0x8000000000000000},
        {2, "\"<u8\"", "18446744073709551615", DTYPE_U64, UINT64_MAX},
        {2, "\"<u8\"", "9007199254740993", DTYPE_U64, 9007199254740993},
        {2, "\"<f2\"", "65504", DTYPE_F16, 0x7bff},
        {2, "\"<f2\"", "65520", DTYPE_F16, 0x7c00},
        {2, "\"<f2\"", "6e-8", DTYPE_F16, 1},
        {2, "\"<f2\"", "-0.1", DTYPE_F16, 0xae66},
        {2, "\"<f2\"", "\"-Infinity\"", DTYPE_F16, 0xfc00},
        {2, "\">f4\"", "0.1", DTYPE_F32, 0x3dcccccd},
        {2, "\"<f4\"", "\"NaN\"", DTYPE_F32, 0x7fc00000},
        {2, "\"<f8\"", "0.1", DTYPE_F64, 0x3fb999999999999a},
        {2, "\"<f8\"", "\"NaN\"", DTYPE_F64, 0x7ff8000000000000},
        {2, "\"<f8\"", "-0.0", DTYPE_F64, 0x8000000000000000},
        {2, "\"<f8\"", "-0", DTYPE_F64, 0}, /* an integer to those who write zarr */
        {2, "\"<c8\"", "[-0, -0.0]", DTYPE_C64, 0x8000000000000000},
        {2, "\"<c8\"", "[1.0, \"-Infinity\"]", DTYPE_C64, 0xff8000003f800000},
        {2, "\"|V2\"", "\"gD8=\"", DTYPE_BF16, 0x3f80},
        {2, "\"<V2\"", "1.0", DTYPE_BF16, 0x3f80},
        {2, "\"bfloat16\"", "1.00390625", DTYPE_BF16, 0x3f80}, /* a tie: to even */
        {2, "\"float8_e4m3fn\"", "448", DTYPE_F8_E4M3, 0x7e},
        {2, "\"float8_e4m3fn\"", "1000", DTYPE_F8_E4M3, 0x7f},
        {2, "\"float8_e4m3fn\"", "0.001953125", DTYPE_F8_E4M3, 1},
        {2, "\"float8_e5m2\"", "-57344", DTYPE_F8_E5M2, 0xfb},
        {2, "\"float8_e5m2\"", "1e9", DTYPE_F8_E5M2, 0x7c},
        {2, "\"float8_e4m3fnuz\"", "-0.0", DTYPE_F8_E4M3FNUZ, 0},
        {2, "\"float8_e4m3fnuz\"", "240", DTYPE_F8_E4M3FNUZ, 0x7f},
        {2, "\"float8_e5m2fnuz\"", "\"NaN\"", DTYPE_F8_E5M2FNUZ, 0x80},
        {3, "\"bool\"", "false", DTYPE_BOOL, 0},
        {3, "\"int8\"", "-1", DTYPE_I8, UINT64_MAX},
        {3, "\"uint64\"", "18446744073709551615", DTYPE_U64, UINT64_MAX},
        {3, "\"float16\"", "-0", DTYPE_F16, 0},
        {3, "\"float32\"", "\"0x7fc00001\"", DTYPE_F32, 0x7fc00001},
        {3, "\"bfloat16\"", "\"0x3F80\"", DTYPE_BF16, 0x3f80},
        {3, "\"float16\"", "\"Infinity\"", DTYPE_F16, 0x7c00},
        {3, "\"complex64\"", "[\"0x3f800000\", \"NaN\"]", DTYPE_C64,
         0x7fc000003f800000},
        {3, "\"float8_e5m2\"", "0.0", DTYPE_F8_E5M2, 0},
        {3, "{\"name\": \"int16\"}", "7", DTYPE_I16, 7},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct zarr_array a =
            parse_type(cases[i].format, cases[i].dtype, cases[i].fill);

        if (a.why[0] || !a.has_fill || a.dtype != cases[i].want ||
            get_le64(a.fill) != cases[i].bits)
            fail_msg("%s %s: %s %s, %016" PRIx64 " (%s)", cases[i].dtype, cases[i].fill,
                     dtype_name(a.dtype), a.has_fill ? "filled" : "not filled",
                     get_le64(a.fill), a.why);
    }
    assert_false(parse_type(2, "\"<f4\"", "null").has_fill);
}

/* Types of a byte that are shown as they are: their fill value where it is sure. */
static void test_byte_types(void **state)
{
    static const struct {
        unsigned format;
        const char *dtype, *fill;
        enum dtype want;
        const char *name; /* or NULL */
        bool filled;
        unsigned char bits;
    } cases[] = {
        {2, "\"int4\"", "0", DTYPE_U8, "int4", true, 0},
        {2, "\"int4\"", "-1", DTYPE_U8, "int4", false, 0},
        {2, "\"int2\"", "null", DTYPE_U8, "int2", false, 0},
        {3, "\"int4\"", "0", DTYPE_U8, "int4", true, 0},
        {3, "\"uint4\"", "7", DTYPE_U8, "uint4", false, 0},
        {3, "\"float8_e3m4\"", "0.0", DTYPE_U8, "float8_e3m4", true, 0},
        {3, "\"float8_e3m4\"", "-0.0", DTYPE_U8, "float8_e3m4", false, 0},
        {3, "\"float8_e3m4\"", "\"0x7c\"", DTYPE_U8, "float8_e3m4", true, 0x7c},
        {3, "\"float4_e2m1fn\"", "\"NaN\"", DTYPE_U8, "float4_e2m1fn", false, 0},
        {2, "\"float8_e8m0fnu\"", "1.0", DTYPE_F8_E8M0, NULL, false, 0},
        {3, "\"float8_e8m0fnu\"", "0.0", DTYPE_F8_E8M0, NULL, false, 0},
        {3, "\"float8_e8m0fnu\"", "\"0xff\"", DTYPE_F8_E8M0, NULL, true, 0xff},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct zarr_array a =
            parse_type(cases[i].format, cases[i].dtype, cases[i].fill);

        if (a.why[0] || a.dtype != cases[i].want || a.has_fill != cases[i].filled ||
            (a.has_fill && a.fill[0] != cases[i].bits) ||
            (cases[i].name ? !a.numpy_dtype || strcmp(a.numpy_dtype, cases[i].name) != 0
                           : a.numpy_dtype != NULL))
            fail_msg("%s %s: %s (%s), %s %02x (%s)", cases[i].dtype, cases[i].fill,
                     dtype_name(a.dtype), a.numpy_dtype ? a.numpy_dtype : "named",
                     a.has_fill ? "filled" : "not filled", a.fill[0], a.why);
    }
}

static void test_bad_fill_values(void **state)
{
    static const struct {
        unsigned format;
        const char *dtype, *fill;
    } cases[] = {
        {2, "\"|b1\"", "2"},
        {2, "\"|b1\"", "\"true\""},
        {2, "\"|i1\"", "128"},
        {2, "\"|i1\"", "-129"},
        {2, "\"|u1\"", "-1"},
        {2, "\"<u8\"", "18446744073709551616"},
        {2, "\"<i4\"", "1.5"},
        {2, "\"<i4\"", "1e3"},
        {2, "\"<i4\"", "\"1\""},
        {2, "\"<i4\"", "true"},
        {2, "\"<f4\"", "\"evil\""},
        {2, "\"<f4\"", "\"0x7fc00000\""},
        {2, "\"<f4\"", "[1]"},
        {2, "\"<c8\"", "1"},
        {2, "\"<c8\"", "[1]"},
        {2, "\"|V2\"", "\"AA==\""},
        {3, "\"float32\"", "\"0x7fc0\""},
        {3, "\"float32\"", "\"0x7fc0000g\""},
        {3, "\"float16\"", "{}"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct zarr_array a =
            parse_type(cases[i].format, cases[i].dtype, cases[i].fill);

        if (!strstr(a.why, "fill_value is no"))
            fail_msg("%s %s: \"%s\"", cases[i].dtype, cases[i].fill, a.why);
    }
}

/* What is refused, each by name. */
static void test_refused(void **state)
{
    static const struct {
        unsigned format;
        const char *dtype, *more, *why;
    } cases[] = {
        {2, "\"|f4\"", "", "has no byte order"},
        {2, "\"int12\"", "", "element type \"int12\""},
        {2, "\"<M8[ns]\"", "", "element type \"<M8[ns]\""},
        {2, "[[\"a\", \"<f4\"]]", "", "structured"},
        {3, "\"int12\"", "", "element type \"int12\""},
        {3, "{\"name\": \"int4\", \"configuration\": {\"x\": 1}}", "",
         "element type \"int4\""},
        {3, "{\"name\": \"numpy.datetime64\", \"configuration\": {\"unit\": \"s\"}}",
         "", "element type \"numpy.datetime64\""},
        {3, "\"int8\"", ", \"evil\": {\"must_understand\": true}",
         "extension \"evil\""},
        {3, "\"int8\"", ", \"evil\": 1", "extension \"evil\""},
        {3, "\"int8\"", ", \"storage_transformers\": [{}]", "storage transformers"},
        {3, "\"int8\"", ", \"x\": {\"must_understand\": false}", ""},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[2000];
        struct zarr_array a;

        snprintf(text, sizeof text, cases[i].format == 2 ? v2_text : v3_text, "[4]",
                 "[2]", cases[i].dtype, "0", cases[i].more);
        a = parse(cases[i].format, text);
        if (cases[i].why[0] ? !strstr(a.why, cases[i].why) : a.why[0])
            fail_msg("%s%s: \"%s\"", cases[i].dtype, cases[i].more, a.why);
    }
}

#define BIG "{\"name\": \"bytes\", \"configuration\": {\"endian\": \"big\"}}"

static void test_v3_codecs(void **state)
{
    static const char head[] =
        "{\"zarr_format\": 3, \"node_type\": \"array\", \"shape\": [4, 6], "
        "\"chunk_grid\": {\"name\": \"regular\", \"configuration\": {\"chunk_shape\": "
        "[4, 6]}}, \"data_type\": \"int32\", \"fill_value\": 0, \"chunk_key_encoding\": "
        "\"default\", \"codecs\": [%s]}";
    static const struct {
        const char *codecs;
        const char *why;
    } cases[] = {
        {BIG, ""},
        {BIG ", {\"name\": \"crc32c\"}, \"gzip\"", ""},
        {BIG ", {\"name\": \"numcodecs.lz4\"}, {\"name\": \"numcodecs.bz2\"}", ""},
        {"{\"name\": \"transpose\", \"configuration\": {\"order\": \"F\"}}, " BIG, ""},
        {"{\"name\": \"transpose\", \"configuration\": {\"order\": [1, 1]}}, " BIG,
         "no permutation"},
        {"{\"name\": \"transpose\", \"configuration\": {\"order\": [1, 2]}}, " BIG,
         "no permutation"},
        {"{\"name\": \"transpose\", \"configuration\": {\"order\": [0]}}, " BIG,
         "no permutation"},
        {"{\"name\": \"bytes\"}", "no endian"},
        {"{\"name\": \"zstd\"}, " BIG, "not supported where elements are"},
        {BIG ", {\"name\": \"transpose\", \"configuration\": {\"order\": [1, 0]}}",
         "codec \"transpose\" is not supported"},
        {BIG ", {\"name\": \"pcodec\"}", "codec \"pcodec\""},
        {BIG ", {\"name\": \"numcodecs.shuffle\"}", ""},
        {BIG ", {\"name\": \"numcodecs.astype\"}", "codec \"numcodecs.astype\""},
        {"{\"name\": \"numcodecs.delta\", \"configuration\": {\"dtype\": \"<i4\"}}, " BIG,
         "delta is supported alone"},
        {"", "no codec makes bytes"},
        {"7", "a codec without a name"},
        {"{\"name\": \"sharding_indexed\", \"configuration\": {\"chunk_shape\": [2, 3], "
         "\"codecs\": [" BIG "], \"index_codecs\": [" BIG "]}}",
         ""},
        {"{\"name\": \"sharding_indexed\", \"configuration\": {\"chunk_shape\": [2, 4], "
         "\"codecs\": [" BIG "], \"index_codecs\": [" BIG "]}}",
         "do not divide"},
        {"{\"name\": \"sharding_indexed\", \"configuration\": {\"chunk_shape\": [2], "
         "\"codecs\": [" BIG "], \"index_codecs\": [" BIG "]}}",
         "have not the dimensions"},
        {"{\"name\": \"sharding_indexed\", \"configuration\": {\"chunk_shape\": [2, 3], "
         "\"codecs\": [" BIG "], \"index_codecs\": [" BIG ", {\"name\": \"zstd\"}]}}",
         "index codec \"zstd\""},
        {"{\"name\": \"sharding_indexed\", \"configuration\": {\"chunk_shape\": [2, 3], "
         "\"codecs\": [" BIG "], \"index_codecs\": [" BIG
         "], \"index_location\": \"middle\"}}",
         "neither start nor end"},
        {"{\"name\": \"sharding_indexed\", \"configuration\": {\"chunk_shape\": [2, 3], "
         "\"codecs\": [" BIG "], \"index_codecs\": [" BIG "]}}, {\"name\": \"zstd\"}",
         "over whole shards"},
        {"{\"name\": \"sharding_indexed\", \"configuration\": {\"chunk_shape\": [2, 3], "
         "\"codecs\": [{\"name\": \"sharding_indexed\", \"configuration\": {}}], "
         "\"index_codecs\": [" BIG "]}}",
         "shards inside shards"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[2000];
        struct zarr_array a;

        snprintf(text, sizeof text, head, cases[i].codecs);
        a = parse(3, text);
        if (cases[i].why[0] ? !strstr(a.why, cases[i].why) : a.why[0])
            fail_msg("%s: \"%s\"", cases[i].codecs, a.why);
    }
}

/* ---- documents with one member that is none ---- */

#define BYTES "[{\"name\": \"bytes\", \"configuration\": {\"endian\": \"little\"}}]"
#define GRID(shape)                                                                    \
    "{\"name\": \"regular\", \"configuration\": {\"chunk_shape\": " shape "}}"
#define V3(head, shape, grid, type, keys, codecs)                                      \
    "{" head ", \"shape\": " shape ", \"chunk_grid\": " grid ", \"data_type\": " type  \
    ", \"fill_value\": 0, \"chunk_key_encoding\": " keys ", \"codecs\": " codecs "}"
#define HEAD3 "\"zarr_format\": 3, \"node_type\": \"array\""
#define SHARD(index)                                                                   \
    "[{\"name\": \"sharding_indexed\", \"configuration\": {\"chunk_shape\": [2], "     \
    "\"codecs\": " BYTES ", \"index_codecs\": " index "}}]"
#define V2(head, shape, chunks, order, filters, compressor)                            \
    "{" head ", \"shape\": " shape ", \"chunks\": " chunks                             \
    ", \"dtype\": \"<i4\", \"order\": " order ", \"filters\": " filters                \
    ", \"compressor\": " compressor ", \"fill_value\": 0}"
#define HEAD2 "\"zarr_format\": 2"
#define ZLIB "{\"id\": \"zlib\"}"
#define DELTA(from, to)                                                                \
    "[{\"id\": \"delta\", \"dtype\": \"" from "\", \"astype\": \"" to "\"}]"
#define SHUFFLE(size) "[{\"id\": \"shuffle\", \"elementsize\": " size "}]"
#define SCALE(more)                                                                    \
    "[{\"id\": \"fixedscaleoffset\", \"dtype\": \"<f4\", \"astype\": \"<i4\"" more "}]"

static void test_documents(void **state)
{
    static const struct {
        unsigned format;
        const char *text, *why; /* "": it is taken */
    } cases[] = {
        {3, V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"", "\"default\"", BYTES), ""},
        {3, "[]", "its zarr.json is no JSON object"},
        {3, "{", "its zarr.json: "},
        {3,
         V3("\"node_type\": \"array\"", "[4]", GRID("[2]"), "\"int8\"", "\"v2\"",
            BYTES),
         "its zarr.json is not of zarr_format 3"},
        {3,
         V3("\"zarr_format\": 2, \"node_type\": \"array\"", "[4]", GRID("[2]"),
            "\"int8\"", "\"v2\"", BYTES),
         "its zarr.json is not of zarr_format 3"},
        {3,
         V3("\"zarr_format\": 3, \"node_type\": \"group\"", "[4]", GRID("[2]"),
            "\"int8\"", "\"v2\"", BYTES),
         "node_type \"group\" is not array"},
        {3, V3("\"zarr_format\": 3", "[4]", GRID("[2]"), "\"int8\"", "\"v2\"", BYTES),
         "node_type \"\" is not array"},
        {3, V3(HEAD3, "4", GRID("[2]"), "\"int8\"", "\"v2\"", BYTES),
         "shape is no list of numbers"},
        {3, V3(HEAD3, "[-4]", GRID("[2]"), "\"int8\"", "\"v2\"", BYTES),
         "shape is no list of numbers"},
        {3, V3(HEAD3, "[4.5]", GRID("[2]"), "\"int8\"", "\"v2\"", BYTES),
         "shape is no list of numbers"},
        {3, V3(HEAD3, "[4]", "{\"name\": \"odd\"}", "\"int8\"", "\"v2\"", BYTES),
         "chunk_grid \"odd\" is not supported"},
        {3, V3(HEAD3, "[4]", "7", "\"int8\"", "\"v2\"", BYTES),
         "chunk_grid \"\" is not supported"},
        {3, V3(HEAD3, "[4]", "\"regular\"", "\"int8\"", "\"v2\"", BYTES),
         "chunk_shape is no list of numbers"},
        {3, V3(HEAD3, "[4]", GRID("2"), "\"int8\"", "\"v2\"", BYTES),
         "chunk_shape is no list of numbers"},
        {3, V3(HEAD3, "[4]", GRID("[2, 2]"), "\"int8\"", "\"v2\"", BYTES),
         "shape has 1 dimensions, chunks have 2"},
        {3, V3(HEAD3, "[4]", GRID("[0]"), "\"int8\"", "\"v2\"", BYTES),
         "a chunk of no elements"},
        {3,
         V3(HEAD3, "[4194304, 4194304, 4194304]", GRID("[1, 1, 1]"), "\"int8\"",
            "\"v2\"", BYTES),
         "its shape: "},
        {3,
         V3(HEAD3, "[1, 1, 1]", GRID("[4194304, 4194304, 4194304]"), "\"int8\"",
            "\"v2\"", BYTES),
         "its chunks: "},
        {3, V3(HEAD3, "[4]", GRID("[2]"), "8", "\"v2\"", BYTES),
         "data_type has no name"},
        {3, V3(HEAD3, "[4]", GRID("[2]"), "{\"configuration\": {}}", "\"v2\"", BYTES),
         "data_type has no name"},
        {3, V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"", "\"v3\"", BYTES),
         "chunk_key_encoding \"v3\" is not supported"},
        {3,
         V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"",
            "{\"name\": \"v2\", \"configuration\": {\"separator\": \"..\"}}", BYTES),
         "the separator of chunk keys is neither"},
        {3,
         V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"",
            "{\"name\": \"v2\", \"configuration\": {\"separator\": 1}}", BYTES),
         "the separator of chunk keys is neither"},
        {3, V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"", "\"v2\"", "{}"),
         "codecs are no list"},
        {3,
         V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"", "\"v2\"",
            "[\"bytes\", {\"name\": \"numcodecs.delta\"}]"),
         "codec \"numcodecs.delta\" is not supported where bytes are"},
        {3,
         V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"", "\"v2\"",
            "[\"bytes\", \"gzip\", \"gzip\", \"gzip\", \"gzip\", \"gzip\", \"gzip\", "
            "\"gzip\", \"gzip\"]"),
         ""},
        {3,
         V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"", "\"v2\"",
            "[\"bytes\", \"gzip\", \"gzip\", \"gzip\", \"gzip\", \"gzip\", \"gzip\", "
            "\"gzip\", \"gzip\", \"gzip\"]"),
         "more than 8 codecs"},
        {3, V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"", "\"v2\"", SHARD(BYTES)), ""},
        {3, V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"", "\"v2\"", SHARD("[]")),
         "index_codecs do not begin with bytes of an endian"},
        {3, V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"", "\"v2\"", SHARD("{}")),
         "index_codecs do not begin with bytes of an endian"},
        {3, V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"", "\"v2\"", SHARD("[\"crc32c\"]")),
         "index_codecs do not begin with bytes of an endian"},
        {3, V3(HEAD3, "[4]", GRID("[2]"), "\"int8\"", "\"v2\"", SHARD("[\"bytes\"]")),
         "index_codecs do not begin with bytes of an endian"},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", "null", "null"), ""},
        {2, "7", "its .zarray is no JSON object"},
        {2, "{", "its .zarray: "},
        {2, V2("\"zarr_format\": 3", "[4]", "[2]", "\"C\"", "null", "null"),
         "its .zarray is not of zarr_format 2"},
        {2, V2(HEAD2, "{}", "[2]", "\"C\"", "null", "null"),
         "shape is no list of numbers"},
        {2, V2(HEAD2, "[4]", "[\"2\"]", "\"C\"", "null", "null"),
         "chunks is no list of numbers"},
        {2, V2(HEAD2, "[4]", "[2]", "\"A\"", "null", "null"),
         "order \"A\" is neither C nor F"},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", "{}", "null"), "filters are no list"},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", "[7]", "null"), "a filter without an id"},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", "null", "{\"level\": 1}"),
         "a compressor without an id"},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", DELTA("<i4", "|i1"), ZLIB), ""},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", DELTA("<i4", "<f4"), ZLIB),
         "filter \"delta\" from \"<i4\" to \"<f4\""},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", DELTA("<f4", "<f8"), ZLIB),
         "filter \"delta\" from \"<f4\" to \"<f8\""},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", DELTA("|i4", "|i4"), ZLIB),
         "filter \"delta\" from \"|i4\""},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", DELTA("i4", "<i4"), ZLIB),
         "filter \"delta\" from \"i4\""},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", "null", "{\"id\": \"lzma\"}"), ""},
        {2,
         V2(HEAD2, "[4]", "[2]", "\"C\"", "null", "{\"id\": \"lzma\", \"format\": 2}"),
         ""},
        {2,
         V2(HEAD2, "[4]", "[2]", "\"C\"", "null", "{\"id\": \"lzma\", \"format\": 3}"),
         "compressor \"lzma\" of a format other than"},
        {2,
         V2(HEAD2, "[4]", "[2]", "\"C\"", "null",
            "{\"id\": \"lzma\", \"format\": \"1\"}"),
         "compressor \"lzma\" of a format other than"},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", SHUFFLE("9999"), ZLIB), ""},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", SHUFFLE("10000"), ZLIB),
         "filter \"shuffle\" of no size of elements"},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", SHUFFLE("-1"), ZLIB),
         "filter \"shuffle\" of no size of elements"},
        {2,
         V2(HEAD2, "[4]", "[2]", "\"C\"", SCALE(", \"scale\": 2, \"offset\": 0"), ZLIB),
         ""},
        {2,
         V2(HEAD2, "[4]", "[2]", "\"C\"", SCALE(", \"scale\": 0, \"offset\": 0"), ZLIB),
         "filter \"fixedscaleoffset\" without scale and offset"},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", SCALE(", \"scale\": 2"), ZLIB),
         "filter \"fixedscaleoffset\" without scale and offset"},
        {2,
         V2(HEAD2, "[4]", "[2]", "\"C\"",
            "[{\"id\": \"astype\", \"decode_dtype\": \"<i4\", \"encode_dtype\": "
            "\"<i3\"}]",
            ZLIB),
         "filter \"astype\" from \"<i4\" to \"<i3\""},
        {2, V2(HEAD2, "[4]", "[2]", "\"C\"", "null", "{\"id\": \"crc32c\"}"),
         "compressor \"crc32c\" is not supported"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct zarr_array a = parse(cases[i].format, cases[i].text);

        if (cases[i].why[0] ? !strstr(a.why, cases[i].why) : a.why[0])
            fail_msg("%s: \"%s\", it should say \"%s\"", cases[i].text, a.why,
                     cases[i].why);
    }
}

/* ---- what the index keeps ---- */

static void test_spec(void **state)
{
    static const char *const bad[] = {
        "",
        "zarr1",
        "zarr1 ",
        "zarr1 x ",
        "zarr2 4 ",
        "zarr1 4",
        "zarr1 4 lz5",
        "zarr1 4 lz4,",
        "zarr1 4 lz4 ",
        "zarr1 4 delta",
        "zarr1 4 delta:<i4",
        "zarr1 4 shuffle",
        "zarr1 4 cast:<i4",
        "zarr1 4 scale:<f4:<i4",
        "zarr1 4 scale:<f4:<i4:3ff0000000000000",
        "zarr1 4 scale:<f4:<i4:3ff0000000000000:1",
        "zarr1 4 scale:<f4:<i4:3ff000000000000x:3ff0000000000000",
        "zarr1 4 lz4,lz4,lz4,lz4,lz4,lz4,lz4,lz4,lz4",
        "zarr1 18446744073709551616 ",
    };
    struct zarr_spec spec;
    struct err e = {0};
    const char *text = "zarr1 96 zstd,delta:<i4:<i2,crc32c\nab\ncd";

    (void)state;
    assert_ok(zarr_spec_read(text, strlen(text), &spec, &e), &e);
    assert_int_equal(spec.bytes, 96);
    assert_int_equal(spec.chain.n, 3);
    assert_int_equal(spec.chain.codec[1].kind, ZARR_DELTA);
    assert_string_equal(spec.chain.codec[1].arg[1], "<i2");
    assert_int_equal(spec.literal_len, 5);
    assert_memory_equal(spec.literal, "ab\ncd", 5);
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
        if (zarr_spec_read(bad[i], strlen(bad[i]), &spec, &e) != -EBADMSG)
            fail_msg("\"%s\" was read", bad[i]);
}

/* ---- grids ---- */

static void made_array(const struct made *m, const char *path, const char *shape,
                       const char *chunks, const char *dtype, const char *fill,
                       const char *more)
{
    char name[200], text[1000];

    snprintf(name, sizeof name, "%s%s.zarray", path, path[0] ? "/" : "");
    snprintf(text, sizeof text, v2_text, shape, chunks, dtype, fill, more);
    made_text(m, name, text);
}

static void finish(const struct made *m, struct opened *o)
{
    close_checkpoint(o);
    made_end(m);
}

static void check_bytes(struct opened *o, const char *key, const void *want, size_t len)
{
    CLEANUP(buf_release) struct buf got = {0}, naive = {0};
    const struct tensor_info *t = tensor(o, key);
    struct err e = {0};

    if (t->fault)
        fail_msg("%s: %s", key, t->fault);
    assert_ok(read_tensor(&o->w, o->info.id, t, &got, &e), &e);
    assert_int_equal(got.len, len);
    assert_memory_equal(got.data, want, len);
    assert_ok(world_read(&o->w, o->info.id, t, &naive, &e), &e);
    assert_int_equal(naive.len, len);
    assert_memory_equal(naive.data, want, len);
}

/*
 * A grid of 3x4x5 cells of 2x2x2, of which each k-th is stored: what is between them becomes
 * boxes of the fill value, far fewer than cells.
 */
static void test_sparse_grids(void **state)
{
    enum { X = 5, Y = 8, Z = 9, CELLS = 3 * 4 * 5 };

    (void)state;
    for (unsigned every = 1; every <= CELLS + 1; every += every < 8 ? 1 : 13) {
        unsigned char want[X * Y * Z], chunk[8];
        struct made m;
        struct opened o;

        memset(want, 7, sizeof want);
        made_begin(&m, "sparse");
        made_array(&m, "a", "[5, 8, 9]", "[2, 2, 2]", "\"|u1\"", "7", "");
        for (unsigned n = every - 1; n < CELLS; n += every) {
            char name[40];
            unsigned x = n / 20, y = n / 5 % 4, z = n % 5;

            snprintf(name, sizeof name, "a/%u.%u.%u", x, y, z);
            memset(chunk, (int)(100 + n), sizeof chunk);
            made_file(&m, name, chunk, sizeof chunk);
            for (unsigned i = 0; i < 8; i++) {
                unsigned at[3] = {2 * x + i / 4, 2 * y + i / 2 % 2, 2 * z + i % 2};

                if (at[0] < X && at[1] < Y && at[2] < Z)
                    want[(at[0] * Y + at[1]) * Z + at[2]] = (unsigned char)(100 + n);
            }
        }
        made_open(&m, &o);
        check_bytes(&o, "a", want, sizeof want);
        if (every > CELLS)
            assert_int_equal(tensor(&o, "a")->chunks, 1);
        else
            assert_true(tensor(&o, "a")->chunks <= CELLS / every * 7 + 6);
        finish(&m, &o);
    }
}

/* Petabytes of nothing with one chunk in the middle are a few boxes. */
static void test_huge_grid(void **state)
{
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "huge");
    made_array(&m, "a", "[1000000, 1000000, 4]", "[1, 1, 4]", "\"<f4\"", "1.5", "");
    made_file(&m, "a/500000.500000.0", (const float[]){1, 2, 3, 4}, 16);
    made_file(&m, "a/1000000.0.0", "x", 1); /* beyond the grid: of no array's */
    made_open(&m, &o);
    assert_null(tensor(&o, "a")->fault);
    assert_int_equal(tensor(&o, "a")->bytes, 16000000000000);
    assert_int_equal(tensor(&o, "a")->chunks, 5);
    finish(&m, &o);
}

/* Beside an axis of no elements the others may count more cells than a number holds. */
static void test_empty_grid(void **state)
{
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "empty");
    made_array(&m, "a", "[0, 9007199254740991, 9007199254740991]", "[1, 1, 1]",
               "\"<f4\"", "0", "");
    made_file(&m, "a/0.0.0", "abcd", 4); /* of no cell: it is passed over */
    made_open(&m, &o);
    assert_int_equal(o.count, 1);
    check_bytes(&o, "a", "", 0);
    finish(&m, &o);
}

static void test_missing_chunks(void **state)
{
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "missing");
    made_array(&m, "null", "[4]", "[2]", "\"|u1\"", "null", "");
    made_file(&m, "null/1", "ab", 2);
    made_array(&m, "fill", "[4]", "[2]", "\"|u1\"", "9", "");
    made_file(&m, "fill/1", "ab", 2);
    made_array(&m, "short", "[4]", "[2]", "\"|u1\"", "9", "");
    made_file(&m, "short/1", "a", 1);
    made_array(&m, "none", "[0, 3]", "[2, 3]", "\"|u1\"", "null", "");
    made_array(&m, "zeros", "[]", "[]", "\"<f4\"", "0", "");
    made_open(&m, &o);
    assert_int_equal(o.count, 5);
    check_fault(&o, "null", "chunk 0 is missing, and fill_value is null");
    check_bytes(&o, "fill",
                "\x09\x09"
                "ab",
                4);
    check_fault(&o, "short", "chunk 1 has 1 bytes where all have 2");
    check_bytes(&o, "none", "", 0);
    check_floats(&o, "zeros", (const float[]){0}, 1);
    finish(&m, &o);
}

/* More files than an open tensor keeps open, in directories of their own. */
static void test_many_files(void **state)
{
    enum { ROWS = 40, COLUMNS = 30 };
    unsigned char want[ROWS * COLUMNS];
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "many");
    made_array(&m, "a", "[40, 30]", "[1, 1]", "\"|u1\"", "0",
               ", \"dimension_separator\": \"/\"");
    for (unsigned i = 0; i < ROWS * COLUMNS; i++) {
        char name[40];

        want[i] = (unsigned char)(i * 7);
        snprintf(name, sizeof name, "a/%u/%u", i / COLUMNS, i % COLUMNS);
        made_file(&m, name, &want[i], 1);
    }
    made_text(&m, "a/00/1", "x"); /* no key has zeros in front */
    made_text(&m, "a/1/-1", "x");
    made_text(&m, "a/1/1.tmp", "x");
    made_open(&m, &o);
    assert_int_equal(tensor(&o, "a")->chunks, ROWS * COLUMNS);
    check_bytes(&o, "a", want, sizeof want);
    finish(&m, &o);
}

/* ---- trees ---- */

static const char attributes[] = "{\"step\": 77, \"lr\": NaN}";

static void test_groups(void **state)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "groups");
    made_text(&m, ".zgroup", "{\"zarr_format\": 2}");
    made_text(&m, ".zattrs", attributes);
    made_array(&m, "a/b", "[1]", "[1]", "\"|u1\"", "0", "");
    made_file(&m, "a/b/0", "\x05", 1);
    made_text(&m, "a/b/.zattrs", "{\"unit\": \"m\"}");
    made_array(&m, "optimizer/m", "[1]", "[1]", "\"|u1\"", "4", "");
    made_text(&m, "notes/readme.txt", "hello");
    made_open(&m, &o);
    assert_string_equal(o.info.format, "zarr2-group");
    assert_int_equal(o.count, 2);
    check_bytes(&o, "a/b", "\x05", 1);
    check_bytes(&o, "optimizer/m", "\x04", 1);
    assert_int_equal(tensor(&o, "optimizer/m")->role, ROLE_OPTIMIZER);
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 77);
    all_objects(&o, &text);
    assert_string_equal(text.data, "a/b/attributes={\"unit\": \"m\"}\n"
                                   "attributes={\"step\": 77, \"lr\": "
                                   "{\"$type\":\"float\",\"value\":\"nan\"}}\n");
    check_warnings(&o, "");
    finish(&m, &o);
}

/* One step, however deep its arrays lie; not the run, and no step without its mark. */
static void test_levanter(void **state)
{
    static const char mark[] =
        "{\"step\": 20, \"timestamp\": \"2025-09-26T19:04:00\", \"is_temporary\": false}";
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "step-20");
    made_text(&m, "metadata.json", mark);
    made_array(&m, "model/layers/0/weight", "[1]", "[1]", "\"|u1\"", "1", "");
    made_array(&m, "opt_state/1/mu/layers/0/weight", "[1]", "[1]", "\"|u1\"", "2", "");
    made_array(&m, "training_key", "[1]", "[1]", "\"|u1\"", "3", "");
    made_open(&m, &o);
    assert_string_equal(o.info.format, "zarr2");
    assert_int_equal(o.count, 3);
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 20);
    check_bytes(&o, "model/layers/0/weight", "\1", 1);
    check_bytes(&o, "opt_state/1/mu/layers/0/weight", "\2", 1);
    assert_int_equal(tensor(&o, "model/layers/0/weight")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "opt_state/1/mu/layers/0/weight")->role,
                     ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "training_key")->role, ROLE_OTHER);
    finish(&m, &o);
}

/* zarr-python 3.1 writes attributes in front of zarr_format, however long they are. */
/* EasyDeL's: one of its arrays is lost. */
static void test_easydel(void **state)
{
    static const char list[] =
        "{\"format\": \"tensorstore\", \"version\": \"0.0.101\", \"prefixes\": {\"model\": "
        "[{\"path\": \"model/layers/0/kernel\"}, {\"path\": \"model/lost\"}], "
        "\"tx\": [{\"path\": \"tx/0/mu/kernel\"}]}}";
    struct made m;
    struct opened o;

    (void)state;
    for (int damaged = 0; damaged < 2; damaged++) {
        made_begin(&m, "run-500");
        made_file(&m, "tensorstore_index.json", list,
                  sizeof list - 1 - (size_t)damaged);
        made_text(&m, "config.json", "{}");
        made_array(&m, "model/layers/0/kernel", "[1]", "[1]", "\"|u1\"", "1", "");
        made_array(&m, "tx/0/mu/kernel", "[1]", "[1]", "\"|u1\"", "2", "");
        made_open(&m, &o);
        assert_int_equal(o.info.step, 500);
        check_bytes(&o, "model/layers/0/kernel", "\1", 1);
        check_bytes(&o, "tx/0/mu/kernel", "\2", 1);
        assert_int_equal(tensor(&o, "tx/0/mu/kernel")->role, ROLE_OPTIMIZER);
        assert_int_equal(o.count, damaged ? 2 : 3);
        if (!damaged)
            check_fault(&o, "model/lost", "tensorstore_index.json names it");
        assert_int_equal(o.info.warnings, damaged);
        finish(&m, &o);
    }
}

static void test_long_attributes(void **state)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    (void)state;
    buf_adds(&text, "{\n  \"attributes\": {\n    \"note\": \"");
    for (unsigned i = 0; i < 5000; i++)
        buf_addc(&text, 'x');
    buf_adds(&text, "\"\n  },\n  \"zarr_format\": 3,\n  \"node_type\": \"group\"\n}");
    assert_int_equal(buf_failed(&text), 0);
    made_begin(&m, "attributes");
    made_text(&m, "zarr.json", text.data);
    made_text(&m, "g/zarr.json", text.data);
    buf_clear(&text);
    buf_addf(&text, v3_text, "[2]", "[2]", "\"uint8\"", "0", "");
    made_text(&m, "g/a/zarr.json", text.data);
    made_file(&m, "g/a/c/0", "ab", 2);
    made_open(&m, &o);
    assert_string_equal(o.info.format, "zarr3-group");
    check_bytes(&o, "g/a", "ab", 2);
    finish(&m, &o);
}

/* An array that is the checkpoint itself has its directory's name. */
static void test_root_array(void **state)
{
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "weights.zarr");
    made_array(&m, "", "[2]", "[1]", "\"|u1\"", "0", "");
    made_file(&m, "0", "a", 1);
    made_file(&m, "1", "b", 1);
    made_open(&m, &o);
    assert_int_equal(o.count, 1);
    assert_string_equal(o.info.format, "zarr2");
    check_bytes(&o, "weights", "ab", 2);
    finish(&m, &o);
}

static void test_consolidated(void **state)
{
    static const char text[] =
        "{\"zarr_consolidated_format\": 1, \"metadata\": {\".zgroup\": {\"zarr_format\": "
        "2}, \"same/.zarray\": %s, \"other/.zarray\": %s, \"lost/.zarray\": %s}}";
    char same[400], other[400], all[2000];
    struct made m;
    struct opened o;

    (void)state;
    snprintf(same, sizeof same, v2_text, "[2]", "[2]", "\"|u1\"", "1", "");
    snprintf(other, sizeof other, v2_text, "[2]", "[2]", "\"|u1\"", "2", "");
    snprintf(all, sizeof all, text, same, other, same);
    made_begin(&m, "consolidated");
    made_text(&m, ".zgroup", "{\"zarr_format\": 2}");
    made_text(&m, ".zmetadata", all);
    made_text(&m, "same/.zarray", same);
    made_text(&m, "other/.zarray", same);
    made_text(&m, "new/.zarray", same);
    made_open(&m, &o);
    assert_int_equal(o.count, 4);
    check_bytes(&o, "same", "\1\1", 2);
    check_bytes(&o, "other", "\1\1", 2);
    check_bytes(&o, "new", "\1\1", 2);
    check_fault(&o, "lost", "stands in consolidated metadata, its own are missing");
    check_warnings(&o,
                   "consolidated: other: consolidated metadata differ from its own, "
                   "which are used\n"
                   "consolidated: consolidated metadata: 1 arrays are not in it\n");
    finish(&m, &o);
}

static void test_two_formats(void **state)
{
    char v3[1000];
    struct made m;
    struct opened o;

    (void)state;
    snprintf(v3, sizeof v3, v3_text, "[2]", "[2]", "\"uint8\"", "3", "");
    made_begin(&m, "both");
    made_array(&m, "a", "[2]", "[2]", "\"|u1\"", "2", "");
    made_text(&m, "a/zarr.json", v3);
    made_array(&m, "b", "[2]", "[2]", "\"|u1\"", "2", "");
    made_open(&m, &o);
    assert_string_equal(o.info.format, "zarr");
    check_bytes(&o, "a", "\3\3", 2);
    check_bytes(&o, "b", "\2\2", 2);
    check_warnings(&o, "two-formats: a: zarr.json is read, .zarray is not\n");
    finish(&m, &o);
}

/* ---- codecs ---- */

static int decode(const char *codecs, const void *data, size_t len, void *dst,
                  size_t size, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    struct zarr_spec spec;
    char text[100];

    snprintf(text, sizeof text, "zarr1 %zu %s", size, codecs);
    assert_ok(zarr_spec_read(text, strlen(text), &spec, e), e);
    assert_ok(source_from_memory(data, len, false, "chunk", &src, e), e);
    return zarr_decode(&spec.chain, src, dst, size, e);
}

/* Sums with the type of the differences, and the bytes of the elements. */
static void test_delta(void **state)
{
    static const unsigned char narrow[] = {0x64, 0x64, 0x64, 0xff};
    static const unsigned char big[] = {0, 1, 0xff, 0xff, 0, 3};
    unsigned char got[16];
    struct err e = {0};
    float f[3] = {1.5f, 0.25f, -2.0f}, sums[3] = {0};

    (void)state;
    assert_ok(decode("delta:<i4:|i1", narrow, 4, got, 16, &e), &e);
    assert_int_equal(get_le32(got), 100);
    assert_int_equal(get_le32(got + 8), 300);
    assert_int_equal(get_le32(got + 12), 299);
    assert_ok(decode("delta:|u1:|u1", narrow, 4, got, 4, &e), &e);
    assert_memory_equal(got, "\x64\xc8\x2c\x2b", 4);
    assert_ok(decode("delta:>i2:>i2", big, 6, got, 6, &e), &e);
    assert_memory_equal(got, "\0\1\0\0\0\3", 6);
    assert_ok(decode("delta:<f4:<f4", f, sizeof f, sums, sizeof sums, &e), &e);
    assert_true(sums[0] == 1.5f && sums[1] == 1.75f && sums[2] == -0.25f);
    assert_int_equal(decode("delta:<i4:<i4", narrow, 3, got, 4, &e), -EBADMSG);
    assert_int_equal(decode("delta:<i4:|i1", narrow, 4, got, 12, &e), -EBADMSG);
}

/* Filters whose values are out of reach of the type, and lengths that are none of theirs. */
static void test_filters(void **state)
{
    static const double far[] = {127.9, -128.9, 128};
    static const unsigned char bits[] = {5, 0xe0}, too_many[] = {8, 0xe0};
    static const char half[] = ":4000000000000000:0000000000000000"; /* / 2 + 0 */
    char scale[80];
    signed char narrow[3];
    unsigned char got[16];
    uint64_t most = UINT64_MAX;
    struct err e = {0};
    float f;

    (void)state;
    assert_ok(decode("cast:|i1:<f8", far, 16, narrow, 2, &e), &e);
    assert_true(narrow[0] == 127 && narrow[1] == -128);
    assert_int_equal(decode("cast:|i1:<f8", far, 24, narrow, 3, &e), -EBADMSG);
    assert_has(e.text, "gives 128 for an integer of 1 bytes");
    e = (struct err){0};
    assert_ok(decode("cast:<f4:<u8", &most, 8, &f, 4, &e), &e);
    assert_true(f == 0x1p64f);
    snprintf(scale, sizeof scale, "scale:|u1:|i1%s", half);
    assert_ok(decode(scale, "\7", 1, got, 1, &e), &e);
    assert_int_equal(got[0], 3);
    assert_int_equal(decode(scale, "\xfd", 1, got, 1, &e), -EBADMSG); /* -1.5: -1 */
    assert_int_equal(decode("shuffle:4", "abcdef", 6, got, 6, &e), -EBADMSG);
    e = (struct err){0};
    assert_ok(decode("shuffle:2", "abcdef", 6, got, 6, &e), &e);
    assert_memory_equal(got, "adbecf", 6);
    assert_ok(decode("bits", bits, 2, got, 3, &e), &e);
    assert_memory_equal(got, "\1\1\1", 3);
    assert_int_equal(decode("bits", bits, 2, got, 4, &e), -EBADMSG);
    assert_int_equal(decode("bits", too_many, 2, got, 1, &e), -EBADMSG);
    assert_int_equal(decode("bits", bits, 1, got, 1, &e), -EBADMSG);
    assert_int_equal(decode("bits", bits, 0, got, 1, &e), -EBADMSG);
}

/* What filters cannot be undone as NumPy does it is refused by name. */
static void test_filter_names(void **state)
{
    static const char head[] =
        "{\"zarr_format\": 2, \"shape\": [4], \"chunks\": [2], \"dtype\": \"<f4\", "
        "\"order\": \"C\", \"compressor\": null, \"fill_value\": 0, \"filters\": [%s]}";
    static const struct {
        const char *filter, *why;
    } cases[] = {
        {"{\"id\": \"shuffle\"}", ""},
        {"{\"id\": \"shuffle\", \"elementsize\": -4}", "of no size of elements"},
        {"{\"id\": \"astype\", \"encode_dtype\": \"<f2\", \"decode_dtype\": \"<f4\"}",
         "filter \"astype\" from \"<f4\" to \"<f2\""},
        {"{\"id\": \"quantize\", \"digits\": 2, \"dtype\": \"<f4\"}", ""},
        {"{\"id\": \"fixedscaleoffset\", \"scale\": 0, \"offset\": 1, \"dtype\": "
         "\"<f4\"}",
         "without scale and offset"},
        {"{\"id\": \"fixedscaleoffset\", \"scale\": 2, \"dtype\": \"<f4\"}",
         "without scale and offset"},
        {"{\"id\": \"bitround\", \"keepbits\": 3}", ""},
        {"{\"id\": \"categorize\"}", "filter \"categorize\" is not supported"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[1000];
        struct zarr_array a;

        snprintf(text, sizeof text, head, cases[i].filter);
        a = parse(2, text);
        if (cases[i].why[0] ? !strstr(a.why, cases[i].why) : a.why[0])
            fail_msg("%s: \"%s\"", cases[i].filter, a.why);
    }
}

static void test_lengths(void **state)
{
    static const unsigned char lz4[] = {4, 0, 0, 0, 0x40, 'a', 'b', 'c', 'd'};
    static const unsigned char far[] = {0, 0, 0, 0x80, 0x40, 'a', 'b', 'c', 'd'};
    static const unsigned char crc[] = {'a', 'b', 'c', 'd', 0x31, 0x0a, 0xc8, 0x92};
    unsigned char got[8];
    struct err e = {0};

    (void)state;
    assert_ok(decode("lz4", lz4, sizeof lz4, got, 4, &e), &e);
    assert_memory_equal(got, "abcd", 4);
    assert_int_equal(decode("lz4", lz4, sizeof lz4, got, 5, &e), -EBADMSG);
    assert_int_equal(decode("lz4", lz4, sizeof lz4 - 1, got, 4, &e), -EBADMSG);
    e = (struct err){0};
    assert_int_equal(decode("lz4", far, sizeof far, got, 4, &e), -EBADMSG);
    assert_has(e.text, "lz4: length 2147483648, the chunk has 4 bytes");
    assert_ok(decode("crc32c", crc, sizeof crc, got, 4, &e), &e);
    assert_memory_equal(got, "abcd", 4);
    assert_int_equal(decode("crc32c", crc, sizeof crc, got, 3, &e), -EBADMSG);
    assert_int_equal(decode("crc32c", crc, 3, got, 4, &e), -EBADMSG);
    assert_int_equal(decode("crc32c", "abcdxxxx", 8, got, 4, &e), -EBADMSG);
    assert_int_equal(decode("", "abc", 3, got, 4, &e), -EBADMSG);
    assert_int_equal(decode("blosc", "abc", 3, got, 4, &e), -EBADMSG);
    assert_int_equal(decode("zstd", "", 0, got, 4, &e), -EBADMSG);
    assert_int_equal(decode("gzip", "", 0, got, 4, &e), -EBADMSG);
    assert_int_equal(decode("bz2", "", 0, got, 4, &e), -EBADMSG);
    assert_int_equal(decode("lzma", "", 0, got, 4, &e), -EBADMSG);
}

/* Two streams behind each other are one; what begins no stream is damage. */
static void test_two_streams(void **state)
{
    static const unsigned char gzip[] = {
        0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0x4b, 0x4c,
        0x4a, 0x4e, 0x01, 0x00, 0x11, 0xcd, 0x82, 0xed, 0x04, 0x00, 0x00, 0x00};
    static const unsigned char bz2[] = {0x42, 0x5a, 0x68, 0x39, 0x31, 0x41, 0x59, 0x26,
                                        0x53, 0x59, 0x3d, 0x4c, 0x33, 0x4b, 0x00, 0x00,
                                        0x00, 0x01, 0x00, 0x3c, 0x00, 0x20, 0x00, 0x21,
                                        0x9a, 0x68, 0x33, 0x4d, 0x13, 0x3c, 0x5d, 0xc9,
                                        0x14, 0xe1, 0x42, 0x40, 0xf5, 0x30, 0xcd, 0x2c};
    static const unsigned char zstd[] = {0x28, 0xb5, 0x2f, 0xfd, 0x20, 0x04, 0x21,
                                         0x00, 0x00, 0x61, 0x62, 0x63, 0x64};
    static const struct {
        const char *codec;
        const unsigned char *one;
        size_t len;
    } cases[] = {{"gzip", gzip, sizeof gzip},
                 {"bz2", bz2, sizeof bz2},
                 {"zstd", zstd, sizeof zstd}};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        size_t len = cases[i].len;
        unsigned char twice[200], got[9];
        struct err e = {0};

        memcpy(twice, cases[i].one, len);
        memcpy(twice + len, cases[i].one, len);
        twice[2 * len] = 'x';
        assert_ok(decode(cases[i].codec, twice, len, got, 4, &e), &e);
        assert_memory_equal(got, "abcd", 4);
        assert_ok(decode(cases[i].codec, twice, 2 * len, got, 8, &e), &e);
        assert_memory_equal(got, "abcdabcd", 8);
        for (size_t cut = 1; cut < len; cut++)
            if (decode(cases[i].codec, twice, 2 * len - cut, got, 8, &e) != -EBADMSG)
                fail_msg("%s without %zu bytes: %s", cases[i].codec, cut, e.text);
        assert_int_equal(decode(cases[i].codec, twice, 2 * len + 1, got, 8, &e),
                         -EBADMSG);
        assert_int_equal(decode(cases[i].codec, twice, 2 * len, got, 7, &e), -EBADMSG);
        assert_int_equal(decode(cases[i].codec, twice, 2 * len, got, 9, &e), -EBADMSG);
    }
}

/* Streams of .xz and of .lzma: several are one, and nothing else may follow them. */
static void test_behind_lzma(void **state)
{
    static const unsigned char xz[] = {
        0xfd, 0x37, 0x7a, 0x58, 0x5a, 0x00, 0x00, 0x01, 0x69, 0x22, 0xde, 0x36,
        0x02, 0x00, 0x21, 0x01, 0x16, 0x00, 0x00, 0x00, 0x74, 0x2f, 0xe5, 0xa3,
        0x01, 0x00, 0x03, 0x61, 0x62, 0x63, 0x64, 0x00, 0x11, 0xcd, 0x82, 0xed,
        0x00, 0x01, 0x18, 0x04, 0x6b, 0xe9, 0xf0, 0xa5, 0x90, 0x42, 0x99, 0x0d,
        0x01, 0x00, 0x00, 0x00, 0x00, 0x01, 0x59, 0x5a,
    };
    static const unsigned char alone[] = {
        0x5d, 0x00, 0x00, 0x04, 0x00, 0xff, 0xff, 0xff, 0xff,
        0xff, 0xff, 0xff, 0xff, 0x00, 0x30, 0x98, 0x88, 0x98,
        0x46, 0x7e, 0x1e, 0xb2, 0xff, 0xfa, 0x1c, 0x80, 0x00,
    };
    unsigned char twice[2 * sizeof xz], junk[sizeof xz + sizeof alone], got[8];
    struct err e = {0};

    (void)state;
    memcpy(twice, xz, sizeof xz);
    memcpy(twice + sizeof xz, xz, sizeof xz);
    assert_ok(decode("lzma", twice, sizeof twice, got, 8, &e), &e);
    assert_memory_equal(got, "abcdabcd", 8);
    assert_ok(decode("lzma", alone, sizeof alone, got, 4, &e), &e);
    assert_memory_equal(got, "abcd", 4);
    memset(junk, 'x', sizeof junk);
    memcpy(junk, xz, sizeof xz);
    assert_int_equal(decode("lzma", junk, sizeof xz + 4, got, 4, &e), -EBADMSG);
    memcpy(junk, alone, sizeof alone);
    assert_int_equal(decode("lzma", junk, sizeof alone + 1, got, 4, &e), -EBADMSG);
    assert_int_equal(decode("lzma", junk, sizeof alone + 4, got, 4, &e), -EBADMSG);
}

/* ---- tiles that are decoded ahead of their reader ---- */

enum { ROWS = 512, COLUMNS = 4096, TILE_ROWS = 64, TILE_COLUMNS = 1024 };

static unsigned char tile_byte(unsigned row, unsigned column)
{
    return (unsigned char)(row * 31 + column / 3);
}

static void made_tile(const struct made *m, unsigned y, unsigned x)
{
    enum { SIZE = TILE_ROWS * TILE_COLUMNS };
    CLEANUP_FREE unsigned char *plain = malloc(SIZE);
    CLEANUP_FREE char *packed = malloc(4 + LZ4_COMPRESSBOUND(SIZE));
    char name[40];
    int len;

    for (unsigned i = 0; i < SIZE; i++)
        plain[i] = tile_byte(y * TILE_ROWS + i / TILE_COLUMNS,
                             x * TILE_COLUMNS + i % TILE_COLUMNS);
    put_le32(packed, SIZE);
    len = LZ4_compress_default((const char *)plain, packed + 4, SIZE,
                               LZ4_COMPRESSBOUND(SIZE));
    assert_true(len > 0);
    snprintf(name, sizeof name, "a/%u.%u", y, x);
    made_file(m, name, packed, (size_t)len + 4);
}

/* Reads all of it in odd steps and tells each time what comes next; then backwards. */
static void read_ahead(struct reader *r)
{
    enum { STEP = 100003 };
    CLEANUP_FREE unsigned char *got = malloc(STEP);
    uint64_t size = reader_size(r);
    struct err e = {0};

    assert_int_equal(size, ROWS * COLUMNS);
    for (uint64_t n = 0; n * STEP < 2 * size; n++) {
        uint64_t at = n * STEP < size ? n * STEP : 2 * size - n * STEP;
        size_t len = (size_t)MIN((uint64_t)STEP, size - MIN(at, size));

        reader_will_need(r, at + len, 4 * STEP);
        assert_ok(reader_read(r, MIN(at, size), len, got, &e), &e);
        for (size_t i = 0; i < len; i++)
            if (got[i] != tile_byte((unsigned)((at + i) / COLUMNS),
                                    (unsigned)((at + i) % COLUMNS)))
                fail_msg("byte %" PRIu64 " is %u", at + i, got[i]);
    }
}

static void test_decoded_ahead(void **state)
{
    struct reader_env env = {.codec = format_codec};
    struct open_files *files = NULL;
    struct pool *pool = NULL;
    struct reader *r = NULL;
    struct opened o;
    struct made m;
    struct err e = {0};

    (void)state;
    made_begin(&m, "tiles");
    made_text(
        &m, "a/.zarray",
        "{\"zarr_format\": 2, \"shape\": [512, 4096], \"chunks\": [64, 1024], "
        "\"dtype\": \"|u1\", \"order\": \"C\", \"compressor\": {\"id\": \"lz4\"}, "
        "\"filters\": null, \"fill_value\": 0}");
    for (unsigned i = 0; i < ROWS / TILE_ROWS * (COLUMNS / TILE_COLUMNS); i++)
        made_tile(&m, i / (COLUMNS / TILE_COLUMNS), i % (COLUMNS / TILE_COLUMNS));
    made_open(&m, &o);
    assert_ok(pool_new(3, &pool, &e), &e);
    assert_ok(open_files_new(o.w.store, 8, &files, &e), &e);
    env.catalog = o.w.catalog;
    env.decoded = o.w.decoded;
    env.files = files;
    env.pool = pool;
    assert_ok(reader_open_tensor(&env, o.info.id, tensor(&o, "a")->ord, false, &r, &e),
              &e);
    read_ahead(r);
    reader_close(r);
    pool_free(pool); /* with what may be under way still */
    open_files_free(files);
    finish(&m, &o);
}

/* That zstd found no memory says nothing of the data, and must not be kept as damage. */
static void test_zstd_without_memory(void **state)
{
    struct err e = {0};

    (void)state;
    assert_int_equal(zstd_fail((size_t)-ZSTD_error_memory_allocation, &e), -ENOMEM);
    e = (struct err){0};
    assert_int_equal(zstd_fail((size_t)-ZSTD_error_corruption_detected, &e), -EBADMSG);
    assert_has(e.text, "zstd: ");
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "fill values", .test_func = test_fill_values},
        {.name = "byte types", .test_func = test_byte_types},
        {.name = "bad fill values", .test_func = test_bad_fill_values},
        {.name = "refused", .test_func = test_refused},
        {.name = "v3 codecs", .test_func = test_v3_codecs},
        {.name = "documents", .test_func = test_documents},
        {.name = "spec", .test_func = test_spec},
        {.name = "sparse grids", .test_func = test_sparse_grids},
        {.name = "huge grid", .test_func = test_huge_grid},
        {.name = "empty grid", .test_func = test_empty_grid},
        {.name = "missing chunks", .test_func = test_missing_chunks},
        {.name = "many files", .test_func = test_many_files},
        {.name = "groups", .test_func = test_groups},
        {.name = "levanter", .test_func = test_levanter},
        {.name = "easydel", .test_func = test_easydel},
        {.name = "long attributes", .test_func = test_long_attributes},
        {.name = "root array", .test_func = test_root_array},
        {.name = "consolidated", .test_func = test_consolidated},
        {.name = "two formats", .test_func = test_two_formats},
        {.name = "delta", .test_func = test_delta},
        {.name = "filters", .test_func = test_filters},
        {.name = "names of filters", .test_func = test_filter_names},
        {.name = "lengths", .test_func = test_lengths},
        {.name = "two streams", .test_func = test_two_streams},
        {.name = "behind lzma", .test_func = test_behind_lzma},
        {.name = "decoded ahead", .test_func = test_decoded_ahead},
        {.name = "zstd without memory", .test_func = test_zstd_without_memory},
    };

    return run_with_fixtures("zarr", argc, argv, others, ARRAY_SIZE(others));
}
