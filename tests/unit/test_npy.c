/* SPDX-License-Identifier: MIT */
/* tests/unit/test_npy.c - headers of .npy files: what is read of them, and what is refused. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <stdio.h>

#include "base/endian.h"
#include "base/err.h"
#include "index/npy.h"

/* Version 1.0, this text, no blanks behind it. */
static void put_header(struct buf *out, const char *text)
{
    unsigned char len[2];

    put_le16(len, (uint16_t)strlen(text));
    buf_add(out, "\x93NUMPY\1\0", 8);
    buf_add(out, len, 2);
    buf_adds(out, text);
    assert_int_equal(buf_failed(out), 0);
}

static int parse(const char *text, struct npy_layout *x, struct err *e)
{
    CLEANUP(buf_release) struct buf b = {0};

    put_header(&b, text);
    return npy_parse(b.data, b.len, x, e);
}

/* ---- the text ---- */

#define DESCR "'descr': '<f4', "
#define ORDER "'fortran_order': False, "
#define SHAPE(s) "{" DESCR ORDER "'shape': " s "}"

/* As older and other writers have it: any order, either quote, no last comma, L. */
static void test_texts(void **state)
{
    static const struct {
        const char *text;
        uint32_t nd;
        uint64_t dim[2], bytes;
        bool fortran, swap, line;
    } cases[] = {
        {SHAPE("(2, 3), "), 2, {2, 3}, 24, false, false, false},
        {SHAPE("(2, 3)") "\n", 2, {2, 3}, 24, false, false, true},
        {SHAPE("(2,3,)") " \t\n", 2, {2, 3}, 24, false, false, true},
        {SHAPE("()"), 0, {0}, 4, false, false, false},
        {SHAPE("(7L,)"), 1, {7}, 28, false, false, false},
        {SHAPE("(0,)"), 1, {0}, 0, false, false, false},
        {SHAPE("(2305843009213693951,)"),
         1,
         {0x1fffffffffffffff},
         0x7ffffffffffffffc,
         false,
         false,
         false},
        {"{\"shape\": (2,), \"descr\": \">f4\", \"fortran_order\": True}",
         1,
         {2},
         8,
         true,
         true,
         false},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct npy_layout x;
        struct err e = {0};

        assert_ok(parse(cases[i].text, &x, &e), &e);
        assert_int_equal(x.dtype, DTYPE_F32);
        assert_int_equal(x.header, 10 + strlen(cases[i].text));
        assert_int_equal(x.shape.nd, cases[i].nd);
        for (uint32_t k = 0; k < x.shape.nd; k++)
            assert_int_equal(x.shape.dim[k], cases[i].dim[k]);
        assert_int_equal(x.bytes, cases[i].bytes);
        assert_int_equal(x.fortran, cases[i].fortran);
        assert_int_equal(x.swap, cases[i].swap);
        assert_int_equal(x.line, cases[i].line);
    }
}

#define TENS "1, 1, 1, 1, 1, 1, 1, 1, "

static void test_refused_texts(void **state)
{
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"", "byte 10 of the .npy header: the header is no dict"},
        {"[]", "byte 10 of the .npy header: the header is no dict"},
        {"{", "byte 11 of the .npy header: no string where one must be"},
        {"{}",
         "byte 12 of the .npy header: descr, fortran_order and shape are not all"},
        {"{" DESCR ORDER "}", "descr, fortran_order and shape are not all there"},
        {"{" DESCR "'shape': ()}", "descr, fortran_order and shape are not all there"},
        {"{" ORDER "'shape': ()}", "descr, fortran_order and shape are not all there"},
        {"{descr: '<f4'}", "byte 11 of the .npy header: no string where one must be"},
        {"{'descr", "byte 17 of the .npy header: a string that does not end"},
        {"{'de\\x73cr': '<f4'}", "a string that numpy does not write"},
        {"{'de\nscr': '<f4'}", "a string that numpy does not write"},
        {"{'size': 1}", "an entry that is none of descr, fortran_order and shape"},
        {"{'descr' '<f4'}", "no colon behind descr"},
        {"{'descr': <f4}", "no string where one must be"},
        {"{" DESCR "'descr': '<f4'}", "descr is there twice"},
        {"{" ORDER ORDER "}", "fortran_order is there twice"},
        {"{'shape': (), 'shape': ()}", "shape is there twice"},
        {"{'descr': '<f4' 'shape': ()}", "no comma between entries"},
        {"{'fortran_order': 0}", "neither True nor False"},
        {"{'fortran_order': Fals", "neither True nor False"},
        {SHAPE("2"), "the shape is no tuple"},
        {SHAPE("[2]"), "the shape is no tuple"},
        {SHAPE("(2)"), "the shape is a number and no tuple"},
        {SHAPE("(2 3)"), "no comma between dimensions"},
        {SHAPE("(-1,)"), "a negative dimension"},
        {SHAPE("(,)"), "no number where one must be"},
        {SHAPE("(2,,3)"), "no number where one must be"},
        {SHAPE("(02,)"), "no number where one must be"},
        {SHAPE("(0x2,)"), "no comma between dimensions"},
        {SHAPE("(2.,)"), "no comma between dimensions"},
        {SHAPE("(18446744073709551616,)"), "a dimension past 2^64"},
        {SHAPE("(184467440737095516160,)"), "a dimension past 2^64"},
        {SHAPE("(18446744073709551615,)"), "a shape of more than 2^63 bytes"},
        {SHAPE("(2305843009213693952,)"), "a shape of more than 2^63 bytes"},
        {SHAPE("(4294967296, 4294967296)"), "a shape of more than 2^63 bytes"},
        {SHAPE("(" TENS TENS TENS TENS TENS TENS TENS TENS "1)"),
         "more than 64 dimensions"},
        {SHAPE("(2,"), "no number where one must be"},
        {SHAPE("()") "{", "text behind the dict"},
        {SHAPE("()") "\r", "text behind the dict"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct npy_layout x;
        struct err e = {0};

        if (parse(cases[i].text, &x, &e) != -EBADMSG)
            fail_msg("%s: %d, %s", cases[i].text, e.code, e.text);
        assert_has(e.text, cases[i].why);
    }
}

/* What is quoted has at most 255 bytes. */
static void test_long_strings(void **state)
{
    char name[258], text[300];
    struct npy_layout x;

    (void)state;
    memset(name, 'x', sizeof name);
    for (int len = 255; len <= 256; len++) {
        struct err e = {0};

        snprintf(text, sizeof text, "{'%.*s': 1}", len, name);
        assert_int_equal(parse(text, &x, &e), -EBADMSG);
        assert_has(e.text, len == 255 ? "an entry that is none of"
                                      : "a string that numpy does not write");
    }
}

/* ---- types ---- */

static void test_types(void **state)
{
    static const struct {
        const char *descr;
        enum dtype dtype; /* DTYPE_NONE: none of ours */
        bool swap;
        const char *why;
    } cases[] = {
        {"|b1", DTYPE_BOOL, false, NULL},
        {"|u1", DTYPE_U8, false, NULL},
        {">i1", DTYPE_I8, false, NULL}, /* one byte has no order */
        {">u2", DTYPE_U16, true, NULL},
        {"<i2", DTYPE_I16, false, NULL},
        {"=u4", DTYPE_U32, false, NULL},
        {"i4", DTYPE_I32, false, NULL},
        {"<u8", DTYPE_U64, false, NULL},
        {">i8", DTYPE_I64, true, NULL},
        {"<f2", DTYPE_F16, false, NULL},
        {">f8", DTYPE_F64, true, NULL},
        {"<c8", DTYPE_C64, false, NULL},
        {">c16", DTYPE_C128, true, NULL},
        {"|V2", DTYPE_BF16, false, NULL},
        {"<f1", DTYPE_F8_E5M2, false, NULL},
        {"|O", DTYPE_NONE, false, "'|O': Python objects, which are pickles"},
        {"<U3", DTYPE_NONE, false, "'<U3': text"},
        {"|S3", DTYPE_NONE, false, "'|S3': text"},
        {"|a3", DTYPE_NONE, false, "'|a3': text"},
        {"<M8[ns]", DTYPE_NONE, false, "'<M8[ns]': dates"},
        {"<m8[s]", DTYPE_NONE, false, "'<m8[s]': dates"},
        {"|V1", DTYPE_NONE, false, "'|V1': raw bytes"},
        {"|V4", DTYPE_NONE, false, "'|V4': raw bytes"},
        {"<f16", DTYPE_NONE, false, "'<f16': floats of an unusual width"},
        {"<c32", DTYPE_NONE, false, "'<c32': floats of an unusual width"},
        {"<f44", DTYPE_NONE, false, "'<f44': floats of an unusual width"},
        {"<<f4", DTYPE_NONE, false, "'<<f4': of a type that is not known"},
        {"<i3", DTYPE_NONE, false, "'<i3': of a type that is not known"},
        {"<", DTYPE_NONE, false, "'<': of a type that is not known"},
        {"", DTYPE_NONE, false, "'': of a type that is not known"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct npy_layout x;
        struct err e = {0};
        char text[100];
        int rc;

        snprintf(text, sizeof text, "{'descr': '%s', " ORDER "'shape': (2,)}",
                 cases[i].descr);
        rc = parse(text, &x, &e);
        if (cases[i].why) {
            if (rc != -ENOTSUP)
                fail_msg("%s: %d, %s", cases[i].descr, rc, e.text);
            assert_has(e.text, cases[i].why);
            continue;
        }
        assert_ok(rc, &e);
        assert_int_equal(x.dtype, cases[i].dtype);
        assert_int_equal(x.swap, cases[i].swap);
    }
}

static void test_structures(void **state)
{
    static const char *const descr[] = {"[('a', '<f4')]", "('<f4', (2,))"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(descr); i++) {
        struct npy_layout x;
        struct err e = {0};
        char text[100];

        snprintf(text, sizeof text, "{'descr': %s, " ORDER "'shape': ()}", descr[i]);
        assert_int_equal(parse(text, &x, &e), -ENOTSUP);
        assert_has(e.text, "elements of a structured type");
    }
}

/* ml_dtypes' floats of one byte are |V1: whoever knows which may say so. */
static void test_one_byte(void **state)
{
    static const struct {
        const char *descr;
        enum dtype want;
    } cases[] = {{"|V1", DTYPE_F8_E4M3}, {"<f1", DTYPE_F8_E5M2}, {"<f4", DTYPE_F32}};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf b = {0};
        struct npy_layout x;
        struct err e = {0};
        char text[100];

        snprintf(text, sizeof text, "{'descr': '%s', " ORDER "'shape': (3,)}",
                 cases[i].descr);
        put_header(&b, text);
        assert_ok(npy_parse_as(b.data, b.len, DTYPE_F8_E4M3, &x, &e), &e);
        assert_int_equal(x.dtype, cases[i].want);
    }
}

/* ---- the prefix ---- */

#define PREFIX(bytes) "\x93NUMPY" bytes, sizeof "\x93NUMPY" bytes - 1

static void test_prefixes(void **state)
{
    static const struct {
        const char *head;
        size_t len;
        int code;
        uint64_t size;
        const char *why;
    } cases[] = {
        {PREFIX("\1\0\x76\0"), 0, 128, NULL},
        {PREFIX("\1\0\xff\xff"), 0, 65545, NULL},
        {PREFIX("\2\0\x74\0\0\0"), 0, 128, NULL},
        {PREFIX("\3\0\xf4\xff\3\0"), 0, NPY_MAX_HEADER, NULL},
        {PREFIX("\3\0\xf5\xff\3\0"), EFBIG, 0, "an .npy header of 262145 bytes"},
        {PREFIX("\2\0\xff\xff\xff\xff"), EFBIG, 0,
         "an .npy header of 4294967307 bytes"},
        {PREFIX("\1\0\x76"), EBADMSG, 0, "it does not start as an .npy file does"},
        {PREFIX("\2\0\x74\0\0"), EBADMSG, 0, "it ends in the header of an .npy file"},
        {"\x93NUMPX\1\0\0\0", 10, EBADMSG, 0, "it does not start as an .npy file does"},
        {PREFIX("\0\0\0\0"), ENOTSUP, 0, ".npy version 0.0 is not known"},
        {PREFIX("\4\0\0\0\0\0"), ENOTSUP, 0, ".npy version 4.0 is not known"},
        {PREFIX("\1\1\0\0"), ENOTSUP, 0, ".npy version 1.1 is not known"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct err e = {0};
        uint64_t size = 0;
        int rc = npy_header_size(cases[i].head, cases[i].len, &size, &e);

        if (rc != -cases[i].code)
            fail_msg("case %zu: %d, %s", i, rc, e.text);
        if (cases[i].why)
            assert_has(e.text, cases[i].why);
        else
            assert_int_equal(size, cases[i].size);
    }
}

/* The length tells where the text ends, and all of it must be there. */
static void test_lengths(void **state)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct npy_layout x;
    struct err e = {0};

    (void)state;
    put_header(&b, SHAPE("(2, 3)"));
    assert_ok(npy_parse(b.data, b.len, &x, &e), &e);
    assert_int_equal(npy_parse(b.data, b.len - 1, &x, &e), -EBADMSG);
    assert_has(e.text, "the .npy header has 67 bytes, 66 are there");
    b.data[8]--; /* the brace is an element now */
    assert_int_equal(npy_parse(b.data, b.len, &x, &e), -EBADMSG);
    assert_has(e.text, "byte 66 of the .npy header: no comma between");
}

/* ---- where elements lie ---- */

static void test_steps(void **state)
{
    static const struct {
        struct npy_layout x;
        int64_t want[3];
    } cases[] = {
        {{.shape = {3, {2, 3, 4}}}, {12, 4, 1}},
        {{.shape = {3, {2, 3, 4}}, .fortran = true}, {1, 2, 6}},
        {{.shape = {2, {2, 3}}}, {3, 1}},
        {{.shape = {2, {2, 3}}, .fortran = true}, {1, 2}},
        {{.shape = {1, {7}}}, {1}},
        {{.shape = {0}}, {0}},
        {{.shape = {3, {0, UINT64_MAX, UINT64_MAX}}}, {0, -1, 1}}, /* no element */
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        int64_t step[SHAPE_MAX_DIMS] = {0};

        npy_steps(&cases[i].x, step);
        for (uint32_t k = 0; k < 3; k++)
            assert_int_equal(step[k], cases[i].want[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_texts),        cmocka_unit_test(test_refused_texts),
        cmocka_unit_test(test_long_strings), cmocka_unit_test(test_types),
        cmocka_unit_test(test_structures),   cmocka_unit_test(test_one_byte),
        cmocka_unit_test(test_prefixes),     cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_steps),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
