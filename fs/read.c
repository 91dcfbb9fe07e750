/* SPDX-License-Identifier: MIT */
/* fs/read.c - answers read(2). */
#include "fs/read.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include "base/guard.h"
#include "fs/handle.h"
#include "remote/source.h"

enum {
    /* libfuse adds its header, the kernel takes 1024. */
    MAX_PIECES = READER_PIECES,
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

static int was_cut(const struct handle *h, uint64_t off, size_t len, struct err *e)
{
    return err_set(e, EIO, "read %s, bytes %" PRIu64 "+%zu: a shard was cut meanwhile",
                   h->name, off, len);
}

/* Straight to who asked. */
static void reply_pieces(const struct request *r, const struct handle *h,
                         const struct reader_iov *v, uint64_t off, size_t len)
{
    if (fuse_reply_iov(r->req, v->iov, v->count) == -EFAULT) {
        /* The kernel met the end of a shard that was cut: the reader got EIO. */
        struct err cut = {0};

        counter_add(&r->fs->counters, COUNT_ERRORS, 1);
        was_cut(h, off, len, &cut);
        last_error_report(&r->fs->last_error, &cut);
        return;
    }
    counter_add(&r->fs->counters, COUNT_REPLIES_MAPPED, 1);
    counter_add(&r->fs->counters, COUNT_BYTES_READ, len);
}

/*
 * Before a reply. Who has several reads of a file at a time, as the kernel has for who maps
 * it, has them gathered side by side already: one more may be the last one's, which is
 * through but for this count.
 */
static void gather_next(struct handle *h, uint64_t off, size_t len, bool ask)
{
    if (h->early)
        early_step(h->early, off, len, ask && atomic_load(&h->reads) <= 2);
}

/* Rows that are handed over, and would rather have been gathered before. */
static bool pieces_are_short(const struct reader_iov *v, size_t len)
{
    return v->count > 2 && len / (size_t)v->count < READER_PIECE_EARLY;
}

/* From mapped shards: 1 when that answered the request, 0 when it cannot be. */
static int reply_mapped(const struct request *r, struct handle *h, uint64_t off,
                        size_t len, struct err *e)
{
    struct iovec iov[MAX_PIECES];
    struct reader_iov v = {.iov = iov, .max = MAX_PIECES};
    int rc = reader_map(h->reader, off, len, &v, e);

    if (rc != 1)
        return rc;
    gather_next(h, off, len, pieces_are_short(&v, len));
    reply_pieces(r, h, &v, off, len);
    reader_unmap(&v);
    return 1;
}

/* From what was gathered already: 1 when that answered the request, 0: it is not there. */
static int reply_early(const struct request *r, struct handle *h, uint64_t off,
                       size_t len, struct err *e)
{
    struct early_pieces p;
    int rc;

    if (!h->early || !early_take(h->early, off, len, &p))
        return 0;
    rc = reader_unchanged(h->reader, off, len, e);
    if (rc == 0) {
        rc = 1;
        gather_next(h, off, len, true);
        counter_add(&r->fs->counters, COUNT_REPLIES_EARLY, 1); /* who has it may look */
        fuse_reply_iov(r->req, p.iov, p.count);
        counter_add(&r->fs->counters, COUNT_REPLIES_COPIED, 1);
        counter_add(&r->fs->counters, COUNT_BYTES_READ, len);
    }
    early_put(h->early, &p);
    return rc;
}

static int reply_copied(const struct request *r, struct handle *h, uint64_t off,
                        size_t len, struct err *e)
{
    void *data = read_buffer(r->fs, len);
    int rc = data ? reader_read(h->reader, off, len, data, e) : err_nomem(e);

    if (rc < 0)
        return rc;
    gather_next(h, off, len, true);
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
    rc = reply_early(r, h, off, len, e);
    if (rc == 0)
        rc = reply_mapped(r, h, off, len, e);
    if (rc == 0)
        rc = reply_copied(r, h, off, len, e);
    if (rc < 0)
        return err_wrap(e, "read %s, bytes %" PRIu64 "+%zu", h->name, off, len);
    return 0;
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

/* One more read, once for each. */
static void note_read(const struct request *r, struct handle *h)
{
    counter_add(&r->fs->counters, COUNT_READS, 1);
    if (h->reader)
        habit_read(&r->fs->habits, r->ino, &h->habit, r->fi.lock_owner != 0,
                   (uint64_t)r->off, r->size);
}

int read_run(struct request *r, struct err *e)
{
    struct handle *h = handle_of(&r->fi);
    int rc;

    if (r->off < 0)
        return -EINVAL;
    r->of_bytes = true;
    opened_get(&h->opened);
    early_enter(&r->fs->early, &h->reads, r->size);
    note_read(r, h);
    if (h->reader)
        rc = read_reader(r, h, e);
    else
        rc = h->side ? read_side(r, h, e) : read_text(r, h);
    early_leave(&r->fs->early, &h->reads, r->size);
    opened_put(r->fs, &h->opened);
    return rc;
}
