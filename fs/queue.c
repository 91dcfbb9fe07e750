/* SPDX-License-Identifier: MIT */
/* fs/queue.c - threads for requests that wait for a scan, so that others need not. */
#include "fs/queue.h"

#include <errno.h>
#include <string.h>

#include "fs/asked.h"
#include "fs/node.h"
#include "fs/request.h"
#include "fs/generation.h"

enum { QUEUE_THREADS = 6, REAP_AT_ONCE = 64, REAP_NS = 100000000 };

/*
 * A waiting request. It is on the list until a thread takes it, or until it is answered
 * because its process was killed: whoever removes it owns it.
 */
struct waiting {
    struct waiting *next;
    struct request r;
    struct queue *queue;
    uint64_t key;
    char *name;
    bool interrupted;
};

struct queue {
    struct fs *fs;
    bool fills; /* of opens that make a copy first */
    pthread_t thread[QUEUE_THREADS];
    unsigned started;
    pthread_t reaper;
    bool reaps;
    pthread_mutex_t lock;
    pthread_cond_t more, interrupted;
    /* guarded by lock */
    unsigned interrupts; /* of waiting requests, since the reaper slept */
    struct waiting *head, **tail;
    uint64_t running[QUEUE_THREADS]; /* keys that a thread works on; 0: none */
    unsigned threads;                /* that took a place in it */
    bool stop;
};

/* All of a generation, or one directory; one inode of fills. Never 0. */
static uint64_t key_of(const struct queue *l, const struct request *r)
{
    return ino_is_inside(r->ino) && !l->fills ? r->ino >> 40 : r->ino;
}

static void waiting_free(struct waiting *w)
{
    free(w->name);
    free(w);
}

static bool is_running(const struct queue *l, uint64_t key)
{
    for (unsigned i = 0; i < QUEUE_THREADS; i++)
        if (l->running[i] == key)
            return true;
    return false;
}

/* Takes the request at *p off the list. */
static struct waiting *unlink_at(struct queue *l, struct waiting **p)
{
    struct waiting *w = *p;

    *p = w->next;
    if (l->tail == &w->next)
        l->tail = p;
    return w;
}

/* The first request whose node no thread works on, or NULL. */
static const struct waiting *next_job(const struct queue *l)
{
    for (const struct waiting *w = l->head; w; w = w->next)
        if (!is_running(l, w->key))
            return w;
    return NULL;
}

/* A request on this node, off the list, or NULL. */
static struct waiting *take(struct queue *l, uint64_t key)
{
    for (struct waiting **p = &l->head; *p; p = &(*p)->next)
        if ((*p)->key == key)
            return unlink_at(l, p);
    return NULL;
}

/*
 * libfuse calls this for any signal that the process got, with the request locked. Only
 * a mark: a program with a timer must not see EINTR from stat(2). The reaper looks whether
 * it was killed.
 */
static void on_interrupt(fuse_req_t req, void *user)
{
    struct waiting *w = user;

    (void)req;
    pthread_mutex_lock(&w->queue->lock);
    w->interrupted = true;
    w->queue->interrupts++;
    pthread_cond_signal(&w->queue->interrupted);
    pthread_mutex_unlock(&w->queue->lock);
}

/*
 * Does what takes long before any request is taken: while they wait on the list they can
 * still be answered when their process is killed. What goes wrong is found again, and
 * told, by the requests themselves.
 */
static void prepare(struct fs *fs, fuse_ino_t ino)
{
    struct err e = {0};

    if (ino_is_inside(ino)) {
        struct generation *gen = generation_of_ino(fs, ino);

        if (gen && !gen->stale && !generation_fresh(gen, now_ns()))
            generation_refresh(fs, gen, &e);
        generation_unref(fs, gen, 1);
    } else if (!fs_writable(fs)) {
        struct node *node = node_pin(fs, ino);
        struct snapshot *snapshot = NULL;

        if (node && tree_snapshot(fs, node, true, &snapshot, &e) == 0)
            snapshot_put(fs, snapshot);
        if (node)
            node_unpin(fs, node);
    }
}

/* Answers a request that is ours alone now. */
static void answer(struct waiting *w)
{
    fuse_req_interrupt_func(w->r.req, NULL, NULL); /* no call can be under way after */
    request_run(&w->r);
    waiting_free(w);
}

/* Works on one node; called and returns with the lock held. */
static void run_job(struct queue *l, unsigned me, const struct waiting *job)
{
    uint64_t key = job->key;
    fuse_ino_t ino = job->r.ino;
    struct waiting *w;

    l->running[me] = key;
    pthread_mutex_unlock(&l->lock);
    prepare(l->fs, ino);
    pthread_mutex_lock(&l->lock);
    while (!l->stop && (w = take(l, key))) {
        pthread_mutex_unlock(&l->lock);
        answer(w);
        pthread_mutex_lock(&l->lock);
    }
    l->running[me] = 0;
}

static void *queue_thread(void *user)
{
    struct queue *l = user;
    unsigned me;

    pthread_mutex_lock(&l->lock);
    me = l->threads++;
    while (!l->stop) {
        const struct waiting *job = next_job(l);

        if (job)
            run_job(l, me, job);
        else
            pthread_cond_wait(&l->more, &l->lock);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

/* Answers without running it. */
static void refuse(struct waiting *w, int code)
{
    fuse_req_interrupt_func(w->r.req, NULL, NULL);
    fuse_reply_err(w->r.req, code);
    waiting_free(w);
}

/* Takes a request off the list if it is still there, or NULL. */
static struct waiting *remove_waiting(struct queue *l, const struct waiting *w)
{
    for (struct waiting **p = &l->head; *p; p = &(*p)->next)
        if (*p == w && w->interrupted)
            return unlink_at(l, p);
    return NULL;
}

/*
 * Answers those that wait for nobody any more, since who asked was killed. True: some got a
 * signal and may be killed yet, of which nobody tells.
 */
static bool reap(struct queue *l)
{
    struct suspect {
        const struct waiting *w;
        pid_t tid;
    } suspect[REAP_AT_ONCE];
    size_t count = 0;
    struct waiting *next;

    pthread_mutex_lock(&l->lock);
    for (next = l->head; next && count < REAP_AT_ONCE; next = next->next)
        if (next->interrupted)
            suspect[count++] = (struct suspect){next, fuse_req_ctx(next->r.req)->pid};
    pthread_mutex_unlock(&l->lock);
    for (size_t i = 0; i < count; i++) {
        struct waiting *mine;

        if (!asked_is_killed(suspect[i].tid))
            continue;
        pthread_mutex_lock(&l->lock);
        mine = remove_waiting(l, suspect[i].w);
        pthread_mutex_unlock(&l->lock);
        if (mine)
            refuse(mine, EINTR);
    }
    return count > 0;
}

/* Nothing else is its work: whoever waits for a scan itself would let the killed wait too. */
static void *reap_thread(void *user)
{
    struct queue *l = user;
    bool some = false;

    pthread_mutex_lock(&l->lock);
    while (!l->stop) {
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        t.tv_nsec += REAP_NS;
        t.tv_sec += t.tv_nsec / 1000000000;
        t.tv_nsec %= 1000000000;
        if (some)
            pthread_cond_timedwait(&l->interrupted, &l->lock, &t);
        else if (l->interrupts == 0)
            pthread_cond_wait(&l->interrupted, &l->lock);
        l->interrupts = 0;
        pthread_mutex_unlock(&l->lock);
        some = reap(l);
        pthread_mutex_lock(&l->lock);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static int queue_make(struct fs *fs, bool fills, struct queue **out, struct err *e)
{
    struct queue *l = calloc(1, sizeof *l);
    int rc;

    if (!l)
        return err_nomem(e);
    l->fs = fs;
    l->fills = fills;
    l->tail = &l->head;
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->more, NULL);
    interrupt_cond_init(&l->interrupted);
    rc = pthread_create(&l->reaper, NULL, reap_thread, l);
    l->reaps = rc == 0;
    while (rc == 0 && l->started < QUEUE_THREADS) {
        rc = pthread_create(&l->thread[l->started], NULL, queue_thread, l);
        l->started += rc == 0;
    }
    if (rc) {
        queue_free(l);
        return err_set(e, rc, "start a thread: %s", strerror(rc));
    }
    *out = l;
    return 0;
}

int queue_new(struct fs *fs, struct queue **out, struct err *e)
{
    return queue_make(fs, false, out, e);
}

int queue_new_fills(struct fs *fs, struct queue **out, struct err *e)
{
    return queue_make(fs, true, out, e);
}

void queue_free(struct queue *l)
{
    if (!l)
        return;
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_broadcast(&l->more);
    pthread_cond_broadcast(&l->interrupted);
    pthread_mutex_unlock(&l->lock);
    if (l->reaps)
        pthread_join(l->reaper, NULL);
    for (unsigned i = 0; i < l->started; i++)
        pthread_join(l->thread[i], NULL);
    while (l->head)
        refuse(unlink_at(l, &l->head), EINTR);
    pthread_cond_destroy(&l->interrupted);
    pthread_cond_destroy(&l->more);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static struct waiting *waiting_new(struct queue *l, const struct request *r)
{
    struct waiting *w = calloc(1, sizeof *w);

    if (!w)
        return NULL;
    w->r = *r;
    w->r.may_block = true;
    w->r.may_fill = l->fills;
    w->queue = l;
    w->key = key_of(l, r);
    if (r->name) {
        w->name = strdup(r->name);
        w->r.name = w->name;
        if (!w->name) {
            free(w);
            return NULL;
        }
    }
    return w;
}

void queue_add(struct queue *l, const struct request *r)
{
    struct waiting *w = waiting_new(l, r);

    if (!w) {
        fuse_reply_err(r->req, ENOMEM);
        return;
    }
    /* Before it is on the list: afterwards it may be gone at any time. */
    fuse_req_interrupt_func(w->r.req, on_interrupt, w);
    pthread_mutex_lock(&l->lock);
    *l->tail = w;
    l->tail = &w->next;
    pthread_cond_signal(&l->more);
    pthread_mutex_unlock(&l->lock);
}
