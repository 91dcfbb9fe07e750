/* SPDX-License-Identifier: MIT */
/* tests/faults/sector.c - a file whose first bytes the disk cannot read, for a program that it is loaded before. */

/*
 * Loaded before libc (LD_PRELOAD). Each read that wants one of the first four bytes of the file
 * UFS_BAD_FILE fails with EIO, and so does mapping them; with UFS_BAD_WHILE=PATH only as long
 * as something is there.
 */
/* Calls have the names that they have in libc here, and no others. */
#undef _FILE_OFFSET_BITS
#undef _FORTIFY_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { BAD_BYTES = 4 };

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static bool is_bad_file(int fd)
{
    const char *bad = getenv("UFS_BAD_FILE"), *during = getenv("UFS_BAD_WHILE");
    char link[64], path[PATH_MAX];
    ssize_t n;

    if (!bad || (during && access(during, F_OK) < 0))
        return false;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = '\0';
    return strcmp(path, bad) == 0;
}

static bool is_due(int fd, off64_t off)
{
    int code = errno;
    bool due = off < BAD_BYTES && is_bad_file(fd);

    errno = due ? EIO : code;
    return due;
}

#define FAILS(type, name, params, args, off)                                           \
    type name params                                                                   \
    {                                                                                  \
        return is_due(fd, off) ? -1 : REAL(name) args;                                 \
    }

FAILS(ssize_t, read, (int fd, void *p, size_t n), (fd, p, n), lseek64(fd, 0, SEEK_CUR))
FAILS(ssize_t, pread, (int fd, void *p, size_t n, off_t o), (fd, p, n, o), o)
FAILS(ssize_t, pread64, (int fd, void *p, size_t n, off64_t o), (fd, p, n, o), o)
FAILS(ssize_t, preadv, (int fd, const struct iovec *v, int n, off_t o), (fd, v, n, o),
      o)
FAILS(ssize_t, preadv64, (int fd, const struct iovec *v, int n, off64_t o),
      (fd, v, n, o), o)
FAILS(ssize_t, preadv2, (int fd, const struct iovec *v, int n, off_t o, int f),
      (fd, v, n, o, f), o)
FAILS(ssize_t, preadv64v2, (int fd, const struct iovec *v, int n, off64_t o, int f),
      (fd, v, n, o, f), o)

void *mmap(void *at, size_t len, int prot, int flags, int fd, off_t off)
{
    return fd >= 0 && is_due(fd, off) ? MAP_FAILED
                                      : REAL(mmap)(at, len, prot, flags, fd, off);
}

void *mmap64(void *at, size_t len, int prot, int flags, int fd, off64_t off)
{
    return fd >= 0 && is_due(fd, off) ? MAP_FAILED
                                      : REAL(mmap64)(at, len, prot, flags, fd, off);
}
