/* SPDX-License-Identifier: MIT */
/* remote/objects_source.c - an object as a source: ranges of one version of it. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "remote/objects_priv.h"

enum {
    SMALL = 16 << 10, /* up to this a read fetches a piece that may serve the next */
    PART = 6 << 20,   /* longer ranges are fetched in parts, side by side */
    TAIL = 128 << 10, /* zips are read from their end: their directory lies there */
    ETAG_SIZE = 256,
};

struct object_source {
    struct source base;
    struct objects *o;
    struct buf url;
    char *dir;  /* its directory, to be looked at anew when the object changed */
    char *what; /* for messages */
    time_t modified;
    pthread_mutex_t lock;
    char *etag; /* guarded by lock; set once: what was listed, or the first answer's */
};

static struct object_source *object_of(struct source *s)
{
    return container_of(s, struct object_source, base);
}

/* ---- one version ---- */

/* Set once and then there as long as the source. */
static const char *pinned(struct object_source *s)
{
    const char *etag;

    pthread_mutex_lock(&s->lock);
    etag = s->etag;
    pthread_mutex_unlock(&s->lock);
    return etag;
}

static int pin(struct object_source *s, const struct http_answer *a, struct err *e)
{
    const char *etag = http_answer_header(a, "ETag");
    int rc = 0;

    if (s->o->protocol->pinned)
        return 0;
    if (!etag && !s->modified && !pinned(s)) {
        err_set(e, EPROTO,
                "%s: its server tells neither ETag nor Last-Modified, so that changes "
                "would not be seen",
                s->what);
        return err_hint(e, "have the server send one of them, or copy the files");
    }
    if (!etag)
        return 0;
    pthread_mutex_lock(&s->lock);
    if (!s->etag) {
        s->etag = strdup(etag);
        rc = s->etag ? 0 : err_nomem(e);
    } else if (strcmp(s->etag, etag) != 0) {
        rc = err_set(e, ESTALE, "%s: the object changed: ETag %.60s, was %.60s",
                     s->what, etag, s->etag);
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

/* Whoever comes next is to see what there is now. */
static int failed(struct object_source *s, struct err *e)
{
    if (e->code == ENOENT)
        err_set(e, ESTALE, "%s: the object is gone", s->what);
    if (e->code == ESTALE)
        dirs_forget(s->o, s->dir);
    return -e->code;
}

/* ---- ranges ---- */

static struct http_request range_request(struct object_source *s, uint64_t off,
                                         size_t len, void *dst)
{
    return (struct http_request){.url = s->url.data,
                                 .what = s->what,
                                 .auth = s->o->protocol->auth,
                                 .auth_user = s->o->self,
                                 .off = off,
                                 .len = len,
                                 .dst = dst,
                                 .size = s->base.size,
                                 .etag = pinned(s),
                                 .modified = s->o->protocol->pinned ? 0 : s->modified};
}

static size_t parts_of(const struct source_range *r, size_t n)
{
    size_t parts = 0;

    for (size_t i = 0; i < n; i++)
        parts += (r[i].len + PART - 1) / PART;
    return parts;
}

static int fetch(struct object_source *s, const struct source_range *r, size_t n,
                 struct err *e)
{
    size_t parts = parts_of(r, n), k = 0;
    CLEANUP_FREE struct http_request *request = calloc(parts + 1, sizeof *request);
    CLEANUP_FREE struct http_answer *answer = calloc(parts + 1, sizeof *answer);
    int rc = 0;

    if (!request || !answer)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++)
        for (size_t at = 0; at < r[i].len; at += PART)
            request[k++] =
                range_request(s, r[i].off + at, MIN(r[i].len - at, (size_t)PART),
                              (char *)r[i].dst + at);
    if (http_do_many(s->o->http, request, k, answer, e) < 0) {
        if (s->o->protocol->explain)
            s->o->protocol->explain(s->o->self, e);
        rc = failed(s, e);
    }
    for (size_t i = 0; i < k; i++) {
        if (rc == 0 && pin(s, &answer[i], e) < 0)
            rc = failed(s, e);
        http_answer_release(&answer[i]);
    }
    return rc;
}

/* ---- small pieces ---- */

/* Copies from a piece that holds all of the range. */
static bool from_piece(struct object_source *s, uint64_t off, size_t len, void *dst)
{
    struct objects *o = s->o;
    bool found = false;

    pthread_mutex_lock(&o->pieces_lock);
    for (size_t i = 0; i < PIECES && !found; i++) {
        struct piece *p = &o->piece[i];

        if (!p->data || !file_id_equal(&p->id, &s->base.id) || off < p->off ||
            off - p->off > p->len || len > p->len - (off - p->off))
            continue;
        memcpy(dst, p->data + (off - p->off), len);
        p->used = ++o->uses;
        found = true;
    }
    pthread_mutex_unlock(&o->pieces_lock);
    return found;
}

/* Puts it in the place of the one that was not used for longest. Owns data. */
static void keep_piece(struct object_source *s, uint64_t off, size_t len,
                       unsigned char *data)
{
    struct objects *o = s->o;
    struct piece *oldest = &o->piece[0];

    pthread_mutex_lock(&o->pieces_lock);
    for (size_t i = 1; i < PIECES; i++)
        if (o->piece[i].used < oldest->used)
            oldest = &o->piece[i];
    free(oldest->data);
    *oldest = (struct piece){
        .id = s->base.id, .off = off, .len = len, .data = data, .used = ++o->uses};
    pthread_mutex_unlock(&o->pieces_lock);
}

/*
 * Headers are read in small steps, forward from where they begin; the end of a file in
 * steps backward. One request brings what the next steps want.
 */
static void piece_round(const struct source *s, uint64_t off, uint64_t *from,
                        size_t *len)
{
    uint64_t size = s->size;

    *from = off < PIECE_SIZE ? 0 : off;
    if (off >= PIECE_SIZE && size - off <= TAIL)
        *from = MAX(size, (uint64_t)PIECE_SIZE) - PIECE_SIZE;
    if (*from > off)
        *from = off;
    *len = (size_t)MIN((uint64_t)PIECE_SIZE, size - *from);
}

static int read_small(struct object_source *s, uint64_t off, size_t len, void *dst,
                      struct err *e)
{
    CLEANUP_FREE unsigned char *data = NULL;
    struct source_range r;

    if (from_piece(s, off, len, dst))
        return 0;
    piece_round(&s->base, off, &r.off, &r.len);
    if (off + len > r.off + r.len) /* it reaches over the piece's end */
        r = (struct source_range){.off = off, .len = len};
    data = malloc(r.len);
    if (!data)
        return err_nomem(e);
    r.dst = data;
    TRY(fetch(s, &r, 1, e));
    memcpy(dst, data + (off - r.off), len);
    keep_piece(s, r.off, r.len, steal(&data));
    return 0;
}

/* ---- the source ---- */

static int object_read(struct source *base, uint64_t off, size_t len, void *dst,
                       struct err *e)
{
    struct object_source *s = object_of(base);
    const struct source_range r = {.off = off, .len = len, .dst = dst};

    if (len <= SMALL)
        return read_small(s, off, len, dst, e);
    return from_piece(s, off, len, dst) ? 0 : fetch(s, &r, 1, e);
}

static int object_read_many(struct source *base, const struct source_range *r, size_t n,
                            struct err *e)
{
    return fetch(object_of(base), r, n, e);
}

/* It waits for a server, always. */
static bool object_resident(struct source *base, uint64_t off, size_t len)
{
    (void)base;
    (void)off;
    (void)len;
    return false;
}

static void object_close(struct source *base)
{
    struct object_source *s = object_of(base);

    buf_release(&s->url);
    free(s->dir);
    free(s->what);
    free(s->etag);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static const struct source_ops object_ops = {
    .name = "object",
    .read = object_read,
    .read_many = object_read_many,
    .resident = object_resident,
    .close = object_close,
};

static int fill(struct object_source *s, const char *path, const struct object *object,
                struct err *e)
{
    const char *slash = strrchr(path, '/');
    const char *url = s->o->base.url;
    size_t len = strlen(url);

    s->dir = strndup(path, slash ? (size_t)(slash - path) : 0);
    s->modified = object->st.id.mtime_ns > 1 ? object->st.id.mtime_ns / 1000000000 : 0;
    if (s->o->base.file) /* then the URL names it already */
        s->what = strdup(url);
    else if (asprintf(&s->what, "%s%s%s", url, len && url[len - 1] == '/' ? "" : "/",
                      path) < 0)
        s->what = NULL;
    s->etag = object->etag ? strdup(object->etag) : NULL;
    if (!s->dir || !s->what || (object->etag && !s->etag))
        return err_nomem(e);
    return s->o->protocol->url(s->o->self, path, object->version, &s->url, e);
}

static int with_cache(struct objects *o, const char *path, const struct object *object,
                      struct source **src, struct err *e)
{
    const struct object_id id = {.store = o->base.identity,
                                 .path = path,
                                 .version = object->version ? object->version
                                            : object->etag  ? object->etag
                                                            : "",
                                 .size = object->st.id.size,
                                 .mtime_ns = object->st.id.mtime_ns};

    if (!o->options.cache)
        return 0;
    return o->options.cache(o->options.cache_user, steal(src), &id, src, e);
}

int object_source(struct objects *o, const char *path, const struct object *object,
                  struct source **out, struct err *e)
{
    struct object_source *s = calloc(1, sizeof *s);
    CLEANUP(source_putp) struct source *src = NULL;
    int rc;

    if (!s)
        return err_nomem(e);
    rc = source_init(&s->base, &object_ops, path, object->st.id.size, e);
    if (rc < 0) {
        free(s);
        return rc;
    }
    src = &s->base;
    s->base.remote = true;
    s->o = o;
    s->base.id = object->st.id;
    pthread_mutex_init(&s->lock, NULL);
    rc = fill(s, path, object, e);
    if (rc == 0)
        rc = with_cache(o, path, object, &src, e);
    if (rc == 0)
        *out = steal(&src);
    return rc;
}
