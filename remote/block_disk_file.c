/* SPDX-License-Identifier: MIT */
/* remote/block_disk_file.c - the files of the blocks: their places, header, locks, opening. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include <xxhash.h>

#include "base/err.h"
#include "remote/block_disk_priv.h"

enum {
    VERSION = 1,
    TABLE_START = 4096,     /* of the first set; before it, the header */
    EXTENT_COST = 16 << 10, /* what a file system notes of a set's scattered sectors */
    KEPT_FREE = 128 << 10,  /* the directory, the header and the names */
    LOOK_MS = 500,          /* the header is not looked at more often, by readers */
    POLL_MS = 10,
};

struct header {
    char magic[8];
    uint32_t version, sector, block, ways;
    uint64_t limit, sets;
    uint64_t sum;
};

_Static_assert(sizeof(struct block_way) == 152, "on disk");
_Static_assert(sizeof(struct header) == 48, "on disk");

uint64_t block_disk_now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME_COARSE, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* ---- where things lie ---- */

uint64_t block_table_at(uint64_t set, unsigned way)
{
    return TABLE_START + set * sizeof(struct block_set) +
           way * sizeof(struct block_way);
}

uint64_t block_data_at(uint64_t set, unsigned way, unsigned sector)
{
    return (set * BLOCK_WAYS + way) * BLOCK_BYTES + sector * (uint64_t)BLOCK_SECTOR;
}

bool block_disk_read_set(const struct block_disk *d, uint64_t set,
                         struct block_set *out)
{
    return pread(d->table, out, sizeof *out, (off_t)block_table_at(set, 0)) ==
           (ssize_t)sizeof *out;
}

static uint64_t sets_for(uint64_t limit)
{
    const uint64_t each =
        (uint64_t)BLOCK_WAYS * BLOCK_BYTES + sizeof(struct block_set) + EXTENT_COST;

    return limit > KEPT_FREE ? (limit - KEPT_FREE) / each : 0;
}

/* ---- locks, of the open file: they end with their process ---- */

int block_disk_lock(const struct block_disk *d, short type, uint64_t off, uint64_t len)
{
    struct flock l = {.l_type = type,
                      .l_whence = SEEK_SET,
                      .l_start = (off_t)off,
                      .l_len = (off_t)len};

    if (fcntl(d->table, F_OFD_SETLK, &l) == 0)
        return 0;
    return errno == EACCES || errno == EAGAIN ? -EAGAIN : -errno;
}

void block_disk_unlock(const struct block_disk *d)
{
    block_disk_lock(d, F_UNLCK, 0, 0);
}

/* All of it, for who changes the header; those who write blocks share it otherwise. */
static int lock_header(const struct block_disk *d, struct err *e)
{
    const struct timespec moment = {.tv_nsec = POLL_MS * 1000000L};
    int rc;

    for (int waited = 0;; waited += POLL_MS) {
        rc = block_disk_lock(d, F_WRLCK, 0, TABLE_START);
        if (rc != -EAGAIN || waited >= BLOCK_PATIENCE_MS)
            break;
        nanosleep(&moment, NULL);
    }
    if (rc == -EAGAIN)
        return err_set(e, EBUSY, "%s: another process holds the cache of blocks",
                       d->dir);
    return rc < 0 ? err_set(e, -rc, "lock %s: %s", d->dir, strerror(-rc)) : 0;
}

/* ---- the header ---- */

static uint64_t header_sum(const struct header *h)
{
    return XXH3_64bits(h, offsetof(struct header, sum));
}

static struct header make_header(uint64_t limit)
{
    struct header h = {.magic = "ufsblks",
                       .version = VERSION,
                       .sector = BLOCK_SECTOR,
                       .block = BLOCK_BYTES,
                       .ways = BLOCK_WAYS,
                       .limit = limit,
                       .sets = sets_for(limit)};

    h.sum = header_sum(&h);
    return h;
}

/* False: none, or one of another version. */
static bool read_header(const struct block_disk *d, struct header *h)
{
    struct header same;

    if (pread(d->table, h, sizeof *h, 0) != (ssize_t)sizeof *h)
        return false;
    same = make_header(h->limit);
    return memcmp(h, &same, sizeof same) == 0;
}

static void use_header(struct block_disk *d, const struct header *h)
{
    atomic_store(&d->limit, h->limit);
    atomic_store(&d->sets, h->sets);
    atomic_store(&d->looked, block_disk_now());
}

/* What cannot be read has no places. */
void block_disk_look(struct block_disk *d)
{
    struct header h;

    if (!read_header(d, &h))
        h.limit = h.sets = 0;
    use_header(d, &h);
}

uint64_t block_disk_sets(struct block_disk *d)
{
    if (block_disk_now() - atomic_load(&d->looked) > LOOK_MS)
        block_disk_look(d);
    return atomic_load(&d->sets);
}

static int cut_files(const struct block_disk *d, uint64_t sets, struct err *e)
{
    if (ftruncate(d->data, (off_t)block_data_at(sets, 0, 0)) < 0 ||
        ftruncate(d->table, (off_t)block_table_at(sets, 0)) < 0)
        return err_set(e, errno, "%s: set its size: %s", d->dir, strerror(errno));
    return 0;
}

/* With the header locked. `empty`: what is there goes. */
static int write_header(struct block_disk *d, uint64_t limit, bool empty, struct err *e)
{
    struct header h = make_header(limit);
    int rc = empty ? cut_files(d, 0, e) : 0;

    if (rc == 0 && pwrite(d->table, &h, sizeof h, 0) != (ssize_t)sizeof h)
        rc = err_set(e, errno ? errno : EIO, "%s: write its header: %s", d->dir,
                     strerror(errno));
    if (rc == 0)
        rc = cut_files(d, h.sets, e);
    if (rc == 0)
        use_header(d, &h);
    return rc;
}

/* ---- opening ---- */

static int open_file(const struct block_disk *d, int dir, const char *name, int more)
{
    int flags = (d->read_only ? O_RDONLY : O_RDWR | O_CREAT) | more;

    return openat(dir, name, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
}

static int open_files(struct block_disk *d)
{
    CLEANUP_FD int dir = open(d->dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    struct stat st;

    if (dir < 0)
        return -errno;
    d->table = open_file(d, dir, "table", 0);
    if (d->table < 0)
        return -errno;
    d->data = open_file(d, dir, "data", 0);
    if (d->data < 0)
        return -errno;
    if (fstat(d->table, &st) < 0 || !S_ISREG(st.st_mode) || fstat(d->data, &st) < 0 ||
        !S_ISREG(st.st_mode))
        return -EBADMSG;
    d->names = open_file(d, dir, "names", d->read_only ? 0 : O_APPEND);
    return 0; /* names are for people only */
}

static void close_files(struct block_disk *d)
{
    cleanup_fd(&d->table);
    cleanup_fd(&d->data);
    cleanup_fd(&d->names);
    d->table = d->data = d->names = -1;
}

static int open_or_read(struct block_disk *d, struct err *e)
{
    int rc;

    if (mkdir(d->dir, 0700) < 0 && errno != EEXIST && errno != EROFS && errno != EACCES)
        return err_set(e, errno, "make directory %s: %s", d->dir, strerror(errno));
    rc = open_files(d);
    if (rc == -EROFS || rc == -EACCES || rc == -EPERM) {
        close_files(d);
        d->read_only = true;
        rc = open_files(d);
    }
    return rc < 0 ? err_set(e, -rc, "%s: %s", d->dir, strerror(-rc)) : 0;
}

static int set_limit(struct block_disk *d, uint64_t limit, struct err *e)
{
    struct header h;
    bool good;
    int rc = 0;

    if (read_header(d, &h) && (d->read_only || !limit || h.limit == limit)) {
        use_header(d, &h);
        return 0;
    }
    if (d->read_only)
        return err_set(e, EROFS, "%s: holds no blocks of this version", d->dir);
    rc = lock_header(d, e);
    if (rc < 0)
        return rc;
    good = read_header(d, &h); /* another process may have been first */
    if (good && (!limit || h.limit == limit))
        use_header(d, &h);
    else
        rc = write_header(d, limit ? limit : BLOCK_DISK_DEFAULT, !good, e);
    block_disk_unlock(d);
    return rc;
}

int block_disk_open(const char *dir, uint64_t limit, struct block_disk **out,
                    struct err *e)
{
    CLEANUP(block_disk_closep) struct block_disk *d = calloc(1, sizeof *d);
    int rc;

    if (limit && sets_for(limit) == 0)
        return err_set(e, EINVAL, "a cache of blocks of %" PRIu64 " bytes", limit);
    if (!d)
        return err_nomem(e);
    d->table = d->data = d->names = -1;
    pthread_mutex_init(&d->lock, NULL);
    if (asprintf(&d->dir, "%s/blocks", dir) < 0) {
        d->dir = NULL;
        return err_nomem(e);
    }
    rc = open_or_read(d, e);
    if (rc == 0)
        rc = set_limit(d, limit, e);
    if (rc < 0)
        return rc;
    *out = steal(&d);
    return 0;
}

void block_disk_close(struct block_disk *d)
{
    if (!d)
        return;
    close_files(d);
    pthread_mutex_destroy(&d->lock);
    free(d->dir);
    free(d);
}

void block_disk_closep(struct block_disk **d)
{
    block_disk_close(*d);
}

int block_disk_clear(struct block_disk *d, struct err *e)
{
    int rc;

    if (d->read_only)
        return err_set(e, EROFS, "%s: cannot be written", d->dir);
    pthread_mutex_lock(&d->lock);
    rc = lock_header(d, e);
    if (rc == 0) {
        rc = write_header(d, atomic_load(&d->limit), true, e);
        if (rc == 0 && d->names >= 0 && ftruncate(d->names, 0) < 0)
            rc = err_set(e, errno, "%s: %s", d->dir, strerror(errno));
        block_disk_unlock(d);
    }
    pthread_mutex_unlock(&d->lock);
    return rc;
}
