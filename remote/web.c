/* SPDX-License-Identifier: MIT */
/* remote/web.c - files on a plain web server, by its listing pages or by a manifest. */
#include "remote/web.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/err.h"
#include "base/log.h"
#include "remote/manifest.h"
#include "remote/objects.h"
#include "remote/store.h"

enum {
    PAGE_MAX = 256 << 20, /* about 1,000,000 links */
    ASKED_AT_ONCE = 256,  /* files that are asked what they are */
};

struct web {
    struct http *http; /* the store's */
    char *base;        /* URL of the directory, with a slash at its end */
    char *shown;       /* the same without secrets */
    char *dir;         /* its path, decoded, with a slash at its end */
    char *query;       /* "" or "?...", goes with every request */
    char *basic;       /* NULL, or what stands behind "Authorization: " */
    char *file;        /* NULL, or the one file that was opened */
    bool has_manifest;
};

static void web_close(void *self)
{
    struct web *p = self;

    free(p->base);
    free(p->shown);
    free(p->dir);
    free(p->query);
    free(p->basic);
    free(p->file);
    free(p);
}

/* ---- requests ---- */

static int web_authorize(void *self, struct http_try *t, struct err *e)
{
    const struct web *p = self;

    return p->basic ? http_try_header(t, "Authorization", p->basic, e) : 0;
}

static const struct http_auth web_auth = {.authorize = web_authorize};

static int add_url(const struct web *p, const char *path, const char *tail,
                   struct buf *out, struct err *e)
{
    buf_adds(out, p->base);
    http_encode(path, true, out);
    buf_adds(out, tail);
    buf_adds(out, p->query);
    return buf_failed(out) < 0 ? err_nomem(e) : 0;
}

static int web_url(void *self, const char *path, const char *version, struct buf *out,
                   struct err *e)
{
    (void)version;
    return add_url(self, path, "", out, e);
}

/* A GET of something that is no file of the checkpoint. */
static int get(const struct web *p, const char *path, const char *tail, size_t max,
               unsigned deadline_s, struct http_answer *a, struct err *e)
{
    CLEANUP(buf_release) struct buf url = {0}, what = {0};
    struct http_request r = {.auth = &web_auth,
                             .auth_user = (void *)(uintptr_t)p,
                             .max = max,
                             .deadline_s = deadline_s};
    int rc = add_url(p, path, tail, &url, e);

    buf_addf(&what, "%s%s%s", p->shown, path, tail);
    if (rc < 0 || buf_failed(&what) < 0)
        return err_nomem(e);
    r.url = url.data;
    r.what = what.data;
    return http_do(p->http, &r, a, e);
}

/* ---- what files are ---- */

/* Names of one directory, until they are asked what they are. */
struct names {
    char **name;
    size_t count, cap;
    struct object_list *out;
    struct err *e;
};

static void names_release(struct names *n)
{
    for (size_t i = 0; i < n->count; i++)
        free(n->name[i]);
    free(n->name);
}

static int note_name(struct names *n, const char *name)
{
    if (n->count == n->cap) {
        size_t cap = n->cap ? 2 * n->cap : 64;
        char **grown = reallocarray(n->name, cap, sizeof *grown);

        if (!grown)
            return err_nomem(n->e);
        n->name = grown;
        n->cap = cap;
    }
    n->name[n->count] = strdup(name);
    return n->name[n->count] ? (n->count++, 0) : err_nomem(n->e);
}

static int note_link(void *user, const char *name, bool is_dir)
{
    struct names *n = user;

    if (is_dir)
        return object_list_add(
            n->out, &(struct object_entry){.name = name, .is_dir = true}, n->e);
    return strcmp(name, MANIFEST_NAME) == 0 ? 0 : note_name(n, name);
}

static int note_entry(void *user, const char *name, bool is_dir, uint64_t size)
{
    (void)size;
    return note_link(user, name, is_dir);
}

/* One file as it told of itself. */
static int take_head(const struct web *p, const char *what, const char *name,
                     const struct http_answer *a, struct object_list *out,
                     struct err *e)
{
    const struct object_entry entry = {.name = name,
                                       .size = a->size,
                                       .modified = a->modified,
                                       .etag = http_answer_header(a, "ETag")};
    const char *why = NULL;

    (void)p;
    if (a->status / 100 != 2)
        why = a->status == 403 || a->status == 401 ? "may not be read" : "is not there";
    else if (a->size == UINT64_MAX)
        why = "its server does not tell its length";
    else if (!entry.etag && !entry.modified)
        why = "its server tells neither ETag nor Last-Modified, so that changes would "
              "not be seen";
    if (!why)
        return object_list_add(out, &entry, e);
    log_msg(LOG_REMOTE, LOG_WARN, "%s is left out: %s (HTTP %d)", what, why, a->status);
    return 0;
}

struct head {
    struct buf url, what;
};

/* Asks up to ASKED_AT_ONCE files. */
static int ask_some(const struct web *p, const char *dir, char *const *name, size_t n,
                    unsigned deadline_s, struct object_list *out, struct err *e)
{
    CLEANUP_FREE struct http_request *r = calloc(n, sizeof *r);
    CLEANUP_FREE struct http_answer *a = calloc(n, sizeof *a);
    CLEANUP_FREE struct head *h = calloc(n, sizeof *h);
    int rc = r && a && h ? 0 : err_nomem(e);

    for (size_t i = 0; rc == 0 && i < n; i++) {
        char path[PATH_MAX];

        if (store_join(dir, name[i], path, sizeof path) < 0) {
            rc = err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir, name[i]);
            break;
        }
        rc = add_url(p, path, "", &h[i].url, e);
        if (rc == 0 && buf_addf(&h[i].what, "%s%s", p->shown, path) < 0)
            rc = err_nomem(e);
        r[i] = (struct http_request){.method = "HEAD",
                                     .url = h[i].url.data,
                                     .what = h[i].what.data,
                                     .auth = &web_auth,
                                     .auth_user = (void *)(uintptr_t)p,
                                     .flags = HTTP_ANY_STATUS,
                                     .deadline_s = deadline_s};
    }
    if (rc == 0)
        rc = http_do_many(p->http, r, n, a, e);
    for (size_t i = 0; h && a && i < n; i++) {
        if (rc == 0)
            rc = take_head(p, h[i].what.data, name[i], &a[i], out, e);
        buf_release(&h[i].url);
        buf_release(&h[i].what);
        http_answer_release(&a[i]);
    }
    return rc;
}

static int ask_all(const struct web *p, const char *dir, const struct names *n,
                   unsigned deadline_s, struct err *e)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < n->count; i += ASKED_AT_ONCE)
        rc = ask_some(p, dir, n->name + i, MIN(n->count - i, (size_t)ASKED_AT_ONCE),
                      deadline_s, n->out, e);
    return rc;
}

/* ---- directories ---- */

static int list_manifest(const struct web *p, const char *path, unsigned deadline_s,
                         struct names *n, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer a = {0};
    struct manifest *m = NULL;
    int rc = get(p, "", MANIFEST_NAME, MANIFEST_BYTES_MAX, deadline_s, &a, e);

    if (rc == 0)
        rc = manifest_parse(a.body.data, a.body.len, &m, e);
    if (rc == 0)
        rc = manifest_list(m, path, note_entry, n);
    manifest_free(m);
    if (rc == -ENOENT && !e->code)
        return err_set(e, ENOENT, "%s%s: not in the manifest", p->shown, path);
    return rc;
}

static int list_page(const struct web *p, const char *path, unsigned deadline_s,
                     struct names *n, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer a = {0};
    CLEANUP(buf_release) struct buf dir = {0};
    const char *type;
    int rc = get(p, path, path[0] ? "/" : "", PAGE_MAX, deadline_s, &a, e);

    if (rc < 0)
        return rc;
    type = http_answer_header(&a, "Content-Type");
    if (!type || strncasecmp(type, "text/html", 9) != 0) {
        err_set(e, ENOTSUP, "%s%s: the server shows no page with links (%s)", p->shown,
                path, type ? type : "no Content-Type");
        return err_hint(e, "put a list there: unshard manifest DIR");
    }
    buf_addf(&dir, "%s%s%s", p->dir, path, path[0] ? "/" : "");
    if (buf_failed(&dir) < 0)
        return err_nomem(e);
    return page_links(a.body.data, a.body.len, dir.data, note_link, n);
}

static int web_list(void *self, const char *path, unsigned deadline_s,
                    struct object_list *out, struct err *e)
{
    const struct web *p = self;
    CLEANUP(names_release) struct names n = {.out = out, .e = e};
    int rc;

    if (p->file)
        rc = note_name(&n, p->file);
    else if (p->has_manifest)
        rc = list_manifest(p, path, deadline_s, &n, e);
    else
        rc = list_page(p, path, deadline_s, &n, e);
    return rc < 0 ? rc : ask_all(p, path, &n, deadline_s, e);
}

static const struct object_protocol web_protocol = {
    .name = "web",
    .list = web_list,
    .url = web_url,
    .auth = &web_auth,
    .close = web_close,
};

/* ---- opening ---- */

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
    if (at && take_user(p, host, (size_t)(at - host), e) < 0)
        return -e->code;
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
    if (add_slash(&p->base, e) < 0 || add_slash(&p->shown, e) < 0 ||
        add_slash(&p->dir, e) < 0)
        return -e->code;
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

static bool ends_in_slash(const char *text)
{
    size_t len = strlen(text);

    return len > 0 && text[len - 1] == '/';
}

/* Is there a manifest in the directory that p is? */
static int find_manifest(struct web *p, const char *tail, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer a = {0};
    int rc = get(p, "", tail, MANIFEST_BYTES_MAX, 0, &a, e);

    p->has_manifest = rc == 0;
    /* Stores that hide what is there say 403 of what is not. */
    if (rc == -ENOENT || rc == -EACCES || rc == -EPROTO) {
        *e = (struct err){0};
        return 0;
    }
    return rc;
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

/* A name without a slash: of a directory or of a file? */
static int find_kind(struct web *p, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer a = {0};
    CLEANUP(buf_release) struct buf url = {0};
    struct http_request r = {.method = "HEAD",
                             .what = p->shown,
                             .auth = &web_auth,
                             .auth_user = p,
                             .flags = HTTP_NO_REDIRECT};
    const char *type;

    if (find_manifest(p, "/" MANIFEST_NAME, e) < 0)
        return -e->code;
    if (p->has_manifest)
        return be_directory(p, e);
    if (add_url(p, "", "", &url, e) < 0)
        return -e->code;
    r.url = url.data;
    if (http_do(p->http, &r, &a, e) < 0)
        return -e->code;
    type = http_answer_header(&a, "Content-Type");
    if (leads_to_slash(p, &a) ||
        (a.status == 200 && type && strncasecmp(type, "text/html", 9) == 0))
        return be_directory(p, e);
    return be_file(p, e);
}

static int find_out(struct web *p, struct err *e)
{
    const char *name = strrchr(p->dir, '/') + 1;

    if (strcmp(name, MANIFEST_NAME) == 0) {
        cut_name(p->dir);
        cut_name(p->base);
        cut_name(p->shown);
        p->has_manifest = true;
        return 0;
    }
    return ends_in_slash(p->dir) ? find_manifest(p, MANIFEST_NAME, e) : find_kind(p, e);
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
    CLEANUP(buf_release) struct buf identity = {0}, shown = {0};
    struct web *p = calloc(1, sizeof *p);
    struct http *http = NULL;
    int rc = p ? take_url(p, url, e) : err_nomem(e);

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
         buf_addf(&shown, "%s%s", p->shown, p->file ? p->file : "") < 0))
        rc = err_nomem(e);
    if (rc < 0) {
        if (p)
            web_close(p);
        http_free(http);
        return rc;
    }
    return objects_open(&(struct objects_spec){.protocol = &web_protocol,
                                               .self = p,
                                               .http = http,
                                               .url = shown.data,
                                               .identity = identity.data,
                                               .file = p->file},
                        options, out, e);
}
