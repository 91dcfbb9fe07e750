/* SPDX-License-Identifier: MIT */
/* base/fsutil.h - files and names on local disk, done carefully. */
#ifndef UFS_BASE_FSUTIL_H
#define UFS_BASE_FSUTIL_H

#include <sys/stat.h>
#include <sys/uio.h>

#include "base/base.h"
#include "base/buf.h"

struct err;

/* Who a file is, as far as stat(2) can tell. All zero: unknown. */
struct file_id {
    uint64_t dev, ino, size;
    int64_t mtime_ns, ctime_ns;
};

struct file_id file_id_of(const struct stat *st);

static inline bool file_id_equal(const struct file_id *a, const struct file_id *b)
{
    return a->dev == b->dev && a->ino == b->ino && a->size == b->size &&
           a->mtime_ns == b->mtime_ns && a->ctime_ns == b->ctime_ns;
}

/* Reads exactly `len` bytes at `off`; -EBADMSG when the file ends before. Retries EINTR. */
int read_exact(int fd, void *dst, size_t len, uint64_t off, struct err *e);

/* Takes the first `n` bytes off pieces of memory. */
void iov_advance(struct iovec **iov, int *count, size_t n);

/* As read_exact, into `count` (at most IOV_MAX) pieces of memory, which it may change. */
int readv_exact(int fd, struct iovec *iov, int count, uint64_t off, struct err *e);

/* Writes all of it. */
int write_all(int fd, const void *data, size_t len, struct err *e);

/*
 * Opens `path` below the directory `dirfd` for reading (openat2): absolute paths and ".."
 * beyond dirfd are refused with -EXDEV, the magic links of /proc with -EXDEV or -ELOOP;
 * links within are followed unless `no_links` (-ELOOP). With `beneath` false any path goes
 * (follow_symlinks). Never blocks on a fifo: O_NONBLOCK|O_CLOEXEC are always set. Returns
 * the descriptor or -errno.
 */
struct open_rule {
    bool beneath, no_links;
    int flags; /* O_DIRECTORY, O_PATH, ... */
};
int open_below(int dirfd, const char *path, const struct open_rule *rule);

/*
 * A file without a name in `dir`, for reading and writing, that goes with its last
 * descriptor. Returns the descriptor or -errno.
 */
int unnamed_file(const char *dir);

/* Is this path the directory `dir`, or below it? Both without a slash at the end; "": all are. */
bool path_is_within(const char *path, const char *dir);

/*
 * Is something mounted on `name` of the directory `at` ("": on that itself)? errno stays. A kernel
 * before 5.8 does not tell: false.
 */
bool is_mount_root(int at, const char *name);

/*
 * Gives the file `to` the extended attributes of `from` that it can have, and no other ACL than
 * that one has. Attributes of the user's and ACLs are copied or it is an error, what the file
 * system and the machine keep there besides (trusted, security, lustre) as far as it can be set.
 */
int copy_xattrs(int from, int to, struct err *e);

/* mkdir -p with this mode for what is made. */
int make_dirs(const char *path, mode_t mode, struct err *e);

/*
 * `override`, $XDG_CACHE_HOME/unshardfs or ~/.cache/unshardfs, made 0700 with a
 * CACHEDIR.TAG. -EPERM when others own it or can write there, or when a link
 * that another user made (and not root) is it or leads to it.
 */
int cache_dir(const char *override, struct buf *out, struct err *e);

#endif
