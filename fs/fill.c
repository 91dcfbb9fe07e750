/* SPDX-License-Identifier: MIT */
/* fs/fill.c - writes all that a reader reads into a file. */
#include "fs/fill.h"

#include <errno.h>
#include <string.h>

#include "base/fsutil.h"
#include "base/interrupt.h"
#include "base/pool.h"
#include "fs/fs.h"
#include "fs/read.h"
#include "remote/source.h"

enum {
    STEP = 1 << 20,   /* what one call of the kernel copies */
    WINDOW = 4 << 20, /* what a thread does before it looks whether it shall go on */
    MAX_PIECES = 1000,
};

static int stopped(const struct fill *f, struct err *e)
{
    return *f->stop || interrupt_asked() ? err_set(e, EINTR, "given up") : 0;
}

static int cannot_write(struct err *e)
{
    return err_set(e, errno, "write a copy: %s", strerror(errno));
}

static int write_buffer(int fd, const char *data, size_t len, uint64_t off,
                        struct err *e)
{
    while (len > 0) {
        ssize_t n = pwrite(fd, data, len, (off_t)off);

        if (n <= 0)
            return cannot_write(e);
        data += n;
        off += (uint64_t)n;
        len -= (size_t)n;
    }
    return 0;
}

static int write_pieces(int fd, struct iovec *iov, int count, uint64_t off,
                        struct err *e)
{
    while (count > 0) {
        ssize_t n = pwritev(fd, iov, count, (off_t)off);

        if (n <= 0)
            return cannot_write(e);
        off += (uint64_t)n;
        iov_advance(&iov, &count, (size_t)n);
    }
    return 0;
}

/* Straight from mapped shards: 1 when that was possible. */
static int copy_mapped(const struct fill *f, uint64_t off, size_t len, struct err *e)
{
    struct iovec iov[MAX_PIECES];
    struct reader_iov v = {.iov = iov, .max = MAX_PIECES};
    int rc = reader_map(f->reader, off, len, &v, e), written;
    struct err why = {0};

    if (rc != 1)
        return rc;
    written = write_pieces(f->fd, iov, v.count, off, &why);
    rc = 0;
    /* A shard that changed meanwhile is the reason of whatever went wrong. */
    for (unsigned i = 0; rc == 0 && i < v.nheld; i++)
        rc = source_check(v.held[i], e);
    reader_unmap(&v);
    if (rc == 0 && written < 0) {
        *e = why;
        rc = written;
    }
    return rc < 0 ? rc : 1;
}

static int copy_step(const struct fill *f, uint64_t off, size_t len, struct err *e)
{
    int rc = copy_mapped(f, off, len, e);
    void *buffer;

    if (rc != 0)
        return rc < 0 ? rc : 0;
    buffer = read_buffer(f->fs, len);
    rc = buffer ? reader_read(f->reader, off, len, buffer, e) : err_nomem(e);
    return rc < 0 ? rc : write_buffer(f->fd, buffer, len, off, e);
}

/* Window i from `filled` on. */
static int copy_window(void *user, size_t i, struct err *e)
{
    const struct fill *f = user;
    uint64_t off = f->filled + i * WINDOW, end = MIN(off + WINDOW, f->size);
    int rc = stopped(f, e);

    while (rc == 0 && off < end) {
        size_t len = (size_t)MIN(end - off, (uint64_t)STEP);

        rc = copy_step(f, off, len, e);
        off += len;
    }
    return rc;
}

int fill_run(struct fill *f, struct err *e)
{
    uint64_t batch = (uint64_t)MAX(pool_threads(f->fs->reading.pool), 1u) * WINDOW;
    int rc = 0;

    while (rc == 0 && f->filled < f->size) {
        uint64_t end = MIN(f->filled + batch, f->size);

        if (end < f->size)
            reader_will_need(f->reader, end, MIN(batch, f->size - end));
        rc = pool_each(f->fs->reading.pool,
                       (size_t)((end - f->filled + WINDOW - 1) / WINDOW), copy_window,
                       f, e);
        if (rc == 0)
            f->filled = end;
    }
    return rc;
}
