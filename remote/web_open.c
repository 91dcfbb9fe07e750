/* SPDX-License-Identifier: MIT */
/* remote/web_open.c - what a URL of a plain web server means: a directory, a file, a manifest. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/err.h"
#include "remote/manifest.h"
#include "remote/store.h"
#include "remote/web_priv.h"

static int add_base64(struct buf *out, const char *data, size_t len)
{
    static const char digit[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

    for (size_t i = 0; i < len; i += 3) {
        uint32_t v = (uint32_t)(unsigned char)data[i] << 16;

        if (i + 1 < len)
            v |= (uint32_t)(unsigned char)data[i + 1] << 8;
        if (i + 2 < len)
            v |= (unsigned char)data[i + 2];
        buf_addc(out, digit[v >> 18]);
        buf_addc(out, digit[v >> 12 & 63]);
        buf_addc(out, i + 1 < len ? digit[v >> 6 & 63] : '=');
        buf_addc(out, i + 2 < len ? digit[v & 63] : '=');
    }
    return buf_failed(out);
}

/* "user:password" of a URL as an Authorization header. */
static int take_user(struct web *p, const char *text, size_t len, struct err *e)
{
    CLEANUP(buf_release) struct buf user = {0}, basic = {0};

    if (http_decode(text, len, &user) < 0)
        return err_set(e, EINVAL, "%s: a bad escape in its user or password", p->shown);
    buf_adds(&basic, "Basic ");
    if (!user.data || add_base64(&basic, user.data, user.len) < 0)
        return err_nomem(e);
    p->basic = buf_steal(&basic, NULL);
    return p->basic ? 0 : err_nomem(e);
}

/* Takes a URL apart: base keeps scheme, host and path, without a query or user. */
static int take_url(struct web *p, const char *url, struct err *e)
{
    CLEANUP(buf_release) struct buf shown = {0}, dir = {0};
    const char *host = strstr(url, "://") + 3, *path = host + strcspn(host, "/?#");
    const char *at = memrchr(host, '@', (size_t)(path - host));
    const char *query = strchr(path, '?'), *end = path + strcspn(path, "?#");

    http_url_shown(url, &shown);
    p->shown = buf_steal(&shown, NULL);
    p->query = query ? strndup(query, strcspn(query, "#")) : strdup("");
    if (!p->shown || !p->query)
        return err_nomem(e);
    if (at)
        TRY(take_user(p, host, (size_t)(at - host), e));
    host = at ? at + 1 : host;
    if (host == path)
        return err_set(e, EINVAL, "%s: names no host", p->shown);
    if (http_decode(path, (size_t)(end - path), &dir) < 0)
        return err_set(e, EINVAL, "%s: a bad escape in its path", p->shown);
    buf_adds(&dir, dir.len ? "" : "/");
    p->dir = buf_steal(&dir, NULL);
    if (!p->dir || asprintf(&p->base, "%.*s%.*s%s", (int)(strstr(url, "://") + 3 - url),
                            url, (int)(end - host), host, end == path ? "/" : "") < 0) {
        p->base = NULL;
        return err_nomem(e);
    }
    return 0;
}

/* A slash at the end of a text of ours. */
static int add_slash(char **text, struct err *e)
{
    char *with;

    if (**text && (*text)[strlen(*text) - 1] == '/')
        return 0;
    if (asprintf(&with, "%s/", *text) < 0)
        return err_nomem(e);
    free(*text);
    *text = with;
    return 0;
}

static int be_directory(struct web *p, struct err *e)
{
    TRY(add_slash(&p->base, e));
    TRY(add_slash(&p->shown, e));
    TRY(add_slash(&p->dir, e));
    return 0;
}

/* Cuts what stands behind the last slash. */
static void cut_name(char *text)
{
    strrchr(text, '/')[1] = '\0';
}

static int be_file(struct web *p, struct err *e)
{
    p->file = strdup(strrchr(p->dir, '/') + 1);
    if (!p->file)
        return err_nomem(e);
    cut_name(p->dir);
    cut_name(p->base);
    cut_name(p->shown);
    return 0;
}

/* Servers lead from a directory's name to the same with a slash. */
static bool leads_to_slash(const struct web *p, const struct http_answer *a)
{
    const char *to = a->status / 100 == 3 ? http_answer_header(a, "Location") : NULL;
    const char *name = strrchr(p->base, '/') + 1;
    size_t len = to ? strcspn(to, "?#") : 0;

    return len > strlen(name) + 1 && to[len - 1] == '/' &&
           memcmp(to + len - 1 - strlen(name), name, strlen(name)) == 0;
}

/* Asks what stands behind a name that has no slash at its end. */
static int ask_name(struct web *p, struct http_answer *a, struct err *e)
{
    CLEANUP(buf_release) struct buf url = {0};
    struct http_request r = {.what = p->shown,
                             .auth = &web_auth,
                             .auth_user = p,
                             .flags = HTTP_NO_REDIRECT | HTTP_ANY_STATUS};

    web_ask_for(p, &r);
    TRY(web_add_url(p, "", "", &url, e));
    r.url = url.data;
    return http_do(p->http, &r, a, e);
}

/* Asks a directory for its manifest and its page, and the files that it had, at once. */
static int ask_directory(struct web *p, struct http_answer a[2], struct err *e)
{
    CLEANUP(buf_release) struct buf manifest = {0}, page = {0};
    struct http_request r[] = {{.max = MANIFEST_BYTES_MAX}, {.max = PAGE_MAX}};

    TRY(web_add_url(p, "", MANIFEST_NAME, &manifest, e));
    TRY(web_add_url(p, "", "", &page, e));
    r[0].url = manifest.data;
    r[1].url = page.data;
    for (size_t i = 0; i < 2; i++) {
        r[i].what = p->shown;
        r[i].auth = &web_auth;
        r[i].auth_user = p;
        r[i].flags = HTTP_ANY_STATUS;
    }
    return web_do_early(p, "", r, 2, a, &p->early, e);
}

/* Servers may send any page in the place of what is not there. */
static bool is_manifest(const struct http_answer *a)
{
    return a->status == 200 && !web_is_html(a);
}

static int take_manifest(struct web *p, const struct http_answer *a, struct err *e)
{
    struct manifest *m;

    if (manifest_parse(a->body.data, a->body.len, &m, e) < 0)
        return err_wrap(e, "%s", p->shown);
    web_keep_manifest(p, m);
    manifest_put(m);
    p->has_manifest = true;
    return 0;
}

static int no_directory(const struct web *p, const struct http_answer *page,
                        struct err *e)
{
    int status = page->status;
    int code = status == 401 || status == 403 ? EACCES
               : status / 100 == 2            ? ENOTSUP
                                              : ENOENT;

    if (code == ENOENT)
        return err_set(e, ENOENT, "%s: HTTP %d", p->shown, status);
    err_set(e, code,
            "%s: the server shows no page with links (HTTP %d), and there is no %s",
            p->shown, status, MANIFEST_NAME);
    return err_hint(e, "put a list there: unshard manifest DIR");
}

static int open_directory(struct web *p, struct http_answer a[2], struct err *e)
{
    TRY(ask_directory(p, a, e));
    if (is_manifest(&a[0]))
        return take_manifest(p, &a[0], e);
    if (a[1].status != 200 || !web_is_html(&a[1]))
        return no_directory(p, &a[1], e);
    p->page = a[1].body;
    p->until = web_moment();
    a[1].body = (struct buf){0};
    return 0;
}

/* Is it a file? Servers without pages say of directories that they are not there. */
static bool is_file(const struct web *p, const struct http_answer *a)
{
    return a->status / 100 != 4 && !leads_to_slash(p, a) &&
           !(a->status == 200 && web_is_html(a));
}

/*
 * A file, or a directory? A URL that was signed for GET (a presigned one of S3) lets no HEAD
 * in: then the first byte is asked for.
 */
static int ask_whether_file(struct web *p, bool *file, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer head = {0}, first = {0};

    TRY(ask_name(p, &head, e));
    *file = is_file(p, &head);
    if (head.status != 403 && head.status != 405 && head.status != 501)
        return 0;
    p->by_get = true;
    if (ask_name(p, &first, e) < 0 && e->code != EFBIG) /* that: it knows no ranges */
        return -e->code;
    *e = (struct err){0};
    p->by_get = first.status == 206 && !web_is_html(&first);
    *file = *file || p->by_get;
    return 0;
}

static int find_out(struct web *p, struct err *e)
{
    const char *name = strrchr(p->dir, '/') + 1;
    struct http_answer a[2] = {0};
    bool file = false;
    int rc = 0;

    if (strcmp(name, MANIFEST_NAME) == 0) {
        cut_name(p->dir);
        cut_name(p->base);
        cut_name(p->shown);
    } else if (*name) {
        rc = ask_whether_file(p, &file, e);
    }
    if (rc == 0 && file)
        rc = be_file(p, e);
    else if (rc == 0 && (rc = be_directory(p, e)) == 0)
        rc = open_directory(p, a, e);
    http_answer_release(&a[0]);
    http_answer_release(&a[1]);
    return rc;
}

/* Others on the way could read and change what comes without TLS. */
static int check_scheme(const char *url, const char *shown, struct err *e)
{
    const char *allowed = getenv("UNSHARD_ALLOW_HTTP");
    const char *host = strstr(shown, "://") + 3;
    size_t len = strcspn(host, "/");

    if (strncasecmp(url, "http://", 7) != 0 || (allowed && strcmp(allowed, "1") == 0))
        return 0;
    if (*host != '[')
        len = MIN(len, strcspn(host, ":"));
    if ((len == 9 && strncasecmp(host, "localhost", 9) == 0) ||
        (len >= 4 && strncmp(host, "127.", 4) == 0 &&
         strspn(host, "0123456789.") == len) ||
        strncmp(host, "[::1]", 5) == 0)
        return 0;
    err_set(e, EINVAL, "%s: http:// is not private and not safe from changes", shown);
    return err_hint(e, "use https://, or set UNSHARD_ALLOW_HTTP=1");
}

int web_open(const char *url, const struct store_options *options, struct store **out,
             struct err *e)
{
    CLEANUP(buf_release) struct buf identity = {0}, shown = {0}, dir = {0};
    struct web *p = calloc(1, sizeof *p);
    struct http *http = NULL;
    int rc;

    if (!p)
        return err_nomem(e);
    pthread_mutex_init(&p->lock, NULL);
    if (options) {
        p->recall = options->recall;
        p->note = options->note;
        p->user = options->cache_user;
    }
    rc = take_url(p, url, e);
    if (rc == 0)
        rc = check_scheme(url, p->shown, e);
    if (rc == 0)
        rc = http_new(NULL, &http, e);
    if (rc == 0) {
        p->http = http;
        rc = find_out(p, e);
    }
    if (rc == 0 &&
        (buf_addf(&identity, "web:%s%s", p->shown, p->file ? p->file : "") < 0 ||
         buf_addf(&shown, "%s%s", p->shown, p->file ? p->file : "") < 0 ||
         buf_add(&dir, p->dir, strlen(p->dir) - 1) < 0))
        rc = err_nomem(e);
    if (rc < 0) {
        web_close(p);
        http_free(http);
        return rc;
    }
    return objects_open(&(struct objects_spec){.protocol = &web_protocol,
                                               .self = p,
                                               .http = http,
                                               .url = shown.data,
                                               .identity = identity.data,
                                               .file = p->file,
                                               .dir = dir.data},
                        options, out, e);
}
