/* SPDX-License-Identifier: MIT */
/* tests/unit/test_credentials.c - the chain of keys, as far as it needs no network. */
#include "unit.h"

#include <errno.h>
#include <stdio.h>
#include <time.h>

#include "base/base.h"
#include "base/err.h"
#include "remote/aws_config.h"
#include "remote/credential_sources.h"
#include "remote/credentials.h"

static const char *const variables[] = {
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "AWS_NO_SIGN_REQUEST",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_ROLE_ARN",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
};

/* A home of its own with these files, and no other setting. */
static int clean(void **state)
{
    static char home[64];

    for (size_t i = 0; i < ARRAY_SIZE(variables); i++)
        unsetenv(variables[i]);
    setenv("AWS_EC2_METADATA_DISABLED", "true", 1);
    snprintf(home, sizeof home, "/tmp/ufs-credentials-XXXXXX");
    assert_non_null(mkdtemp(home));
    setenv("HOME", home, 1);
    *state = home;
    return 0;
}

static void path_of(const char *name, char path[128])
{
    snprintf(path, 128, "%s/%s", getenv("HOME"), name);
}

static void write_file(const char *variable, const char *name, const char *text)
{
    char path[128];
    FILE *f;

    path_of(name, path);
    f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    if (variable)
        setenv(variable, path, 1);
}

static int tidy(void **state)
{
    static const char *const names[] = {"config", "credentials", "keys", "count"};
    char path[128];

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        path_of(names[i], path);
        unlink(path);
    }
    unsetenv("AWS_CONFIG_FILE");
    unsetenv("AWS_SHARED_CREDENTIALS_FILE");
    return rmdir(*state);
}

static void check_keys(const char *id, const char *secret, const char *token)
{
    CLEANUP(aws_keys_release) struct aws_keys keys = {0};
    struct credentials *c = NULL;
    struct err e = {0};

    assert_ok(credentials_new(NULL, NULL, &c, &e), &e);
    assert_ok(credentials_get(c, &keys, &e), &e);
    if (!id) {
        assert_null(keys.id);
    } else {
        assert_non_null(keys.id);
        assert_string_equal(keys.id, id);
        assert_string_equal(keys.secret, secret);
        assert_string_equal(keys.token ? keys.token : "", token);
    }
    credentials_free(c);
}

static void check_fails(int code, const char *why)
{
    struct aws_keys keys = {0};
    struct credentials *c = NULL;
    struct err e = {0};

    assert_ok(credentials_new(NULL, NULL, &c, &e), &e);
    assert_int_equal(credentials_get(c, &keys, &e), -code);
    assert_has(e.text, why);
    assert_null(strstr(e.text, "HUSH"));
    credentials_free(c);
}

static void test_order(void **state)
{
    (void)state;
    check_keys(NULL, NULL, NULL);
    write_file("AWS_CONFIG_FILE", "config",
               "[default]\naws_access_key_id = C\naws_secret_access_key = c\n"
               "[profile two]\nregion = r2\naws_access_key_id = C2\n"
               "aws_secret_access_key = c2\naws_session_token = t2\n");
    check_keys("C", "c", "");
    write_file("AWS_SHARED_CREDENTIALS_FILE", "credentials",
               "[default]\naws_access_key_id = F\naws_secret_access_key = f\n");
    check_keys("F", "f", "");
    write_file("AWS_CONFIG_FILE", "config",
               "[default]\naws_access_key_id = C\naws_secret_access_key = c\n"
               "aws_session_token = of C\n"
               "[profile two]\nregion = r2\naws_access_key_id = C2\n"
               "aws_secret_access_key = c2\naws_session_token = t2\n");
    check_keys("F", "f", ""); /* not with a token that belongs to other keys */
    setenv("AWS_PROFILE", "two", 1);
    check_keys("C2", "c2", "t2");
    setenv("AWS_ACCESS_KEY_ID", "E", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "e", 1);
    check_keys("E", "e", "");
    setenv("AWS_SESSION_TOKEN", "t", 1);
    check_keys("E", "e", "t");
    setenv("AWS_NO_SIGN_REQUEST", "1", 1);
    check_keys(NULL, NULL, NULL);
}

static void test_refused(void **state)
{
    (void)state;
    setenv("AWS_ACCESS_KEY_ID", "E", 1);
    check_fails(EACCES, "AWS_SECRET_ACCESS_KEY");
    unsetenv("AWS_ACCESS_KEY_ID");
    setenv("AWS_PROFILE", "absent", 1);
    check_fails(ENOENT, "absent");
    write_file("AWS_CONFIG_FILE", "config",
               "[profile half]\naws_access_key_id = HUSH\n"
               "[profile keys]\naws_access_key_id = K\naws_secret_access_key = s\n"
               "[profile id]\nrole_arn = r\nweb_identity_token_file = /no/such\n");
    setenv("AWS_PROFILE", "half", 1);
    check_fails(EACCES, "aws_secret_access_key");
    setenv("AWS_PROFILE", "id", 1);
    check_fails(ENOENT, "/no/such");
    setenv("AWS_PROFILE", "keys", 1);
    check_keys("K", "s", "");
    setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/no/token",
           1); /* before the profile's keys, */
    setenv("AWS_ROLE_ARN", "r", 1);
    check_fails(ENOENT, "/no/token");
    unsetenv("AWS_WEB_IDENTITY_TOKEN_FILE");
    setenv("AWS_PROFILE", "default", 1);
    setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://example.com/keys", 1);
    check_fails(EACCES, "neither https");
    setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1@example.com/", 1);
    check_fails(EACCES, "neither https");
    setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1.example.com/", 1);
    check_fails(EACCES, "neither https");
}

/* A profile that needs the aws command to sign in never gives other keys, and never none. */
static void test_sign_in_refused(void **state)
{
    static const char *const settings[] = {
        "role_arn",      "source_profile", "credential_source", "sso_session",
        "sso_start_url", "sso_account_id", "sso_role_name"};

    (void)state;
    setenv("AWS_PROFILE", "me", 1);
    for (size_t i = 0; i < ARRAY_SIZE(settings); i++) {
        struct err e = {0};
        struct credentials *c = NULL;
        struct aws_keys keys;
        char config[512], has[64];

        snprintf(has, sizeof has, "profile me has %s", settings[i]);
        snprintf(config, sizeof config,
                 "[profile me]\n%s = x\naws_access_key_id = K\n"
                 "aws_secret_access_key = HUSH\ncredential_process = false\n",
                 settings[i]);
        write_file("AWS_CONFIG_FILE", "config", config);
        check_fails(EACCES, has);
        assert_ok(credentials_new(NULL, NULL, &c, &e), &e);
        assert_int_equal(credentials_get(c, &keys, &e), -EACCES);
        assert_has(e.hint, "credential_process = aws configure export-credentials "
                           "--profile me");
        credentials_free(c);
    }
    setenv("AWS_ACCESS_KEY_ID", "E", 1); /* what `--format env` prints */
    setenv("AWS_SECRET_ACCESS_KEY", "e", 1);
    check_keys("E", "e", "");
}

/* The environment's web identity goes before SSO and the keys of a profile, not its role. */
static void test_web_identity(void **state)
{
    (void)state;
    write_file("AWS_CONFIG_FILE", "config",
               "[profile sso]\nsso_session = s\n[profile role]\nrole_arn = r\n");
    setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/no/token", 1);
    setenv("AWS_ROLE_ARN", "r", 1);
    setenv("AWS_PROFILE", "sso", 1);
    check_fails(ENOENT, "/no/token");
    setenv("AWS_PROFILE", "role", 1);
    check_fails(EACCES, "role_arn");
}

/* A command's JSON; the command counts how often it was asked. */
static void test_process(void **state)
{
    char config[512], path[128];

    (void)state;
    path_of("keys", path);
    snprintf(config, sizeof config,
             "[default]\ncredential_process = /bin/sh -c \"echo x >> $HOME/count; cat "
             "'%s'\"\n",
             path);
    write_file("AWS_CONFIG_FILE", "config", config);
    write_file(NULL, "keys",
               "{\"Version\": 1, \"AccessKeyId\": \"P\", \"SecretAccessKey\": \"p\","
               " \"SessionToken\": \"pt\", \"Expiration\": \"2099-01-02T03:04:05Z\"}");
    check_keys("P", "p", "pt");
    write_file(NULL, "keys", "{\"Version\": 2, \"AccessKeyId\": \"HUSH\"}");
    check_fails(EBADMSG, "Version");
    write_file(NULL, "keys", "{\"Version\": 1, \"AccessKeyId\": \"HUSH\"}");
    check_fails(EBADMSG, "SecretAccessKey");
    write_file(NULL, "keys", "HUSH");
    check_fails(EBADMSG, "JSON");
    write_file(NULL, "keys",
               "{\"Version\": 1, \"AccessKeyId\": \"P\", \"SecretAccessKey\": \"p\","
               " \"Expiration\": \"HUSH\"}");
    check_fails(EBADMSG, "Expiration");
}

static void test_process_fails(void **state)
{
    (void)state;
    write_file("AWS_CONFIG_FILE", "config",
               "[default]\ncredential_process = /no/such/command\n"
               "[profile status]\ncredential_process = sh -c 'exit 7'\n"
               "[profile killed]\ncredential_process = sh -c 'kill -9 $$'\n"
               "[profile quote]\ncredential_process = sh -c 'exit\n"
               "[profile much]\ncredential_process = head -c 2000000 /dev/zero\n");
    check_fails(ENOENT, "/no/such/command");
    setenv("AWS_PROFILE", "status", 1);
    check_fails(EACCES, "status 7");
    setenv("AWS_PROFILE", "killed", 1);
    check_fails(EACCES, "signal 9");
    setenv("AWS_PROFILE", "quote", 1);
    check_fails(EINVAL, "quote");
    setenv("AWS_PROFILE", "much", 1);
    check_fails(EFBIG, "more than");
}

/* Renewed when they are refused, when they are about to expire, and not before. */
static void test_renewal(void **state)
{
    struct credentials *c = NULL;
    struct aws_keys keys = {0};
    struct err e = {0};

    (void)state;
    write_file("AWS_SHARED_CREDENTIALS_FILE", "credentials",
               "[default]\naws_access_key_id = A\naws_secret_access_key = a\n");
    assert_ok(credentials_new(NULL, NULL, &c, &e), &e);
    assert_ok(credentials_get(c, &keys, &e), &e);
    assert_string_equal(keys.id, "A");
    aws_keys_release(&keys);
    write_file("AWS_SHARED_CREDENTIALS_FILE", "credentials",
               "[default]\naws_access_key_id = B\naws_secret_access_key = b\n");
    assert_ok(credentials_get(c, &keys, &e), &e);
    assert_string_equal(keys.id, "A"); /* they never expire: not looked at again */
    aws_keys_release(&keys);
    sleep(2); /* younger ones count as just renewed by another thread */
    assert_true(credentials_renew(c));
    assert_ok(credentials_get(c, &keys, &e), &e);
    assert_string_equal(keys.id, "B");
    aws_keys_release(&keys);
    sleep(2);
    assert_false(credentials_renew(c)); /* the same again: no use in another try */
    credentials_free(c);
}

static void write_expiring(const char *id, int seconds)
{
    time_t until = time(NULL) + seconds;
    char text[256], date[32];
    struct tm tm;

    gmtime_r(&until, &tm);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &tm);
    snprintf(text, sizeof text,
             "{\"Version\": 1, \"AccessKeyId\": \"%s\", \"SecretAccessKey\": \"s\","
             " \"Expiration\": \"%s\"}",
             id, date);
    write_file(NULL, "keys", text);
}

static void test_expiry(void **state)
{
    struct credentials *c = NULL;
    struct aws_keys keys = {0};
    char config[256], path[128];
    struct err e = {0};

    (void)state;
    path_of("keys", path);
    snprintf(config, sizeof config, "[default]\ncredential_process = cat '%s'\n", path);
    write_file("AWS_CONFIG_FILE", "config", config);
    write_expiring("OLD", 8); /* more than a machine takes for the next lines */
    assert_ok(credentials_new(NULL, NULL, &c, &e), &e);
    assert_ok(credentials_get(c, &keys, &e), &e);
    assert_string_equal(keys.id, "OLD");
    aws_keys_release(&keys);
    write_expiring("NEW", 3600);
    sleep(9);
    assert_ok(credentials_get(c, &keys, &e), &e);
    assert_string_equal(keys.id, "NEW");
    aws_keys_release(&keys);
    write_file(NULL, "keys", "broken");
    assert_ok(credentials_get(c, &keys, &e), &e);
    assert_string_equal(keys.id, "NEW"); /* nobody asked the command */
    aws_keys_release(&keys);
    credentials_free(c);
}

static void test_settings(void **state)
{
    CLEANUP(aws_config_freep) struct aws_config *c = NULL;
    struct err e = {0};

    (void)state;
    write_file("AWS_CONFIG_FILE", "config",
               "[default]\nregion = from-file\nendpoint_url = http://all\n"
               "services = local\n[services local]\ns3 =\n  endpoint_url = http://s3\n"
               "[profile away]\nignore_configured_endpoint_urls = true\n");
    assert_ok(aws_config_load(&c, &e), &e);
    assert_string_equal(aws_region(c), "from-file");
    assert_string_equal(aws_endpoint(c, "s3"), "http://s3");
    assert_string_equal(aws_endpoint(c, "sts"), "http://all");
    setenv("AWS_DEFAULT_REGION", "default-region", 1);
    assert_string_equal(aws_region(c), "default-region");
    setenv("AWS_REGION", "region", 1);
    assert_string_equal(aws_region(c), "region");
    setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true", 1);
    setenv("AWS_ENDPOINT_URL", "http://every", 1);
    assert_null(aws_endpoint(c, "s3")); /* neither the file's nor the environment's */
    unsetenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS");
    assert_string_equal(aws_endpoint(c, "s3"), "http://every");
    setenv("AWS_ENDPOINT_URL_S3", "http://mine", 1);
    assert_string_equal(aws_endpoint(c, "s3"), "http://mine");
    assert_string_equal(aws_endpoint(c, "sts"), "http://every");
    setenv("AWS_PROFILE", "away", 1);
    assert_null(aws_endpoint(c, "s3"));
    setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "false", 1);
    assert_string_equal(aws_endpoint(c, "s3"), "http://mine");
}

static void test_split(void **state)
{
    static const struct {
        const char *command;
        const char *words[5];
    } good[] = {
        {"a b  c", {"a", "b", "c"}},
        {" a ", {"a"}},
        {"a 'b c' \"d e\"", {"a", "b c", "d e"}},
        {"a'b'\"c\"d ''", {"abcd", ""}},
        {"a\\ b \"c\\\"d\\\\e\\f\" '\\'", {"a b", "c\"d\\e\\f", "\\"}},
        {"$x `y` *", {"$x", "`y`", "*"}},
    };
    static const char *const bad[] = {"", "   ", "a 'b", "a \"b", "a \\"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(good); i++) {
        CLEANUP_FREE char **words = NULL;
        struct err e = {0};
        size_t n = 0;

        assert_ok(command_split(good[i].command, &words, &e), &e);
        for (; good[i].words[n]; n++) {
            assert_non_null(words[n]);
            assert_string_equal(words[n], good[i].words[n]);
        }
        assert_null(words[n]);
    }
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        char **words = NULL;
        struct err e = {0};

        assert_int_equal(command_split(bad[i], &words, &e), -EINVAL);
    }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, clean, tidy)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_order),         TEST(test_refused), TEST(test_process),
        TEST(test_process_fails), TEST(test_renewal), TEST(test_expiry),
        TEST(test_settings),      TEST(test_split),   TEST(test_sign_in_refused),
        TEST(test_web_identity),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
