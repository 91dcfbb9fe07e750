/* SPDX-License-Identifier: MIT */
/* tests/unit/test_s3_place.c - what URLs of buckets name, and the hosts that AWS has for them. */
#include "unit.h"

#include <errno.h>

#include "base/err.h"
#include "remote/http.h"
#include "remote/s3.h"
#include "remote/s3_name.h"

static void test_directory_buckets(void **state)
{
    static const struct {
        const char *url, *zone, *region, *key;
    } cases[] = {
        {"s3://runs--usw2-az1--x-s3/a/b/", "usw2-az1", "us-west-2", "a/b"},
        {"s3://runs--use1-az4--x-s3", "use1-az4", "us-east-1", ""},
        {"s3://my--runs--apne1-az4--x-s3", "apne1-az4", "ap-northeast-1", ""},
        {"s3://runs--euc1-az2--x-s3", "euc1-az2", "eu-central-1", ""},
        {"s3://runs--eun1-az3--x-s3", "eun1-az3", "eu-north-1", ""},
        {"s3://runs--aps1-az1--x-s3", "aps1-az1", "ap-south-1", ""},
        {"s3://point--use2-az1--xa-s3/k", "use2-az1", "us-east-2", "k"},
        {"s3://runs--usw2-lax1-az1--x-s3", "usw2-lax1-az1", "", ""}, /* a Local Zone */
        {"s3://runs--xyz--x-s3", "xyz", "", ""},
        {"s3://runs--usw2-az1--x-s4", "", "", ""}, /* a name like any other */
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct s3_name name;
        struct err e = {0};
        char *key;

        assert_ok(s3_name_parse(cases[i].url, &name, &key, &e), &e);
        assert_string_equal(name.zone, cases[i].zone);
        assert_string_equal(name.region, cases[i].region);
        assert_string_equal(key, cases[i].key);
        s3_name_release(&name);
        free(key);
    }
}

static void test_no_directory_buckets(void **state)
{
    static const char *const urls[] = {
        "s3://--x-s3",
        "s3://b--x-s3",
        "s3://use1-az4--x-s3",
        "s3://b----x-s3",
        "s3://a--xa-s3",
        "s3://B--use1-az4--x-s3",
        "s3://b--use.1--x-s3",
        "s3://--use1-az4--x-s3",
        "s3://-----x-s3",
        "s3://b--0123456789012345678901234567890123456789--x-s3"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(urls); i++) {
        struct s3_name name;
        struct err e = {0};
        char *key;

        if (s3_name_parse(urls[i], &name, &key, &e) != -EINVAL)
            fail_msg("%s: zone \"%s\"", urls[i], name.zone);
        assert_has(e.text, "is no directory bucket's name");
        s3_name_release(&name);
        free(key);
    }
}

/* The hosts are those of botocore's endpoint rules (data/s3/2006-03-01). */
static void test_hosts_of_aws(void **state)
{
    static const struct {
        const char *url, *region, *dualstack, *fips, *want;
    } cases[] = {
        {"s3://b2b/k", "eu-west-3", "", "",
         "https://b2b.s3.eu-west-3.amazonaws.com/k%20"},
        {"s3://b.b", "eu-west-3", "", "",
         "https://s3.eu-west-3.amazonaws.com/b.b/k%20"},
        {"s3://b2b", "cn-north-1", "", "",
         "https://b2b.s3.cn-north-1.amazonaws.com.cn/k%20"},
        {"s3://b2b", "us-east-2", "true", "true",
         "https://b2b.s3-fips.dualstack.us-east-2.amazonaws.com/k%20"},
        {"s3://arn:aws:s3:eu-west-3:1:accesspoint/ap", "us-east-2", "", "",
         "https://ap-1.s3-accesspoint.eu-west-3.amazonaws.com/k%20"},
        {"s3://runs--usw2-az1--x-s3", "eu-west-3", "", "",
         "https://runs--usw2-az1--x-s3.s3express-usw2-az1.us-west-2.amazonaws.com/k%20"},
        {"s3://runs--usw2-lax1-az1--x-s3", "us-west-2", "", "",
         "https://runs--usw2-lax1-az1--x-s3.s3express-usw2-lax1-az1.us-west-2."
         "amazonaws.com/k%20"},
        {"s3://runs--usw2-az1--x-s3", "us-west-2", "true", "true",
         "https://runs--usw2-az1--x-s3.s3express-fips-usw2-az1.dualstack.us-west-2."
         "amazonaws.com/k%20"},
    };
    struct http *http;
    struct err e = {0};

    (void)state;
    setenv("AWS_CONFIG_FILE", "/dev/null", 1);
    setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null", 1);
    unsetenv("AWS_ENDPOINT_URL");
    unsetenv("AWS_ENDPOINT_URL_S3");
    assert_ok(http_new(NULL, &http, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf url = {0};
        struct s3 *s3;
        char *key;

        setenv("AWS_REGION", cases[i].region, 1);
        setenv("AWS_USE_DUALSTACK_ENDPOINT", cases[i].dualstack, 1);
        setenv("AWS_USE_FIPS_ENDPOINT", cases[i].fips, 1);
        assert_ok(s3_new(cases[i].url, http, &s3, &key, &e), &e);
        assert_ok(s3_url(s3, "k ", NULL, &url, &e), &e);
        assert_string_equal(url.data, cases[i].want);
        s3_free(s3);
        free(key);
    }
    http_free(http);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_directory_buckets),
        cmocka_unit_test(test_no_directory_buckets),
        cmocka_unit_test(test_hosts_of_aws),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
