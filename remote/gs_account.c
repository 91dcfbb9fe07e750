/* SPDX-License-Identifier: MIT */
/* remote/gs_account.c - tokens of Google for who has a file of credentials. */
#include "remote/gs_account.h"

#include <errno.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "remote/credential_sources.h"
#include "remote/http.h"

enum {
    MAX_ANSWER = 1 << 16,
    MAX_SECONDS = 86400,
    HOUR_S = 3600,
    ASK_S = 30,
};

/* What the storage is to be used with, and what acting as another account takes. */
#define SCOPE_STORAGE "https://www.googleapis.com/auth/devstorage.read_write"
#define SCOPE_ALL "https://www.googleapis.com/auth/cloud-platform"
#define GOOGLE_TOKENS "https://oauth2.googleapis.com/token"

/* Who asks for a token, and for what. */
struct asking {
    struct http *http;
    const char *scope;
    unsigned depth; /* of accounts that act as another */
};

static int token_of(const struct asking *a, const struct json *doc, char **token,
                    time_t *expires, struct err *e);

static void secret_release(struct buf *b)
{
    if (b->data)
        explicit_bzero(b->data, b->len);
    buf_release(b);
}

static void secret_free(char **text)
{
    if (*text)
        explicit_bzero(*text, strlen(*text));
    free(*text);
}

/* ---- what is in a file or an answer ---- */

static int member(const struct json *doc, const char *name, const char **out,
                  struct err *e)
{
    if (json_string(json_get(doc, name), out) && (*out)[0])
        return 0;
    return err_set(e, EBADMSG, "has no %s", name);
}

/* The same for a URL that is told a secret. */
static int url_member(const struct json *doc, const char *name, const char **out,
                      struct err *e)
{
    TRY(member(doc, name, out, e));
    return url_is_private(*out)
               ? 0
               : err_set(e, EACCES, "its %s is not https, and would be told a secret",
                         name);
}

static int take(const char *text, char **out, struct err *e)
{
    *out = strdup(text);
    return *out ? 0 : err_nomem(e);
}

int gs_token_take(const struct http_answer *a, char **token, time_t *expires,
                  struct err *e)
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0}; /* its words might quote the token */
    const char *text;
    uint64_t seconds;

    if (json_parse(a->body.data, a->body.len, NULL, &doc, &why) < 0 ||
        !json_string(json_get(doc, "access_token"), &text) || !text[0] ||
        !json_u64(json_get(doc, "expires_in"), &seconds) || seconds > MAX_SECONDS)
        return err_set(e, EBADMSG, "no token in the answer");
    *expires = time(NULL) + (time_t)seconds;
    return take(text, token, e);
}

/* ---- asking ---- */

/* The word that an answer of RFC 6749 has for what is wrong, as far as it is one. */
static void error_word(const struct http_answer *a, char dst[64])
{
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err ignored = {0};
    const char *word;

    snprintf(dst, 64, "without a reason");
    if (json_parse(a->body.data, a->body.len, NULL, &doc, &ignored) == 0 &&
        json_string(json_get(doc, "error"), &word) &&
        word[strspn(word, "abcdefghijklmnopqrstuvwxyz_")] == '\0')
        snprintf(dst, 64, "%s", word);
}

static int post(const struct asking *a, const char *url, const char *const *headers,
                const struct buf *body, struct http_answer *answer, struct err *e)
{
    struct http_request r = {.method = "POST",
                             .url = url,
                             .what = "Google's token server",
                             .headers = headers,
                             .body = body->data,
                             .body_size = body->len,
                             .max = MAX_ANSWER,
                             .flags = HTTP_NO_REDIRECT | HTTP_ANY_STATUS,
                             .deadline_s = ASK_S};
    char word[64];
    int rc = buf_failed(body) ? err_nomem(e) : http_do(a->http, &r, answer, e);

    if (rc < 0 || answer->status == 200)
        return rc;
    error_word(answer, word);
    return err_set(e, EACCES, "the token server says %d %s", answer->status, word);
}

static void add_field(struct buf *form, const char *name, const char *value)
{
    buf_addf(form, "%s%s=", form->len ? "&" : "", name);
    http_encode(value, false, form);
}

static int post_form(const struct asking *a, const char *url, const struct buf *form,
                     char **token, time_t *expires, struct err *e)
{
    static const char *const headers[] = {
        "Content-Type: application/x-www-form-urlencoded", NULL};
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    int rc = post(a, url, headers, form, &answer, e);

    return rc < 0 ? rc : gs_token_take(&answer, token, expires, e);
}

/* ---- a service account's key ---- */

static int add_base64url(struct buf *out, const void *data, size_t len)
{
    size_t start = out->len, room = (len + 2) / 3 * 4 + 1;
    char *dst = buf_grow(out, room);
    int made;

    if (!dst)
        return -ENOMEM;
    made = EVP_EncodeBlock((unsigned char *)dst, data, (int)len);
    while (made > 0 && dst[made - 1] == '=')
        made--;
    for (int i = 0; i < made; i++)
        dst[i] = dst[i] == '+' ? '-' : dst[i] == '/' ? '_' : dst[i];
    out->len = start + (size_t)made;
    out->data[out->len] = '\0';
    return 0;
}

static void pkey_free(EVP_PKEY **key)
{
    EVP_PKEY_free(*key);
}

static void digest_free(EVP_MD_CTX **c)
{
    EVP_MD_CTX_free(*c);
}

/* RS256: RSASSA-PKCS1-v1_5 with SHA-256 (RFC 7518, 3.3), behind another dot. */
static int add_signature(const char *pem, struct buf *jwt, struct err *e)
{
    BIO *text = BIO_new_mem_buf(pem, -1);
    char none[] = ""; /* an encrypted one is not asked for its password */
    CLEANUP(pkey_free)
    EVP_PKEY *key = text ? PEM_read_bio_PrivateKey(text, NULL, NULL, none) : NULL;
    CLEANUP(digest_free) EVP_MD_CTX *c = EVP_MD_CTX_new();
    unsigned char signature[1024];
    size_t size = sizeof signature;

    BIO_free(text);
    if (!c)
        return err_nomem(e);
    if (!key || EVP_PKEY_get_base_id(key) != EVP_PKEY_RSA)
        return err_set(e, EBADMSG, "its private_key is no key of RSA in PEM");
    if (EVP_DigestSignInit(c, NULL, EVP_sha256(), NULL, key) != 1 ||
        EVP_DigestSign(c, signature, &size, (const unsigned char *)jwt->data,
                       jwt->len) != 1)
        return err_set(e, EBADMSG, "libcrypto cannot sign with its private_key");
    buf_addc(jwt, '.');
    add_base64url(jwt, signature, size);
    return buf_failed(jwt) ? err_nomem(e) : 0;
}

static void add_claim(struct buf *json, const char *name, const char *value)
{
    buf_addc(json, json->len ? ',' : '{');
    buf_add_json(json, name, strlen(name));
    buf_addc(json, ':');
    buf_add_json(json, value, strlen(value));
}

/*
 * A JSON Web Token for an hour from `now` on (RFC 7523). Its audience is always the same
 * (google-auth's service_account.py), whatever URL the file gives.
 */
static int add_assertion(const char *email, const char *key, const char *key_id,
                         const char *scope, time_t now, struct buf *out, struct err *e)
{
    CLEANUP(buf_release) struct buf head = {0};
    CLEANUP(buf_release) struct buf claims = {0};
    CLEANUP(buf_release) struct buf jwt = {0};

    add_claim(&head, "alg", "RS256");
    add_claim(&head, "typ", "JWT");
    if (key_id)
        add_claim(&head, "kid", key_id);
    buf_addc(&head, '}');
    add_claim(&claims, "iss", email);
    add_claim(&claims, "scope", scope);
    add_claim(&claims, "aud", GOOGLE_TOKENS);
    buf_addf(&claims, ",\"iat\":%jd,\"exp\":%jd}", (intmax_t)now,
             (intmax_t)now + HOUR_S);
    if (buf_failed(&head) || buf_failed(&claims))
        return err_nomem(e);
    add_base64url(&jwt, head.data, head.len);
    buf_addc(&jwt, '.');
    add_base64url(&jwt, claims.data, claims.len);
    if (buf_failed(&jwt))
        return err_nomem(e);
    TRY(add_signature(key, &jwt, e));
    return buf_add(out, jwt.data, jwt.len) < 0 ? err_nomem(e) : 0;
}

static int service_account(const struct asking *a, const struct json *doc, char **token,
                           time_t *expires, struct err *e)
{
    CLEANUP(secret_release) struct buf assertion = {0};
    CLEANUP(secret_release) struct buf form = {0};
    const char *email, *key, *url, *key_id = NULL;

    TRY(member(doc, "client_email", &email, e));
    TRY(member(doc, "private_key", &key, e));
    TRY(url_member(doc, "token_uri", &url, e));
    json_string(json_get(doc, "private_key_id"), &key_id);
    TRY(add_assertion(email, key, key_id, a->scope, time(NULL), &assertion, e));
    add_field(&form, "grant_type", "urn:ietf:params:oauth:grant-type:jwt-bearer");
    add_field(&form, "assertion", assertion.data);
    return post_form(a, url, &form, token, expires, e);
}

/* ---- who is logged in ---- */

static int authorized_user(const struct asking *a, const struct json *doc, char **token,
                           time_t *expires, struct err *e)
{
    CLEANUP(secret_release) struct buf form = {0};
    const char *id, *secret, *refresh, *url = GOOGLE_TOKENS;
    int rc;

    TRY(member(doc, "client_id", &id, e));
    TRY(member(doc, "client_secret", &secret, e));
    TRY(member(doc, "refresh_token", &refresh, e));
    if (json_get(doc, "token_uri"))
        TRY(url_member(doc, "token_uri", &url, e));
    add_field(&form, "grant_type", "refresh_token");
    add_field(&form, "client_id", id);
    add_field(&form, "client_secret", secret);
    add_field(&form, "refresh_token", refresh);
    rc = post_form(a, url, &form, token, expires, e);
    return rc == -EACCES ? err_hint(e, "gcloud auth application-default login") : rc;
}

/* ---- who acts as another account ---- */

/* `url` ends in :generateAccessToken (IAM's service for credentials). */
static int act_as(const struct asking *a, const char *url, const char *source,
                  const struct json *delegates, char **token, time_t *expires,
                  struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(json_freep) struct json *got = NULL;
    CLEANUP(secret_release) struct buf header = {0};
    CLEANUP(buf_release) struct buf body = {0};
    const char *headers[] = {"Content-Type: application/json", NULL, NULL};
    const char *text, *until;
    struct err why = {0};
    int rc;

    buf_adds(&body, "{\"delegates\":[");
    for (const struct json *d = json_first(delegates); d; d = json_next(d)) {
        if (!json_string(d, &text))
            return err_set(e, EBADMSG, "its delegates are no names");
        if (d != json_first(delegates))
            buf_addc(&body, ',');
        buf_add_json(&body, text, strlen(text));
    }
    buf_addf(&body, "],\"scope\":[\"%s\"],\"lifetime\":\"%ds\"}", a->scope, HOUR_S);
    if (buf_addf(&header, "Authorization: Bearer %s", source) < 0)
        return err_nomem(e);
    headers[1] = header.data;
    rc = post(a, url, headers, &body, &answer, e);
    if (rc < 0)
        return err_wrap(e, "acting as another account");
    if (json_parse(answer.body.data, answer.body.len, NULL, &got, &why) < 0 ||
        !json_string(json_get(got, "accessToken"), &text) || !text[0] ||
        !json_string(json_get(got, "expireTime"), &until) ||
        !(*expires = http_date(until)))
        return err_set(e, EBADMSG, "acting as another account: no token in the answer");
    return take(text, token, e);
}

static int impersonated(const struct asking *a, const struct json *doc, char **token,
                        time_t *expires, struct err *e)
{
    const struct asking inner = {a->http, SCOPE_ALL, a->depth + 1};
    CLEANUP(secret_free) char *source = NULL;
    const char *url;
    time_t ignored;

    if (a->depth)
        return err_set(e, ENOTSUP, "acts as an account that acts as another");
    TRY(url_member(doc, "service_account_impersonation_url", &url, e));
    if (token_of(&inner, json_get(doc, "source_credentials"), &source, &ignored, e) < 0)
        return err_wrap(e, "source_credentials");
    return act_as(a, url, source, json_get(doc, "delegates"), token, expires, e);
}

/* ---- who is known elsewhere ---- */

/* The subject's token: the text, or a member of it where the format is JSON. */
static int take_subject(const struct json *from, const char *text, size_t len,
                        char **subject, struct err *e)
{
    const struct json *format = json_get(from, "format");
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0};
    const char *kind = "text", *name;

    json_string(json_get(format, "type"), &kind);
    if (strcmp(kind, "text") == 0)
        return len ? take(text, subject, e)
                   : err_set(e, EBADMSG, "the subject's token is empty");
    if (strcmp(kind, "json") != 0)
        return err_set(e, ENOTSUP,
                       "a subject's token of another format than text "
                       "and json");
    TRY(member(format, "subject_token_field_name", &name, e));
    if (json_parse(text, len, NULL, &doc, &why) < 0 ||
        !json_string(json_get(doc, name), &text))
        return err_set(e, EBADMSG, "the subject's token is not in what should have it");
    return take(text, subject, e);
}

static int ask_subject(const struct asking *a, const struct json *from, const char *url,
                       char **subject, struct err *e)
{
    enum { MAX_HEADERS = 16 };
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(buf_release) struct buf text = {0};
    const struct json *h = json_first(json_get(from, "headers"));
    const char *headers[MAX_HEADERS + 1] = {NULL}, *value;
    size_t at[MAX_HEADERS], n = 0;
    struct http_request r = {.url = url,
                             .what = "the subject's token",
                             .headers = headers,
                             .max = MAX_ANSWER,
                             .flags = HTTP_NO_REDIRECT,
                             .deadline_s = ASK_S};

    for (; h && n < MAX_HEADERS; h = json_next(h)) {
        if (!json_string(h, &value))
            return err_set(e, EBADMSG, "its headers are no words");
        at[n++] = text.len;
        buf_addf(&text, "%s: %s", json_key(h), value);
        buf_add(&text, "", 1);
    }
    if (h)
        return err_set(e, EBADMSG, "more than %d headers", MAX_HEADERS);
    if (buf_failed(&text))
        return err_nomem(e);
    for (size_t i = 0; i < n; i++)
        headers[i] = text.data + at[i];
    TRY(http_do(a->http, &r, &answer, e));
    return take_subject(from, answer.body.data, answer.body.len, subject, e);
}

static int subject_of(const struct asking *a, const struct json *from, char **subject,
                      struct err *e)
{
    CLEANUP(secret_release) struct buf text = {0};
    const char *place;

    if (json_string(json_get(from, "file"), &place)) {
        TRY(secret_file_read(place, &text, e));
        return take_subject(from, text.data, text.len, subject, e);
    }
    if (json_string(json_get(from, "url"), &place))
        return ask_subject(a, from, place, subject, e);
    return err_set(e, ENOTSUP,
                   "an identity that neither a file nor a URL gives (of AWS, of a "
                   "certificate, or of a program)");
}

static int external_account(const struct asking *a, const struct json *doc,
                            char **token, time_t *expires, struct err *e)
{
    const char *url, *audience, *kind, *as = NULL;
    bool other = json_string(json_get(doc, "service_account_impersonation_url"), &as);
    const struct asking inner = {a->http, other ? SCOPE_ALL : a->scope, a->depth};
    CLEANUP(secret_free) char *subject = NULL;
    CLEANUP(secret_free) char *own = NULL;
    CLEANUP(secret_release) struct buf form = {0};

    TRY(url_member(doc, "token_url", &url, e));
    TRY(member(doc, "audience", &audience, e));
    TRY(member(doc, "subject_token_type", &kind, e));
    if (other)
        TRY(url_member(doc, "service_account_impersonation_url", &as, e));
    TRY(subject_of(a, json_get(doc, "credential_source"), &subject, e));
    add_field(&form, "grant_type", "urn:ietf:params:oauth:grant-type:token-exchange");
    add_field(&form, "requested_token_type",
              "urn:ietf:params:oauth:token-type:access_token");
    add_field(&form, "audience", audience);
    add_field(&form, "scope", inner.scope);
    add_field(&form, "subject_token_type", kind);
    add_field(&form, "subject_token", subject);
    TRY(post_form(&inner, url, &form, other ? &own : token, expires, e));
    return other ? act_as(a, as, own, NULL, token, expires, e) : 0;
}

/* ---- a file ---- */

static int token_of(const struct asking *a, const struct json *doc, char **token,
                    time_t *expires, struct err *e)
{
    static const struct {
        const char *type;
        int (*ask)(const struct asking *a, const struct json *doc, char **token,
                   time_t *expires, struct err *e);
    } kinds[] = {
        {"service_account", service_account},
        {"authorized_user", authorized_user},
        {"impersonated_service_account", impersonated},
        {"external_account", external_account},
    };
    const char *type;

    TRY(member(doc, "type", &type, e));
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        if (strcmp(kinds[i].type, type) == 0)
            return kinds[i].ask(a, doc, token, expires, e);
    err_set(e, ENOTSUP, "credentials of a kind that is not read");
    return err_hint(e, "export GOOGLE_OAUTH_ACCESS_TOKEN=$(gcloud auth "
                       "application-default print-access-token)");
}

int gs_account_token(struct http *http, const char *path, char **token, time_t *expires,
                     struct err *e)
{
    const struct asking a = {http, SCOPE_STORAGE, 0};
    CLEANUP(secret_release) struct buf text = {0};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0};

    TRY(secret_file_read(path, &text, e));
    if (json_parse(text.data, text.len, NULL, &doc, &why) < 0)
        return err_set(e, EBADMSG, "%s: is no JSON of Google's credentials", path);
    return token_of(&a, doc, token, expires, e) < 0 ? err_wrap(e, "%s", path) : 0;
}
