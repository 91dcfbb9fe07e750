/* SPDX-License-Identifier: MIT */
/* remote/block_cache_priv.h - what the files of the block cache share: extents in memory. */
#ifndef UFS_REMOTE_BLOCK_CACHE_PRIV_H
#define UFS_REMOTE_BLOCK_CACHE_PRIV_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include <xxhash.h>

#include "base/err.h"
#include "remote/block_cache.h"
#include "remote/ring.h"
#include "remote/source.h"

enum {
    EXTENT_MAX = 2 << 20, /* one request; aligned to blocks but at an object's end */
    OBJECT_BUCKETS = 1024,
    FETCHERS = 16,        /* requests ahead of readers that are under way at a time */
    WRITER_NICENESS = 10, /* what is kept is behind what is read */
};

enum extent_state { EXTENT_FETCHING, EXTENT_DONE, EXTENT_FAILED };

/* Bytes of an object in memory, or on their way. All but `data` is guarded by the lock. */
struct extent {
    struct ring
        lru; /* in one of the cache's lists while it is done and nobody holds it */
    struct object *object; /* NULL: no longer to be found */
    uint64_t off;
    size_t len;
    unsigned char *data;
    unsigned refs;
    enum extent_state state;
    bool ahead;  /* fetched ahead of its reader */
    bool waits;  /* and the reader has not come to its end yet */
    time_t used; /* last, by CLOCK_MONOTONIC */
};

/* What is known of one version of one object. Guarded by the lock. */
struct object {
    struct object *next; /* in its bucket */
    uint64_t hash[2];
    uint64_t size;
    uint32_t owner;
    bool keep;              /* on disk too */
    unsigned refs;          /* sources */
    struct extent **extent; /* by offset, none overlap */
    size_t n, cap;
};

/* Something for the threads in the background. */
struct block_job {
    struct ring queue;
    struct extent *extent; /* held */
    struct source *inner;  /* held; NULL: a job of the writer */
    uint64_t from, to;     /* of the writer: what to keep, in the object */
};

/* Threads that take jobs off a list. */
struct block_workers {
    struct ring queue;
    pthread_cond_t wake;
    pthread_t thread[FETCHERS];
    unsigned threads, idle, max;
    int niceness; /* added to that of the process */
    bool
        stop; /* no new jobs; what is queued is dropped by fetchers, done by the writer */
};

struct block_cache {
    struct block_disk *disk; /* or NULL */
    size_t memory;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* extents are done, or failed */
    /* guarded by lock */
    size_t used;
    struct ring lru; /* the next to go first */
    struct ring
        unread; /* what waits for its reader: not for others of its kind to push out */
    struct object *object[OBJECT_BUCKETS];
    struct block_workers fetchers, writer;
    size_t unwritten; /* bytes in the writer's queue */
    uint64_t private_objects;

    atomic_bool stopping;
    atomic_uint_least32_t named_owner; /* the last one that got its name */
    atomic_uint_least64_t from_memory, from_disk, fetched, not_kept;
};

/* The number that groups the blocks of a store (its identity) for people. */
static inline uint32_t block_owner_of(const char *store)
{
    return (uint32_t)XXH3_64bits(store, strlen(store));
}

/* ---- block_extents.c: all with the lock held ---- */

/* The one that has this version, made when there is none; NULL: out of memory. */
struct object *object_get(struct block_cache *c, const struct object *like);
void object_put(struct block_cache *c, struct object *o);

/* The first extent that ends behind `off`: its number, or o->n. */
size_t object_find(const struct object *o, uint64_t off);

/*
 * A new extent on its way, held once. `spare`: only when there is room for it. NULL: no
 * room, or no memory.
 */
struct extent *extent_new(struct block_cache *c, struct object *o, uint64_t off,
                          size_t len, bool spare);
void extent_hold(struct extent *x);
void extent_put(struct block_cache *c, struct extent *x);
/* `used_up`: its reader will not come back to it. */
void extent_put_read(struct block_cache *c, struct extent *x, bool used_up);
/* Lets go of all that nobody holds. */
void extents_drop(struct block_cache *c);
/* Fetching is over; wakes those who wait. */
void extent_end(struct block_cache *c, struct extent *x, bool good);

/* ---- block_fetch.c ---- */

/*
 * Fills extents of one object, from disk and from `inner` in one go; then ends them, and
 * has what was fetched kept. Without the lock.
 */
int extents_fill(struct block_cache *c, struct source *inner, struct extent *const *x,
                 size_t n, struct err *e);

/* With the lock held: has an extent that is on its way filled in the background. */
bool fetch_later(struct block_cache *c, struct extent *x, struct source *inner);

void workers_init(struct block_workers *w, unsigned max, int niceness);
/* Without the lock; waits for all of them. */
void workers_stop(struct block_cache *c, struct block_workers *w);
void workers_destroy(struct block_workers *w);

#endif
