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

/* Directories that are listed one after the other share a fetch. */
enum { MOMENT_SECONDS = 2 };

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
    web_early_release(&p->early);
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

/* A GET of what lists a directory; HEADs of the files that it had go along. */
static int get(const struct web *p, const char *path, const char *tail, size_t max,
               unsigned deadline_s, struct http_answer *a, struct web_early *early,
               struct err *e)
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
    return web_do_early(p, path, &r, 1, a, early, e);
}

/* ---- directories ---- */

/* Where the names of one directory go until they are asked what they are. */
struct taken {
    struct web_names names;
    struct web_early early;
    struct object_list *out;
    struct err *e;
};

static void taken_release(struct taken *t)
{
    web_names_release(&t->names);
    web_early_release(&t->early);
}

static int note_link(void *user, const char *name, bool is_dir)
{
    struct taken *t = user;

    if (is_dir)
        return object_list_add(
            t->out, &(struct object_entry){.name = name, .is_dir = true}, t->e);
    return strcmp(name, MANIFEST_NAME) == 0
               ? 0
               : web_names_add(&t->names, name, strlen(name), t->e);
}

static int note_entry(void *user, const char *name, bool is_dir, uint64_t size)
{
    (void)size;
    return note_link(user, name, is_dir);
}

/* Of the root, what came along a moment ago; once. Locked. */
static void take_early(struct web *p, struct web_early *out)
{
    *out = p->early;
    p->early = (struct web_early){0};
}

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

static struct manifest *kept_manifest(struct web *p, const char *path,
                                      struct web_early *early)
{
    struct manifest *m = NULL;

    pthread_mutex_lock(&p->lock);
    if (is_over(p->until)) {
        /* The next manifest's moment is not that of these answers. */
        web_early_release(&p->early);
    } else if (p->manifest) {
        m = manifest_get(p->manifest);
        if (!path[0])
            take_early(p, early);
    }
    pthread_mutex_unlock(&p->lock);
    return m;
}

static int fetch_manifest(struct web *p, unsigned deadline_s, struct manifest **out,
                          struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer a = {0};
    int rc = get(p, "", MANIFEST_NAME, MANIFEST_BYTES_MAX, deadline_s, &a, NULL, e);

    if (rc == 0)
        rc = manifest_parse(a.body.data, a.body.len, out, e);
    if (rc == 0)
        web_keep_manifest(p, *out);
    return rc;
}

static int list_manifest(struct web *p, const char *path, unsigned deadline_s,
                         struct taken *t, struct err *e)
{
    CLEANUP(manifest_putp) struct manifest *m = kept_manifest(p, path, &t->early);
    int rc = m ? 0 : fetch_manifest(p, deadline_s, &m, e);

    if (rc == 0)
        rc = manifest_list(m, path, note_entry, t);
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
static bool take_kept_page(struct web *p, struct buf *out, struct web_early *early)
{
    bool there;

    pthread_mutex_lock(&p->lock);
    there = p->page.data && !is_over(p->until);
    *out = p->page;
    p->page = (struct buf){0};
    if (there)
        take_early(p, early);
    pthread_mutex_unlock(&p->lock);
    if (!there)
        buf_release(out);
    return there;
}

static int fetch_page(const struct web *p, const char *path, unsigned deadline_s,
                      struct buf *out, struct web_early *early, struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer a = {0};
    const char *type;

    TRY(get(p, path, path[0] ? "/" : "", PAGE_MAX, deadline_s, &a, early, e));
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
                     struct taken *t, struct err *e)
{
    CLEANUP(buf_release) struct buf page = {0}, dir = {0};

    if (path[0] || !take_kept_page(p, &page, &t->early))
        TRY(fetch_page(p, path, deadline_s, &page, &t->early, e));
    buf_addf(&dir, "%s%s%s", p->dir, path, path[0] ? "/" : "");
    if (buf_failed(&dir) < 0)
        return err_nomem(e);
    return page_links(page.data, page.len, dir.data, note_link, t);
}

static int web_list(void *self, const char *path, unsigned deadline_s,
                    struct object_list *out, struct err *e)
{
    struct web *p = self;
    CLEANUP(taken_release) struct taken t = {.out = out, .e = e};
    int rc;

    if (p->file)
        rc = web_names_add(&t.names, p->file, strlen(p->file), e);
    else if (p->has_manifest)
        rc = list_manifest(p, path, deadline_s, &t, e);
    else
        rc = list_page(p, path, deadline_s, &t, e);
    return rc < 0 ? rc : web_ask(p, path, &t.names, &t.early, deadline_s, out, e);
}

const struct object_protocol web_protocol = {
    .name = "web",
    .list = web_list,
    .url = web_url,
    .auth = &web_auth,
    .close = web_close,
};
