/* SPDX-License-Identifier: MIT */
/* tests/unit/test_deepspeed_pattern.c - patterns as Python's re.match() takes them. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/deepspeed/deepspeed_pattern.h"

/* What re.match(pattern, name) of Python 3.11 says. */
static const struct {
    const char *pattern, *name;
    bool is;
} cases[] = {
    {"\\d+.input_layernorm.weight", "12.input_layernorm.weight", true},
    {"\\d+.input_layernorm.weight", "1234input_layernorm.weight", true},
    {"\\d+.input_layernorm.weight", "4.post_attention_layernorm.weight", false},
    {"\\d+.weight", "7.weight", true},
    {"\\d+.weight", "7.weight_more", true},
    {"\\d+.weight", "7.mlp.weight", false},
    {"\\d+.weight", "x7.weight", false},
    {"\\d+.weight$", "7.weight_more", false},
    {"^layers\\.0\\.norm\\.weight$", "layers.0.norm.weight", true},
    {"^layers\\.0\\.norm\\.weight$", "layers.0.norm.weights", false},
    {"^layers\\.0\\.norm\\.weight$", "layers.0.norm.weigh", false},
    {"^layers\\.0\\.norm\\.weight$", "layersx0.norm.weight", false},
    {"^a\\-b$", "a-b", true},
    {".*\\.bias$", "a.b.bias", true},
    {".*\\.bias$", "a.b.bias.bias", true},
    {".*\\.bias$", "bias", false},
    {".*.*.*.*.*.*.*.*.*.*x", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", false},
    {"a?b", "b", true},
    {"a?b", "ab", true},
    {"a?b", "aab", false},
    {"a*a*a*b", "aaab", true},
    {"a+", "b", false},
    {"", "anything", true},
    {"$", "anything", false},
    {"$", "", true},
    {"^$", "", true},
};

static void test_matches(void **state)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct ds_pattern p;
        struct err e = {0};
        uint64_t effort = 0;

        if (ds_pattern_parse(a, cases[i].pattern, strlen(cases[i].pattern), &p, &e) < 0)
            fail_msg("%s", e.text);
        if (ds_pattern_matches(&p, cases[i].name, strlen(cases[i].name), &effort) !=
                cases[i].is ||
            p.used != cases[i].is)
            fail_msg("%s against %s", cases[i].pattern, cases[i].name);
    }
}

/* What could mean something else than here is refused by name. */
static void test_refused(void **state)
{
    static const char *const refused[] = {
        "layers.[0-9]+.weight",
        "(a|b)",
        "a|b",
        "a{2}",
        "\\w+",
        "\\",
        "a^b",
        "a$b",
        "a++",
        "a*?",
        "+",
        "*a",
        "\\Aa",
        "a\xc3\xa9",
        "a\nb",
        "\\bword",
        "a)",
        "\\1",
    };
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    char longer[600];

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(refused); i++) {
        struct ds_pattern p;
        struct err e = {0};

        if (ds_pattern_parse(a, refused[i], strlen(refused[i]), &p, &e) != -ENOTSUP)
            fail_msg("accepted: %s", refused[i]);
    }
    memset(longer, 'a', sizeof longer);
    for (size_t len = 511; len < 515; len++) {
        struct ds_pattern p;
        struct err e = {0};

        assert_int_equal(ds_pattern_parse(a, longer, len, &p, &e),
                         len > 512 ? -ENOTSUP : 0);
    }
}

/* The longest pattern there can be against a long name: time in proportion to both. */
static void test_effort(void **state)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    char text[513], name[4096];
    struct ds_pattern p;
    struct err e = {0};
    uint64_t effort = 0;

    (void)state;
    for (size_t i = 0; i < 512; i += 2)
        memcpy(text + i, "a+", 2);
    memset(name, 'a', sizeof name);
    name[sizeof name - 1] = 'b';
    text[510] = 'c';
    text[511] = '$';
    assert_int_equal(ds_pattern_parse(a, text, 512, &p, &e), 0);
    assert_false(ds_pattern_matches(&p, name, sizeof name, &effort));
    assert_true(effort > 0 && effort < 3 * 512 * sizeof name);
}

static void test_many(void **state)
{
    static const char *const texts[] = {"^b$", "\\d+.x", "^a$", "^c$", "c.*", "^a$"};
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct ds_pattern pattern[ARRAY_SIZE(texts)], *first;
    struct ds_patterns s = {.pattern = pattern, .count = ARRAY_SIZE(texts)};
    struct err e = {0};
    uint64_t effort = 0;

    (void)state;
    for (uint32_t i = 0; i < s.count; i++) {
        assert_int_equal(
            ds_pattern_parse(a, texts[i], strlen(texts[i]), &pattern[i], &e), 0);
        pattern[i].number = i;
    }
    ds_patterns_begin(&s);
    assert_int_equal(s.exact, 4);
    assert_int_equal(ds_patterns_find(&s, "b", 1, &effort, &first), 1);
    assert_int_equal(first->number, 0);
    assert_int_equal(ds_patterns_find(&s, "7.x", 3, &effort, &first), 1);
    assert_int_equal(first->number, 1);
    assert_int_equal(ds_patterns_find(&s, "a", 1, &effort, &first), 2); /* twice */
    assert_int_equal(ds_patterns_find(&s, "c", 1, &effort, &first), 2); /* both kinds */
    assert_int_equal(ds_patterns_find(&s, "cd", 2, &effort, &first), 1);
    assert_int_equal(first->number, 4);
    assert_int_equal(ds_patterns_find(&s, "aa", 2, &effort, &first), 0);
    assert_null(first);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matches),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_effort),
        cmocka_unit_test(test_many),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
