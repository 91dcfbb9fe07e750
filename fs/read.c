/* SPDX-License-Identifier: MIT */
/* fs/read.c - answers read(2). */
#include "fs/read.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include "fs/handle.h"

enum {
    MAX_PIECES = 1000, /* libfuse adds its header, the kernel takes 1024 */
    /* One large page, which is quicker to fill and to reply from. */
    BUFFER_FIRST = 2 << 20,
    BUFFER_ALIGN = 2 << 20,
};

/* A reply buffer that its thread keeps. */
struct buffer {
    void *data;
    size_t size;
};

void read_buffer_free(void *buffer)
{
    struct buffer *b = buffer;

    free(b->data);
    free(b);
}

void *read_buffer(struct fs *fs, size_t size)
{
    struct buffer *b = pthread_getspecific(fs->buffers);

    if (!b) {
        b = calloc(1, sizeof *b);
        if (!b || pthread_setspecific(fs->buffers, b) != 0) {
            free(b);
            return NULL;
        }
    }
    if (b->size < size) {
        free(b->data);
        b->size = MAX(size, (size_t)BUFFER_FIRST);
        if (posix_memalign(&b->data, BUFFER_ALIGN, b->size) != 0) {
            b->data = NULL;
            b->size = 0;
        } else {
            madvise(b->data, b->size, MADV_HUGEPAGE);
        }
    }
    return b->data;
}

static void fetch_ahead(const struct request *r, struct handle *h, uint64_t off,
                        size_t len)
{
    bool remote = r->fs->store->remote;
    uint64_t from, step;

    if (h->side && !remote)
        return; /* the kernel does it */
    step = ahead_step(&h->ahead, remote, off, len, &from);
    if (step && h->side)
        side_will_need(h->side, from, step);
    else if (step)
        reader_will_need(h->reader, from, step);
}

/* Straight from mapped shards: 1 when that answered the request, 0 when it cannot be. */
static int reply_mapped(const struct request *r, struct handle *h, uint64_t off,
                        size_t len, struct err *e)
{
    struct iovec iov[MAX_PIECES];
    struct reader_iov v = {.iov = iov, .max = MAX_PIECES};
    int rc = reader_map(h->reader, off, len, &v, e);

    if (rc != 1)
        return rc;
    rc = fuse_reply_iov(r->req, iov, v.count);
    reader_unmap(&v);
    if (rc == 0) {
        counter_add(&r->fs->counters, COUNT_REPLIES_MAPPED, 1);
        counter_add(&r->fs->counters, COUNT_BYTES_READ, len);
    } else if (rc == -EFAULT) {
        /* The kernel met the end of a shard that was cut: the reader got EIO. */
        struct err cut = {0};

        counter_add(&r->fs->counters, COUNT_ERRORS, 1);
        err_set(&cut, EIO, "read %s, bytes %" PRIu64 "+%zu: a shard was cut meanwhile",
                h->name, off, len);
        last_error_report(&r->fs->last_error, &cut);
    }
    return 1;
}

static int reply_copied(const struct request *r, struct handle *h, uint64_t off,
                        size_t len, struct err *e)
{
    void *data = read_buffer(r->fs, len);
    int rc = data ? reader_read(h->reader, off, len, data, e) : err_nomem(e);

    if (rc < 0)
        return rc;
    fuse_reply_buf(r->req, data, len);
    counter_add(&r->fs->counters, COUNT_REPLIES_COPIED, 1);
    counter_add(&r->fs->counters, COUNT_BYTES_READ, len);
    return 0;
}

static int read_reader(const struct request *r, struct handle *h, struct err *e)
{
    uint64_t off = (uint64_t)r->off, size = reader_size(h->reader);
    size_t len = off < size ? MIN(r->size, size - off) : 0;
    int rc;

    if (len == 0) {
        fuse_reply_buf(r->req, NULL, 0);
        return 0;
    }
    fetch_ahead(r, h, off, len);
    rc = reply_mapped(r, h, off, len, e);
    if (rc == 0)
        rc = reply_copied(r, h, off, len, e);
    return rc < 0 ? err_wrap(e, "read %s, bytes %" PRIu64 "+%zu", h->name, off, len)
                  : 0;
}

static int read_side(const struct request *r, struct handle *h, struct err *e)
{
    void *data = read_buffer(r->fs, r->size + 1);
    size_t got;
    int rc;

    fetch_ahead(r, h, (uint64_t)r->off, r->size);
    rc = data ? side_read(h->side, (uint64_t)r->off, r->size, data, &got, e)
              : err_nomem(e);

    if (rc < 0)
        return err_wrap(e, "read bytes %" PRIu64 "+%zu", (uint64_t)r->off, r->size);
    fuse_reply_buf(r->req, data, got);
    counter_add(&r->fs->counters, COUNT_BYTES_READ, got);
    return 0;
}

static int read_text(const struct request *r, const struct handle *h)
{
    uint64_t off = (uint64_t)r->off;
    size_t len = off < h->text.len ? MIN(r->size, h->text.len - (size_t)off) : 0;

    fuse_reply_buf(r->req, len ? h->text.data + off : NULL, len);
    return 0;
}

int read_run(struct request *r, struct err *e)
{
    struct handle *h = handle_of(&r->fi);
    int rc;

    if (r->off < 0)
        return -EINVAL;
    counter_add(&r->fs->counters, COUNT_READS, 1);
    opened_get(&h->opened);
    /* The kernel fills a page of a mapping for nobody's read(2), which has an owner. */
    if (h->reader && r->fi.lock_owner == 0)
        mapped_note(&r->fs->mapped, r->ino);
    if (h->reader)
        rc = read_reader(r, h, e);
    else
        rc = h->side ? read_side(r, h, e) : read_text(r, h);
    opened_put(r->fs, &h->opened);
    return rc;
}
