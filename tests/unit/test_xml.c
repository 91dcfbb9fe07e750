/* SPDX-License-Identifier: MIT */
/* tests/unit/test_xml.c - answers of object stores, and what is none. */
#include "remote/xml.h"

#include <errno.h>

#include "base/buf.h"
#include "base/err.h"
#include "tests/unit/unit.h"

/* "path=text" a line. */
static int note(void *user, const char *path, const char *text, size_t len,
                struct err *e)
{
    struct buf *out = user;

    (void)e;
    assert_int_equal(strlen(text), len);
    buf_addf(out, "%s=%s\n", path, text);
    return strcmp(text, "stop") == 0 ? 7 : 0;
}

static int walk(const char *xml, struct buf *out, struct err *e)
{
    buf_clear(out);
    return xml_each(xml, strlen(xml), note, out, e);
}

static void test_answers(void **state)
{
    static const struct {
        const char *xml, *want;
    } cases[] = {
        {"<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
         "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Contents>"
         "<Key>a&amp;b &lt;c&gt;</Key><ETag>&quot;9f\"</ETag></Contents></ListBucketResult>",
         "ListBucketResult/Contents/Key=a&b <c>\n"
         "ListBucketResult/Contents/ETag=\"9f\"\n"
         "ListBucketResult/Contents=\nListBucketResult=\n"},
        {"<x:a xmlns:x='u'>1<x:b/>2<c>3</c>4</x:a>", "a/b=\na/c=3\na=124\n"},
        {"<a><![CDATA[<b>]]>&#x20;\xc3\xa9</a>", "a=<b> \xc3\xa9\n"},
        {"<a>\xe2\x82\xac&#8364;</a>", "a=\xe2\x82\xac\xe2\x82\xac\n"},
    };
    CLEANUP(buf_release) struct buf got = {0};
    struct err e = {0};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        assert_ok(walk(cases[i].xml, &got, &e), &e);
        assert_string_equal(got.data, cases[i].want);
    }
}

static void test_refused(void **state)
{
    static const struct {
        const char *xml, *words;
    } cases[] = {
        {"", "no element found"},
        {"<a>", "no element found in line 1"},
        {"<a></b>", "mismatched tag"},
        {"<a/><b/>", "junk after document element"},
        {"<a>\xff</a>", "not well-formed"},
        {"<!DOCTYPE a [<!ENTITY x \"y\">]><a>&x;</a>", "a document type is not read"},
        {"<!DOCTYPE a SYSTEM \"file:///etc/passwd\"><a/>", "a document type"},
        {"<a>&x;</a>", "undefined entity"},
        {"<a><a><a><a><a><a><a><a><a><a><a><a><a><a><a><a><a>", "too deep"},
    };
    CLEANUP(buf_release) struct buf got = {0}, long_text = {0};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct err e = {0};

        assert_int_equal(walk(cases[i].xml, &got, &e), -EBADMSG);
        assert_has(e.text, cases[i].words);
    }
    buf_adds(&long_text, "<a>");
    for (int i = 0; i < 70000; i++)
        buf_addc(&long_text, 'x');
    buf_adds(&long_text, "</a>");
    struct err e = {0};
    assert_int_equal(walk(long_text.data, &got, &e), -EBADMSG);
    assert_has(e.text, "a text is too long");
}

/* What fn returns ends the walk. */
static void test_stopped(void **state)
{
    CLEANUP(buf_release) struct buf got = {0};
    struct err e = {0};

    (void)state;
    assert_int_equal(walk("<a><b>1</b><b>stop</b><b>3</b></a>", &got, &e), 7);
    assert_string_equal(got.data, "a/b=1\na/b=stop\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answers),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_stopped),
    };

    return cmocka_run_group_tests_name("xml", tests, NULL, NULL);
}
