/* SPDX-License-Identifier: MIT */
/* gpu/tensor_ahead.c - chunks are decoded before their reader asks for them. */
#include "gpu/tensor_priv.h"

#include "base/err.h"
#include "base/pool.h"
#include "remote/decoded.h"
#include "remote/source.h"

/*
 * Chunks a thread that one step decodes. More steps follow while the reader is behind, as
 * long as all from the reader on take no more than a part of the memory of decoded pieces:
 * what is ahead must not push out what is being read.
 */
enum { CHUNKS_A_THREAD = 2, AHEAD_MEMORY = DECODED_MEMORY / 4 * 3 };

/* Chunks [first, end) of the plan. */
struct step {
    struct tensor *t;
    size_t first, end;
};

static int decode_nth(void *user, size_t n, struct err *e)
{
    struct step *s = user;
    struct source *src;

    /* The reader has overtaken us: what it is through with is not to be had again. */
    if (s->first + n < atomic_load(&s->t->wanted))
        return 0;
    if (tensor_resolve(s->t, s->first + n, &src, e) < 0)
        return -e->code;
    source_put(src);
    return 0;
}

/* pool_later_fn. What fails here fails again where its reader is told. */
static void run_step(void *user, bool run)
{
    struct step *s = user;
    struct err ignored = {0};

    if (run)
        pool_each(s->t->env.pool, s->end - s->first, decode_nth, s, &ignored);
    atomic_store(&s->t->ahead_busy, false);
    tensor_put(s->t);
    free(s);
}

static bool start_step(struct tensor *t, size_t first, size_t end)
{
    struct step *s = malloc(sizeof *s);

    if (!s)
        return false;
    *s = (struct step){.t = tensor_get(t), .first = first, .end = end};
    if (pool_later(t->env.pool, run_step, s))
        return true;
    tensor_put(t);
    free(s);
    return false;
}

struct span_of_chunks {
    size_t first, last, n;
};

static int note_chunk(void *user, size_t i)
{
    struct span_of_chunks *s = user;

    s->first = s->n == 0 ? i : MIN(s->first, i);
    s->last = s->n == 0 ? i : MAX(s->last, i);
    s->n++;
    return 0;
}

/* One past the last chunk that may lie decoded before the reader comes to it. */
static size_t end_of_ahead(const struct tensor *t, const struct span_of_chunks *s)
{
    uint64_t bytes = MAX(t->info.bytes / plan_chunks(t->plan), (uint64_t)1);
    size_t want = CHUNKS_A_THREAD * (size_t)pool_threads(t->env.pool);
    size_t most = (size_t)MIN(AHEAD_MEMORY / bytes, (uint64_t)SIZE_MAX / 2);

    /* Where a row of the tensor crosses many chunks the next row needs as many at once. */
    want = s->last + 1 + MAX(want, s->n);
    return MIN(MIN(want, s->first + most), plan_chunks(t->plan));
}

bool tensor_decode_ahead(struct tensor *t, uint64_t off, uint64_t len)
{
    size_t step = CHUNKS_A_THREAD * (size_t)pool_threads(t->env.pool), first, end;
    struct span_of_chunks s = {0};

    if (plan_touched(t->plan, off, len, note_chunk, &s) != 0 || s.n == 0 ||
        !tensor_decodes(t, s.last))
        return false;
    atomic_store(&t->wanted, s.first);
    if (atomic_exchange(&t->ahead_busy, true))
        return true;
    /* From the window on, or from where the last step ended when that is further on. */
    end = end_of_ahead(t, &s);
    first = atomic_load(&t->ahead);
    if (first < s.first || first > end)
        first = s.first;
    end = MIN(end, first + MAX(step, (size_t)1));
    if (first >= end || !start_step(t, first, end))
        atomic_store(&t->ahead_busy, false);
    else
        atomic_store(&t->ahead, end);
    return true;
}
