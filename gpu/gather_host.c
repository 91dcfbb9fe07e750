/* SPDX-License-Identifier: MIT */
/* gpu/gather_host.c - runs gathers on the CPU, window by window. */
#include "gpu/gather_priv.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/err.h"
#include "base/guard.h"
#include "base/pool.h"
#include "base/vec.h"
#include "gpu/cast.h"
#include "gpu/fetch.h"
#include "index/spans.h"

enum {
    /* Stored bytes: all shards meet in it while it is in the processor's cache. */
    WINDOW = 1 << 20,
    /*
     * Where shards cannot be touched through a mapping, a window of a tensor stored
     * transposed reads most of its shards: it is made larger until it reads no more than
     * so many times its size, or is all of the tensor.
     */
    READ_TIMES = 4,
    SPAN_GAP = 16 << 10, /* as fetch.c bridges */
};

/* The windows of one job. */
struct target {
    const struct gather_job *job;
    uint64_t window; /* stored bytes of each */
    size_t first;    /* its first one, of all */
};

struct host_run {
    struct target *target;
    size_t n, windows;
    bool maps;
    struct pool *inner; /* for a window that is alone */
    pthread_mutex_t lock;
    const struct gather_watch *watch;
    uint64_t done, total; /* done: guarded by lock */
};

/* The copies of one window. */
struct window_runs {
    const struct gather *g;
    uint64_t off, len;
    struct run_list runs;
    struct source **source; /* by tag */
    size_t n, cap;
    struct err *e;
};

static void window_runs_release(struct window_runs *w)
{
    run_list_release(&w->runs);
    free(w->source);
}

static int add_source(struct window_runs *w, struct source *src)
{
    if (!VEC_ROOM(w->source, w->n, w->cap))
        return err_nomem(w->e);
    w->source[w->n++] = src;
    return 0;
}

static int cut_copy(void *user, size_t i)
{
    struct window_runs *w = user;
    const struct gather_copy *c = &w->g->copy[i];
    int ret = 0;

    if (w->n == 0 || w->source[w->n - 1] != c->source)
        ret = add_source(w, c->source);
    return ret < 0 ? ret
                   : plan_op_cut(&c->op, w->off, w->len, (uint32_t)(w->n - 1), &w->runs,
                                 w->e);
}

static int cut_window(struct window_runs *w)
{
    return plan_touched(w->g->plan, w->off, w->len, cut_copy, w);
}

/* ---- how large windows are ---- */

static int read_by_window(const struct gather *g, uint64_t window, uint64_t *read,
                          struct err *e)
{
    CLEANUP(window_runs_release)
    struct window_runs w = {.g = g, .len = window, .e = e};
    CLEANUP(span_list_release) struct span_list spans = {0};
    int ret = cut_window(&w);

    if (ret == 0)
        ret = spans_cover(w.runs.run, w.runs.count, SPAN_GAP, 0, &spans, e);
    *read = 0;
    for (size_t i = 0; i < spans.count; i++)
        *read += spans.span[i].len;
    return ret;
}

static int choose_window(const struct host_run *h, struct target *t, struct err *e)
{
    uint64_t size = plan_size(t->job->gather->plan), read;

    t->window = WINDOW;
    while (!h->maps && t->window < size) {
        TRY(read_by_window(t->job->gather, t->window, &read, e));
        if (read <= READ_TIMES * t->window)
            break;
        t->window = t->window > size / READ_TIMES ? size : READ_TIMES * t->window;
    }
    return 0;
}

/* ---- one window ---- */

static int fill_stored(const struct host_run *h, const struct gather *g, uint64_t off,
                       size_t len, void *dst, struct err *e)
{
    CLEANUP(window_runs_release)
    struct window_runs w = {.g = g, .off = off, .len = len, .e = e};

    TRY(cut_window(&w));
    return fetch_window(&w.runs, &(struct fetch_sources){.src = w.source, .count = w.n},
                        h->inner, dst, len, e);
}

static int fill_cast(const struct host_run *h, const struct gather *g, uint64_t off,
                     size_t len, void *dst, struct err *e)
{
    CLEANUP_FREE void *stored = malloc(len);
    int ret = stored ? fill_stored(h, g, off, len, stored, e) : err_nomem(e);

    if (ret == 0)
        cast_scaled_elements(g->stored, g->dtype, stored, dst, len / g->stored_unit,
                             g->scaled ? &g->scale : NULL, off / g->stored_unit);
    return ret;
}

static int tell(struct host_run *h, uint64_t bytes, struct err *e)
{
    int stop;

    if (!h->watch || !h->watch->fn)
        return 0;
    pthread_mutex_lock(&h->lock);
    h->done += bytes;
    stop = h->watch->fn(h->watch->user, h->done, h->total);
    pthread_mutex_unlock(&h->lock);
    return stop ? err_set(e, ECANCELED, "stopped") : 0;
}

static const struct target *find_target(const struct host_run *h, size_t window)
{
    size_t low = 0, high = h->n;

    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;

        if (h->target[middle].first <= window)
            low = middle;
        else
            high = middle;
    }
    return &h->target[low];
}

static int run_window(void *user, size_t i, struct err *e)
{
    struct host_run *h = user;
    const struct target *t = find_target(h, i);
    const struct gather *g = t->job->gather;
    uint64_t off = (i - t->first) * t->window;
    size_t len = (size_t)MIN(t->window, plan_size(g->plan) - off);
    char *dst = (char *)(uintptr_t)t->job->address + off / g->stored_unit * g->unit;
    int ret = gather_casts(g) ? fill_cast(h, g, off, len, dst, e)
                              : fill_stored(h, g, off, len, dst, e);

    return ret < 0 ? ret : tell(h, len / g->stored_unit * g->unit, e);
}

/* ---- all of them ---- */

static int plan_windows(struct host_run *h, const struct gather_job *job, size_t n,
                        struct err *e)
{
    for (size_t i = 0; i < n; i++) {
        struct target *t = &h->target[h->n];
        uint64_t size = plan_size(job[i].gather->plan);
        int ret = gather_check(job[i].gather, e);

        if (ret < 0)
            return ret;
        if (size == 0)
            continue;
        t->job = &job[i];
        t->first = h->windows;
        TRY(choose_window(h, t, e));
        h->windows += (size_t)((size - 1) / t->window + 1);
        h->total += gather_size(job[i].gather);
        h->n++;
    }
    return 0;
}

int gather_run_host(const struct gather_job *job, size_t n, struct pool *pool,
                    const struct gather_watch *watch, struct err *e)
{
    CLEANUP_FREE struct target *target = calloc(n + 1, sizeof *target);
    struct host_run h = {.target = target, .maps = guard_installed(), .watch = watch};
    int ret = target ? plan_windows(&h, job, n, e) : err_nomem(e);

    if (ret < 0)
        return ret;
    h.inner = h.windows == 1 ? pool : NULL;
    pthread_mutex_init(&h.lock, NULL);
    ret = pool_each(h.windows > 1 ? pool : NULL, h.windows, run_window, &h, e);
    pthread_mutex_destroy(&h.lock);
    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = gather_check(job[i].gather, e);
    return ret;
}
