/* SPDX-License-Identifier: MIT */
/* remote/web_ask.c - asks the files of a plain web server what they are. */
#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/err.h"
#include "base/log.h"
#include "base/vec.h"
#include "remote/block_disk.h"
#include "remote/store.h"
#include "remote/web_priv.h"

enum {
    ASKED_AT_ONCE = 256,
    /* Of these together; a file that does not answer by then is asked once more. */
    EARLY_DEADLINE_S = 5,
    HINT_MAX = BLOCK_BYTES / 2,
};

/* ---- names ---- */

void web_names_release(struct web_names *n)
{
    for (size_t i = 0; i < n->count; i++)
        free(n->name[i]);
    free(n->name);
    *n = (struct web_names){0};
}

int web_names_add(struct web_names *n, const char *name, size_t len, struct err *e)
{
    if (!VEC_ROOM(n->name, n->count, n->cap))
        return err_nomem(e);
    n->name[n->count] = strndup(name, len);
    return n->name[n->count] ? (n->count++, 0) : err_nomem(e);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Pages may link to one file many times: it is asked once. */
static void sort_names(struct web_names *n)
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

/* ---- HEADs ---- */

/* Requests for some files of a directory. */
struct heads {
    struct http_request *request;
    struct buf *url, *what;
    size_t count;
};

static void heads_release(struct heads *h)
{
    for (size_t i = 0; i < h->count; i++) {
        buf_release(&h->url[i]);
        buf_release(&h->what[i]);
    }
    free(h->request);
    free(h->url);
    free(h->what);
}

static int add_what(const struct web *p, const char *dir, const char *name,
                    struct buf *url, struct buf *what, struct err *e)
{
    char path[PATH_MAX];

    if (store_join(dir, name, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s/%s: the path is too long", dir, name);
    if (url)
        TRY(web_add_url(p, path, "", url, e));
    return buf_addf(what, "%s%s", p->shown, path) < 0 ? err_nomem(e) : 0;
}

void web_ask_for(const struct web *p, struct http_request *r)
{
    static const char *const first_byte[] = {"Range: bytes=0-0", NULL};

    r->method = p->by_get ? "GET" : "HEAD";
    r->headers = p->by_get ? first_byte : NULL;
}

/* Room for `before` requests more, that are put in front. */
static int heads_make(const struct web *p, const char *dir, char *const *name, size_t n,
                      size_t before, struct heads *h, struct err *e)
{
    int rc = 0;

    *h = (struct heads){.request = calloc(before + n, sizeof *h->request),
                        .url = calloc(n, sizeof *h->url),
                        .what = calloc(n, sizeof *h->what)};
    if (!h->request || !h->url || !h->what)
        return err_nomem(e);
    h->count = n;
    for (size_t i = 0; rc == 0 && i < n; i++) {
        rc = add_what(p, dir, name[i], &h->url[i], &h->what[i], e);
        h->request[before + i] =
            (struct http_request){.url = h->url[i].data,
                                  .what = h->what[i].data,
                                  .auth = &web_auth,
                                  .auth_user = (void *)(uintptr_t)p,
                                  .flags = HTTP_ANY_STATUS};
        web_ask_for(p, &h->request[before + i]);
    }
    return rc;
}

/* One file as it told of itself. */
static int take_head(const char *what, const char *name, const struct http_answer *a,
                     struct object_list *out, struct err *e)
{
    const struct object_entry entry = {.name = name,
                                       .size = a->size,
                                       .modified = a->modified,
                                       .etag = http_answer_header(a, "ETag")};
    const char *why = NULL;

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

/* Asks up to ASKED_AT_ONCE files. */
static int ask_some(const struct web *p, const char *dir, char *const *name, size_t n,
                    unsigned deadline_s, struct object_list *out, struct err *e)
{
    CLEANUP_FREE struct http_answer *a = calloc(n, sizeof *a);
    CLEANUP(heads_release) struct heads h = {0};
    int rc = a ? heads_make(p, dir, name, n, 0, &h, e) : err_nomem(e);

    for (size_t i = 0; rc == 0 && i < n; i++)
        h.request[i].deadline_s = deadline_s;
    if (rc == 0)
        rc = http_do_many(p->http, h.request, n, a, e);
    for (size_t i = 0; a && i < n; i++) {
        if (rc == 0)
            rc = take_head(h.what[i].data, name[i], &a[i], out, e);
        http_answer_release(&a[i]);
    }
    return rc;
}

/* ---- those that were there before ---- */

void web_early_release(struct web_early *early)
{
    for (size_t i = 0; early->answer && i < early->names.count; i++)
        http_answer_release(&early->answer[i]);
    free(early->answer);
    web_names_release(&early->names);
    *early = (struct web_early){0};
}

/* What the names of a directory are noted by: the store's identity, and its path there. */
static int hint_key(const struct web *p, const char *dir, struct buf *store,
                    struct buf *name)
{
    if (buf_addf(store, "web:%s", p->shown) < 0 ||
        buf_addf(name, "files of %s", dir) < 0)
        return -ENOMEM;
    return 0;
}

/* The names of a directory as it was listed last, each with a NUL behind it. */
static size_t recall(const struct web *p, const char *dir, char *text, size_t size)
{
    CLEANUP(buf_release) struct buf store = {0}, name = {0};

    if (!p->recall || hint_key(p, dir, &store, &name) < 0)
        return 0;
    return p->recall(p->user, store.data, name.data, text, size);
}

/* Nothing in there is believed: names that cannot be ones are passed over. */
static int recall_names(const struct web *p, const char *dir, struct web_names *out,
                        struct err *e)
{
    CLEANUP_FREE char *text = malloc(HINT_MAX);
    size_t len = text ? recall(p, dir, text, HINT_MAX) : 0;

    for (size_t at = 0, n; at < len && out->count < ASKED_AT_ONCE; at += n + 1) {
        n = strnlen(text + at, len - at);
        if (store_name_is_safe(text + at, n) && !memchr(text + at, '/', n))
            TRY(web_names_add(out, text + at, n, e));
    }
    sort_names(out);
    return 0;
}

static bool same_names(const struct web_names *a, const struct web_names *b)
{
    bool same = a->count == b->count;

    for (size_t i = 0; same && i < a->count; i++)
        same = strcmp(a->name[i], b->name[i]) == 0;
    return same;
}

/* Where they are too many to be asked at once nothing is gained. */
static void remember(const struct web *p, const char *dir, const struct web_names *n,
                     const struct web_early *early)
{
    CLEANUP(buf_release) struct buf store = {0}, name = {0}, text = {0};

    if (!p->note || n->count == 0 || n->count > ASKED_AT_ONCE ||
        same_names(n, &early->names) || hint_key(p, dir, &store, &name) < 0)
        return;
    for (size_t i = 0; i < n->count; i++)
        buf_add(&text, n->name[i], strlen(n->name[i]) + 1);
    if (buf_failed(&text) == 0 && text.len <= HINT_MAX)
        p->note(p->user, store.data, name.data, text.data, text.len);
}

int web_do_early(const struct web *p, const char *path, const struct http_request *r,
                 size_t n, struct http_answer *a, struct web_early *early,
                 struct err *e)
{
    CLEANUP_FREE struct http_answer *all = NULL;
    CLEANUP(heads_release) struct heads h = {0};
    size_t count;
    int rc;

    if (early)
        TRY(recall_names(p, path, &early->names, e));
    if (!early || early->names.count == 0)
        return http_do_many(p->http, r, n, a, e);
    count = early->names.count;
    early->answer = calloc(count, sizeof *early->answer);
    all = calloc(n + count, sizeof *all);
    rc = all && early->answer ? heads_make(p, path, early->names.name, count, n, &h, e)
                              : err_nomem(e);
    if (rc < 0)
        return rc;
    memcpy(h.request, r, n * sizeof *r);
    for (size_t i = n; i < n + count; i++) {
        h.request[i].flags |= HTTP_MAY_FAIL;
        h.request[i].deadline_s = EARLY_DEADLINE_S;
    }
    rc = http_do_many(p->http, h.request, n + count, all, e);
    memcpy(a, all, n * sizeof *a);
    memcpy(early->answer, all + n, count * sizeof *all);
    return rc;
}

/* ---- a directory ---- */

static const struct http_answer *early_answer(const struct web_early *early,
                                              const char *name)
{
    char *const *found = early->names.count
                             ? bsearch(&name, early->names.name, early->names.count,
                                       sizeof name, compare_names)
                             : NULL;
    const struct http_answer *a =
        found ? &early->answer[found - early->names.name] : NULL;

    return a && a->status / 100 == 2 ? a : NULL; /* else there may be one by now */
}

int web_ask(const struct web *p, const char *dir, struct web_names *n,
            const struct web_early *early, unsigned deadline_s, struct object_list *out,
            struct err *e)
{
    CLEANUP_FREE char **rest = NULL;
    size_t asked = 0;
    int rc = 0;

    sort_names(n);
    rest = calloc(n->count + 1, sizeof *rest);
    if (!rest)
        return err_nomem(e);
    for (size_t i = 0; rc == 0 && i < n->count; i++) {
        const struct http_answer *a = early_answer(early, n->name[i]);
        CLEANUP(buf_release) struct buf what = {0};

        if (!a)
            rest[asked++] = n->name[i];
        else if ((rc = add_what(p, dir, n->name[i], NULL, &what, e)) == 0)
            rc = take_head(what.data, n->name[i], a, out, e);
    }
    for (size_t i = 0; rc == 0 && i < asked; i += ASKED_AT_ONCE)
        rc = ask_some(p, dir, rest + i, MIN(asked - i, (size_t)ASKED_AT_ONCE),
                      deadline_s, out, e);
    if (rc == 0)
        remember(p, dir, n, early);
    return rc;
}
