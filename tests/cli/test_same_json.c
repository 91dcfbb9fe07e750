/* SPDX-License-Identifier: MIT */
/* tests/cli/test_same_json.c - which JSON texts `unshard diff` takes for the same object. */
#include "cli/diff_objects.h"

#include "base/err.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static bool same(const char *a, const char *b)
{
    struct err e = {0};
    bool one = false, other = false;

    assert_int_equal(same_json(a, strlen(a), b, strlen(b), &one, &e), 0);
    assert_int_equal(same_json(b, strlen(b), a, strlen(a), &other, &e), 0);
    assert_int_equal(one, other);
    return one;
}

static void test_same(void **state)
{
    (void)state;
    assert_true(same("1", "1"));
    assert_true(same("[1, 2]", "[1,2]"));
    assert_true(same("{\"a\": 1, \"b\": [true, null]}", "{\"b\":[true,null],\"a\":1}"));
    assert_true(same("0.5", "5e-1"));
    assert_true(same("\"\\u0041\"", "\"A\""));
    assert_true(same("not json", "not json"));
    assert_true(same("{\"a\": {\"b\": {\"c\": [1, [2, [3]]]}}}",
                     "{\"a\":{\"b\":{\"c\":[1,[2,[3]]]}}}"));
}

static void test_other(void **state)
{
    (void)state;
    assert_false(same("1", "2"));
    assert_false(same("1", "\"1\""));
    assert_false(same("true", "false"));
    assert_false(same("null", "0"));
    assert_false(same("[1, 2]", "[2, 1]"));
    assert_false(same("[1]", "[1, 1]"));
    assert_false(same("{\"a\": 1}", "{\"b\": 1}"));
    assert_false(same("{\"a\": 1, \"b\": 2}", "{\"a\": 2, \"b\": 1}"));
    assert_false(same("{\"a\": 1}", "[1]"));
    assert_false(same("{\"a\": [1, {\"b\": 2}]}", "{\"a\": [1, {\"b\": 3}]}"));
    assert_false(same("not json", "nor this"));
    assert_false(same("[]", "nor this"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same),
        cmocka_unit_test(test_other),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
