/* SPDX-License-Identifier: MIT */
/* gpu/assemble_cpu.c - runs a plan's copies on the calling thread: the reference. */
#include "gpu/assemble.h"

#include <errno.h>
#include <string.h>

#include "base/base.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/chunk.h"

enum {
    BATCH = 1024,        /* runs that are looked at together */
    LONG_ROW = 64 << 10, /* longer ones gain nothing from company */
    /*
     * Pieces of one comb, as column shards are: their rows are copied by turns, so that
     * the window is written in order and all pieces are read at once, which hides the
     * wait for memory. Measured with rows of 32 to 512 bytes: 1.2 to 1.5 times blocks of
     * 8 pieces, 1.5 to 1.8 times of 64; with rows of 8 half.
     */
    COMB = 256,
    COMB_ROW = 32,
    COMB_UNEVEN_ROW = 256, /* so long, memcpy need not know the length before */
    /*
     * Other short rows of several pieces meet in the cache lines of the window: all pieces
     * work on this much of it before any goes on, so that it is written nearly in order.
     * Measured with 8 column shards: 2 and 4 KiB are best, at 64 KiB and more rows of
     * 8 to 512 bytes have half the speed.
     */
    BLOCK = 4 << 10,
    /*
     * Pieces stored transposed: neighbouring runs read the same cache lines, which lie
     * far apart. Tiles of so many runs and copies keep them in the first-level cache.
     */
    TILE = 16,
    CACHE_LINE = 64,
};

/* Work on components: swapped first, then the signs flipped. */
struct change {
    bool swap;
    uint8_t component;
    uint64_t even, odd; /* xored to the components of even and odd number */
};

/* Rows from one side to the other. */
struct rows {
    unsigned char *to;
    const unsigned char *from;
    int64_t to_step, from_step;
    uint64_t len, count;
};

/* One call of gather or scatter. */
struct job {
    unsigned char *gather_to;
    const unsigned char *scatter_from; /* NULL: this is a gather */
};

/* `len` is a constant wherever this is called, so that memcpy becomes a few moves. */
static inline __attribute__((always_inline)) void copy_fixed(const struct rows *r,
                                                             size_t len)
{
    unsigned char *to = r->to;
    const unsigned char *from = r->from;

    for (uint64_t k = r->count; k; k--) {
        memcpy(to, from, len);
        to += r->to_step;
        from += r->from_step;
    }
}

static void copy_rows(const struct rows *r)
{
    switch (r->len) {
    case 1:
        copy_fixed(r, 1);
        return;
    case 2:
        copy_fixed(r, 2);
        return;
    case 4:
        copy_fixed(r, 4);
        return;
    case 8:
        copy_fixed(r, 8);
        return;
    case 16:
        copy_fixed(r, 16);
        return;
    case 32:
        copy_fixed(r, 32);
        return;
    case 64:
        copy_fixed(r, 64);
        return;
    case 128:
        copy_fixed(r, 128);
        return;
    default:
        copy_fixed(r, r->len);
    }
}

#define SAME(v) (v)

/*
 * change_N: n components of N bits, at any address. With one mask for all, the compiler
 * makes vectors of it.
 */
#define DEFINE_CHANGE(bits, swapped)                                                   \
    static inline __attribute__((always_inline)) void change_loop_##bits(              \
        unsigned char *to, const unsigned char *from, size_t n, bool swap, bool pairs, \
        const struct change *c)                                                        \
    {                                                                                  \
        const uint##bits##_t even = (uint##bits##_t)c->even,                           \
                             odd = (uint##bits##_t)c->odd;                             \
        uint##bits##_t v;                                                              \
                                                                                       \
        for (size_t i = 0; i < n; i++) {                                               \
            memcpy(&v, from + i * sizeof v, sizeof v);                                 \
            v = (uint##bits##_t)((swap ? swapped(v) : v) ^                             \
                                 (pairs && i % 2 ? odd : even));                       \
            memcpy(to + i * sizeof v, &v, sizeof v);                                   \
        }                                                                              \
    }                                                                                  \
    static void change_##bits(unsigned char *to, const unsigned char *from, size_t n,  \
                              const struct change *c)                                  \
    {                                                                                  \
        if (c->even != c->odd)                                                         \
            change_loop_##bits(to, from, n, c->swap, true, c);                         \
        else if (c->swap)                                                              \
            change_loop_##bits(to, from, n, true, false, c);                           \
        else                                                                           \
            change_loop_##bits(to, from, n, false, false, c);                          \
    }

DEFINE_CHANGE(8, SAME)
DEFINE_CHANGE(16, __builtin_bswap16)
DEFINE_CHANGE(32, __builtin_bswap32)
DEFINE_CHANGE(64, __builtin_bswap64)

static void change_rows(const struct rows *r, const struct change *c)
{
    unsigned char *to = r->to;
    const unsigned char *from = r->from;
    size_t n = r->len / c->component;

    for (uint64_t k = r->count; k; k--) {
        if (c->component == 1)
            change_8(to, from, n, c);
        else if (c->component == 2)
            change_16(to, from, n, c);
        else if (c->component == 4)
            change_32(to, from, n, c);
        else
            change_64(to, from, n, c);
        to += r->to_step;
        from += r->from_step;
    }
}

static uint64_t swap_component(uint64_t v, unsigned component)
{
    return __builtin_bswap64(v) >> (64 - 8 * component);
}

/*
 * Backward, the signs are flipped before the swap, which is the same as flipping the
 * swapped bits after it.
 */
static struct change change_of(const struct assemble_run *r, bool backward)
{
    uint64_t sign = (uint64_t)1 << (8 * r->component - 1);
    struct change c = {.swap = r->flags & CHUNK_SWAP, .component = r->component};

    if (r->flags & CHUNK_NEG)
        c.even = c.odd = sign;
    if (r->flags & CHUNK_CONJ)
        c.odd ^= sign;
    if (backward && c.swap) {
        c.even = swap_component(c.even, c.component);
        c.odd = swap_component(c.odd, c.component);
    }
    return c;
}

/* Where copies [first, first + count) of a run come from and go. */
static struct rows rows_of(const struct job *j, const struct assemble_run *r,
                           uint64_t first, uint64_t count)
{
    unsigned char *piece = r->piece + (int64_t)first * r->piece_step;
    uint64_t at = r->at + first * r->at_step;
    struct rows rows = {.len = r->len, .count = count};

    if (j->scatter_from) {
        rows.to = piece;
        rows.to_step = r->piece_step;
        rows.from = j->scatter_from + at;
        rows.from_step = (int64_t)r->at_step;
    } else {
        rows.to = j->gather_to + at;
        rows.to_step = (int64_t)r->at_step;
        rows.from = piece;
        rows.from_step = r->piece_step;
    }
    return rows;
}

/* Copies [first, first + count) of a run. */
static void run_copies(const struct job *j, const struct assemble_run *r,
                       uint64_t first, uint64_t count)
{
    struct rows rows = rows_of(j, r, first, count);

    if (rows.to_step == rows.from_step && r->at_step == r->len) {
        rows.len *= count;
        rows.count = 1;
    }
    if (r->flags) {
        struct change c = change_of(r, j->scatter_from != NULL);

        change_rows(&rows, &c);
    } else {
        copy_rows(&rows);
    }
}

/* Byte of the window behind the last one of a run. */
static uint64_t run_end(const struct assemble_run *r)
{
    return r->at + (r->count - 1) * r->at_step + r->len;
}

/* Short rows spread over more than a block? */
static bool run_is_wide(const struct assemble_run *r)
{
    return r->count > 1 && r->len < LONG_ROW && run_end(r) - r->at > BLOCK &&
           !(r->at_step == r->len && r->piece_step == (int64_t)r->len);
}

/* A wide run on its way through the blocks. */
struct cursor {
    const struct assemble_run *run;
    uint64_t done; /* copies */
    uint64_t next; /* byte of the window where the next one goes; UINT64_MAX: none */
};

struct batch {
    struct cursor cursor[BATCH];
    size_t n;
};

static int by_place(const void *a, const void *b)
{
    const struct cursor *x = a, *y = b;

    return x->run->at < y->run->at ? -1 : x->run->at > y->run->at;
}

/* The lowest byte that is still to do. Runs are sorted, those before `first` are done. */
static uint64_t batch_next(const struct batch *b, size_t first)
{
    uint64_t next = UINT64_MAX;

    for (size_t i = first; i < b->n && b->cursor[i].run->at < next; i++)
        next = MIN(next, b->cursor[i].next);
    return next;
}

/* `count` more copies are done. */
static void cursor_skip(struct cursor *c, uint64_t count)
{
    const struct assemble_run *r = c->run;

    c->done += count;
    c->next = c->done < r->count ? r->at + c->done * r->at_step : UINT64_MAX;
}

/* Does the copies of a run that start below `end`. */
static void cursor_advance(const struct job *j, struct cursor *c, uint64_t end)
{
    const struct assemble_run *r = c->run;
    uint64_t count = (end - 1 - c->next) / r->at_step + 1;

    count = MIN(count, r->count - c->done);
    run_copies(j, r, c->done, count);
    cursor_skip(c, count);
}

/* `len` is a constant as for copy_fixed, or 0: that of each. */
static inline __attribute__((always_inline)) void comb_fixed(struct rows *r, size_t n,
                                                             uint64_t count, size_t len)
{
    for (uint64_t k = count; k; k--) {
        for (size_t i = 0; i < n; i++) {
            memcpy(r[i].to, r[i].from, len ? len : r[i].len);
            r[i].to += r[i].to_step;
            r[i].from += r[i].from_step;
        }
    }
}

static void comb_rows(struct rows *r, size_t n, uint64_t count, size_t len)
{
    switch (len) {
    case 32:
        comb_fixed(r, n, count, 32);
        return;
    case 64:
        comb_fixed(r, n, count, 64);
        return;
    case 128:
        comb_fixed(r, n, count, 128);
        return;
    case 256:
        comb_fixed(r, n, count, 256);
        return;
    default:
        comb_fixed(r, n, count, 0);
    }
}

/* Are the runs, sorted by place, teeth of one comb? Each starts within the first's step. */
static bool is_comb(const struct batch *b)
{
    const struct assemble_run *first;

    if (b->n < 2 || b->n > COMB)
        return false;
    first = b->cursor[0].run;
    for (size_t i = 0; i < b->n; i++) {
        const struct assemble_run *r = b->cursor[i].run;

        if (r->flags || r->len < COMB_ROW || r->at_step != first->at_step ||
            r->at - first->at >= r->at_step ||
            (r->len != first->len && MIN(r->len, first->len) < COMB_UNEVEN_ROW))
            return false;
    }
    return true;
}

/* Does as many copies of each run of a comb as all have. */
static void comb_run(const struct job *j, struct batch *b)
{
    struct rows rows[COMB];
    size_t len = b->cursor[0].run->len;
    uint64_t count = UINT64_MAX;

    for (size_t i = 0; i < b->n; i++) {
        const struct assemble_run *r = b->cursor[i].run;

        rows[i] = rows_of(j, r, 0, r->count);
        count = MIN(count, r->count);
        if (r->len != len)
            len = 0;
    }
    comb_rows(rows, b->n, count, len);
    for (size_t i = 0; i < b->n; i++)
        cursor_skip(&b->cursor[i], count);
}

/* Does all runs of the batch, and empties it. */
static void batch_flush(const struct job *j, struct batch *b)
{
    qsort(b->cursor, b->n, sizeof b->cursor[0], by_place);
    if (is_comb(b))
        comb_run(j, b);
    for (size_t first = 0; first < b->n; first++) {
        while (b->cursor[first].next != UINT64_MAX) {
            uint64_t end = batch_next(b, first) + BLOCK;

            for (size_t i = first; i < b->n && b->cursor[i].run->at < end; i++) {
                if (b->cursor[i].next < end)
                    cursor_advance(j, &b->cursor[i], end);
            }
        }
    }
    b->n = 0;
}

static bool same_columns(const struct assemble_run *a, const struct assemble_run *b)
{
    ptrdiff_t apart = b->piece - a->piece;

    return a->len == b->len && a->count == b->count && a->piece_step == b->piece_step &&
           a->at_step == b->at_step && a->flags == b->flags &&
           a->component == b->component && apart > -CACHE_LINE && apart < CACHE_LINE;
}

/* How many of the n runs go together as columns of a transposed piece; 1: not so. */
static size_t count_columns(const struct assemble_run *run, size_t n)
{
    size_t m = 1;

    if (run->len >= CACHE_LINE || run->count < 2 ||
        (run->piece_step < CACHE_LINE && run->piece_step > -CACHE_LINE))
        return 1;
    while (m < n && m < TILE && same_columns(&run[m - 1], &run[m]))
        m++;
    return m;
}

static void run_columns(const struct job *j, const struct assemble_run *run, size_t n)
{
    for (uint64_t first = 0; first < run->count; first += TILE) {
        for (size_t i = 0; i < n; i++)
            run_copies(j, &run[i], first, MIN((uint64_t)TILE, run->count - first));
    }
}

static void run_all(const struct job *j, const struct assemble_run *run, size_t n)
{
    struct batch wide;
    size_t m;

    wide.n = 0;
    for (size_t i = 0; i < n; i += m) {
        m = 1;
        if (!run[i].len || !run[i].count)
            continue;
        m = count_columns(&run[i], n - i);
        if (m > 1) {
            run_columns(j, &run[i], m);
        } else if (run_is_wide(&run[i])) {
            wide.cursor[wide.n++] = (struct cursor){&run[i], 0, run[i].at};
            if (wide.n == BATCH)
                batch_flush(j, &wide);
        } else {
            run_copies(j, &run[i], 0, run[i].count);
        }
    }
    batch_flush(j, &wide);
}

static bool flags_are_bad(const struct assemble_run *r)
{
    uint64_t granule = r->component;

    if (!r->flags)
        return false;
    if (r->flags & ~(CHUNK_SWAP | CHUNK_CONJ | CHUNK_NEG))
        return true;
    if (granule != 1 && granule != 2 && granule != 4 && granule != 8)
        return true;
    return r->len % (r->flags & CHUNK_CONJ ? 2 * granule : granule) != 0;
}

/* A run must stay in the window, not meet itself there, and hold whole components. */
static int check_run(const struct assemble_run *r, uint64_t size, struct err *e)
{
    uint64_t last;

    if (flags_are_bad(r))
        return err_set(e, EINVAL,
                       "run of %" PRIu64 " bytes, flags %#x, components of %u bytes",
                       r->len, r->flags, r->component);
    if (!r->len || !r->count)
        return 0;
    if ((r->count > 1 && r->at_step < r->len) ||
        mul_overflows(r->count - 1, r->at_step, &last) ||
        add_overflows(last, r->at, &last) || range_outside(last, r->len, size))
        return err_set(e, EINVAL,
                       "run at %" PRIu64 ", %" PRIu64 " of %" PRIu64
                       " bytes every %" PRIu64 ", leaves the window of %" PRIu64
                       " bytes",
                       r->at, r->count, r->len, r->at_step, size);
    return 0;
}

static int check_runs(const struct assemble_run *run, size_t n, uint64_t size,
                      struct err *e)
{
    for (size_t i = 0; i < n; i++)
        TRY(check_run(&run[i], size, e));
    return 0;
}

static int cpu_gather(const struct assembler *a, const struct assemble_run *run,
                      size_t n, void *window, size_t size, struct err *e)
{
    const struct job j = {.gather_to = window};
    int ret = check_runs(run, n, size, e);

    (void)a;
    if (ret == 0)
        run_all(&j, run, n);
    return ret;
}

static int cpu_scatter(const struct assembler *a, const struct assemble_run *run,
                       size_t n, const void *window, size_t size, struct err *e)
{
    const struct job j = {.scatter_from = window};
    int ret = check_runs(run, n, size, e);

    (void)a;
    if (ret == 0)
        run_all(&j, run, n);
    return ret;
}

const struct assembler assembler_cpu = {
    .name = "cpu",
    .gather = cpu_gather,
    .scatter = cpu_scatter,
};
