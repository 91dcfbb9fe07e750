/* SPDX-License-Identifier: MIT */
/* remote/block_cache.c - a cache over sources that read from a server. */
#include "remote/block_cache.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include <xxhash.h>

#include "base/checked.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "remote/block_cache_priv.h"

enum {
    /* Longer reads are done piece by piece, so that memory stays bounded. */
    PIECE_MAX = 2 * EXTENT_MAX,
    /* Formats keep their headers at an object's start, their directories at its end. */
    ENDS = 64 << 10,
    /* Reads that are shorter than this and follow each other come from parsers. */
    SMALL = 64 << 10,
    AROUND_MAX = 512 << 10,
    /* An object without a version is taken for the same when it is older than this. */
    SETTLED_S = 5,
    POLL_MS = 50, /* how soon a reader's signal is seen */
    SECOND_NS = 1000000000,
    OTHERS_MAX = 3, /* fetches of others that failed, before one of our own */
};

struct block_source {
    struct source base;
    struct block_cache *c;
    struct source *inner;
    struct object *object;
    /* Where the next read begins that follows the last one, and how many did so. */
    atomic_uint_least64_t next;
    atomic_uint streak;
    /* What was to be fetched ahead and had no room then. Guarded by the cache's lock. */
    uint64_t late_from, late_to;
};

static struct block_source *block_of(struct source *s)
{
    return container_of(s, struct block_source, base);
}

/* ---- one read ---- */

/* The extents of a read, in order. Those of `mine` are ours to fill. */
struct parts {
    struct extent **all, **mine;
    size_t n, nmine, cap;
};

static void parts_release(struct parts *p)
{
    free(p->all);
    free(p->mine);
}

/* Room for one more. */
static bool parts_grow(struct parts *p)
{
    size_t cap = p->cap ? p->cap * 2 : 8;
    struct extent **all, **mine;

    if (p->n < p->cap)
        return true;
    all = reallocarray(p->all, cap, sizeof(*all));
    if (all)
        p->all = all;
    mine = reallocarray(p->mine, cap, sizeof(*mine));
    if (mine)
        p->mine = mine;
    if (!all || !mine)
        return false;
    p->cap = cap;
    return true;
}

/*
 * Where an extent that begins at `at` ends when nothing else is in its way. A little more
 * than `most` goes too: the last sector of a window is no request of its own.
 */
static uint64_t extent_end_at(uint64_t at, uint64_t end, uint64_t most, uint64_t size)
{
    uint64_t whole = (end + BLOCK_SECTOR - 1) / BLOCK_SECTOR * BLOCK_SECTOR;

    if (whole - at > most + most / 4)
        whole = (at + most) / BLOCK_BYTES * BLOCK_BYTES;
    return MIN(whole, size);
}

/* With the lock held: all of [off, end), found or made. */
static bool collect(struct block_source *s, uint64_t off, uint64_t end, struct parts *p)
{
    struct object *o = s->object;

    for (uint64_t at = off / BLOCK_SECTOR * BLOCK_SECTOR; at < end;) {
        size_t i = object_find(o, at);
        struct extent *x = i < o->n ? o->extent[i] : NULL;

        if (!parts_grow(p))
            return false;
        if (x && x->off <= at) {
            extent_hold(x);
        } else {
            uint64_t to =
                extent_end_at(at, x ? MIN(end, x->off) : end, EXTENT_MAX, o->size);

            x = extent_new(s->c, o, at, (size_t)(to - at), false);
            if (!x)
                return false;
            p->mine[p->nmine++] = x;
        }
        p->all[p->n++] = x;
        at = x->off + x->len;
    }
    return true;
}

/* With the lock held. */
static void put_parts(struct block_source *s, struct parts *p, uint64_t end)
{
    for (size_t i = 0; i < p->n; i++) {
        struct extent *x = p->all[i];
        bool last = x->off + x->len <= end;

        if (last)
            x->waits = false;
        extent_put_read(s->c, x, x->ahead && last);
    }
}

/* What was begun and cannot be gone on with. */
static int give_up(struct block_source *s, struct parts *p, struct err *e)
{
    for (size_t i = 0; i < p->nmine; i++)
        extent_end(s->c, p->mine[i], false);
    put_parts(s, p, 0);
    pthread_mutex_unlock(&s->c->lock);
    return err_nomem(e);
}

/* With the lock held: until somebody else's fetch has ended. */
static int await(struct block_cache *c, const struct extent *x, struct err *e)
{
    while (x->state == EXTENT_FETCHING) {
        struct timespec until;

        if (interrupt_asked())
            return err_set(e, EINTR, "interrupted");
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += POLL_MS * 1000000L;
        if (until.tv_nsec >= 1000000000L) {
            until.tv_nsec -= 1000000000L;
            until.tv_sec++;
        }
        pthread_cond_timedwait(&c->changed, &c->lock, &until);
    }
    return 0;
}

/* With the lock held: *got is the first byte that is not there yet, or `end`. */
static int await_parts(struct block_source *s, const struct parts *p, uint64_t end,
                       uint64_t *got, struct err *e)
{
    for (size_t i = 0; i < p->n; i++) {
        const struct extent *x = p->all[i];

        if (x->off >= end)
            break;
        TRY(await(s->c, x, e));
        if (x->state == EXTENT_FAILED) {
            *got = MAX(*got, x->off);
            return 0;
        }
    }
    *got = end;
    return 0;
}

static void copy_parts(const struct parts *p, uint64_t off, uint64_t end, char *dst)
{
    for (size_t i = 0; i < p->n; i++) {
        const struct extent *x = p->all[i];
        uint64_t from = MAX(x->off, off), to = MIN(x->off + x->len, end);

        if (from < to)
            memcpy(dst + (from - off), x->data + (from - x->off), to - from);
    }
}

/*
 * Bytes [off, end), of which [lo, hi) around them are fetched as well. *got: how far it
 * came; no error and not `end`: what another thread was fetching failed.
 */
static int read_piece(struct block_source *s, uint64_t off, uint64_t end, uint64_t lo,
                      uint64_t hi, char *dst, uint64_t *got, struct err *e)
{
    CLEANUP(parts_release) struct parts p = {0};
    struct block_cache *c = s->c;
    int rc = 0;

    *got = off;
    pthread_mutex_lock(&c->lock);
    if (!collect(s, lo, hi, &p))
        return give_up(s, &p, e);
    if (p.nmine) {
        pthread_mutex_unlock(&c->lock);
        rc = extents_fill(c, s->inner, p.mine, p.nmine, e);
        pthread_mutex_lock(&c->lock);
    }
    if (rc == 0)
        rc = await_parts(s, &p, end, got, e);
    pthread_mutex_unlock(&c->lock);
    if (rc == 0)
        copy_parts(&p, off, *got, dst);
    if (rc == 0 && !p.nmine)
        atomic_fetch_add_explicit(&c->from_memory, *got - off, memory_order_relaxed);
    pthread_mutex_lock(&c->lock);
    put_parts(s, &p, *got);
    pthread_mutex_unlock(&c->lock);
    return rc;
}

/* In memory, or on its way there. */
static bool block_resident(struct source *base, uint64_t off, size_t len)
{
    struct block_source *s = block_of(base);
    struct object *o = s->object;
    uint64_t at = off, end = off + len;

    pthread_mutex_lock(&s->c->lock);
    for (size_t i = object_find(o, at); at < end; i++) {
        if (i == o->n || o->extent[i]->off > at)
            break;
        at = o->extent[i]->off + o->extent[i]->len;
    }
    pthread_mutex_unlock(&s->c->lock);
    return at >= end;
}

/* How many short reads have followed each other up to this one, [off, end). */
static unsigned streak_of(struct block_source *s, uint64_t off, uint64_t end)
{
    bool follows = atomic_exchange(&s->next, end) == off && off > 0;

    if (end - off < SMALL && follows)
        return atomic_fetch_add(&s->streak, 1) + 1;
    atomic_store(&s->streak, 0);
    return 0;
}

/* What to fetch for a read of [off, end). */
static void widen(struct block_source *s, uint64_t off, uint64_t end, uint64_t *lo,
                  uint64_t *hi)
{
    unsigned streak = streak_of(s, off, end);
    uint64_t size = s->base.size;

    *lo = off;
    *hi = end;
    if (end - off >= SMALL || block_resident(&s->base, off, (size_t)(end - off)))
        return;
    if (streak > 1) /* one is the end of what was read in larger pieces */
        *hi = off + MIN((uint64_t)AROUND_MAX, (uint64_t)ENDS << MIN(streak - 2, 8u));
    if (off < ENDS)
        *hi = MAX(*hi, (uint64_t)ENDS);
    if (size - off <= ENDS)
        *lo = size > ENDS ? MIN(off, size - ENDS) : 0;
    *hi = MIN(MAX(*hi, end), size);
}

/* ---- ahead of readers ---- */

/* How long the extents of a range should be: several for connections to share. */
static uint64_t ahead_step(uint64_t len)
{
    uint64_t step = MAX(len / 4, (uint64_t)512 << 10);

    if (len >= EXTENT_MAX)
        step = EXTENT_MAX;
    return (step + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

static void block_will_need(struct source *base, uint64_t off, uint64_t len)
{
    struct block_source *s = block_of(base);
    struct object *o = s->object;
    uint64_t end = off + len, step = ahead_step(len);

    pthread_mutex_lock(&s->c->lock);
    for (uint64_t at = off / BLOCK_SECTOR * BLOCK_SECTOR; at < end;) {
        size_t i = object_find(o, at);
        struct extent *x = i < o->n ? o->extent[i] : NULL;
        bool begun;

        if (x && x->off <= at) {
            at = x->off + x->len;
            continue;
        }
        end = MIN(end, o->size);
        x = extent_new(
            s->c, o, at,
            (size_t)(extent_end_at(at, x ? MIN(end, x->off) : end, step, o->size) - at),
            true);
        if (!x) { /* all memory is in use: once its reader has come nearer */
            s->late_from = at;
            s->late_to = end;
            break;
        }
        at = x->off + x->len;
        begun = fetch_later(s->c, x, s->inner);
        if (!begun)
            extent_end(s->c, x, false);
        extent_put(s->c, x);
        if (!begun)
            break;
    }
    pthread_mutex_unlock(&s->c->lock);
}

/* The reader has come to `end`: there may be room for more now. */
static void catch_up(struct block_source *s, uint64_t end)
{
    uint64_t from, to;

    pthread_mutex_lock(&s->c->lock);
    from = MAX(s->late_from, end);
    to = s->late_to;
    s->late_to = 0;
    pthread_mutex_unlock(&s->c->lock);
    if (from < to)
        block_will_need(&s->base, from, to - from);
}

static int block_read(struct source *base, uint64_t off, size_t len, void *dst,
                      struct err *e)
{
    struct block_source *s = block_of(base);
    uint64_t end = off + len, at = off, lo, hi;
    int rc = 0, failed = 0;

    catch_up(s, end);
    widen(s, off, end, &lo, &hi);
    while (rc == 0 && at < end) {
        uint64_t to = MIN(end, at + PIECE_MAX), got;

        if (failed > OTHERS_MAX)
            return source_read(s->inner, at, (size_t)(end - at),
                               (char *)dst + (at - off), e);
        rc = read_piece(s, at, to, at == off ? lo : at, to == end ? hi : to,
                        (char *)dst + (at - off), &got, e);
        failed += rc == 0 && got < to;
        at = got;
    }
    return rc;
}

static int block_check(struct source *base, struct err *e)
{
    return source_check(block_of(base)->inner, e);
}

static void block_close(struct source *base)
{
    struct block_source *s = block_of(base);

    pthread_mutex_lock(&s->c->lock);
    object_put(s->c, s->object);
    pthread_mutex_unlock(&s->c->lock);
    source_put(s->inner);
    free(s);
}

static int block_read_many(struct source *base, const struct source_range *r, size_t n,
                           struct err *e)
{
    int rc = 0;

    for (size_t i = 0; n > 1 && i < n; i++)
        block_will_need(base, r[i].off, r[i].len);
    for (size_t i = 0; rc == 0 && i < n; i++)
        rc = block_read(base, r[i].off, r[i].len, r[i].dst, e);
    return rc;
}

static const struct source_ops block_ops = {
    .name = "blocks",
    .read = block_read,
    .read_many = block_read_many,
    .resident = block_resident,
    .will_need = block_will_need,
    .check = block_check,
    .close = block_close,
};

/* ---- which object ---- */

/* Some servers tell none: then it is 0, or next to it. */
static bool has_date(const struct object_id *id)
{
    return id->mtime_ns >= SECOND_NS;
}

/* May its bytes be taken for the same when they are asked for another day? */
static bool is_settled(const struct object_id *id)
{
    if (id->version[0])
        return true;
    return has_date(id) && id->mtime_ns / SECOND_NS + SETTLED_S < (int64_t)time(NULL);
}

static void hash_text(XXH3_state_t *h, const char *text)
{
    XXH3_128bits_update(h, text, strlen(text) + 1);
}

/* `serial`: 0, or what tells it from all others. */
static bool hash_object(const struct object_id *id, uint64_t serial, struct object *o)
{
    const uint64_t numbers[] = {id->size, (uint64_t)id->mtime_ns, serial};
    XXH3_state_t *h = XXH3_createState();
    XXH128_hash_t sum;

    if (!h)
        return false;
    XXH3_128bits_reset(h);
    hash_text(h, id->store);
    hash_text(h, id->path);
    hash_text(h, id->version);
    XXH3_128bits_update(h, numbers, sizeof numbers);
    sum = XXH3_128bits_digest(h);
    XXH3_freeState(h);
    o->hash[0] = sum.low64;
    o->hash[1] = sum.high64;
    o->owner = block_owner_of(id->store);
    o->size = id->size;
    return true;
}

/* With the lock held. */
static struct object *find_object(struct block_cache *c, const struct object_id *id)
{
    struct object o = {.keep = is_settled(id)};
    bool known = id->version[0] || has_date(id);

    if (!hash_object(id, known ? 0 : ++c->private_objects, &o))
        return NULL;
    return object_get(c, &o);
}

static void name_owner(struct block_cache *c, const struct object *o, const char *store)
{
    if (c->disk && o->keep && atomic_exchange(&c->named_owner, o->owner) != o->owner)
        block_disk_name_owner(c->disk, o->owner, store);
}

int block_cache_over(void *user, struct source *inner, const struct object_id *id,
                     struct source **out, struct err *e)
{
    struct block_cache *c = user;
    CLEANUP(source_putp) struct source *owned = inner;
    CLEANUP_FREE struct block_source *s = calloc(1, sizeof *s);

    if (!s)
        return err_nomem(e);
    if (id->size != inner->size)
        return err_set(e, EINVAL, "%s: its size is not the one of the object",
                       inner->name);
    TRY(source_init(&s->base, &block_ops, inner->name, inner->size, e));
    s->base.id = inner->id;
    s->base.remote = inner->remote;
    s->c = c;
    s->inner = inner;
    pthread_mutex_lock(&c->lock);
    s->object = find_object(c, id);
    pthread_mutex_unlock(&c->lock);
    if (!s->object) {
        free(s->base.name);
        return err_nomem(e);
    }
    name_owner(c, s->object, id->store);
    steal(&owned);
    *out = &steal(&s)->base;
    return 0;
}

/* ---- the cache ---- */

static void open_disk(struct block_cache *c, const struct block_cache_options *o)
{
    struct err e = {0};

    if (o->limit && o->limit < BLOCK_DISK_MIN)
        return; /* too little for a disk */
    if (o->dir && block_disk_open(o->dir, o->limit, &c->disk, &e) < 0) {
        err_wrap(&e, "what is fetched is kept in memory alone");
        log_err(LOG_REMOTE, &e);
    }
}

int block_cache_new(const struct block_cache_options *options, struct block_cache **out,
                    struct err *e)
{
    struct block_cache *c = calloc(1, sizeof *c);
    pthread_condattr_t attr;

    if (!c)
        return err_nomem(e);
    c->memory = options->memory ? options->memory : BLOCK_CACHE_MEMORY;
    ring_init(&c->lru);
    ring_init(&c->unread);
    pthread_mutex_init(&c->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);
    workers_init(&c->fetchers, FETCHERS, 0);
    /* One: the locks on files are not a thread's. */
    workers_init(&c->writer, 1, WRITER_NICENESS);
    open_disk(c, options);
    *out = c;
    return 0;
}

void block_cache_stop(struct block_cache *c)
{
    if (!c)
        return;
    atomic_store(&c->stopping, true);
    workers_stop(c, &c->fetchers);
}

void block_cache_free(struct block_cache *c)
{
    if (!c)
        return;
    block_cache_stop(c);
    workers_stop(c, &c->writer);
    extents_drop(c);
    workers_destroy(&c->fetchers);
    workers_destroy(&c->writer);
    block_disk_close(c->disk);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

struct block_cache_counts block_cache_counts(struct block_cache *c)
{
    struct block_cache_counts n = {.from_memory = atomic_load(&c->from_memory),
                                   .from_disk = atomic_load(&c->from_disk),
                                   .fetched = atomic_load(&c->fetched),
                                   .not_kept = atomic_load(&c->not_kept)};

    if (c->disk) {
        n.damaged = block_disk_damaged(c->disk);
        n.written = block_disk_written(c->disk);
        n.evicted = block_disk_evicted(c->disk);
    }
    pthread_mutex_lock(&c->lock);
    n.memory = c->used;
    pthread_mutex_unlock(&c->lock);
    return n;
}
