/* SPDX-License-Identifier: MIT */
/* tests/unit/test_json.c - what strict JSON accepts, refuses and gives back. */
#include "unit.h"

#include <errno.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"

#include "fail_alloc.h"

/* Parses a copy of just this length, so that sanitizers see a read behind its end. */
static int parse(const char *text, size_t len, struct json **doc, struct err *e)
{
    CLEANUP_FREE char *copy = malloc(len ? len : 1);

    assert_non_null(copy);
    memcpy(copy, text, len);
    return json_parse(copy, len, NULL, doc, e);
}

/* A literal with its length: it may hold NUL. */
#define TEXT(s) (s), sizeof(s) - 1

static const struct {
    const char *text;
    size_t len;
} accepted[] = {
    {TEXT("null")},
    {TEXT(" \t\r\n 1 \n")},
    {TEXT("0")},
    {TEXT("-0")},
    {TEXT("0.0")},
    {TEXT("-0.5e-3")},
    {TEXT("1E+2")},
    {TEXT("123456789012345678901234567890")},
    {TEXT("0.1234567890123456789012345678901234567890123456789012345678901")},
    {TEXT("1e400")},
    {TEXT("\"\"")},
    {TEXT("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\uD83D\\ude00\"")},
    {TEXT("\"\x7f \xc2\x80 \xed\x9f\xbf \xee\x80\x80 \xf4\x8f\xbf\xbf\"")},
    {TEXT("\"\\uffff\\ud7ff\\ue000\"")},
    {TEXT("[]")},
    {TEXT("{}")},
    {TEXT("[ ]")},
    {TEXT("[1 , [ 2 ],{ \"a\" : [ ] } ]")},
    {TEXT("{\"\":1,\" \":2}")},
    {TEXT("[{\"a\":1},{\"a\":1},{\"a\":{\"a\":{\"a\":1}}}]")},
    {TEXT("{\"a\":{\"b\":1},\"b\":{\"a\":1,\"b\":2}}")},
    {TEXT("{\"a\":1,\"A\":2,\"\\u00e1\":3,\"a\xcc\x81\":4}")}, /* no normalisation */
};

static void test_accepted(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(accepted); i++) {
        CLEANUP(json_freep) struct json *doc = NULL;
        struct err e = {0};

        if (parse(accepted[i].text, accepted[i].len, &doc, &e) != 0)
            fail_msg("%s: %s", accepted[i].text, e.text);
        assert_non_null(doc);
    }
}

static const struct {
    const char *text;
    size_t len;
    size_t byte; /* where the message says it is wrong */
    const char *why;
} refused[] = {
    {TEXT(""), 0, "no JSON value"},
    {TEXT("  "), 2, "no JSON value"},
    {TEXT("nul"), 0, "no JSON value"},
    {TEXT("nulL"), 0, "no JSON value"},
    {TEXT("True"), 0, "no JSON value"},
    {TEXT("NaN"), 0, "no JSON value"},
    {TEXT("Infinity"), 0, "no JSON value"},
    {TEXT("-Infinity"), 1, "no digit"},
    {TEXT("+1"), 0, "no JSON value"},
    {TEXT(".5"), 0, "no JSON value"},
    {TEXT("'a'"), 0, "no JSON value"},
    {TEXT("01"), 1, "text after the value"},
    {TEXT("-01"), 2, "text after the value"},
    {TEXT("[00]"), 2, "no comma or ]"},
    {TEXT("-"), 1, "no digit"},
    {TEXT("1."), 2, "no digit"},
    {TEXT("1.e1"), 2, "no digit"},
    {TEXT("1e"), 2, "no digit"},
    {TEXT("1e+"), 3, "no digit"},
    {TEXT("1e+-1"), 3, "no digit"},
    {TEXT("0x10"), 1, "text after the value"},
    {TEXT(" 1234567890123456789012345678901234567890123456789012345678901234"), 1,
     "a number of more than 63 characters"},
    {TEXT("1 2"), 2, "text after the value"},
    {TEXT("{}}"), 2, "text after the value"},
    {TEXT("1\0"), 1, "text after the value"},
    {TEXT("\0"), 0, "no JSON value"},
    {TEXT("[1,\0]"), 3, "no JSON value"},
    {TEXT("{} // no"), 3, "text after the value"},
    {TEXT("[1,/**/2]"), 3, "no JSON value"},
    {TEXT("\xef\xbb\xbf{}"), 0, "no JSON value"},
    {TEXT("\v1"), 0, "no JSON value"},
    {TEXT("1\f"), 1, "text after the value"},
    {TEXT("\xc2\xa0"
          "1"),
     0, "no JSON value"},
    {TEXT("["), 1, "no JSON value"},
    {TEXT("[1"), 2, "no comma or ]"},
    {TEXT("[1,"), 3, "no JSON value"},
    {TEXT("[1,]"), 3, "no JSON value"},
    {TEXT("[,1]"), 1, "no JSON value"},
    {TEXT("[1 2]"), 3, "no comma or ]"},
    {TEXT("[1}"), 2, "no comma or ]"},
    {TEXT("]"), 0, "no JSON value"},
    {TEXT("{"), 1, "a member's name is missing"},
    {TEXT("{\"a\""), 4, "no colon"},
    {TEXT("{\"a\":"), 5, "no JSON value"},
    {TEXT("{\"a\":1"), 6, "no comma or }"},
    {TEXT("{\"a\":1,"), 7, "a member's name is missing"},
    {TEXT("{\"a\":1,}"), 7, "a member's name is missing"},
    {TEXT("{a:1}"), 1, "a member's name is missing"},
    {TEXT("{1:1}"), 1, "a member's name is missing"},
    {TEXT("{\"a\" 1}"), 5, "no colon"},
    {TEXT("{\"a\":}"), 5, "no JSON value"},
    {TEXT("{\"a\":1]"), 6, "no comma or }"},
    {TEXT("{\"a\"}"), 4, "no colon"},
    {TEXT("\""), 1, "string without its end"},
    {TEXT("\"abc"), 4, "string without its end"},
    {TEXT("\"a\nb\""), 2, "control byte in a string"},
    {TEXT("\"a\0b\""), 2, "control byte in a string"},
    {TEXT("\"\x1f\""), 1, "control byte in a string"},
    {TEXT("\"\\"), 1, "unknown escape"},
    {TEXT("\"\\\0\""), 1, "unknown escape"},
    {TEXT("\"\\x41\""), 1, "unknown escape"},
    {TEXT("\"\\'\""), 1, "unknown escape"},
    {TEXT("\"\\u\""), 1, "\\u without four hex digits"},
    {TEXT("\"\\u12"), 1, "\\u without four hex digits"},
    {TEXT("\"\\u12g4\""), 1, "\\u without four hex digits"},
    {TEXT("\"\\u+123\""), 1, "\\u without four hex digits"},
    {TEXT("\"ab\\u0000\""), 3, "a string that holds NUL"},
    {TEXT("{\"a\\u0000\":1}"), 3, "a string that holds NUL"},
    {TEXT("\"\\ud800\""), 1, "lone surrogate"},
    {TEXT("\"\\ud800x\""), 1, "lone surrogate"},
    {TEXT("\"\\ud800\\n12345\""), 1, "lone surrogate"},
    {TEXT("\"\\ud800\\u0041\""), 1, "lone surrogate"},
    {TEXT("\"\\ud800\\ud800\""), 1, "lone surrogate"},
    {TEXT("\"\\udc00\""), 1, "lone surrogate"},
    {TEXT("\"\\udc00\\ud800\""), 1, "lone surrogate"},
    {TEXT("\"\\ud800\\u"), 1, "lone surrogate"},
    {TEXT("\"\x80\""), 1, "invalid UTF-8"},
    {TEXT("\"\xc0\x80\""), 1, "invalid UTF-8"},         /* overlong NUL */
    {TEXT("\"\xe0\x80\xaf\""), 1, "invalid UTF-8"},     /* overlong slash */
    {TEXT("\"\xed\xa0\x80\""), 1, "invalid UTF-8"},     /* surrogate */
    {TEXT("\"\xf4\x90\x80\x80\""), 1, "invalid UTF-8"}, /* past U+10FFFF */
    {TEXT("\"a\xe2\x82"), 2, "invalid UTF-8"},          /* cut */
    {TEXT("\"\xff\""), 1, "invalid UTF-8"},
    {TEXT("{\"a\":1,\"a\":1}"), 7, "member \"a\": JSON byte 7: twice in one object"},
    {TEXT("{\"a\":1,\"\\u0061\":2}"), 7, "twice in one object"},
    {TEXT("{\"\":1,\"\":2}"), 6, "twice in one object"},
    {TEXT("[{\"b\":{\"a\":[{\"a\":0}],\"a\":2}}]"), 21, "twice in one object"},
    {TEXT("{\"\xc3\xa9\":1,\"\\u00E9\":2}"), 8, "twice in one object"},
    {TEXT("{\"\xf0\x9f\x98\x80\":1,\"\\ud83d\\ude00\":2}"), 10, "twice in one object"},
};

static void test_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(refused); i++) {
        CLEANUP(json_freep) struct json *doc = NULL;
        struct err e = {0};
        char where[32];

        if (parse(refused[i].text, refused[i].len, &doc, &e) != -EBADMSG)
            fail_msg("%s: not refused", refused[i].text);
        snprintf(where, sizeof where, "JSON byte %zu%s", refused[i].byte,
                 refused[i].byte == refused[i].len ? " (the end):" : ":");
        if (!strstr(e.text, where) || !strstr(e.text, refused[i].why))
            fail_msg("%s: \"%s\", not \"%s ... %s\"", refused[i].text, e.text, where,
                     refused[i].why);
        assert_null(doc);
    }
}

/* Every text that is cut short anywhere is refused (but not a number: 12 is in 123). */
static void test_cut_anywhere(void **state)
{
    static const char text[] =
        "{\"a\\u00e9\xc3\xa9\":[1,-2.5e+7,true,null,\"\\ud83d\\ude00\"],\"b\":{\"c\":{}}}";

    (void)state;
    for (size_t len = 0; len < sizeof text; len++) {
        CLEANUP(json_freep) struct json *doc = NULL;
        struct err e = {0};

        assert_int_equal(parse(text, len, &doc, &e),
                         len == sizeof text - 1 ? 0 : -EBADMSG);
    }
}

static void test_integers_are_exact(void **state)
{
    static const struct {
        const char *text;
        bool is_u64, is_i64;
        int64_t value;
    } cases[] = {
        {"0", true, true, 0},
        {"-0", false, true, 0},
        {"-1", false, true, -1},
        {"3000000000", true, true, 3000000000},
        {"9007199254740991", true, true, 9007199254740991},
        {"-9007199254740991", false, true, -9007199254740991},
        {"9007199254740992", false, false, 0},
        {"9007199254740993", false, false, 0},
        {"-9007199254740992", false, false, 0},
        {"18446744073709551616", false, false, 0},
        {"1.0", false, false, 0},
        {"1e2", false, false, 0},
        {"1E0", false, false, 0},
        {"0.5", false, false, 0},
        {"1e400", false, false, 0},
        {"\"1\"", false, false, 0},
        {"true", false, false, 0},
        {"[1]", false, false, 0},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(json_freep) struct json *doc = NULL;
        struct err e = {0};
        uint64_t u = 77;
        int64_t v = 77;

        assert_ok(parse(cases[i].text, strlen(cases[i].text), &doc, &e), &e);
        if (json_u64(doc, &u) != cases[i].is_u64 ||
            json_i64(doc, &v) != cases[i].is_i64)
            fail_msg("%s: u64 %d, i64 %d", cases[i].text, json_u64(doc, &u),
                     json_i64(doc, &v));
        assert_true(u == (cases[i].is_u64 ? (uint64_t)cases[i].value : 77));
        assert_true(v == (cases[i].is_i64 ? cases[i].value : 77));
    }
}

/* Which numbers are integers is known by order in the document: a mixed one shows slips. */
static void test_integers_among_others(void **state)
{
    static const char text[] = "{\"1\":[1,1.0,[2,[],{\"x\":2.0,\"y\":[3]},\"4\"],4],"
                               "\"b\":1e1,\"c\":[{},5],\"d\":6.0,\"e\":7}";
    static const int want[] = {1, -1, 2, -1, 3, 4, -1, 5, -1, 7};
    CLEANUP(json_freep) struct json *doc = NULL;
    const struct json *stack[16], *v;
    struct err e = {0};
    size_t depth = 0, n = 0;
    uint64_t u;

    (void)state;
    assert_ok(parse(TEXT(text), &doc, &e), &e);
    for (v = doc; v;) {
        if (json_kind(v) == JSON_NUMBER) {
            int got = json_u64(v, &u) ? (int)u : -1;

            assert_in_range(n, 0, ARRAY_SIZE(want) - 1);
            assert_int_equal(got, want[n++]);
        }
        if (json_first(v)) {
            stack[depth++] = v;
            v = json_first(v);
            continue;
        }
        while (v && !json_next(v))
            v = depth ? stack[--depth] : NULL;
        v = json_next(v);
    }
    assert_int_equal(n, ARRAY_SIZE(want));
}

static void test_getters(void **state)
{
    static const char text[] =
        "{\"s\":\"a\\n\\u20ac\\ud83d\\ude00\",\"b\":true,\"f\":false,"
        "\"n\":null,\"d\":-2.5e-1,\"big\":1e400,\"l\":[1,2,3],"
        "\"o\":{\"k\":\"v\"}}";
    CLEANUP(json_freep) struct json *doc = NULL;
    const struct json *v;
    struct err e = {0};
    const char *s = NULL;
    bool b = false;
    double d = 0;

    (void)state;
    assert_ok(parse(TEXT(text), &doc, &e), &e);
    assert_int_equal(json_kind(doc), JSON_OBJECT);
    assert_int_equal(json_count(doc), 8);
    assert_true(json_string(json_get(doc, "s"), &s));
    assert_string_equal(s, "a\n\xe2\x82\xac\xf0\x9f\x98\x80");
    assert_true(json_bool(json_get(doc, "b"), &b) && b);
    assert_true(json_bool(json_get(doc, "f"), &b) && !b);
    assert_int_equal(json_kind(json_get(doc, "n")), JSON_NULL);
    assert_true(json_double(json_get(doc, "d"), &d));
    assert_true(d == -0.25);
    assert_false(json_double(json_get(doc, "big"), &d));
    v = json_get(doc, "l");
    assert_int_equal(json_kind(v), JSON_ARRAY);
    assert_int_equal(json_count(v), 3);
    assert_null(json_key(json_first(v)));
    assert_null(json_get(v, "l"));
    assert_string_equal(json_key(json_next(v)), "o");
    assert_null(json_next(json_next(v)));
    assert_true(json_string(json_get(json_get(doc, "o"), "k"), &s));
    assert_string_equal(s, "v");
    assert_null(json_get(doc, "S"));
    assert_null(json_get(NULL, "s"));
    assert_null(json_first(NULL));
    assert_null(json_next(NULL));
    assert_null(json_next(doc));
    assert_int_equal(json_count(NULL), 0);
    assert_false(json_string(NULL, &s));
    assert_false(json_string(json_get(doc, "d"), &s));
    assert_false(json_bool(json_get(doc, "n"), &b));
    assert_false(json_double(json_get(doc, "s"), &d));
}

/* `depth` arrays within each other. */
static int parse_nested(unsigned depth, const struct json_limits *limits)
{
    CLEANUP(buf_release) struct buf b = {0};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err e = {0};

    for (unsigned i = 0; i < depth; i++)
        buf_adds(&b, i % 2 ? "[" : "{\"a\":");
    buf_addc(&b, '1');
    for (unsigned i = depth; i-- > 0;)
        buf_addc(&b, i % 2 ? ']' : '}');
    return json_parse(b.data, b.len, limits, &doc, &e);
}

static void test_depth_limit(void **state)
{
    const struct json_limits two = {.depth = 2}, most = {.depth = UINT32_MAX};

    (void)state;
    assert_int_equal(parse_nested(64, NULL), 0);
    assert_int_equal(parse_nested(65, NULL), -EBADMSG);
    assert_int_equal(parse_nested(2, &two), 0);
    assert_int_equal(parse_nested(3, &two), -EBADMSG);
    assert_int_equal(parse_nested(512, &most), 0);
    assert_int_equal(parse_nested(513, &most), -EBADMSG);
    assert_int_equal(parse_nested(1000000, &most), -EBADMSG);
}

static void test_other_limits(void **state)
{
    const struct json_limits bytes = {.bytes = 7}, values = {.values = 4};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err e = {0};

    (void)state;
    assert_int_equal(json_parse("[1,2,3]", 7, &bytes, &doc, &e), 0);
    json_freep(&doc);
    assert_int_equal(json_parse("[1,2,3] ", 8, &bytes, &doc, &e), -EBADMSG);
    assert_string_equal(e.text, "JSON of 8 bytes, more than the limit of 7");
    assert_int_equal(json_parse("[1,2,3]", 7, &values, &doc, &e), 0);
    json_freep(&doc);
    assert_int_equal(json_parse("[1,2,[]]", 8, &values, &doc, &e), 0);
    json_freep(&doc);
    assert_int_equal(json_parse("[1,2,3,4]", 9, &values, &doc, &e), -EBADMSG);
    assert_string_equal(e.text, "JSON byte 7: too many values");
}

/* An object of `count` members, the last of them called `last`. */
static void make_object(struct buf *b, int count, const char *last)
{
    buf_addc(b, '{');
    for (int i = 0; i < count; i++)
        buf_addf(b,
                 "\"layer.%d.weight\":{\"dtype\":\"BF16\",\"shape\":[%d,7],"
                 "\"data_offsets\":[%d,%d]},",
                 i, i, i * 100, i * 100 + 99);
    buf_addf(b, "\"%s\":{}}", last);
}

static void test_duplicate_among_many(void **state)
{
    (void)state;
    for (int count = 1; count < 3000; count = count * 3 + 1) {
        CLEANUP(buf_release) struct buf good = {0}, bad = {0};
        CLEANUP(json_freep) struct json *doc = NULL;
        struct err e = {0};

        make_object(&good, count, "new");
        make_object(&bad, count, "layer.0\\u002eweight");
        assert_ok(json_parse(good.data, good.len, NULL, &doc, &e), &e);
        assert_int_equal(json_count(doc), count + 1);
        json_freep(&doc);
        assert_int_equal(json_parse(bad.data, bad.len, NULL, &doc, &e), -EBADMSG);
        assert_has(e.text, "member \"layer.0.weight\"");
    }
}

/* What json_each_member() saw. */
struct seen {
    size_t count, stop_at;
    uint64_t sum;
    struct buf keys;
};

static int see_member(void *user, const char *key, size_t key_len,
                      const struct json *value, struct err *e)
{
    struct seen *s = user;
    uint64_t u;

    buf_add(&s->keys, key, key_len);
    buf_addc(&s->keys, ';');
    assert_int_equal(key[key_len], '\0');
    value = json_first(json_get(value, "data_offsets"));
    if (json_u64(value, &u))
        s->sum += u;
    if (++s->count == s->stop_at)
        return err_set(e, ESTALE, "stopped");
    return 0;
}

static int see_all(const char *text, size_t len, struct seen *s, struct err *e)
{
    return json_each_member(text, len, NULL, see_member, s, e);
}

static void test_each_member(void **state)
{
    static const char text[] =
        " {\"b\":1,\"a\\u0000b\":[],\"\\u0061\":{\"b\":{\"a\":0}},"
        "\"\":{\"data_offsets\":[5]}} ";
    CLEANUP(buf_release) struct buf big = {0};
    struct seen s = {0};
    struct err e = {0};

    (void)state;
    assert_ok(see_all(TEXT(text), &s, &e), &e);
    assert_int_equal(s.count, 4);
    assert_int_equal(s.sum, 5);
    assert_int_equal(s.keys.len, 9);
    assert_memory_equal(s.keys.data, "b;a\0b;a;;", 9);
    buf_clear(&s.keys);
    assert_ok(see_all(TEXT("{}"), &s, &e), &e);
    assert_int_equal(s.count, 4);

    make_object(&big, 100000, "new");
    s.count = s.sum = 0;
    assert_ok(see_all(big.data, big.len, &s, &e), &e);
    assert_int_equal(s.count, 100001);
    assert_true(s.sum == UINT64_C(100) * 99999 * 100000 / 2);
    buf_release(&s.keys);
}

static void test_each_member_refuses(void **state)
{
    static const struct {
        const char *text;
        size_t len, seen;
        const char *why;
    } cases[] = {
        {TEXT("[]"), 0, "JSON byte 0: no object"},
        {TEXT(""), 0, "JSON byte 0 (the end): no object"},
        {TEXT("1"), 0, "no object"},
        {TEXT("{\"a\":1,\"b\":2,\"\\u0061\":3}"), 2,
         "member \"a\": JSON byte 13: twice in one object"},
        {TEXT("{\"a\\u0000\":1,\"a\\u0000\":2}"), 1, "twice in one object"},
        {TEXT("{\"a\":{\"x\":1,\"x\":1}}"), 0, "member \"x\""},
        {TEXT("{\"a\":\"\\u0000\"}"), 0, "JSON byte 6: a string that holds NUL"},
        {TEXT("{\"a\":{\"\\u0000\":1}}"), 0, "JSON byte 7: a string that holds NUL"},
        {TEXT("{\"a\":1} x"), 1, "JSON byte 8: text after the value"},
        {TEXT("{\"a\":1}\0"), 1, "JSON byte 7: text after the value"},
        {TEXT("{\"a\":1,}"), 1, "a member's name is missing"},
        {TEXT("{\"a\":1"), 1, "no comma or }"},
        {TEXT("{\"a\":01}"), 1, "no comma or }"},
        {TEXT("{\"a\xff\":1}"), 0, "invalid UTF-8"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP_FREE char *copy = malloc(cases[i].len + !cases[i].len);
        struct seen s = {0};
        struct err e = {0};

        memcpy(copy, cases[i].text, cases[i].len);
        assert_int_equal(see_all(copy, cases[i].len, &s, &e), -EBADMSG);
        assert_has(e.text, cases[i].why);
        assert_int_equal(s.count, cases[i].seen);
        buf_release(&s.keys);
    }
}

static void test_each_member_limits(void **state)
{
    const struct json_limits limits = {.depth = 3, .values = 3};
    struct seen s = {0};
    struct err e = {0};

    (void)state;
    assert_ok(json_each_member(TEXT("{\"a\":[[]],\"b\":[1,2],\"c\":1,\"d\":2}"),
                               &limits, see_member, &s, &e),
              &e);
    assert_int_equal(
        json_each_member(TEXT("{\"a\":[[[]]]}"), &limits, see_member, &s, &e),
        -EBADMSG);
    assert_string_equal(e.text, "JSON byte 7: nested too deep");
    assert_int_equal(
        json_each_member(TEXT("{\"a\":[1,2,3]}"), &limits, see_member, &s, &e),
        -EBADMSG);
    assert_string_equal(e.text, "JSON byte 10: too many values");
    buf_release(&s.keys);
}

static void test_each_member_stops(void **state)
{
    struct seen s = {.stop_at = 2};
    struct err e = {0};

    (void)state;
    assert_int_equal(see_all(TEXT("{\"a\":1,\"b\":2,\"c\":3}"), &s, &e), -ESTALE);
    assert_string_equal(e.text, "stopped");
    assert_int_equal(s.count, 2);
    buf_release(&s.keys);
}

static int see_all_of(const char *text, size_t len, struct seen *s, struct err *e)
{
    return json_each_member_of(text, len, NULL, "in", see_member, s, e);
}

static void test_each_member_of(void **state)
{
    static const char text[] =
        " {\"a\":[{\"in\":{\"z\":0}}],\"in\":{\"b\":1,\"in\":{\"b\":{\"a\":0}},"
        "\"a\":{\"data_offsets\":[5]}},\"b\":{\"b\":2}} ";
    const struct json_limits limits = {.values = 3};
    struct seen s = {0};
    struct err e = {0};

    (void)state;
    assert_ok(see_all_of(TEXT(text), &s, &e), &e);
    assert_int_equal(s.count, 3);
    assert_int_equal(s.sum, 5);
    assert_int_equal(s.keys.len, 7);
    assert_memory_equal(s.keys.data, "b;in;a;", 7);
    assert_ok(see_all_of(TEXT("{\"in\":{}}"), &s, &e), &e);
    assert_int_equal(s.count, 3);
    /* The limit is that of one member. */
    assert_ok(json_each_member_of(TEXT("{\"a\":[1,2],\"in\":{\"a\":[1,2],\"b\":1}}"),
                                  &limits, "in", see_member, &s, &e),
              &e);
    assert_int_equal(s.count, 5);
    buf_release(&s.keys);
}

static void test_each_member_of_refuses(void **state)
{
    static const struct {
        const char *text;
        size_t len, seen;
        const char *why;
    } cases[] = {
        {TEXT("{}"), 0, "there is no member \"in\""},
        {TEXT("{\"a\":{\"in\":{}}}"), 0, "there is no member \"in\""},
        {TEXT("{\"in\":[]}"), 0, "JSON byte 6: no object"},
        {TEXT("{\"in\":1}"), 0, "JSON byte 6: no object"},
        {TEXT("{\"in\":{\"a\":1},\"in\":{}}"), 1, "member \"in\""},
        {TEXT("{\"in\":{\"a\":1,\"a\":2}}"), 1, "member \"a\""},
        {TEXT("{\"in\":{\"a\\u0000\":1}}"), 0, "a string that holds NUL"},
        {TEXT("{\"in\":{\"a\":1}"), 1, "no comma or }"},
        {TEXT("{\"in\":{\"a\":1}} x"), 1, "text after the value"},
        {TEXT("{\"in\":{\"a\":1},\"b\":[}"), 1, "no JSON value"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP_FREE char *copy = malloc(cases[i].len);
        struct seen s = {0};
        struct err e = {0};

        memcpy(copy, cases[i].text, cases[i].len);
        assert_int_equal(see_all_of(copy, cases[i].len, &s, &e), -EBADMSG);
        assert_has(e.text, cases[i].why);
        assert_int_equal(s.count, cases[i].seen);
        buf_release(&s.keys);
    }
}

static void test_nul_only_where_allowed(void **state)
{
    const struct json_limits limits = {.nul_ok = true};
    CLEANUP(json_freep) struct json *doc = NULL;
    const char *s = "untouched";
    struct err e = {0};
    uint64_t u = 0;

    (void)state;
    assert_ok(
        json_parse(TEXT("[\"a\\u0000\",\"b\",1.0,\"\\u0000\",7]"), &limits, &doc, &e),
        &e);
    assert_int_equal(json_kind(json_first(doc)), JSON_STRING);
    assert_false(json_string(json_first(doc), &s)); /* cJSON has cut it to "a" */
    assert_string_equal(s, "untouched");
    assert_true(json_string(json_next(json_first(doc)), &s));
    assert_string_equal(s, "b");
    assert_true(
        json_u64(json_next(json_next(json_next(json_next(json_first(doc))))), &u));
    assert_int_equal(u, 7);
    json_freep(&doc);
    assert_int_equal(json_parse(TEXT("{\"a\\u0000\":1}"), &limits, &doc, &e), -EBADMSG);
    assert_string_equal(e.text, "JSON byte 3: a string that holds NUL");
}

static int ignore_member(void *user, const char *key, size_t key_len,
                         const struct json *value, struct err *e)
{
    (void)user, (void)key, (void)key_len, (void)value, (void)e;
    return 0;
}

static void test_out_of_memory(void **state)
{
    CLEANUP(buf_release) struct buf b = {0};

    (void)state;
    make_object(&b, 70, "n\\u0065w");
    fail_alloc_hook_cjson();
    for (long n = 1; fail_alloc_next(&n);) {
        CLEANUP(json_freep) struct json *doc = NULL;
        struct err e = {0};

        fail_alloc_end(&n, json_parse(b.data, b.len, NULL, &doc, &e));
    }
    for (long n = 1; fail_alloc_next(&n);) {
        static const char text[] = "{\"a\": [NaN, -Infinity]}";
        CLEANUP(json_freep) struct json *doc = NULL;
        struct err e = {0};

        fail_alloc_end(&n, json_parse(text, strlen(text), &json_python, &doc, &e));
    }
    for (long n = 1; fail_alloc_next(&n);) {
        struct err e = {0};

        fail_alloc_end(&n,
                       json_each_member(b.data, b.len, NULL, ignore_member, NULL, &e));
    }
    cJSON_InitHooks(NULL);
}

/* Python's words for numbers that are not finite: allowed where they are asked for. */
static void test_python_words(void **state)
{
    static const char text[] = "{\"a\": [NaN, 1, Infinity, -Infinity, \"NaN\", -1],"
                               " \"Infinity\": {\"b\": Infinity}, \"n\": 7}";
    static const char *const wrong[] = {"nan",  "+Infinity", "Inf",     "--Infinity",
                                        "NaN1", "-NaN",      "[Infini]"};
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FREE char *copy = malloc(strlen(text));
    const struct json *v;
    struct err e = {0};
    const char *s;
    double d = 0;
    int64_t n;

    (void)state;
    assert_non_null(copy);
    memcpy(copy, text, strlen(text));
    assert_ok(json_parse(copy, strlen(text), &json_python, &doc, &e), &e);
    v = json_first(json_get(doc, "a"));
    assert_int_equal(json_kind(v), JSON_NUMBER);
    assert_false(json_double(v, &d) || json_i64(v, &n));
    v = json_next(v);
    assert_true(json_i64(v, &n) && n == 1);
    v = json_next(v);
    assert_false(json_double(v, &d));
    v = json_next(v);
    assert_false(json_double(v, &d));
    v = json_next(v);
    assert_true(json_string(v, &s));
    assert_string_equal(s, "NaN");
    v = json_next(v);
    assert_true(json_i64(v, &n) && n == -1);
    assert_int_equal(json_kind(json_get(json_get(doc, "Infinity"), "b")), JSON_NUMBER);
    assert_true(json_i64(json_get(doc, "n"), &n) && n == 7);
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        struct json *none = NULL;

        assert_int_equal(
            json_parse(wrong[i], strlen(wrong[i]), &json_python, &none, &e), -EBADMSG);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_cut_anywhere),
        cmocka_unit_test(test_integers_are_exact),
        cmocka_unit_test(test_integers_among_others),
        cmocka_unit_test(test_getters),
        cmocka_unit_test(test_depth_limit),
        cmocka_unit_test(test_other_limits),
        cmocka_unit_test(test_duplicate_among_many),
        cmocka_unit_test(test_each_member),
        cmocka_unit_test(test_each_member_refuses),
        cmocka_unit_test(test_each_member_limits),
        cmocka_unit_test(test_each_member_stops),
        cmocka_unit_test(test_each_member_of),
        cmocka_unit_test(test_each_member_of_refuses),
        cmocka_unit_test(test_nul_only_where_allowed),
        cmocka_unit_test(test_python_words),
        cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
