/* SPDX-License-Identifier: MIT */
/* tests/unit/test_s3_list.c - pages of ListObjectsV2 as several servers write them. */
#include "unit.h"

#include <errno.h>

#include "base/base.h"
#include "base/err.h"
#include "remote/s3_list.h"

#define HEAD                                                                           \
    "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult "                   \
    "xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>b</Name>"
#define ENTRY(key, etag, size)                                                         \
    "<Contents><Key>" key "</Key><LastModified>2024-02-29T12:34:56.000Z"               \
    "</LastModified><ETag>" etag "</ETag><Size>" size "</Size>"                        \
    "<StorageClass>STANDARD</StorageClass></Contents>"
#define FOOT "</ListBucketResult>"

static void read_page(const char *text, const char *prefix, struct s3_page *page)
{
    struct err e = {0};

    assert_ok(s3_page_read(text, strlen(text), prefix, page, &e), &e);
}

static void check_entry(const struct s3_page *page, size_t i, const char *name,
                        bool is_dir, uint64_t size)
{
    const struct s3_entry *entry;

    if (i >= s3_page_count(page))
        fail_msg("%zu entries, wanted %s", s3_page_count(page), name);
    entry = s3_page_at(page, i);
    assert_string_equal(page->names.data + entry->name, name);
    assert_int_equal(entry->is_dir, is_dir);
    assert_int_equal(entry->size, size);
}

static void test_page(void **state)
{
    CLEANUP(s3_page_release) struct s3_page page = {0};

    (void)state;
    read_page(
        HEAD
        "<Prefix>run/</Prefix><KeyCount>4</KeyCount>"
        "<IsTruncated>true</IsTruncated><NextContinuationToken>1ueGcx+/=&amp;"
        "</NextContinuationToken>" ENTRY("run/", "", "0") ENTRY(
            "run/a b+c%20&lt;", "&quot;0cc1-2&quot;", "9223372036854775807")
            ENTRY("run/x", "&quot;e&quot;",
                  "0") "<CommonPrefixes><Prefix>run/step1/</Prefix></CommonPrefixes>"
                       "<CommonPrefixes><Prefix>run/x/</Prefix></CommonPrefixes>" FOOT,
        "run/", &page);
    assert_string_equal(page.next.data, "1ueGcx+/=&");
    assert_int_equal(page.objects, 5);
    assert_true(page.marker);
    assert_int_equal(s3_page_count(&page), 4);
    check_entry(&page, 0, "a b+c%20<", false, INT64_MAX);
    check_entry(&page, 1, "x", false, 0);
    check_entry(&page, 2, "step1", true, 0);
    check_entry(&page, 3, "x", true, 0);
    assert_string_equal(page.names.data + s3_page_at(&page, 0)->etag, "\"0cc1-2\"");
    assert_int_equal(s3_page_at(&page, 0)->modified, 1709210096);
    assert_int_equal(s3_page_at(&page, 2)->etag, SIZE_MAX);
}

/* Wherever the element stands that says so. */
static void test_encoded(void **state)
{
    static const char *const texts[] = {
        HEAD "<EncodingType>url</EncodingType>" ENTRY("r%2F/a+b%2Bc%25%0A%C3%A9", "",
                                                      "1") FOOT,
        HEAD ENTRY("r%2F/a+b%2Bc%25%0A%C3%A9", "",
                   "1") "<EncodingType>url</EncodingType>" FOOT,
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
        CLEANUP(s3_page_release) struct s3_page page = {0};

        read_page(texts[i], "r//", &page);
        assert_int_equal(s3_page_count(&page), 1);
        check_entry(&page, 0, "a b+c%\n\xc3\xa9", false, 1);
        assert_int_equal(s3_page_at(&page, 0)->etag, SIZE_MAX);
        assert_false(page.marker);
    }
}

static void test_empty(void **state)
{
    CLEANUP(s3_page_release) struct s3_page page = {0};

    (void)state;
    read_page(HEAD "<KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>"
                   "<NextContinuationToken>old</NextContinuationToken>" FOOT,
              "none/", &page);
    assert_int_equal(page.objects, 0);
    assert_int_equal(s3_page_count(&page), 0);
    assert_int_equal(page.next.len, 0);
}

static void test_refused(void **state)
{
    static const struct {
        const char *text, *why;
    } bad[] = {
        {"<Error><Code>AccessDenied</Code></Error>", "no listing"},
        {HEAD ENTRY("other/a", "", "1") FOOT, "outside"},
        {HEAD ENTRY("p/a", "", "-1") FOOT, "no number"},
        {HEAD ENTRY("p/a", "", "1e3") FOOT, "no number"},
        {HEAD ENTRY("p/a", "", "") FOOT, "no object has"},
        {HEAD ENTRY("p/a", "", "9223372036854775808") FOOT, "no object has"},
        {HEAD ENTRY("p/a", "", "99999999999999999999999") FOOT, "no number"},
        {HEAD "<Contents><Key>p/a</Key></Contents>" FOOT, "no size"},
        {HEAD "<Contents><Size>1</Size></Contents>" FOOT, "no key"},
        {HEAD "<CommonPrefixes/>" FOOT, "no key"},
        {HEAD "<IsTruncated>true</IsTruncated>" FOOT, "where"},
        {HEAD "<EncodingType>url</EncodingType>" ENTRY("p/%zz", "", "1") FOOT,
         "decoded"},
        {HEAD "<EncodingType>url</EncodingType>" ENTRY("p/%00", "", "1") FOOT,
         "decoded"},
        {"<!DOCTYPE ListBucketResult [<!ENTITY x \"p/a\">]><ListBucketResult>" ENTRY(
             "&x;", "", "1") FOOT,
         "document type"},
        {HEAD ENTRY("p/a", "", "1"), ""},
        {"", ""},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        CLEANUP(s3_page_release) struct s3_page page = {0};
        struct err e = {0};
        int rc = s3_page_read(bad[i].text, strlen(bad[i].text), "p/", &page, &e);

        if (rc != -EBADMSG)
            fail_msg("%s: %d %s", bad[i].text, rc, e.text);
        assert_has(e.text, bad[i].why);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page),
        cmocka_unit_test(test_encoded),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
