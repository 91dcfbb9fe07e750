/* SPDX-License-Identifier: MIT */
/* tests/unit/test_ranges.c - sets of byte ranges, compared with one flag per byte. */
#include "save/ranges.h"

#include <errno.h>
#include <stdio.h>

#include "tests/unit/unit.h"

#include "tests/unit/fail_alloc.h"

void *__real_reallocarray(void *old, size_t count, size_t size);
void *__wrap_reallocarray(void *old, size_t count, size_t size);

void *__wrap_reallocarray(void *old, size_t count, size_t size)
{
    return fail_alloc_now() ? NULL : __real_reallocarray(old, count, size);
}

enum { BYTES = 200 };

/* Sorted, disjoint and never adjacent, and the same bytes. */
static void compare(const struct ranges *r, const bool *has)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < r->count; i++) {
        assert_true(r->range[i].from < r->range[i].to);
        assert_true(i == 0 || r->range[i - 1].to < r->range[i].from);
    }
    for (uint64_t b = 0; b < BYTES; b++) {
        sum += has[b];
        assert_int_equal(ranges_hold(r, b, b + 1), has[b]);
        assert_int_equal(ranges_meet(r, b, b + 1), has[b]);
    }
    assert_int_equal(ranges_bytes(r), sum);
}

static void compare_range(const struct ranges *r, const bool *has, uint64_t from,
                          uint64_t to)
{
    bool all = true, any = false;
    struct range gap;
    uint64_t expect = from;

    for (uint64_t b = from; b < to; b++) {
        all &= has[b];
        any |= has[b];
    }
    assert_int_equal(ranges_hold(r, from, to), all);
    assert_int_equal(ranges_meet(r, from, to), any);
    for (uint64_t at = from; ranges_next_gap(r, &at, to, &gap);) {
        for (; expect < gap.from; expect++)
            assert_true(has[expect]);
        for (; expect < gap.to; expect++)
            assert_false(has[expect]);
        assert_int_equal(at, gap.to);
    }
    for (; expect < to; expect++)
        assert_true(has[expect]);
}

static void test_random(void **state)
{
    unsigned seed = 1;

    (void)state;
    for (int round = 0; round < 50; round++) {
        struct ranges r = {0}, copy = {0};
        bool has[BYTES] = {false};

        for (int op = 0; op < 200; op++) {
            uint64_t from = (uint64_t)rand_r(&seed) % BYTES;
            uint64_t end = from + (uint64_t)rand_r(&seed) % 30;
            uint64_t to = MIN(end, (uint64_t)BYTES);
            bool add = rand_r(&seed) % 5 < 3;

            assert_int_equal(
                add ? ranges_add(&r, from, to) : ranges_remove(&r, from, to), 0);
            for (uint64_t b = from; b < to; b++)
                has[b] = add;
            compare(&r, has);
            compare_range(&r, has, (uint64_t)rand_r(&seed) % 50,
                          50 + (uint64_t)rand_r(&seed) % 150);
        }
        assert_int_equal(ranges_copy(&copy, &r), 0);
        compare(&copy, has);
        ranges_clear(&r);
        assert_int_equal(ranges_bytes(&r), 0);
        ranges_release(&r);
        ranges_release(&copy);
    }
}

static void test_ends(void **state)
{
    struct ranges r = {0};
    struct range gap;
    uint64_t at = 0;

    (void)state;
    assert_true(ranges_hold(&r, 5, 5));
    assert_false(ranges_meet(&r, 5, 5));
    assert_false(ranges_hold(&r, 5, 6));
    assert_int_equal(ranges_add(&r, 7, 7), 0);
    assert_int_equal(ranges_add(&r, 9, 3), 0);
    assert_int_equal(r.count, 0);
    assert_int_equal(ranges_add(&r, 0, INT64_MAX), 0);
    assert_int_equal(ranges_remove(&r, 1, INT64_MAX - 1), 0);
    assert_int_equal(r.count, 2);
    assert_true(ranges_next_gap(&r, &at, INT64_MAX, &gap));
    assert_int_equal(gap.from, 1);
    assert_int_equal(gap.to, INT64_MAX - 1);
    assert_false(ranges_next_gap(&r, &at, INT64_MAX, &gap));
    ranges_release(&r);
}

/* Without memory the set is as it was. */
static void test_no_memory(void **state)
{
    struct ranges r = {0};

    (void)state;
    for (uint64_t i = 0; i < 16; i++) {
        int ret;

        fail_alloc_in = 1;
        ret = ranges_add(&r, i * 10, i * 10 + 5);
        if (ret < 0) {
            assert_int_equal(ret, -ENOMEM);
            assert_int_equal(r.count, i);
            fail_alloc_in = 0;
            assert_int_equal(ranges_add(&r, i * 10, i * 10 + 5), 0);
        }
        fail_alloc_in = 0;
        assert_int_equal(r.count, i + 1);
    }
    ranges_release(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_ends),
        cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
