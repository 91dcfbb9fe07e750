/* SPDX-License-Identifier: MIT */
/* tests/mount/slow.c - a slow disk, or a slow writer: loaded before libc (LD_PRELOAD). */

/*
 * SLOW_SYNC_MS=N   fsync, fdatasync and syncfs take N ms longer: the disk of a server
 * SLOW_WRITE_MS=N  each SLOW_EVERY-th change waits N ms before it happens, SLOW_MOST of
 *                  them at most: a writer
 * SLOW_LOG=FILE    one byte is appended for each change, so that they can be counted
 *
 * A change is the close of a file that was open for writing, a new name, a rename or a
 * removal.
 */
/* Calls have the names that they have in libc here, and no others. */
#undef _FILE_OFFSET_BITS
#undef _FORTIFY_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static long number(const char *name)
{
    const char *text = getenv(name);

    return text ? atol(text) : 0;
}

static void nap(long ms)
{
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};

    while (ms > 0 && nanosleep(&t, &t) != 0)
        ;
}

static void count(const char *log)
{
    int fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);

    if (fd < 0 || write(fd, ".", 1) != 1)
        abort();
    REAL(close)(fd);
}

static void change(void)
{
    static atomic_long changes;
    const char *log = getenv("SLOW_LOG");
    long every = number("SLOW_EVERY"), at = atomic_fetch_add(&changes, 1);

    if (log)
        count(log);
    if (every > 0 && at % every == 0 && at / every < number("SLOW_MOST"))
        nap(number("SLOW_WRITE_MS"));
}

int fsync(int fd)
{
    nap(number("SLOW_SYNC_MS"));
    return REAL(fsync)(fd);
}

int fdatasync(int fd)
{
    nap(number("SLOW_SYNC_MS"));
    return REAL(fdatasync)(fd);
}

int syncfs(int fd)
{
    nap(number("SLOW_SYNC_MS"));
    return REAL(syncfs)(fd);
}

static int is_being_written(int fd)
{
    struct stat st;
    int flags = fcntl(fd, F_GETFL);

    return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY && fstat(fd, &st) == 0 &&
           S_ISREG(st.st_mode);
}

int close(int fd)
{
    if (is_being_written(fd))
        change();
    return REAL(close)(fd);
}

#define CHANGES(name, parameters, arguments)                                           \
    int name parameters                                                                \
    {                                                                                  \
        change();                                                                      \
        return REAL(name) arguments;                                                   \
    }

CHANGES(mkdir, (const char *path, mode_t mode), (path, mode))
CHANGES(mkdirat, (int dir, const char *path, mode_t mode), (dir, path, mode))
CHANGES(rename, (const char *from, const char *to), (from, to))
CHANGES(renameat, (int a, const char *from, int b, const char *to), (a, from, b, to))
CHANGES(renameat2, (int a, const char *from, int b, const char *to, unsigned flags),
        (a, from, b, to, flags))
CHANGES(link, (const char *from, const char *to), (from, to))
CHANGES(linkat, (int a, const char *from, int b, const char *to, int flags),
        (a, from, b, to, flags))
CHANGES(symlink, (const char *from, const char *to), (from, to))
CHANGES(symlinkat, (const char *from, int dir, const char *to), (from, dir, to))
CHANGES(unlink, (const char *path), (path))
CHANGES(unlinkat, (int dir, const char *path, int flags), (dir, path, flags))
CHANGES(rmdir, (const char *path), (path))
