/* SPDX-License-Identifier: MIT */
/* fs/uring_request.c - requests that came by a ring, and their answers. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/guard.h"
#include "base/log.h"
#include "fs/uring_priv.h"

/* Of this thread: the request's entry until it is answered; is the thread a queue's? */
static _Thread_local struct entry *current;
static _Thread_local struct queue *own_queue;

void uring_own(struct queue *q)
{
    own_queue = q;
}

/* ---- answers ---- */

void uring_give_back(struct entry *t)
{
    ring_command(&t->queue->ring, COMMAND_COMMIT_AND_FETCH, NULL,
                 (uint16_t)t->queue->index, t->commit, (uintptr_t)t);
}

/* The entry is whole: to the thread that gives it back to the kernel. */
static void hand_over(struct entry *t)
{
    struct queue *q = t->queue;
    const uint64_t one = 1;
    bool first;

    if (own_queue == q) {
        uring_give_back(t);
        return;
    }
    pthread_mutex_lock(&q->lock);
    first = !q->answered;
    t->next = q->answered;
    q->answered = t;
    pthread_mutex_unlock(&q->lock);
    if (first && write(q->event, &one, sizeof one) != sizeof one)
        log_msg(LOG_FS, LOG_WARN, "io_uring: a thread cannot be woken: %s",
                strerror(errno));
}

static struct entry *find(struct uring *u, uint64_t unique)
{
    if (current && current->unique == unique)
        return current;
    for (unsigned q = 0; q < u->nqueues; q++)
        for (unsigned i = 0; i < ENTRIES; i++)
            if (atomic_load_explicit(&u->queue[q].entry[i].unique,
                                     memory_order_relaxed) == unique)
                return &u->queue[q].entry[i];
    return NULL;
}

struct pieces {
    const struct iovec *iov;
    int count;
    char *to;
    size_t max, len; /* copied so far */
};

static int copy_pieces(void *user)
{
    struct pieces *p = user;

    for (int i = 0; i < p->count; i++) {
        size_t len = p->iov[i].iov_len;

        if (len > p->max - p->len)
            return -EIO;
        if (len && p->iov[i].iov_base != p->to + p->len)
            memcpy(p->to + p->len, p->iov[i].iov_base, len);
        p->len += len;
    }
    return 0;
}

bool uring_answer(struct fs *fs, const struct iovec *iov, int count, ssize_t *out)
{
    struct uring *u = fs->uring;
    struct pieces p = {.iov = iov + 1, .count = count - 1};
    struct out_head head;
    struct entry *t;
    int rc;

    if (!u || !u->on || count < 1 || iov[0].iov_len != sizeof head)
        return false;
    memcpy(&head, iov[0].iov_base, sizeof head);
    t = head.unique ? find(u, head.unique) : NULL;
    if (!t)
        return false;
    p.to = t->payload;
    p.max = u->payload_max;
    rc = guard_run(copy_pieces, &p); /* pieces may lie in shards */
    if (rc < 0) {
        head.error = -EIO;
        p.len = 0;
    }
    head.len = (uint32_t)(sizeof head + p.len);
    t->head->out = head;
    t->head->flags = 0;
    t->head->payload = (uint32_t)p.len;
    /* begin() of what this answer makes the kernel ask comes behind: it names no order. */
    atomic_fetch_add(&u->busy, 0);
    atomic_store(&t->unique, 0);
    if (current == t)
        current = NULL;
    hand_over(t);
    errno = EFAULT;
    *out = rc < 0 ? -1 : (ssize_t)head.len;
    return true;
}

void *uring_payload(size_t size)
{
    return current && size <= current->queue->uring->payload_max + 1 ? current->payload
                                                                     : NULL;
}

bool uring_in_haste(void)
{
    return current && own_queue;
}

/* ---- requests ---- */

static void add_work(struct uring *u, struct entry *t)
{
    t->next = NULL;
    pthread_mutex_lock(&u->lock);
    *u->work_tail = t;
    u->work_tail = &t->next;
    pthread_cond_signal(&u->more);
    pthread_mutex_unlock(&u->lock);
}

bool uring_defer(const struct request *r)
{
    struct entry *t = current;

    if (!t || !own_queue)
        return false;
    current = NULL;
    t->request = *r;
    t->deferred = true;
    add_work(t->queue->uring, t);
    return true;
}

/* False once the mount ends: the entry is then left as it is. */
static bool begin(struct uring *u)
{
    atomic_fetch_add(&u->busy, 1);
    if (u->takes)
        return true;
    atomic_fetch_sub(&u->busy, 1);
    return false;
}

static void end(struct uring *u)
{
    atomic_fetch_sub(&u->busy, 1);
}

static void process(struct entry *t, void *message)
{
    struct fuse_buf buf = {.mem = message, .size = t->len};

    current = t;
    fuse_session_process_buf(t->queue->uring->fs->session, &buf);
    current = NULL;
}

/* Header, what comes by its own field and the rest, in one piece as libfuse takes it. */
static bool put_together(struct entry *t)
{
    const struct entry_head *h = t->head;
    struct in_head in = h->in;
    size_t fixed;

    t->commit = h->commit;
    t->deferred = false;
    if (in.len < sizeof in + h->payload || in.len > MESSAGE_MAX ||
        h->payload > t->queue->uring->payload_max)
        return false;
    fixed = in.len - sizeof in - h->payload;
    if (fixed > sizeof h->op_in)
        return false;
    memcpy(t->message, &in, sizeof in);
    memcpy(t->message + sizeof in, h->op_in, fixed);
    memcpy(t->message + sizeof in + fixed, t->payload, h->payload);
    t->len = in.len;
    t->is_read = in.opcode == OP_READ;
    atomic_store(&t->unique, in.unique);
    return true;
}

void uring_take(struct entry *t)
{
    struct uring *u = t->queue->uring;

    if (!put_together(t)) { /* larger than anything that a mount for reading is asked */
        t->head->out = (struct out_head){.len = sizeof(struct out_head),
                                         .error = -EIO,
                                         .unique = t->head->in.unique};
        t->head->payload = 0;
        uring_give_back(t);
    } else if (!t->is_read) {
        add_work(u, t);
    } else if (begin(u)) {
        process(t, t->message);
        end(u);
    }
}

/* The entry's message may be another's as soon as this one is answered. */
static void run_work(struct entry *t, char *message)
{
    if (t->deferred) {
        const struct request r = t->request;

        current = t;
        request_run(&r);
        current = NULL;
    } else {
        memcpy(message, t->message, t->len);
        process(t, message);
    }
}

void uring_work(struct entry *t, char *message)
{
    struct uring *u = t->queue->uring;

    if (begin(u)) {
        run_work(t, message);
        end(u);
    }
}
