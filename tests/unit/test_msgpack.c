/* SPDX-License-Identifier: MIT */
/* tests/unit/test_msgpack.c - MessagePack: each kind of value, and what is refused. */
#include "tests/unit/unit.h"

#include <errno.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/flax/msgpack.h"
#include "remote/source.h"

/* All values of `data` as text, one word each; what is wrong as "!". */
static void tell(const void *data, size_t len, struct buf *out)
{
    CLEANUP(source_putp) struct source *s = NULL;
    struct msgpack m;
    struct msgpack_value v;
    struct err e = {0};
    int rc;

    assert_ok(source_from_memory(data, len, false, "t", &s, &e), &e);
    assert_ok(msgpack_init(&m, s, 0, len, &e), &e);
    while ((rc = msgpack_next(&m, &v, &e)) == 1) {
        if (out->len)
            buf_addc(out, ' ');
        switch (v.kind) {
        case MSGPACK_NIL:
            buf_adds(out, "nil");
            break;
        case MSGPACK_BOOL:
            buf_adds(out, v.b ? "true" : "false");
            break;
        case MSGPACK_INT:
            buf_addf(out, "%" PRId64, v.i);
            break;
        case MSGPACK_UINT:
            buf_addf(out, "%" PRIu64, v.u);
            break;
        case MSGPACK_FLOAT:
            buf_addf(out, "%g", v.f);
            break;
        case MSGPACK_ARRAY:
            buf_addf(out, "[%" PRIu64, v.len);
            break;
        case MSGPACK_MAP:
            buf_addf(out, "{%" PRIu64, v.len);
            break;
        case MSGPACK_STR:
        case MSGPACK_BIN:
        case MSGPACK_EXT:
            if (v.kind == MSGPACK_EXT)
                buf_addf(out, "%d:", v.ext);
            buf_adds(out, v.kind == MSGPACK_STR ? "s" : "b");
            assert_ok(msgpack_bytes(&m, &v, 100, out, &e), &e);
            break;
        }
    }
    if (rc < 0) {
        assert_int_equal(rc, -EBADMSG);
        buf_adds(out, "!");
    }
}

#define CASE(bytes, want)                                                              \
    {                                                                                  \
        bytes, sizeof bytes - 1, want                                                  \
    }

static void test_values(void **state)
{
    static const struct {
        const char *data;
        size_t len;
        const char *want;
    } cases[] = {
        CASE("\x00\x7f\xe0\xff", "0 127 -32 -1"),
        CASE("\xc0\xc2\xc3", "nil false true"),
        CASE("\xcc\xff\xcd\x01\x00\xce\xff\xff\xff\xff", "255 256 4294967295"),
        CASE("\xcf\x7f\xff\xff\xff\xff\xff\xff\xff", "9223372036854775807"),
        CASE("\xcf\xff\xff\xff\xff\xff\xff\xff\xff", "18446744073709551615"),
        CASE("\xd0\x80\xd1\x80\x00\xd2\x80\x00\x00\x00", "-128 -32768 -2147483648"),
        CASE("\xd3\xff\xff\xff\xff\xff\xff\xff\xfe", "-2"),
        CASE("\xca\x3f\xc0\x00\x00\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00", "1.5 -0.5"),
        CASE("\xa0\xa2hi\xd9\x01x\xda\x00\x01y\xdb\x00\x00\x00\x01z", "s shi sx sy sz"),
        CASE("\xc4\x01x\xc5\x00\x01y\xc6\x00\x00\x00\x01z", "bx by bz"),
        CASE("\xd4\x05x\xd5\xffxy\xd6\x01wxyz", "5:bx -1:bxy 1:bwxyz"),
        CASE("\xc7\x03\x02"
             "abc\xc8\x00\x01\x03x\xc9\x00\x00\x00\x00\x01",
             "2:babc 3:bx 1:b"),
        CASE("\x92\x01\x02\x81\x01\x02\x90\x80", "[2 1 2 {1 1 2 [0 {0"),
        CASE("\xdc\x00\x01\x05\xdd\x00\x00\x00\x00\xde\x00\x01\x01\x02"
             "\xdf\x00\x00\x00\x00",
             "[1 5 [0 {1 1 2 {0"),
        CASE("\x01\xc1", "1!"),
        CASE("\xcd\x01", "!"),
        CASE("\xa3hi", "!"),
        CASE("\xc6\xff\xff\xff\xffx", "!"),
        CASE("\xdd\xff\xff\xff\xff\x01", "!"),
        CASE("\xdf\x80\x00\x00\x00\x01\x01", "!"),
        CASE("\x92\x01", "!"),
        CASE("\x82\x01\x02\x03", "!"),
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf got = {0};

        tell(cases[i].data, cases[i].len, &got);
        assert_string_equal(got.data, cases[i].want);
    }
}

/* Longer than the window: [BIN of 10000, "x", [[1]], 7]. */
static void test_long(void **state)
{
    enum { LONG = 10000 };
    CLEANUP(buf_release) struct buf b = {0}, got = {0};
    CLEANUP(source_putp) struct source *s = NULL;
    struct msgpack m, in;
    struct msgpack_value v, bin;
    struct err e = {0};

    (void)state;
    buf_add(&b, "\xff\x94\xc5\x27\x10", 5);
    memset(buf_grow(&b, LONG), 5, LONG);
    buf_add(&b, "\xa1x\x91\x91\x01\x07\xff", 7);
    assert_ok(source_from_memory(b.data, b.len, false, "t", &s, &e), &e);
    assert_ok(msgpack_init(&m, s, 1, b.len - 2, &e), &e);
    assert_ok(msgpack_need(&m, &v, &e), &e);
    assert_int_equal(v.len, 4);
    assert_ok(msgpack_need(&m, &bin, &e), &e);
    assert_int_equal(bin.at, 5);
    assert_int_equal(bin.len, LONG);
    assert_int_equal(msgpack_bytes(&m, &bin, LONG - 1, &got, &e), -EFBIG);
    e = (struct err){0};
    assert_ok(msgpack_bytes(&m, &bin, LONG, &got, &e), &e);
    assert_int_equal(got.len, LONG);
    assert_int_equal(got.data[LONG - 1], 5);
    msgpack_enter(&m, &bin, &in);
    for (int i = 0; i < LONG; i++) {
        assert_ok(msgpack_need(&in, &v, &e), &e);
        assert_int_equal(v.i, 5);
    }
    assert_int_equal(msgpack_next(&in, &v, &e), 0);
    assert_ok(msgpack_need(&m, &v, &e), &e);
    assert_int_equal(v.kind, MSGPACK_STR);
    for (int i = 0; i < 3; i++) /* [[1]] */
        assert_ok(msgpack_need(&m, &v, &e), &e);
    assert_int_equal(v.i, 1);
    assert_ok(msgpack_need(&m, &v, &e), &e);
    assert_int_equal(v.i, 7);
    assert_int_equal(msgpack_need(&m, &v, &e), -EBADMSG);
    e = (struct err){0};
    assert_int_equal(msgpack_init(&m, s, 2, b.len, &e), -EBADMSG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_long),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
