/* SPDX-License-Identifier: MIT */
/* remote/credential_sources.c - the places that keys come from, one function each. */
#include "remote/credential_sources.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "remote/aws_config.h"
#include "remote/http.h"
#include "remote/xml.h"

enum {
    MAX_ANSWER = 1 << 20,
    MAX_TOKEN = 1 << 16,
    LOCAL_S = 5, /* for an answer of this machine or its host */
    STS_S = 30,
};

/* Appends a base URL without the slashes at its end. */
static int base_url_add(const char *base, struct buf *url)
{
    size_t len = strlen(base);

    while (len && base[len - 1] == '/')
        len--;
    return buf_add(url, base, len);
}

static int take(const char *text, char **out)
{
    if (!text || !text[0])
        return 0;
    *out = strdup(text);
    return *out ? 0 : -ENOMEM;
}

/* Copies; `token` may be NULL. Returns 1, or an error. */
static int keys_take(const char *id, const char *secret, const char *token,
                     time_t expires, struct aws_keys *out, struct err *e)
{
    out->expires = expires;
    if (take(id, &out->id) < 0 || take(secret, &out->secret) < 0 ||
        take(token, &out->token) < 0) {
        aws_keys_release(out);
        return err_nomem(e);
    }
    return 1;
}

int keys_from_environment(struct aws_keys *out, struct err *e)
{
    const char *id = getenv("AWS_ACCESS_KEY_ID");
    const char *secret = getenv("AWS_SECRET_ACCESS_KEY");

    if (!id || !id[0])
        return 0;
    if (!secret || !secret[0])
        return err_set(e, EACCES,
                       "AWS_ACCESS_KEY_ID is set, AWS_SECRET_ACCESS_KEY is not");
    return keys_take(id, secret, getenv("AWS_SESSION_TOKEN"), 0, out, e);
}

/* ---- JSON ---- */

static int keys_from_object(const struct json *doc, const char *token_name,
                            struct aws_keys *out, struct err *e)
{
    const char *id, *secret, *token = NULL, *until = NULL;
    time_t expires = 0;

    if (!json_string(json_get(doc, "AccessKeyId"), &id) || !id[0] ||
        !json_string(json_get(doc, "SecretAccessKey"), &secret) || !secret[0])
        return err_set(e, EBADMSG, "no AccessKeyId and SecretAccessKey in it");
    json_string(json_get(doc, token_name), &token);
    if (json_string(json_get(doc, "Expiration"), &until) && until[0]) {
        expires = http_date(until);
        if (!expires)
            return err_set(e, EBADMSG, "its Expiration is no date");
    }
    return keys_take(id, secret, token, expires, out, e);
}

int keys_from_json(const char *text, size_t len, const char *token,
                   struct aws_keys *out, struct err *e)
{
    static const struct json_limits limits = {
        .bytes = MAX_ANSWER, .depth = 16, .values = 1000};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err why = {0}; /* its words might quote a secret */
    uint64_t version;

    if (json_parse(text, len, &limits, &doc, &why) < 0)
        return err_set(e, EBADMSG, "not the JSON of AWS keys");
    if (json_get(doc, "Version") &&
        (!json_u64(json_get(doc, "Version"), &version) || version != 1))
        return err_set(e, EBADMSG, "a Version of the JSON that is not 1");
    return keys_from_object(doc, token, out, e);
}

/* ---- the container's endpoint ---- */

int secret_file_read(const char *path, struct buf *out, struct err *e)
{
    CLEANUP_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n;

    out->max = MAX_TOKEN;
    if (fd < 0)
        return err_set(e, errno, "%s: %s", path, strerror(errno));
    do {
        char part[4096];

        n = read(fd, part, sizeof part);
        if (n > 0)
            buf_add(out, part, (size_t)n);
        explicit_bzero(part, sizeof part);
    } while (n > 0 || (n < 0 && errno == EINTR));
    if (n < 0)
        return err_set(e, errno, "%s: %s", path, strerror(errno));
    while (out->len && strchr(" \t\r\n", out->data[out->len - 1]))
        out->data[--out->len] = '\0';
    if (buf_failed(out) || out->len == 0 || strlen(out->data) != out->len)
        return err_set(e, EBADMSG, "%s: empty, no text, or more than %d bytes", path,
                       MAX_TOKEN);
    return 0;
}

/* What stands between "//" and the port or path of a URL. */
static bool host_of(const char *url, char host[64])
{
    const char *p = strstr(url, "://");
    size_t len;

    if (!p)
        return false;
    p += 3;
    len = p[0] == '[' ? strcspn(p, "]") + 1 : strcspn(p, ":/?#");
    if (len == 0 || len >= 64 || memchr(p, '@', strcspn(p, "/?#")))
        return false;
    memcpy(host, p, len);
    host[len] = '\0';
    return true;
}

bool url_is_private(const char *url)
{
    static const char *const hosts[] = {"localhost",      "[::1]",
                                        "169.254.170.2",  "169.254.170.23",
                                        "[fd00:ec2::23]", NULL};
    struct in_addr v4;
    char host[64];

    if (strncasecmp(url, "https://", 8) == 0)
        return true;
    if (!host_of(url, host))
        return false;
    for (size_t i = 0; hosts[i]; i++)
        if (strcasecmp(host, hosts[i]) == 0)
            return true;
    return inet_pton(AF_INET, host, &v4) == 1 && ntohl(v4.s_addr) >> 24 == 127;
}

static int container_url(struct buf *url, struct err *e)
{
    const char *relative = getenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
    const char *full = getenv("AWS_CONTAINER_CREDENTIALS_FULL_URI");

    if (relative && relative[0] == '/')
        return buf_addf(url, "http://169.254.170.2%s", relative) < 0 ? err_nomem(e) : 1;
    if (!full || !full[0])
        return 0;
    if (!url_is_private(full))
        return err_set(e, EACCES,
                       "AWS_CONTAINER_CREDENTIALS_FULL_URI: neither https nor an "
                       "address of this machine or of its container service");
    return buf_adds(url, full) < 0 ? err_nomem(e) : 1;
}

/* "Authorization: TOKEN", or empty. */
static int container_header(struct buf *header, struct err *e)
{
    const char *file = getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
    const char *token = getenv("AWS_CONTAINER_AUTHORIZATION_TOKEN");
    CLEANUP(buf_release) struct buf text = {0};

    if (file && file[0]) {
        TRY(secret_file_read(file, &text, e));
        token = text.data;
    }
    if (token && token[0] && buf_addf(header, "Authorization: %s", token) < 0)
        return err_nomem(e);
    return 0;
}

int keys_from_container(const struct key_context *k, struct aws_keys *out,
                        struct err *e)
{
    CLEANUP(buf_release) struct buf url = {0};
    CLEANUP(buf_release) struct buf header = {0};
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    int rc = container_url(&url, e);

    if (rc == 1 && container_header(&header, e) < 0)
        rc = -e->code;
    if (rc == 1) {
        const char *headers[] = {"Accept: application/json", NULL, NULL};
        struct http_request r = {.url = url.data,
                                 .what = "the container's credentials",
                                 .headers = headers,
                                 .max = MAX_ANSWER,
                                 .flags = HTTP_NO_REDIRECT | HTTP_NO_PROXY,
                                 .deadline_s = 3 * LOCAL_S};

        headers[1] = header.data;
        rc = http_do(k->http, &r, &answer, e);
        if (rc == 0)
            rc = keys_from_json(answer.body.data, answer.body.len, "Token", out, e);
    }
    return rc < 0 ? err_wrap(e, "credentials of the container") : rc;
}

/* ---- the instance's endpoint ---- */

/* One look at it: body "" when it says 404. 0: nobody is there. */
static int instance_ask(const struct key_context *k, const char *method,
                        const char *path, const char *header,
                        struct http_answer *answer, struct err *e)
{
    const char *base = getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT");
    const char *mode = getenv("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE");
    const char *const headers[] = {header, NULL};
    CLEANUP(buf_release) struct buf url = {0};
    struct http_request r = {.method = method,
                             .what = "the instance's metadata",
                             .headers = headers,
                             .max = MAX_ANSWER,
                             .flags =
                                 HTTP_NO_REDIRECT | HTTP_ANY_STATUS | HTTP_NO_PROXY,
                             .deadline_s = LOCAL_S};
    int rc;

    if (!base || !base[0])
        base = mode && strcasecmp(mode, "IPv6") == 0 ? "http://[fd00:ec2::254]"
                                                     : "http://169.254.169.254";
    base_url_add(base, &url);
    if (buf_adds(&url, path) < 0)
        return err_nomem(e);
    r.url = url.data;
    rc = http_do(k->http, &r, answer, e);
    return rc < 0 ? rc : answer->status;
}

/* A header with the session's token (IMDSv2), or 0 where there is no such service. */
static int instance_session(const struct key_context *k, struct buf *header,
                            struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    int rc = instance_ask(k, "PUT", "/latest/api/token",
                          "X-aws-ec2-metadata-token-ttl-seconds: 21600", &answer, e);

    if (rc == -EINTR || rc == -ENOMEM)
        return rc;
    if (rc != 200 || !answer.body.len || strlen(answer.body.data) != answer.body.len)
        return 0; /* not on EC2, or it is switched off */
    buf_addf(header, "X-aws-ec2-metadata-token: %s", answer.body.data);
    return buf_failed(header) ? err_nomem(e) : 1;
}

static const char role_path[] = "/latest/meta-data/iam/security-credentials/";

static int instance_role(const struct key_context *k, const char *header,
                         struct buf *path, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    int rc = instance_ask(k, NULL, role_path, header, &answer, e);
    size_t len;

    if (rc < 0)
        return rc;
    len = rc == 200 && answer.body.len ? strcspn(answer.body.data, "\r\n") : 0;
    if (len == 0)
        return 0; /* an instance without a role */
    buf_adds(path, role_path);
    answer.body.data[len] = '\0';
    return http_encode(answer.body.data, false, path) < 0 ? err_nomem(e) : 1;
}

int keys_from_instance(const struct key_context *k, struct aws_keys *out, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(buf_release) struct buf header = {0};
    CLEANUP(buf_release) struct buf path = {0};
    const char *off = getenv("AWS_EC2_METADATA_DISABLED");
    int rc;

    if (off && strcasecmp(off, "true") == 0)
        return 0;
    rc = instance_session(k, &header, e);
    if (rc == 1)
        rc = instance_role(k, header.data, &path, e);
    if (rc == 1) {
        rc = instance_ask(k, NULL, path.data, header.data, &answer, e);
        if (rc >= 0)
            rc = rc == 200 ? keys_from_json(answer.body.data, answer.body.len, "Token",
                                            out, e)
                           : err_set(e, EACCES, "status %d", rc);
    }
    if (rc == 0)
        *e = (struct err){0}; /* that nobody answered is no error */
    return rc < 0 ? err_wrap(e, "credentials of the instance") : rc;
}

/* ---- keys as XML; the token service ---- */

struct key_answer {
    struct aws_keys keys;
    char code[64];
};

static bool path_ends(const char *path, const char *end)
{
    size_t len = strlen(path), n = strlen(end);

    return len >= n && strcmp(path + len - n, end) == 0;
}

static int key_leaf(void *user, const char *path, const char *text, size_t len,
                    struct err *e)
{
    struct key_answer *a = user;
    char **dst = NULL;

    if (strlen(text) != len)
        return err_set(e, EBADMSG, "NUL in it");
    if (path_ends(path, "Error/Code"))
        snprintf(a->code, sizeof a->code, "%s", text);
    else if (path_ends(path, "Result/Credentials/AccessKeyId"))
        dst = &a->keys.id;
    else if (path_ends(path, "Result/Credentials/SecretAccessKey"))
        dst = &a->keys.secret;
    else if (path_ends(path, "Result/Credentials/SessionToken"))
        dst = &a->keys.token;
    else if (path_ends(path, "Result/Credentials/Expiration"))
        a->keys.expires = http_date(text);
    if (!dst || *dst)
        return 0;
    return take(text, dst) < 0 ? err_nomem(e) : 0;
}

int keys_from_answer(const struct http_answer *answer, const char *who,
                     struct aws_keys *out, struct err *e)
{
    struct key_answer got = {0};
    int rc = xml_each(answer->body.data ? answer->body.data : "", answer->body.len,
                      key_leaf, &got, e);

    if (rc == 0 && (answer->status != 200 || !got.keys.id || !got.keys.secret))
        rc = err_set(e, EACCES, "%s says %d %s", who, answer->status,
                     got.code[0] ? got.code : "without keys");
    if (rc < 0) {
        aws_keys_release(&got.keys);
        return rc;
    }
    *out = got.keys;
    return 1;
}

static int sts_url(const struct key_context *k, struct buf *url)
{
    const char *endpoint = aws_endpoint(k->config, "sts");
    bool china = k->region && strncmp(k->region, "cn-", 3) == 0;

    if (endpoint) {
        base_url_add(endpoint, url);
        return buf_addc(url, '/');
    }
    if (!k->region)
        return buf_adds(url, "https://sts.amazonaws.com/");
    return buf_addf(url, "https://sts.%s.amazonaws.com%s/", k->region,
                    china ? ".cn" : "");
}

/* Sends the form, unsigned, and takes the keys. */
static int sts_ask(const struct key_context *k, const struct buf *form,
                   struct aws_keys *out, struct err *e)
{
    static const char *const headers[] = {
        "Content-Type: application/x-www-form-urlencoded", NULL};
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(buf_release) struct buf url = {0};
    struct http_request r = {.method = "POST",
                             .what = "the token service",
                             .headers = headers,
                             .body = form->data,
                             .body_size = form->len,
                             .max = MAX_ANSWER,
                             .flags = HTTP_NO_REDIRECT | HTTP_ANY_STATUS,
                             .deadline_s = STS_S};
    int rc;

    if (buf_failed(form) || sts_url(k, &url) < 0)
        return err_nomem(e);
    r.url = url.data;
    rc = http_do(k->http, &r, &answer, e);
    return rc < 0 ? rc : keys_from_answer(&answer, r.what, out, e);
}

static int add_field(struct buf *form, const char *name, const char *value)
{
    buf_addf(form, "%s%s=", form->len ? "&" : "", name);
    return http_encode(value, false, form);
}

int keys_from_web_identity(const struct key_context *k, const char *role,
                           const char *session, const char *token_file,
                           struct aws_keys *out, struct err *e)
{
    CLEANUP(buf_release) struct buf token = {0};
    CLEANUP(buf_release) struct buf form = {0};
    char made[64];
    int rc;

    if (!role || !role[0])
        return err_set(e, EACCES, "%s: a web identity, and no role for it", token_file);
    rc = secret_file_read(token_file, &token, e);
    if (rc == 0) {
        snprintf(made, sizeof made, "unshardfs-%jd", (intmax_t)time(NULL));
        add_field(&form, "Action", "AssumeRoleWithWebIdentity");
        add_field(&form, "Version", "2011-06-15");
        add_field(&form, "RoleArn", role);
        add_field(&form, "RoleSessionName", session && session[0] ? session : made);
        add_field(&form, "WebIdentityToken", token.data);
        rc = sts_ask(k, &form, out, e);
    }
    if (token.data)
        explicit_bzero(token.data, token.len);
    if (form.data)
        explicit_bzero(form.data, form.len);
    return rc < 0 ? err_wrap(e, "credentials for the role %s", role) : rc;
}
