/* SPDX-License-Identifier: MIT */
/* gpu/device_load.c - the pipeline: sources, pinned slots, the device's slots, results. */
#include "gpu/device_priv.h"

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "base/err.h"
#include "base/thread.h"
#include "gpu/boxes.h"
#include "gpu/gather_priv.h"
#include "gpu/slots.h"

enum {
    LANES = 256,     /* threads of a block */
    BLOCKS_EACH = 8, /* of a multiprocessor: enough to hide the latency of memory */
    /* Boxes of one round: 40 MB of memory. Huge tensors of small chunks take several. */
    ROUND_BOXES = 128 << 10,
    FACTORS_AT = 512, /* in the memory of a scale: behind the struct, aligned */
};
_Static_assert(sizeof(struct cast_scale) <= FACTORS_AT, "the factors come behind it");

/* One round of a load. */
struct load {
    struct device *d;
    struct work_list work;
    struct slot_plan plan;
    atomic_size_t next; /* batch */
    atomic_bool stop;
    pthread_mutex_t lock;
    struct err err;       /* guarded by lock; the first */
    uint64_t done, total; /* done: guarded by lock; bytes of results */
    const struct gather_watch *watch;
    struct device_stats stats; /* guarded by lock */
};

/* A thread of it. */
struct feeding {
    struct load *l;
    struct feeder *f;
    struct device_stats stats;
};

/* ---- one batch ---- */

/* Results of work that is through are told. */
static int tell(struct load *l, uint64_t bytes, struct err *e)
{
    int stop = 0;

    pthread_mutex_lock(&l->lock);
    l->done += bytes;
    if (l->watch && l->watch->fn)
        stop = l->watch->fn(l->watch->user, l->done, l->total);
    pthread_mutex_unlock(&l->lock);
    return stop ? err_set(e, ECANCELED, "stopped") : 0;
}

static int wait_for_slot(struct load *l, struct device_slot *s, struct err *e)
{
    if (!s->busy)
        return 0;
    TRY(DRIVER_CALL(&l->d->driver, e, event_wait, s->event));
    s->busy = false;
    return tell(l, s->result, e);
}

static int send(struct feeding *g, uint64_t to, const void *from, uint64_t len,
                struct err *e)
{
    g->stats.sent_bytes += len;
    return DRIVER_CALL(&g->l->d->driver, e, copy_in_later, to, from, len, g->f->stream);
}

/* Each box is one copy to its place. */
static int send_direct(struct feeding *g, const struct slot_batch *b,
                       struct device_slot *s, struct err *e)
{
    const struct load *l = g->l;
    int ret = 0;

    for (size_t p = b->first; p < b->first + b->count; p++) {
        const struct slot_part *part = &l->plan.part[p];

        for (size_t i = part->first; ret == 0 && i < part->first + part->count; i++) {
            const struct core_box *box = &l->work.work[i].box;

            ret = send(g, box->dst, s->host + part->at + (box->src - part->lines.first),
                       box_direct(box), e);
            g->stats.direct++;
        }
    }
    return ret;
}

/* The boxes of a batch, as the device sees them, at the end of the slot. */
static uint32_t write_table(const struct load *l, const struct slot_batch *b,
                            struct device_slot *s, uint64_t *tiles)
{
    unsigned char *table = s->host + l->d->room;
    uint32_t n = 0;

    *tiles = 0;
    for (size_t p = b->first; p < b->first + b->count; p++) {
        const struct slot_part *part = &l->plan.part[p];

        for (size_t i = part->first; i < part->first + part->count; i++) {
            struct core_box box = l->work.work[i].box;

            box_pack(&box, &part->lines, s->device + part->at);
            box_finish(&box, tiles);
            memcpy(table + n++ * sizeof box, &box, sizeof box);
        }
    }
    assert(n == b->boxes && n <= DEVICE_TABLE_BOXES);
    return n;
}

static int launch(struct feeding *g, const struct device_slot *s, uint32_t n,
                  uint64_t tiles, struct err *e)
{
    struct device *d = g->l->d;
    uint64_t table = s->device + d->room;
    void *argument[] = {&table, &n, &tiles};
    uint64_t blocks =
        MIN(tiles, (uint64_t)BLOCKS_EACH * (unsigned)MAX(d->info.multiprocessors, 1));

    g->stats.launches++;
    return DRIVER_CALL(&d->driver, e, launch, d->function, (unsigned)blocks, 1, 1,
                       LANES, 1, 1, 0, g->f->stream, argument, NULL);
}

static int send_staged(struct feeding *g, const struct slot_batch *b,
                       struct device_slot *s, struct err *e)
{
    uint64_t tiles, room = g->l->d->room;
    uint32_t n = write_table(g->l, b, s, &tiles);
    int ret = send(g, s->device, s->host, b->used, e);

    if (ret == 0)
        ret = send(g, s->device + room, s->host + room, n * sizeof(struct core_box), e);
    return ret < 0 ? ret : launch(g, s, n, tiles, e);
}

static int feed_batch(struct feeding *g, size_t i, struct device_slot *s, struct err *e)
{
    struct load *l = g->l;
    const struct slot_batch *b = &l->plan.batch[i];
    int ret = wait_for_slot(l, s, e);

    if (ret == 0)
        ret = slot_read(&l->work, &l->plan, i, s->host, g->f->bounce,
                        &g->stats.read_bytes, e);
    if (ret < 0)
        return ret;
    /* Whatever comes of it: the stream is drained before the slot is let go. */
    s->busy = true;
    s->result = b->result;
    ret = b->direct ? send_direct(g, b, s, e) : send_staged(g, b, s, e);
    if (ret == 0)
        ret = DRIVER_CALL(&l->d->driver, e, event_record, s->event, g->f->stream);
    g->stats.batches++;
    return ret;
}

/* ---- one thread ---- */

static void fail(struct load *l, const struct err *e)
{
    pthread_mutex_lock(&l->lock);
    if (!l->err.code)
        l->err = *e;
    pthread_mutex_unlock(&l->lock);
    atomic_store(&l->stop, true);
}

/* Waits for all that was begun, after an error too. What was through is told. */
static int drain(struct feeding *g, int ret, struct err *e)
{
    struct err late = {0};
    int waited = DRIVER_CALL(&g->l->d->driver, &late, stream_wait, g->f->stream);

    if (ret == 0 && waited < 0) {
        *e = late;
        ret = waited;
    }
    for (size_t k = 0; k < ARRAY_SIZE(g->f->slot); k++) {
        struct device_slot *s = &g->f->slot[k];

        if (s->busy && ret == 0)
            ret = tell(g->l, s->result, e);
        s->busy = false;
    }
    return ret;
}

static int feed(struct feeding *g, struct err *e)
{
    struct load *l = g->l;
    int ret = 0;

    for (unsigned k = 0; ret == 0 && !atomic_load(&l->stop); k ^= 1) {
        size_t i = atomic_fetch_add(&l->next, 1);

        if (i >= l->plan.batches)
            break;
        ret = feed_batch(g, i, &g->f->slot[k], e);
    }
    if (ret < 0)
        atomic_store(&l->stop, true);
    return drain(g, ret, e);
}

static void add_stats(struct load *l, const struct device_stats *s)
{
    pthread_mutex_lock(&l->lock);
    l->stats.read_bytes += s->read_bytes;
    l->stats.sent_bytes += s->sent_bytes;
    l->stats.batches += s->batches;
    l->stats.direct += s->direct;
    l->stats.launches += s->launches;
    pthread_mutex_unlock(&l->lock);
}

static void *feeder_main(void *user)
{
    struct load *l = user;
    struct feeding g = {.l = l};
    struct err e = {0};
    int ret = device_enter(l->d, &e);

    if (ret < 0) {
        fail(l, &e);
        return NULL;
    }
    ret = feeder_get(l->d, &g.f, &e);
    if (ret == 0) {
        ret = feed(&g, &e);
        if (ret == 0)
            feeder_put(l->d, g.f);
        else
            feeder_free(l->d, g.f);
        add_stats(l, &g.stats);
    }
    if (ret < 0)
        fail(l, &e);
    device_leave(l->d);
    return NULL;
}

/* ---- all of it ---- */

/* Sends the boxes that were collected. Threads that cannot be had are done without. */
static int run_round(struct load *l, struct err *e)
{
    pthread_t thread[64];
    size_t n, started = 0;

    TRY(slot_plan_make(&l->work, l->d->room, DEVICE_TABLE_BOXES, &l->plan, e));
    atomic_store(&l->next, 0);
    n = MIN((size_t)l->d->threads, l->plan.batches);
    for (size_t i = 1; i < n && i < ARRAY_SIZE(thread); i++)
        if (thread_start(&thread[started], feeder_main, l) == 0)
            started++;
    if (n)
        feeder_main(l);
    for (size_t i = 0; i < started; i++)
        pthread_join(thread[i], NULL);
    slot_plan_release(&l->plan);
    l->work.count = 0;
    if (!l->err.code)
        return 0;
    return err_copy(e, &l->err);
}

static int load_job(struct load *l, const struct gather_job *job, uint64_t scale,
                    struct err *e)
{
    const struct work_target target = {job->gather, job->address, scale};
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < plan_chunks(job->gather->plan); i++) {
        ret = work_add(&l->work, &target, i, l->d->room, e);
        if (ret == 0 && l->work.count >= ROUND_BOXES)
            ret = run_round(l, e);
    }
    return ret;
}

/* The factors of a gather in the device's memory; 0: it has none. */
static int send_scale(struct device *d, const struct gather *g, uint64_t *out,
                      struct err *e)
{
    struct cast_scale scale = g->scale;
    const void *factors = (const void *)(uintptr_t)g->scale.value;
    int ret;

    *out = 0;
    if (!g->scaled)
        return 0;
    ret = device_alloc(d, FACTORS_AT + g->factors * sizeof(float), out, e);
    if (ret < 0) {
        *out = 0;
        return ret;
    }
    scale.value = *out + FACTORS_AT;
    ret = device_copy_in(d, *out, &scale, sizeof scale, e);
    if (ret == 0)
        ret = device_copy_in(d, scale.value, factors, g->factors * sizeof(float), e);
    return ret;
}

static int check_all(const struct gather_job *job, size_t n, struct err *e)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = gather_check(job[i].gather, e);
    return ret;
}

static int load_all(struct load *l, const struct gather_job *job, size_t n,
                    uint64_t *scale, struct err *e)
{
    int ret = check_all(job, n, e);

    /*
     * Memory that its owner has just got may be in use by work of his that is under way
     * (torch gives freed memory out again in the order of its own stream): that ends first.
     */
    if (ret == 0)
        ret = DRIVER_CALL(&l->d->driver, e, context_wait);
    for (size_t i = 0; ret == 0 && i < n; i++) {
        l->total += gather_size(job[i].gather);
        ret = send_scale(l->d, job[i].gather, &scale[i], e);
    }
    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = load_job(l, &job[i], scale[i], e);
    if (ret == 0)
        ret = run_round(l, e);
    return ret < 0 ? ret : check_all(job, n, e);
}

/* With the context current, so that what was allocated can be freed whatever happens. */
static int load_and_free(struct load *l, const struct gather_job *job, size_t n,
                         struct err *e)
{
    CLEANUP_FREE uint64_t *scale = calloc(n + 1, sizeof *scale);
    int ret = scale ? load_all(l, job, n, scale, e) : err_nomem(e);

    for (size_t i = 0; scale && i < n; i++)
        if (scale[i])
            l->d->driver.memory_free(scale[i]);
    slot_plan_release(&l->plan);
    work_list_release(&l->work);
    return ret;
}

int device_load(struct device *d, const struct gather_job *job, size_t n,
                const struct gather_watch *watch, struct device_stats *stats,
                struct err *e)
{
    struct load l = {.d = d, .watch = watch};
    int ret = device_enter(d, e);

    if (ret < 0)
        return ret;
    pthread_mutex_init(&l.lock, NULL);
    ret = load_and_free(&l, job, n, e);
    pthread_mutex_destroy(&l.lock);
    device_leave(d);
    if (stats)
        *stats = l.stats;
    return ret;
}
