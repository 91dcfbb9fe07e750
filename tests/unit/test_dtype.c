/* SPDX-License-Identifier: MIT */
/* tests/unit/test_dtype.c - element types, shapes, and chunks packed for the index. */
#include "unit.h"

#include <errno.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "index/chunk.h"
#include "index/dtype.h"
#include "index/shape.h"

static const struct {
    enum dtype dtype;
    const char *name, *npy;
    unsigned bits, unit, component;
    bool complex, safetensors;
} dtypes[] = {
    {DTYPE_BOOL, "BOOL", "|b1", 8, 1, 1, false, true},
    {DTYPE_U8, "U8", "|u1", 8, 1, 1, false, true},
    {DTYPE_I8, "I8", "|i1", 8, 1, 1, false, true},
    {DTYPE_U16, "U16", "<u2", 16, 2, 2, false, true},
    {DTYPE_I16, "I16", "<i2", 16, 2, 2, false, true},
    {DTYPE_U32, "U32", "<u4", 32, 4, 4, false, true},
    {DTYPE_I32, "I32", "<i4", 32, 4, 4, false, true},
    {DTYPE_U64, "U64", "<u8", 64, 8, 8, false, true},
    {DTYPE_I64, "I64", "<i8", 64, 8, 8, false, true},
    {DTYPE_F16, "F16", "<f2", 16, 2, 2, false, true},
    {DTYPE_BF16, "BF16", "<V2", 16, 2, 2, false, true},
    {DTYPE_F32, "F32", "<f4", 32, 4, 4, false, true},
    {DTYPE_F64, "F64", "<f8", 64, 8, 8, false, true},
    {DTYPE_C64, "C64", "<c8", 64, 8, 4, true, true},
    {DTYPE_C128, "C128", "<c16", 128, 16, 8, true, false},
    {DTYPE_C32, "C32", "<V4", 32, 4, 2, true, false},
    {DTYPE_F8_E4M3, "F8_E4M3", "|V1", 8, 1, 1, false, true},
    {DTYPE_F8_E5M2, "F8_E5M2", "|V1", 8, 1, 1, false, true},
    {DTYPE_F8_E8M0, "F8_E8M0", "|V1", 8, 1, 1, false, true},
    {DTYPE_F8_E4M3FNUZ, "F8_E4M3FNUZ", "|V1", 8, 1, 1, false, true},
    {DTYPE_F8_E5M2FNUZ, "F8_E5M2FNUZ", "|V1", 8, 1, 1, false, true},
    {DTYPE_F4, "F4", "|u1", 4, 1, 1, false, true},
    {DTYPE_F6_E2M3, "F6_E2M3", "|u1", 6, 1, 1, false, true},
    {DTYPE_F6_E3M2, "F6_E3M2", "|u1", 6, 1, 1, false, true},
};

static void test_dtypes_are_as_documented(void **state)
{
    (void)state;
    assert_int_equal(ARRAY_SIZE(dtypes), DTYPE_COUNT - 1);
    for (size_t i = 0; i < ARRAY_SIZE(dtypes); i++) {
        enum dtype d = dtypes[i].dtype;

        assert_int_equal(d, i + 1); /* stored in the index: never renumbered */
        assert_string_equal(dtype_name(d), dtypes[i].name);
        assert_int_equal(dtype_from_name(dtypes[i].name), d);
        assert_string_equal(dtype_npy(d), dtypes[i].npy);
        assert_int_equal(dtype_bits(d), dtypes[i].bits);
        assert_int_equal(dtype_unit(d), dtypes[i].unit);
        assert_int_equal(dtype_component(d), dtypes[i].component);
        assert_int_equal(dtype_is_complex(d), dtypes[i].complex);
        assert_int_equal(dtype_in_safetensors(d), dtypes[i].safetensors);
    }
}

static void test_dtype_names_are_exact(void **state)
{
    static const char *const wrong[] = {"", "f32", "F32 ", "F3", "NONE", "F8_E4M3FN"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++)
        assert_int_equal(dtype_from_name(wrong[i]), DTYPE_NONE);
}

static void test_dtype_numbers_that_are_none(void **state)
{
    static const int wrong[] = {DTYPE_NONE, DTYPE_COUNT, 1000, -1};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        assert_int_equal(dtype_bits((enum dtype)wrong[i]), 0);
        assert_int_equal(dtype_unit((enum dtype)wrong[i]), 1);
        assert_string_equal(dtype_name((enum dtype)wrong[i]), "NONE");
        assert_false(dtype_in_safetensors((enum dtype)wrong[i]));
    }
}

#define SHAPE(...)                                                                     \
    {                                                                                  \
        .nd = sizeof((uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t), .dim = {           \
            __VA_ARGS__                                                                \
        }                                                                              \
    }

static const struct {
    struct shape shape;
    enum dtype dtype;
    int ret;
    uint64_t bytes;
    const char *units, *text;
} shapes[] = {
    {SHAPE(2, 3), DTYPE_F32, 0, 24, "[2, 3]", "[2, 3]"},
    {{.nd = 0}, DTYPE_F64, 0, 8, "[]", "[]"},
    {SHAPE(5, 0, 7), DTYPE_BF16, 0, 0, "[5, 0, 7]", "[5, 0, 7]"},
    {SHAPE(3), DTYPE_C128, 0, 48, "[3]", "[3]"},
    /* Sub-byte types: the last dimension packs, or else all of it does. */
    {SHAPE(3, 4), DTYPE_F4, 0, 6, "[3, 2]", "[3, 4]"},
    {SHAPE(2, 3), DTYPE_F4, 0, 3, "[3]", "[2, 3]"},
    {SHAPE(4, 2, 1), DTYPE_F6_E2M3, 0, 6, "[6]", "[4, 2, 1]"},
    {SHAPE(2, 4), DTYPE_F6_E3M2, 0, 6, "[2, 3]", "[2, 4]"},
    {SHAPE(0, 3), DTYPE_F4, 0, 0, "[0]", "[0, 3]"},
    {SHAPE(3, 3), DTYPE_F4, -EBADMSG, 0, "do not fill whole bytes", "[3, 3]"},
    {{.nd = 0}, DTYPE_F4, -EBADMSG, 0, "do not fill whole bytes", "[]"},
    {SHAPE(2), DTYPE_F6_E2M3, -EBADMSG, 0, "do not fill whole bytes", "[2]"},
    {SHAPE(2), DTYPE_NONE, -EBADMSG, 0, "unknown element type", "[2]"},
    /* Left to right: a zero in front saves what a zero behind does not. */
    {SHAPE(0, 4294967296, 4294967296), DTYPE_U8, 0, 0, "[0, 4294967296, 4294967296]",
     "[0, 4294967296, 4294967296]"},
    {SHAPE(4294967296, 4294967296, 0), DTYPE_U8, -EOVERFLOW, 0, "2^63 elements",
     "[4294967296, 4294967296, 0]"},
    {SHAPE(9223372036854775807), DTYPE_U8, 0, 9223372036854775807,
     "[9223372036854775807]", "[9223372036854775807]"},
    {SHAPE(9223372036854775808u), DTYPE_U8, -EOVERFLOW, 0, "2^63 elements",
     "[9223372036854775808]"},
    {SHAPE(4611686018427387904), DTYPE_F16, -EOVERFLOW, 0, "2^63 bytes",
     "[4611686018427387904]"},
    {SHAPE(4611686018427387904), DTYPE_F4, -EOVERFLOW, 0, "2^64 bits",
     "[4611686018427387904]"},
};

static void test_shapes_in_bytes_and_units(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(shapes); i++) {
        struct buf text = {0}, units_text = {0};
        struct shape units;
        uint64_t bytes = 0;
        struct err e = {0};

        assert_int_equal(shape_format(&shapes[i].shape, &text), 0);
        assert_string_equal(text.data, shapes[i].text);
        assert_int_equal(shape_bytes(&shapes[i].shape, shapes[i].dtype, &bytes, &e),
                         shapes[i].ret);
        assert_int_equal(bytes, shapes[i].bytes);
        assert_int_equal(shape_units(&shapes[i].shape, shapes[i].dtype, &units, &e),
                         shapes[i].ret);
        if (shapes[i].ret == 0) {
            shape_format(&units, &units_text);
            assert_string_equal(units_text.data, shapes[i].units);
        } else {
            assert_has(e.text, shapes[i].units);
            assert_has(e.text, shapes[i].text);
        }
        buf_release(&text);
        buf_release(&units_text);
    }
}

static void test_shapes_are_compared_by_rank_and_dimensions(void **state)
{
    const struct shape a = SHAPE(2, 3), b = SHAPE(2, 3), c = SHAPE(2, 4), d = SHAPE(2);
    const struct shape scalar = {.nd = 0, .dim = {7}}, other = {.nd = 0, .dim = {8}};

    (void)state;
    assert_true(shape_equal(&a, &b));
    assert_false(shape_equal(&a, &c));
    assert_false(shape_equal(&a, &d));
    assert_true(shape_equal(&scalar, &other));
}

static void assert_same_chunk(const struct chunk *a, const struct chunk *b, uint32_t nd)
{
    assert_int_equal(a->file, b->file);
    assert_int_equal(a->encoding, b->encoding);
    assert_int_equal(a->flags, b->flags);
    assert_int_equal(a->offset, b->offset);
    assert_int_equal(a->length, b->length);
    assert_int_equal(a->first, b->first);
    assert_int_equal(!a->step, !b->step);
    assert_int_equal(!a->param, !b->param);
    assert_int_equal(a->param_len, b->param_len);
    assert_int_equal(!a->whole, !b->whole);
    assert_int_equal(a->whole_nd, b->whole_nd);
    for (uint32_t k = 0; k < a->whole_nd; k++)
        assert_int_equal(a->whole[k], b->whole[k]);
    if (a->param)
        assert_memory_equal(a->param, b->param, a->param_len);
    for (uint32_t k = 0; k < nd; k++) {
        assert_int_equal(a->start[k], b->start[k]);
        assert_int_equal(a->size[k], b->size[k]);
        if (a->step)
            assert_int_equal(a->step[k], b->step[k]);
    }
}

static const uint64_t box_a[] = {0, 0}, box_b[] = {4, 1000000},
                      box_c[] = {UINT64_MAX, 1};
static const int64_t step_a[] = {-8, 1}, step_b[] = {INT64_MIN, INT64_MAX};

static const struct chunk odd_chunks[] = {
    {.file = 0, .offset = 8, .length = 64, .start = box_a, .size = box_b},
    {.file = UINT32_MAX,
     .encoding = CHUNK_SAFETENSORS,
     .flags = CHUNK_SWAP | CHUNK_CONJ | CHUNK_NEG,
     .offset = UINT64_MAX,
     .length = UINT64_MAX,
     .start = box_c,
     .size = box_c,
     .first = UINT64_MAX,
     .step = step_b},
    {.file = 3, .encoding = 255, .start = box_b, .size = box_a, .step = step_a},
    {.file = 2,
     .encoding = 1,
     .offset = 1,
     .start = box_a,
     .size = box_c,
     .first = 5,
     .param = "a\0b",
     .param_len = 3},
    {.file = 2, .start = box_a, .size = box_c, .param = "a\0b", .param_len = 3},
    {.file = 2,
     .start = box_a,
     .size = box_c,
     .param = "c",
     .param_len = 1,
     .whole = box_b,
     .whole_nd = 2},
    {.file = 2, .start = box_a, .size = box_c, .whole = box_b, .whole_nd = 2},
    {.file = 2, .start = box_a, .size = box_c, .whole = box_b, .whole_nd = 0},
};

static void test_chunks_survive_packing(void **state)
{
    (void)state;
    for (uint32_t nd = 0; nd <= 2; nd++) {
        for (size_t n = 0; n <= ARRAY_SIZE(odd_chunks); n++) {
            CLEANUP(buf_release) struct buf b = {0};
            CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
            const struct chunk *out;
            size_t count = 99;
            struct err e = {0};

            assert_ok(chunks_pack(odd_chunks, n, nd, &b, &e), &e);
            assert_ok(chunks_unpack(a, b.data, b.len, nd, &out, &count, &e), &e);
            assert_int_equal(count, n);
            for (size_t i = 0; i < n; i++)
                assert_same_chunk(&odd_chunks[i], &out[i], nd);
        }
    }
}

static void test_chunks_with_unknown_flags_are_not_packed(void **state)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct chunk c = odd_chunks[0];
    struct err e = {0};

    (void)state;
    c.flags = 8;
    assert_int_equal(chunks_pack(&c, 1, 2, &b, &e), -EINVAL);
    c.flags = 0;
    assert_int_equal(chunks_pack(&c, 1, SHAPE_MAX_DIMS + 1, &b, &e), -EINVAL);
}

static void test_chunks_beyond_the_ceiling_are_an_error(void **state)
{
    CLEANUP(buf_release) struct buf b = {.max = 20};
    struct err e = {0};

    (void)state;
    assert_int_equal(chunks_pack(odd_chunks, 2, 2, &b, &e), -EFBIG);
}

/* Cut anywhere, a blob is refused; so is a byte more. */
static void test_cut_blobs_are_refused(void **state)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct err e = {0};

    (void)state;
    assert_ok(chunks_pack(odd_chunks, ARRAY_SIZE(odd_chunks), 2, &b, &e), &e);
    buf_addc(&b, '\0');
    for (size_t len = 0; len <= b.len; len++) {
        CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
        /* Of its own size, so that a read behind its end is seen by the sanitizer. */
        CLEANUP_FREE char *blob = malloc(len + 1);
        const struct chunk *out;
        size_t n;

        memcpy(blob, b.data, len);
        assert_int_equal(chunks_unpack(a, blob, len, 2, &out, &n, &e),
                         len + 1 == b.len ? 0 : -EBADMSG);
    }
}

static void test_blobs_that_lie_are_refused(void **state)
{
    static const struct {
        const char *bytes;
        size_t len;
        const char *why;
    } bad[] = {
        /* 2^64 - 1 chunks in ten bytes. */
        {"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 10, "cannot hold"},
        {"\x02\0\0\0\0\0\0", 7, "cannot hold 2 chunks"},
        {"\x01\0\x01\0\0\0\0", 7, "impossible file"}, /* file 0 - 1 */
        {"\x01\x80\x80\x04\0\0\0\0\0", 9, "encoding 512"},
        {"\x01\0\0\0\0\0\0\0", 8, "1 bytes behind"},
        {"\x01\x20\0\0\0\0\0\0", 8, "parameter of 0"}, /* like the one before: none */
        {"\x01\x20\0\0\0\0\0\x05"
         "ab",
         10, "parameter of 5"},
        {"\x01\0\0\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f\0\0\0", 16, "malformed"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        CLEANUP(arena_freep) struct arena *a = arena_new(4096);
        const struct chunk *out;
        size_t n;
        struct err e = {0};

        assert_int_equal(chunks_unpack(a, bad[i].bytes, bad[i].len, 1, &out, &n, &e),
                         -EBADMSG);
        assert_has(e.text, bad[i].why);
    }
}

static void test_too_many_dimensions_are_refused(void **state)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(4096);
    const struct chunk *out;
    size_t n;
    struct err e = {0};

    (void)state;
    assert_int_equal(chunks_unpack(a, "", 1, SHAPE_MAX_DIMS + 1, &out, &n, &e),
                     -EBADMSG);
    assert_int_equal(chunks_unpack(a, "", 1, UINT32_MAX, &out, &n, &e), -EBADMSG);
}

static void test_unpacking_without_memory(void **state)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct err e = {0};

    (void)state;
    assert_ok(chunks_pack(odd_chunks, ARRAY_SIZE(odd_chunks), 2, &b, &e), &e);
    for (size_t ceiling = 0; ceiling <= 256; ceiling += 8) {
        CLEANUP(arena_freep) struct arena *a = arena_new(ceiling);
        const struct chunk *out;
        size_t n;

        assert_int_equal(chunks_unpack(a, b.data, b.len, 2, &out, &n, &e), -ENOMEM);
    }
}

/* A million tiles of a matrix, in files of 1000: a few bytes each. */
static void test_a_million_chunks_are_small(void **state)
{
    enum { N = 1000000, SIDE = 1000 };
    CLEANUP_FREE uint64_t *start = calloc(N, 2 * sizeof *start);
    CLEANUP_FREE struct chunk *c = calloc(N, sizeof *c);
    CLEANUP(arena_freep) struct arena *a = arena_new(SIZE_MAX);
    CLEANUP(buf_release) struct buf b = {0};
    static const uint64_t size[] = {512, 768};
    const struct chunk *out;
    size_t n;
    struct err e = {0};

    (void)state;
    for (size_t i = 0; i < N; i++) {
        uint64_t header =
            (uint64_t)i * i % 4093; /* what a file has between its pieces */

        start[2 * i] = i / SIDE * 512;
        start[2 * i + 1] = i % SIDE * 768;
        c[i] = (struct chunk){.file = (uint32_t)(i / 1000),
                              .offset = i % 1000 * 786432 + header,
                              .length = 786432,
                              .start = start + 2 * i,
                              .size = size};
    }
    assert_ok(chunks_pack(c, N, 2, &b, &e), &e);
    assert_in_range(b.len, N * 8, N * 12);
    assert_ok(chunks_unpack(a, b.data, b.len, 2, &out, &n, &e), &e);
    assert_int_equal(n, N);
    for (size_t i = 0; i < N; i++)
        assert_same_chunk(&c[i], &out[i], 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtypes_are_as_documented),
        cmocka_unit_test(test_dtype_names_are_exact),
        cmocka_unit_test(test_dtype_numbers_that_are_none),
        cmocka_unit_test(test_shapes_in_bytes_and_units),
        cmocka_unit_test(test_shapes_are_compared_by_rank_and_dimensions),
        cmocka_unit_test(test_chunks_survive_packing),
        cmocka_unit_test(test_chunks_with_unknown_flags_are_not_packed),
        cmocka_unit_test(test_chunks_beyond_the_ceiling_are_an_error),
        cmocka_unit_test(test_cut_blobs_are_refused),
        cmocka_unit_test(test_blobs_that_lie_are_refused),
        cmocka_unit_test(test_too_many_dimensions_are_refused),
        cmocka_unit_test(test_unpacking_without_memory),
        cmocka_unit_test(test_a_million_chunks_are_small),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
