/* SPDX-License-Identifier: MIT */
/* remote/block_disk_priv.h - what the files of the block cache's disk share. */
#ifndef UFS_REMOTE_BLOCK_DISK_PRIV_H
#define UFS_REMOTE_BLOCK_DISK_PRIV_H

#include <pthread.h>
#include <stdatomic.h>

#include "remote/block_disk.h"

/*
 * `data` is a sparse file of `sets` times BLOCK_WAYS places of a block each, `table` says what
 * stands in them. A block belongs to one set, as its tag says, and takes the place in it
 * that was not used for longest. So there is nothing to add up and nothing to lose: whatever
 * dies at whatever moment, the files have no more places than before. What was torn does
 * not pass its check (decision 011).
 */
enum {
    BLOCK_WAYS = 32,
    BLOCK_PATIENCE_MS =
        5000, /* for others who hold all of it, or whose clock is ahead */
};

struct block_way {
    uint64_t tag;  /* 0: free */
    uint64_t used; /* milliseconds since 1970 */
    uint32_t owner;
    uint16_t valid; /* a bit for each sector */
    uint16_t unused;
    uint64_t sum[BLOCK_SECTORS]; /* XXH3 with the name's seed, of each sector */
};

struct block_set {
    struct block_way way[BLOCK_WAYS];
};

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

/* Milliseconds since 1970. */
uint64_t block_disk_now(void);

/* Offsets in `table` and `data`. */
uint64_t block_table_at(uint64_t set, unsigned way);
uint64_t block_data_at(uint64_t set, unsigned way, unsigned sector);

/* False: it cannot be read, or there is no such set. */
bool block_disk_read_set(const struct block_disk *d, uint64_t set,
                         struct block_set *out);

/*
 * Bytes of the table: F_RDLCK, F_WRLCK or F_UNLCK. -EAGAIN: another process has them. The
 * lock is the open file's, so it ends with the process, and is not a thread's.
 */
int block_disk_lock(const struct block_disk *d, short type, uint64_t off, uint64_t len);
void block_disk_unlock(const struct block_disk *d);

/* Reads the header again: `sets` and `limit`. What cannot be read has no places. */
void block_disk_look(struct block_disk *d);

/* How many sets there are, as of half a second ago. */
uint64_t block_disk_sets(struct block_disk *d);

#endif
