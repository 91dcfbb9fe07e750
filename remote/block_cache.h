/* SPDX-License-Identifier: MIT */
/* remote/block_cache.h - what was fetched from servers, in memory and on disk. */
#ifndef UFS_REMOTE_BLOCK_CACHE_H
#define UFS_REMOTE_BLOCK_CACHE_H

#include "remote/block_disk.h"
#include "remote/store.h"

struct err;
struct block_cache;

enum {
    /* Bytes in memory: what was fetched lately, what is fetched ahead, what waits to be
     * written to disk. */
    BLOCK_CACHE_MEMORY = 28 << 20,
    /* How far ahead of a sequential reader of a remote source to ask: two round
     * trips' worth of a fast link. */
    BLOCK_CACHE_AHEAD = 20 << 20,
};

/* Zero is the default of every field. */
struct block_cache_options {
    const char *dir; /* the cache directory; NULL: in memory alone */
    uint64_t
        limit;     /* bytes on disk (remote/block_disk.h); under BLOCK_DISK_MIN: none */
    size_t memory; /* 0: BLOCK_CACHE_MEMORY */
};

/*
 * A disk that cannot be used is logged and done without. Threads are started when they
 * are first needed, so that it may be made before a fork.
 */
int block_cache_new(const struct block_cache_options *options, struct block_cache **out,
                    struct err *e);

/*
 * Ends what is fetched ahead; waits for what is under way, so http_stop() comes before.
 * From now on nothing is fetched ahead any more. Before the store is closed.
 */
void block_cache_stop(struct block_cache *c);

/* When all its sources are closed. Writes what is still to be kept. NULL is fine. */
void block_cache_free(struct block_cache *c);

/*
 * store_cache_fn; `user` is the cache. Of the source that comes out: two readers of the
 * same bytes make one request, also through two sources of one object; neighbouring bytes
 * are fetched in few large ranges, several at a time; will_need() fetches in the
 * background. Reads of a few bytes fetch 4 KiB, or more where they follow each other or
 * stand at the start or the end of the object, where formats keep what they read first.
 */
int block_cache_over(void *user, struct source *inner, const struct object_id *id,
                     struct source **out, struct err *e);

/*
 * store_recall_fn and store_note_fn; `user` is the cache. Hints are blocks on disk as others
 * are, for all processes, of at most BLOCK_BYTES; without a disk there are none.
 */
size_t block_cache_recall(void *user, const char *store, const char *name, void *dst,
                          size_t size);
void block_cache_note(void *user, const char *store, const char *name, const void *data,
                      size_t len);

struct block_cache_counts {
    uint64_t from_memory, from_disk, fetched; /* bytes */
    uint64_t not_kept;                        /* bytes that the disk was too slow for */
    uint64_t damaged;                         /* sectors on disk that did not verify */
    uint64_t written;                         /* bytes, to disk */
    uint64_t evicted; /* blocks on disk that had to go for others */
    size_t memory;    /* bytes now */
};
struct block_cache_counts block_cache_counts(struct block_cache *c);

#endif
