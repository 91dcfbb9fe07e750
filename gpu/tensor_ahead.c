/* SPDX-License-Identifier: MIT */
/* gpu/tensor_ahead.c - bytes are fetched, and chunks decoded, before their reader asks for them. */
#include "gpu/tensor_priv.h"

#include "base/arena.h"
#include "base/err.h"
#include "base/pool.h"
#include "gpu/fetch.h"
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
    TRY(tensor_resolve(s->t, s->first + n, &src, e));
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

static bool decode_ahead(struct tensor *t, uint64_t off, uint64_t len)
{
    size_t step = CHUNKS_A_THREAD * (size_t)pool_threads(t->env.pool), first, end;
    struct span_of_chunks s = {0};

    if (!t->decodes)
        return false;
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

bool tensor_decode_ahead(struct tensor *t)
{
    if (plan_chunks(t->plan) != 1 || !tensor_decodes(t, 0))
        return false;
    if (atomic_exchange(&t->ahead_busy, true))
        return true;
    if (atomic_load(&t->ahead) == 0 && start_step(t, 0, 1))
        atomic_store(&t->ahead, 1);
    else
        atomic_store(&t->ahead_busy, false);
    return true;
}

/* ---- bytes of shards ---- */

enum {
    /* Headers before the elements of a chunk, and a directory behind them. */
    AROUND = 4096,
    GUESS_MAX = 1 << 20, /* more than this around its elements: not to be guessed */
    GUESS_MEMORY = 64 << 10,
};

/* A server's shard in which the place of chunk i is not known yet: to look costs a round trip. */
static bool is_unplaced(const struct tensor *t, size_t i)
{
    bool remote = t->nshards > 0 && t->keeps_shards && t->shards[0].src->remote;
    struct chunk_room room;

    room.list = NULL;
    return remote && !tensor_is_placed(t, i) &&
           plan_chunk(t->plan, i, &room)->encoding != CHUNK_PLAIN &&
           !tensor_decodes(t, i);
}

/* The bytes of one run, and what may stand around the elements of the chunk. */
static void ask_run(struct source *src, const struct plan_run *r, uint64_t around,
                    uint64_t end)
{
    int64_t reach = (int64_t)(r->count - 1) * r->src_step;
    uint64_t lo = reach < 0 ? r->src - (uint64_t)-reach : r->src;
    uint64_t hi = (reach > 0 ? r->src + (uint64_t)reach : r->src) + r->len + around;

    hi = MIN(hi, end);
    if (lo < hi)
        source_will_need(src, lo, hi - lo);
}

/*
 * Asks for what of a window lies in chunk i without waiting to know where that is: between
 * where it would be if the piece of the file began with the elements, and if it ended with
 * them. And for both ends of the piece, which say it.
 */
static int ask_unplaced(struct tensor *t, size_t i, uint64_t off, uint64_t len,
                        struct err *e)
{
    struct chunk_room room = {0};
    const struct chunk *c = plan_chunk(t->plan, i, &room);
    uint64_t bytes = t->unit, end = c->offset + c->length;
    uint64_t ends = MIN(c->length, (uint64_t)AROUND);
    CLEANUP(arena_freep) struct arena *a = arena_new(GUESS_MEMORY);
    CLEANUP(run_list_release) struct run_list runs = {0};
    CLEANUP(source_putp) struct source *src = NULL;
    struct plan_op op;
    int ret = a ? tensor_guess(t, i, a, &op, &src, e) : err_nomem(e);

    for (uint32_t k = 0; k < t->units.nd; k++)
        bytes *= c->size[k]; /* within the tensor's size */
    if (ret == 0 && c->length >= bytes && c->length - bytes <= GUESS_MAX)
        ret = plan_op_cut(&op, off, len, 0, &runs, e);
    for (size_t k = 0; ret == 0 && k < runs.count; k++)
        ask_run(src, &runs.run[k], c->length - bytes, end);
    if (ret == 0) {
        source_will_need(src, c->offset, ends);
        source_will_need(src, end - ends, ends);
    }
    return ret;
}

bool tensor_ask_unplaced(struct tensor *t, size_t i, uint64_t off, uint64_t len)
{
    struct err ignored = {0};

    if (!is_unplaced(t, i))
        return false;
    ask_unplaced(t, i, off, len, &ignored);
    return true;
}

/* Asks for those that are not placed, and leaves them out. */
static void cut_drop_unplaced(struct cut *c, uint64_t off, uint64_t len)
{
    size_t n = 0;

    for (size_t i = 0; i < c->n; i++)
        if (!tensor_ask_unplaced(c->t, c->chunk[i], off, len))
            c->chunk[n++] = c->chunk[i];
    c->n = n;
}

void tensor_will_need(struct tensor *t, uint64_t off, uint64_t len)
{
    CLEANUP(cut_release) struct cut c = {.t = t};
    struct fetch_sources sources;
    struct err ignored = {0};

    if (tensor_is_cast(t)) {
        uint64_t unit = dtype_unit(t->info.dtype), end = off + len;

        off = off / unit * t->unit;
        len = (end + unit - 1) / unit * t->unit - off;
    }
    if (decode_ahead(t, off, len))
        return;
    if (cut_begin(&c, off, len, &ignored) < 0)
        return;
    cut_drop_unplaced(&c, off, len);
    if (!cut_is_small(&c) || cut_next(&c, &ignored) != 1 ||
        cut_runs(&c, off, len, &ignored) < 0)
        return;
    sources = (struct fetch_sources){.src = c.src, .count = c.count};
    fetch_will_need(&c.runs, &sources);
}
