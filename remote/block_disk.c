/* SPDX-License-Identifier: MIT */
/* remote/block_disk.c - a table of places and a file of blocks, both of fixed size. */
#include "remote/block_disk.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include <xxhash.h>

#include "base/err.h"
#include "base/fsutil.h"

/*
 * `data` is a sparse file of `sets` times WAYS places of a block each, `table` says what
 * stands in them. A block belongs to one set, as its tag says, and takes the place in it
 * that was not used for longest. So there is nothing to add up and nothing to lose: whatever
 * dies at whatever moment, the files have no more places than before. What was torn does
 * not pass its check (decision 011).
 */
enum {
    VERSION = 1,
    WAYS = 32,
    AGES = 3,               /* of the table, in which a block is looked for */
    TABLE_START = 4096,     /* of the first set; before it, the header */
    NAMES_MAX = 64 << 10,   /* bytes of the file of owners' names */
    EXTENT_COST = 16 << 10, /* what a file system notes of a set's scattered sectors */
    KEPT_FREE = 128 << 10,  /* the directory, the header and the names */
    TOUCH_MS = 500,         /* a use is noted no more often */
    LOOK_MS = 500,          /* nor is the header looked at, by readers */
    PATIENCE_MS = 5000,     /* for others who hold all of it */
    POLL_MS = 10,
    FULL_PAUSE_MS = 5000, /* a full disk is left alone for so long */
};

struct way {
    uint64_t tag;  /* 0: free */
    uint64_t used; /* milliseconds since 1970 */
    uint32_t owner;
    uint16_t valid; /* a bit for each sector */
    uint16_t unused;
    uint64_t sum[BLOCK_SECTORS]; /* XXH3 with the name's seed, of each sector */
};

struct set {
    struct way way[WAYS];
};

struct header {
    char magic[8];
    uint32_t version, sector, block, ways;
    uint64_t limit, sets;
    uint64_t sum;
};

_Static_assert(sizeof(struct way) == 152, "on disk");
_Static_assert(sizeof(struct header) == 48, "on disk");

struct block_disk {
    char *dir;
    int table, data, names;
    bool read_only;
    atomic_uint_least64_t sets, limit;
    atomic_uint_least64_t looked; /* at the header, in ms */
    atomic_uint_least64_t damaged, written, evicted;
    atomic_uint_least64_t full_until; /* ms: the disk was full */
    pthread_mutex_t
        lock; /* who has it may hold locks on files, which are not a thread's */
};

static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME_COARSE, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

/* ---- where things lie ---- */

static uint64_t table_at(uint64_t set, unsigned way)
{
    return TABLE_START + set * sizeof(struct set) + way * sizeof(struct way);
}

static uint64_t data_at(uint64_t set, unsigned way, unsigned sector)
{
    return (set * WAYS + way) * BLOCK_BYTES + sector * (uint64_t)BLOCK_SECTOR;
}

static uint64_t sets_for(uint64_t limit)
{
    const uint64_t each =
        (uint64_t)WAYS * BLOCK_BYTES + sizeof(struct set) + EXTENT_COST;

    return limit > KEPT_FREE ? (limit - KEPT_FREE) / each : 0;
}

/* The power of two that is not less than n. */
static uint64_t power_over(uint64_t n)
{
    uint64_t p = 1;

    while (p < n)
        p *= 2;
    return p;
}

/*
 * As in a table that grows by one bucket at a time: with more or fewer sets most blocks
 * are still where they are looked for. `age` 0 is where a block belongs now, 1 and more
 * where it did when there were half as many sets, a quarter, ...
 */
static uint64_t set_of(uint64_t tag, uint64_t sets, unsigned age)
{
    uint64_t mask = power_over(sets) - 1;
    uint64_t set = tag & mask;

    return (set < sets ? set : set & mask >> 1) & mask >> age;
}

/* ---- locks, of the open file: they end with their process ---- */

static int lock_range(const struct block_disk *d, short type, uint64_t off,
                      uint64_t len)
{
    struct flock l = {.l_type = type,
                      .l_whence = SEEK_SET,
                      .l_start = (off_t)off,
                      .l_len = (off_t)len};

    if (fcntl(d->table, F_OFD_SETLK, &l) == 0)
        return 0;
    return errno == EACCES || errno == EAGAIN ? -EAGAIN : -errno;
}

static void unlock_all(const struct block_disk *d)
{
    lock_range(d, F_UNLCK, 0, 0);
}

/* All of it, for who changes the header; those who write blocks share it otherwise. */
static int lock_header(const struct block_disk *d, struct err *e)
{
    const struct timespec moment = {.tv_nsec = POLL_MS * 1000000L};
    int rc;

    for (int waited = 0;; waited += POLL_MS) {
        rc = lock_range(d, F_WRLCK, 0, TABLE_START);
        if (rc != -EAGAIN || waited >= PATIENCE_MS)
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
                       .ways = WAYS,
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
    atomic_store(&d->looked, now_ms());
}

/* What cannot be read has no places. */
static void look_at_header(struct block_disk *d)
{
    struct header h;

    if (!read_header(d, &h))
        h.limit = h.sets = 0;
    use_header(d, &h);
}

static uint64_t sets_now(struct block_disk *d)
{
    if (now_ms() - atomic_load(&d->looked) > LOOK_MS)
        look_at_header(d);
    return atomic_load(&d->sets);
}

static int cut_files(const struct block_disk *d, uint64_t sets, struct err *e)
{
    if (ftruncate(d->data, (off_t)data_at(sets, 0, 0)) < 0 ||
        ftruncate(d->table, (off_t)table_at(sets, 0)) < 0)
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
    unlock_all(d);
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

uint64_t block_disk_damaged(const struct block_disk *d)
{
    return atomic_load(&d->damaged);
}

uint64_t block_disk_written(const struct block_disk *d)
{
    return atomic_load(&d->written);
}

uint64_t block_disk_evicted(const struct block_disk *d)
{
    return atomic_load(&d->evicted);
}

/* ---- reading ---- */

static bool read_set(const struct block_disk *d, uint64_t set, struct set *out)
{
    return pread(d->table, out, sizeof *out, (off_t)table_at(set, 0)) ==
           (ssize_t)sizeof *out;
}

/* WAYS: it is not there. */
static unsigned find_way(const struct set *s, uint64_t tag)
{
    unsigned i = 0;

    while (i < WAYS && s->way[i].tag != tag)
        i++;
    return i;
}

static uint64_t sector_sum(const struct block_name *name, unsigned sector,
                           const void *data, size_t len)
{
    return XXH3_64bits_withSeed(data, len, name->seed + sector);
}

/* Bytes of sector `i` of a run of `len` bytes. */
static size_t sector_len(size_t len, unsigned i)
{
    return MIN(len - i * (size_t)BLOCK_SECTOR, (size_t)BLOCK_SECTOR);
}

static unsigned sectors_of(size_t len)
{
    return (unsigned)((len + BLOCK_SECTOR - 1) / BLOCK_SECTOR);
}

/* Sectors [from, to) of the run, which are noted as there: those that pass. */
static unsigned read_sectors(struct block_disk *d, const struct block_name *name,
                             const struct way *w, uint64_t at, unsigned first,
                             unsigned from, unsigned to, size_t len, char *dst)
{
    char *start = dst + from * (size_t)BLOCK_SECTOR;
    size_t want = MIN(len, to * (size_t)BLOCK_SECTOR) - from * (size_t)BLOCK_SECTOR;
    ssize_t got = pread(d->data, start, want, (off_t)at);
    unsigned passed = 0;

    for (unsigned i = from; i < to && got > 0; i++) {
        char *sector = dst + i * (size_t)BLOCK_SECTOR;
        size_t n = sector_len(len, i);

        if (sector + n > start + got)
            break;
        if (sector_sum(name, first + i, sector, n) == w->sum[first + i])
            passed |= 1u << i;
    }
    return passed;
}

static void touch(const struct block_disk *d, uint64_t set, unsigned way,
                  const struct way *w)
{
    uint64_t now = now_ms();
    ssize_t ignored;

    if (d->read_only || (now >= w->used && now - w->used < TOUCH_MS))
        return;
    ignored = pwrite(d->table, &now, sizeof now,
                     (off_t)(table_at(set, way) + offsetof(struct way, used)));
    (void)ignored;
}

/* Which sectors of the run are noted as there, the lowest bit for the first one. */
static unsigned noted(const struct way *w, unsigned first, size_t len)
{
    return (w->valid >> first) & ((1u << sectors_of(len)) - 1);
}

/* Where a block stands. */
struct found {
    uint64_t set;
    unsigned way;
    struct way entry;
};

static bool find_in_set(const struct block_disk *d, uint64_t set, uint64_t tag,
                        struct found *f)
{
    struct set s;

    if (!read_set(d, set, &s))
        return false;
    f->set = set;
    f->way = find_way(&s, tag);
    if (f->way < WAYS)
        f->entry = s.way[f->way];
    return f->way < WAYS;
}

static bool find_block(const struct block_disk *d, uint64_t sets, uint64_t tag,
                       struct found *f)
{
    uint64_t before = UINT64_MAX;

    for (unsigned age = 0; age < AGES; age++) {
        uint64_t set = set_of(tag, sets, age);

        if (set != before && find_in_set(d, set, tag, f))
            return true;
        before = set;
    }
    return false;
}

/* Of the sectors in `there`, those that pass. */
static unsigned read_noted(struct block_disk *d, const struct block_name *name,
                           const struct found *f, unsigned there, unsigned first,
                           size_t len, char *dst)
{
    unsigned passed = 0;

    for (unsigned i = 0, end; i < sectors_of(len); i = end + 1) {
        for (end = i; there >> end & 1;)
            end++;
        if (end > i)
            passed |=
                read_sectors(d, name, &f->entry, data_at(f->set, f->way, first + i),
                             first, i, end, len, dst);
    }
    return passed;
}

/*
 * Some sectors did not pass: they are damaged, or another process was writing just then.
 * They are read once more while nobody may.
 */
static unsigned read_again(struct block_disk *d, const struct block_name *name,
                           uint64_t sets, unsigned first, size_t len, char *dst)
{
    unsigned passed = 0, there;
    struct found f, same;

    pthread_mutex_lock(&d->lock);
    if (find_block(d, sets, name->tag, &f) &&
        lock_range(d, F_RDLCK, table_at(f.set, 0), sizeof(struct set)) == 0) {
        if (find_block(d, sets, name->tag, &same) && same.set == f.set) {
            there = noted(&same.entry, first, len);
            passed = read_noted(d, name, &same, there, first, len, dst);
            atomic_fetch_add(&d->damaged,
                             (unsigned)__builtin_popcount(there & ~passed));
        }
        unlock_all(d);
    }
    pthread_mutex_unlock(&d->lock);
    return passed;
}

unsigned block_disk_get(struct block_disk *d, const struct block_name *name,
                        unsigned first, size_t len, void *dst)
{
    uint64_t sets = sets_now(d);
    unsigned there, passed;
    struct found f;

    if (sets == 0 || len == 0 || !find_block(d, sets, name->tag, &f))
        return 0;
    there = noted(&f.entry, first, len);
    passed = read_noted(d, name, &f, there, first, len, dst);
    if (passed)
        touch(d, f.set, f.way, &f.entry);
    return passed == there ? passed : read_again(d, name, sets, first, len, dst);
}

/* ---- writing ---- */

/* A free place, or the one that was not used for longest. */
static unsigned find_victim(const struct set *s)
{
    uint64_t soon =
        now_ms() + PATIENCE_MS; /* a clock was wrong: not to be kept for ever */
    uint64_t oldest = UINT64_MAX;
    unsigned victim = 0;

    for (unsigned i = 0; i < WAYS; i++) {
        const struct way *w = &s->way[i];
        uint64_t used = w->tag == 0 || w->used > soon ? 0 : w->used;

        if (used < oldest) {
            oldest = used;
            victim = i;
        }
    }
    return victim;
}

static int write_full(int fd, const void *data, size_t len, uint64_t off)
{
    ssize_t n = pwrite(fd, data, len, (off_t)off);

    if (n == (ssize_t)len)
        return 0;
    return n < 0 ? -errno : -ENOSPC;
}

static int put_in_way(struct block_disk *d, const struct block_name *name, uint64_t set,
                      unsigned way, struct way *w, unsigned first, const char *data,
                      size_t len)
{
    uint16_t bits = (uint16_t)(((1u << sectors_of(len)) - 1) << first);
    int rc = write_full(d->data, data, len, data_at(set, way, first)), rc2;

    if (w->tag != 0 && w->tag != name->tag)
        atomic_fetch_add(&d->evicted, 1);
    if (w->tag != name->tag)
        *w = (struct way){.tag = name->tag};
    w->owner = name->owner;
    w->used = now_ms();
    for (unsigned i = 0; i < sectors_of(len); i++)
        w->sum[first + i] = sector_sum(name, first + i, data + i * (size_t)BLOCK_SECTOR,
                                       sector_len(len, i));
    w->valid = (uint16_t)(rc == 0 ? w->valid | bits : w->valid & ~bits);
    if (rc == 0)
        atomic_fetch_add(&d->written, len);
    rc2 = write_full(d->table, w, sizeof *w, table_at(set, way));
    return rc < 0 ? rc : rc2;
}

/* With the header and the set locked. */
static int put_in_set(struct block_disk *d, const struct block_name *name, uint64_t set,
                      unsigned first, const void *data, size_t len)
{
    struct set s;
    unsigned way;

    if (!read_set(d, set, &s))
        return -EIO;
    way = find_way(&s, name->tag);
    if (way == WAYS)
        way = find_victim(&s);
    return put_in_way(d, name, set, way, &s.way[way], first, data, len);
}

static int put_locked(struct block_disk *d, const struct block_name *name,
                      unsigned first, const void *data, size_t len)
{
    uint64_t set;
    int rc = lock_range(d, F_RDLCK, 0, 1);

    if (rc < 0)
        return rc;
    look_at_header(d); /* under the lock: nobody takes the places away meanwhile */
    if (atomic_load(&d->sets) == 0)
        return -ENOSPC;
    set = set_of(name->tag, atomic_load(&d->sets), 0);
    rc = lock_range(d, F_WRLCK, table_at(set, 0), sizeof(struct set));
    return rc < 0 ? rc : put_in_set(d, name, set, first, data, len);
}

int block_disk_put(struct block_disk *d, const struct block_name *name, unsigned first,
                   const void *data, size_t len)
{
    int rc;

    if (d->read_only)
        return -EROFS;
    if (len == 0 || now_ms() < atomic_load(&d->full_until))
        return len == 0 ? 0 : -ENOSPC;
    pthread_mutex_lock(&d->lock);
    rc = put_locked(d, name, first, data, len);
    unlock_all(d);
    pthread_mutex_unlock(&d->lock);
    if (rc == -ENOSPC || rc == -EDQUOT)
        atomic_store(&d->full_until, now_ms() + FULL_PAUSE_MS);
    return rc;
}

/* ---- for people ---- */

/* All names, NUL-terminated; NULL: none. */
static char *read_names(const struct block_disk *d)
{
    CLEANUP_FREE char *text = malloc(NAMES_MAX + 1);
    ssize_t n = text && d->names >= 0 ? pread(d->names, text, NAMES_MAX, 0) : -1;

    if (n < 0)
        return NULL;
    text[n] = '\0';
    return steal(&text);
}

/* The owner's line, behind its number; NULL: it has none. */
static const char *find_name(const char *names, uint32_t owner)
{
    char number[16];
    int len = snprintf(number, sizeof number, "%08x ", owner);

    for (const char *p = names; p && *p;) {
        if (strncmp(p, number, (size_t)len) == 0)
            return p + len;
        p = strchr(p, '\n');
        p = p ? p + 1 : NULL;
    }
    return NULL;
}

void block_disk_name_owner(struct block_disk *d, uint32_t owner, const char *name)
{
    CLEANUP_FREE char *names = read_names(d);
    CLEANUP_FREE char *line = NULL;
    struct err ignored = {0};

    if (d->read_only || !names || find_name(names, owner) || strchr(name, '\n'))
        return;
    if (asprintf(&line, "%08x %s\n", owner, name) < 0) {
        line = NULL;
        return;
    }
    if (strlen(line) < NAMES_MAX - strlen(names))
        write_all(d->names, line, strlen(line), &ignored);
}

static void copy_name(struct block_owner *o, const char *names)
{
    const char *name = find_name(names, o->owner);
    size_t len = name ? MIN(strcspn(name, "\n"), sizeof o->name - 1) : 0;

    if (len)
        memcpy(o->name, name, len);
    o->name[len] = '\0';
}

static struct block_owner *owner_of(struct block_owner *owner, size_t max, size_t *n,
                                    uint32_t number)
{
    for (size_t i = 0; i < *n; i++)
        if (owner[i].owner == number)
            return &owner[i];
    if (*n == max)
        return NULL;
    owner[*n] = (struct block_owner){.owner = number};
    return &owner[(*n)++];
}

static void add_way(const struct way *w, struct block_disk_stats *stats,
                    struct block_owner *owner, size_t max, size_t *n)
{
    uint64_t bytes = (uint64_t)__builtin_popcount(w->valid) * BLOCK_SECTOR;
    struct block_owner *o;

    if (!w->tag || !bytes)
        return;
    stats->blocks++;
    stats->valid += bytes;
    o = owner_of(owner, max, n, w->owner);
    if (!o)
        return;
    o->blocks++;
    o->bytes += bytes;
    o->used = MAX(o->used, (int64_t)(w->used / 1000));
}

static uint64_t disk_bytes(int fd)
{
    struct stat st;

    return fd >= 0 && fstat(fd, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
}

static int by_bytes(const void *a, const void *b)
{
    const struct block_owner *x = a, *y = b;

    return (x->bytes < y->bytes) - (x->bytes > y->bytes);
}

int block_disk_list(struct block_disk *d, struct block_disk_stats *stats,
                    struct block_owner *owner, size_t max, size_t *n, struct err *e)
{
    CLEANUP_FREE struct set *s = malloc(sizeof *s);
    CLEANUP_FREE char *names = read_names(d);
    uint64_t sets;

    if (!s)
        return err_nomem(e);
    *n = 0;
    look_at_header(d);
    sets = atomic_load(&d->sets);
    *stats = (struct block_disk_stats){
        .limit = atomic_load(&d->limit),
        .room = sets * WAYS * BLOCK_BYTES,
        .taken = disk_bytes(d->table) + disk_bytes(d->data) + disk_bytes(d->names),
        .read_only = d->read_only,
    };
    for (uint64_t set = 0; set < sets && read_set(d, set, s); set++)
        for (unsigned i = 0; i < WAYS; i++)
            add_way(&s->way[i], stats, owner, max, n);
    for (size_t i = 0; i < *n; i++)
        copy_name(&owner[i], names);
    qsort(owner, *n, sizeof *owner, by_bytes);
    return 0;
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
        unlock_all(d);
    }
    pthread_mutex_unlock(&d->lock);
    return rc;
}
