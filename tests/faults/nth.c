/* SPDX-License-Identifier: MIT */
/* tests/faults/nth.c - lets the N-th call of one kind fail, once, in a program that it is loaded before. */

/*
 * Loaded before libc (LD_PRELOAD). Calls of the kind are numbered from 1 over all threads.
 *
 *   UFS_NTH_KIND=       alloc   ENOMEM: malloc, calloc, realloc, ..., also for libraries
 *                       read    EIO: read, pread, preadv, ... of a file below the root
 *                       write   ENOSPC: write, pwrite, ftruncate, fsync, ... there
 *                       open    EMFILE: open, openat, openat2 there
 *                       list    EIO: readdir of a directory there
 *                       map     ENOMEM: mmap of a file there
 *                       bus     mmap of a file there: touching it raises SIGBUS
 *                       thread  EAGAIN: pthread_create
 *                       fork    EAGAIN: fork
 *                       net     ECONNRESET: socket, connect, send, recv, ... of networks
 *   UFS_NTH_ROOT=DIR    the root
 *   UFS_NTH_AT=N        this one fails; 0: none
 *   UFS_NTH_TELL=FILE   16 bytes: how many calls there were, 1 when one has failed
 *   UFS_NTH_WHERE=1     prints the stack of the call that fails
 *
 * libfuse's own calls are left alone: that it ends the session when it has no memory for a
 * request is its business. So are libseccomp's: 2.5.4 frees twice, or loops for ever, when
 * realloc() fails while it makes a filter. A child does not count.
 */
/* Calls have the names that they have in libc here, and no others. */
#undef _FILE_OFFSET_BITS
#undef _FORTIFY_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { NOTHING, ALLOC, READ, WRITE, OPEN, LIST, MAP, BUS, THREAD, FORK, NET };

static const char *const kinds[] = {
    [NOTHING] = "none",  [ALLOC] = "alloc", [READ] = "read", [WRITE] = "write",
    [OPEN] = "open",     [LIST] = "list",   [MAP] = "map",   [BUS] = "bus",
    [THREAD] = "thread", [FORK] = "fork",   [NET] = "net"};

struct told {
    atomic_uint_fast64_t calls, failed;
};

static struct {
    enum kind kind;
    uint64_t at;
    char root[PATH_MAX];
    size_t root_len;
    pid_t pid;
    struct code {
        uintptr_t from, to;
    } fuse, seccomp;
    bool tells_where;
    struct told *told;
} nth;

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define CALLER ((uintptr_t)__builtin_return_address(0))

/* ---- what was asked for ---- */

static void set_code(const struct dl_phdr_info *info, struct code *code)
{
    code->from = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD)
            code->to = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr +
                       info->dlpi_phdr[i].p_memsz;
}

static int find_code(struct dl_phdr_info *info, size_t size, void *user)
{
    (void)size;
    (void)user;
    if (strstr(info->dlpi_name, "libfuse3"))
        set_code(info, &nth.fuse);
    else if (strstr(info->dlpi_name, "libseccomp"))
        set_code(info, &nth.seccomp);
    return 0;
}

static struct told *open_told(const char *path)
{
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
    void *map = MAP_FAILED;

    if (fd >= 0) {
        map = (void *)syscall(SYS_mmap, NULL, sizeof *nth.told, PROT_READ | PROT_WRITE,
                              MAP_SHARED, fd, 0);
        syscall(SYS_close, fd);
    }
    return map == MAP_FAILED ? NULL : map;
}

__attribute__((constructor)) static void begin(void)
{
    const char *kind = getenv("UFS_NTH_KIND"), *at = getenv("UFS_NTH_AT");
    const char *root = getenv("UFS_NTH_ROOT");
    enum kind k = NET;

    while (k > NOTHING && (!kind || strcmp(kinds[k], kind) != 0))
        k--;
    nth.at = at ? strtoull(at, NULL, 10) : 0;
    if (root && realpath(root, nth.root))
        nth.root_len = strlen(nth.root);
    dl_iterate_phdr(find_code, NULL);
    nth.tells_where = getenv("UFS_NTH_WHERE");
    nth.told = open_told(getenv("UFS_NTH_TELL"));
    nth.pid = getpid();
    if (nth.told)
        nth.kind = k; /* from here on */
}

/* For addr2line(1). */
static void tell_where(void)
{
    static const char says[] = "nth: the call fails here\n";
    void *at[40];

    if (nth.tells_where) {
        (void)!syscall(SYS_write, STDERR_FILENO, says, sizeof says - 1);
        backtrace_symbols_fd(at, backtrace(at, 40), STDERR_FILENO);
    }
}

static bool is_in(const struct code *code, uintptr_t caller)
{
    return caller >= code->from && caller < code->to;
}

/* Is it the call's turn to fail? */
static bool is_due(enum kind kind, uintptr_t caller)
{
    if (nth.kind != kind || is_in(&nth.fuse, caller) || is_in(&nth.seccomp, caller) ||
        getpid() != nth.pid)
        return false;
    if (atomic_fetch_add(&nth.told->calls, 1) + 1 != nth.at)
        return false;
    atomic_store(&nth.told->failed, 1);
    tell_where();
    return true;
}

static bool is_below(const char *path)
{
    return nth.root_len > 0 && strncmp(path, nth.root, nth.root_len) == 0 &&
           (path[nth.root_len] == '/' || path[nth.root_len] == '\0');
}

/* Unnamed files stand there too, as DIR/#123 (deleted). */
static bool fd_is_below(int fd)
{
    char link[64], path[PATH_MAX];
    ssize_t n;

    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = '\0';
    return is_below(path);
}

static bool file_is_due(enum kind kind, int fd, uintptr_t caller)
{
    return nth.kind == kind && fd_is_below(fd) && is_due(kind, caller);
}

/* ---- memory ---- */

/* dlsym() allocates, so that these are not looked up but named. */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t align, size_t size);

static void *no_memory(void)
{
    errno = ENOMEM;
    return NULL;
}

void *malloc(size_t size)
{
    return is_due(ALLOC, CALLER) ? no_memory() : __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    return is_due(ALLOC, CALLER) ? no_memory() : __libc_calloc(n, size);
}

void *realloc(void *old, size_t size)
{
    return is_due(ALLOC, CALLER) ? no_memory() : __libc_realloc(old, size);
}

void *reallocarray(void *old, size_t n, size_t size)
{
    size_t bytes;

    if (__builtin_mul_overflow(n, size, &bytes) || is_due(ALLOC, CALLER))
        return no_memory();
    return __libc_realloc(old, bytes);
}

int posix_memalign(void **out, size_t align, size_t size)
{
    void *p = is_due(ALLOC, CALLER) ? NULL : __libc_memalign(align, size);

    *out = p ? p : *out;
    return p ? 0 : ENOMEM;
}

/* ---- files: every name of a call, with its arguments ---- */

#define FAILS_FOR(kind, code, type, name, params, args)                                \
    type name params                                                                   \
    {                                                                                  \
        if (file_is_due(kind, fd, CALLER)) {                                           \
            errno = code;                                                              \
            return -1;                                                                 \
        }                                                                              \
        return REAL(name) args;                                                        \
    }

FAILS_FOR(READ, EIO, ssize_t, read, (int fd, void *p, size_t n), (fd, p, n))
FAILS_FOR(READ, EIO, ssize_t, pread, (int fd, void *p, size_t n, off_t o),
          (fd, p, n, o))
FAILS_FOR(READ, EIO, ssize_t, pread64, (int fd, void *p, size_t n, off64_t o),
          (fd, p, n, o))
FAILS_FOR(READ, EIO, ssize_t, preadv, (int fd, const struct iovec *v, int n, off_t o),
          (fd, v, n, o))
FAILS_FOR(READ, EIO, ssize_t, preadv64,
          (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o))
FAILS_FOR(READ, EIO, ssize_t, preadv2,
          (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))
FAILS_FOR(READ, EIO, ssize_t, preadv64v2,
          (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))
FAILS_FOR(WRITE, ENOSPC, ssize_t, write, (int fd, const void *p, size_t n), (fd, p, n))
FAILS_FOR(WRITE, ENOSPC, ssize_t, pwrite, (int fd, const void *p, size_t n, off_t o),
          (fd, p, n, o))
FAILS_FOR(WRITE, ENOSPC, ssize_t, pwrite64,
          (int fd, const void *p, size_t n, off64_t o), (fd, p, n, o))
FAILS_FOR(WRITE, ENOSPC, ssize_t, pwritev2,
          (int fd, const struct iovec *v, int n, off_t o, int f), (fd, v, n, o, f))
FAILS_FOR(WRITE, ENOSPC, ssize_t, pwritev64v2,
          (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f))
FAILS_FOR(WRITE, ENOSPC, int, ftruncate, (int fd, off_t n), (fd, n))
FAILS_FOR(WRITE, ENOSPC, int, ftruncate64, (int fd, off64_t n), (fd, n))
FAILS_FOR(WRITE, ENOSPC, int, fsync, (int fd), (fd))
FAILS_FOR(WRITE, ENOSPC, int, fdatasync, (int fd), (fd))

/* Where a relative path leads is known once it is open. */
static int opened(int fd, uintptr_t caller)
{
    if (fd < 0 || !file_is_due(OPEN, fd, caller))
        return fd;
    close(fd);
    errno = EMFILE;
    return -1;
}

static mode_t mode_of(int flags, va_list more)
{
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0;
}

#define OPENS(name, params, first, args)                                               \
    int name params                                                                    \
    {                                                                                  \
        va_list more;                                                                  \
        mode_t mode;                                                                   \
                                                                                       \
        va_start(more, first);                                                         \
        mode = mode_of(flags, more);                                                   \
        va_end(more);                                                                  \
        return opened(REAL(name) args, CALLER);                                        \
    }

OPENS(open, (const char *path, int flags, ...), flags, (path, flags, mode))
OPENS(open64, (const char *path, int flags, ...), flags, (path, flags, mode))
OPENS(openat, (int dir, const char *path, int flags, ...), flags,
      (dir, path, flags, mode))
OPENS(openat64, (int dir, const char *path, int flags, ...), flags,
      (dir, path, flags, mode))

/* openat2() has no name in libc. */
long syscall(long number, ...)
{
    long a[6], rc;
    va_list more;

    va_start(more, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(more, long);
    va_end(more);
    rc = REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    return number == SYS_openat2 ? opened((int)rc, CALLER) : rc;
}

#define LISTS(type, name)                                                              \
    type *name(DIR *dir)                                                               \
    {                                                                                  \
        if (file_is_due(LIST, dirfd(dir), CALLER)) {                                   \
            errno = EIO;                                                               \
            return NULL;                                                               \
        }                                                                              \
        return REAL(name)(dir);                                                        \
    }

LISTS(struct dirent, readdir)
LISTS(struct dirent64, readdir64)

/* Of no byte: what is mapped lies behind its end. */
static void *map_nothing(size_t len, int prot, int flags)
{
    int fd = memfd_create("nothing", MFD_CLOEXEC);
    void *map = REAL(mmap)(NULL, len, prot, flags, fd, 0);

    close(fd);
    return map;
}

void *mmap(void *at, size_t len, int prot, int flags, int fd, off_t off)
{
    if (fd >= 0 && file_is_due(MAP, fd, CALLER)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    if (fd >= 0 && file_is_due(BUS, fd, CALLER))
        return map_nothing(len, prot, flags);
    return REAL(mmap)(at, len, prot, flags, fd, off);
}

void *mmap64(void *at, size_t len, int prot, int flags, int fd, off64_t off)
{
    return mmap(at, len, prot, flags, fd, off);
}

/* ---- threads and processes ---- */

/* How many libfuse has is a matter of requests that meet: they have a name of their own. */
int pthread_create(pthread_t *out, const pthread_attr_t *attr, void *(*fn)(void *),
                   void *user)
{
    int rc =
        is_due(THREAD, CALLER) ? EAGAIN : REAL(pthread_create)(out, attr, fn, user);

    if (rc == 0 && is_in(&nth.fuse, CALLER))
        pthread_setname_np(*out, "libfuse");
    return rc;
}

pid_t fork(void)
{
    if (!is_due(FORK, CALLER))
        return REAL(fork)();
    errno = EAGAIN;
    return -1;
}

/* ---- networks ---- */

static bool is_network(int fd)
{
    int domain = AF_UNIX;
    socklen_t len = sizeof domain;

    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &len) == 0 &&
           (domain == AF_INET || domain == AF_INET6);
}

#define RESETS(type, name, params, args)                                               \
    type name params                                                                   \
    {                                                                                  \
        if (nth.kind == NET && is_network(fd) && is_due(NET, CALLER)) {                \
            errno = ECONNRESET;                                                        \
            return -1;                                                                 \
        }                                                                              \
        return REAL(name) args;                                                        \
    }

RESETS(int, connect, (int fd, const struct sockaddr *to, socklen_t n), (fd, to, n))
RESETS(ssize_t, send, (int fd, const void *p, size_t n, int f), (fd, p, n, f))
RESETS(ssize_t, sendmsg, (int fd, const struct msghdr *m, int f), (fd, m, f))
RESETS(ssize_t, recv, (int fd, void *p, size_t n, int f), (fd, p, n, f))
RESETS(ssize_t, recvmsg, (int fd, struct msghdr *m, int f), (fd, m, f))

int socket(int domain, int type, int protocol)
{
    if ((domain != AF_INET && domain != AF_INET6) || !is_due(NET, CALLER))
        return REAL(socket)(domain, type, protocol);
    errno = ENOBUFS;
    return -1;
}
