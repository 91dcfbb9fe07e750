/* SPDX-License-Identifier: MIT */
/* tests/unit/test_yaml.c - what YAML becomes as a tree of JSON, and what is refused. */
#include "unit.h"

#include <errno.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/yaml_tree.h"

#include "fail_alloc.h"

/* Parses a copy of just this length, so that sanitizers see a read behind its end. */
static int parse(const char *text, size_t len, struct json **doc, struct err *e)
{
    CLEANUP_FREE char *copy = malloc(len ? len : 1);

    assert_non_null(copy);
    memcpy(copy, text, len);
    return yaml_parse(copy, len, doc, e);
}

static struct json *tree(const char *text)
{
    struct json *doc = NULL;
    struct err e = {0};

    assert_ok(parse(text, strlen(text), &doc, &e), &e);
    return doc;
}

static void check_refused(const char *text, size_t len, const char *why)
{
    struct json *doc = NULL;
    struct err e = {0};

    assert_int_equal(parse(text, len, &doc, &e), -EBADMSG);
    assert_null(doc);
    if (!strstr(e.text, why))
        fail_msg("'%s' is not in '%s'", why, e.text);
}

/* As OmegaConf writes a model's configuration, with what people add by hand. */
static const char model[] = "mcore_gpt: false\n"
                            "num_layers: 12\n"
                            "kv_channels: null\n"
                            "init_method_std: 0.02\n"
                            "layernorm_epsilon: 1.0e-05\n"
                            "activation: fast-swiglu   # gated\n"
                            "tokenizer:\n"
                            "  library: 'megatron'\n"
                            "  type: \"GPT2\\tBPE\"\n"
                            "  empty: {}\n"
                            "blend:\n"
                            "- 0.5\n"
                            "- /data/a\n"
                            "- [1, yes, ~]\n"
                            "note: |\n"
                            "  two\n"
                            "  lines\n";

static void test_model(void **state)
{
    CLEANUP(json_freep) struct json *doc = tree(model);
    const struct json *in = json_get(doc, "tokenizer"), *v;
    const char *text;
    uint64_t n = 0;
    double d;
    bool b;

    (void)state;
    assert_int_equal(json_count(doc), 9);
    assert_true(json_bool(json_get(doc, "mcore_gpt"), &b) && !b);
    assert_true(json_u64(json_get(doc, "num_layers"), &n) && n == 12);
    assert_int_equal(json_kind(json_get(doc, "kv_channels")), JSON_NULL);
    assert_true(json_double(json_get(doc, "init_method_std"), &d) && d == 0.02);
    assert_true(json_double(json_get(doc, "layernorm_epsilon"), &d) && d == 1e-5);
    assert_true(json_string(json_get(doc, "activation"), &text));
    assert_string_equal(text, "fast-swiglu");
    assert_true(json_string(json_get(in, "type"), &text));
    assert_string_equal(text, "GPT2\tBPE");
    assert_int_equal(json_kind(json_get(in, "empty")), JSON_OBJECT);
    v = json_first(json_get(doc, "blend"));
    assert_true(json_double(v, &d) && d == 0.5);
    v = json_first(json_next(json_next(v)));
    assert_true(json_u64(v, &n) && n == 1);
    assert_true(json_bool(json_next(v), &b) && b);
    assert_true(json_string(json_get(doc, "note"), &text));
    assert_string_equal(text, "two\nlines\n");
}

/* What is a number or a truth only in some readers, or is quoted, is a string here. */
static void test_strings(void **state)
{
    static const char *const text[] = {
        "'12'",
        "\"true\"",
        "0x10",
        "012",
        "1_000",
        "+5",
        ".5",
        "1.",
        "1:30",
        "1e",
        "1.5e",
        "nan",
        ".inf",
        "-.5",
        "1.5x",
        "truth",
        "!!str 12",
        "!a 12",
        "y",
        "--1",
        "1234567890123456789012345678901234567890123456789012345678901234"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(text); i++) {
        CLEANUP(json_freep) struct json *doc = NULL;
        char line[128];

        snprintf(line, sizeof line, "a: %s\n", text[i]);
        doc = tree(line);
        if (json_kind(json_get(doc, "a")) != JSON_STRING)
            fail_msg("%s is no string", text[i]);
    }
}

static void test_keys(void **state)
{
    CLEANUP(json_freep) struct json *doc = tree("1: a\ntrue: b\n? c\n: d\n");
    const char *text;

    (void)state;
    assert_true(json_string(json_get(doc, "1"), &text));
    assert_true(json_string(json_get(doc, "true"), &text));
    assert_true(json_string(json_get(doc, "c"), &text));
    assert_string_equal(text, "d");
}

static void test_odd_documents(void **state)
{
    CLEANUP(json_freep)
    struct json *empty = tree(""), *comment = tree("# nothing\n"),
                *scalar = tree("--- 7\n...\n"), *tagged = tree("!!python/tuple [1, 2]"),
                *nul = tree("a: \"x\\0y\"\nb: 1\n");
    const char *text;
    uint64_t n;

    (void)state;
    assert_int_equal(json_kind(empty), JSON_NULL);
    assert_int_equal(json_kind(comment), JSON_NULL);
    assert_true(json_u64(scalar, &n) && n == 7);
    assert_int_equal(json_count(tagged), 2);
    assert_false(json_string(json_get(nul, "a"), &text));
    assert_true(json_u64(json_get(nul, "b"), &n));
}

static void test_refused(void **state)
{
    static const struct {
        const char *text, *why;
    } bad[] = {
        {"a: &x 1\nb: *x\n", "YAML, line 2: an alias"},
        {"a: 1\na: 2\n", "twice"},
        {"[1, 2]: x\n", "no scalar"},
        {"{a: 1}: x\n", "no scalar"},
        {"--- 1\n--- 2\n", "second document"},
        {"a: [1, 2\nb: 3\n", "YAML, line"},
        {"a: 'x\n", "YAML, line"},
        {"a:\n\t- x\n", "YAML, line"},
        {"a: \x01\n", "YAML"},
        {"a: \xff\xfe\n", "YAML"},
        {"%YAML 9.9\n---\na\n", "YAML"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
        check_refused(bad[i].text, strlen(bad[i].text), bad[i].why);
}

static void test_limits(void **state)
{
    CLEANUP(buf_release) struct buf deep = {0}, flat = {0}, large = {0};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err e = {0};

    (void)state;
    for (int i = 0; i < 64; i++)
        buf_addc(&deep, '[');
    for (int i = 0; i < 64; i++)
        buf_addc(&deep, ']');
    assert_ok(parse(deep.data, deep.len, &doc, &e), &e);
    buf_clear(&deep);
    for (int i = 0; i < 100000; i++)
        buf_addc(&deep, '[');
    check_refused(deep.data, deep.len, "nested too deep");
    for (int i = 0; i < 1000001; i++)
        buf_adds(&flat, "-\n");
    check_refused(flat.data, flat.len, "1,000,000 nodes");
    memset(buf_grow(&large, (16 << 20) + 1), '#', (16 << 20) + 1);
    check_refused(large.data, large.len, "16777217 bytes");
}

/* libyaml is a shared library, which --wrap does not reach: ours and cJSON's. */
static void test_out_of_memory(void **state)
{
    (void)state;
    fail_alloc_hook_cjson();
    for (long n = 1; fail_alloc_next(&n);) {
        CLEANUP(json_freep) struct json *doc = NULL;
        struct err e = {0};

        fail_alloc_end(&n, yaml_parse(model, sizeof model - 1, &doc, &e));
    }
    cJSON_InitHooks(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),         cmocka_unit_test(test_strings),
        cmocka_unit_test(test_keys),          cmocka_unit_test(test_odd_documents),
        cmocka_unit_test(test_refused),       cmocka_unit_test(test_limits),
        cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
