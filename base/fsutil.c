/* SPDX-License-Identifier: MIT */
/* base/fsutil.c - files and names on local disk, done carefully. */
#include "base/fsutil.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/xattr.h>

#include "base/checked.h"
#include "base/err.h"

enum {
    MAX_LINKS = 40,   /* as the kernel's own limit */
    MAX_DEPTH = 256,  /* directories held open by the walk without openat2 */
    MAX_RETRIES = 64, /* openat2 says EAGAIN while somebody renames under it */
};

static int64_t time_ns(const struct timespec *t)
{
    return (int64_t)t->tv_sec * 1000000000 + t->tv_nsec;
}

struct file_id file_id_of(const struct stat *st)
{
    return (struct file_id){
        .dev = st->st_dev,
        .ino = st->st_ino,
        .size = (uint64_t)st->st_size,
        .mtime_ns = time_ns(&st->st_mtim),
        .ctime_ns = time_ns(&st->st_ctim),
    };
}

/* What a read of the file gave that is no bytes; 0: again. */
static int read_trouble(ssize_t n, uint64_t at, uint64_t off, uint64_t len,
                        struct err *e)
{
    if (n == 0)
        return err_set(e, EBADMSG,
                       "file ends at byte %" PRIu64 ", %" PRIu64
                       " bytes wanted at %" PRIu64,
                       at, len, off);
    return errno == EINTR
               ? 0
               : err_set(e, errno, "read at byte %" PRIu64 ": %s", at, strerror(errno));
}

static int check_reach(uint64_t off, uint64_t len, struct err *e)
{
    return range_outside(off, len, INT64_MAX)
               ? err_set(e, EBADMSG,
                         "bytes %" PRIu64 "+%" PRIu64 " lie past any file's end", off,
                         len)
               : 0;
}

int read_exact(int fd, void *dst, size_t len, uint64_t off, struct err *e)
{
    size_t done = 0;
    int rc = check_reach(off, len, e);

    while (rc == 0 && done < len) {
        ssize_t n = pread(fd, (char *)dst + done, len - done, (off_t)(off + done));

        if (n > 0)
            done += (size_t)n;
        else
            rc = read_trouble(n, off + done, off, len, e);
    }
    return rc;
}

void iov_advance(struct iovec **iov, int *count, size_t n)
{
    while (*count > 0 && n >= (*iov)->iov_len) {
        n -= (*iov)->iov_len;
        (*iov)++;
        (*count)--;
    }
    if (n > 0) {
        (*iov)->iov_base = (char *)(*iov)->iov_base + n;
        (*iov)->iov_len -= n;
    }
}

int readv_exact(int fd, struct iovec *iov, int count, uint64_t off, struct err *e)
{
    uint64_t len = 0, done = 0;
    int rc;

    for (int i = 0; i < count; i++)
        len += iov[i].iov_len;
    rc = check_reach(off, len, e);
    while (rc == 0 && done < len) {
        ssize_t n = preadv(fd, iov, count, (off_t)(off + done));

        if (n > 0) {
            done += (size_t)n;
            iov_advance(&iov, &count, (size_t)n);
        } else {
            rc = read_trouble(n, off + done, off, len, e);
        }
    }
    return rc;
}

int write_all(int fd, const void *data, size_t len, struct err *e)
{
    size_t done = 0;

    while (done < len) {
        ssize_t n = write(fd, (const char *)data + done, len - done);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return err_set(e, n < 0 ? errno : EIO, "write of %zu bytes: %s", len - done,
                           n < 0 ? strerror(errno) : "nothing was written");
        done += (size_t)n;
    }
    return 0;
}

static int open_flags(const struct open_rule *rule)
{
    if (rule->flags & O_PATH) /* openat2 refuses more flags beside O_PATH */
        return rule->flags | O_CLOEXEC;
    return rule->flags | O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
}

static int open_in_kernel(int dirfd, const char *path, const struct open_rule *rule)
{
    struct open_how how = {.flags = (uint64_t)open_flags(rule)};
    long fd = -1;

    if (rule->beneath)
        how.resolve |= RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
    if (rule->no_links)
        how.resolve |= RESOLVE_NO_SYMLINKS;
    for (int i = 0; i < MAX_RETRIES; i++) {
        fd = syscall(SYS_openat2, dirfd, path, &how, sizeof how);
        if (fd >= 0 || (errno != EAGAIN && errno != EINTR))
            break;
    }
    return fd >= 0 ? (int)fd : -errno;
}

/*
 * The walk for kernels and sandboxes without openat2: each directory on the way is
 * held open, so ".." goes back to where we came from whatever others rename meanwhile.
 */
struct walk {
    const struct open_rule *rule;
    int root;
    int dirs[MAX_DEPTH]; /* below root, each within the one before */
    unsigned depth, links;
    bool want_dir;           /* a slash stood behind the last name */
    char rest[2 * PATH_MAX]; /* still to go; links are spliced in at its front */
};

static int walk_top(const struct walk *w)
{
    return w->depth ? w->dirs[w->depth - 1] : w->root;
}

static void walk_release(struct walk *w)
{
    while (w->depth > 0)
        close(w->dirs[--w->depth]);
}

/* Adds a directory; takes fd over. */
static int walk_push(struct walk *w, int fd)
{
    if (w->depth == MAX_DEPTH) {
        close(fd);
        return -ENAMETOOLONG;
    }
    w->dirs[w->depth++] = fd;
    return 0;
}

static int walk_up(struct walk *w)
{
    int fd;

    if (w->rule->beneath) {
        if (w->depth == 0)
            return -EXDEV;
        close(w->dirs[--w->depth]);
        return 0;
    }
    fd = openat(walk_top(w), "..", O_PATH | O_DIRECTORY | O_CLOEXEC);
    return fd >= 0 ? walk_push(w, fd) : -errno;
}

/* Cuts the first name off w->rest into name[]. */
static int walk_take(struct walk *w, char name[NAME_MAX + 1])
{
    size_t skip = strspn(w->rest, "/"), len = strcspn(w->rest + skip, "/");
    size_t behind = strspn(w->rest + skip + len, "/");

    if (len > NAME_MAX)
        return -ENAMETOOLONG;
    memcpy(name, w->rest + skip, len);
    name[len] = '\0';
    if (behind > 0 && w->rest[skip + len + behind] == '\0')
        w->want_dir = true;
    memmove(w->rest, w->rest + skip + len + behind,
            strlen(w->rest + skip + len + behind) + 1);
    return 0;
}

/* Puts the target of the link `fd` (opened with O_PATH) in front of the rest. */
static int walk_link(struct walk *w, int fd)
{
    char target[PATH_MAX];
    ssize_t len = readlinkat(fd, "", target, sizeof target - 1);
    size_t rest = strlen(w->rest);

    if (len < 0)
        return -errno;
    if (w->rule->no_links || ++w->links > MAX_LINKS)
        return -ELOOP;
    target[len] = '\0';
    if (len == 0)
        return -ENOENT;
    if (target[0] == '/')
        return -EXDEV;
    if ((size_t)len + 1 + rest >= sizeof w->rest)
        return -ENAMETOOLONG;
    memmove(w->rest + len + (rest > 0), w->rest, rest + 1);
    memcpy(w->rest, target, (size_t)len);
    if (rest > 0)
        w->rest[len] = '/';
    return 0;
}

/* Opens what the path led to: `name` in the directory reached, which is no link. */
static int walk_open(struct walk *w, const char *name)
{
    int flags = open_flags(w->rule) | O_NOFOLLOW | (w->want_dir ? O_DIRECTORY : 0);
    int fd = openat(walk_top(w), name, flags);

    return fd >= 0 ? fd : -errno;
}

/* Goes through one name. 0: go on; 1: *out is the result. */
static int walk_step(struct walk *w, const char *name, int *out)
{
    CLEANUP_FD int fd = openat(walk_top(w), name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    struct stat st;
    bool final;

    if (fd < 0 || fstat(fd, &st) < 0)
        return -errno;
    final = w->rest[0] == '\0';
    if (S_ISLNK(st.st_mode) &&
        !(final && !w->want_dir && (w->rule->flags & O_NOFOLLOW)))
        return walk_link(w, fd);
    if (final) {
        *out = walk_open(w, name);
        return *out < 0 ? *out : 1;
    }
    if (!S_ISDIR(st.st_mode))
        return -ENOTDIR;
    return walk_push(w, steal_fd(&fd));
}

static int open_by_walk(int dirfd, const char *path, const struct open_rule *rule)
{
    CLEANUP(walk_release) struct walk w = {.rule = rule, .root = dirfd};
    char name[NAME_MAX + 1];
    int rc = 0, fd = -1;

    if (path[0] == '\0')
        return -ENOENT;
    if (path[0] == '/' && rule->beneath)
        return -EXDEV;
    if (path[0] == '/') {
        fd = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
        rc = fd >= 0 ? walk_push(&w, fd) : -errno;
    }
    if (strlen(path) >= PATH_MAX)
        return -ENAMETOOLONG;
    snprintf(w.rest, sizeof w.rest, "%s", path);
    while (rc == 0 && w.rest[0] != '\0') {
        rc = walk_take(&w, name);
        if (rc < 0 || name[0] == '\0' || strcmp(name, ".") == 0)
            continue;
        rc = strcmp(name, "..") == 0 ? walk_up(&w) : walk_step(&w, name, &fd);
    }
    if (rc != 0)
        return rc < 0 ? rc : fd;
    return walk_open(&w, "."); /* ended in ".", ".." */
}

int open_below(int dirfd, const char *path, const struct open_rule *rule)
{
    int fd;

    if (!rule->beneath && !rule->no_links) {
        fd = openat(dirfd, path, open_flags(rule));
        return fd >= 0 ? fd : -errno;
    }
    fd = open_in_kernel(dirfd, path, rule);
    /* EPERM: how seccomp profiles older than the call refuse it. */
    if (fd == -ENOSYS || fd == -EPERM || fd == -EAGAIN)
        return open_by_walk(dirfd, path, rule);
    return fd;
}

int unnamed_file(const char *dir)
{
    CLEANUP_FREE char *name = NULL;
    int fd = open(dir, O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);

    if (fd >= 0)
        return fd;
    /* Not every file system can (overlay of old, NFS): one that loses its name at once. */
    if (asprintf(&name, "%s/unnamed-XXXXXX", dir) < 0) {
        name = NULL;
        return -ENOMEM;
    }
    fd = mkostemp(name, O_CLOEXEC);
    if (fd < 0)
        return -errno;
    unlink(name);
    return fd;
}

int make_dirs(const char *path, mode_t mode, struct err *e)
{
    CLEANUP_FREE char *copy = strdup(path);
    struct stat st;

    if (!copy)
        return err_nomem(e);
    for (char *p = copy; *p; p++) {
        if (*p != '/' || p == copy)
            continue;
        *p = '\0';
        if (mkdir(copy, mode) < 0 && errno != EEXIST && errno != EROFS &&
            errno != EACCES) /* what is there need not be writable */
            return err_set(e, errno, "make directory %s: %s", copy, strerror(errno));
        *p = '/';
    }
    if (mkdir(copy, mode) < 0 && errno != EEXIST)
        return err_set(e, errno, "make directory %s: %s", path, strerror(errno));
    if (stat(copy, &st) < 0)
        return err_set(e, errno, "make directory %s: %s", path, strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return err_set(e, ENOTDIR, "make directory %s: something else has the name",
                       path);
    return 0;
}

/* The directory's name: what was asked for, or where XDG says (absolute paths only). */
static int cache_name(const char *override, struct buf *out, struct err *e)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");

    if (override && override[0]) {
        buf_adds(out, override);
    } else if (xdg && xdg[0] == '/') {
        buf_addf(out, "%s/unshardfs", xdg);
    } else if (home && home[0] == '/') {
        buf_addf(out, "%s/.cache/unshardfs", home);
    } else {
        err_set(e, ENOENT, "no cache directory: HOME is not set");
        return err_hint(e, "set HOME or XDG_CACHE_HOME, or name one with cache_dir=");
    }
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int refuse_link(const char *path, const struct stat *st, struct err *e)
{
    err_set(e, EPERM, "cache directory %s: user %u made this link", path,
            (unsigned)st->st_uid);
    return err_hint(e, "name the directory itself with cache_dir=");
}

/*
 * Another user's link, as the path or on its way, leads where that user wants it: root's and
 * our own are meant. What is not there is made, and looked at then.
 */
static int check_links(const char *path, struct err *e)
{
    CLEANUP_FREE char *copy = strdup(path);
    struct stat st;

    if (!copy)
        return err_nomem(e);
    for (char *p = copy; *p;) {
        char after;

        p += strspn(p, "/");
        p += strcspn(p, "/");
        after = *p;
        *p = '\0';
        if (copy[0] && lstat(copy, &st) == 0 && S_ISLNK(st.st_mode) && st.st_uid != 0 &&
            st.st_uid != geteuid())
            return refuse_link(copy, &st, e);
        *p = after;
    }
    return 0;
}

/* Who can write to the cache can change what readers get. */
static int check_private(const char *path, struct err *e)
{
    struct stat st;

    if (stat(path, &st) < 0)
        return err_set(e, errno, "cache directory %s: %s", path, strerror(errno));
    if (st.st_uid != geteuid() && geteuid() != 0) {
        err_set(e, EPERM, "cache directory %s belongs to user %u", path, st.st_uid);
        return err_hint(e, "name another with cache_dir=");
    }
    if (st.st_mode & (S_IWGRP | S_IWOTH)) {
        err_set(e, EPERM, "cache directory %s can be written by other users", path);
        return err_hint(e, "chmod go-w it, or name another with cache_dir=");
    }
    return 0;
}

bool path_is_within(const char *path, const char *dir)
{
    size_t len = strlen(dir);

    return len == 0 ||
           (strncmp(path, dir, len) == 0 && (path[len] == '\0' || path[len] == '/'));
}

bool is_mount_root(int at, const char *name)
{
    const int flags = AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT;
    int code = errno;
    struct statx st;
    bool is = statx(at, name, flags, STATX_TYPE, &st) == 0 &&
              (st.stx_attributes & STATX_ATTR_MOUNT_ROOT);

    errno = code;
    return is;
}

static int copy_xattr(int from, int to, const char *name, char *value, struct err *e)
{
    ssize_t n = fgetxattr(from, name, value, XATTR_SIZE_MAX);

    if (n < 0)
        return errno == ENODATA ? 0
                                : err_set(e, errno, "%s: %s", name, strerror(errno));
    if (fsetxattr(to, name, value, (size_t)n, 0) == 0 || errno == ENOTSUP ||
        (strncmp(name, "user.", 5) != 0 && strncmp(name, "system.posix_acl_", 17) != 0))
        return 0;
    return err_set(e, errno, "%s: %s", name, strerror(errno));
}

/* Of a directory that has a default for what is made in it. */
static int drop_acls(int fd, struct err *e)
{
    static const char *const names[] = {"system.posix_acl_access",
                                        "system.posix_acl_default"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (fremovexattr(fd, names[i]) < 0 && errno != ENODATA && errno != ENOTSUP &&
            errno != EINVAL)
            return err_set(e, errno, "%s: %s", names[i], strerror(errno));
    return 0;
}

int copy_xattrs(int from, int to, struct err *e)
{
    CLEANUP_FREE char *list = malloc(XATTR_LIST_MAX);
    CLEANUP_FREE char *value = malloc(XATTR_SIZE_MAX);
    ssize_t size;
    int rc;

    if (!list || !value)
        return err_nomem(e);
    rc = drop_acls(to, e);
    size = flistxattr(from, list, XATTR_LIST_MAX);
    if (size < 0)
        return errno == ENOTSUP
                   ? 0
                   : err_set(e, errno, "list attributes: %s", strerror(errno));
    for (ssize_t at = 0; rc == 0 && at < size; at += (ssize_t)strlen(list + at) + 1)
        rc = copy_xattr(from, to, list + at, value, e);
    return rc;
}

/* Tells backup programs to leave it out (bford.info/cachedir). */
static int write_tag(const char *path, struct err *e)
{
    static const char tag[] = "Signature: 8a477f597d28d172789f06886806bc55\n"
                              "# This directory is a cache of unshardfs.\n";
    CLEANUP_FD int dir = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    CLEANUP_FD int fd = -1;

    if (dir >= 0)
        fd = openat(dir, "CACHEDIR.TAG",
                    O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0 && errno == EEXIST)
        return 0;
    if (fd < 0)
        return err_set(e, errno, "cache directory %s: %s", path, strerror(errno));
    return write_all(fd, tag, sizeof tag - 1, e);
}

int cache_dir(const char *override, struct buf *out, struct err *e)
{
    int rc = cache_name(override, out, e);

    if (rc == 0)
        rc = check_links(out->data, e);
    if (rc == 0 && make_dirs(out->data, 0700, e) < 0)
        rc = err_hint(e, "name one that can be written: cache_dir=DIR");
    if (rc == 0)
        rc = check_links(out->data, e);
    if (rc == 0)
        rc = check_private(out->data, e);
    if (rc == 0)
        rc = write_tag(out->data, e);
    return rc;
}
