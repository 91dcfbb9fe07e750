/* SPDX-License-Identifier: MIT */
/* remote/block_disk.c - blocks in their places: found, checked, kept, and who has to go. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include <xxhash.h>

#include "base/err.h"
#include "remote/block_disk_priv.h"

enum {
    AGES = 3,             /* of the table, in which a block is looked for */
    TOUCH_MS = 500,       /* a use is noted no more often */
    FULL_PAUSE_MS = 5000, /* a full disk is left alone for so long */
};

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

/* ---- reading ---- */

/* BLOCK_WAYS: it is not there. */
static unsigned find_way(const struct block_set *s, uint64_t tag)
{
    unsigned i = 0;

    while (i < BLOCK_WAYS && s->way[i].tag != tag)
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
                             const struct block_way *w, uint64_t at, unsigned first,
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
                  const struct block_way *w)
{
    uint64_t now = block_disk_now();
    ssize_t ignored;

    if (d->read_only || (now >= w->used && now - w->used < TOUCH_MS))
        return;
    ignored =
        pwrite(d->table, &now, sizeof now,
               (off_t)(block_table_at(set, way) + offsetof(struct block_way, used)));
    (void)ignored;
}

/* Which sectors of the run are noted as there, the lowest bit for the first one. */
static unsigned noted(const struct block_way *w, unsigned first, size_t len)
{
    return (w->valid >> first) & ((1u << sectors_of(len)) - 1);
}

/* Where a block stands. */
struct found {
    uint64_t set;
    unsigned way;
    struct block_way entry;
};

static bool find_in_set(const struct block_disk *d, uint64_t set, uint64_t tag,
                        struct found *f)
{
    struct block_set s;

    if (!block_disk_read_set(d, set, &s))
        return false;
    f->set = set;
    f->way = find_way(&s, tag);
    if (f->way < BLOCK_WAYS)
        f->entry = s.way[f->way];
    return f->way < BLOCK_WAYS;
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
            passed |= read_sectors(d, name, &f->entry,
                                   block_data_at(f->set, f->way, first + i), first, i,
                                   end, len, dst);
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
        block_disk_lock(d, F_RDLCK, block_table_at(f.set, 0),
                        sizeof(struct block_set)) == 0) {
        if (find_block(d, sets, name->tag, &same) && same.set == f.set) {
            there = noted(&same.entry, first, len);
            passed = read_noted(d, name, &same, there, first, len, dst);
            atomic_fetch_add(&d->damaged,
                             (unsigned)__builtin_popcount(there & ~passed));
        }
        block_disk_unlock(d);
    }
    pthread_mutex_unlock(&d->lock);
    return passed;
}

unsigned block_disk_get(struct block_disk *d, const struct block_name *name,
                        unsigned first, size_t len, void *dst)
{
    uint64_t sets = block_disk_sets(d);
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
static unsigned find_victim(const struct block_set *s)
{
    uint64_t soon = block_disk_now() +
                    BLOCK_PATIENCE_MS; /* a clock was wrong: not to be kept for ever */
    uint64_t oldest = UINT64_MAX;
    unsigned victim = 0;

    for (unsigned i = 0; i < BLOCK_WAYS; i++) {
        const struct block_way *w = &s->way[i];
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
                      unsigned way, struct block_way *w, unsigned first,
                      const char *data, size_t len)
{
    uint16_t bits = (uint16_t)(((1u << sectors_of(len)) - 1) << first);
    int rc = write_full(d->data, data, len, block_data_at(set, way, first)), rc2;

    if (w->tag != 0 && w->tag != name->tag)
        atomic_fetch_add(&d->evicted, 1);
    if (w->tag != name->tag)
        *w = (struct block_way){.tag = name->tag};
    w->owner = name->owner;
    w->used = block_disk_now();
    for (unsigned i = 0; i < sectors_of(len); i++)
        w->sum[first + i] = sector_sum(name, first + i, data + i * (size_t)BLOCK_SECTOR,
                                       sector_len(len, i));
    w->valid = (uint16_t)(rc == 0 ? w->valid | bits : w->valid & ~bits);
    if (rc == 0)
        atomic_fetch_add(&d->written, len);
    rc2 = write_full(d->table, w, sizeof *w, block_table_at(set, way));
    return rc < 0 ? rc : rc2;
}

/* With the header and the set locked. */
static int put_in_set(struct block_disk *d, const struct block_name *name, uint64_t set,
                      unsigned first, const void *data, size_t len)
{
    struct block_set s;
    unsigned way;

    if (!block_disk_read_set(d, set, &s))
        return -EIO;
    way = find_way(&s, name->tag);
    if (way == BLOCK_WAYS)
        way = find_victim(&s);
    return put_in_way(d, name, set, way, &s.way[way], first, data, len);
}

static int put_locked(struct block_disk *d, const struct block_name *name,
                      unsigned first, const void *data, size_t len)
{
    uint64_t set;
    int rc = block_disk_lock(d, F_RDLCK, 0, 1);

    if (rc < 0)
        return rc;
    block_disk_look(d); /* under the lock: nobody takes the places away meanwhile */
    if (atomic_load(&d->sets) == 0)
        return -ENOSPC;
    set = set_of(name->tag, atomic_load(&d->sets), 0);
    rc = block_disk_lock(d, F_WRLCK, block_table_at(set, 0), sizeof(struct block_set));
    return rc < 0 ? rc : put_in_set(d, name, set, first, data, len);
}

int block_disk_put(struct block_disk *d, const struct block_name *name, unsigned first,
                   const void *data, size_t len)
{
    int rc;

    if (d->read_only)
        return -EROFS;
    if (len == 0 || block_disk_now() < atomic_load(&d->full_until))
        return len == 0 ? 0 : -ENOSPC;
    pthread_mutex_lock(&d->lock);
    rc = put_locked(d, name, first, data, len);
    block_disk_unlock(d);
    pthread_mutex_unlock(&d->lock);
    if (rc == -ENOSPC || rc == -EDQUOT)
        atomic_store(&d->full_until, block_disk_now() + FULL_PAUSE_MS);
    return rc;
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
