/* SPDX-License-Identifier: MIT */
/* remote/s3_objects.c - what is below a prefix of a bucket, as a store of objects. */
#include "remote/s3.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/err.h"
#include "remote/objects.h"
#include "remote/s3_list.h"
#include "remote/store.h"

enum {
    MAX_PAGES = 20000, /* of 1000: more than any directory that can be used */
    MOMENT_SECONDS =
        2, /* so long the page by which a root was found counts as a listing */
};

/* The first page of the root's listing, as it came when the store was opened. */
struct first_page {
    struct s3_page page;
    struct timespec since; /* CLOCK_MONOTONIC */
};

struct s3_objects {
    struct http *http; /* borrowed from the store */
    struct s3 *s3;
    char *root; /* the key of the store's root, without a slash at its end; "" */
    struct first_page *_Atomic first; /* NULL: used, or there is none */
};

/* "ROOT/PATH", "ROOT", "PATH" or "". */
static int add_key(const struct s3_objects *o, const char *path, struct buf *out)
{
    buf_adds(out, o->root);
    if (o->root[0] && path[0])
        buf_addc(out, '/');
    return buf_adds(out, path);
}

/* As many as the server likes, with directories. */
static int page_url(const struct s3_objects *o, const char *prefix, const char *token,
                    struct buf *out, struct err *e)
{
    CLEANUP(buf_release) struct buf query = {0};

    if (token[0]) {
        buf_adds(&query, "continuation-token=");
        http_encode(token, false, &query);
        buf_addc(&query, '&');
    }
    buf_adds(&query, "delimiter=%2F&encoding-type=url&list-type=2&prefix=");
    http_encode(prefix, false, &query);
    if (buf_failed(&query))
        return err_nomem(e);
    return s3_url(o->s3, "", query.data, out, e);
}

/*
 * One page. `flags` are those of the request; with HTTP_ANY_STATUS 1 is returned, and no
 * page, where the answer is another one than 200.
 */
static int get_page(const struct s3_objects *o, const char *prefix, const char *token,
                    unsigned flags, unsigned deadline_s, struct s3_page *out,
                    struct err *e)
{
    CLEANUP(http_answer_release) struct http_answer answer = {0};
    CLEANUP(buf_release) struct buf url = {0};
    CLEANUP(buf_release) struct buf what = {0};
    struct http_request r = {
        .auth = &s3_auth, .auth_user = o->s3, .flags = flags, .deadline_s = deadline_s};
    int rc = page_url(o, prefix, token, &url, e);

    if (rc == 0 && buf_addf(&what, "%s/%s", s3_shown(o->s3), prefix) < 0)
        rc = err_nomem(e);
    r.url = url.data;
    r.what = what.data;
    if (rc == 0)
        rc = http_do(o->http, &r, &answer, e);
    if (rc < 0)
        return s3_explain(o->s3, e);
    if (flags & HTTP_ANY_STATUS && answer.status != 200)
        return 1;
    rc = s3_page_read(answer.body.data ? answer.body.data : "", answer.body.len, prefix,
                      out, e);
    return rc < 0 ? err_wrap(e, "%s", what.data) : 0;
}

/* ---- the page that opening brings ---- */

static void first_page_free(struct first_page *f)
{
    if (f)
        s3_page_release(&f->page);
    free(f);
}

/* The page that was kept, once and while it is fresh; an empty one otherwise. */
static bool take_first_page(struct s3_objects *o, struct s3_page *out)
{
    struct first_page *f = atomic_exchange(&o->first, NULL);
    struct timespec now;
    bool fresh;

    clock_gettime(CLOCK_MONOTONIC, &now);
    fresh = f && now.tv_sec - f->since.tv_sec < MOMENT_SECONDS;
    if (fresh) {
        *out = f->page;
        f->page = (struct s3_page){0};
    }
    first_page_free(f);
    return fresh;
}

static int add_entries(const struct s3_page *page, struct object_list *out,
                       struct err *e)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < s3_page_count(page); i++) {
        const struct s3_entry *from = s3_page_at(page, i);
        struct object_entry entry = {.name = page->names.data + from->name,
                                     .is_dir = from->is_dir,
                                     .size = from->size,
                                     .modified = from->modified};

        if (from->etag != SIZE_MAX)
            entry.etag = page->names.data + from->etag;
        rc = object_list_add(out, &entry, e);
    }
    return rc;
}

static int list_pages(struct s3_objects *o, const char *prefix, bool is_root,
                      unsigned deadline_s, struct object_list *out, size_t *objects,
                      struct err *e)
{
    CLEANUP(buf_release) struct buf token = {0};
    int rc;

    for (unsigned pages = 0;; pages++) {
        CLEANUP(s3_page_release) struct s3_page page = {0};

        if (pages == MAX_PAGES)
            return err_set(e, EFBIG, "%s/%s: a listing of more than %d pages",
                           s3_shown(o->s3), prefix, MAX_PAGES);
        rc = pages == 0 && is_root && take_first_page(o, &page)
                 ? 0
                 : get_page(o, prefix, token.data ? token.data : "", 0, deadline_s,
                            &page, e);
        if (rc == 0)
            rc = add_entries(&page, out, e);
        *objects += page.objects;
        if (rc < 0 || page.next.len == 0)
            return rc;
        if (token.len == page.next.len &&
            memcmp(token.data, page.next.data, token.len) == 0)
            return err_set(e, EPROTO, "%s/%s: a listing that does not go on",
                           s3_shown(o->s3), prefix);
        buf_clear(&token);
        if (buf_add(&token, page.next.data, page.next.len) < 0)
            return err_nomem(e);
    }
}

/* What the keys of a directory begin with: "", or "a/b/". */
static int add_prefix(const struct s3_objects *o, const char *path, struct buf *out,
                      struct err *e)
{
    add_key(o, path, out);
    if (out->len)
        buf_addc(out, '/');
    return buf_adds(out, "") < 0 ? err_nomem(e) : 0;
}

static int s3_list(void *self, const char *path, unsigned deadline_s,
                   struct object_list *out, struct err *e)
{
    struct s3_objects *o = self;
    CLEANUP(buf_release) struct buf prefix = {0};
    size_t objects = 0;
    int rc = add_prefix(o, path, &prefix, e);

    if (rc == 0)
        rc = list_pages(o, prefix.data, path[0] == '\0', deadline_s, out, &objects, e);
    if (rc == 0 && objects == 0 && path[0])
        return err_set(e, ENOENT, "%s/%s: there is no such directory", s3_shown(o->s3),
                       prefix.data);
    return rc;
}

static int s3_object_url(void *self, const char *path, const char *version,
                         struct buf *out, struct err *e)
{
    struct s3_objects *o = self;
    CLEANUP(buf_release) struct buf key = {0};

    (void)version; /* the ETag pins it: ListObjectsV2 tells no version */
    if (add_key(o, path, &key) < 0)
        return err_nomem(e);
    return s3_url(o->s3, key.data, NULL, out, e);
}

static void s3_objects_close(void *self)
{
    struct s3_objects *o = self;

    first_page_free(atomic_exchange(&o->first, NULL));
    s3_free(o->s3);
    free(o->root);
    free(o);
}

/*
 * The signer is asked with the protocol's own state: `self`, whose bucket it is.
 */
static int objects_authorize(void *user, struct http_try *t, struct err *e)
{
    const struct s3_objects *o = user;

    return s3_auth.authorize(o->s3, t, e);
}

static bool objects_refused(void *user, const struct http_answer *a)
{
    const struct s3_objects *o = user;

    return s3_auth.refused(o->s3, a);
}

static const struct http_auth objects_auth = {.authorize = objects_authorize,
                                              .refused = objects_refused};

static int objects_explain(void *self, struct err *e)
{
    const struct s3_objects *o = self;

    return s3_explain(o->s3, e);
}

static const struct object_protocol s3_protocol = {
    .name = "s3",
    .list = s3_list,
    .url = s3_object_url,
    .auth = &objects_auth,
    .explain = objects_explain,
    .close = s3_objects_close,
};

/* ---- opening ---- */

/*
 * Lists the root: this tells the bucket's region, whether we may and whether there is anything,
 * and is the root's listing as well. Where the answer is a refusal of any kind the bucket
 * itself is asked, which says more of it, and tells the region with every status.
 */
static int ask_root(struct s3_objects *o, struct s3_page *page, struct err *e)
{
    CLEANUP(buf_release) struct buf prefix = {0};
    int rc = add_prefix(o, "", &prefix, e);

    if (rc == 0)
        rc = get_page(o, prefix.data, "", HTTP_ANY_STATUS | HTTP_NO_REDIRECT, 0, page,
                      e);
    if (rc == 1)
        rc = s3_locate(o->s3, e) < 0 ? -e->code
                                     : get_page(o, prefix.data, "", 0, 0, page, e);
    return rc;
}

/* Is there anything below it? 1, and its first page is kept, 0 or an error. */
static int is_directory(struct s3_objects *o, struct err *e)
{
    CLEANUP_FREE struct first_page *f = calloc(1, sizeof *f);
    int rc;

    if (!f)
        return err_nomem(e);
    rc = ask_root(o, &f->page, e);
    if (rc < 0 || (o->root[0] && f->page.objects == 0)) {
        s3_page_release(&f->page);
        return rc;
    }
    clock_gettime(CLOCK_MONOTONIC, &f->since);
    first_page_free(atomic_exchange(&o->first, steal(&f)));
    return 1;
}

static int is_object(const struct s3_objects *o, struct err *e)
{
    CLEANUP(buf_release) struct buf url = {0};
    CLEANUP(buf_release) struct buf what = {0};
    struct http_request r = {.method = "HEAD", .auth = &s3_auth, .auth_user = o->s3};
    int rc = s3_url(o->s3, o->root, NULL, &url, e);

    if (rc == 0 && buf_addf(&what, "%s/%s", s3_shown(o->s3), o->root) < 0)
        rc = err_nomem(e);
    r.url = url.data;
    r.what = what.data;
    if (rc == 0)
        rc = http_do(o->http, &r, NULL, e);
    if (rc == -ENOENT) {
        err_set(e, ENOENT, "%s: there is no such object or prefix", what.data);
        return err_hint(e, "`unshard ls %s` lists the bucket's checkpoints",
                        s3_shown(o->s3));
    }
    return rc < 0 ? s3_explain(o->s3, e) : 1;
}

/* The directory of the one object becomes the root, *file its name in there. */
static int enter_parent(struct s3_objects *o, char **file, struct err *e)
{
    char *slash = strrchr(o->root, '/');

    *file = strdup(slash ? slash + 1 : o->root);
    if (!*file)
        return err_nomem(e);
    *(slash ? slash : o->root) = '\0';
    return 0;
}

static int open_root(struct s3_objects *o, const char *url, char **file, struct err *e)
{
    int rc = s3_new(url, o->http, &o->s3, &o->root, e);

    if (rc == 0)
        rc = is_directory(o, e);
    if (rc == 0)
        rc = is_object(o, e);
    else
        return MIN(rc, 0);
    return rc < 0 ? rc : enter_parent(o, file, e);
}

static int spec_texts(const struct s3_objects *o, const char *file, struct buf *shown,
                      struct buf *identity, struct err *e)
{
    buf_adds(shown, s3_shown(o->s3));
    if (o->root[0])
        buf_addf(shown, "/%s", o->root);
    if (file)
        buf_addf(shown, "/%s", file);
    buf_addf(identity, "%s/%s", s3_identity(o->s3), o->root);
    return buf_failed(shown) || buf_failed(identity) ? err_nomem(e) : 0;
}

int s3_open(const char *url, const struct store_options *options, struct store **out,
            struct err *e)
{
    struct s3_objects *o = calloc(1, sizeof *o);
    struct http *http = NULL;
    CLEANUP(buf_release) struct buf shown = {0};
    CLEANUP(buf_release) struct buf identity = {0};
    CLEANUP_FREE char *file = NULL;
    int rc;

    rc = o ? http_new(NULL, &http, e) : err_nomem(e);
    if (rc == 0) {
        o->http = http;
        rc = open_root(o, url, &file, e);
    }
    if (rc == 0)
        rc = spec_texts(o, file, &shown, &identity, e);
    if (rc < 0) {
        if (o)
            s3_objects_close(o);
        http_free(http);
        return rc;
    }
    return objects_open(&(struct objects_spec){.protocol = &s3_protocol,
                                               .self = o,
                                               .http = http,
                                               .url = shown.data,
                                               .identity = identity.data,
                                               .file = file},
                        options, out, e);
}
