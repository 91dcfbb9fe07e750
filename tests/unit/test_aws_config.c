/* SPDX-License-Identifier: MIT */
/* tests/unit/test_aws_config.c - AWS's shared settings, as its own tools read them. */
#include "unit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include "base/base.h"
#include "base/buf.h"
#include "base/err.h"
#include "remote/aws_config.h"

static struct aws_config *config_of(enum aws_file kind, const char *text)
{
    struct aws_config *c = aws_config_new();
    struct err e = {0};

    assert_non_null(c);
    assert_ok(aws_config_add(c, kind, text, strlen(text), &e), &e);
    return c;
}

static void check(const struct aws_config *c, const char *profile, const char *key,
                  const char *want)
{
    const char *got = aws_config_get(c, profile, key);

    if (!want ? got != NULL : !got || strcmp(got, want) != 0)
        fail_msg("%s of %s: \"%s\", want \"%s\"", key, profile, got ? got : "(none)",
                 want ? want : "(none)");
}

static void test_credentials_file(void **state)
{
    CLEANUP(aws_config_freep)
    struct aws_config *c =
        config_of(AWS_FILE_CREDENTIALS, "\xef\xbb\xbf# a comment\r\n"
                                        "ignored = before any section\n"
                                        "[default]\r\n"
                                        "aws_access_key_id = AKIA1\r\n"
                                        "AWS_Secret_Access_Key=a=b:c d#e\r\n"
                                        "; another = comment\n"
                                        "\n"
                                        "[ two words ]\n"
                                        "aws_access_key_id:AKIA2\n"
                                        "  # an indented comment\n"
                                        "aws_session_token =\n"
                                        "[profile x]\n"
                                        "region = r");

    (void)state;
    check(c, "default", "aws_access_key_id", "AKIA1");
    check(c, "default", "aws_secret_access_key", "a=b:c d#e");
    check(c, "default", "another", NULL);
    check(c, "default", "ignored", NULL);
    check(c, "two words", "aws_access_key_id", "AKIA2");
    check(c, "two words", "aws_session_token", NULL); /* empty: not set */
    check(c, "profile x", "region", "r"); /* in this file that is its name */
    check(c, "x", "region", NULL);
    assert_true(aws_config_has_profile(c, "two words"));
    assert_false(aws_config_has_profile(c, "two"));
}

static void test_config_file(void **state)
{
    CLEANUP(aws_config_freep)
    struct aws_config *c =
        config_of(AWS_FILE_CONFIG, "[default]\n"
                                   "region = eu-west-1\n"
                                   "s3 =\n"
                                   "    addressing_style = path\n"
                                   "    max_concurrent_requests=20\n"
                                   "output = json\n"
                                   "[plain]\n"
                                   "region = not-a-profile\n"
                                   "neither section nor setting, and nobody's\n"
                                   "[profile \"a b\"]\n"
                                   "region = us-west-2\n"
                                   "credential_process = /bin/x --y=z \"q\"\n"
                                   "   more\n"
                                   "services = minio\n"
                                   "[services minio]\n"
                                   "s3 = \n"
                                   "  endpoint_url = http://localhost:9000\n"
                                   "sts =\n"
                                   "\tendpoint_url = http://localhost:9001\n");

    (void)state;
    check(c, "default", "region", "eu-west-1");
    check(c, "default", "s3.addressing_style", "path");
    check(c, "default", "s3.max_concurrent_requests", "20");
    check(c, "default", "output", "json");
    check(c, "plain", "region", NULL);
    check(c, "a b", "region", "us-west-2");
    check(c, "a b", "credential_process", "/bin/x --y=z \"q\"\nmore");
    assert_string_equal(aws_config_service_endpoint(c, "a b", "s3"),
                        "http://localhost:9000");
    assert_string_equal(aws_config_service_endpoint(c, "a b", "sts"),
                        "http://localhost:9001");
    assert_null(aws_config_service_endpoint(c, "a b", "ec2"));
    assert_null(aws_config_service_endpoint(c, "default", "s3"));
}

/* What stands below a setting is told by how far it is indented, as Python's configparser does. */
static void test_indented(void **state)
{
    CLEANUP(aws_config_freep)
    struct aws_config *c = config_of(AWS_FILE_CONFIG, "[default]\n"
                                                      "  region = a\n"
                                                      "  output = b\n"
                                                      "    c\n"
                                                      "  s3 =\n"
                                                      "\t  addressing_style = path\n"
                                                      "  sts_regional_endpoints = d\n"
                                                      "  [profile two]\n"
                                                      "region = e\n"
                                                      "  [profile three]\n"
                                                      "[plugins]\n"
                                                      "x = y\n"
                                                      "  [profile four]\n"
                                                      "[profile five]\n"
                                                      "    region = f\n");

    (void)state;
    check(c, "default", "region", "a");
    check(c, "default", "output", "b\nc");
    check(c, "default", "s3.addressing_style", "path");
    check(c, "default", "sts_regional_endpoints", "d");
    check(c, "two", "region", "e\n[profile three]");
    check(c, "five", "region", "f");
    assert_false(aws_config_has_profile(c, "three"));
    assert_false(aws_config_has_profile(c, "four"));
}

static void test_first_file_wins(void **state)
{
    static const char second[] = "[default]\naws_access_key_id = B\nregion = b\n"
                                 "aws_session_token = of B\n";
    CLEANUP(aws_config_freep)
    struct aws_config *c =
        config_of(AWS_FILE_CREDENTIALS, "[default]\naws_access_key_id = A\n");
    struct err e = {0};

    (void)state;
    assert_ok(aws_config_add(c, AWS_FILE_CONFIG, second, strlen(second), &e), &e);
    check(c, "default", "aws_access_key_id", "A");
    check(c, "default", "region", "b");
    check(c, "default", "aws_session_token", "of B");
    assert_null(
        aws_config_get_beside(c, "default", "aws_session_token", "aws_access_key_id"));
    assert_string_equal(
        aws_config_get_beside(c, "default", "aws_session_token", "region"), "of B");
    assert_null(aws_config_get_beside(c, "default", "region", "absent"));
}

static void test_refused(void **state)
{
    static const struct {
        const char *text;
        size_t len;
        const char *why;
    } bad[] = {
#define TEXT(s) (s), sizeof(s) - 1
        {TEXT("[default]\nno setting\n"), "line 2"},
        {TEXT("[default]\n\n= value\n"), "line 3"},
        {TEXT("[default\n"), "']'"},
        {TEXT("[default]\na = 1\nA = 2\n"), "second time"},
        {TEXT("[a]\nk = 1\n[b]\n[a]\nk = 1\n"), "second time"},
        {TEXT("[a]\ns3 =\n  k = 1\n  k = 2\n"), "line 4"},
        {TEXT("[a]\ns3 =\n  no setting\n"), "line 3"},
        {TEXT("[a]\nk = \0x\n"), "NUL"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        CLEANUP(aws_config_freep) struct aws_config *c = aws_config_new();
        struct err e = {0};
        int rc = aws_config_add(c, AWS_FILE_CREDENTIALS, bad[i].text, bad[i].len, &e);

        if (rc != -EBADMSG)
            fail_msg("\"%s\": %d %s", bad[i].text, rc, e.text);
        assert_has(e.text, bad[i].why);
        if (strstr(e.text, "value")) /* a line may be a secret: never its text */
            assert_has(e.text, "key = value");
    }
}

static void test_too_much(void **state)
{
    CLEANUP(aws_config_freep) struct aws_config *c = aws_config_new();
    CLEANUP(buf_release) struct buf text = {0};
    struct err e = {0};

    (void)state;
    buf_adds(&text, "[a]\n");
    for (int i = 0; i < 10001; i++)
        buf_addf(&text, "k%d=\n", i);
    assert_int_equal(aws_config_add(c, AWS_FILE_CREDENTIALS, text.data, text.len, &e),
                     -EFBIG);
    while (text.len <= 1 << 20)
        buf_adds(&text, "# a comment\n");
    assert_int_equal(aws_config_add(c, AWS_FILE_CREDENTIALS, text.data, text.len, &e),
                     -EFBIG);
    assert_has(e.text, "bytes");
}

static void write_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");

    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void test_load(void **state)
{
    CLEANUP(aws_config_freep) struct aws_config *c = NULL;
    CLEANUP(aws_config_freep) struct aws_config *none = NULL;
    char home[] = "/tmp/ufs-aws-config-XXXXXX", path[64], other[64];
    struct err e = {0};

    (void)state;
    assert_non_null(mkdtemp(home));
    setenv("HOME", home, 1);
    unsetenv("AWS_SHARED_CREDENTIALS_FILE");
    unsetenv("AWS_CONFIG_FILE");
    assert_ok(aws_config_load(&none, &e), &e);
    assert_false(aws_config_has_profile(none, "default"));

    snprintf(path, sizeof path, "%s/my-config", home);
    write_text(path, "[profile p]\nregion = here\n");
    setenv("AWS_CONFIG_FILE", "~/my-config", 1);
    setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null", 1);
    assert_ok(aws_config_load(&c, &e), &e);
    check(c, "p", "region", "here");

    snprintf(other, sizeof other, "%s/bad", home);
    write_text(other, "[p]\nsecret without a key\n");
    setenv("AWS_SHARED_CREDENTIALS_FILE", other, 1);
    assert_int_equal(aws_config_load(&none, &e), -EBADMSG);
    assert_has(e.text, "/bad: line 2");
    assert_null(strstr(e.text, "secret"));
    unlink(path);
    unlink(other);
    rmdir(home);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_credentials_file),
        cmocka_unit_test(test_config_file),
        cmocka_unit_test(test_indented),
        cmocka_unit_test(test_first_file_wins),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_too_much),
        cmocka_unit_test(test_load),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
