/* SPDX-License-Identifier: MIT */
/* fs/early.c - bytes that are gathered before their reader asks for them. */
#include "fs/early.h"

#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/err.h"
#include "base/pool.h"
#include "gpu/reader.h"

enum {
    WINDOW = 1 << 20, /* the longest read that the kernel asks for */
    /* Shorter reads: waking a worker for each costs what is gained. */
    LONG = 512 << 10,
    /* What is shorter is seen only of a file that has pieces already: it shall cost nothing. */
    SHORT = 64 << 10,
    FROM = 1 << 20, /* so much in a row comes first */
    /* The same, once something came that needs no gathering. */
    FROM_AGAIN = 8 << 20,
    PAGE = 4 << 10,
    MEMORY = 4 << 20, /* of all windows of a file, in large pages */
    HUGE_PAGE = 2 << 20,
    FILES = 16, /* that have such memory at once */
    CROWDED_NS = 20000000,
};

enum state { FREE, ASKED, RUNNING, DONE };

/* A read takes the state on: only DONE ones are held, and RUNNING ones are their thread's. */
struct window {
    enum state state;
    uint64_t off;
    size_t len;
    unsigned held; /* reads that are answered from it */
};

struct early {
    struct early_room *room;
    struct pool *pool;
    struct reader *reader;
    uint64_t size;
    atomic_bool used; /* there is memory; changed with the lock */
    pthread_mutex_t lock;
    pthread_cond_t ended; /* a window that ran */
    unsigned refs;        /* guarded by lock, as all below: the file, and the pool */
    bool closed;
    uint64_t next, row; /* where the last read ended; how much was read in a row, */
    size_t longest;     /* and the longest read of it */
    uint64_t from;      /* so long a row is needed */
    char *memory;       /* of the windows; NULL: none is in use */
    struct window w[EARLY_WINDOWS];
};

/* ---- the mount's ---- */

void early_room_init(struct early_room *room, unsigned processors)
{
    room->processors = processors;
    pthread_mutex_init(&room->lock, NULL);
}

void early_room_release(struct early_room *room)
{
    free(room->spare);
    pthread_mutex_destroy(&room->lock);
}

static int64_t coarse_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void early_enter(struct early_room *room, atomic_uint *reads, size_t size)
{
    if (size >= SHORT && atomic_fetch_add(reads, 1) == 0 &&
        atomic_fetch_add(&room->files, 1) + 1 >= room->processors)
        atomic_store(&room->crowded_ns, coarse_ns());
}

void early_leave(struct early_room *room, atomic_uint *reads, size_t size)
{
    if (size >= SHORT && atomic_fetch_sub(reads, 1) == 1)
        atomic_fetch_sub(&room->files, 1);
}

static bool has_time(struct early_room *room)
{
    return coarse_ns() - atomic_load(&room->crowded_ns) > CROWDED_NS;
}

static char *memory_take(struct early_room *room)
{
    void *p = NULL;

    pthread_mutex_lock(&room->lock);
    if (room->taken < FILES) {
        room->taken++;
        p = steal(&room->spare);
        if (!p && posix_memalign(&p, HUGE_PAGE, MEMORY) != 0) {
            p = NULL;
            room->taken--;
        }
    }
    pthread_mutex_unlock(&room->lock);
    if (p)
        madvise(p, MEMORY, MADV_HUGEPAGE);
    return p;
}

static void memory_give(struct early_room *room, void *memory)
{
    pthread_mutex_lock(&room->lock);
    room->taken--;
    if (!room->spare)
        room->spare = steal(&memory);
    pthread_mutex_unlock(&room->lock);
    free(memory);
}

/* ---- a file's ---- */

struct early *early_new(struct early_room *room, struct pool *pool,
                        struct reader *reader)
{
    struct early *y = room->processors > 1 ? calloc(1, sizeof *y) : NULL;

    if (!y)
        return NULL;
    y->room = room;
    y->pool = pool;
    y->reader = reader;
    y->size = reader_size(reader);
    y->refs = 1;
    y->from = FROM;
    pthread_mutex_init(&y->lock, NULL);
    pthread_cond_init(&y->ended, NULL);
    return y;
}

/* Forgets all that was gathered, unless somebody is at it. Lock held. */
static void forget(struct early *y)
{
    for (int i = 0; i < EARLY_WINDOWS; i++)
        if (y->w[i].state == RUNNING || y->w[i].held)
            return;
    for (int i = 0; i < EARLY_WINDOWS; i++)
        y->w[i].state = FREE;
    if (y->memory)
        memory_give(y->room, steal(&y->memory));
    atomic_store(&y->used, false);
}

/* Lock held, and given back. */
static void unref(struct early *y)
{
    bool last = --y->refs == 0;

    pthread_mutex_unlock(&y->lock);
    if (!last)
        return;
    pthread_cond_destroy(&y->ended);
    pthread_mutex_destroy(&y->lock);
    free(y);
}

void early_free(struct early *y)
{
    if (!y)
        return;
    pthread_mutex_lock(&y->lock);
    y->closed = true;
    forget(y);
    while (y->memory) {
        pthread_cond_wait(&y->ended, &y->lock);
        forget(y);
    }
    unref(y);
}

static char *memory_of(const struct early *y, const struct window *w)
{
    return y->memory + (size_t)WINDOW * (size_t)(w - y->w);
}

/* What fails is read anew, and told to who wants it. */
static bool gather(const struct early *y, const struct window *w, void *to)
{
    struct err ignored = {0};

    return reader_gathers(y->reader, w->off, w->len) &&
           reader_read(y->reader, w->off, w->len, to, &ignored) == 0;
}

/* Gathers a window that was asked for. The lock is held before and after, not during. */
static void run(struct early *y, struct window *w)
{
    bool done;

    w->state = RUNNING;
    pthread_mutex_unlock(&y->lock);
    done = gather(y, w, memory_of(y, w));
    pthread_mutex_lock(&y->lock);
    w->state = done ? DONE : FREE;
    y->from = done ? FROM : FROM_AGAIN;
    if (!done)
        y->row = 0;
    pthread_cond_broadcast(&y->ended);
}

/* pool_later_fn */
static void run_asked(void *user, bool go)
{
    struct early *y = user;

    pthread_mutex_lock(&y->lock);
    for (int i = 0; go && !y->closed && i < EARLY_WINDOWS; i++) {
        if (y->w[i].state == ASKED) {
            run(y, &y->w[i]);
            break;
        }
    }
    unref(y);
}

static struct window *find(struct early *y, uint64_t off)
{
    for (int i = 0; i < EARLY_WINDOWS; i++) {
        struct window *w = &y->w[i];

        if (w->state != FREE && off >= w->off && off - w->off < w->len)
            return w;
    }
    return NULL;
}

/* The window of that byte once it is there. Lock held. */
static struct window *await(struct early *y, uint64_t off)
{
    struct window *w;

    while ((w = find(y, off)) && w->state != DONE) {
        if (w->state == ASKED)
            run(y, w); /* no worker had time */
        else
            pthread_cond_wait(&y->ended, &y->lock);
    }
    return w;
}

/* Lock held. */
static void put(struct early *y, struct early_pieces *p)
{
    for (int i = 0; i < EARLY_WINDOWS; i++)
        y->w[i].held -= p->held >> i & 1;
    p->held = 0;
    p->count = 0;
}

bool early_take(struct early *y, uint64_t off, size_t len, struct early_pieces *out)
{
    size_t done = 0;

    *out = (struct early_pieces){0};
    if (!atomic_load(&y->used))
        return false;
    pthread_mutex_lock(&y->lock);
    while (done < len && out->count < EARLY_WINDOWS) {
        struct window *w = await(y, off + done);
        size_t skip, part;

        if (!w)
            break;
        skip = (size_t)(off + done - w->off);
        part = MIN(len - done, w->len - skip);
        out->iov[out->count++] = (struct iovec){memory_of(y, w) + skip, part};
        done += part;
        w->held++;
        out->held |= 1u << (w - y->w);
    }
    if (done < len)
        put(y, out);
    pthread_mutex_unlock(&y->lock);
    return done == len;
}

void early_put(struct early *y, struct early_pieces *p)
{
    pthread_mutex_lock(&y->lock);
    put(y, p);
    if (y->next == y->size)
        forget(y);
    pthread_mutex_unlock(&y->lock);
}

/* A window that its reader, who is at [off, end), has passed by or left. */
static struct window *spare(struct early *y, uint64_t off, uint64_t end)
{
    for (int i = 0; i < EARLY_WINDOWS; i++) {
        struct window *w = &y->w[i];
        bool behind = w->off + w->len <= off || w->off > end + WINDOW;

        if (w->state == FREE || (w->state == DONE && !w->held && behind))
            return w;
    }
    return NULL;
}

/*
 * Asks for what is behind `end`, unless half a read of it was gathered: by then there is a
 * long read to be done meanwhile. Windows are as long as the reads, which end where they do
 * then. Lock held.
 */
static void ask_next(struct early *y, uint64_t off, uint64_t end)
{
    struct window *w = find(y, end);
    uint64_t at = w ? w->off + w->len : end;
    size_t len = (y->longest + PAGE - 1) / PAGE * PAGE;

    if (at >= y->size || at - end >= len / 2)
        return;
    w = spare(y, off, end);
    if (w && !y->memory)
        y->memory = memory_take(y->room);
    if (!w || !y->memory)
        return;
    atomic_store(&y->used, true);
    *w = (struct window){ASKED, at, (size_t)MIN((uint64_t)len, y->size - at), 0};
    y->refs++;
    if (!pool_later(y->pool, run_asked, y)) {
        w->state = FREE;
        y->refs--;
    }
}

void early_step(struct early *y, uint64_t off, size_t len, bool ask)
{
    uint64_t end = off + len;

    if (len < SHORT && !atomic_load(&y->used))
        return;
    pthread_mutex_lock(&y->lock);
    if (off >= y->next && off - y->next < SHORT) { /* or one that was not seen */
        y->row += len;
        y->longest = MIN(MAX(y->longest, len), (size_t)WINDOW);
    } else {
        y->row = 0;
        y->longest = 0;
    }
    y->next = end;
    if (y->row == 0 || end == y->size)
        forget(y);
    else if (ask && y->row >= y->from && y->longest >= LONG && has_time(y->room))
        ask_next(y, off, end);
    pthread_mutex_unlock(&y->lock);
}
