/* SPDX-License-Identifier: MIT */
/* remote/s3_sign.c - a request to S3 that is signed as it goes out. */
#include "remote/s3_sign.h"

#include <errno.h>
#include <string.h>
#include <strings.h>

#include "base/err.h"
#include "remote/http.h"
#include "remote/kept_keys.h"

enum { MAX_SIGNED = 32 };

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

static const char *payload_hash(const struct http_request *r, bool leave, char hex[65],
                                struct err *e)
{
    if (!r->body_size)
        return SIGV4_EMPTY;
    if (leave || !r->body)
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

int s3_sign(struct http_try *t, const struct s3_signing *how, struct err *e)
{
    CLEANUP(url_parts_release) struct url_parts url = {0};
    CLEANUP(buf_release) struct buf own = {0};
    CLEANUP(buf_release) struct buf value = {0};
    struct sigv4_header headers[MAX_SIGNED];
    char date[SIGV4_DATE_SIZE], hex[65];
    const char *hash;
    size_t n = 0, added;
    int rc = split_url(t->url, &url, e);

    if (rc < 0)
        return rc;
    hash = payload_hash(t->request, url.tls && !how->hash_body, hex, e);
    if (!hash)
        return -e->code;
    sigv4_date(t->now, date);
    headers[n++] = (struct sigv4_header){"x-amz-date", date};
    headers[n++] = (struct sigv4_header){"x-amz-content-sha256", hash};
    if (how->keys->token)
        headers[n++] = (struct sigv4_header){how->token_header, how->keys->token};
    added = n;
    headers[n++] = (struct sigv4_header){"host", url.host};
    for (size_t i = 0; i < how->nmore && n < MAX_SIGNED; i++)
        headers[n++] = how->more[i];
    n += own_headers(t->request, &own, headers + n, MAX_SIGNED - n);
    if (buf_failed(&own))
        return err_nomem(e);
    rc = sigv4_sign(&(struct sigv4_scope){.key_id = how->keys->id,
                                          .secret = how->keys->secret,
                                          .region = how->region,
                                          .service = how->service,
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
