/* SPDX-License-Identifier: MIT */
/* save/intake_fds.c - descriptors of staged files, a bounded number of them, and their I/O. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "base/err.h"
#include "save/intake_priv.h"

void fds_init(struct fds *c)
{
    *c = (struct fds){0};
    pthread_mutex_init(&c->lock, NULL);
}

/*
 * A disk across a network may tell at close(2), and to nobody who opens the file later, that
 * bytes are lost.
 */
static void close_one(struct fds *c, int fd)
{
    if (close(fd) < 0 && errno != EINTR)
        atomic_store(&c->lost, errno);
}

void fds_release(struct fds *c)
{
    for (size_t i = 0; i < INTAKE_FDS; i++)
        if (c->slot[i].of)
            close_one(c, c->slot[i].fd);
    pthread_mutex_destroy(&c->lock);
}

/* With the lock: one that is free, or that was not used for longest; NULL: all are used. */
static struct staged_fd *find_slot(struct fds *c)
{
    struct staged_fd *best = NULL;

    for (size_t i = 0; i < INTAKE_FDS; i++) {
        struct staged_fd *x = &c->slot[i];

        if (!x->of)
            return x;
        if (x->users == 0 && (!best || x->used < best->used))
            best = x;
    }
    return best;
}

/* With the lock. */
static bool take_slot(struct fds *c, struct staged *s, struct fd_use *out)
{
    if (!s->slot)
        return false;
    s->slot->users++;
    s->slot->used = ++c->tick;
    *out = (struct fd_use){.slot = s->slot, .fd = s->slot->fd};
    return true;
}

/* With the lock: what was opened goes to a slot, or stays alone. *old is to be closed. */
static void keep(struct fds *c, struct staged *s, struct fd_use *use, int *old)
{
    struct staged_fd *x = s->slot ? NULL : find_slot(c);

    if (!x)
        return;
    if (x->of) {
        *old = x->fd;
        x->of->slot = NULL;
    }
    *x = (struct staged_fd){.of = s, .fd = use->fd, .users = 1, .used = ++c->tick};
    s->slot = x;
    use->slot = x;
}

int fds_get(struct fds *c, int dir, struct staged *s, struct fd_use *out, struct err *e)
{
    int old = -1;
    bool taken;

    pthread_mutex_lock(&c->lock);
    taken = take_slot(c, s, out);
    pthread_mutex_unlock(&c->lock);
    if (taken)
        return 0;
    *out = (struct fd_use){.fd = openat(dir, s->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW)};
    if (out->fd < 0)
        return err_set(e, errno, "%s: %s", s->path, strerror(errno));
    pthread_mutex_lock(&c->lock);
    keep(c, s, out, &old);
    pthread_mutex_unlock(&c->lock);
    if (old >= 0)
        close_one(c, old);
    return 0;
}

void fds_put(struct fds *c, struct fd_use *use)
{
    if (!use->slot) {
        close_one(c, use->fd);
        return;
    }
    pthread_mutex_lock(&c->lock);
    use->slot->users--;
    pthread_mutex_unlock(&c->lock);
}

void fds_drop(struct fds *c, struct staged *s)
{
    int fd = -1;

    pthread_mutex_lock(&c->lock);
    if (s->slot) {
        fd = s->slot->fd;
        *s->slot = (struct staged_fd){0};
        s->slot = NULL;
    }
    pthread_mutex_unlock(&c->lock);
    if (fd >= 0)
        close_one(c, fd);
}

/* ---- their bytes ---- */

/*
 * The disk begins with a block of a file as soon as its last byte is written, and not at the
 * fsync. A hint for each write would split blocks into more requests than they need.
 */
enum { EARLY = 4 << 20 };

static void begin_early(int fd, uint64_t at, uint64_t len)
{
    uint64_t from = at / EARLY * EARLY, to = (at + len) / EARLY * EARLY;

    if (to > from)
        (void)sync_file_range(fd, (off_t)from, (off_t)(to - from),
                              SYNC_FILE_RANGE_WRITE);
}

static int write_fd(int fd, const struct staged *s, const char *p, size_t len,
                    uint64_t at, struct err *e)
{
    while (len > 0) {
        ssize_t n = pwrite(fd, p, len, (off_t)at);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return err_set(e, n < 0 ? errno : EIO, "%s: %s", s->path,
                           n < 0 ? strerror(errno) : "nothing was written");
        p += n;
        at += (uint64_t)n;
        len -= (size_t)n;
    }
    return 0;
}

int staged_file_write(struct intake *k, struct staged *s, const void *data, size_t len,
                      uint64_t at, struct err *e)
{
    struct fd_use use;
    int ret = fds_get(&k->fds, k->spec.dir, s, &use, e);

    if (ret < 0)
        return ret;
    atomic_store(&s->dirty, true);
    ret = write_fd(use.fd, s, data, len, at, e);
    if (ret == 0)
        begin_early(use.fd, at, len);
    fds_put(&k->fds, &use);
    return ret;
}

int staged_file_read(struct intake *k, struct staged *s, void *dst, size_t len,
                     uint64_t at, struct err *e)
{
    struct fd_use use;
    char *p = dst;
    int ret = fds_get(&k->fds, k->spec.dir, s, &use, e);

    if (ret < 0)
        return ret;
    while (len > 0) {
        ssize_t n = pread(use.fd, p, len, (off_t)at);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            ret = err_set(e, errno, "%s: %s", s->path, strerror(errno));
        if (n <= 0)
            break;
        p += n;
        at += (uint64_t)n;
        len -= (size_t)n;
    }
    memset(p, 0, ret == 0 ? len : 0);
    fds_put(&k->fds, &use);
    return ret;
}
