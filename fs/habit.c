/* SPDX-License-Identifier: MIT */
/* fs/habit.c - how programs read a file, for the next one that opens it. */
#include "fs/habit.h"

enum {
    SHORT_READ = 16 << 10, /* longer ones are no dearer when they are handed over */
    HOPS = 256, /* a program that looks at a header, or a directory, has fewer */
    LONG_RUN = 64 << 20, /* who reads so much in a row reads all of it */
    /* Requests that fill pages ahead of a reader come by several threads at once: so far
     * from each other they are still in a row. */
    NEAR = 8 << 20,
};

static unsigned place_of(uint64_t ino)
{
    return (unsigned)(ino * 0x9e3779b97f4a7c15u >> (64 - HABIT_BITS));
}

static void mark(struct marks *m, uint64_t ino)
{
    atomic_store_explicit(&m->ino[place_of(ino)], ino, memory_order_relaxed);
}

static bool is_marked(const struct marks *m, uint64_t ino)
{
    return atomic_load_explicit(&m->ino[place_of(ino)], memory_order_relaxed) == ino;
}

static void unmark(struct marks *m, uint64_t ino)
{
    uint_fast64_t was = ino;

    atomic_compare_exchange_strong_explicit(&m->ino[place_of(ino)], &was, 0,
                                            memory_order_relaxed, memory_order_relaxed);
}

bool habit_open(const struct habits *all, uint64_t ino, bool may_scatter,
                struct habit *h)
{
    if (is_marked(&all->mapped, ino))
        h->opened_for = HABIT_MAPPED;
    else if (may_scatter && is_marked(&all->scattered, ino))
        h->opened_for = HABIT_SCATTERED;
    return h->opened_for != HABIT_DIRECT;
}

void habit_read(struct habits *all, uint64_t ino, struct habit *h, bool owned,
                uint64_t off, size_t len)
{
    uint64_t next = atomic_exchange_explicit(&h->next, off + len, memory_order_relaxed);
    uint64_t apart = off > next ? off - next : next - off;

    if (h->opened_for == HABIT_SCATTERED) {
        /* All requests fill pages now, those of mappings too: what was mapped shows when
         * it is opened without the mark. */
        if (apart > NEAR)
            atomic_store_explicit(&h->run, 0, memory_order_relaxed);
        if (atomic_fetch_add_explicit(&h->run, len, memory_order_relaxed) + len >=
            LONG_RUN)
            unmark(&all->scattered, ino);
    } else if (!owned) {
        mark(&all->mapped, ino);
    } else if (apart > 0 && len <= SHORT_READ &&
               atomic_fetch_add_explicit(&h->hops, 1, memory_order_relaxed) + 1 >=
                   HOPS) {
        mark(&all->scattered, ino);
    }
}
