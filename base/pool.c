/* SPDX-License-Identifier: MIT */
/* base/pool.c - a fixed set of worker threads for work that splits in pieces. */
#include "base/pool.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/err.h"
#include "base/interrupt.h"
#include "base/thread.h"

/* More would only wait for each other; the readers' bandwidth is long spent. */
enum { MAX_THREADS = 256 };

/*
 * One pool_each(), on its caller's stack. The caller takes pieces too and then waits only
 * for pieces that others have begun. Who waits, waits for work begun later than its own,
 * so no circle can form, however deep calls nest.
 */
struct job {
    struct job *next, **link;
    pool_fn *fn;
    void *user;
    size_t count;
    size_t taken;        /* guarded by the pool's lock, as all below */
    size_t running;      /* pieces begun and not ended */
    size_t failed_piece; /* lowest so far; SIZE_MAX: none */
    int failed_code;
    struct err *failed;
    struct interrupt *interrupt; /* the caller's */
    pthread_cond_t done;
};

/* One pool_later(). */
struct later {
    struct later *next;
    pool_later_fn *fn;
    void *user;
};

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct job *jobs,
        **last;          /* guarded by lock: jobs with pieces to take, oldest first */
    bool stopping;       /* guarded by lock */
    struct later *later; /* guarded by lock, latest first */
    unsigned nlater;     /* guarded by lock: those that have not ended */
    unsigned count;
    pthread_t threads[];
};

static void job_unlink(struct pool *p, struct job *j)
{
    if (!j->link)
        return;
    *j->link = j->next;
    if (j->next)
        j->next->link = j->link;
    else
        p->last = j->link;
    j->link = NULL;
}

static void job_link(struct pool *p, struct job *j)
{
    j->link = p->last;
    *p->last = j;
    p->last = &j->next;
}

/* Notes how piece i ended. Lock held. */
static void job_note(struct pool *p, struct job *j, size_t i, int rc,
                     const struct err *e)
{
    if (rc != 0 && i < j->failed_piece) {
        j->failed_piece = i;
        j->failed_code = rc;
        *j->failed = *e;
        j->taken = j->count; /* no new call starts */
        job_unlink(p, j);
    }
    if (--j->running == 0 && j->taken == j->count)
        pthread_cond_signal(&j->done);
}

/* Takes and runs one piece; the lock is held before and after, not during. */
static void job_step(struct pool *p, struct job *j)
{
    size_t i = j->taken++;
    struct interrupt *own;
    struct err e = {0};
    int rc;

    j->running++;
    if (j->taken == j->count)
        job_unlink(p, j);
    pthread_mutex_unlock(&p->lock);
    own = interrupt_set(j->interrupt);
    rc = j->fn(j->user, i, &e);
    interrupt_set(own);
    pthread_mutex_lock(&p->lock);
    job_note(p, j, i, rc, &e);
}

/* The lock is held before and after, not during. */
static void later_step(struct pool *p)
{
    struct later *l = p->later;

    p->later = l->next;
    pthread_mutex_unlock(&p->lock);
    l->fn(l->user, true);
    free(l);
    pthread_mutex_lock(&p->lock);
    p->nlater--;
}

static void *worker(void *arg)
{
    struct pool *p = arg;

    pthread_mutex_lock(&p->lock);
    while (!p->stopping) {
        if (p->jobs)
            job_step(p, p->jobs);
        else if (p->later)
            later_step(p);
        else
            pthread_cond_wait(&p->work, &p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static int start_threads(struct pool *p, unsigned threads)
{
    int rc = 0;

    while (rc == 0 && p->count < threads) {
        rc = thread_start(&p->threads[p->count], worker, p);
        p->count += rc == 0;
    }
    return rc;
}

int pool_new(unsigned threads, struct pool **out, struct err *e)
{
    struct pool *p;
    int rc;

    threads = MIN(threads ? threads : thread_processors(), (unsigned)MAX_THREADS);
    p = calloc(1, sizeof *p + threads * sizeof p->threads[0]);
    if (!p)
        return err_nomem(e);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    p->last = &p->jobs;
    rc = start_threads(p, threads);
    if (rc != 0) {
        err_set(e, rc, "cannot start worker thread %u of %u: %s", p->count + 1, threads,
                strerror(rc));
        pool_free(p);
        return -rc;
    }
    *out = p;
    return 0;
}

void pool_free(struct pool *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    p->stopping = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (unsigned i = 0; i < p->count; i++)
        pthread_join(p->threads[i], NULL);
    while (p->later) {
        struct later *l = p->later;

        p->later = l->next;
        l->fn(l->user, false);
        free(l);
    }
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

unsigned pool_threads(const struct pool *p)
{
    return p ? p->count : 0;
}

/* All pieces in order, here. */
static int each_here(size_t count, pool_fn *fn, void *user, struct err *e)
{
    for (size_t i = 0; i < count; i++) {
        int rc = fn(user, i, e);

        if (rc != 0)
            return rc;
    }
    return 0;
}

int pool_each(struct pool *p, size_t count, pool_fn *fn, void *user, struct err *e)
{
    struct job j = {.fn = fn,
                    .user = user,
                    .count = count,
                    .failed_piece = SIZE_MAX,
                    .failed = e,
                    .interrupt = interrupt_current()};

    if (!p || p->count == 0 || count < 2)
        return each_here(count, fn, user, e);
    pthread_cond_init(&j.done, NULL);
    pthread_mutex_lock(&p->lock);
    job_link(p, &j);
    pthread_cond_broadcast(&p->work);
    while (j.taken < j.count)
        job_step(p, &j);
    while (j.running > 0)
        pthread_cond_wait(&j.done, &p->lock);
    pthread_mutex_unlock(&p->lock);
    pthread_cond_destroy(&j.done);
    return j.failed_code;
}

bool pool_later(struct pool *p, pool_later_fn *fn, void *user)
{
    struct later *l = p ? calloc(1, sizeof *l) : NULL;
    bool room;

    if (!l)
        return false;
    *l = (struct later){.fn = fn, .user = user};
    pthread_mutex_lock(&p->lock);
    room = p->nlater < p->count && !p->stopping;
    if (room) {
        l->next = p->later;
        p->later = l;
        p->nlater++;
        pthread_cond_signal(&p->work);
    }
    pthread_mutex_unlock(&p->lock);
    if (!room)
        free(l);
    return room;
}
