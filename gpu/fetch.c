/* SPDX-License-Identifier: MIT */
/* gpu/fetch.c - from runs of a plan to bytes in memory. */
#include "gpu/fetch.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/guard.h"
#include "base/pool.h"
#include "base/vec.h"
#include "gpu/assemble.h"
#include "index/spans.h"
#include "remote/source.h"

enum {
    /* Two runs with less between them are one read: a disk's request costs more. */
    SPAN_GAP = 16 << 10,
    /* Longer spans are cut, so that the pool reads them side by side. */
    SPAN_MAX = 1 << 20,
    /* From this length on a cold run is read straight into the window. */
    DIRECT_MIN = 64 << 10,
    /*
     * A window of a tensor that is stored transposed may need all of a shard: more than
     * this is not read into memory of ours, the kernel reads it as the mapping is touched.
     */
    COLD_MAX = 64 << 20,
    /* From this length on rows are read to their places; shorter ones in one piece first. */
    ROW_MIN = 4 << 10,
};

/* The bytes of one span, mapped or read. */
struct bytes {
    unsigned char *at;    /* of the span's first byte; NULL: not here yet */
    unsigned char *owned; /* to free */

    /* Runs that lie in it one behind the other, from its first byte on. */
    size_t first_run, runs, rows;
    uint64_t covered; /* bytes of theirs */
    bool mixed;       /* others want bytes of it as well, or in another order */
    bool in_rows;     /* the runs are all of it, and read to their places */
};

struct fetch {
    const struct run_list *runs;
    const struct fetch_sources *sources;
    struct span_list spans;
    struct bytes *bytes; /* one a span */
    size_t *cold;        /* numbers of spans to read */
    size_t ncold;
    struct assemble_run *run;
    size_t nrun, cap;
    void *window;
    size_t size;
};

static void fetch_release(struct fetch *f)
{
    for (size_t i = 0; f->bytes && i < f->spans.count; i++)
        free(f->bytes[i].owned);
    free(f->bytes);
    free(f->cold);
    free(f->run);
    span_list_release(&f->spans);
}

/* `cold`: also when the bytes are not in memory now. */
static bool span_mapped(const struct fetch_sources *sources, const struct span *s,
                        bool cold, unsigned char **at)
{
    struct source *src = sources->src[s->tag];
    bool read = sources->once && src->file_mapped && !cold;
    const unsigned char *map = read ? NULL : source_map(src);

    if (!map || (!cold && !source_resident(src, s->off, (size_t)s->len)))
        return false;
    /* Assemblers take pieces that scatter may write; gather only reads them. */
    *at = (unsigned char *)(uintptr_t)(map + s->off);
    return true;
}

static int place_spans(struct fetch *f, struct err *e)
{
    uint64_t total = 0;
    bool guarded = guard_installed();

    f->bytes = calloc(f->spans.count + 1, sizeof *f->bytes);
    f->cold = calloc(f->spans.count + 1, sizeof *f->cold);
    if (!f->bytes || !f->cold)
        return err_nomem(e);
    for (size_t i = 0; i < f->spans.count; i++)
        total += f->spans.span[i].len; /* no two overlap: within the sources' sizes */
    for (size_t i = 0; i < f->spans.count; i++)
        if (!guarded || !span_mapped(f->sources, &f->spans.span[i], total > COLD_MAX,
                                     &f->bytes[i].at))
            f->cold[f->ncold++] = i;
    return 0;
}

/* Who reads each byte once reads several windows at a time: side by side already. */
static struct pool *pool_for(const struct fetch *f, struct pool *pool)
{
    bool once = f->sources->once;

    for (size_t n = 0; once && n < f->ncold; n++)
        once = f->sources->src[f->spans.span[f->cold[n]].tag]->file_mapped;
    return once || f->ncold < 2 ? NULL : pool;
}

/*
 * Spans of remote sources are asked for all at once: on the pool each thread would wait
 * for the server in turn.
 */
static void begin_cold(const struct fetch *f)
{
    for (size_t n = 0; f->ncold > 1 && n < f->ncold; n++) {
        const struct span *s = &f->spans.span[f->cold[n]];
        struct source *src = f->sources->src[s->tag];

        if (src->remote)
            source_will_need(src, s->off, s->len);
    }
}

/* Each row of the span's runs goes to its place. */
static int read_rows(const struct fetch *f, size_t span, struct err *e)
{
    const struct span *s = &f->spans.span[span];
    const struct bytes *b = &f->bytes[span];
    CLEANUP_FREE struct source_range *row = calloc(b->rows, sizeof *row);
    uint64_t off = s->off;
    size_t n = 0;

    if (!row)
        return err_nomem(e);
    for (size_t i = b->first_run; i < b->first_run + b->runs; i++) {
        const struct plan_run *r = &f->runs->run[i];

        for (uint64_t k = 0; k < r->count; k++, off += r->len)
            row[n++] = (struct source_range){off, (size_t)r->len,
                                             (unsigned char *)f->window + r->dst +
                                                 k * r->dst_step};
    }
    return source_read_many(f->sources->src[s->tag], row, n, e);
}

static int read_span(void *user, size_t n, struct err *e)
{
    struct fetch *f = user;
    size_t i = f->cold[n];
    const struct span *s = &f->spans.span[i];
    struct bytes *b = &f->bytes[i];

    if (b->in_rows)
        return read_rows(f, i, e);
    if (b->at) /* read straight into the window */
        return source_read(f->sources->src[s->tag], s->off, (size_t)s->len, b->at, e);
    b->owned = malloc((size_t)s->len);
    if (!b->owned)
        return err_nomem(e);
    b->at = b->owned;
    return source_read(f->sources->src[s->tag], s->off, (size_t)s->len, b->at, e);
}

/*
 * A cold span that is one long plain run needs no copy: its bytes go to their place.
 * Then the run is done when the span is read, and is left out of the assembly.
 */
static bool read_in_place(struct fetch *f, const struct plan_run *r)
{
    size_t first, last;
    uint64_t at = 0;

    if (r->count != 1 || r->flags || r->len < DIRECT_MIN)
        return false;
    first = spans_find(&f->spans, r->tag, r->src);
    last = spans_find(&f->spans, r->tag, r->src + r->len - 1);
    if (f->spans.span[first].off != r->src ||
        f->spans.span[last].off + f->spans.span[last].len != r->src + r->len)
        return false;
    for (size_t i = first; i <= last; i++)
        if (f->bytes[i].at)
            return false; /* mapped, or another run's already */
    for (size_t i = first; i <= last; at += f->spans.span[i++].len)
        f->bytes[i].at = (unsigned char *)f->window + r->dst + at;
    return true;
}

static int add_run(struct fetch *f, const struct assemble_run *r, struct err *e)
{
    if (!VEC_ROOM(f->run, f->nrun, f->cap))
        return err_nomem(e);
    f->run[f->nrun++] = *r;
    return 0;
}

/* One copy of `len` bytes whose source may lie in several neighbouring spans. */
static int add_copy(struct fetch *f, const struct plan_run *r, uint64_t src,
                    uint64_t dst, uint64_t len, struct err *e)
{
    while (len) {
        size_t i = spans_find(&f->spans, r->tag, src);
        const struct span *s = &f->spans.span[i];
        uint64_t part = MIN(len, s->off + s->len - src);

        TRY(add_run(f,
                    &(struct assemble_run){.piece = f->bytes[i].at + (src - s->off),
                                           .at = dst,
                                           .len = part,
                                           .count = 1,
                                           .flags = r->flags,
                                           .component = r->component},
                    e));
        src += part;
        dst += part;
        len -= part;
    }
    return 0;
}

/* Lowest and one past the highest source byte of a run. */
static void run_extent(const struct plan_run *r, uint64_t *lo, uint64_t *hi)
{
    int64_t reach = (int64_t)(r->count - 1) * r->src_step;

    *lo = reach < 0 ? r->src - (uint64_t)-reach : r->src;
    *hi = (reach > 0 ? r->src + (uint64_t)reach : r->src) + r->len;
}

static int add_plan_run(struct fetch *f, const struct plan_run *r, struct err *e)
{
    uint64_t lo, hi;
    size_t i;

    run_extent(r, &lo, &hi);
    i = spans_find(&f->spans, r->tag, lo);
    if (hi <= f->spans.span[i].off + f->spans.span[i].len)
        return add_run(f,
                       &(struct assemble_run){.piece = f->bytes[i].at +
                                                       (r->src - f->spans.span[i].off),
                                              .at = r->dst,
                                              .len = r->len,
                                              .count = r->count,
                                              .piece_step = r->src_step,
                                              .at_step = r->dst_step,
                                              .flags = r->flags,
                                              .component = r->component},
                       e);
    for (uint64_t k = 0; k < r->count; k++)
        TRY(add_copy(f, r, r->src + k * (uint64_t)r->src_step, r->dst + k * r->dst_step,
                     r->len, e));
    return 0;
}

/* Notes run i with each span that has bytes of it. */
static void note_rows(struct fetch *f, size_t i)
{
    const struct plan_run *r = &f->runs->run[i];
    bool plain = !r->flags && (r->count == 1 || r->src_step == (int64_t)r->len);
    size_t first, last;
    struct bytes *b;
    uint64_t lo, hi;

    run_extent(r, &lo, &hi);
    first = spans_find(&f->spans, r->tag, lo);
    last = spans_find(&f->spans, r->tag, hi - 1);
    b = &f->bytes[first];
    if (!b->runs)
        b->first_run = i;
    if (!plain || first != last || r->src != f->spans.span[first].off + b->covered ||
        i != b->first_run + b->runs)
        b->mixed = true;
    for (size_t n = first + 1; n <= last; n++)
        f->bytes[n].mixed = true;
    b->runs++;
    b->rows += r->count;
    b->covered += r->len * r->count; /* of a tensor: it does not pass 2^64 */
}

/*
 * Spans of local files that are nothing but rows of some length, one behind the other, need
 * no copy: their runs are done when they are read.
 */
static void read_in_rows(struct fetch *f, bool *done)
{
    for (size_t i = 0; i < f->runs->count; i++)
        if (!done[i])
            note_rows(f, i);
    for (size_t n = 0; n < f->spans.count; n++) {
        const struct span *s = &f->spans.span[n];
        struct bytes *b = &f->bytes[n];

        b->in_rows = !b->at && b->runs && !b->mixed && b->covered == s->len &&
                     f->sources->src[s->tag]->file_mapped &&
                     s->len / b->rows >= ROW_MIN;
        for (size_t i = 0; b->in_rows && i < b->runs; i++)
            done[b->first_run + i] = true;
    }
}

struct gather_call {
    struct fetch *f;
    struct err *e;
};

static int gather_runs(void *user)
{
    struct gather_call *c = user;

    return assembler_cpu.gather(&assembler_cpu, c->f->run, c->f->nrun, c->f->window,
                                c->f->size, c->e);
}

/* Work on components needs spans that do not cut them. */
static uint64_t span_max_for(const struct run_list *runs)
{
    for (size_t i = 0; i < runs->count; i++)
        if (runs->run[i].flags)
            return 0;
    return SPAN_MAX;
}

int fetch_window(const struct run_list *runs, const struct fetch_sources *sources,
                 struct pool *pool, void *window, size_t size, struct err *e)
{
    CLEANUP(fetch_release)
    struct fetch f = {.runs = runs, .sources = sources, .window = window, .size = size};
    CLEANUP_FREE bool *done = calloc(runs->count + 1, sizeof *done);
    int ret;

    if (!done)
        return err_nomem(e);
    ret =
        spans_cover(runs->run, runs->count, SPAN_GAP, span_max_for(runs), &f.spans, e);
    if (ret < 0 || (ret = place_spans(&f, e)) < 0)
        return ret;
    for (size_t i = 0; f.ncold && i < runs->count; i++)
        done[i] = read_in_place(&f, &runs->run[i]);
    if (f.ncold)
        read_in_rows(&f, done);
    begin_cold(&f);
    ret = pool_each(pool_for(&f, pool), f.ncold, read_span, &f, e);
    for (size_t i = 0; ret == 0 && i < runs->count; i++)
        if (!done[i])
            ret = add_plan_run(&f, &runs->run[i], e);
    if (ret < 0)
        return ret;
    ret = guard_run(gather_runs, &(struct gather_call){.f = &f, .e = e});
    if (ret == -EIO && e->code == 0)
        return err_set(e, EBADMSG, "a shard was cut short while it was read");
    return ret;
}

bool fetch_all_mapped(const struct run_list *runs, const struct fetch_sources *sources)
{
    CLEANUP(span_list_release) struct span_list spans = {0};
    struct err ignored = {0};
    unsigned char *at;

    if (spans_cover(runs->run, runs->count, SPAN_GAP, 0, &spans, &ignored) < 0)
        return false;
    for (size_t i = 0; i < spans.count; i++)
        if (!span_mapped(sources, &spans.span[i], false, &at))
            return false;
    return true;
}

void fetch_will_need(const struct run_list *runs, const struct fetch_sources *sources)
{
    CLEANUP(span_list_release) struct span_list spans = {0};
    struct err ignored = {0};

    if (spans_cover(runs->run, runs->count, SPAN_GAP, 0, &spans, &ignored) < 0)
        return;
    for (size_t i = 0; i < spans.count; i++) {
        const struct span *s = &spans.span[i];
        struct source *src = sources->src[s->tag];

        /* Asked for often and mostly there: of a file its end tells. A cache finds what
         * it has by itself. */
        if (src->remote || !source_resident(src, s->off + s->len - 1, 1))
            source_will_need(src, s->off, s->len);
    }
}
