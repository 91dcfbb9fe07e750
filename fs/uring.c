/* SPDX-License-Identifier: MIT */
/*
 * fs/uring.c - requests of the kernel by io_uring in place of /dev/fuse.
 *
 * The kernel has a queue for each possible processor and gives a request to the queue of the
 * processor that its program runs on. A queue has a thread, which holds a few entries in the
 * kernel's hands: each comes back with a request and is given back with its answer. Reads
 * of what is in memory are answered by that thread; whatever may wait goes to workers, and
 * answers of other threads come to it by a list and an eventfd, since an entry's next request
 * is delivered on the thread that gave it back. (fs/fuse/dev_uring.c, Linux 6.18.)
 */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/log.h"
#include "fs/uring_priv.h"

static const char off_remote[] = "off: reads of this source wait for a server";
static const char off_threads[] = "off: its threads or rings could not be made";
static const char off_register[] = "off: the kernel took no ring of a processor";

/* ---- threads ---- */

static struct entry *next_work(struct uring *u)
{
    struct entry *t = u->takes ? u->work : NULL;

    if (t) {
        u->work = t->next;
        if (!u->work)
            u->work_tail = &u->work;
    }
    return t;
}

static void *worker_main(void *user)
{
    struct uring *u = user;
    char *message = malloc(MESSAGE_MAX);

    pthread_mutex_lock(&u->lock);
    while (message && !u->workers_end) {
        struct entry *t = next_work(u);

        if (!t) {
            pthread_cond_wait(&u->more, &u->lock);
            continue;
        }
        pthread_mutex_unlock(&u->lock);
        uring_work(t, message);
        pthread_mutex_lock(&u->lock);
    }
    pthread_mutex_unlock(&u->lock);
    free(message);
    return NULL;
}

/* Where the kernel hands its requests over, if we may run there. */
static void move_to_processor(unsigned n)
{
    cpu_set_t *allowed = CPU_ALLOC(PROCESSORS_MAX), *one = CPU_ALLOC(PROCESSORS_MAX);
    size_t size = CPU_ALLOC_SIZE(PROCESSORS_MAX);

    if (allowed && one && sched_getaffinity(0, size, allowed) == 0 &&
        CPU_ISSET_S(n, size, allowed)) {
        CPU_ZERO_S(size, one);
        CPU_SET_S(n, size, one);
        sched_setaffinity(0, size, one);
    }
    CPU_FREE(allowed);
    CPU_FREE(one);
}

/* A queue came as far as was asked, or did not; then what is asked next. */
static enum state report(struct queue *q, int rc, enum state done)
{
    struct uring *u = q->uring;
    enum state next;

    pthread_mutex_lock(&u->lock);
    u->ready++;
    u->failed += rc < 0;
    u->error = rc < 0 ? -rc : u->error;
    pthread_cond_broadcast(&u->changed);
    while (u->state == done && done == MADE)
        pthread_cond_wait(&u->changed, &u->lock);
    next = u->state;
    pthread_mutex_unlock(&u->lock);
    return next;
}

static void give_back_answered(struct queue *q)
{
    struct entry *t;

    pthread_mutex_lock(&q->lock);
    t = q->answered;
    q->answered = NULL;
    pthread_mutex_unlock(&q->lock);
    for (struct entry *next; t; t = next) {
        next = t->next;
        uring_give_back(t);
    }
    ring_read(&q->ring, &q->events, 0);
}

/* An entry that the kernel has no request for: the mount is gone, or never took it. */
static void lose(struct queue *q, int32_t result)
{
    if (result != -ENOTCONN && result != -ECONNABORTED && result != -ECANCELED)
        log_msg(LOG_FS, LOG_WARN, "io_uring: an entry of processor %u is lost: %s",
                q->index, strerror(-result));
}

static void register_entries(struct queue *q)
{
    uint64_t tag;
    int32_t result;

    q->registered = 0;
    for (unsigned i = 0; i < ENTRIES; i++)
        ring_command(&q->ring, COMMAND_REGISTER, q->entry[i].iov, (uint16_t)q->index, 0,
                     (uintptr_t)&q->entry[i]);
    if (ring_wait(&q->ring, 0) < 0)
        return;
    q->registered = ENTRIES;
    while (ring_next(&q->ring, &tag, &result))
        if (result < 0)
            q->registered--; /* at once; what comes later is a request */
        else if (tag)
            uring_take((struct entry *)(uintptr_t)tag);
}

static void serve(struct queue *q)
{
    uint64_t tag;
    int32_t result;
    int rc = 0;

    ring_read(&q->ring, &q->events, 0);
    while (!q->uring->stop && (rc = ring_wait(&q->ring, 1)) == 0)
        while (ring_next(&q->ring, &tag, &result)) {
            if (!tag)
                give_back_answered(q);
            else if (result < 0)
                lose(q, result);
            else
                uring_take((struct entry *)(uintptr_t)tag);
        }
    if (rc < 0) { /* what came by it waits for ever */
        log_msg(LOG_FS, LOG_ERROR, "io_uring: %s: the mount ends", strerror(-rc));
        kill(getpid(), SIGTERM);
    }
}

static void *queue_main(void *user)
{
    struct queue *q = user;
    const int fds[RING_FILES] = {
        [RING_FUSE] = fuse_session_fd(q->uring->fs->session), [RING_EVENT] = q->event};
    struct err e = {0};
    int rc;

    move_to_processor(q->index);
    rc = ring_open(&q->ring, ENTRIES + 1, fds, &e);
    if (report(q, rc, MADE) == REGISTER) {
        uring_own(q);
        register_entries(q);
        report(q, q->registered ? 0 : -EIO, REGISTER);
        serve(q);
    }
    return NULL; /* its end takes the entries from the kernel */
}

/* ---- the whole ---- */

static void off(struct fs *fs, const char *why)
{
    fs->counters.io_uring = why;
    log_msg(LOG_FS, LOG_WARN, "io_uring is %s", why);
}

/* Waits until all queues reported; how many failed. */
static unsigned await_queues(struct uring *u, unsigned count)
{
    unsigned failed;

    pthread_mutex_lock(&u->lock);
    while (u->ready < count)
        pthread_cond_wait(&u->changed, &u->lock);
    u->ready = 0;
    failed = u->failed;
    pthread_mutex_unlock(&u->lock);
    return failed;
}

static void enter_state(struct uring *u, enum state state)
{
    pthread_mutex_lock(&u->lock);
    if (u->state == MADE)
        u->state = state;
    pthread_cond_broadcast(&u->changed);
    pthread_mutex_unlock(&u->lock);
}

static bool start_queues(struct uring *u)
{
    unsigned started = 0;

    for (unsigned i = 0; i < u->nqueues; i++) {
        struct queue *q = &u->queue[i];

        q->uring = u;
        q->index = i;
        q->ring.fd = -1;
        pthread_mutex_init(&q->lock, NULL);
        q->event = eventfd(0, EFD_CLOEXEC);
    }
    while (started < u->nqueues && u->queue[started].event >= 0) {
        struct queue *q = &u->queue[started];

        q->started = pthread_create(&q->thread, NULL, queue_main, q) == 0;
        if (!q->started)
            break;
        started++;
    }
    return await_queues(u, started) == 0 && started == u->nqueues;
}

static bool start_workers(struct uring *u)
{
    while (u->workers < WORKERS &&
           pthread_create(&u->worker[u->workers], NULL, worker_main, u) == 0)
        u->workers++;
    return u->workers == WORKERS;
}

void uring_new(struct fs *fs)
{
    const char *why;
    unsigned count = uring_processors();
    struct uring *u;

    if (!fs->options.io_uring)
        return;
    why = fs->store->remote ? off_remote : uring_lacks();
    u = why || !count ? NULL : calloc(1, sizeof *u);
    if (u)
        u->queue = calloc(count, sizeof *u->queue);
    if (!u || !u->queue) {
        free(u);
        off(fs, why ? why : off_threads);
        return;
    }
    u->fs = fs;
    u->nqueues = count;
    u->work_tail = &u->work;
    u->takes = true;
    pthread_mutex_init(&u->lock, NULL);
    pthread_cond_init(&u->more, NULL);
    pthread_cond_init(&u->changed, NULL);
    if (start_queues(u) && start_workers(u)) {
        fs->uring = u;
        return;
    }
    off(fs, u->error == ENOMEM ? uring_off_memory : off_threads);
    uring_free(u);
}

static bool prepare_queue(struct queue *q)
{
    const struct uring *u = q->uring;

    q->memory = mmap(NULL, u->stride * ENTRIES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (q->memory == MAP_FAILED) {
        q->memory = NULL;
        return false;
    }
    for (unsigned i = 0; i < ENTRIES; i++) {
        struct entry *t = &q->entry[i];

        t->queue = q;
        t->payload = q->memory + i * u->stride;
        t->head = (struct entry_head *)(void *)(t->payload + u->stride - STRIDE_MORE +
                                                (4 << 10));
        t->message = t->payload + u->stride - MESSAGE_MAX;
        t->iov[0] = (struct iovec){t->head, sizeof *t->head};
        t->iov[1] = (struct iovec){t->payload, u->payload_max};
    }
    return true;
}

bool uring_prepare(struct fs *fs, bool offered, size_t payload)
{
    struct uring *u = fs->uring;
    bool made = offered;

    if (!u)
        return false;
    u->payload_max = payload;
    u->stride = (payload + STRIDE_MORE + 4095) / 4096 * 4096;
    for (unsigned i = 0; made && i < u->nqueues; i++)
        made = prepare_queue(&u->queue[i]);
    if (made) {
        u->on = true; /* the first request may come before the last queue is there */
        return true;
    }
    enter_state(u, GIVEN_UP);
    off(fs, offered ? uring_off_memory : uring_off_kernel);
    return false;
}

void uring_begin(struct fs *fs)
{
    struct uring *u = fs->uring;

    if (!u || !u->on)
        return;
    fs->counters.io_uring = counters_on; /* requests may come before we are told so */
    enter_state(u, REGISTER);
    if (await_queues(u, u->nqueues) == 0)
        log_msg(LOG_FS, LOG_INFO, "io_uring is on");
    else /* a refused entry tells the kernel to go on by /dev/fuse */
        off(fs, off_register);
}

void uring_pause(struct uring *u)
{
    const struct timespec wait = {.tv_nsec = 1000000};

    if (!u)
        return;
    u->takes = false;
    while (u->busy)
        nanosleep(&wait, NULL);
}

void uring_stop(struct uring *u)
{
    const uint64_t one = 1;

    if (!u)
        return;
    uring_pause(u);
    enter_state(u, GIVEN_UP);
    u->stop = true;
    for (unsigned i = 0; i < u->nqueues; i++) {
        struct queue *q = &u->queue[i];

        if (!q->started)
            continue;
        if (write(q->event, &one, sizeof one) != sizeof one)
            continue; /* cannot be: it counts to 2^64 */
        pthread_join(q->thread, NULL);
        q->started = false;
        ring_close(&q->ring);
    }
    pthread_mutex_lock(&u->lock);
    u->workers_end = true;
    pthread_cond_broadcast(&u->more);
    pthread_mutex_unlock(&u->lock);
    while (u->workers > 0)
        pthread_join(u->worker[--u->workers], NULL);
}

void uring_free(struct uring *u)
{
    if (!u)
        return;
    uring_stop(u);
    for (unsigned i = 0; i < u->nqueues; i++) {
        struct queue *q = &u->queue[i];

        if (q->memory)
            munmap(q->memory, u->stride * ENTRIES);
        if (q->event >= 0)
            close(q->event);
        pthread_mutex_destroy(&q->lock);
    }
    pthread_cond_destroy(&u->changed);
    pthread_cond_destroy(&u->more);
    pthread_mutex_destroy(&u->lock);
    free(u->queue);
    free(u);
}
