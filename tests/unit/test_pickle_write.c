/* SPDX-License-Identifier: MIT */
/* tests/unit/test_pickle_write.c - opcodes as CPython's pickle writes them, and the memo. */
#include "index/formats/pickle/pickle_write.h"

#include <stdio.h>

#include "tests/unit/unit.h"

static void check(struct pickler *p, const void *want, size_t len)
{
    assert_int_equal(buf_failed(&p->out), 0);
    assert_int_equal(p->out.len, len);
    assert_memory_equal(p->out.data, want, len);
    pickle_release(p);
}

#define CHECK(p, want) check(p, want, sizeof(want) - 1)

static void test_integers(void **state)
{
    static const struct {
        int64_t v;
        const char *want;
        size_t len;
    } cases[] = {
        {0, "K\0", 2},
        {255, "K\xff", 2},
        {256, "M\0\1", 3},
        {65535, "M\xff\xff", 3},
        {65536, "J\0\0\1\0", 5},
        {-1, "J\xff\xff\xff\xff", 5},
        {INT32_MAX, "J\xff\xff\xff\x7f", 5},
        {INT32_MIN, "J\0\0\0\x80", 5},
        {INT64_C(2147483648), "\x8a\x08\0\0\0\x80\0\0\0\0", 10},
        {INT64_MIN, "\x8a\x08\0\0\0\0\0\0\0\x80", 10},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct pickler p = {0};

        pickle_int(&p, cases[i].v);
        check(&p, cases[i].want, cases[i].len);
    }
}

/* Two's complement in as few bytes as say the sign. */
static void test_long(void **state)
{
    static const struct {
        const char *v;
        size_t len;
        const char *want;
        size_t want_len;
    } cases[] = {
        {"\1\0\0\0", 4, "\x8a\1\1", 3},       {"\x80\0\0", 3, "\x8a\2\x80\0", 4},
        {"\x80\xff\xff", 3, "\x8a\1\x80", 3}, {"\x7f\xff\xff", 3, "\x8a\2\x7f\xff", 4},
        {"\xff\xff", 2, "\x8a\1\xff", 3},     {"\0\0", 2, "\x8a\1\0", 3},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct pickler p = {0};

        pickle_long(&p, (const unsigned char *)cases[i].v, cases[i].len);
        check(&p, cases[i].want, cases[i].want_len);
    }
}

static void test_plain(void **state)
{
    struct pickler p = {0};

    (void)state;
    pickle_begin(&p);
    pickle_none(&p);
    pickle_bool(&p, true);
    pickle_bool(&p, false);
    pickle_double(&p, 1.5);
    pickle_text(&p, "h\303\251\0x", 5);
    pickle_end(&p);
    CHECK(&p, "\x80\x02N\x88\x89G\x3f\xf8\0\0\0\0\0\0X\5\0\0\0h\303\251\0x.");
}

/* pickle.dumps(b"a\xff\x80", 2), but for the memo. */
static void test_bytes(void **state)
{
    struct pickler p = {0};

    (void)state;
    pickle_bytes(&p, "a\xff\x80", 3);
    CHECK(&p, "c_codecs\nencode\nq\0(X\5\0\0\0a\303\277\302\200X\6\0\0\0latin1tR");
}

static void test_memo(void **state)
{
    struct pickler p = {0};
    uint32_t memo;

    (void)state;
    pickle_global(&p, "torch", "Size");
    pickle_global(&p, "torch", "float32");
    pickle_string(&p, "a");
    memo = pickle_remember(&p);
    pickle_global(&p, "torch", "Size");
    pickle_again(&p, memo);
    pickle_global(&p, "torch", "float32");
    CHECK(
        &p,
        "ctorch\nSize\nq\0ctorch\nfloat32\nq\1X\1\0\0\0ar\x40\0\0\0h\0j\x40\0\0\0h\1");
}

/* More globals than the memo keeps: the rest are written out each time. */
static void test_many_globals(void **state)
{
    static char name[100][8];
    struct pickler p = {0};
    size_t before;

    (void)state;
    for (int i = 0; i < 100; i++) {
        snprintf(name[i], sizeof name[i], "n%02d", i);
        pickle_global(&p, "m", name[i]);
    }
    before = p.out.len;
    pickle_global(&p, "m", name[63]);
    assert_int_equal(p.out.len, before + 2);
    before = p.out.len;
    pickle_global(&p, "m", name[64]);
    assert_int_equal(p.out.len, before + strlen("cm\nn64\n"));
    pickle_release(&p);
}

static void test_containers(void **state)
{
    static const uint64_t dim[] = {3, 300};
    struct pickler p = {0};

    (void)state;
    pickle_dict(&p);
    pickle_mark(&p);
    pickle_string(&p, "k");
    pickle_list(&p);
    pickle_mark(&p);
    pickle_torch_size(&p, dim, 2);
    pickle_append(&p);
    pickle_set(&p);
    pickle_ordered_dict(&p);
    CHECK(&p, "}(X\1\0\0\0k](ctorch\nSize\nq\0((K\3M\x2c\1ttReu"
              "ccollections\nOrderedDict\nq\1)R");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_integers),   cmocka_unit_test(test_long),
        cmocka_unit_test(test_plain),      cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_memo),       cmocka_unit_test(test_many_globals),
        cmocka_unit_test(test_containers),
    };

    return cmocka_run_group_tests_name("pickle_write", tests, NULL, NULL);
}
