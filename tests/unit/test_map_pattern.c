/* SPDX-License-Identifier: MIT */
/* tests/unit/test_map_pattern.c - patterns of keys, their captures, and templates. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <stdio.h>

#include "base/err.h"
#include "index/map/pattern.h"

static void test_checked(void **state UNUSED)
{
    static const struct {
        const char *pattern, *words; /* NULL: fine */
    } t[] = {
        {"a.b", NULL},
        {"{a}", NULL},
        {"x.{layer}.y.{layer}", NULL},
        {"x.{rest...}", NULL},
        {"layer_{n}-model", NULL},
        {"a}b", NULL},
        {"{_a1}", NULL},
        {"", "empty, or more than 8 names"},
        {"{a}.{b}.{c}.{d}.{e}.{f}.{g}.{h}", NULL},
        {"{a}.{b}.{c}.{d}.{e}.{f}.{g}.{h}.{i}", "empty, or more than 8 names"},
        {"x.{", "a { without its }"},
        {"x.{abc", "a { without its }"},
        {"{}", "{} is no name"},
        {"{1a}", "{1a} is no name"},
        {"{a b}", "{a b} is no name"},
        {"{...}", "{...} is no name"},
        {"{a}{b}", "nothing between two names"},
        {"{rest...}.x", "{rest...} must stand last"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
        struct err e = {0};
        int ret = pattern_check(t[i].pattern, &e);

        if (ret != (t[i].words ? -EINVAL : 0))
            fail_msg("\"%s\": %d, %s", t[i].pattern, ret, e.text);
        if (t[i].words)
            assert_has(e.text, t[i].words);
    }
}

/* Names and texts of a match as "a=x b=y". */
static const char *matched(const char *pattern, const char *key, size_t len, char *out)
{
    struct captures c;
    char *at = out;

    if (!pattern_match(pattern, key, len, &c))
        return "no";
    *at = '\0';
    for (unsigned i = 0; i < c.count; i++)
        at += sprintf(at, "%s%.*s=%.*s", i ? " " : "", (int)c.at[i].name_len,
                      c.at[i].name, (int)c.at[i].len, c.at[i].text);
    return out;
}

static void test_matches(void **state UNUSED)
{
    static const struct {
        const char *pattern, *key, *want;
    } t[] = {
        {"a.b", "a.b", ""},
        {"a.b", "a.bc", "no"},
        {"a.b", "a", "no"},
        {"a.b", "", "no"},
        {"{x}", "abc", "x=abc"},
        {"{x}", "a.b", "no"},
        {"{x}", "", "no"},
        {"a.{x}", "a.", "no"},
        {"{x...}", "a.b", "x=a.b"},
        {"a.{x...}", "a.b.c.d", "x=b.c.d"},
        {"a.{x...}", "a.", "no"},
        {"h.{n}.w", "h.12.w", "n=12"},
        {"h.{n}.w", "h.1.2.w", "no"},
        {"h.{n}.w", "h..w", "no"},
        {"{a}.{b}", "x.y", "a=x b=y"},
        {"{a}.x.{a}", "7.x.7", "a=7"},
        {"{a}.x.{a}", "7.x.77", "no"},
        {"layer_{n}-model", "layer_03-model", "n=03"},
        {"layer_{n}-model", "layer_0.3-model", "no"},
        {"p{n}q.w", "p5q.w", "n=5"},
        {"a}b", "a}b", ""},
    };

    for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
        char text[200];
        const char *got = matched(t[i].pattern, t[i].key, strlen(t[i].key), text);

        if (strcmp(got, t[i].want) != 0)
            fail_msg("%s, %s: \"%s\", not \"%s\"", t[i].pattern, t[i].key, got,
                     t[i].want);
    }
}

/* A key is bytes: a NUL is one of them. */
static void test_keys_with_nul(void **state UNUSED)
{
    struct captures c;

    assert_true(pattern_match("a.{x}", "a.b\0c", 5, &c));
    assert_int_equal(c.at[0].len, 3);
    assert_false(pattern_match("a.b", "a.b\0c", 5, &c));
}

static void test_templates(void **state UNUSED)
{
    static const struct {
        const char *text, *want;
    } t[] = {
        {"plain", "plain"},
        {"{layer}", "7"},
        {"m.{layer}.{n}{layer}.w", "m.7.42949672967.w"},
        {"{layer}{layer}", "77"},
        {"a}b", "a}b"},
    };
    struct captures c = {0};
    struct err e = {0};

    assert_true(pattern_match("in.{layer}.{unused}", "in.7.u", 6, &c));
    assert_ok(capture_bind(&c, "n", 1ull << 32, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
        CLEANUP(buf_release) struct buf b = {0};

        assert_ok(template_check(t[i].text, &e), &e);
        assert_ok(template_write(t[i].text, &c, &b, &e), &e);
        assert_string_equal(b.data, t[i].want);
    }
}

static void test_templates_refused(void **state UNUSED)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct captures c = {0};
    struct err e = {0};

    assert_int_equal(template_write("a.{layer}", &c, &b, &e), -EINVAL);
    assert_has(e.text, "\"a.{layer}\": nothing gives {layer}");
    assert_int_equal(template_check("", &e), -EINVAL);
    assert_has(e.text, "an empty name");
    assert_int_equal(template_check("a.{layer", &e), -EINVAL);
    assert_has(e.text, "a { without its }");
    assert_int_equal(template_check("a.{2}", &e), -EINVAL);
    assert_has(e.text, "{2} is no name");
}

static void test_numbers(void **state UNUSED)
{
    static const struct {
        const char *text;
        bool number;
        uint64_t want;
    } t[] = {
        {"0", true, 0},
        {"12", true, 12},
        {"18446744073709551615", true, UINT64_MAX},
        {"18446744073709551616", false, 0},
        {"012", false, 0},
        {"00", false, 0},
        {"1a", false, 0},
        {"-1", false, 0},
        {"", false, 0},
    };
    struct capture bound = {.number = 5};
    uint64_t n = 0;

    for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
        struct capture c = {.text = t[i].text, .len = strlen(t[i].text)};

        assert_int_equal(capture_number(&c, &n), t[i].number);
        if (t[i].number)
            assert_int_equal(n, t[i].want);
    }
    assert_true(capture_number(&bound, &n));
    assert_int_equal(n, 5);
}

static void test_names(void **state UNUSED)
{
    struct captures c = {0};
    struct err e = {0};
    const char *at = "x.{a}y{b...}", *name;
    size_t len;

    assert_true(pattern_has("x.{a}y{b...}", "a", 1));
    assert_true(pattern_has("x.{a}y{b...}", "b", 1));
    assert_false(pattern_has("x.{a}y{b...}", "x", 1));
    assert_true(pattern_next_name(&at, &name, &len) && len == 1 && *name == 'a');
    assert_true(pattern_next_name(&at, &name, &len) && len == 1 && *name == 'b');
    assert_false(pattern_next_name(&at, &name, &len));
    for (unsigned i = 0; i < CAPTURES_MAX; i++)
        assert_ok(capture_bind(&c, "n", i, &e), &e);
    assert_int_equal(capture_bind(&c, "n", 9, &e), -EINVAL);
    assert_has(e.text, "more than 8 names");
    assert_null(capture_find(&c, "nn", 2));
    assert_int_equal(capture_find(&c, "n", 1)->number, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_checked),
        cmocka_unit_test(test_matches),
        cmocka_unit_test(test_keys_with_nul),
        cmocka_unit_test(test_templates),
        cmocka_unit_test(test_templates_refused),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_names),
    };

    return cmocka_run_group_tests_name("map_pattern", tests, NULL, NULL);
}
