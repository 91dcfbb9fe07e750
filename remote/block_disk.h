/* SPDX-License-Identifier: MIT */
/* remote/block_disk.h - blocks of remote objects on disk, shared by all processes of a user. */
#ifndef UFS_REMOTE_BLOCK_DISK_H
#define UFS_REMOTE_BLOCK_DISK_H

#include "base/base.h"

struct err;
struct block_disk;

/*
 * A block is 64 KiB of an object; it is kept, checked and fetched by sectors of 4 KiB, so
 * that a small read costs a small range. An object's last sector may be short.
 */
enum {
    BLOCK_SECTOR = 4 << 10,
    BLOCK_BYTES = 64 << 10,
    BLOCK_SECTORS = BLOCK_BYTES / BLOCK_SECTOR,
};

/*
 * 128 bits of a hash over the object's store, path, version and size and the block's
 * number, half to find it and half to check it: bytes of another block that are found in
 * its place by any accident do not verify. `owner` groups blocks for block_disk_list().
 */
struct block_name {
    uint64_t tag, seed; /* tag is not 0 */
    uint32_t owner;
};

/* What `limit` may be, beside a number of bytes. */
#define BLOCK_DISK_AS_IS 0 /* as it was made or set, at first BLOCK_DISK_DEFAULT */
#define BLOCK_DISK_DEFAULT ((uint64_t)8 << 30)
#define BLOCK_DISK_MIN ((uint64_t)4 << 20)

/*
 * Opens (makes) the blocks in the directory `dir`/blocks. Its files never take more than
 * `limit` bytes of disk: they have a place for so many blocks and no more. A limit other
 * than the one that is there counts for all who use the directory, from now on; a smaller
 * one gives room back at once. A directory that cannot be written is read only.
 * -EBUSY when another process holds it for seconds, -EINVAL for a limit that is too small.
 */
int block_disk_open(const char *dir, uint64_t limit, struct block_disk **out,
                    struct err *e);
void block_disk_close(struct block_disk *d); /* NULL is fine */
void block_disk_closep(struct block_disk **d);

/* Puts a name to an owner's number, for people. What fails is only not shown. */
void block_disk_name_owner(struct block_disk *d, uint32_t owner, const char *name);

/*
 * Reads those sectors of [first, first + ceil(len / BLOCK_SECTOR)) that are there and pass
 * their check, each to its place in dst (of `len` bytes). Returns a bit for each, the
 * lowest for `first`. Any thread.
 */
unsigned block_disk_get(struct block_disk *d, const struct block_name *name,
                        unsigned first, size_t len, void *dst);

/*
 * Keeps sectors, in the place of the least recently used block where there is no other.
 * -EAGAIN when another process is at that place, -EROFS, -ENOSPC, ...: then it is not
 * kept, which is nobody's failure. Any thread.
 */
int block_disk_put(struct block_disk *d, const struct block_name *name, unsigned first,
                   const void *data, size_t len);

struct block_disk_stats {
    uint64_t limit; /* bytes */
    uint64_t room;  /* bytes of blocks that fit */
    uint64_t taken; /* bytes on disk, of all its files */
    uint64_t valid; /* bytes of sectors that are there */
    uint64_t blocks;
    bool read_only;
};
struct block_owner {
    uint32_t owner;
    char name[240]; /* "" when it is not known */
    uint64_t blocks, bytes;
    int64_t used; /* seconds since 1970 */
};

/* What is there: the totals, and the owners that have most (at most max; *n is set). */
int block_disk_list(struct block_disk *d, struct block_disk_stats *stats,
                    struct block_owner *owner, size_t max, size_t *n, struct err *e);

/* Lets go of all blocks, and gives their room back. */
int block_disk_clear(struct block_disk *d, struct err *e);

/* What it wrote since it was opened, and the blocks that had to go for that. */
uint64_t block_disk_written(const struct block_disk *d);
uint64_t block_disk_evicted(const struct block_disk *d);

/* Sectors that were there and did not pass their check, since it was opened. */
uint64_t block_disk_damaged(const struct block_disk *d);

#endif
