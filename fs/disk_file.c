/* SPDX-License-Identifier: MIT */
/* fs/disk_file.c - open files of the source in a mount for writing. */
#include "fs/disk_ops.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include "fs/edit.h"
#include "fs/passthrough.h"
#include "fs/read.h"

/*
 * Where the kernel can (as root), it reads and writes the file of the source by itself.
 * Elsewhere it keeps pages of the file as of any FUSE file, and looks at size and times
 * before it uses them; writes go through at once.
 */
struct disk_file {
    struct opened opened;
    struct fs *fs;
    struct disk_node *node; /* a reference */
    int fd;                 /* opened without O_APPEND */
    struct way *way;
    bool writes;
};

/* What of open(2)'s flags the server's own descriptor takes over. */
enum {
    FLAGS_KEPT =
        O_ACCMODE | O_TRUNC | O_SYNC | O_DSYNC | O_NOATIME | O_CLOEXEC | O_LARGEFILE
};

/* The handle is one of these: the operation table has looked. */
static struct disk_file *file_of(const struct fuse_file_info *fi)
{
    return container_of((struct opened *)(uintptr_t)fi->fh, struct disk_file, opened);
}

static bool is_file(const struct fuse_file_info *fi)
{
    return fi && fi->fh && ((struct opened *)(uintptr_t)fi->fh)->kind == OPENED_FILE;
}

int disk_file_fd(const struct fuse_file_info *fi)
{
    return is_file(fi) ? file_of(fi)->fd : -1;
}

static int fail(const struct disk_file *f, struct err *e)
{
    return err_set(e, errno, "%s: %s", f->node->name ? f->node->name : "a file",
                   strerror(errno));
}

static void file_free(struct fs *fs, struct opened *o)
{
    struct disk_file *f = container_of(o, struct disk_file, opened);

    way_close(fs, f->way);
    if (f->writes) {
        disk_changed(fs, f->node);
        if (disk_writers(fs, f->node, -1) == 0)
            edit_stored_closed(fs, f->node);
    }
    if (f->fd >= 0)
        close(f->fd);
    disk_unpin(fs, f->node);
    free(f);
}

/* Takes the descriptor and the reference to the node over, also on failure. */
static int file_new(struct request *r, struct disk_node *n, int fd,
                    struct disk_file **out, struct err *e)
{
    struct disk_file *f = calloc(1, sizeof *f);
    unsigned writers = 0;

    if (!f) {
        close(fd);
        disk_unpin(r->fs, n);
        return err_nomem(e);
    }
    f->opened.free = file_free;
    f->opened.kind = OPENED_FILE;
    f->fs = r->fs;
    f->node = n;
    f->fd = fd;
    f->writes = (r->fi.flags & O_ACCMODE) != O_RDONLY || (r->fi.flags & O_TRUNC);
    if (f->writes)
        writers = disk_writers(r->fs, n, 1);
    f->way = way_open(r->fs, n->ino, n->generation, fd);
    if (!f->way) {
        file_free(r->fs, &f->opened);
        return err_nomem(e);
    }
    opened_add(&r->fs->opened, &f->opened);
    r->fi.fh = (uintptr_t)&f->opened;
    r->fi.noflush = !f->writes;
    if (!f->way->backing)
        r->fi.direct_io = request_writes_directly(r, writers);
    *out = f;
    return 0;
}

static int open_again(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref ref = {0};
    CLEANUP(as_server) struct acting acting = {0};
    int rc = disk_ref(r->fs, r->ino, &ref, e), fd;

    if (rc < 0)
        return rc;
    if (!S_ISREG(ref.node->type))
        return S_ISDIR(ref.node->type) ? -EISDIR : -ENXIO;
    TRY(as_caller(r, &acting, e));
    fd = disk_openat(r->fs, AT_FDCWD, disk_proc(ref.fd).path,
                     (r->fi.flags & FLAGS_KEPT) | O_CLOEXEC | O_NONBLOCK, 0);
    return fd < 0 ? err_set(e, errno, "open: %s", strerror(errno)) : fd;
}

int disk_open(struct request *r, struct err *e)
{
    int fd = open_again(r, e), rc;
    struct disk_node *n = fd < 0 ? NULL : disk_pin(r->fs, r->ino);
    struct disk_file *f;

    if (fd < 0)
        return fd;
    if (!n) {
        close(fd);
        return -ESTALE;
    }
    if (r->fi.flags & O_TRUNC)
        disk_changed(r->fs, n);
    rc = file_new(r, n, fd, &f, e);
    if (rc < 0)
        return rc;
    counter_add(&r->fs->counters, COUNT_OPENS, 1);
    if (f->way->backing) {
        counter_add(&r->fs->counters, COUNT_OPENS_PASSTHROUGH, 1);
        rc = passthrough_reply(r->req, &r->fi, f->way->backing);
    } else {
        rc = fuse_reply_open(r->req, &r->fi);
    }
    if (rc < 0)
        opened_end(r->fs, &f->opened);
    return 0;
}

/* A new file, or one that came there meanwhile. */
static int create(struct request *r, const struct disk_ref *dir, struct err *e)
{
    CLEANUP(as_server) struct acting acting = {0};
    int rc = as_caller(r, &acting, e), fd;

    if (rc < 0)
        return rc;
    fd = disk_openat(r->fs, dir->fd, r->name,
                     (r->fi.flags & (FLAGS_KEPT | O_EXCL)) | O_CREAT | O_CLOEXEC |
                         O_NOFOLLOW | O_NONBLOCK,
                     r->mode & 07777);
    return fd < 0 ? err_set(e, errno, "%s: %s", r->name, strerror(errno)) : fd;
}

/* Its node, unless another file has the name by now. */
static int find_created(struct request *r, const struct disk_ref *dir, int fd,
                        struct disk_node **out, struct stat *st, struct err *e)
{
    struct stat opened;
    int rc = disk_find(r->fs, dir->node, r->name, out, st, e);

    if (rc < 0)
        return rc == -ENOENT ? -ESTALE : rc;
    if (fstat(fd, &opened) == 0 && opened.st_dev == st->st_dev &&
        opened.st_ino == st->st_ino)
        return 0;
    disk_unpin(r->fs, *out);
    return -ESTALE;
}

int disk_create(struct request *r, struct err *e)
{
    CLEANUP(disk_unref) struct disk_ref dir = {0};
    struct fuse_entry_param entry;
    struct disk_node *n = NULL;
    struct disk_file *f;
    struct stat st;
    int rc = disk_ref(r->fs, r->ino, &dir, e), fd;

    if (rc < 0)
        return rc;
    fd = create(r, &dir, e);
    if (fd < 0)
        return fd;
    rc = find_created(r, &dir, fd, &n, &st, e);
    if (rc < 0) {
        close(fd);
        return rc;
    }
    disk_changed(r->fs, dir.node);
    disk_entry(r->fs, n, &st, &entry);
    rc = file_new(r, disk_pin(r->fs, n->ino), fd, &f, e);
    if (rc < 0) {
        disk_unpin(r->fs, n);
        return rc;
    }
    if (passthrough_reply_create(r->req, &entry, &r->fi, f->way->backing) < 0) {
        opened_end(r->fs, &f->opened);
        disk_forget(r->fs, entry.ino, 1);
    }
    return 0;
}

int disk_read(struct request *r, struct err *e)
{
    struct disk_file *f = file_of(&r->fi);
    void *data = read_buffer(r->fs, r->size + 1);
    size_t got = 0;

    if (!data)
        return err_nomem(e);
    while (got < r->size) {
        ssize_t n =
            pread(f->fd, (char *)data + got, r->size - got, r->off + (off_t)got);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return fail(f, e);
        if (n == 0)
            break;
        got += (size_t)n;
    }
    fuse_reply_buf(r->req, data, got);
    counter_add(&r->fs->counters, COUNT_BYTES_READ, got);
    return 0;
}

/*
 * What is appended goes to the end of the file as it is on the disk, where others may
 * have appended too; pages of a mapping have their place.
 */
static ssize_t put(const struct request *r, const struct disk_file *f, const char *data,
                   size_t done)
{
    const struct iovec v = {(void *)(uintptr_t)(data + done), r->size - done};
    int how = (r->fi.flags & O_APPEND) && !r->fi.writepage ? RWF_APPEND : 0;

    if (request_is_synchronous(r))
        how |= RWF_SYNC;
    return pwritev2(f->fd, &v, 1, r->off + (off_t)done, how);
}

/* The kernel takes set-id bits away as it does from who writes on the disk: as the caller. */
static int act_where_it_counts(const struct request *r, const struct disk_file *f,
                               struct acting *acting, struct err *e)
{
    struct stat st;

    if (fstat(f->fd, &st) < 0)
        return fail(f, e);
    return st.st_mode & (S_ISUID | S_ISGID) ? as_caller(r, acting, e) : 0;
}

int disk_write(struct request *r, const char *data, struct err *e)
{
    CLEANUP(as_server) struct acting acting = {0};
    struct disk_file *f = file_of(&r->fi);
    size_t done = 0;

    TRY(act_where_it_counts(r, f, &acting, e));
    while (done < r->size) {
        ssize_t n = put(r, f, data, done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && done == 0)
            return fail(f, e);
        if (n <= 0)
            break;
        done += (size_t)n;
    }
    fuse_reply_write(r->req, done);
    return 0;
}

/* A disk across a network may tell at close(2) that bytes are lost. */
int disk_flush(struct request *r, struct err *e)
{
    struct disk_file *f = file_of(&r->fi);
    int fd = fcntl(f->fd, F_DUPFD_CLOEXEC, 0);

    if (fd < 0 || close(fd) < 0)
        return fail(f, e);
    if (f->writes)
        disk_changed(r->fs, f->node);
    fuse_reply_err(r->req, 0);
    return 0;
}

int disk_fsync(struct request *r, bool data, struct err *e)
{
    struct disk_file *f = file_of(&r->fi);

    if ((data ? fdatasync(f->fd) : fsync(f->fd)) < 0)
        return fail(f, e);
    fuse_reply_err(r->req, 0);
    return 0;
}

int disk_fallocate(struct request *r, off_t len, struct err *e)
{
    CLEANUP(as_server) struct acting acting = {0};
    struct disk_file *f = file_of(&r->fi);
    int rc = act_where_it_counts(r, f, &acting, e);

    if (rc < 0)
        return rc;
    do {
        rc = fallocate(f->fd, (int)r->flags, r->off, len);
    } while (rc < 0 && errno == EINTR);
    if (rc < 0)
        return fail(f, e);
    fuse_reply_err(r->req, 0);
    return 0;
}

int disk_lseek(struct request *r, int whence, struct err *e)
{
    struct disk_file *f = file_of(&r->fi);
    off_t at = lseek(f->fd, r->off, whence);

    if (at < 0)
        return errno == ENXIO ? -ENXIO : fail(f, e);
    fuse_reply_lseek(r->req, at);
    return 0;
}

int disk_copy(struct request *r, const struct fuse_file_info *to, off_t to_off,
              struct err *e)
{
    int in = disk_file_fd(&r->fi), out = disk_file_fd(to);
    off_t from = r->off;
    ssize_t n;

    if (in < 0 || out < 0)
        return -EOPNOTSUPP; /* programs read and write then */
    n = copy_file_range(in, &from, out, &to_off, r->size, 0);
    if (n < 0)
        return errno == EXDEV ? -EOPNOTSUPP : fail(file_of(to), e);
    fuse_reply_write(r->req, (size_t)n);
    return 0;
}
