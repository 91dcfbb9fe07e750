/* SPDX-License-Identifier: MIT */
/* tests/crash/faults.c - counts, records and spoils what a program does to one directory. */

/*
 * Loaded before libc (LD_PRELOAD). Each call that changes something below $UFS_FAULT_ROOT
 * is one operation; they are numbered from 1 and run one at a time.
 *
 *   UFS_FAULT_LOG=FILE  one line an operation, written bytes go to FILE.data (replay.py
 *                       reads both)
 *   UFS_FAULT_AT=N      the N-th operation is spoilt, as
 *   UFS_FAULT_DO=       kill: SIGKILL before it; torn: half of a write, then SIGKILL;
 *                       short: half of a write is done; stop: SIGSTOP before it; a number: it fails with this errno
 *   UFS_FAULT_ALL=1     so do all that follow
 *   UFS_FAULT_OFF=FILE  while this file exists nothing is spoilt
 *   UFS_FAULT_BOOT=TEXT what the kernel calls this boot: after a power loss it is another one
 *
 * ENOSPC meets only what takes room; other operations are left alone and not counted then.
 */
/* Calls have the names that they have in libc here, and no others. */
#undef _FILE_OFFSET_BITS
#undef _FORTIFY_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { TAKES_ROOM, OTHER };
enum action { NONE, KILL, TORN, SHORT, STOP, FAIL };

static struct {
    pthread_mutex_t lock;
    pthread_once_t once;
    char root[PATH_MAX];
    size_t root_len;
    uint64_t at, count, data_len;
    enum action action;
    int code;
    bool all, noted;
    const char *off;
    int log, data;
} faults = {.lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

_Static_assert(sizeof(off_t) == 8, "offsets of large files");

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

/* ---- what was asked for ---- */

static void set_action(const char *text)
{
    static const char *const names[] = {
        [KILL] = "kill", [TORN] = "torn", [SHORT] = "short", [STOP] = "stop"};

    for (enum action a = KILL; a <= STOP; a++)
        if (strcmp(names[a], text) == 0)
            faults.action = a;
    if (faults.action == NONE) {
        faults.action = FAIL;
        faults.code = atoi(text);
    }
}

static int open_log(const char *path, const char *end)
{
    char name[PATH_MAX];

    snprintf(name, sizeof name, "%s%s", path, end);
    return REAL(open)(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void start(void)
{
    const char *root = getenv("UFS_FAULT_ROOT"), *at = getenv("UFS_FAULT_AT");
    const char *log = getenv("UFS_FAULT_LOG"), *what = getenv("UFS_FAULT_DO");

    faults.log = faults.data = -1;
    faults.off = getenv("UFS_FAULT_OFF");
    faults.all = getenv("UFS_FAULT_ALL") != NULL;
    faults.at = at ? strtoull(at, NULL, 10) : 0;
    if (!root || !realpath(root, faults.root))
        return;
    faults.root_len = strlen(faults.root);
    if (what)
        set_action(what);
    if (log) {
        faults.log = open_log(log, "");
        faults.data = open_log(log, ".data");
    }
}

/* ---- where ---- */

static bool is_below(const char *path)
{
    return faults.root_len && strncmp(path, faults.root, faults.root_len) == 0 &&
           (path[faults.root_len] == '/' || path[faults.root_len] == '\0');
}

static bool path_of(int fd, char path[PATH_MAX])
{
    char link[40];
    ssize_t n;

    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    n = readlink(link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = '\0';
    return n > 0;
}

static bool is_ours(int fd)
{
    char path[PATH_MAX];

    pthread_once(&faults.once, start);
    return faults.root_len && path_of(fd, path) && is_below(path);
}

static bool is_ours_at(int dir, const char *name)
{
    char path[PATH_MAX];

    pthread_once(&faults.once, start);
    if (!faults.root_len || !name)
        return false;
    if (name[0] == '/')
        return is_below(name);
    return dir == AT_FDCWD ? getcwd(path, sizeof path) && is_below(path) : is_ours(dir);
}

/* ---- an operation ---- */

static void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

static bool is_off(void)
{
    return faults.off && faccessat(AT_FDCWD, faults.off, F_OK, 0) == 0;
}

/* With the lock from now on, until end(): what is to happen to this one. */
static enum action begin(enum kind kind)
{
    pthread_mutex_lock(&faults.lock);
    faults.noted = false;
    if (faults.action == FAIL && faults.code == ENOSPC && kind != TAKES_ROOM)
        return NONE;
    faults.count++;
    if (faults.action == NONE || faults.count < faults.at || is_off() ||
        (faults.count > faults.at && !faults.all))
        return NONE;
    if (faults.action == KILL)
        die();
    if (faults.action == STOP)
        raise(SIGSTOP); /* to this thread: it goes no further */
    return faults.action;
}

__attribute__((format(printf, 1, 2))) static void note(const char *fmt, ...)
{
    char line[2 * PATH_MAX];
    int code = errno, n;
    va_list ap;

    faults.noted = true;
    if (faults.log < 0)
        return;
    va_start(ap, fmt);
    n = vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    if (REAL(write)(faults.log, line, (size_t)n) != n)
        abort();
    errno = code;
}

static void end(void)
{
    int code = errno;

    if (!faults.noted)
        note("X\n"); /* it failed, or changed neither names nor bytes */
    pthread_mutex_unlock(&faults.lock);
    errno = code;
}

static int fail(void)
{
    errno = faults.code;
    end();
    return -1;
}

static uint64_t ino_of(int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 ? st.st_ino : 0;
}

/* The directory that holds it, and its name there. */
static uint64_t place_of(int dir, const char *path, const char **name)
{
    char above[PATH_MAX] = ".";
    const char *slash = strrchr(path, '/');
    struct stat st;

    *name = slash ? slash + 1 : path;
    if (slash)
        snprintf(above, sizeof above, "%.*s", (int)(slash - path) + 1, path);
    return fstatat(dir, above, &st, 0) == 0 ? st.st_ino : 0;
}

static uint64_t ino_at(int dir, const char *path)
{
    struct stat st;

    return fstatat(dir, path, &st, AT_SYMLINK_NOFOLLOW) == 0 ? st.st_ino : 0;
}

/* Bytes of a file as they are now: they were written by this operation. */
static void note_bytes(int fd, off_t off, size_t len)
{
    char link[40], block[1 << 16];
    int own, code = errno;

    if (faults.log < 0 || len == 0)
        return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    own = REAL(open)(link, O_RDONLY | O_CLOEXEC);
    note("W\t%llu\t%lld\t%zu\t%llu\n", (unsigned long long)ino_of(fd), (long long)off,
         len, (unsigned long long)faults.data_len);
    faults.data_len += len;
    while (own >= 0 && len > 0) {
        ssize_t n = pread(own, block, len < sizeof block ? len : sizeof block, off);

        if (n <= 0 || REAL(write)(faults.data, block, (size_t)n) != n)
            abort();
        off += n;
        len -= (size_t)n;
    }
    if (own < 0)
        abort();
    close(own);
    errno = code;
}

/* ---- files: made, cut ---- */

static int open_any(int dir, const char *path, int flags, mode_t mode)
{
    bool there;
    const char *name;
    uint64_t at;
    int fd;

    if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE ||
        !is_ours_at(dir, path))
        return REAL(openat)(dir, path, flags, mode);
    there = ino_at(dir, path) != 0;
    if (there && !(flags & O_TRUNC))
        return REAL(openat)(dir, path, flags, mode);
    if (begin(there ? OTHER : TAKES_ROOM) == FAIL)
        return fail();
    fd = REAL(openat)(dir, path, flags, mode);
    at = place_of(dir, path, &name);
    if (fd >= 0 && there)
        note("T\t%llu\t0\n", (unsigned long long)ino_of(fd));
    else if (fd >= 0)
        note("C\t%llu\t%s\t%llu\n", (unsigned long long)at, name,
             (unsigned long long)ino_of(fd));
    end();
    return fd;
}

#define OPEN_MODE(mode, flags)                                                         \
    do {                                                                               \
        va_list ap_;                                                                   \
        va_start(ap_, flags);                                                          \
        mode = (flags)&O_CREAT ? va_arg(ap_, mode_t) : 0;                              \
        va_end(ap_);                                                                   \
    } while (0)

int open(const char *path, int flags, ...)
{
    mode_t mode;

    OPEN_MODE(mode, flags);
    return open_any(AT_FDCWD, path, flags, mode);
}

int openat(int dir, const char *path, int flags, ...)
{
    mode_t mode;

    OPEN_MODE(mode, flags);
    return open_any(dir, path, flags, mode);
}

int ftruncate(int fd, off_t size)
{
    int ret;

    if (!is_ours(fd))
        return REAL(ftruncate)(fd, size);
    if (begin(TAKES_ROOM) == FAIL)
        return fail();
    ret = REAL(ftruncate)(fd, size);
    if (ret == 0)
        note("T\t%llu\t%lld\n", (unsigned long long)ino_of(fd), (long long)size);
    end();
    return ret;
}

int fallocate(int fd, int mode, off_t off, off_t len)
{
    struct stat was, now;
    int ret;

    if (!is_ours(fd))
        return REAL(fallocate)(fd, mode, off, len);
    if (begin(TAKES_ROOM) == FAIL)
        return fail();
    if (fstat(fd, &was) < 0)
        was.st_size = 0;
    ret = REAL(fallocate)(fd, mode, off, len);
    if (ret == 0 && fstat(fd, &now) == 0 && now.st_size != was.st_size)
        note("T\t%llu\t%lld\n", (unsigned long long)ino_of(fd), (long long)now.st_size);
    end();
    return ret;
}

/* ---- bytes ---- */

/* How much of a write of `len` bytes is let through; the lock is held. */
static size_t share(enum action a, size_t len)
{
    return a == TORN || (a == SHORT && len > 1) ? len / 2 : len;
}

ssize_t pwrite(int fd, const void *data, size_t len, off_t off)
{
    enum action a;
    ssize_t n;

    if (!is_ours(fd))
        return REAL(pwrite)(fd, data, len, off);
    a = begin(TAKES_ROOM);
    if (a == FAIL)
        return fail();
    n = REAL(pwrite)(fd, data, share(a, len), off);
    if (a == TORN)
        die();
    if (n > 0)
        note_bytes(fd, off, (size_t)n);
    end();
    return n;
}

/* Where write(2) is about to put its bytes. */
static off_t write_place(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    struct stat st;

    if (flags >= 0 && (flags & O_APPEND) && fstat(fd, &st) == 0)
        return st.st_size;
    return lseek(fd, 0, SEEK_CUR);
}

ssize_t write(int fd, const void *data, size_t len)
{
    enum action a;
    off_t off;
    ssize_t n;

    if (!is_ours(fd))
        return REAL(write)(fd, data, len);
    a = begin(TAKES_ROOM);
    if (a == FAIL)
        return fail();
    off = write_place(fd);
    n = REAL(write)(fd, data, share(a, len));
    if (a == TORN)
        die();
    if (n > 0)
        note_bytes(fd, off, (size_t)n);
    end();
    return n;
}

ssize_t writev(int fd, const struct iovec *iov, int count)
{
    enum action a;
    off_t off;
    ssize_t n;

    if (!is_ours(fd))
        return REAL(writev)(fd, iov, count);
    a = begin(TAKES_ROOM);
    if (a == FAIL)
        return fail();
    off = write_place(fd);
    n = REAL(writev)(fd, iov, a == TORN || a == SHORT ? 1 : count);
    if (a == TORN)
        die();
    if (n > 0)
        note_bytes(fd, off, (size_t)n);
    end();
    return n;
}

ssize_t pwritev(int fd, const struct iovec *iov, int count, off_t off)
{
    enum action a;
    ssize_t n;

    if (!is_ours(fd))
        return REAL(pwritev)(fd, iov, count, off);
    a = begin(TAKES_ROOM);
    if (a == FAIL)
        return fail();
    n = a == TORN || a == SHORT ? REAL(pwritev)(fd, iov, 1, off)
                                : REAL(pwritev)(fd, iov, count, off);
    if (a == TORN)
        die();
    if (n > 0)
        note_bytes(fd, off, (size_t)n);
    end();
    return n;
}

ssize_t pwritev2(int fd, const struct iovec *iov, int count, off_t off, int flags)
{
    struct stat st;
    enum action a;
    ssize_t n;

    if (!is_ours(fd))
        return REAL(pwritev2)(fd, iov, count, off, flags);
    a = begin(TAKES_ROOM);
    if (a == FAIL)
        return fail();
    if ((flags & RWF_APPEND) && fstat(fd, &st) == 0)
        off = st.st_size;
    n = REAL(pwritev2)(fd, iov, a == TORN || a == SHORT ? 1 : count, off, flags);
    if (a == TORN)
        die();
    if (n > 0)
        note_bytes(fd, off, (size_t)n);
    if (n > 0 && (flags & (RWF_SYNC | RWF_DSYNC)))
        note("S\t%llu\n", (unsigned long long)ino_of(fd));
    end();
    return n;
}

ssize_t copy_file_range(int in, off_t *in_off, int out, off_t *out_off, size_t len,
                        unsigned flags)
{
    enum action a;
    off_t off;
    ssize_t n;

    if (!is_ours(out))
        return REAL(copy_file_range)(in, in_off, out, out_off, len, flags);
    a = begin(TAKES_ROOM);
    if (a == FAIL)
        return fail();
    off = out_off ? *out_off : lseek(out, 0, SEEK_CUR);
    n = REAL(copy_file_range)(in, in_off, out, out_off, share(a, len), flags);
    if (a == TORN)
        die();
    if (n > 0)
        note_bytes(out, off, (size_t)n);
    end();
    return n;
}

ssize_t sendfile(int out, int in, off_t *in_off, size_t len)
{
    enum action a;
    off_t off;
    ssize_t n;

    if (!is_ours(out))
        return REAL(sendfile)(out, in, in_off, len);
    a = begin(TAKES_ROOM);
    if (a == FAIL)
        return fail();
    off = write_place(out);
    n = REAL(sendfile)(out, in, in_off, share(a, len));
    if (a == TORN)
        die();
    if (n > 0)
        note_bytes(out, off, (size_t)n);
    end();
    return n;
}

ssize_t splice(int in, off_t *in_off, int out, off_t *out_off, size_t len,
               unsigned flags)
{
    enum action a;
    off_t off;
    ssize_t n;

    if (!is_ours(out))
        return REAL(splice)(in, in_off, out, out_off, len, flags);
    a = begin(TAKES_ROOM);
    if (a == FAIL)
        return fail();
    off = out_off ? *out_off : write_place(out);
    n = REAL(splice)(in, in_off, out, out_off, share(a, len), flags);
    if (a == TORN)
        die();
    if (n > 0)
        note_bytes(out, off, (size_t)n);
    end();
    return n;
}

/* A disk across a network tells errors here: the file is closed all the same. */
int close(int fd)
{
    int flags = fcntl(fd, F_GETFL), ret;

    if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY || !is_ours(fd))
        return REAL(close)(fd);
    if (begin(TAKES_ROOM) == FAIL) {
        REAL(close)(fd);
        return fail();
    }
    ret = REAL(close)(fd);
    end();
    return ret;
}

/* ---- what is durable ---- */

static int sync_one(int (*real)(int fd), int fd)
{
    int ret;

    if (!is_ours(fd))
        return real(fd);
    if (begin(TAKES_ROOM) == FAIL)
        return fail();
    ret = real(fd);
    if (ret == 0)
        note("S\t%llu\n", (unsigned long long)ino_of(fd));
    end();
    return ret;
}

int fsync(int fd)
{
    return sync_one(REAL(fsync), fd);
}

int fdatasync(int fd)
{
    return sync_one(REAL(fdatasync), fd);
}

/* What asks whether the disk has failed to take anything; hints are left alone. */
int sync_file_range(int fd, off_t off, off_t len, unsigned flags)
{
    int ret;

    if (!(flags & SYNC_FILE_RANGE_WAIT_BEFORE) || !is_ours(fd))
        return REAL(sync_file_range)(fd, off, len, flags);
    if (begin(OTHER) == FAIL)
        return fail();
    ret = REAL(sync_file_range)(fd, off, len, flags);
    note("E\t%llu\n", (unsigned long long)ino_of(fd));
    end();
    return ret;
}

int syncfs(int fd)
{
    int ret;

    if (!is_ours(fd))
        return REAL(syncfs)(fd);
    if (begin(TAKES_ROOM) == FAIL)
        return fail();
    ret = REAL(syncfs)(fd);
    if (ret == 0)
        note("Y\n");
    end();
    return ret;
}

/* ---- names ---- */

int mkdirat(int dir, const char *path, mode_t mode)
{
    const char *name;
    uint64_t at;
    int ret;

    if (!is_ours_at(dir, path))
        return REAL(mkdirat)(dir, path, mode);
    if (begin(TAKES_ROOM) == FAIL)
        return fail();
    ret = REAL(mkdirat)(dir, path, mode);
    at = place_of(dir, path, &name);
    if (ret == 0)
        note("D\t%llu\t%s\t%llu\n", (unsigned long long)at, name,
             (unsigned long long)ino_at(dir, path));
    end();
    return ret;
}

int mkdir(const char *path, mode_t mode)
{
    return mkdirat(AT_FDCWD, path, mode);
}

int unlinkat(int dir, const char *path, int flags)
{
    const char *name;
    uint64_t at;
    int ret;

    if (!is_ours_at(dir, path))
        return REAL(unlinkat)(dir, path, flags);
    if (begin(OTHER) == FAIL)
        return fail();
    at = place_of(dir, path, &name);
    ret = REAL(unlinkat)(dir, path, flags);
    if (ret == 0)
        note("U\t%llu\t%s\n", (unsigned long long)at, name);
    end();
    return ret;
}

int unlink(const char *path)
{
    return unlinkat(AT_FDCWD, path, 0);
}

int rmdir(const char *path)
{
    return unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
{
    const char *old_name, *new_name;
    uint64_t old_dir, new_dir;
    int ret;

    if (!is_ours_at(from, old) && !is_ours_at(to, new))
        return REAL(renameat2)(from, old, to, new, flags);
    if (begin(TAKES_ROOM) == FAIL)
        return fail();
    old_dir = place_of(from, old, &old_name);
    new_dir = place_of(to, new, &new_name);
    ret = REAL(renameat2)(from, old, to, new, flags);
    if (ret == 0)
        note("R\t%llu\t%s\t%llu\t%s\t%u\n", (unsigned long long)old_dir, old_name,
             (unsigned long long)new_dir, new_name, flags);
    end();
    return ret;
}

int renameat(int from, const char *old, int to, const char *new)
{
    return renameat2(from, old, to, new, 0);
}

int rename(const char *old, const char *new)
{
    return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0);
}

int linkat(int from, const char *old, int to, const char *new, int flags)
{
    const char *name;
    uint64_t at;
    int ret;

    if (!is_ours_at(to, new))
        return REAL(linkat)(from, old, to, new, flags);
    if (begin(TAKES_ROOM) == FAIL)
        return fail();
    ret = REAL(linkat)(from, old, to, new, flags);
    at = place_of(to, new, &name);
    if (ret == 0)
        note("L\t%llu\t%s\t%llu\n", (unsigned long long)at, name,
             (unsigned long long)ino_at(to, new));
    end();
    return ret;
}

/* ---- the kernel's own writes ---- */

/*
 * What the kernel reads and writes by itself (FUSE passthrough) is not seen here: the
 * request for it is refused, and the server does it.
 */
int ioctl(int fd, unsigned long request, ...)
{
    enum { FUSE_MAGIC = 229, BACKING_OPEN = 1 };
    va_list args;
    void *arg;

    va_start(args, request);
    arg = va_arg(args, void *);
    va_end(args);
    if (_IOC_TYPE(request) == FUSE_MAGIC && _IOC_NR(request) == BACKING_OPEN) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return REAL(ioctl)(fd, request, arg);
}

/* ---- rights ---- */

int fchmod(int fd, mode_t mode)
{
    int ret;

    if (!is_ours(fd))
        return REAL(fchmod)(fd, mode);
    if (begin(OTHER) == FAIL)
        return fail();
    ret = REAL(fchmod)(fd, mode);
    end();
    return ret;
}

int fchmodat(int dir, const char *path, mode_t mode, int flags)
{
    int ret;

    if (!is_ours_at(dir, path))
        return REAL(fchmodat)(dir, path, mode, flags);
    if (begin(OTHER) == FAIL)
        return fail();
    ret = REAL(fchmodat)(dir, path, mode, flags);
    end();
    return ret;
}

/* ---- the boot ---- */

FILE *fopen(const char *path, const char *mode)
{
    static const char boot_id[] = "/proc/sys/kernel/random/boot_id";
    char *boot = getenv("UFS_FAULT_BOOT");

    if (!boot || strcmp(path, boot_id) != 0)
        return REAL(fopen)(path, mode);
    return fmemopen(boot, strlen(boot), "r");
}

/* Programs built for large files call these names. */
#define ALIAS(new, old) extern typeof(old) new __attribute__((alias(#old)))
ALIAS(fopen64, fopen);
ALIAS(open64, open);
ALIAS(openat64, openat);
ALIAS(ftruncate64, ftruncate);
ALIAS(fallocate64, fallocate);
ALIAS(pwrite64, pwrite);
ALIAS(pwritev64, pwritev);
ALIAS(pwritev64v2, pwritev2);
ALIAS(sendfile64, sendfile);
