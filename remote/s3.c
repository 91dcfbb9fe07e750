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
#include "remote/credentials.h"
#include "remote/gs_token.h"
#include "remote/s3_name.h"
#include "remote/sigv4.h"
#include "remote/xml.h"

enum { MAX_SIGNED = 32 };

struct s3 {
    struct http *http; /* borrowed */
    struct s3_name name;
    bool virtual_host, aws;
    bool dualstack, fips;
    char *identity;
    char *
        endpoint; /* "https://HOST[:PORT][/PATH]" without a slash at its end; NULL: aws */
    struct credentials *credentials;
    struct gs_token *token; /* of gs:// */

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

    if (!told || !s3_region_is_safe(told) || s->name.google)
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

/* A URL in the parts that are signed. */
struct url_parts {
    char *host, *path, *query;
    bool tls;
};

static void url_parts_release(struct url_parts *p)
{
    free(p->host);
    free(p->path);
    free(p->query);
}

static int split_url(const char *url, struct url_parts *out, struct err *e)
{
    const char *host = strstr(url, "://"), *path, *port;
    size_t host_len, path_len;

    if (!host)
        return err_set(e, EINVAL, "no URL to sign");
    host += 3;
    host_len = strcspn(host, "/?");
    path = host + host_len;
    path_len = strcspn(path, "?");
    out->tls = strncasecmp(url, "https:", 6) == 0;
    port = out->tls ? ":443" : ":80"; /* libcurl leaves it out of the header too */
    if (host_len > strlen(port) &&
        memcmp(host + host_len - strlen(port), port, strlen(port)) == 0)
        host_len -= strlen(port);
    out->host = strndup(host, host_len);
    out->path = path_len ? strndup(path, path_len) : strdup("/");
    out->query = strdup(path + path_len + (path[path_len] == '?'));
    return out->host && out->path && out->query ? 0 : err_nomem(e);
}

static const char *payload_hash(const struct http_request *r, bool tls, char hex[65],
                                struct err *e)
{
    if (!r->body_size)
        return SIGV4_EMPTY;
    if (tls || !r->body)
        return SIGV4_UNSIGNED;
    return sigv4_hash(r->body, r->body_size, hex, e) < 0 ? NULL : hex;
}

/* The request's own headers that must be signed; names and values are cut out of a copy. */
static size_t own_headers(const struct http_request *r, struct buf *text,
                          struct sigv4_header *dst, size_t room)
{
    size_t n = 0;

    for (size_t i = 0; r->headers && r->headers[i]; i++)
        if (strncasecmp(r->headers[i], "x-amz-", 6) == 0)
            buf_add(text, r->headers[i], strlen(r->headers[i]) + 1);
    for (size_t at = 0; at < text->len && n < room;) {
        char *name = text->data + at, *colon = strchr(name, ':');

        at += strlen(name) + 1;
        if (!colon)
            continue;
        *colon = '\0';
        dst[n++] = (struct sigv4_header){name, colon + 1};
    }
    return n;
}

static int sign(struct s3 *s, struct http_try *t, const struct aws_keys *keys,
                struct err *e)
{
    CLEANUP(url_parts_release) struct url_parts url = {0};
    CLEANUP(buf_release) struct buf own = {0};
    CLEANUP(buf_release) struct buf value = {0};
    struct sigv4_header headers[MAX_SIGNED];
    char region[S3_REGION_SIZE], date[SIGV4_DATE_SIZE], hex[65];
    const char *hash;
    size_t n = 0, added;
    int rc = split_url(t->url, &url, e);

    if (rc < 0)
        return rc;
    hash = payload_hash(t->request, url.tls, hex, e);
    if (!hash)
        return -e->code;
    sigv4_date(t->now, date);
    region_get(s, region);
    headers[n++] = (struct sigv4_header){"x-amz-date", date};
    headers[n++] = (struct sigv4_header){"x-amz-content-sha256", hash};
    if (keys->token)
        headers[n++] = (struct sigv4_header){"x-amz-security-token", keys->token};
    added = n;
    headers[n++] = (struct sigv4_header){"host", url.host};
    n += own_headers(t->request, &own, headers + n, MAX_SIGNED - n);
    if (buf_failed(&own))
        return err_nomem(e);
    rc = sigv4_sign(&(struct sigv4_scope){.key_id = keys->id,
                                          .secret = keys->secret,
                                          .region = region,
                                          .service = "s3",
                                          .date = date},
                    &(struct sigv4_request){
                        .method = t->request->method ? t->request->method : "GET",
                        .path = url.path,
                        .query = url.query,
                        .headers = headers,
                        .nheaders = n,
                        .payload_hash = hash},
                    &value, e);
    for (size_t i = 0; rc == 0 && i < added; i++)
        rc = http_try_header(t, headers[i].name, headers[i].value, e);
    return rc < 0 ? rc : http_try_header(t, "Authorization", value.data, e);
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
    int rc = gs_token_get(s->token, &value, &keys, e);

    if (rc < 0)
        return rc;
    note_anonymous(s, !value.len && !keys.id);
    if (keys.id)
        return sign(s, t, &keys, e);
    return value.len ? http_try_header(t, "Authorization", value.data, e) : 0;
}

static int s3_authorize(void *user, struct http_try *t, struct err *e)
{
    CLEANUP(aws_keys_release) struct aws_keys keys = {0};
    struct s3 *s = user;
    int rc;

    if (s->name.google)
        return authorize_google(s, t, e);
    rc = credentials_get(s->credentials, &keys, e);
    if (rc < 0)
        return rc;
    note_anonymous(s, !keys.id);
    return keys.id ? sign(s, t, &keys, e) : 0;
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
    return keys_were_refused(a) && credentials_renew(s->credentials);
}

const struct http_auth s3_auth = {.authorize = s3_authorize, .refused = s3_refused};

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

    if (s->name.access_point)
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
        rc = s->name.google
                 ? gs_token_new(s->http, &s->token, e)
                 : credentials_new(s->http, aws_region(config), &s->credentials, e);
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
    if (answer.status == 404) {
        err_set(e, ENOENT, "%s: there is no such bucket", s->name.shown);
        return err_hint(e, "check its name, and AWS_ENDPOINT_URL if it is another "
                           "store's");
    }
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
    credentials_free(s->credentials);
    gs_token_free(s->token);
    pthread_mutex_destroy(&s->lock);
    s3_name_release(&s->name);
    free(s->identity);
    free(s->endpoint);
    free(s);
}
