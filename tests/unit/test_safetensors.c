/* SPDX-License-Identifier: MIT */
/* tests/unit/test_safetensors.c - header rules, the index of shards, which files are one. */
#include "unit.h"

#include <errno.h>
#include <stdio.h>
#include <time.h>

#include "base/endian.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/hf/choose.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/hf/safetensors_header.h"
#include "index/formats/hf/safetensors_layout.h"
#include "remote/source.h"

extern const struct format_driver format_safetensors;

/* ---- the header ---- */

#define ENTRY(name, dtype, shape, begin, end)                                          \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape                           \
    ",\"data_offsets\":[" #begin "," #end "]}"

static int parse(const char *text, uint64_t data, struct safetensors_header *h,
                 struct err *e)
{
    return safetensors_parse(text, strlen(text), data, h, e);
}

static void test_reads_what_stands_there(void **state)
{
    static const char text[] =
        " {" ENTRY("b", "BF16", "[2,3]", 4,
                   16) ", \"__metadata__\": {\"format\": \"pt\", "
                       "\"x\": \"\\u0000\"}," ENTRY("s", "F32", "[]", 0, 4) "," ENTRY(
                           "e\\u0000\\n", "I64", "[0,7]", 16,
                           16) "," ENTRY("a", "F4", "[4,2]", 16, 20) "}  \n";
    CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
    struct err e = {0};
    struct shape shape;

    (void)state;
    assert_ok(parse(text, 20, &h, &e), &e);
    assert_int_equal(h.count, 4);
    assert_int_equal(h.data, 8 + strlen(text));
    assert_string_equal(h.format, "pt");
    assert_null(h.dcp_sharding);
    assert_string_equal(h.tensor[0].name, "s");
    assert_int_equal(h.tensor[0].nd, 0);
    assert_int_equal(h.tensor[0].dtype, DTYPE_F32);
    assert_string_equal(h.tensor[1].name, "b");
    assert_int_equal(h.tensor[1].begin, 4);
    assert_int_equal(h.tensor[1].end, 16);
    safetensors_shape(&h.tensor[1], &shape);
    assert_int_equal(shape.nd, 2);
    assert_int_equal(shape.dim[0], 2);
    assert_int_equal(shape.dim[1], 3);
    assert_int_equal(h.tensor[2].name_len, 3); /* the empty one comes before "a" */
    assert_memory_equal(h.tensor[2].name, "e\0\n", 4);
    assert_int_equal(h.tensor[3].dtype, DTYPE_F4);
    assert_ptr_equal(safetensors_find(&h, "e\0\n", 3), &h.tensor[2]);
    assert_null(safetensors_find(&h, "e", 1));
}

static void test_keeps_the_mark_of_pieces(void **state)
{
    CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
    struct err e = {0};

    (void)state;
    assert_ok(parse("{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{}\"}}", 0, &h, &e),
              &e);
    assert_int_equal(h.count, 0);
    assert_null(h.format);
    assert_string_equal(h.dcp_sharding, "{}");
}

static const struct {
    const char *text;
    uint64_t data;
    const char *why; /* NULL: it is good */
} headers[] = {
    {"{}", 0, NULL},
    {"{" ENTRY("a", "F32", "[2,3]", 0, 24) "}", 24, NULL},
    {"{" ENTRY("a", "U8", "[0]", 0, 0) "," ENTRY("b", "U8", "[0]", 0, 0) "}", 0, NULL},
    {"{" ENTRY("a", "U8", "[0]", 4, 4) "," ENTRY("b", "F32", "[1]", 0, 4) "}", 4, NULL},
    {"{" ENTRY("a", "F32", "[0,4294967296,4294967296]", 0, 0) "}", 0, NULL},
    {"{\"a\":{\"dtype\":\"U8\",\"x\":[{}],\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     NULL},
    {"{" ENTRY("__metadata__x", "U8", "[1]", 0, 1) "}", 1, NULL},
    {"{" ENTRY("A", "U8", "[1]", 0, 1) "," ENTRY("a", "U8", "[1]", 1, 2) "}", 2, NULL},
    {"", 0, "header: JSON byte 0 (the end)"},
    {"[]", 0, "no object"},
    {"{}{}", 0, "text after the value"},
    {"{}\0", 1, "1 bytes behind the last tensor"},
    {"{} x", 0, "JSON byte 3"},
    {"{\"a\":1}", 0, "tensor \"a\": its entry is no object"},
    {"{\"__metadata__\":[]}", 0, "__metadata__ is no object"},
    {"{\"__metadata__\":{\"k\":1}}", 0, "\"k\" is no text"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice in one object"},
    {"{" ENTRY("a", "U8", "[1]", 0, 1) "," ENTRY("\\u0061", "U8", "[1]", 1, 2) "}", 2,
     "twice in one object"},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
     1, "twice in one object"},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "it has no dtype"},
    {"{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     "dtype is no text"},
    {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "it has no shape"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "no data_offsets"},
    {"{" ENTRY("a", "f32", "[1]", 0, 4) "}", 4, "unknown dtype \"f32\""},
    {"{" ENTRY("a", "C128", "[1]", 0, 16) "}", 16, "unknown dtype \"C128\""},
    {"{" ENTRY("a", "U8", "7", 0, 7) "}", 7, "shape is no list"},
    {"{" ENTRY("a", "U8", "[\"1\"]", 0, 1) "}", 1, "no whole number"},
    {"{" ENTRY("a", "U8", "[1.0]", 0, 1) "}", 1, "no whole number"},
    {"{" ENTRY("a", "U8", "[1e0]", 0, 1) "}", 1, "no whole number"},
    {"{" ENTRY("a", "U8", "[-1,-1]", 0, 1) "}", 1, "no whole number"},
    {"{" ENTRY("a", "U8", "[9007199254740993]", 0, 9) "}", 9, "no whole number"},
    {"{" ENTRY("a", "U8", "[4294967296,4294967296]", 0, 0) "}", 0, "more than 2^63"},
    {"{" ENTRY("a", "U8", "[4294967296,4294967296,0]", 0, 0) "}", 0, "more than 2^63"},
    {"{" ENTRY("a", "F64", "[2147483648,2147483648]", 0, 0) "}", 0, "more than 2^63"},
    {"{" ENTRY("a", "F4", "[3]", 0, 1) "}", 1, "whole bytes"},
    {"{" ENTRY("a", "F4", "[3]", 0, 2) "}", 2, "whole bytes"},
    {"{" ENTRY("a", "U8", "[1]", 1, 0) "}", 1, "end before they begin"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,0,1]}}", 1, "no pair"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "no pair"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":7}}", 1, "no pair"},
    {"{" ENTRY("a", "U8", "[1]", 0, 18446744073709551616) "}", 1, "no whole number"},
    {"{" ENTRY("a", "F32", "[2]", 0, 4) "}", 4, "need 8 bytes, data bytes 0..4 are 4"},
    {"{" ENTRY("a", "U8", "[1]", 1, 2) "}", 2,
     "\"a\" starts at data byte 1, the ones "
     "before end at 0: a hole"},
    {"{" ENTRY("a", "U8", "[1]", 0, 1) "," ENTRY("b", "U8", "[1]", 2, 3) "}", 3,
     "a hole"},
    {"{" ENTRY("a", "U8", "[2]", 0, 2) "," ENTRY("b", "U8", "[2]", 1, 3) "}", 3,
     "an overlap"},
    {"{" ENTRY("a", "U8", "[2]", 0, 2) "," ENTRY("b", "U8", "[2]", 0, 2) "}", 2,
     "an overlap"},
    {"{" ENTRY("a", "U8", "[2]", 0, 2) "," ENTRY("b", "U8", "[0]", 1, 1) "}", 2,
     "an overlap"},
    {"{" ENTRY("a", "U8", "[2]", 0, 2) "}", 1, "need 2 bytes of data, the file has 1"},
    {"{" ENTRY("a", "U8", "[2]", 0, 2) "}", 3, "1 bytes behind the last tensor"},
};

static void test_header_rules(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(headers); i++) {
        CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
        struct err e = {0};
        int rc = parse(headers[i].text, headers[i].data, &h, &e);

        if (!headers[i].why && rc != 0)
            fail_msg("%s: %s", headers[i].text, e.text);
        if (headers[i].why && (rc != -EBADMSG || !strstr(e.text, headers[i].why)))
            fail_msg("%s: %d, \"%s\" and not \"%s\"", headers[i].text, rc, e.text,
                     headers[i].why);
    }
}

static void test_rank_has_a_limit(void **state)
{
    (void)state;
    for (int nd = 63; nd <= 66; nd++) {
        CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
        CLEANUP(buf_release) struct buf b = {0};
        struct err e = {0};

        buf_adds(&b, "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1],\"shape\":[1");
        for (int i = 1; i < nd; i++)
            buf_adds(&b, ",1");
        buf_adds(&b, "]}}");
        assert_int_equal(parse(b.data, 1, &h, &e), nd <= 64 ? 0 : -EBADMSG);
        if (nd <= 64)
            assert_int_equal(h.tensor[0].nd, nd);
        else
            assert_has(e.text, "dimensions, more than 64");
    }
}

/* A file of this header text, whose length field says `n`, and `data` bytes. */
static struct source *image(const char *text, uint64_t n, size_t before, size_t data)
{
    size_t size = before + 8 + strlen(text) + data;
    unsigned char *bytes = calloc(1, size);
    struct source *src = NULL;
    struct err e = {0};

    assert_non_null(bytes);
    put_le64(bytes + before, n);
    memcpy(bytes + before + 8, text, strlen(text));
    assert_ok(source_from_memory(bytes, size, true, "m", &src, &e), &e);
    return src;
}

static void test_length_field(void **state)
{
    static const char text[] = "{" ENTRY("a", "U8", "[3]", 0, 3) "}";
    static const struct {
        int64_t more; /* than it is */
        const char *why;
    } rows[] = {
        {0, NULL},
        {-1, "byte 8: header: JSON byte"},
        {1, "text after the value"},
        {4, "but only"},
        {100000001, "more than 100000000"},
        {-1 - (int64_t)(sizeof text - 1), "more than 100000000"}, /* 2^64 - 1 */
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
        uint64_t n = sizeof text - 1 + (uint64_t)rows[i].more;
        CLEANUP(source_putp) struct source *src = image(text, n, 0, 3);
        struct err e = {0};
        int rc = safetensors_read(src, 0, src->size, &h, &e);

        assert_int_equal(rc, rows[i].why ? -EBADMSG : 0);
        if (rows[i].why)
            assert_has(e.text, rows[i].why);
    }
}

static void test_short_files(void **state)
{
    static const unsigned char zeros[8];

    (void)state;
    for (size_t len = 0; len <= sizeof zeros; len++) {
        CLEANUP(source_putp) struct source *src = NULL;
        struct safetensors_header h;
        struct err e = {0};

        assert_ok(source_from_memory(zeros, len, false, "m", &src, &e), &e);
        assert_int_equal(safetensors_read(src, 0, len, &h, &e), -EBADMSG);
        assert_has(e.text, len < 8 ? "too few" : "JSON byte 0");
        assert_false(safetensors_magic(zeros, len, len));
    }
}

static void test_lfs_pointer(void **state)
{
    static const char text[] =
        "version https://git-lfs.github.com/spec/v1\noid sha256:";
    CLEANUP(source_putp) struct source *src = NULL;
    struct safetensors_header h;
    struct err e = {0};

    (void)state;
    assert_ok(source_from_memory(text, sizeof text - 1, false, "m", &src, &e), &e);
    assert_int_equal(safetensors_read(src, 0, src->size, &h, &e), -EBADMSG);
    assert_has(e.text, "a Git LFS pointer");
    assert_string_equal(e.hint, "git lfs pull");
}

/* Parses a header of n tensors, the last one first; CPU seconds that it took. */
static double time_of(unsigned n)
{
    CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
    CLEANUP(buf_release) struct buf b = {0};
    struct timespec t0, t1;
    struct err e = {0};

    buf_addc(&b, '{');
    for (unsigned i = 0; i < n; i++)
        buf_addf(&b,
                 "%s\"layers.%u.block.%u.w\":{\"dtype\":\"F32\",\"shape\":[2,1],"
                 "\"data_offsets\":[%u,%u]}",
                 i ? "," : "", i / 50, i % 50, 8 * (n - 1 - i), 8 * (n - i));
    buf_addc(&b, '}');
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t0);
    assert_ok(safetensors_parse(b.data, b.len, 8 * n, &h, &e), &e);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t1);
    assert_int_equal(h.count, n);
    assert_string_equal(h.tensor[n - 1].name, "layers.0.block.0.w");
    assert_int_equal(h.tensor[n - 1].begin, 8 * (n - 1));
    return (double)(t1.tv_sec - t0.tv_sec) + (double)(t1.tv_nsec - t0.tv_nsec) / 1e9;
}

/* No slower than n log n (also under valgrind); 0.12 s for the larger one when written. */
static void test_many_tensors_fast(void **state)
{
    double few, many;

    (void)state;
    for (int tries = 0; tries < 5; tries++) { /* others may have the caches meanwhile */
        few = time_of(20000);
        many = time_of(100000);
        print_message("# 20000 tensors: %.0f ms, 100000: %.0f ms\n", few * 1e3,
                      many * 1e3);
        if (many < 12 * few + 0.05)
            return;
    }
    fail_msg("100000 tensors take %.0f ms, 20000 take %.0f", many * 1e3, few * 1e3);
}

/* ---- CHUNK_SAFETENSORS ---- */

static void test_codec(void **state)
{
    static const char text[] =
        "{" ENTRY("x", "U8", "[5]", 0, 5) "," ENTRY("a.b", "BF16", "[2,3]", 5, 17) "}";
    CLEANUP(source_putp) struct source *src = image(text, sizeof text - 1, 40, 17);
    static const uint64_t start[] = {4, 0}, size[] = {2, 3}, other[] = {3, 2};
    struct shape units = {.nd = 2, .dim = {9, 3}};
    struct chunk c = {.encoding = CHUNK_SAFETENSORS,
                      .flags = CHUNK_SWAP,
                      .offset = 40,
                      .length = src->size - 40,
                      .start = start,
                      .size = size};
    struct chunk_tensor t = {
        .key = "a.b", .key_len = 3, .dtype = DTYPE_BF16, .units = &units};
    struct chunk_place p = {0};
    struct err e = {0};

    (void)state;
    assert_int_equal(safetensors_codec.encoding, CHUNK_SAFETENSORS);
    assert_ok(safetensors_codec.resolve(src, &c, &t, NULL, &p, &e), &e);
    assert_ptr_equal(p.src, src);
    assert_int_equal(p.base, 40 + 8 + sizeof text - 1 + 5);
    assert_int_equal(p.step[0], 6);
    assert_int_equal(p.step[1], 2);
    assert_int_equal(p.flags, CHUNK_SWAP);
    source_put(p.src);
    c.size = other;
    assert_int_equal(safetensors_codec.resolve(src, &c, &t, NULL, &p, &e), -EBADMSG);
    assert_has(e.text, "its shape is not that of the chunk");
    c.size = size;
    t.dtype = DTYPE_F16;
    assert_int_equal(safetensors_codec.resolve(src, &c, &t, NULL, &p, &e), -EBADMSG);
    assert_has(e.text, "its dtype is BF16, the metadata say F16");
    t.key_len = 1;
    assert_int_equal(safetensors_codec.resolve(src, &c, &t, NULL, &p, &e), -EBADMSG);
    assert_has(e.text, "no tensor");
    c.length--;
    assert_int_equal(safetensors_codec.resolve(src, &c, &t, NULL, &p, &e), -EBADMSG);
    c.length = UINT64_MAX;
    assert_int_equal(safetensors_codec.resolve(src, &c, &t, NULL, &p, &e), -EBADMSG);
}

/* ---- the index of shards ---- */

static int index_of(const char *text, struct hf_index *x, struct err *e)
{
    return hf_index_parse(text, strlen(text), ".safetensors", x, e);
}

static void test_index(void **state)
{
    static const char text[] =
        "{\"metadata\":{\"total_size\":1e300},\"weight_map\":{\"c\":\"2.safetensors\","
        "\"a.b\":\"1.safetensors\",\"a\":\"2.safetensors\",\"u\":\"x/../y.safetensors\","
        "\"s\":\"s/y.safetensors\",\"n\":\"1.safetensors\\u0000\",\"j\":\"index.json\"}}";
    CLEANUP(hf_index_release) struct hf_index x = {0};
    struct err e = {0};
    size_t faults = 0;
    ptrdiff_t at;

    (void)state;
    assert_ok(index_of(text, &x, &e), &e);
    assert_int_equal(x.count, 7);
    assert_int_equal(x.nfiles, 6);
    for (size_t i = 0; i < x.nfiles; i++)
        faults += x.file[i].fault != NULL;
    assert_int_equal(faults, 4);
    at = hf_index_find(&x, "a", 1);
    assert_int_not_equal(at, -1);
    assert_string_equal(x.file[x.entry[at].file].name, "2.safetensors");
    assert_null(x.file[x.entry[at].file].fault);
    at = hf_index_find(&x, "a.bX", 3);
    assert_int_not_equal(at, -1);
    assert_string_equal(x.file[x.entry[at].file].name, "1.safetensors");
    at = hf_index_find(&x, "n", 1);
    assert_has(x.file[x.entry[at].file].fault, "NUL");
    at = hf_index_find(&x, "s", 1);
    assert_has(x.file[x.entry[at].file].fault, "no plain file name");
    at = hf_index_find(&x, "j", 1);
    assert_has(x.file[x.entry[at].file].fault, "another kind");
    assert_int_equal(hf_index_find(&x, "a.", 2), -1);
    assert_int_equal(hf_index_find(&x, "", 0), -1);
    assert_int_equal(hf_index_find(&x, "a\0", 2), -1);
    assert_int_equal(hf_index_find(&x, "z", 1), -1);
}

static void test_bad_indexes(void **state)
{
    static const struct {
        const char *text, *why;
    } rows[] = {
        {"[1]", "the index is no JSON object"},
        {"{}", "it has no weight_map"},
        {"{\"weight_map\":[\"a\"]}", "weight_map is no object"},
        {"{\"weight_map\":{\"a\":7}}", "the file of \"a\" is no text"},
        {"{\"weight_map\":{\"a\":\"x.safetensors\",\"a\":\"y.safetensors\"}}",
         "twice in one object"},
        {"{\"weight_map\":{\"a\":\"pytorch_model.bin\"}}", "is no .safetensors file"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        struct hf_index x = {0};
        struct err e = {0};

        assert_int_equal(index_of(rows[i].text, &x, &e), -EBADMSG);
        assert_has(e.text, rows[i].why);
        assert_null(x.arena);
    }
}

/* ---- which files are a model ---- */

static const char good_head[] = "\x02\0\0\0\0\0\0\0{}";

/* Names separated by blanks; "NAME!" has no header, "NAME/" is a directory. */
static struct listing *listing_of(const char *names)
{
    CLEANUP_FREE char *copy = strdup(names);
    struct listing *l = NULL;
    struct err e = {0};

    assert_ok(listing_new(NULL, "dir", &l, &e), &e);
    for (char *save, *name = strtok_r(copy, " ", &save); name;
         name = strtok_r(NULL, " ", &save)) {
        size_t len = strlen(name);
        struct entry_stat st = {.kind = ENTRY_FILE, .id = {.size = 10}};
        const char *head = good_head;

        if (name[len - 1] == '/')
            st.kind = ENTRY_DIR;
        if (name[len - 1] == '!')
            head = "0123456789";
        if (name[len - 1] == '=') { /* an index */
            head = "{\"weight_map\":{\"a\":\"x.safetensors\"}}";
            st.id.size = strlen(head);
        }
        if (strchr("/!=", name[len - 1]))
            name[len - 1] = '\0';
        assert_ok(listing_add(l, name, &st, st.kind == ENTRY_FILE ? head : NULL,
                              st.kind == ENTRY_FILE ? (size_t)st.id.size : 0, &e),
                  &e);
    }
    listing_sort(l);
    return l;
}

static const struct {
    const char *names;
    enum safetensors_kind kind;
    const char *main;
    int score;
} layouts[] = {
    {"config.json", SAFETENSORS_NONE, NULL, 0},
    {"x.safetensors", SAFETENSORS_NONE, NULL, 0},
    {"model.safetensors/ config.json", SAFETENSORS_NONE, NULL, 0},
    {"model.safetensors", SAFETENSORS_SINGLE, "model.safetensors", 60},
    {"model.safetensors config.json", SAFETENSORS_SINGLE, "model.safetensors", 75},
    {"model.safetensors! config.json", SAFETENSORS_SINGLE, "model.safetensors", 25},
    {"model.safetensors model.safetensors.index.json=", SAFETENSORS_SINGLE,
     "model.safetensors", 60},
    {"model.safetensors.index.json= x.safetensors", SAFETENSORS_INDEXED,
     "model.safetensors.index.json", 80},
    {"model.safetensors.index.json! x.safetensors", SAFETENSORS_INDEXED,
     "model.safetensors.index.json", 45},
    {"model.safetensors.index.json= x.bin", SAFETENSORS_INDEXED,
     "model.safetensors.index.json", 27},
    {"model.fp16.safetensors.index.json= x.safetensors", SAFETENSORS_INDEXED,
     "model.fp16.safetensors.index.json", 80},
    {"diffusion_pytorch_model.safetensors config.json", SAFETENSORS_SINGLE,
     "diffusion_pytorch_model.safetensors", 75},
    {"diffusion_pytorch_model.safetensors.index.json= x.safetensors",
     SAFETENSORS_INDEXED, "diffusion_pytorch_model.safetensors.index.json", 80},
    {"adapter_model.safetensors", SAFETENSORS_NONE, NULL, 0},
    {"adapter_model.safetensors adapter_config.json", SAFETENSORS_ADAPTER,
     "adapter_model.safetensors", 75},
    {"adapter_model.safetensors adapter_config.json model.safetensors",
     SAFETENSORS_SINGLE, "model.safetensors", 60},
    {"m-00001-of-00002.safetensors m-00002-of-00002.safetensors", SAFETENSORS_NUMBERED,
     "m-00001-of-00002.safetensors", 55},
    {"m-00002-of-00002.safetensors", SAFETENSORS_NUMBERED,
     "m-00002-of-00002.safetensors", 40},
    {"model-00001-of-00003.safetensors model-00001-of-00002.safetensors "
     "model-00002-of-00002.safetensors",
     SAFETENSORS_NUMBERED, "model-00001-of-00002.safetensors", 55},
    {"a-00001-of-00001.safetensors model-00001-of-00002.safetensors",
     SAFETENSORS_NUMBERED, "model-00001-of-00002.safetensors", 40},
    {"model.safetensors.index.json= model-00001-of-00001.safetensors",
     SAFETENSORS_NUMBERED, "model-00001-of-00001.safetensors", 55},
    {"model-00001-of-000002.safetensors model-00002-of-000002.safetensors",
     SAFETENSORS_NUMBERED, "model-00001-of-000002.safetensors", 55},
    {"m-9-of-10.safetensors m-10-of-10.safetensors", SAFETENSORS_NUMBERED,
     "m-10-of-10.safetensors", 40},
    {"model.safetensors pytorch_model.bin", SAFETENSORS_SINGLE, "model.safetensors",
     60},
    {"m-00000-of-00002.safetensors m-00001-of-00002.safetensors "
     "m-00002-of-00002.safetensors",
     SAFETENSORS_NUMBERED, "m-00000-of-00002.safetensors", 55},
    {"shard-00001-model-00000-of-00001.safetensors m-00003-of-00002.safetensors",
     SAFETENSORS_NUMBERED, "shard-00001-model-00000-of-00001.safetensors", 55},
    {"m-00003-of-00002.safetensors -of-00002.safetensors", SAFETENSORS_NONE, NULL, 0},
    {"m-1-of-2.safetensors m-000001-of-00002.safetensors", SAFETENSORS_NUMBERED,
     "m-000001-of-00002.safetensors", 40},
    {"shard-00001-model-00001-of-00001.safetensors model-00001-of-00001.safetensors",
     SAFETENSORS_PIECES, "shard-00001-model-00001-of-00001.safetensors", 0},
};

static void test_names_of_indexes(void **state)
{
    static const struct {
        const char *name;
        size_t stem; /* 0: none */
        const char *variant;
    } names[] = {
        {"model.safetensors.index.json", 5, NULL},
        {"model.safetensors.index.fp16.json", 5, "fp16"},
        {"a.safetensors.index.b.safetensors.index.json", 0, NULL},
        {"a.index.b.safetensors.index.json", 9, NULL},
        {"a.safetensors-b.safetensors.index.json", 15, NULL},
        {"model.bin.index.json", 0, NULL},
        {".safetensors.index.json", 0, NULL},
        {"model.safetensors.index..json", 0, NULL},
        {"model.safetensors.index.a.b.json", 0, NULL},
        {"model.safetensors.index.jsonl", 0, NULL},
        {"model.safetensors", 0, NULL},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        struct hf_index_name x = {0};
        const char *variant = names[i].variant;
        bool is = hf_index_name(names[i].name, ".safetensors", &x);

        if (is != (names[i].stem > 0) || (is && x.stem_len != names[i].stem) ||
            (is && !x.variant != !variant) ||
            (is && variant && strncmp(x.variant, variant, x.variant_len) != 0))
            fail_msg("%s: %d, stem of %zu", names[i].name, is, x.stem_len);
    }
}

static void test_layouts_and_bids(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(layouts); i++) {
        CLEANUP(listing_freep) struct listing *l = listing_of(layouts[i].names);
        struct safetensors_layout x = hf_choose(l)->safetensors;
        struct bid bid = {0};

        format_safetensors.bid(l, &bid);
        if (x.kind != layouts[i].kind || bid.score != layouts[i].score ||
            !x.main != !layouts[i].main ||
            (x.main && strcmp(x.main, layouts[i].main) != 0))
            fail_msg("%s: kind %d, %s, bid %d (%s)", layouts[i].names, x.kind,
                     x.main ? x.main : "-", bid.score, bid.reason);
        assert_int_equal(bid.reason[0] != '\0', bid.score > 0);
    }
}

static void test_bids_for_files(void **state)
{
    CLEANUP(listing_freep)
    struct listing *l =
        listing_of("a.safetensors b.safetensors! c.bin d.safetensors/ .safetensors");
    static const struct {
        const char *name;
        int score;
    } rows[] = {{"a.safetensors", 50}, {"b.safetensors", 25}, {"c.bin", 0},
                {"d.safetensors", 0},  {".safetensors", 0},   {"none.safetensors", 0}};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        struct bid bid = {0};

        format_safetensors.bid_file(l, rows[i].name, &bid);
        assert_int_equal(bid.score, rows[i].score);
    }
}

static void test_adapter_beside(void **state)
{
    CLEANUP(listing_freep)
    struct listing *l =
        listing_of("adapter_model.safetensors adapter_config.json model.safetensors");

    (void)state;
    assert_string_equal(hf_choose(l)->safetensors.adapter, "adapter_model.safetensors");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_what_stands_there),
        cmocka_unit_test(test_keeps_the_mark_of_pieces),
        cmocka_unit_test(test_header_rules),
        cmocka_unit_test(test_rank_has_a_limit),
        cmocka_unit_test(test_length_field),
        cmocka_unit_test(test_short_files),
        cmocka_unit_test(test_lfs_pointer),
        cmocka_unit_test(test_many_tensors_fast),
        cmocka_unit_test(test_codec),
        cmocka_unit_test(test_index),
        cmocka_unit_test(test_bad_indexes),
        cmocka_unit_test(test_names_of_indexes),
        cmocka_unit_test(test_layouts_and_bids),
        cmocka_unit_test(test_bids_for_files),
        cmocka_unit_test(test_adapter_beside),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
