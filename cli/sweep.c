/* SPDX-License-Identifier: MIT */
/* cli/sweep.c - cuts items into pieces and hands them to the pool, a set at a time. */
#include "cli/sweep.h"

#include "base/pool.h"

enum {
    PIECE_BYTES = 4 << 20,
    SLOTS_MIN = 32,
    SLOTS_A_THREAD = 4,
};

unsigned sweep_slots(const struct pool *pool)
{
    return MAX((unsigned)SLOTS_MIN, SLOTS_A_THREAD * pool_threads(pool));
}

/* The items that are open, and the pieces that are in the slots. */
struct set {
    struct sweep *sweep;
    size_t first, n; /* items */
    uint64_t units[SWEEP_OPEN];
    unsigned unit[SWEEP_OPEN];
    struct sweep_piece *piece;
    unsigned pieces;
};

static int open_item(void *user, size_t i, struct err *e)
{
    struct set *s = user;

    (void)e;
    s->sweep->open(s->sweep->user, s->first + i, &s->units[i], &s->unit[i]);
    return 0;
}

static int work_piece(void *user, size_t i, struct err *e)
{
    struct set *s = user;
    const struct sweep_piece *p = &s->piece[i];

    (void)e;
    s->sweep->piece(s->sweep->user, p, (unsigned)i);
    progress_add(s->sweep->progress, p->units * s->unit[p->item - s->first]);
    return 0;
}

/* Works off what is in the slots. */
static int flush(struct set *s, struct err *e)
{
    int ret = pool_each(s->sweep->pool, s->pieces, work_piece, s, e);

    for (unsigned i = 0; ret == 0 && i < s->pieces; i++)
        s->sweep->merge(s->sweep->user, &s->piece[i], i);
    s->pieces = 0;
    return ret;
}

static int cut_item(struct set *s, size_t i, struct err *e)
{
    uint64_t step = PIECE_BYTES / MAX(s->unit[i], 1u);
    int ret = 0;

    for (uint64_t at = 0; ret == 0 && at < s->units[i]; at += step) {
        s->piece[s->pieces++] =
            (struct sweep_piece){s->first + i, at, MIN(step, s->units[i] - at)};
        if (s->pieces == s->sweep->slots)
            ret = flush(s, e);
    }
    return ret;
}

int sweep_run(struct sweep *sweep, struct err *e)
{
    struct set s = {.sweep = sweep, .piece = calloc(sweep->slots, sizeof *s.piece)};
    int ret = s.piece ? 0 : err_nomem(e);

    for (; ret == 0 && s.first < sweep->items; s.first += s.n) {
        s.n = MIN(sweep->items - s.first, (size_t)SWEEP_OPEN);
        ret = pool_each(sweep->pool, s.n, open_item, &s, e);
        for (size_t i = 0; ret == 0 && i < s.n; i++)
            ret = cut_item(&s, i, e);
        if (ret == 0)
            ret = flush(&s, e);
        for (size_t i = 0; i < s.n; i++)
            sweep->close(sweep->user, s.first + i);
    }
    free(s.piece);
    return ret;
}
