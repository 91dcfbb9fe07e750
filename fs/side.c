/* SPDX-License-Identifier: MIT */
/* fs/side.c - files of the source that the mount shows byte for byte. */
#include "fs/side.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/err.h"
#include "remote/store.h"

struct side {
    struct store *store; /* NULL: the source never changes */
    char *path;
    uint64_t dev, inode;
    pthread_mutex_t lock;
    struct source *src; /* guarded by lock: opened anew when the file grew or shrank */
};

/* The file as it is now, if the name still leads to it. */
static int open_same(const struct side *s, struct source **out, struct err *e)
{
    int rc = s->store->ops->open(s->store, s->path, out, e);

    if (rc == -ENOENT)
        return err_set(e, ESTALE, "%s: is not there any more", s->path);
    if (rc < 0)
        return rc;
    if ((*out)->id.dev == s->dev && (*out)->id.ino == s->inode)
        return 0;
    source_putp(out);
    return err_set(e, ESTALE, "%s: is another file by now", s->path);
}

static int side_new(struct store *store, const char *path, struct side **out,
                    struct err *e)
{
    struct side *s = calloc(1, sizeof *s);

    if (!s)
        return err_nomem(e);
    s->store = store;
    s->path = strdup(path);
    pthread_mutex_init(&s->lock, NULL);
    *out = s;
    if (s->path)
        return 0;
    side_close(s);
    return err_nomem(e);
}

int side_open(struct store *store, const char *path, uint64_t dev, uint64_t inode,
              struct side **out, struct err *e)
{
    struct side *s;
    int rc = side_new(store, path, &s, e);

    if (rc < 0)
        return rc;
    s->dev = dev;
    s->inode = inode;
    rc = open_same(s, &s->src, e);
    if (rc < 0)
        side_close(s);
    else
        *out = s;
    return rc;
}

int side_open_source(struct source *src, struct side **out, struct err *e)
{
    int rc = side_new(NULL, src->name, out, e);

    if (rc < 0)
        source_put(src);
    else
        (*out)->src = src;
    return rc;
}

void side_close(struct side *s)
{
    if (!s)
        return;
    source_put(s->src);
    pthread_mutex_destroy(&s->lock);
    free(s->path);
    free(s);
}

static struct source *current(struct side *s)
{
    struct source *src;

    pthread_mutex_lock(&s->lock);
    src = source_get(s->src);
    pthread_mutex_unlock(&s->lock);
    return src;
}

/*
 * The file may have another size by now. True: there is something new to read from. An
 * object does not grow: what has its name now is another one, not for this handle.
 */
static bool look_again(struct side *s)
{
    struct source *fresh = NULL, *old;
    struct err e = {0};

    if (!s->store || store_is_remote(s->store) || open_same(s, &fresh, &e) < 0)
        return false;
    pthread_mutex_lock(&s->lock);
    old = s->src;
    s->src = fresh;
    pthread_mutex_unlock(&s->lock);
    source_put(old);
    return true;
}

int side_fd(struct side *s)
{
    CLEANUP(source_putp) struct source *src = current(s);

    return s->store ? source_fd(src) : -1;
}

static int read_some(struct side *s, uint64_t off, size_t len, void *dst, size_t *got,
                     struct err *e)
{
    CLEANUP(source_putp) struct source *src = current(s);

    *got = off < src->size ? MIN(len, src->size - off) : 0;
    return *got ? source_read(src, off, *got, dst, e) : 0;
}

void side_will_need(struct side *s, uint64_t off, uint64_t len)
{
    CLEANUP(source_putp) struct source *src = current(s);

    source_will_need(src, off, len);
}

int side_read(struct side *s, uint64_t off, size_t len, void *dst, size_t *got,
              struct err *e)
{
    struct err first = {0};
    int rc = read_some(s, off, len, dst, got, &first);

    if (rc == 0 && *got == len)
        return 0;
    if (look_again(s))
        return read_some(s, off, len, dst, got, e);
    *e = first;
    return rc;
}
