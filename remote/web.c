/* SPDX-License-Identifier: MIT */
/* remote/web.c - files on a plain web server, by its listing pages or by a manifest. */
#include "remote/web_priv.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "base/err.h"
#include "base/log.h"
#include "remote/manifest.h"
#include "remote/objects.h"
#include "remote/store.h"

enum {
    ASKED_AT_ONCE = 256, /* files that are asked what they are */
    MOMENT_SECONDS =
        2, /* directories that are listed one after the other share a fetch */
};

static const int64_t second_ns = 1000000000;

int64_t web_moment(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (t.tv_sec + MOMENT_SECONDS) * second_ns + t.tv_nsec;
}

static bool is_over(int64_t until)
{
    return web_moment() - MOMENT_SECONDS * second_ns >= until;
}

void web_close(void *self)
{
    struct web *p = self;

    free(p->base);
    free(p->shown);
    free(p->dir);
    free(p->query);
    free(p->basic);
    free(p->file);
    manifest_put(p->manifest);
    buf_release(&p->page);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

/* ---- requests ---- */

static int web_authorize(void *self, struct http_try *t, struct err *e)
{
    const struct web *p = self;

    return p->basic ? http_try_header(t, "Authorization", p->basic, e) : 0;
}

const struct http_auth web_auth = {.authorize = web_authorize};

int web_add_url(const struct web *p, const char *path, const char *tail,
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
    return web_add_url(self, path, "", out, e);
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
    int rc = web_add_url(p, path, tail, &url, e);

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
        rc = web_add_url(p, path, "", &h[i].url, e);
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

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Pages may link to one file many times: it is asked once. */
static void drop_doubles(struct names *n)
{
    size_t kept = 0;

    if (n->count > 1)
        qsort(n->name, n->count, sizeof *n->name, compare_names);
    for (size_t i = 0; i < n->count; i++) {
        if (kept > 0 && strcmp(n->name[kept - 1], n->name[i]) == 0)
            free(n->name[i]);
        else
            n->name[kept++] = n->name[i];
    }
    n->count = kept;
}

static int ask_all(const struct web *p, const char *dir, struct names *n,
                   unsigned deadline_s, struct err *e)
{
    int rc = 0;

    drop_doubles(n);
    for (size_t i = 0; rc == 0 && i < n->count; i += ASKED_AT_ONCE)
        rc = ask_some(p, dir, n->name + i, MIN(n->count - i, (size_t)ASKED_AT_ONCE),
                      deadline_s, n->out, e);
    return rc;
}

/* ---- directories ---- */

void web_keep_manifest(struct web *p, struct manifest *m)
{
    struct manifest *old;

    pthread_mutex_lock(&p->lock);
    old = p->manifest;
    p->manifest = manifest_get(m);
    p->until = web_moment();
    pthread_mutex_unlock(&p->lock);
    manifest_put(old);
}

static struct manifest *kept_manifest(struct web *p)
{
    struct manifest *m = NULL;

    pthread_mutex_lock(&p->lock);
    if (p->manifest && !is_over(p->until))
        m = manifest_get(p->manifest);
    pthread_mutex_unlock(&p->lock);
    return m;
}

static int fetch_manifest(struct web *p, unsigned deadline_s, struct manifest **out,
                          struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer a = {0};
    int rc = get(p, "", MANIFEST_NAME, MANIFEST_BYTES_MAX, deadline_s, &a, e);

    if (rc == 0)
        rc = manifest_parse(a.body.data, a.body.len, out, e);
    if (rc == 0)
        web_keep_manifest(p, *out);
    return rc;
}

static int list_manifest(struct web *p, const char *path, unsigned deadline_s,
                         struct names *n, struct err *e)
{
    CLEANUP(manifest_putp) struct manifest *m = kept_manifest(p);
    int rc = m ? 0 : fetch_manifest(p, deadline_s, &m, e);

    if (rc == 0)
        rc = manifest_list(m, path, note_entry, n);
    if (rc == -ENOENT && !e->code)
        return err_set(e, ENOENT, "%s%s: not in the manifest", p->shown, path);
    return rc;
}

bool web_is_html(const struct http_answer *a)
{
    const char *type = http_answer_header(a, "Content-Type");

    return type && strncasecmp(type, "text/html", 9) == 0;
}

/* The root's page as find_out() has fetched it, once. */
static bool take_kept_page(struct web *p, struct buf *out)
{
    bool there;

    pthread_mutex_lock(&p->lock);
    there = p->page.data && !is_over(p->until);
    *out = p->page;
    p->page = (struct buf){0};
    pthread_mutex_unlock(&p->lock);
    if (!there)
        buf_release(out);
    return there;
}

static int fetch_page(const struct web *p, const char *path, unsigned deadline_s,
                      struct buf *out, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer a = {0};
    const char *type;

    if (get(p, path, path[0] ? "/" : "", PAGE_MAX, deadline_s, &a, e) < 0)
        return -e->code;
    if (!web_is_html(&a)) {
        type = http_answer_header(&a, "Content-Type");
        err_set(e, ENOTSUP, "%s%s: the server shows no page with links (%s)", p->shown,
                path, type ? type : "no Content-Type");
        return err_hint(e, "put a list there: unshard manifest DIR");
    }
    *out = a.body;
    a.body = (struct buf){0};
    return 0;
}

static int list_page(struct web *p, const char *path, unsigned deadline_s,
                     struct names *n, struct err *e)
{
    CLEANUP(buf_release) struct buf page = {0}, dir = {0};

    if ((path[0] || !take_kept_page(p, &page)) &&
        fetch_page(p, path, deadline_s, &page, e) < 0)
        return -e->code;
    buf_addf(&dir, "%s%s%s", p->dir, path, path[0] ? "/" : "");
    if (buf_failed(&dir) < 0)
        return err_nomem(e);
    return page_links(page.data, page.len, dir.data, note_link, n);
}

static int web_list(void *self, const char *path, unsigned deadline_s,
                    struct object_list *out, struct err *e)
{
    struct web *p = self;
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

const struct object_protocol web_protocol = {
    .name = "web",
    .list = web_list,
    .url = web_url,
    .auth = &web_auth,
    .close = web_close,
};
