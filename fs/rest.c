/* SPDX-License-Identifier: MIT */
/* fs/rest.c - a mount that has ended and still saves: the next one of its source waits. */
#include "fs/rest.h"

#include <errno.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "base/err.h"
#include "base/log.h"
#include "fs/fs.h"
#include "fs/stage.h"

enum {
    LOOK_NS = 50000000,
    LOOKS = 1200,     /* a minute */
    QUIET_LOOKS = 20, /* what takes longer than a second is told */
    TRIES = 50,       /* who begins has the lock for a moment only */
    TRY_NS = 1000000,
};

static void wait_ns(long ns)
{
    const struct timespec t = {.tv_nsec = ns};

    nanosleep(&t, NULL);
}

/* Where it cannot be locked (a network disk) nobody waits. */
static bool is_saving(int fd)
{
    if (flock(fd, LOCK_EX | LOCK_NB) < 0)
        return errno == EWOULDBLOCK;
    flock(fd, LOCK_UN);
    return false;
}

/* Not by its path, where the mount itself may lie; and it is not held while nothing is saved. */
static int source_of(const struct fs *fs)
{
    struct err ignored = {0};
    const char *name;

    return fs->stages && !fs->store->remote
               ? stage_parent(fs, "source", &name, &ignored)
               : -1;
}

void rest_await(const struct fs *fs)
{
    CLEANUP_FD int fd = source_of(fs);

    if (fd < 0 || !is_saving(fd))
        return;
    for (int i = 0; i < LOOKS; i++) {
        if (i == QUIET_LOOKS)
            log_msg(LOG_FS, LOG_WARN,
                    "%s: a mount of it that was unmounted still saves what was written "
                    "there; this one waits",
                    fs->store->url);
        wait_ns(LOOK_NS);
        if (!is_saving(fd))
            return;
    }
    log_msg(LOG_FS, LOG_WARN, "%s: it still saves: what it saves shows when it is done",
            fs->store->url);
}

void rest_begin(struct rest *r, const struct fs *fs)
{
    int fd = atomic_exchange(&r->begun, true) ? -1 : source_of(fs);

    if (fd < 0)
        return;
    r->fd = fd;
    for (int i = 0; i < TRIES && flock(fd, LOCK_SH | LOCK_NB) < 0; i++)
        wait_ns(TRY_NS);
}

void rest_end(struct rest *r)
{
    if (r->fd >= 0)
        close(r->fd);
    r->fd = -1;
}
