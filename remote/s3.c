/* SPDX-License-Identifier: MIT */
/* remote/s3.c - one bucket of S3, or of what speaks its REST interface, and its signer. */
#include "remote/s3.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/err.h"
#include "base/log.h"
#include "remote/aws_config.h"
#include "remote/credential_sources.h"
#include "remote/customer_key.h"
#include "remote/gs_token.h"
#include "remote/s3_name.h"
#include "remote/s3_sign.h"
#include "remote/xml.h"

enum { MAX_SESSION = 1 << 16 };

struct s3 {
    struct http *http; /* borrowed */
    struct s3_name name;
    bool virtual_host, aws;
    bool dualstack, fips;
    char *identity;
    char *
        endpoint; /* "https://HOST[:PORT][/PATH]" without a slash at its end; NULL: aws */
    struct credentials *credentials;
    struct kept_keys *session; /* of a directory bucket, or NULL */
    struct gs_token *token;    /* of gs:// */
    struct customer_key *key;  /* of objects; NULL: none */

    pthread_mutex_t lock;
    char region[S3_REGION_SIZE]; /* guarded by lock: an answer may tell another one */
    bool anonymous;              /* guarded by lock: the last request went unsigned */
};

const char *s3_shown(const struct s3 *s)
{
    return s->name.shown;
}

const char *s3_identity(const struct s3 *s)
{
    return s->identity;
}

bool s3_takes_md5(const struct s3 *s)
{
    return !s->name.zone[0];
}

/* ---- where it is ---- */

static void region_get(struct s3 *s, char region[S3_REGION_SIZE])
{
    pthread_mutex_lock(&s->lock);
    memcpy(region, s->region, S3_REGION_SIZE);
    pthread_mutex_unlock(&s->lock);
}

/* True when an answer told a region that is not the one that we took. */
static bool region_learn(struct s3 *s, const struct http_answer *a)
{
    const char *told = http_answer_header(a, "x-amz-bucket-region");
    bool other = false;

    if (!told || !s3_region_is_safe(told) || s->name.google || s->name.zone[0])
        return false;
    pthread_mutex_lock(&s->lock);
    if (strcmp(s->region, told) != 0) {
        snprintf(s->region, sizeof s->region, "%s", told);
        other = true;
    }
    pthread_mutex_unlock(&s->lock);
    return other;
}

static int add_base(const struct s3 *s, const char *region, struct buf *out)
{
    const char *scheme = s->endpoint ? strstr(s->endpoint, "://") : NULL;

    if (s->endpoint && s->virtual_host && scheme)
        buf_addf(out, "%.*s%s.%s", (int)(scheme + 3 - s->endpoint), s->endpoint,
                 s->name.bucket, scheme + 3);
    else if (s->endpoint)
        buf_adds(out, s->endpoint);
    else if (s->name.zone[0])
        buf_addf(out, "https://%s.s3express%s-%s%s.%s.amazonaws.com%s", s->name.bucket,
                 s->fips ? "-fips" : "", s->name.zone, s->dualstack ? ".dualstack" : "",
                 region, strncmp(region, "cn-", 3) == 0 ? ".cn" : "");
    else
        buf_addf(out, "https://%s%ss3%s%s%s.%s.amazonaws.com%s",
                 s->virtual_host ? s->name.bucket : "", s->virtual_host ? "." : "",
                 s->name.access_point ? "-accesspoint" : "", s->fips ? "-fips" : "",
                 s->dualstack ? ".dualstack" : "", region,
                 strncmp(region, "cn-", 3) == 0 ? ".cn" : "");
    if (!s->virtual_host)
        buf_addf(out, "/%s", s->name.bucket);
    return buf_failed(out);
}

int s3_url(struct s3 *s, const char *key, const char *query, struct buf *out,
           struct err *e)
{
    char region[S3_REGION_SIZE];

    region_get(s, region);
    add_base(s, region, out);
    if (key[0] || s->virtual_host)
        buf_addc(out, '/');
    if (http_encode(key, true, out) < 0)
        return err_nomem(e);
    if (query)
        buf_addf(out, "?%s", query);
    return buf_failed(out) ? err_nomem(e) : 0;
}

/* ---- letting requests in ---- */

/* Does it ask for an object, so that the store needs the key that it lies under? */
static bool wants_key(struct s3 *s, const struct http_try *t)
{
    CLEANUP(buf_release) struct buf base = {0};
    const char *method = t->request->method, *rest;
    char region[S3_REGION_SIZE];

    if (!s->key || (method && strcmp(method, "DELETE") == 0))
        return false;
    region_get(s, region);
    if (add_base(s, region, &base) < 0 || strncmp(t->url, base.data, base.len) != 0)
        return false;
    rest = t->url + base.len;
    return rest[0] == '/' && rest[1] && rest[1] != '?';
}

static size_t key_headers(struct s3 *s, const struct http_try *t,
                          struct sigv4_header dst[CUSTOMER_KEY_HEADERS])
{
    return wants_key(s, t) ? customer_key_headers(s->key, dst) : 0;
}

static int sign(struct s3 *s, struct http_try *t, const struct aws_keys *keys,
                bool of_session, struct err *e)
{
    struct sigv4_header more[CUSTOMER_KEY_HEADERS];
    char region[S3_REGION_SIZE];
    struct s3_signing how = {.keys = keys,
                             .region = region,
                             .service = s->name.zone[0] ? "s3express" : "s3",
                             .token_header = of_session ? "x-amz-s3session-token"
                                                        : "x-amz-security-token",
                             .hash_body = !s3_takes_md5(s),
                             .more = more,
                             .nmore = key_headers(s, t, more)};

    region_get(s, region);
    return s3_sign(t, &how, e);
}

static void note_anonymous(struct s3 *s, bool anonymous)
{
    pthread_mutex_lock(&s->lock);
    s->anonymous = anonymous;
    pthread_mutex_unlock(&s->lock);
}

static int authorize_google(struct s3 *s, struct http_try *t, struct err *e)
{
    CLEANUP(buf_release) struct buf value = {0};
    struct aws_keys keys = {0}; /* borrowed strings */
    TRY(gs_token_get(s->token, &value, &keys, e));
    note_anonymous(s, !value.len && !keys.id);
    if (keys.id)
        return sign(s, t, &keys, false, e);
    return value.len ? http_try_header(t, "Authorization", value.data, e) : 0;
}

/* By the user's own keys. */
static int authorize_amazon(void *user, struct http_try *t, struct err *e)
{
    CLEANUP(aws_keys_release) struct aws_keys keys = {0};
    struct s3 *s = user;

    TRY(credentials_get(s->credentials, &keys, e));
    note_anonymous(s, !keys.id);
    return keys.id ? sign(s, t, &keys, false, e) : 0;
}

/* By the session's keys, which the user's own get for this bucket. */
static int authorize_by_session(struct s3 *s, struct http_try *t, struct err *e)
{
    CLEANUP(aws_keys_release) struct aws_keys keys = {0};
    int rc = kept_keys_get(s->session, &keys, e);

    return rc < 0 ? rc : sign(s, t, &keys, true, e);
}

static int s3_authorize(void *user, struct http_try *t, struct err *e)
{
    struct s3 *s = user;
    struct sigv4_header key[CUSTOMER_KEY_HEADERS];
    size_t n = key_headers(s, t, key);

    for (size_t i = 0; i < n; i++)
        TRY(http_try_header(t, key[i].name, key[i].value, e));
    if (s->name.google)
        return authorize_google(s, t, e);
    return s->session ? authorize_by_session(s, t, e) : authorize_amazon(s, t, e);
}

struct code {
    char *dst;
    size_t size;
};

static int code_leaf(void *user, const char *path, const char *text, size_t len,
                     struct err *e)
{
    struct code *c = user;

    (void)e;
    if (strcmp(path, "Error/Code") == 0 && len < c->size && strlen(text) == len)
        memcpy(c->dst, text, len + 1);
    return 0;
}

void s3_error_code(const struct http_answer *a, char *dst, size_t size)
{
    struct code c = {dst, size};
    struct err ignored = {0};

    dst[0] = '\0';
    if (a->body.len && xml_each(a->body.data, a->body.len, code_leaf, &c, &ignored) < 0)
        dst[0] = '\0';
    for (const char *p = dst; *p; p++)
        if (!((*p >= 'A' && *p <= 'Z') || (*p >= 'a' && *p <= 'z') ||
              (*p >= '0' && *p <= '9')))
            dst[0] = '\0';
}

/*
 * 400 with ExpiredToken is what S3 says of keys whose time is over; others say 403 with
 * ExpiredToken or InvalidAccessKeyId; the answer to HEAD says nothing but the status.
 */
static bool keys_were_refused(const struct http_answer *a)
{
    static const char *const codes[] = {"ExpiredToken",          "InvalidToken",
                                        "InvalidAccessKeyId",    "TokenRefreshRequired",
                                        "ExpiredTokenException", "RequestExpired"};
    char code[64];

    s3_error_code(a, code, sizeof code);
    if (!code[0])
        return a->body.len == 0 || a->status == 401;
    for (size_t i = 0; i < ARRAY_SIZE(codes); i++)
        if (strcmp(code, codes[i]) == 0)
            return true;
    return false;
}

static bool s3_refused(void *user, const struct http_answer *a)
{
    struct s3 *s = user;

    if (s->name.google)
        return a->status == 401 && gs_token_renew(s->token);
    if (region_learn(s, a))
        return !s->aws; /* there the host is another one too: not by this URL */
    if (!keys_were_refused(a))
        return false;
    return s->session ? kept_keys_renew(s->session) : credentials_renew(s->credentials);
}

const struct http_auth s3_auth = {.authorize = s3_authorize, .refused = s3_refused};

static bool amazon_refused(void *user, const struct http_answer *a)
{
    struct s3 *s = user;

    return keys_were_refused(a) && credentials_renew(s->credentials);
}

static const struct http_auth amazon_auth = {.authorize = authorize_amazon,
                                             .refused = amazon_refused};

static int no_such_bucket(const struct s3 *s, struct err *e)
{
    err_set(e, ENOENT, "%s: there is no such bucket", s->name.shown);
    return err_hint(e, "check its name, and AWS_ENDPOINT_URL if it is another store's");
}

/*
 * CreateSession of S3's API reference: keys for five minutes that let into one directory
 * bucket, as far as the user's own may: without a mode the most that is allowed.
 */
static int fetch_session(void *user, struct aws_keys *out, struct err *e)
{
    struct s3 *s = user;
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(buf_release) struct buf url = {0};
    struct http_request r = {.what = s->name.shown,
                             .auth = &amazon_auth,
                             .auth_user = s,
                             .max = MAX_SESSION,
                             .flags = HTTP_NO_REDIRECT | HTTP_ANY_STATUS};
    int rc = s3_url(s, "", "session=", &url, e);

    r.url = url.data;
    if (rc == 0)
        rc = http_do(s->http, &r, &answer, e);
    if (rc == 0 && answer.status == 404)
        return no_such_bucket(s, e);
    if (rc == 0)
        rc = keys_from_answer(&answer, "CreateSession", out, e);
    return rc < 0 ? err_wrap(e, "%s", s->name.shown) : 0;
}

/* What can be done about the code in the message of a refusal, or NULL. */
static const char *about_refusal(const char *text)
{
    static const struct {
        const char *code, *todo;
    } known[] = {
        {"SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY is not this key's secret"},
        {"InvalidAccessKeyId", "this server does not know the key: see "
                               "AWS_ACCESS_KEY_ID, AWS_PROFILE and AWS_ENDPOINT_URL"},
        {"ExpiredToken", "get new credentials from where these came from"},
        {"AuthorizationHeaderMalformed", "set AWS_REGION to the bucket's region"},
        {"CreateSession says 403",
         "the key has no right to this: s3express:CreateSession "
         "on the bucket is needed"},
        {"InvalidRequest", "where the object lies under a key of its owner's: name the "
                           "key's file in UNSHARD_CUSTOMER_KEY"},
        {"AccessDenied", "the key has no right to this: s3:ListBucket on the bucket "
                         "and s3:GetObject on its objects are needed"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(known); i++)
        if (strstr(text, known[i].code))
            return known[i].todo;
    return NULL;
}

int s3_explain(struct s3 *s, struct err *e)
{
    bool anonymous;
    const char *todo;

    pthread_mutex_lock(&s->lock);
    anonymous = s->anonymous;
    pthread_mutex_unlock(&s->lock);
    if (e->hint[0])
        return -e->code;
    todo = anonymous ? NULL : about_refusal(e->text);
    if (todo)
        return err_hint(e, "%s", todo);
    if (e->code != EACCES || !anonymous)
        return -e->code;
    return err_hint(e, s->name.google
                           ? "no credentials: set GOOGLE_OAUTH_ACCESS_TOKEN, or "
                             "GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY"
                           : "no credentials were found: set AWS_ACCESS_KEY_ID and "
                             "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE");
}

/* ---- making one ---- */

/* A scheme and a host, no user, no query. */
static int take_endpoint(struct s3 *s, const char *url, struct err *e)
{
    size_t len = strlen(url), scheme = strncasecmp(url, "https://", 8) == 0  ? 8
                                       : strncasecmp(url, "http://", 7) == 0 ? 7
                                                                             : 0;

    while (len > scheme && url[len - 1] == '/')
        len--;
    if (!scheme || len == scheme || memchr(url, '@', len) || memchr(url, '?', len) ||
        memchr(url, '#', len))
        return err_set(
            e, EINVAL,
            "the endpoint must be http://HOST[:PORT] or https://HOST[:PORT]");
    s->endpoint = strndup(url, len);
    return s->endpoint ? 0 : err_nomem(e);
}

static bool variable_is_true(const char *name)
{
    const char *value = getenv(name);

    return value && (strcasecmp(value, "true") == 0 || strcmp(value, "1") == 0);
}

static int place_at_google(struct s3 *s, struct err *e)
{
    const char *emulator = getenv("STORAGE_EMULATOR_HOST");
    CLEANUP(buf_release) struct buf url = {0};

    if (!emulator || !emulator[0])
        emulator = "https://storage.googleapis.com";
    if (buf_addf(&url, "%s%s", strstr(emulator, "://") ? "" : "http://", emulator) < 0)
        return err_nomem(e);
    snprintf(s->region, sizeof s->region, "auto");
    return take_endpoint(s, url.data, e);
}

static int place_at_amazon(struct s3 *s, const struct aws_config *config, struct err *e)
{
    const char *endpoint = aws_endpoint(config, "s3"), *region = aws_region(config);
    const char *style = aws_config_get(config, aws_profile(), "s3.addressing_style");

    if (s->name.region[0])
        region = s->name.region;
    if (region && !s3_region_is_safe(region))
        return err_set(e, EINVAL, "%s: is no region's name", region);
    snprintf(s->region, sizeof s->region, "%s", region ? region : "us-east-1");
    s->aws = !endpoint;
    s->virtual_host = s->aws && s3_name_is_label(s->name.bucket);
    if (s->name.access_point)
        s->virtual_host = true;
    else if (style && strcasecmp(style, "path") == 0)
        s->virtual_host = false;
    else if (style && strcasecmp(style, "virtual") == 0)
        s->virtual_host = s3_name_is_label(s->name.bucket);
    s->dualstack = variable_is_true("AWS_USE_DUALSTACK_ENDPOINT");
    s->fips = variable_is_true("AWS_USE_FIPS_ENDPOINT");
    return endpoint ? take_endpoint(s, endpoint, e) : 0;
}

/* As botocore's client does (its setting s3_disable_express_session_auth). */
static bool wants_session(const struct s3 *s, const struct aws_config *config)
{
    const char *off = getenv("AWS_S3_DISABLE_EXPRESS_SESSION_AUTH");

    if (!off || !off[0])
        off = aws_config_get(config, aws_profile(), "s3_disable_express_session_auth");
    return s->name.zone[0] && !(off && strcasecmp(off, "true") == 0);
}

/* The key is told to who has the object, and to nobody on the way there. */
static int take_key(struct s3 *s, struct err *e)
{
    TRY(customer_key_load(s->name.google, &s->key, e));
    if (!s->key || !s->endpoint || url_is_private(s->endpoint))
        return 0;
    err_set(e, EACCES, "%s: UNSHARD_CUSTOMER_KEY would be told to all on the way",
            s->endpoint);
    return err_hint(e, "use an endpoint with https://");
}

static int let_in_by_amazon(struct s3 *s, const struct aws_config *config,
                            struct err *e)
{
    int rc = credentials_new(s->http, aws_region(config), &s->credentials, e);

    if (rc == 0 && wants_session(s, config) &&
        !(s->session = kept_keys_new(fetch_session, s)))
        rc = err_nomem(e);
    return rc;
}

/* Everything that the network is not needed for. */
static int set_up(struct s3 *s, const char *url, char **key, struct err *e)
{
    CLEANUP(aws_config_freep) struct aws_config *config = NULL;
    int rc = s3_name_parse(url, &s->name, key, e);

    if (rc == 0 && !s->name.google)
        rc = aws_config_load(&config, e);
    if (rc == 0)
        rc = s->name.google ? place_at_google(s, e) : place_at_amazon(s, config, e);
    if (rc == 0)
        rc = take_key(s, e);
    if (rc == 0)
        rc = s->name.google ? gs_token_new(s->http, &s->token, e)
                            : let_in_by_amazon(s, config, e);
    if (rc == 0 &&
        asprintf(&s->identity, "%s %s%s", s->endpoint ? s->endpoint : "aws",
                 s->name.access_point ? "accesspoint " : "", s->name.bucket) < 0) {
        s->identity = NULL;
        rc = err_nomem(e);
    }
    return rc;
}

int s3_locate(struct s3 *s, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(buf_release) struct buf url = {0};
    struct http_request r = {.method = "HEAD",
                             .what = s->name.shown,
                             .auth = &s3_auth,
                             .auth_user = s,
                             .flags = HTTP_NO_REDIRECT | HTTP_ANY_STATUS};
    int rc = s3_url(s, "", NULL, &url, e);

    r.url = url.data;
    if (rc == 0)
        rc = http_do(s->http, &r, &answer, e);
    if (rc < 0)
        return s3_explain(s, e);
    if (answer.status == 404)
        return no_such_bucket(s, e);
    region_learn(s, &answer);
    return 0;
}

int s3_new(const char *url, struct http *http, struct s3 **out, char **key,
           struct err *e)
{
    struct s3 *s = calloc(1, sizeof *s);
    int rc;

    *key = NULL;
    if (!s)
        return err_nomem(e);
    s->http = http;
    pthread_mutex_init(&s->lock, NULL);
    rc = set_up(s, url, key, e);
    if (rc < 0) {
        s3_free(s);
        free(*key);
        *key = NULL;
        return rc;
    }
    *out = s;
    return 0;
}

void s3_free(struct s3 *s)
{
    if (!s)
        return;
    customer_key_free(s->key);
    kept_keys_free(s->session);
    credentials_free(s->credentials);
    gs_token_free(s->token);
    pthread_mutex_destroy(&s->lock);
    s3_name_release(&s->name);
    free(s->identity);
    free(s->endpoint);
    free(s);
}
