/* SPDX-License-Identifier: MIT */
/* fs/request.c - one request of the kernel on its way through our handlers. */
#include "fs/request.h"

#include <errno.h>
#include <fcntl.h>

#include "base/log.h"
#include "fs/asked.h"
#include "fs/queue.h"
#include "fs/node.h"
#include "fs/generation.h"

/* What programs ask for and live without: no fault of the source or ours. */
static bool is_ordinary(int code)
{
    switch (code) {
    case ENOENT:
    case ESTALE:
    case ENODATA:
    case ERANGE:
    case EINTR:
    case EROFS:
    case ENOTDIR:
    case EISDIR:
    case EOPNOTSUPP:
    case ENAMETOOLONG:
        return true;
    default:
        return false;
    }
}

bool request_writes_directly(const struct request *r, unsigned writers)
{
    return writers == 1 && r->fs->can_mix_direct &&
           (r->fi.flags & O_ACCMODE) == O_WRONLY;
}

bool request_is_synchronous(const struct request *r)
{
    return r->fi.flags & O_DSYNC; /* O_SYNC has that bit, too */
}

/* A name that is gone is just that; a shard that is gone is a fault of what is read. */
static int errno_for(const struct request *r, int code, const struct err *e)
{
    if (!e->code || r->on_disk || (e->code == ENOENT && !r->of_bytes))
        return -code;
    return err_for_reader(e);
}

/*
 * What the scan found may be another by now, or the index has it no more: the checkpoint is
 * looked at again before its next use, and the kernel, given ESTALE, comes back by the path
 * at once. Told the same a second time it would tell the program.
 */
static void look_again(const struct request *r)
{
    bool inside = ino_is_inside(r->ino);
    struct node *n = inside ? NULL : node_pin(r->fs, r->ino);
    struct generation *gen = inside ? generation_of_ino(r->fs, r->ino)
                             : n    ? node_generation(r->fs, n)
                                    : NULL;

    if (gen && !gen->stale) {
        scanner_suspect(r->fs->scanner, gen->path, gen->file);
        atomic_fetch_add(&gen->suspect, 1);
    }
    generation_unref(r->fs, gen, 1);
    if (n)
        node_unpin(r->fs, n);
}

void request_fail(const struct request *r, int code, const struct err *e)
{
    int snapshot = errno_for(r, code, e);

    /* Who mounted for writing wants to know why something cannot be written. */
    bool refused = fs_writable(r->fs) && code == -EROFS && e->code;

    /* What another user may not read is no fault of the mount. */
    bool denied = code == -EACCES && fuse_req_ctx(r->req)->uid != geteuid();

    /* Whoever ends the mount wants no answer. */
    bool ends = code == -ECANCELED;

    if (code == -ESTALE)
        look_again(r);
    if (ends || denied || (is_ordinary(-code) && is_ordinary(snapshot) && !refused)) {
        if (e->code)
            log_msg(LOG_FS, LOG_DEBUG, "%s", e->text);
    } else {
        counter_add(&r->fs->counters, COUNT_ERRORS, 1);
        if (e->code)
            last_error_report(&r->fs->last_error, e);
    }
    fuse_reply_err(r->req, snapshot);
}

void request_run(const struct request *r)
{
    struct request here = *r;
    struct err e = {0};
    struct interrupt *before;
    struct asked asked;
    int rc;

    asked_init(&asked, r->req);
    before = interrupt_set(&asked.base);
    rc = here.fn(&here, &e);
    interrupt_set(before);
    if (rc == FS_LATER)
        queue_add(r->fs->queue, r);
    else if (rc == FS_FILL)
        queue_add(r->fs->fills, r);
    else if (rc < 0)
        request_fail(&here, rc, &e);
}
