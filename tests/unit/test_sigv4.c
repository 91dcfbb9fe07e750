/* SPDX-License-Identifier: MIT */
/* tests/unit/test_sigv4.c - signatures against those that AWS has published. */
#include "unit.h"

#include <errno.h>

#include "base/base.h"
#include "base/err.h"
#include "remote/sigv4.h"

#define HEADERS(...)                                                                   \
    .headers = (const struct sigv4_header[]){__VA_ARGS__},                             \
    .nheaders = sizeof((const struct sigv4_header[]){__VA_ARGS__}) /                   \
                sizeof(struct sigv4_header)

/*
 * The requests and signatures of AWS's "Signature Version 4 test suite" (with
 * aws-c-auth 0.8: tests/aws-signing-test-suite/v4), those whose path is normalised by a
 * rule that S3 does not have left out. All: AKIDEXAMPLE, us-east-1, "service".
 */
#define SUITE_HOST                                                                     \
    {                                                                                  \
        "Host", "example.amazonaws.com"                                                \
    }
#define SUITE_DATE                                                                     \
    {                                                                                  \
        "X-Amz-Date", "20150830T123600Z"                                               \
    }
#define UNRESERVED "-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
#define FORM_HASH "9095672bbd1f56dfc5b65f3e153adc8731a4a654192329106275f4c7b24d0b6e"
#define STS_TOKEN                                                                       \
    "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAe" \
    "MicRXmxfpSPfIeoIYRqTflfKD8YUuwthAx7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phU" \
    "ZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAkiY9q6d+xo0rKwT38x" \
    "Vqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2" \
    "ICCR/oLxBA=="

struct vector {
    const char *name;
    struct sigv4_request request; /* payload_hash NULL: empty */
    const char *signature;
};

static const struct vector suite[] = {
    {"get-header-key-duplicate",
     {"GET", "/",
      HEADERS(SUITE_HOST, {"My-Header1", "value2"}, {"My-Header1", "value2"},
              {"My-Header1", "value1"}, SUITE_DATE)},
     "c9d5ea9f3f72853aea855b47ea873832890dbdd183b4468f858259531a5138ea"},
    {"get-header-value-multiline",
     {"GET", "/",
      HEADERS(SUITE_HOST, {"My-Header1", "value1\n  value2\n     value3"}, SUITE_DATE)},
     "cfd34249e4b1c8d6b91ef74165d41a32e5fab3306300901bb65a51a73575eefd"},
    {"get-header-value-order",
     {"GET", "/",
      HEADERS(SUITE_HOST, {"My-Header1", "value4"}, {"My-Header1", "value1"},
              {"My-Header1", "value3"}, {"My-Header1", "value2"}, SUITE_DATE)},
     "08c7e5a9acfcfeb3ab6b2185e75ce8b1deb5e634ec47601a50643f830c755c01"},
    {"get-header-value-trim",
     {"GET", "/",
      HEADERS(SUITE_HOST, {"My-Header1", " value1"}, {"My-Header2", " \"a   b   c\""},
              SUITE_DATE)},
     "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736"},
    {"get-relative-relative-unnormalized",
     {"GET", "/example1/example2/../..", HEADERS(SUITE_HOST, SUITE_DATE)},
     "dc33e0856fd4baca4d7aa2146c38958283844764f38c74252a333df5e613003b"},
    {"get-relative-unnormalized",
     {"GET", "/example/..", HEADERS(SUITE_HOST, SUITE_DATE)},
     "eca7ead57bb5aa5c8e28007acd4ff04e1ff9a0ff3b237ec1554a184887ff9282"},
    {"get-slash-dot-slash-unnormalized",
     {"GET", "/./", HEADERS(SUITE_HOST, SUITE_DATE)},
     "68714168e6557f8f2de0ef956fc24dc2593a4bd2961f8df51898d8a134695145"},
    {"get-slash-pointless-dot-normalized",
     {"GET", "/example", HEADERS(SUITE_HOST, SUITE_DATE)},
     "ef75d96142cf21edca26f06005da7988e4f8dc83a165a80865db7089db637ec5"},
    {"get-slash-pointless-dot-unnormalized",
     {"GET", "/./example", HEADERS(SUITE_HOST, SUITE_DATE)},
     "beb03f223f7deae4146464f06e29eebbee9c8afbe15c290cf07aa8b119e14cff"},
    {"get-slash-unnormalized",
     {"GET", "//", HEADERS(SUITE_HOST, SUITE_DATE)},
     "c88bcd3d312d75078c0cd961d6deae3f4c754924b01669efcfcb439fd5e5b76e"},
    {"get-slashes-normalized",
     {"GET", "/example/", HEADERS(SUITE_HOST, SUITE_DATE)},
     "9a624bd73a37c9a373b5312afbebe7a714a789de108f0bdfe846570885f57e84"},
    {"get-slashes-unnormalized",
     {"GET", "//example//", HEADERS(SUITE_HOST, SUITE_DATE)},
     "87cca117541a147f6df867677d98a7d80dff226d2bfca9e4ffa899665623c7e5"},
    {"get-space",
     {"GET", "/example%20space/", HEADERS(SUITE_HOST, SUITE_DATE)},
     "652487583200325589f1fba4c7e578f72c47cb61beeca81406b39ddec1366741"},
    {"get-unreserved",
     {"GET", "/" UNRESERVED, HEADERS(SUITE_HOST, SUITE_DATE)},
     "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f"},
    {"get-utf8",
     {"GET", "/%E1%88%B4", HEADERS(SUITE_HOST, SUITE_DATE)},
     "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"},
    {"get-vanilla",
     {"GET", "/", HEADERS(SUITE_HOST, SUITE_DATE)},
     "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
    {"get-vanilla-empty-query-key",
     {"GET", "/", "Param1=value1", HEADERS(SUITE_HOST, SUITE_DATE)},
     "a67d582fa61cc504c4bae71f336f98b97f1ea3c7a6bfe1b6e45aec72011b9aeb"},
    {"get-vanilla-query",
     {"GET", "/", "", HEADERS(SUITE_HOST, SUITE_DATE)},
     "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
    {"get-vanilla-query-order-encoded",
     {"GET", "/", "Param-3=Value3&Param=Value2&%E1%88%B4=Value1",
      HEADERS(SUITE_HOST, SUITE_DATE)},
     "371d3713e185cc334048618a97f809c9ffe339c62934c032af5a0e595648fcac"},
    {"get-vanilla-query-order-key-case",
     {"GET", "/", "Param2=value2&Param1=value1", HEADERS(SUITE_HOST, SUITE_DATE)},
     "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"},
    {"get-vanilla-query-unreserved",
     {"GET", "/", UNRESERVED "=" UNRESERVED, HEADERS(SUITE_HOST, SUITE_DATE)},
     "9c3e54bfcdf0b19771a7f523ee5669cdf59bc7cc0884027167c21bb143a40197"},
    {"get-vanilla-utf8-query",
     {"GET", "/", "%E1%88%B4=bar", HEADERS(SUITE_HOST, SUITE_DATE)},
     "2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04"},
    {"get-vanilla-with-session-token",
     {"GET", "/",
      HEADERS(SUITE_HOST,
              {"X-Amz-Security-Token",
               "6e86291e8372ff2a2260956d9b8aae1d763fbf315fa00fa31553b73ebf194267"},
              SUITE_DATE)},
     "07ec1639c89043aa0e3e2de82b96708f198cceab042d4a97044c66dd9f74e7f8"},
    {"post-header-key-case",
     {"POST", "/", HEADERS(SUITE_HOST, SUITE_DATE)},
     "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"},
    {"post-header-key-sort",
     {"POST", "/", HEADERS(SUITE_HOST, {"My-Header1", "value1"}, SUITE_DATE)},
     "c5410059b04c1ee005303aed430f6e6645f61f4dc9e1461ec8f8916fdf18852c"},
    {"post-header-value-case",
     {"POST", "/", HEADERS(SUITE_HOST, {"My-Header1", "VALUE1"}, SUITE_DATE)},
     "cdbc9802e29d2942e5e10b5bccfdd67c5f22c7c4e8ae67b53629efa58b974b7d"},
    {"post-sts-header-before",
     {"POST", "/",
      HEADERS(SUITE_HOST, {"X-Amz-Security-Token", STS_TOKEN}, SUITE_DATE)},
     "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead"},
    {"post-vanilla-query",
     {"POST", "/", "Param1=value1", HEADERS(SUITE_HOST, SUITE_DATE)},
     "28038455d6de14eafc1f9222cf5aa6f1a96197d7deb8263271d420d138af7f11"},
    {"post-x-www-form-urlencoded",
     {"POST", "/",
      HEADERS({"Content-Type", "application/x-www-form-urlencoded"}, SUITE_HOST,
              {"Content-Length", "13"}, {"x-amz-content-sha256", FORM_HASH},
              SUITE_DATE),
      .payload_hash = FORM_HASH},
     "d3875051da38690788ef43de4db0d8f280229d82040bfac253562e56c3f20e0b"},
    {"post-x-www-form-urlencoded-parameters",
     {"POST", "/",
      HEADERS({"Content-Type", "application/x-www-form-urlencoded; charset=utf-8"},
              SUITE_HOST, {"Content-Length", "13"}, {"x-amz-content-sha256", FORM_HASH},
              SUITE_DATE),
      .payload_hash = FORM_HASH},
     "328d1b9eaadca9f5818ef05e8392801e091653bafec24fcab71e7344e7f51422"},
};

/*
 * The examples of "Authenticating Requests: Using the Authorization Header" (Amazon S3
 * API reference): AKIAIOSFODNN7EXAMPLE, us-east-1, s3.
 */
#define S3_HOST                                                                        \
    {                                                                                  \
        "host", "examplebucket.s3.amazonaws.com"                                       \
    }
#define S3_DATE                                                                        \
    {                                                                                  \
        "x-amz-date", "20130524T000000Z"                                               \
    }
#define S3_EMPTY                                                                       \
    {                                                                                  \
        "x-amz-content-sha256", SIGV4_EMPTY                                            \
    }
#define PUT_HASH "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"

static const struct vector s3_examples[] = {
    {"GET Object",
     {"GET", "/test.txt", HEADERS(S3_HOST, {"range", "bytes=0-9"}, S3_EMPTY, S3_DATE)},
     "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"},
    {"PUT Object",
     {"PUT", "/test%24file.text",
      HEADERS({"date", "Fri, 24 May 2013 00:00:00 GMT"}, S3_HOST, S3_DATE,
              {"x-amz-storage-class", "REDUCED_REDUNDANCY"},
              {"x-amz-content-sha256", PUT_HASH}),
      .payload_hash = PUT_HASH},
     "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"},
    {"GET Bucket Lifecycle",
     {"GET", "/", "lifecycle", HEADERS(S3_HOST, S3_EMPTY, S3_DATE)},
     "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"},
    {"Get Bucket (List Objects)",
     {"GET", "/", "max-keys=2&prefix=J", HEADERS(S3_HOST, S3_EMPTY, S3_DATE)},
     "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"},
};

static void check_vector(const struct sigv4_scope *scope, const struct vector *v)
{
    CLEANUP(buf_release) struct buf got = {0};
    struct sigv4_request request = v->request;
    struct err e = {0};
    const char *at;

    if (!request.payload_hash)
        request.payload_hash = SIGV4_EMPTY;
    assert_ok(sigv4_sign(scope, &request, &got, &e), &e);
    at = strstr(got.data, ", Signature=");
    assert_non_null(at);
    if (strcmp(at + strlen(", Signature="), v->signature) != 0) {
        CLEANUP(buf_release) struct buf canonical = {0};
        CLEANUP(buf_release) struct buf names = {0};

        sigv4_canonical(&request, &canonical, &names, &e);
        fail_msg("%s: %s\nwant %s\n%s", v->name, got.data, v->signature,
                 canonical.data);
    }
}

static void test_suite(void **state)
{
    static const struct sigv4_scope scope = {
        .key_id = "AKIDEXAMPLE",
        .secret = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
        .region = "us-east-1",
        .service = "service",
        .date = "20150830T123600Z"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(suite); i++)
        check_vector(&scope, &suite[i]);
}

static void test_s3_examples(void **state)
{
    static const struct sigv4_scope scope = {
        .key_id = "AKIAIOSFODNN7EXAMPLE",
        .secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        .region = "us-east-1",
        .service = "s3",
        .date = "20130524T000000Z"};
    CLEANUP(buf_release) struct buf got = {0};
    struct sigv4_request request = s3_examples[0].request;
    struct err e = {0};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(s3_examples); i++)
        check_vector(&scope, &s3_examples[i]);
    request.payload_hash = SIGV4_EMPTY;
    assert_ok(sigv4_sign(&scope, &request, &got, &e), &e);
    assert_string_equal(
        got.data,
        "AWS4-HMAC-SHA256 "
        "Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
}

static void test_refused(void **state)
{
    static const struct sigv4_header only_date[] = {SUITE_DATE};
    struct sigv4_request request = {"GET", "/", "", only_date, 1, SIGV4_EMPTY};
    struct sigv4_scope scope = {"id", "secret", "region", "s3", "20150830T123600Z"};
    CLEANUP(buf_release) struct buf got = {0};
    struct err e = {0};

    (void)state;
    assert_int_equal(sigv4_sign(&scope, &request, &got, &e), -EINVAL);
    assert_has(e.text, "host");
    scope.date = "20150830";
    assert_int_equal(sigv4_sign(&scope, &request, &got, &e), -EINVAL);
    assert_has(e.text, "20150830");
    request.nheaders = 1000;
    scope.date = "20150830T123600Z";
    assert_int_equal(sigv4_sign(&scope, &request, &got, &e), -EINVAL);
    assert_int_equal(got.len, 0);
}

static void test_date_and_hash(void **state)
{
    char date[SIGV4_DATE_SIZE], hex[65];
    struct err e = {0};

    (void)state;
    sigv4_date(1440938160, date);
    assert_string_equal(date, "20150830T123600Z");
    assert_ok(sigv4_hash("Param1=value1", 13, hex, &e), &e);
    assert_string_equal(hex, FORM_HASH);
    assert_ok(sigv4_hash("", 0, hex, &e), &e);
    assert_string_equal(hex, SIGV4_EMPTY);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_suite),
        cmocka_unit_test(test_s3_examples),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_date_and_hash),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
