/* SPDX-License-Identifier: MIT */
/* remote/decoded.c - compressed pieces of shards, decoded once into a bounded cache. */
#include "remote/decoded.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "base/interrupt.h"
#include "remote/ring.h"
#include "remote/source.h"

enum {
    BUCKETS = 8192,
    /* A first guess of what a piece needs: weights hardly shrink to a half. Room
     * is set aside before decoding, so a guess of "all" would let one thread work. */
    GUESS_TIMES = 2,
    GUESS_MIN = 64 << 10,
    GUESS_GROWTH = 16,
    FILES_MIN = 16,  /* kept open however few descriptors there are */
    FILES_SHARE = 4, /* else this part of them */
    /* A quarter of the memory: with fewer than four at hand threads would wait. */
    MEMORY_PIECE_MAX = DECODED_MEMORY / 4,
    MEMORY_PIECE_COST = 2048,  /* what we keep of a piece, beside its bytes */
    FILE_PIECE_MIN = 64 << 10, /* shorter ones are decoded again sooner than read */
    GONE = 4096,               /* pieces that are known to have been in memory before */
    LOOK_AT = 64,              /* pieces that are looked at for one to take over */
    /* Readers hold pieces for a window each: who finds no room waits for that. */
    PATIENCE_MS = 1000,
    POLL_MS = 5,
};

struct piece {
    struct ring lru;    /* of its own while it is being decoded */
    struct piece *next; /* in its bucket */
    struct decoded_key key;
    struct source *src; /* NULL while it is being decoded, or that failed */
    bool in_memory;
    unsigned waiters; /* threads that will look at it once it is done */
    bool done;
    int rc; /* how it ended */
    struct err err;
};

struct decoded_cache {
    char *dir;
    uint64_t budget;
    size_t memory_budget;
    size_t max_files;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a decoding ended or a file was closed */
    /* guarded by lock */
    struct ring lru; /* done ones in files, least recently used first */
    uint64_t used;   /* bytes of done ones and room set aside for others */
    size_t files;
    unsigned busy;          /* decodings with room set aside, and files being closed */
    struct ring memory_lru; /* done ones in memory */
    size_t memory_used;
    uint64_t gone[GONE]; /* hashes of keys, 0: none; the place follows from the hash */
    struct piece *buckets[BUCKETS];
};

static size_t files_to_keep(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return FILES_MIN;
    return MAX(limit.rlim_cur / FILES_SHARE, FILES_MIN);
}

int decoded_new(const char *dir, uint64_t budget, struct decoded_cache **out,
                struct err *e)
{
    CLEANUP_FREE struct decoded_cache *c = calloc(1, sizeof *c);

    if (dir)
        TRY(make_dirs(dir, 0700, e));
    if (!c || (dir && !(c->dir = strdup(dir))))
        return err_nomem(e);
    c->budget = budget;
    c->memory_budget = (size_t)MIN(budget, (uint64_t)DECODED_MEMORY);
    c->max_files = files_to_keep();
    ring_init(&c->lru);
    ring_init(&c->memory_lru);
    pthread_mutex_init(&c->lock, NULL);
    interrupt_cond_init(&c->changed);
    *out = steal(&c);
    return 0;
}

static struct piece *piece_at(struct ring *r)
{
    return container_of(r, struct piece, lru);
}

static void free_pieces(struct ring *list)
{
    while (list->next != list) {
        struct piece *p = piece_at(list->next);

        ring_remove(&p->lru);
        source_put(p->src);
        free(p);
    }
}

void decoded_free(struct decoded_cache *c)
{
    if (!c)
        return;
    assert(c->busy == 0);
    free_pieces(&c->lru);
    free_pieces(&c->memory_lru);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c->dir);
    free(c);
}

uint64_t decoded_budget(const struct decoded_cache *c)
{
    return c->budget;
}

struct decoded_key decoded_key_of(const struct source *s, uint64_t off, uint64_t len,
                                  uint32_t encoding)
{
    return (struct decoded_key){.dev = s->id.dev,
                                .ino = s->id.ino,
                                .off = off,
                                .len = len,
                                .mtime_ns = s->id.mtime_ns,
                                .ctime_ns = s->id.ctime_ns,
                                .encoding = encoding};
}

static bool key_equal(const struct decoded_key *a, const struct decoded_key *b)
{
    return a->dev == b->dev && a->ino == b->ino && a->off == b->off &&
           a->len == b->len && a->mtime_ns == b->mtime_ns &&
           a->ctime_ns == b->ctime_ns && a->encoding == b->encoding &&
           a->variant == b->variant;
}

static uint64_t key_hash(const struct decoded_key *key)
{
    const uint64_t parts[] = {key->dev,
                              key->ino,
                              key->off,
                              key->len,
                              (uint64_t)key->mtime_ns,
                              (uint64_t)key->ctime_ns,
                              key->encoding,
                              key->variant};
    uint64_t h = 0;

    for (size_t i = 0; i < ARRAY_SIZE(parts); i++) {
        h = (h ^ parts[i]) * 0x9e3779b97f4a7c15;
        h ^= h >> 32;
    }
    return h ? h : 1;
}

/* Where the piece of that key is linked in, or the end of its bucket. Locked. */
static struct piece **find_slot(struct decoded_cache *c, const struct decoded_key *key)
{
    struct piece **slot = &c->buckets[key_hash(key) % BUCKETS];

    while (*slot && !key_equal(&(*slot)->key, key))
        slot = &(*slot)->next;
    return slot;
}

/* Locked. */
static void unlink_piece(struct decoded_cache *c, struct piece *p)
{
    *find_slot(c, &p->key) = p->next;
    ring_remove(&p->lru);
}

/* Nobody reads it or is about to. Locked. */
static bool is_idle(const struct piece *p)
{
    return p->waiters == 0 &&
           atomic_load_explicit(&p->src->refs, memory_order_acquire) == 1;
}

/* The least recently used piece that nobody reads or is about to, or NULL. Locked. */
static struct piece *find_victim(struct ring *list)
{
    for (struct ring *r = list->next; r != list; r = r->next) {
        if (is_idle(piece_at(r)))
            return piece_at(r);
    }
    return NULL;
}

/*
 * Closes a piece's file; unlocked meanwhile, since giving back gigabytes of page cache
 * takes long. Its bytes count until they are gone.
 */
static void evict(struct decoded_cache *c, struct piece *p)
{
    uint64_t size = p->src->size;

    unlink_piece(c, p);
    c->busy++;
    pthread_mutex_unlock(&c->lock);
    source_put(p->src);
    free(p);
    pthread_mutex_lock(&c->lock);
    c->busy--;
    c->used -= size;
    c->files--;
    pthread_cond_broadcast(&c->changed);
}

/*
 * Sets `want` bytes aside, or what there is when no waiting can bring more. *got is what
 * was set aside, 0: nothing is left. Locked.
 */
static void reserve(struct decoded_cache *c, uint64_t want, uint64_t *got)
{
    for (;;) {
        bool fits = c->budget - c->used >= want;
        struct piece *victim;

        if (fits && c->files < c->max_files)
            break;
        victim = find_victim(&c->lru);
        if (victim)
            evict(c, victim);
        else if (fits || c->busy == 0)
            break;
        else
            pthread_cond_wait(&c->changed, &c->lock);
    }
    *got = MIN(want, c->budget - c->used);
    if (*got == 0)
        return;
    c->used += *got;
    c->files++;
    c->busy++;
}

/* A file without a name; without a directory one of memory. */
static int piece_file(const char *dir)
{
    int fd = dir ? unnamed_file(dir) : memfd_create("decoded", MFD_CLOEXEC);

    return fd < 0 && !dir ? -errno : fd;
}

/* What is to be decoded, and how. */
struct job {
    struct source *in;
    decode_fn *fn;
    decode_block_fn *block_fn; /* instead of fn: `size` bytes come out */
    uint64_t size;             /* 0: not known */
    void *user;
};

/* One decoding into a file of at most `limit` bytes. */
static int decode_within(struct decoded_cache *c, const struct job *job, uint64_t limit,
                         struct source **out, struct err *e)
{
    CLEANUP_FD int fd = piece_file(c->dir);
    CLEANUP(source_putp) struct source *src = NULL;
    uint64_t size = 0;
    int rc;

    if (fd < 0)
        return err_set(e, -fd, "make a file in %s: %s", c->dir ? c->dir : "memory",
                       strerror(-fd));
    rc = job->fn(job->user, job->in, fd, limit, &size, e);
    if (rc == 0)
        rc = source_check(job->in, e); /* else half of it may be newer than the rest */
    if (rc < 0)
        return rc;
    TRY(source_from_fd(steal_fd(&fd), job->in->name, &src, e));
    if (src->size > limit)
        return err_set(e, EFBIG, "%s: decoded to %" PRIu64 " bytes", job->in->name,
                       src->size);
    if (src->size != size)
        return err_set(e, EIO,
                       "%s: decoded to %" PRIu64 " bytes, %" PRIu64 " are in the file",
                       job->in->name, size, src->size);
    *out = steal(&src);
    return 0;
}

static int too_large(const struct decoded_cache *c, const struct source *in,
                     struct err *e)
{
    err_set(e, ENOSPC, "%s: decoded it does not fit what is left of %" PRIu64 " bytes",
            in->name, c->budget);
    return err_hint(e, "give the cache more room with -o cache_size=");
}

/* ---- pieces of known size ---- */

/* Into the pages of a file, for which there is room on the disk. */
static int decode_mapped(const struct job *job, int fd, struct err *e)
{
    void *map;
    int rc = posix_fallocate(fd, 0, (off_t)job->size);

    if (rc != 0)
        return err_set(e, rc, "%" PRIu64 " bytes for a decoded piece: %s", job->size,
                       strerror(rc));
    map = mmap(NULL, job->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return err_set(e, errno, "map %" PRIu64 " bytes of a decoded piece: %s",
                       job->size, strerror(errno));
    rc = job->block_fn(job->user, job->in, map, job->size, e);
    munmap(map, job->size);
    return rc;
}

/* decode_fn of such pieces. */
static int block_to_file(void *user, struct source *in, int fd, uint64_t limit,
                         uint64_t *size, struct err *e)
{
    const struct job *job = user;

    (void)in;
    if (job->size > limit)
        return err_set(e, EFBIG, "%" PRIu64 " bytes come out", job->size);
    *size = job->size;
    return decode_mapped(job, fd, e);
}

static bool was_in_memory(const struct decoded_cache *c, const struct decoded_key *key)
{
    uint64_t h = key_hash(key);

    return c->gone[h % GONE] == h;
}

static size_t memory_cost(size_t size)
{
    return size + MEMORY_PIECE_COST;
}

/*
 * A piece's memory is the next one's where the sizes agree, which saves the kernel from
 * clearing pages. Locked.
 */
static struct source *evict_memory(struct decoded_cache *c, struct piece *p,
                                   size_t size)
{
    struct source *src = p->src;
    uint64_t h = key_hash(&p->key);

    unlink_piece(c, p);
    c->gone[h % GONE] = h;
    c->memory_used -= memory_cost(src->size);
    free(p);
    if (src->size == size)
        return src;
    source_put(src);
    return NULL;
}

/*
 * Among the oldest pieces in memory one of this size that was read to its end, or NULL. Its
 * pages are likely to be in the processor's caches still. Locked.
 */
static struct piece *find_used_up(struct decoded_cache *c, size_t size)
{
    unsigned looked = 0;

    for (struct ring *r = c->memory_lru.next; r != &c->memory_lru && looked < LOOK_AT;
         r = r->next, looked++) {
        struct piece *p = piece_at(r);

        if (p->src->size == size && atomic_load(&p->src->used_up) && is_idle(p))
            return p;
    }
    return NULL;
}

/*
 * Memory for a piece as a source of random bytes, which nobody else has; NULL: it better
 * goes to a file. *rc is -ENOMEM then, or 0. Locked.
 */
static struct source *take_memory(struct decoded_cache *c,
                                  const struct decoded_key *key, size_t size, int *rc,
                                  struct err *e)
{
    struct source *src = NULL;
    struct piece *used_up;

    *rc = 0;
    if (size > MEMORY_PIECE_MAX || memory_cost(size) > c->memory_budget ||
        (size >= FILE_PIECE_MIN && was_in_memory(c, key)))
        return NULL;
    used_up = find_used_up(c, size);
    if (used_up)
        src = evict_memory(c, used_up, size);
    while (!src && c->memory_budget - c->memory_used < memory_cost(size)) {
        struct piece *victim = find_victim(&c->memory_lru);

        if (!victim)
            return NULL;
        src = evict_memory(c, victim, size);
    }
    if (!src)
        *rc = source_from_pages(size, &src, e);
    if (*rc == 0)
        c->memory_used += memory_cost(size);
    return src;
}

/* Locked, but not while decoding. */
static int decode_in_memory(struct decoded_cache *c, const struct job *job,
                            struct source *src, struct source **out, struct err *e)
{
    void *dst = (void *)(uintptr_t)source_map(src);
    int rc;

    c->busy++;
    pthread_mutex_unlock(&c->lock);
    rc = job->block_fn(job->user, job->in, dst, job->size, e);
    if (rc == 0)
        rc = source_check(job->in, e);
    pthread_mutex_lock(&c->lock);
    c->busy--;
    if (rc == 0) {
        atomic_store(&src->used_up, false);
        *out = src;
        return 0;
    }
    c->memory_used -= memory_cost(job->size);
    source_put(src);
    return rc;
}

/* ---- pieces of any size ---- */

/*
 * More than `got` bytes could not be set aside: waits until that may be otherwise. Those
 * who read may wait for room themselves, so not for ever: false. Nobody tells when a
 * reader puts a piece back. Locked, but not while waiting.
 */
static bool wait_for_room(struct decoded_cache *c, uint64_t got, unsigned *waited)
{
    const struct timespec moment = {.tv_nsec = POLL_MS * 1000000L};

    while (*waited < PATIENCE_MS) {
        pthread_mutex_unlock(&c->lock);
        nanosleep(&moment, NULL);
        pthread_mutex_lock(&c->lock);
        *waited += POLL_MS;
        if (c->budget - c->used > got || find_victim(&c->lru))
            return true;
    }
    return false;
}

/* Decodes with more and more room. Locked, but not while decoding. */
static int decode(struct decoded_cache *c, const struct job *job, struct source **out,
                  struct err *e)
{
    uint64_t want = job->size, got;
    unsigned waited = 0;
    int rc;

    if (want > 0 && want > c->budget)
        return too_large(c, job->in, e);
    if (want == 0 && (mul_overflows(job->in->size, GUESS_TIMES, &want) ||
                      add_overflows(want, GUESS_MIN, &want)))
        want = UINT64_MAX;
    for (;;) {
        want = MIN(want, c->budget);
        reserve(c, want, &got);
        if (got == 0 && wait_for_room(c, got, &waited))
            continue;
        if (got == 0)
            return too_large(c, job->in, e);
        pthread_mutex_unlock(&c->lock);
        rc = decode_within(c, job, got, out, e);
        pthread_mutex_lock(&c->lock);
        c->used -= got - (rc == 0 ? (*out)->size : 0);
        c->files -= rc != 0;
        c->busy--;
        pthread_cond_broadcast(&c->changed);
        if (rc != -EFBIG)
            return rc;
        if (got < want && wait_for_room(c, got, &waited))
            continue;
        if (got < want || got == c->budget)
            return too_large(c, job->in, e);
        if (mul_overflows(want, GUESS_GROWTH, &want))
            want = UINT64_MAX;
    }
}

/* Waits for another thread's decoding. Locked. */
static int wait_for(struct decoded_cache *c, struct piece *p, struct source **out,
                    struct err *e)
{
    int rc;

    p->waiters++;
    while (!p->done) {
        if (interrupt_wait(&c->changed, &c->lock, e) < 0) {
            p->waiters--;
            return -e->code;
        }
    }
    p->waiters--;
    if (p->src) {
        *out = source_get(p->src);
        pthread_cond_broadcast(&c->changed); /* it was no victim until now */
        return 0;
    }
    *e = p->err;
    rc = p->rc;
    if (p->waiters == 0)
        free(p);
    return rc;
}

/* Into memory or into a file. Locked, but not while decoding. */
static int decode_piece(struct decoded_cache *c, struct piece *p, const struct job *job,
                        struct err *e)
{
    const struct job to_file = {.in = job->in,
                                .fn = block_to_file,
                                .size = job->size,
                                .user = (void *)(uintptr_t)job};
    struct source *memory;
    int rc;

    if (!job->block_fn)
        return decode(c, job, &p->src, e);
    memory = take_memory(c, &p->key, job->size, &rc, e);
    if (rc < 0)
        return rc;
    p->in_memory = memory != NULL;
    return memory ? decode_in_memory(c, job, memory, &p->src, e)
                  : decode(c, &to_file, &p->src, e);
}

/* Decodes what nobody has yet; others find the piece and wait. Locked. */
static int add_piece(struct decoded_cache *c, const struct decoded_key *key,
                     const struct job *job, struct source **out, struct err *e)
{
    struct piece *p = calloc(1, sizeof *p);
    int rc;

    if (!p)
        return err_nomem(e);
    p->key = *key;
    ring_init(&p->lru);
    *find_slot(c, key) = p;
    rc = decode_piece(c, p, job, e);
    p->done = true;
    if (rc == 0) {
        ring_append(p->in_memory ? &c->memory_lru : &c->lru, &p->lru);
        *out = source_get(p->src);
    } else {
        unlink_piece(c, p);
        p->rc = rc;
        p->err = *e;
        if (p->waiters == 0)
            free(p);
    }
    pthread_cond_broadcast(&c->changed);
    return rc;
}

static int get_once(struct decoded_cache *c, const struct decoded_key *key,
                    const struct job *job, struct source **out, struct err *e)
{
    struct piece *p;
    int rc = 0;

    pthread_mutex_lock(&c->lock);
    p = *find_slot(c, key);
    if (!p) {
        rc = add_piece(c, key, job, out, e);
    } else if (!p->done) {
        rc = wait_for(c, p, out, e);
    } else {
        ring_remove(&p->lru);
        ring_append(p->in_memory ? &c->memory_lru : &c->lru, &p->lru);
        *out = source_get(p->src);
        atomic_store(&p->src->used_up, false);
    }
    pthread_mutex_unlock(&c->lock);
    return rc;
}

/* Another thread's decoding may have been interrupted; that is nothing to this one. */
static int get(struct decoded_cache *c, const struct decoded_key *key,
               const struct job *job, struct source **out, struct err *e)
{
    int rc = get_once(c, key, job, out, e);

    while (rc == -EINTR && interrupt_current() && !interrupt_asked()) {
        *e = (struct err){0};
        rc = get_once(c, key, job, out, e);
    }
    return rc;
}

int decoded_get(struct decoded_cache *c, const struct decoded_key *key,
                struct source *in, uint64_t size, decode_fn *fn, void *user,
                struct source **out, struct err *e)
{
    const struct job job = {.in = in, .fn = fn, .size = size, .user = user};

    return get(c, key, &job, out, e);
}

int decoded_get_block(struct decoded_cache *c, const struct decoded_key *key,
                      struct source *in, size_t size, decode_block_fn *fn, void *user,
                      struct source **out, struct err *e)
{
    const struct job job = {.in = in, .block_fn = fn, .size = size, .user = user};

    assert(size > 0);
    return get(c, key, &job, out, e);
}
