/* SPDX-License-Identifier: MIT */
/*
 * remote/credential_sso.c - keys for who is logged in at AWS's IAM Identity Center.
 *
 * `aws sso login` leaves a token in ~/.aws/sso/cache; the portal gives keys of a role for it,
 * and a token server another token as long as the session lives. Files, names and order are
 * those of botocore 1.44 (credentials.py: SSOProvider, tokens.py: SSOTokenProvider).
 */
#include "remote/credential_sources.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/fsutil.h"
#include "base/json.h"
#include "base/log.h"
#include "remote/aws_config.h"
#include "remote/http.h"

enum {
    MAX_ANSWER = 1 << 20,
    AHEAD_S = 15 * 60, /* a token is renewed that long before it ends */
    ASK_S = 30,
    SHA1_SIZE = 20,
};

/* What a profile says of its login; borrowed from the settings. */
struct login {
    const char *profile, *session; /* session NULL: the older form, without one */
    const char *start_url, *region, *account, *role;
};

/* A file of the cache. Owned. */
struct token {
    char *access, *refresh, *client_id, *client_secret, *registered; /* or NULL */
    time_t expires;
};

static void wipe(char **text)
{
    if (*text)
        explicit_bzero(*text, strlen(*text));
    free(*text);
    *text = NULL;
}

static void token_release(struct token *t)
{
    wipe(&t->access);
    wipe(&t->refresh);
    wipe(&t->client_id);
    wipe(&t->client_secret);
    wipe(&t->registered);
}

static void secret_release(struct buf *b)
{
    if (b->data)
        explicit_bzero(b->data, b->len);
    buf_release(b);
}

/* ---- the settings ---- */

/* A setting that the profile or its session has; both must agree where both have it. */
static int setting(const struct key_context *k, const struct login *l, const char *key,
                   const char **out, struct err *e)
{
    const char *own = aws_config_get(k->config, l->profile, key);
    const char *shared =
        l->session ? aws_config_sso_session(k->config, l->session, key) : NULL;

    *out = shared ? shared : own;
    if (own && shared && strcmp(own, shared) != 0)
        return err_set(e, EINVAL, "%s is another one than that of sso-session %s", key,
                       l->session);
    if (!*out)
        return err_set(e, EINVAL, "%s is not set in it%s%s", key,
                       l->session ? ", nor in sso-session " : "",
                       l->session ? l->session : "");
    return 0;
}

/* A region becomes a part of a host's name. */
static bool is_label(const char *text)
{
    size_t len = strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789-");

    return len > 0 && len <= 63 && text[len] == '\0';
}

/* 0: this profile does not sign in so. */
static int login_of(const struct key_context *k, const char *profile, struct login *l,
                    struct err *e)
{
    *l = (struct login){
        .profile = profile,
        .session = aws_config_get(k->config, profile, "sso_session"),
        .account = aws_config_get(k->config, profile, "sso_account_id"),
        .role = aws_config_get(k->config, profile, "sso_role_name"),
    };
    if (!l->account && !l->role)
        return 0;
    if (!l->account || !l->role)
        return err_set(e, EINVAL, "%s is not set in it",
                       l->role ? "sso_account_id" : "sso_role_name");
    TRY(setting(k, l, "sso_start_url", &l->start_url, e));
    TRY(setting(k, l, "sso_region", &l->region, e));
    return is_label(l->region)
               ? 1
               : err_set(e, EINVAL, "%s: is no region's name", l->region);
}

static int log_in_again(const struct login *l, struct err *e)
{
    return err_hint(e, "aws sso login --profile %s", l->profile);
}

/* ---- the token ---- */

/* ~/.aws/sso/cache/SHA1.json, of the session's name, or of the older form's start URL. */
static int cache_path(const struct login *l, struct buf *path, struct err *e)
{
    const char *name = l->session ? l->session : l->start_url, *home = getenv("HOME");
    unsigned char hash[EVP_MAX_MD_SIZE];
    unsigned size;

    if (EVP_Digest(name, strlen(name), hash, &size, EVP_sha1(), NULL) != 1 ||
        size != SHA1_SIZE)
        return err_set(e, EIO, "libcrypto has no SHA-1");
    buf_addf(path, "%s/.aws/sso/cache/", home ? home : "");
    for (unsigned i = 0; i < size; i++)
        buf_addf(path, "%02x", hash[i]);
    return buf_adds(path, ".json") < 0 ? err_nomem(e) : 0;
}

static int copy_member(const struct json *doc, const char *name, char **out,
                       struct err *e)
{
    const char *text;

    if (!json_string(json_get(doc, name), &text) || !text[0])
        return 0;
    *out = strdup(text);
    return *out ? 0 : err_nomem(e);
}

static int parse_token(const struct buf *text, struct token *t, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0}; /* its words might quote a secret */
    const char *until;

    if (json_parse(text->data, text->len, NULL, &doc, &why) < 0)
        return err_set(e, EBADMSG, "is no JSON");
    TRY(copy_member(doc, "accessToken", &t->access, e));
    TRY(copy_member(doc, "refreshToken", &t->refresh, e));
    TRY(copy_member(doc, "clientId", &t->client_id, e));
    TRY(copy_member(doc, "clientSecret", &t->client_secret, e));
    TRY(copy_member(doc, "registrationExpiresAt", &t->registered, e));
    if (!t->access || !json_string(json_get(doc, "expiresAt"), &until) ||
        !(t->expires = http_date(until)))
        return err_set(e, EBADMSG, "has no accessToken with its expiresAt");
    return 0;
}

static int load_token(const struct login *l, const char *path, struct token *t,
                      struct err *e)
{
    CLEANUP(secret_release) struct buf text = {0};

    if (secret_file_read(path, &text, e) == 0) {
        if (parse_token(&text, t, e) == 0)
            return 0;
        err_wrap(e, "%s", path);
    } else if (e->code == ENOENT) {
        *e = (struct err){0};
        err_set(e, EACCES, "nobody has logged in (%s is not there)", path);
    }
    return e->code == EACCES || e->code == EBADMSG ? log_in_again(l, e) : -e->code;
}

/* ---- its renewal ---- */

static bool can_be_renewed(const struct login *l, const struct token *t)
{
    return l->session && t->refresh && t->client_id && t->client_secret &&
           t->registered && http_date(t->registered) > time(NULL);
}

static void add_member(struct buf *json, const char *name, const char *value)
{
    buf_addc(json, json->len ? ',' : '{');
    buf_add_json(json, name, strlen(name));
    buf_addc(json, ':');
    buf_add_json(json, value, strlen(value));
}

/* For the next one who needs it, as aws's own tools leave it there. */
static int save_token(const struct login *l, const char *path, const struct token *t,
                      struct err *e)
{
    CLEANUP(secret_release) struct buf json = {0};
    CLEANUP(buf_release) struct buf temporary = {0};
    char until[32];
    struct tm tm;
    int fd, rc;

    strftime(until, sizeof until, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&t->expires, &tm));
    add_member(&json, "startUrl", l->start_url);
    add_member(&json, "region", l->region);
    add_member(&json, "accessToken", t->access);
    add_member(&json, "expiresAt", until);
    add_member(&json, "clientId", t->client_id);
    add_member(&json, "clientSecret", t->client_secret);
    add_member(&json, "registrationExpiresAt", t->registered);
    if (t->refresh)
        add_member(&json, "refreshToken", t->refresh);
    buf_addc(&json, '}');
    if (buf_failed(&json) || buf_addf(&temporary, "%s.XXXXXX", path) < 0)
        return err_nomem(e);
    fd = mkostemp(temporary.data, O_CLOEXEC); /* 0600 */
    if (fd < 0)
        return err_set(e, errno, "%s: %s", temporary.data, strerror(errno));
    rc = write_all(fd, json.data, json.len, e);
    if (close(fd) < 0 && rc == 0)
        rc = err_set(e, errno, "%s: %s", temporary.data, strerror(errno));
    if (rc == 0 && rename(temporary.data, path) < 0)
        rc = err_set(e, errno, "%s: %s", path, strerror(errno));
    if (rc < 0)
        unlink(temporary.data);
    return rc;
}

static int add_url(const struct key_context *k, const struct login *l,
                   const char *service, const char *host, const char *path,
                   struct buf *url, struct err *e)
{
    const char *endpoint = aws_endpoint(k->config, service);

    if (endpoint) {
        base_url_add(endpoint, url);
        buf_adds(url, path);
    } else {
        buf_addf(url, "https://%s.%s.amazonaws.com%s%s", host, l->region,
                 strncmp(l->region, "cn-", 3) == 0 ? ".cn" : "", path);
    }
    return buf_failed(url) ? err_nomem(e) : 0;
}

static int take_renewed(const struct http_answer *a, struct token *t, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0};
    char *access = NULL, *refresh = NULL;
    uint64_t seconds;

    if (a->status != 200)
        return err_set(e, EACCES, "the token server says %d", a->status);
    if (json_parse(a->body.data, a->body.len, NULL, &doc, &why) < 0 ||
        !json_u64(json_get(doc, "expiresIn"), &seconds) || seconds > 366 * 86400)
        return err_set(e, EBADMSG, "the token server: no token in the answer");
    if (copy_member(doc, "accessToken", &access, e) < 0 ||
        copy_member(doc, "refreshToken", &refresh, e) < 0 || !access) {
        wipe(&access);
        wipe(&refresh);
        return e->code
                   ? -e->code
                   : err_set(e, EBADMSG, "the token server: no token in the answer");
    }
    wipe(&t->access);
    wipe(&t->refresh);
    t->access = access;
    t->refresh = refresh; /* none came: the session is not to be renewed once more */
    t->expires = time(NULL) + (time_t)seconds;
    return 0;
}

static int renew_token(const struct key_context *k, const struct login *l,
                       const char *path, struct token *t, struct err *e)
{
    static const char *const headers[] = {"Content-Type: application/json", NULL};
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(secret_release) struct buf body = {0};
    CLEANUP(buf_release) struct buf url = {0};
    struct http_request r = {.method = "POST",
                             .what = "the token server of the login",
                             .headers = headers,
                             .max = MAX_ANSWER,
                             .flags = HTTP_NO_REDIRECT | HTTP_ANY_STATUS,
                             .deadline_s = ASK_S};
    struct err unsaved = {0};
    int rc = add_url(k, l, "sso_oidc", "oidc", "/token", &url, e);

    add_member(&body, "grantType", "refresh_token");
    add_member(&body, "clientId", t->client_id);
    add_member(&body, "clientSecret", t->client_secret);
    add_member(&body, "refreshToken", t->refresh);
    buf_addc(&body, '}');
    if (rc == 0 && buf_failed(&body))
        rc = err_nomem(e);
    r.url = url.data;
    r.body = body.data;
    r.body_size = body.len;
    if (rc == 0)
        rc = http_do(k->http, &r, &answer, e);
    if (rc == 0)
        rc = take_renewed(&answer, t, e);
    if (rc == 0 && save_token(l, path, t, &unsaved) < 0)
        log_err(LOG_REMOTE, &unsaved);
    return rc;
}

/* ---- the keys ---- */

static int take_role_keys(const struct login *l, const struct http_answer *a,
                          struct aws_keys *out, struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0};
    const char *id, *secret, *token;
    const struct json *keys;
    uint64_t until_ms;

    if (a->status == 401) {
        err_set(e, EACCES, "the portal does not take the login");
        return log_in_again(l, e);
    }
    if (a->status == 403) {
        err_set(e, EACCES, "the portal does not give the role %s of account %s",
                l->role, l->account);
        return err_hint(e, "see sso_role_name and sso_account_id");
    }
    if (a->status != 200)
        return err_set(e, EACCES, "the portal says %d", a->status);
    if (json_parse(a->body.data, a->body.len, NULL, &doc, &why) < 0)
        return err_set(e, EBADMSG, "the portal: not the JSON of keys");
    keys = json_get(doc, "roleCredentials");
    if (!json_string(json_get(keys, "accessKeyId"), &id) || !id[0] ||
        !json_string(json_get(keys, "secretAccessKey"), &secret) || !secret[0] ||
        !json_string(json_get(keys, "sessionToken"), &token) ||
        !json_u64(json_get(keys, "expiration"), &until_ms))
        return err_set(e, EBADMSG, "the portal: no keys in the answer");
    return keys_take(id, secret, token, (time_t)(until_ms / 1000), out, e);
}

static int ask_portal(const struct key_context *k, const struct login *l,
                      const struct token *t, struct aws_keys *out, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(secret_release) struct buf header = {0};
    CLEANUP(buf_release) struct buf path = {0};
    CLEANUP(buf_release) struct buf url = {0};
    const char *headers[] = {NULL, NULL};
    struct http_request r = {.what = "the portal of the login",
                             .headers = headers,
                             .max = MAX_ANSWER,
                             .flags = HTTP_NO_REDIRECT | HTTP_ANY_STATUS,
                             .deadline_s = ASK_S};
    int rc;

    buf_adds(&path, "/federation/credentials?role_name=");
    http_encode(l->role, false, &path);
    buf_adds(&path, "&account_id=");
    http_encode(l->account, false, &path);
    buf_addf(&header, "x-amz-sso_bearer_token: %s", t->access);
    if (buf_failed(&path) || buf_failed(&header))
        return err_nomem(e);
    rc = add_url(k, l, "sso", "portal.sso", path.data, &url, e);
    headers[0] = header.data;
    r.url = url.data;
    if (rc == 0)
        rc = http_do(k->http, &r, &answer, e);
    return rc < 0 ? rc : take_role_keys(l, &answer, out, e);
}

int keys_from_sso(const struct key_context *k, const char *profile,
                  struct aws_keys *out, struct err *e)
{
    CLEANUP(token_release) struct token token = {0};
    CLEANUP(buf_release) struct buf path = {0};
    struct err why = {0};
    struct login l;
    int rc = login_of(k, profile, &l, e);

    if (rc != 1)
        return rc;
    rc = cache_path(&l, &path, e);
    if (rc == 0)
        rc = load_token(&l, path.data, &token, e);
    if (rc < 0)
        return rc;
    if (token.expires - time(NULL) < AHEAD_S && can_be_renewed(&l, &token) &&
        renew_token(k, &l, path.data, &token, &why) < 0) {
        if (why.code == EINTR)
            return err_set(e, EINTR, "interrupted");
        err_wrap(&why, "the login of profile %s was not renewed", profile);
        log_err(LOG_REMOTE, &why);
    }
    if (token.expires <= time(NULL)) {
        err_set(e, EACCES, "the login is over");
        return log_in_again(&l, e);
    }
    return ask_portal(k, &l, &token, out, e);
}
