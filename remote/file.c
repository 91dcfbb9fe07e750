/* SPDX-License-Identifier: MIT */
/* remote/file.c - a regular file on a local file system as a source. */
#include "remote/source.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include "base/err.h"

enum {
    /* WILLNEED reads no more at a time than the disk's largest request or read-ahead
     * window (seen: 8 MiB of 32 asked for), so it is asked in steps of the smallest. */
    AHEAD_STEP = 128 << 10,
    PROBE_STEP = 256 << 10, /* pages come in read-ahead windows, hardly ever alone */
    MINCORE_PAGES = 1024,
    /* Of short windows, after so many that were in memory, one in a few is looked up. */
    SHORT_WINDOW = 16 << 10,
    TRUSTED_AFTER = 64,
    TRUSTED_EACH = 8,
    READ_PIECES = 256, /* that one call fills */
};

struct file_source {
    struct source base;
    int fd;
    nlink_t links;       /* when it was opened */
    bool mincore_honest; /* mincore(2) says "all there" of other people's files */
    _Atomic(const void *) map;
    atomic_uint found; /* short windows in memory since one was not */
    pthread_mutex_t lock;
    bool map_tried; /* guarded by lock */
};

static struct file_source *file_of(struct source *s)
{
    return container_of(s, struct file_source, base);
}

static int file_read(struct source *s, uint64_t off, size_t len, void *dst,
                     struct err *e)
{
    int rc = read_exact(file_of(s)->fd, dst, len, off, e);

    return rc < 0 ? err_wrap(e, "%s", s->name) : 0;
}

/* How many ranges from the first on stand one behind the other, `most` at most. */
static size_t neighbours(const struct source_range *r, size_t n, size_t most)
{
    size_t k = 1;

    while (k < MIN(n, most) && r[k].off == r[k - 1].off + r[k - 1].len)
        k++;
    return k;
}

static int file_read_many(struct source *s, const struct source_range *r, size_t n,
                          struct err *e)
{
    struct iovec iov[READ_PIECES];
    int rc = 0;

    for (size_t k; rc == 0 && n > 0; r += k, n -= k) {
        k = neighbours(r, n, READ_PIECES);
        for (size_t i = 0; i < k; i++)
            iov[i] = (struct iovec){r[i].dst, r[i].len};
        rc = readv_exact(file_of(s)->fd, iov, (int)k, r[0].off, e);
    }
    return rc < 0 ? err_wrap(e, "%s", s->name) : 0;
}

/* Maps all of it unless it is shorter by now; NULL when it cannot be. */
static const void *map_whole(const struct file_source *f)
{
    struct stat st;
    void *map;

    if (f->base.size == 0 || fstat(f->fd, &st) < 0 ||
        (uint64_t)st.st_size < f->base.size)
        return NULL;
    map = mmap(NULL, f->base.size, PROT_READ, MAP_SHARED, f->fd, 0);
    return map == MAP_FAILED ? NULL : map;
}

static const void *file_map(struct source *s)
{
    struct file_source *f = file_of(s);
    const void *map = atomic_load_explicit(&f->map, memory_order_acquire);

    if (map)
        return map;
    pthread_mutex_lock(&f->lock);
    if (!f->map_tried) {
        f->map_tried = true;
        atomic_store_explicit(&f->map, map_whole(f), memory_order_release);
    }
    map = atomic_load_explicit(&f->map, memory_order_relaxed);
    pthread_mutex_unlock(&f->lock);
    return map;
}

static bool resident_by_mincore(const char *map, uint64_t off, size_t len)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    uint64_t end = off + len;
    unsigned char in[MINCORE_PAGES];

    for (uint64_t at = off / page * page; at < end; at += MINCORE_PAGES * page) {
        size_t part = MIN(end - at, MINCORE_PAGES * page);

        if (mincore((void *)(uintptr_t)(map + at), part, in) < 0)
            return false;
        for (size_t i = 0; i < (part + page - 1) / page; i++)
            if (!(in[i] & 1))
                return false;
    }
    return true;
}

/* 1: in memory, 0: not, -1: the file system cannot tell. */
static int byte_resident(int fd, uint64_t off)
{
    char byte;
    struct iovec iov = {&byte, 1};

    if (preadv2(fd, &iov, 1, (off_t)off, RWF_NOWAIT) == 1)
        return 1;
    return errno == EOPNOTSUPP ? -1 : 0;
}

/*
 * Samples: where they are wrong, a read from the mapping waits for the disk, no more. For
 * 1 MiB this is 4 short calls; mincore(2) looks up each page of what is not mapped yet,
 * an eighth of all that a first read costs the server.
 */
static int resident_by_probe(int fd, uint64_t off, size_t len)
{
    int there = 1;

    for (uint64_t at = off; there == 1 && at + PROBE_STEP < off + len; at += PROBE_STEP)
        there = byte_resident(fd, at);
    return there == 1 ? byte_resident(fd, off + len - 1) : there;
}

/*
 * A look is a tenth of what a random read of 4 KiB costs the server. Who reads single bytes
 * wants to know.
 */
static bool is_trusted(struct file_source *f, size_t len)
{
    unsigned found;

    if (len < 2 || len > SHORT_WINDOW)
        return false;
    found = atomic_load_explicit(&f->found, memory_order_relaxed);
    if (found < TRUSTED_AFTER || found % TRUSTED_EACH == 0)
        return false;
    atomic_store_explicit(&f->found, found + 1, memory_order_relaxed);
    return true;
}

static void note_found(struct file_source *f, size_t len, bool there)
{
    if (!there)
        atomic_store_explicit(&f->found, 0, memory_order_relaxed);
    else if (len <= SHORT_WINDOW)
        atomic_fetch_add_explicit(&f->found, 1, memory_order_relaxed);
}

static bool file_resident(struct source *s, uint64_t off, size_t len)
{
    struct file_source *f = file_of(s);
    const void *map;
    int there;

    if (is_trusted(f, len))
        return true;
    there = resident_by_probe(f->fd, off, len);
    note_found(f, len, there == 1);
    if (there >= 0)
        return there;
    map = f->mincore_honest ? file_map(s) : NULL;
    return map && resident_by_mincore(map, off, len);
}

static void file_will_need(struct source *s, uint64_t off, uint64_t len)
{
    for (uint64_t done = 0; done < len; done += AHEAD_STEP)
        if (posix_fadvise(file_of(s)->fd, (off_t)(off + done),
                          (off_t)MIN(len - done, AHEAD_STEP), POSIX_FADV_WILLNEED))
            return; /* only a hint */
}

/*
 * Other names that come and go (a newer file renamed over this one, a hard-linked
 * backup) move the ctime too: a different count of names explains it.
 */
static int file_check(struct source *s, struct err *e)
{
    struct file_source *f = file_of(s);
    struct file_id now;
    struct stat st;

    if (fstat(f->fd, &st) < 0)
        return err_set(e, errno, "%s: %s", s->name, strerror(errno));
    now = file_id_of(&st);
    if (st.st_nlink != f->links)
        now.ctime_ns = s->id.ctime_ns;
    return file_id_equal(&now, &s->id) ? 0 : source_stale(s->name, &s->id, &now, e);
}

static void file_close(struct source *s)
{
    struct file_source *f = file_of(s);
    const void *map = atomic_load(&f->map);

    if (map)
        munmap((void *)(uintptr_t)map, s->size);
    close(f->fd);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

static int file_fd(struct source *s)
{
    return file_of(s)->fd;
}

static const struct source_ops file_ops = {
    .name = "file",
    .read = file_read,
    .read_many = file_read_many,
    .map = file_map,
    .resident = file_resident,
    .will_need = file_will_need,
    .check = file_check,
    .fd = file_fd,
    .close = file_close,
};

int source_from_fd(int fd, const char *name, struct source **out, struct err *e)
{
    CLEANUP_FD int owned = fd;
    CLEANUP_FREE struct file_source *f = calloc(1, sizeof *f);
    struct stat st;

    if (!f)
        return err_nomem(e);
    if (fstat(fd, &st) < 0)
        return err_set(e, errno, "%s: %s", name, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return err_set(e, EINVAL, "%s: not a regular file", name);
    TRY(source_init(&f->base, &file_ops, name, (uint64_t)st.st_size, e));
    f->base.id = file_id_of(&st);
    f->base.file_mapped = true;
    f->fd = steal_fd(&owned);
    f->links = st.st_nlink;
    f->mincore_honest = st.st_uid == geteuid() || geteuid() == 0;
    pthread_mutex_init(&f->lock, NULL);
    *out = &steal(&f)->base;
    return 0;
}
