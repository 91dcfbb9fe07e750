/* SPDX-License-Identifier: MIT */
/* fs/bucket_file.c - open files of an object store in a mount for writing. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/fsutil.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "fs/bucket.h"
#include "fs/lookup.h"
#include "fs/read.h"
#include "remote/bucket.h"
#include "save/upload_file.h"

enum { FETCH_SIZE = 32 << 20 };

struct bucket_file {
    struct opened opened;
    struct bucket_node *node; /* a reference */
    bool writes;
    bool closed; /* close(2) was called, and nothing written since; the node's lock */
    pthread_mutex_t lock;
    struct source *object; /* guarded by lock: what is read while there is no spool */
};

static struct bucket_file *file_of(const struct fuse_file_info *fi)
{
    return container_of((struct opened *)(uintptr_t)fi->fh, struct bucket_file, opened);
}

/* ---- the spool; with the node's lock ---- */

static int make_spool(struct fs *fs, struct err *e)
{
    const char *dir = fs->cache_dir ? fs->cache_dir : getenv("TMPDIR");
    int fd = unnamed_file(dir && dir[0] ? dir : "/tmp");

    return fd < 0 ? err_set(e, -fd, "make a file for what is written in %s: %s",
                            dir ? dir : "/tmp", strerror(-fd))
                  : fd;
}

static int copy_object(struct source *from, int to, struct err *e)
{
    CLEANUP_FREE char *data = malloc(FETCH_SIZE);
    int rc = data ? 0 : err_nomem(e);

    for (uint64_t at = 0; rc == 0 && at < from->size;) {
        size_t len = (size_t)MIN(from->size - at, (uint64_t)FETCH_SIZE);

        rc = source_read(from, at, len, data, e);
        if (rc == 0 && pwrite(to, data, len, (off_t)at) != (ssize_t)len)
            rc = err_set(e, errno ? errno : ENOSPC, "keep %s while it is changed: %s",
                         from->name, strerror(errno ? errno : ENOSPC));
        at += len;
    }
    return rc;
}

/* As the store has it now, whatever was listed. */
static int open_object(struct fs *fs, struct bucket_node *n, bool anew,
                       struct source **out, struct err *e)
{
    char path[PATH_MAX];
    bool gone;

    bucket_node_path(fs, n, path, &gone);
    if (gone)
        return err_set(e, ESTALE, "%s: it was removed", path);
    if (anew)
        store_forget(fs->store, path);
    return fs->store->ops->open(fs->store, path, out, e);
}

int bucket_fetch(struct fs *fs, struct bucket_node *n, struct err *e)
{
    CLEANUP(source_putp) struct source *object = NULL;
    CLEANUP_FD int fd = -1;
    int rc;

    if (n->spool >= 0)
        return 0;
    rc = open_object(fs, n, true, &object, e);
    if (rc == 0)
        rc = fd = make_spool(fs, e);
    if (rc >= 0)
        rc = copy_object(object, fd, e);
    if (rc < 0)
        return rc;
    n->spool = fd;
    fd = -1;
    return 0;
}

/* Empty, whatever the store has. */
static int begin_anew(struct fs *fs, struct bucket_node *n, struct err *e)
{
    if (n->spool < 0) {
        int fd = make_spool(fs, e);

        if (fd < 0)
            return fd;
        n->spool = fd;
    } else if (ftruncate(n->spool, 0) < 0) {
        return err_set(e, errno, "truncate: %s", strerror(errno));
    }
    n->dirty = true;
    n->failed = false;
    return 0;
}

int bucket_key(struct fs *fs, const char *path, struct buf *out, struct err *e)
{
    buf_addf(out, "%s%s%s", fs->bucket->prefix, fs->bucket->prefix[0] ? "/" : "", path);
    return buf_failed(out) ? err_nomem(e) : 0;
}

/* The directories that it lies in are what its name says. */
static void unmake_above(struct fs *fs, const char *path)
{
    char dir[PATH_MAX];
    char *slash;

    snprintf(dir, sizeof dir, "%s", path);
    while ((slash = strrchr(dir, '/'))) {
        *slash = '\0';
        bucket_unmake_dir(fs, dir);
    }
}

/*
 * Whoever closes a file waits until it is safe, also when a signal ends the program: what it
 * wrote would be there on a disk.
 */
int bucket_send(struct fs *fs, struct bucket_node *n, const char *path, struct err *e)
{
    CLEANUP(buf_release) struct buf key = {0};
    struct interrupt *before;
    struct stat st;
    int rc = bucket_key(fs, path, &key, e);

    if (rc == 0 && fstat(n->spool, &st) < 0)
        rc = err_set(e, errno, "%s: %s", path, strerror(errno));
    if (rc < 0)
        return rc;
    before = interrupt_set(NULL);
    rc = upload_file(fs->bucket->bucket, key.data, n->spool, (uint64_t)st.st_size,
                     fs->bucket->pool, e);
    interrupt_set(before);
    n->failed = rc < 0;
    bucket_changed(fs, path); /* a request that failed may have been done */
    if (rc == 0) {
        n->dirty = false;
        unmake_above(fs, path);
    }
    return rc;
}

/* To its own path, unless it was removed. */
static int send_if_dirty(struct fs *fs, struct bucket_node *n, struct err *e)
{
    char path[PATH_MAX];
    bool gone;

    if (!n->dirty)
        return 0;
    bucket_node_path(fs, n, path, &gone);
    return gone ? 0 : bucket_send(fs, n, path, e);
}

/* ---- handles ---- */

static void set_closed(struct bucket_file *f, bool closed)
{
    if (!f->writes || f->closed == closed)
        return;
    f->closed = closed;
    if (closed)
        f->node->writing--;
    else
        f->node->writing++;
}

void bucket_let_go(struct fs *fs, struct bucket_node *n)
{
    int fd = n->spool;

    if (--n->opens > 0 || fd < 0)
        return;
    pthread_mutex_lock(&fs->bucket->lock); /* somebody may look at its size */
    n->spool = -1;
    pthread_mutex_unlock(&fs->bucket->lock);
    close(fd);
    n->dirty = n->failed = false;
}

/* Pages of a mapping come after close(2), whose program does not hear of errors any more. */
static void file_free(struct fs *fs, struct opened *o)
{
    struct bucket_file *f = container_of(o, struct bucket_file, opened);
    struct bucket_node *n = f->node;
    struct err e = {0};

    pthread_mutex_lock(&n->lock);
    set_closed(f, true);
    if (n->writing == 0 && !n->failed && send_if_dirty(fs, n, &e) < 0)
        last_error_report(&fs->last_error, &e);
    bucket_let_go(fs, n);
    pthread_mutex_unlock(&n->lock);
    bucket_unpin(fs, n);
    source_put(f->object);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

/* With the node's lock; takes over the reference to it, unless it fails. */
static int file_new(struct request *r, struct bucket_node *n, struct bucket_file **out,
                    struct err *e)
{
    struct bucket_file *f = calloc(1, sizeof *f);

    if (!f)
        return err_nomem(e);
    pthread_mutex_init(&f->lock, NULL);
    f->opened.free = file_free;
    f->opened.kind = OPENED_FILE;
    f->node = n;
    f->writes = (r->fi.flags & O_ACCMODE) != O_RDONLY || (r->fi.flags & O_TRUNC);
    f->closed = true;
    set_closed(f, false);
    opened_add(&r->fs->opened, &f->opened);
    r->fi.fh = (uintptr_t)&f->opened;
    r->fi.noflush = !f->writes;
    *out = f;
    return 0;
}

/* `anew`: whatever the store has is replaced. Takes over the reference in any case. */
static int open_node(struct request *r, struct bucket_node *n, bool anew,
                     struct bucket_file **out, struct err *e)
{
    struct source *object = NULL;
    bool writes = (r->fi.flags & O_ACCMODE) != O_RDONLY;
    int rc = 0;

    pthread_mutex_lock(&n->lock);
    n->opens++; /* the handle's */
    if (anew)
        rc = begin_anew(r->fs, n, e);
    else if (n->spool < 0 && !writes)
        rc = open_object(r->fs, n, false, &object, e);
    if (rc == 0)
        rc = file_new(r, n, out, e);
    if (rc == 0)
        (*out)->object = object;
    else
        source_put(object);
    if (rc < 0)
        bucket_let_go(r->fs, n);
    pthread_mutex_unlock(&n->lock);
    if (rc < 0)
        bucket_unpin(r->fs, n);
    else
        counter_add(&r->fs->counters, COUNT_OPENS, 1);
    return rc;
}

int bucket_open_run(struct request *r, struct err *e)
{
    struct bucket_node *n = bucket_pin(r->fs, r->ino);
    struct bucket_file *f;
    int rc;

    if (!n)
        return -ESTALE;
    if (S_ISDIR(n->type)) {
        bucket_unpin(r->fs, n);
        return -EISDIR;
    }
    rc = open_node(r, n, r->fi.flags & O_TRUNC, &f, e);
    if (rc == 0 && fuse_reply_open(r->req, &r->fi) < 0)
        opened_end(r->fs, &f->opened);
    return rc;
}

int bucket_open_new(struct request *r, const char *path, struct err *e)
{
    struct bucket_node *n;
    struct bucket_file *f;
    int rc = bucket_intern(r->fs, path, S_IFREG, &n, e);

    if (rc == 0)
        rc = open_node(r, n, true, &f, e);
    if (rc < 0)
        return rc;
    r->fi.direct_io = true; /* the kernel has pages of the view there */
    if (fuse_reply_open(r->req, &r->fi) < 0)
        opened_end(r->fs, &f->opened);
    return 0;
}

/* Does the name have to be new, or is it? 1: a new file; 0: there is one. */
static int is_new(struct request *r, const char *path, struct err *e)
{
    struct stat st;
    int rc = bucket_stat(r->fs, path, &st, e);

    if (rc == -ENOENT) {
        *e = (struct err){0};
        return 1;
    }
    if (rc == 0 && S_ISDIR(st.st_mode))
        return -EISDIR;
    if (rc == 0 && (r->fi.flags & O_EXCL))
        return -EEXIST;
    return rc;
}

/* With the lock of names: of two that make one name the second one opens it. */
static int create_locked(struct request *r, const char *path,
                         struct fuse_entry_param *entry, struct bucket_file **out,
                         struct err *e)
{
    struct bucket_node *n;
    int fresh = is_new(r, path, e), rc = MIN(fresh, 0);

    if (rc == 0)
        rc = bucket_intern(r->fs, path, S_IFREG, &n, e);
    if (rc == 0)
        rc = open_node(r, n, fresh || (r->fi.flags & O_TRUNC), out, e);
    if (rc < 0)
        return rc;
    entry->ino = n->ino;
    entry->generation = 1;
    rc = bucket_node_stat(r->fs, n, &entry->attr, e);
    if (rc == 0)
        bucket_pin(r->fs, n->ino); /* the kernel's */
    else
        opened_end(r->fs, &(*out)->opened);
    return rc;
}

int bucket_create_file(struct request *r, const char *path, struct err *e)
{
    struct fuse_entry_param entry = {0};
    struct bucket_file *f;
    int rc;

    pthread_mutex_lock(&r->fs->bucket->names);
    rc = create_locked(r, path, &entry, &f, e);
    pthread_mutex_unlock(&r->fs->bucket->names);
    if (rc == 0 && fuse_reply_create(r->req, &entry, &r->fi) < 0) {
        opened_end(r->fs, &f->opened);
        bucket_node_forget(r->fs, entry.ino, 1);
    }
    return rc;
}

/* ---- bytes ---- */

/* What the handle reads where nothing was written; one reference. */
static int object_of(struct fs *fs, struct bucket_file *f, struct source **out,
                     struct err *e)
{
    int rc = 0;

    pthread_mutex_lock(&f->lock);
    if (!f->object)
        rc = open_object(fs, f->node, false, &f->object, e);
    if (rc == 0)
        *out = source_get(f->object);
    pthread_mutex_unlock(&f->lock);
    return rc;
}

static int read_object(struct request *r, struct bucket_file *f, void *data,
                       size_t *got, struct err *e)
{
    CLEANUP(source_putp) struct source *object = NULL;
    uint64_t off = (uint64_t)r->off;
    int rc = object_of(r->fs, f, &object, e);

    if (rc < 0 || !object)
        return rc;
    *got = off < object->size ? (size_t)MIN(object->size - off, (uint64_t)r->size) : 0;
    return *got ? source_read(object, off, *got, data, e) : 0;
}

static int read_spool(const struct request *r, int fd, void *data, size_t *got,
                      struct err *e)
{
    while (*got < r->size) {
        ssize_t n =
            pread(fd, (char *)data + *got, r->size - *got, r->off + (off_t)*got);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_set(e, errno, "read what was written: %s", strerror(errno));
        if (n == 0)
            break;
        *got += (size_t)n;
    }
    return 0;
}

int bucket_read_run(struct request *r, struct err *e)
{
    struct bucket_file *f = file_of(&r->fi);
    void *data = read_buffer(r->fs, r->size + 1);
    int fd = f->node->spool, rc;
    size_t got = 0;

    if (!data)
        return err_nomem(e);
    rc = fd >= 0 ? read_spool(r, fd, data, &got, e) : read_object(r, f, data, &got, e);
    if (rc < 0)
        return rc;
    fuse_reply_buf(r->req, data, got);
    counter_add(&r->fs->counters, COUNT_BYTES_READ, got);
    return 0;
}

/* With the node's lock: bytes of it are another now. */
static void touched(struct bucket_file *f)
{
    f->node->dirty = true;
    f->node->failed = false;
    set_closed(f, false);
}

static int write_locked(struct request *r, struct bucket_file *f, const char *data,
                        size_t *done, struct err *e)
{
    struct bucket_node *n = f->node;
    bool append = (r->fi.flags & O_APPEND) && !r->fi.writepage;
    struct stat st = {0};
    int rc = bucket_fetch(r->fs, n, e);

    if (rc == 0 && append && fstat(n->spool, &st) < 0)
        rc = err_set(e, errno, "append: %s", strerror(errno));
    if (rc < 0)
        return rc;
    touched(f);
    while (*done < r->size) {
        ssize_t put = pwrite(n->spool, data + *done, r->size - *done,
                             (append ? st.st_size : r->off) + (off_t)*done);

        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0 && *done == 0)
            return err_set(e, errno, "keep what is written: %s", strerror(errno));
        if (put <= 0)
            break;
        *done += (size_t)put;
    }
    return 0;
}

int bucket_write(struct request *r, const char *data, struct err *e)
{
    struct bucket_file *f = file_of(&r->fi);
    size_t done = 0;
    int rc;

    pthread_mutex_lock(&f->node->lock);
    rc = write_locked(r, f, data, &done, e);
    pthread_mutex_unlock(&f->node->lock);
    if (rc == 0)
        fuse_reply_write(r->req, done);
    return rc;
}

int bucket_fallocate(struct request *r, off_t len, struct err *e)
{
    struct bucket_file *f = file_of(&r->fi);
    struct bucket_node *n = f->node;
    int rc;

    pthread_mutex_lock(&n->lock);
    rc = bucket_fetch(r->fs, n, e);
    if (rc == 0 && fallocate(n->spool, (int)r->flags, r->off, len) < 0)
        rc = err_set(e, errno, "fallocate: %s", strerror(errno));
    else if (rc == 0)
        touched(f);
    pthread_mutex_unlock(&n->lock);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

static int resize(struct fs *fs, struct bucket_node *n, off_t size, struct err *e)
{
    int rc = size == 0 ? begin_anew(fs, n, e) : bucket_fetch(fs, n, e);

    if (rc == 0 && ftruncate(n->spool, size) < 0)
        rc = err_set(e, errno, "truncate: %s", strerror(errno));
    return rc;
}

/* By its path, nobody closes it: it is uploaded at once, unless a writer will do so. */
int bucket_truncate(struct request *r, off_t size, struct err *e)
{
    struct bucket_file *f = r->has_fi ? file_of(&r->fi) : NULL;
    struct bucket_node *n = bucket_pin(r->fs, f ? f->node->ino : r->ino);
    int rc;

    if (!n)
        return -ESTALE;
    if (S_ISDIR(n->type)) {
        bucket_unpin(r->fs, n);
        return -EISDIR;
    }
    pthread_mutex_lock(&n->lock);
    n->opens++;
    rc = resize(r->fs, n, size, e);
    if (rc == 0) {
        n->dirty = true;
        n->failed = false;
        if (f)
            touched(f);
    }
    if (rc == 0 && n->writing == 0)
        rc = send_if_dirty(r->fs, n, e);
    bucket_let_go(r->fs, n);
    pthread_mutex_unlock(&n->lock);
    bucket_unpin(r->fs, n);
    return rc;
}

/* ---- close(2) and fsync(2) ---- */

int bucket_flush_run(struct request *r, struct err *e)
{
    struct bucket_file *f = file_of(&r->fi);
    struct bucket_node *n = f->node;
    int rc = 0;

    pthread_mutex_lock(&n->lock);
    set_closed(f, true);
    if (f->writes && n->writing == 0)
        rc = send_if_dirty(r->fs, n, e);
    pthread_mutex_unlock(&n->lock);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}

int bucket_fsync_run(struct request *r, struct err *e)
{
    struct bucket_file *f = file_of(&r->fi);
    int rc;

    pthread_mutex_lock(&f->node->lock);
    rc = send_if_dirty(r->fs, f->node, e);
    pthread_mutex_unlock(&f->node->lock);
    if (rc == 0)
        fuse_reply_err(r->req, 0);
    return rc;
}
