/* SPDX-License-Identifier: MIT */
/* fs/ahead.c - what to ask for before a reader who goes from start to end comes to it. */
#include "fs/ahead.h"

#include "gpu/reader.h"
#include "remote/block_cache.h"

enum {
    REMOTE_FIRST = 4 << 20,
    REMOTE_GROWTH = 16,    /* times what was read */
    REMOTE_STEP = 4 << 20, /* asked for at a time: one large request */
    REMOTE_LARGE =
        512
        << 10, /* a first read like this is by who wants all of it (Python peeks 256 KiB) */
};

/* How far to be ahead of a reader that has come to `end`. */
static uint64_t window_of(const struct ahead *a, bool remote, uint64_t end)
{
    uint64_t begun = atomic_load_explicit(&a->begun, memory_order_relaxed);
    uint64_t read = end > begun ? end - begun : 0;

    if (!remote)
        return READER_AHEAD;
    if (read >= BLOCK_CACHE_AHEAD / REMOTE_GROWTH)
        return BLOCK_CACHE_AHEAD;
    return MAX(read * REMOTE_GROWTH, (uint64_t)REMOTE_FIRST);
}

/* How much of it is used up before more is asked for. */
static uint64_t step_of(bool remote, uint64_t window)
{
    return remote ? MIN(window / 2, (uint64_t)REMOTE_STEP) : window / 2;
}

uint64_t ahead_step(struct ahead *a, bool remote, uint64_t off, uint64_t len,
                    uint64_t *from)
{
    uint64_t end = off + len, window;
    uint64_t asked = atomic_load_explicit(&a->asked, memory_order_relaxed);
    bool sequential =
        atomic_exchange_explicit(&a->next, end, memory_order_relaxed) == off;

    if (!sequential || off == 0) {
        atomic_store_explicit(&a->begun, off, memory_order_relaxed);
        if (!remote || off != 0 || len < REMOTE_LARGE)
            return 0;
    }
    window = window_of(a, remote, end);
    if (asked < end || asked > end + 2 * window)
        asked = end;
    if (asked - end > window - step_of(remote, window))
        return 0;
    atomic_store_explicit(&a->asked, end + window, memory_order_relaxed);
    *from = asked;
    return end + window - asked;
}
