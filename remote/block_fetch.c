/* SPDX-License-Identifier: MIT */
/* remote/block_fetch.c - fills extents from disk and server, and keeps them on disk. */
#include <errno.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/log.h"
#include "base/thread.h"
#include "remote/block_cache_priv.h"

enum {
    RANGES = 64, /* that are asked for at once */
    /* Of the memory, what may wait to be written: more is left out sooner than readers wait
     * for a disk. */
    UNWRITTEN_PART = 2,
};

static struct block_name name_of(const struct object *o, uint64_t block)
{
    const uint64_t parts[] = {o->hash[0], o->hash[1], block};
    XXH128_hash_t h = XXH3_128bits(parts, sizeof parts);

    return (struct block_name){
        .tag = h.low64 ? h.low64 : 1, .seed = h.high64, .owner = o->owner};
}

/* ---- filling ---- */

/* The ranges that have to be fetched: neighbours within an extent are one. */
struct fill {
    struct block_cache *c;
    struct source *inner;
    struct source_range range[RANGES];
    size_t n;
    struct extent *last; /* whose range the last one is */
    uint64_t fetched;
};

static int fill_flush(struct fill *f, struct err *e)
{
    size_t n = f->n;

    f->n = 0;
    f->last = NULL;
    return n ? source_read_many(f->inner, f->range, n, e) : 0;
}

static int fill_missing(struct fill *f, struct extent *x, uint64_t off, size_t len,
                        struct err *e)
{
    struct source_range *last = f->n ? &f->range[f->n - 1] : NULL;
    int rc = 0;

    f->fetched += len;
    if (last && f->last == x && last->off + last->len == off) {
        last->len += len;
        return 0;
    }
    if (f->n == RANGES)
        rc = fill_flush(f, e);
    f->range[f->n++] =
        (struct source_range){.off = off, .len = len, .dst = x->data + (off - x->off)};
    f->last = x;
    return rc;
}

/* The sectors of one block that lie in the extent: what is not on disk is to be fetched. */
static int fill_block(struct fill *f, struct extent *x, uint64_t off, size_t len,
                      struct err *e)
{
    unsigned first = (unsigned)(off % BLOCK_BYTES / BLOCK_SECTOR), there = 0;
    struct block_name name = name_of(x->object, off / BLOCK_BYTES);
    int rc = 0;

    if (f->c->disk && x->object->keep)
        there = block_disk_get(f->c->disk, &name, first, len, x->data + (off - x->off));
    if (there == 0)
        return fill_missing(f, x, off, len, e);
    for (size_t at = 0, i = 0; rc == 0 && at < len; at += BLOCK_SECTOR, i++) {
        size_t part = MIN(len - at, (size_t)BLOCK_SECTOR);

        if (there >> i & 1)
            atomic_fetch_add_explicit(&f->c->from_disk, part, memory_order_relaxed);
        else
            rc = fill_missing(f, x, off + at, part, e);
    }
    return rc;
}

static int fill_extent(struct fill *f, struct extent *x, struct err *e)
{
    int rc = 0;

    for (uint64_t at = x->off; rc == 0 && at < x->off + x->len;) {
        uint64_t end = MIN((at / BLOCK_BYTES + 1) * BLOCK_BYTES, x->off + x->len);

        rc = fill_block(f, x, at, (size_t)(end - at), e);
        at = end;
    }
    return rc;
}

/* ---- threads ---- */

typedef void job_fn(struct block_cache *c, struct block_job *j);

struct worker {
    struct block_cache *c;
    struct block_workers *w;
    job_fn *run;
};

/* Of this thread alone, as Linux has it. */
static void be_nicer(int by)
{
    id_t me = (id_t)gettid();

    setpriority(PRIO_PROCESS, me, getpriority(PRIO_PROCESS, me) + by);
}

static void *work(void *user)
{
    struct worker me = *(struct worker *)user;
    struct block_cache *c = me.c;

    free(user);
    if (me.w->niceness)
        be_nicer(me.w->niceness);
    pthread_mutex_lock(&c->lock);
    for (;;) {
        struct ring *first = me.w->queue.next;

        if (first != &me.w->queue) {
            ring_remove(first);
            pthread_mutex_unlock(&c->lock);
            me.run(c, container_of(first, struct block_job, queue));
            pthread_mutex_lock(&c->lock);
            continue;
        }
        if (me.w->stop)
            break;
        me.w->idle++;
        pthread_cond_wait(&me.w->wake, &c->lock);
        me.w->idle--;
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* With the lock held. */
static bool start_worker(struct block_cache *c, struct block_workers *w, job_fn *run)
{
    struct worker *me = malloc(sizeof *me);

    if (!me)
        return false;
    *me = (struct worker){.c = c, .w = w, .run = run};
    if (thread_start(&w->thread[w->threads], work, me) != 0) {
        free(me);
        return false;
    }
    w->threads++;
    return true;
}

/* With the lock held. False: there is nobody to do it. */
static bool add_job(struct block_cache *c, struct block_workers *w, job_fn *run,
                    const struct block_job *job)
{
    struct block_job *j;

    if (w->stop)
        return false;
    if (w->idle == 0 && w->threads < w->max)
        start_worker(c, w, run);
    j = w->threads ? malloc(sizeof *j) : NULL;
    if (!j)
        return false;
    *j = *job;
    ring_append(&w->queue, &j->queue);
    pthread_cond_signal(&w->wake);
    return true;
}

void workers_init(struct block_workers *w, unsigned max, int niceness)
{
    ring_init(&w->queue);
    pthread_cond_init(&w->wake, NULL);
    w->max = max;
    w->niceness = niceness;
}

void workers_destroy(struct block_workers *w)
{
    pthread_cond_destroy(&w->wake);
}

void workers_stop(struct block_cache *c, struct block_workers *w)
{
    pthread_mutex_lock(&c->lock);
    w->stop = true;
    pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&c->lock);
    for (unsigned i = 0; i < w->threads; i++)
        pthread_join(w->thread[i], NULL);
    w->threads = 0;
}

/* ---- keeping ---- */

static void write_job(struct block_cache *c, struct block_job *j)
{
    struct extent *x = j->extent;
    uint64_t dropped = 0;

    for (uint64_t at = j->from; at < j->to;) {
        uint64_t end = MIN((at / BLOCK_BYTES + 1) * BLOCK_BYTES, j->to);
        struct block_name name = name_of(x->object, at / BLOCK_BYTES);

        if (block_disk_put(c->disk, &name, (unsigned)(at % BLOCK_BYTES / BLOCK_SECTOR),
                           x->data + (at - x->off), (size_t)(end - at)) < 0)
            dropped += end - at;
        at = end;
    }
    atomic_fetch_add(&c->not_kept, dropped);
    pthread_mutex_lock(&c->lock);
    c->unwritten -= j->to - j->from;
    extent_put(c, x);
    pthread_mutex_unlock(&c->lock);
    free(j);
}

/* With the lock held. */
static void keep_later(struct block_cache *c, struct extent *x, uint64_t from,
                       uint64_t to)
{
    const struct block_job job = {.extent = x, .from = from, .to = to};

    if (!c->disk || !x->object->keep)
        return;
    if (c->unwritten + (to - from) > c->memory / UNWRITTEN_PART ||
        !add_job(c, &c->writer, write_job, &job)) {
        atomic_fetch_add(&c->not_kept, to - from);
        return;
    }
    c->unwritten += to - from;
    extent_hold(x);
}

int extents_fill(struct block_cache *c, struct source *inner, struct extent *const *x,
                 size_t n, struct err *e)
{
    struct fill f = {.c = c, .inner = inner};
    CLEANUP_FREE bool *fetched = calloc(n, sizeof *fetched);
    int rc = fetched ? 0 : err_nomem(e);

    for (size_t i = 0; rc == 0 && i < n; i++) {
        uint64_t before = f.fetched;

        rc = fill_extent(&f, x[i], e);
        if (rc == 0)
            fetched[i] = f.fetched != before;
    }
    if (rc == 0)
        rc = fill_flush(&f, e);
    if (rc == 0)
        atomic_fetch_add_explicit(&c->fetched, f.fetched, memory_order_relaxed);
    pthread_mutex_lock(&c->lock);
    for (size_t i = 0; i < n; i++) {
        if (rc == 0 && fetched[i])
            keep_later(c, x[i], x[i]->off, x[i]->off + x[i]->len);
        extent_end(c, x[i], rc == 0);
    }
    pthread_mutex_unlock(&c->lock);
    return rc;
}

/* ---- ahead of readers ---- */

/* What fails here fails again where its reader is told. */
static void fetch_job(struct block_cache *c, struct block_job *j)
{
    struct err ignored = {0};
    char line[1400];

    if (atomic_load(&c->stopping)) {
        pthread_mutex_lock(&c->lock);
        extent_end(c, j->extent, false);
        pthread_mutex_unlock(&c->lock);
    } else if (extents_fill(c, j->inner, &j->extent, 1, &ignored) < 0) {
        log_msg(LOG_REMOTE, LOG_DEBUG, "ahead of its reader: %s",
                err_line(&ignored, line, sizeof line));
    }
    pthread_mutex_lock(&c->lock);
    extent_put(c, j->extent);
    pthread_mutex_unlock(&c->lock);
    source_put(j->inner);
    free(j);
}

bool fetch_later(struct block_cache *c, struct extent *x, struct source *inner)
{
    const struct block_job job = {.extent = x, .inner = inner};

    if (!add_job(c, &c->fetchers, fetch_job, &job))
        return false;
    extent_hold(x);
    source_get(inner);
    return true;
}
