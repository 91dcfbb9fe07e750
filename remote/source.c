/* SPDX-License-Identifier: MIT */
/* remote/source.c - what all kinds of sources share, and windows onto a source. */
#include "remote/source.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"

int source_init(struct source *s, const struct source_ops *ops, const char *name,
                uint64_t size, struct err *e)
{
    *s = (struct source){.ops = ops, .size = size, .name = strdup(name)};
    atomic_init(&s->refs, 1);
    return s->name ? 0 : err_nomem(e);
}

struct source *source_get(struct source *s)
{
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}

void source_put(struct source *s)
{
    char *name;

    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1)
        return;
    name = s->name;
    s->ops->close(s);
    free(name);
}

void source_putp(struct source **s)
{
    source_put(*s);
    *s = NULL;
}

static atomic_uint troubles;

unsigned source_troubles(void)
{
    return atomic_load(&troubles);
}

bool source_is_trouble(int rc)
{
    static const int passing[] = {EIO,       ENOMEM, EMFILE,    ENFILE,    EAGAIN,
                                  ETIMEDOUT, EINTR,  EREMOTEIO, ECANCELED, EPROTO};

    for (size_t i = 0; i < ARRAY_SIZE(passing); i++)
        if (rc == -passing[i])
            return true;
    return false;
}

void source_note_trouble(int rc)
{
    if (source_is_trouble(rc))
        atomic_fetch_add(&troubles, 1);
}

static int check_range(const struct source *s, uint64_t off, uint64_t len,
                       struct err *e)
{
    if (!range_outside(off, len, s->size))
        return 0;
    return err_set(e, EBADMSG,
                   "%s: bytes %" PRIu64 "+%" PRIu64 " lie outside its %" PRIu64
                   " bytes",
                   s->name, off, len, s->size);
}

int source_read(struct source *s, uint64_t off, size_t len, void *dst, struct err *e)
{
    int rc = check_range(s, off, len, e);

    if (rc < 0 || len == 0)
        return rc;
    rc = s->ops->read(s, off, len, dst, e);
    source_note_trouble(rc);
    return rc;
}

int source_read_many(struct source *s, const struct source_range *r, size_t n,
                     struct err *e)
{
    int ret;

    for (size_t i = 0; i < n; i++) {
        int rc = check_range(s, r[i].off, r[i].len, e);

        if (rc < 0)
            return rc;
    }
    if (s->ops->read_many) {
        ret = s->ops->read_many(s, r, n, e);
        source_note_trouble(ret);
        return ret;
    }
    for (size_t i = 0; i < n; i++)
        TRY(source_read(s, r[i].off, r[i].len, r[i].dst, e));
    return 0;
}

const void *source_map(struct source *s)
{
    return s->ops->map ? s->ops->map(s) : NULL;
}

bool source_resident(struct source *s, uint64_t off, size_t len)
{
    if (range_outside(off, len, s->size))
        return false;
    return len == 0 || !s->ops->resident || s->ops->resident(s, off, len);
}

void source_will_need(struct source *s, uint64_t off, uint64_t len)
{
    /* A hint may be clumsy: it is cut to what is there. */
    if (!s->ops->will_need || off >= s->size || len == 0)
        return;
    s->ops->will_need(s, off, MIN(len, s->size - off));
}

int source_check(struct source *s, struct err *e)
{
    return s->ops->check ? s->ops->check(s, e) : 0;
}

int source_fd(struct source *s)
{
    return s->ops->fd ? s->ops->fd(s) : -1;
}

int source_stale(const char *name, const struct file_id *was, const struct file_id *now,
                 struct err *e)
{
    if (was->dev != now->dev || was->ino != now->ino)
        return err_set(e, ESTALE,
                       "%s: another file has this name now (inode %" PRIu64
                       ", was %" PRIu64 ")",
                       name, now->ino, was->ino);
    if (was->size != now->size)
        return err_set(e, ESTALE,
                       "%s: the file changed: size %" PRIu64 ", was %" PRIu64, name,
                       now->size, was->size);
    if (was->mtime_ns != now->mtime_ns)
        return err_set(e, ESTALE,
                       "%s: the file changed: mtime %" PRId64 " ns, was %" PRId64, name,
                       now->mtime_ns, was->mtime_ns);
    return err_set(e, ESTALE,
                   "%s: the file changed: ctime %" PRId64 " ns, was %" PRId64, name,
                   now->ctime_ns, was->ctime_ns);
}

struct window {
    struct source base;
    struct source *inner;
    uint64_t off;
};

static struct window *window_of(struct source *s)
{
    return container_of(s, struct window, base);
}

static int window_read(struct source *s, uint64_t off, size_t len, void *dst,
                       struct err *e)
{
    return source_read(window_of(s)->inner, window_of(s)->off + off, len, dst, e);
}

static int window_read_many(struct source *s, const struct source_range *r, size_t n,
                            struct err *e)
{
    CLEANUP_FREE struct source_range *moved = calloc(n ? n : 1, sizeof *moved);

    if (!moved)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++) {
        moved[i] = r[i];
        moved[i].off += window_of(s)->off;
    }
    return source_read_many(window_of(s)->inner, moved, n, e);
}

static const void *window_map(struct source *s)
{
    const char *map = source_map(window_of(s)->inner);

    return map ? map + window_of(s)->off : NULL;
}

static bool window_resident(struct source *s, uint64_t off, size_t len)
{
    return source_resident(window_of(s)->inner, window_of(s)->off + off, len);
}

static void window_will_need(struct source *s, uint64_t off, uint64_t len)
{
    source_will_need(window_of(s)->inner, window_of(s)->off + off, len);
}

static int window_check(struct source *s, struct err *e)
{
    return source_check(window_of(s)->inner, e);
}

static void window_close(struct source *s)
{
    source_put(window_of(s)->inner);
    free(window_of(s));
}

static const struct source_ops window_ops = {
    .name = "window",
    .read = window_read,
    .read_many = window_read_many,
    .map = window_map,
    .resident = window_resident,
    .will_need = window_will_need,
    .check = window_check,
    .close = window_close,
};

int source_window(struct source *inner, uint64_t off, uint64_t len, struct source **out,
                  struct err *e)
{
    CLEANUP_FREE struct window *w = calloc(1, sizeof *w);
    CLEANUP_FREE char *name = NULL;
    int rc = check_range(inner, off, len, e);

    if (rc < 0)
        return rc;
    /* The name tells where the window begins: messages count bytes from there. */
    if (!w || asprintf(&name, "%s[%" PRIu64 "+%" PRIu64 "]", inner->name, off, len) < 0)
        return err_nomem(e);
    TRY(source_init(&w->base, &window_ops, name, len, e));
    w->base.id = inner->id;
    w->base.remote = inner->remote;
    w->base.file_mapped = inner->file_mapped;
    w->inner = source_get(inner);
    w->off = off;
    *out = &steal(&w)->base;
    return 0;
}
