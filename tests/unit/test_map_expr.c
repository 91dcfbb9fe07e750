/* SPDX-License-Identifier: MIT */
/* tests/unit/test_map_expr.c - expressions of maps: values, and what is refused. */
#include "tests/unit/unit.h"

#include <errno.h>

#include "base/err.h"
#include "index/map/expr.h"

/* heads 12, groups 4, big 2^62; "odd" stops with an error of its own. */
static int lookup(void *user, const char *name, size_t len, int64_t *out, struct err *e)
{
    static const struct {
        const char *name;
        int64_t value;
    } known[] = {{"heads", 12}, {"groups", 4}, {"big", 1ll << 62}, {"a.b_1", 7}};
    unsigned *calls = user;

    ++*calls;
    for (size_t i = 0; i < ARRAY_SIZE(known); i++) {
        if (strlen(known[i].name) == len && memcmp(known[i].name, name, len) == 0) {
            *out = known[i].value;
            return 0;
        }
    }
    if (len == 3 && memcmp(name, "odd", 3) == 0)
        return err_set(e, EIO, "odd");
    return -ENOENT;
}

static int eval(const char *text, int64_t *out, struct err *e)
{
    unsigned calls = 0;

    *e = (struct err){0};
    return expr_eval(text, lookup, &calls, out, e);
}

static void test_values(void **state UNUSED)
{
    static const struct {
        const char *text;
        int64_t want;
    } t[] = {
        {"0", 0},
        {"  42  ", 42},
        {"heads", 12},
        {"a.b_1", 7},
        {"1+2*3", 7},
        {"(1+2)*3", 9},
        {"1-2-3", -4},
        {"1-(2-3)", 2},
        {"24/4/2", 3},
        {"24/(4/2)", 12},
        {"7%4*2", 6},
        {"2*7%4", 2},
        {"heads / groups * 64", 192},
        {"heads / groups + 2 % 2 - 1", 2},
        {"((((5))))", 5},
        {"0-9223372036854775807-1", INT64_MIN},
        {"9223372036854775807", INT64_MAX},
        {"big-1+big", INT64_MAX},
    };

    for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
        struct err e;
        int64_t got = -99;

        assert_ok(eval(t[i].text, &got, &e), &e);
        if (got != t[i].want)
            fail_msg("%s is %lld, not %lld", t[i].text, (long long)got,
                     (long long)t[i].want);
    }
}

static void test_refused(void **state UNUSED)
{
    static const struct {
        const char *text;
        int code;
        const char *words;
    } t[] = {
        {"", EINVAL, "is no expression"},
        {" ", EINVAL, "is no expression"},
        {"1 2", EINVAL, "is no expression, at \"2\""},
        {"1+", EINVAL, "is no expression"},
        {"*1", EINVAL, "is no expression, at \"*1\""},
        {"-1", EINVAL, "is no expression, at \"-1\""},
        {"()", EINVAL, "is no expression, at \")\""},
        {"(1", EINVAL, "is no expression"},
        {"1)", EINVAL, "is no expression, at \")\""},
        {"12x", EINVAL, "is no expression"},
        {"1.5", EINVAL, "is no expression"},
        {"heads groups", EINVAL, "is no expression, at \"groups\""},
        {"heads(1)", EINVAL, "is no expression, at \"(1)\""},
        {"1 & 2", EINVAL, "is no expression, at \"& 2\""},
        {"heads/0", ERANGE, "divides by 0"},
        {"heads%0", ERANGE, "divides by 0"},
        {"heads/5", ERANGE, "leaves a rest: 12 / 5"},
        {"big+big", ERANGE, "passes 2^63"},
        {"big*2", ERANGE, "passes 2^63"},
        {"0-big-big-1", ERANGE, "passes 2^63"},
        {"9223372036854775808", ERANGE, "passes 2^63"},
        {"(0-9223372036854775807-1)/(0-1)", ERANGE, "passes 2^63"},
        {"heads+layers*2", ENOENT, "layers has no value"},
        {"heads+odd", EIO, "odd"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
        struct err e;
        int64_t got;
        int ret = eval(t[i].text, &got, &e);

        if (ret != -t[i].code || e.code != t[i].code)
            fail_msg("\"%s\": %d, %s", t[i].text, ret, e.text);
        assert_has(e.text, t[i].words);
    }
}

/* `n` times `open`, then 1, then `n` times `close`. */
static int eval_nested(const char *open, const char *close, unsigned n, int64_t *out,
                       struct err *e)
{
    char text[1000] = "";

    for (unsigned i = 0; i < n; i++)
        strcat(text, open);
    strcat(text, "1");
    for (unsigned i = 0; i < n; i++)
        strcat(text, close);
    return eval(text, out, e);
}

static void test_depth(void **state UNUSED)
{
    struct err e;
    int64_t got = 0;

    assert_ok(eval_nested("(", ")", 64, &got, &e), &e);
    assert_int_equal(got, 1);
    assert_int_equal(eval_nested("(", ")", 65, &got, &e), -EINVAL);
    assert_has(e.text, "is too deep");
    assert_int_equal(eval_nested("1+(", ")", 64, &got, &e), -EINVAL);
    assert_has(e.text, "is too deep");
    assert_ok(eval_nested("", "+1", 300, &got, &e), &e); /* long is not deep */
    assert_int_equal(got, 301);
}

/* A name that is behind something wrong is not asked for. */
static void test_names_asked(void **state UNUSED)
{
    struct err e = {0};
    unsigned calls = 0;
    int64_t got;

    assert_ok(expr_eval("heads*heads+groups", lookup, &calls, &got, &e), &e);
    assert_int_equal(got, 148);
    assert_int_equal(calls, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_depth),
        cmocka_unit_test(test_names_asked),
    };

    return cmocka_run_group_tests_name("map_expr", tests, NULL, NULL);
}
