/* SPDX-License-Identifier: MIT */
/* index/window.c - lowers chunks to loops of copies and cuts these to windows. */
#include "index/plan.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "remote/source.h"

/* Loops of an op while it is made, innermost first. */
struct lowering {
    uint64_t run;
    uint32_t n;
    struct plan_loop loop[SHAPE_MAX_DIMS];
};

/*
 * Does any byte of the box lie outside the source? Steps and offsets come from files, but
 * the sizes of a box multiply to less than 2^63: no sum here reaches 2^127.
 */
static bool place_outside(const struct chunk *c, uint32_t nd, unsigned unit,
                          const struct chunk_place *place)
{
    __int128 low = place->base, high = low + unit;

    for (uint32_t k = 0; k < nd; k++) {
        __int128 way = (__int128)(c->size[k] - 1) * place->step[k];

        if (way < 0)
            low += way;
        else
            high += way;
    }
    return place->base > INT64_MAX || low < 0 || high > place->src->size;
}

/* Puts a loop round what is there. */
static void add_loop(struct lowering *w, uint64_t count, int64_t src_step,
                     uint64_t dst_step)
{
    struct plan_loop *inner = w->n ? &w->loop[w->n - 1] : NULL;

    if (!inner && dst_step == w->run && src_step >= 0 && (uint64_t)src_step == w->run) {
        w->run *= count;
    } else if (inner && dst_step == inner->count * inner->dst_step &&
               src_step == (__int128)inner->count * inner->src_step) {
        inner->count *= count;
    } else {
        w->loop[w->n++] = (struct plan_loop){count, src_step, dst_step};
    }
}

int plan_lower(const struct plan *p, const struct chunk *c,
               const struct chunk_place *place, unsigned component, struct arena *a,
               struct plan_op *out, struct err *e)
{
    const struct shape *units = plan_shape(p);
    uint64_t stride = plan_unit(p), dst = 0;
    struct lowering w = {.run = stride};
    struct plan_loop *loop;

    if (place_outside(c, units->nd, plan_unit(p), place))
        return err_set(e, EBADMSG,
                       "a chunk at byte %" PRIu64 " lies outside the file of %" PRIu64
                       " bytes",
                       place->base, place->src->size);
    for (uint32_t k = units->nd; k-- > 0; stride *= units->dim[k]) {
        dst += c->start[k] * stride;
        if (c->size[k] > 1)
            add_loop(&w, c->size[k], place->step[k], stride);
    }
    loop = arena_array(a, w.n ? w.n : 1, sizeof *loop);
    if (!loop)
        return err_nomem(e);
    for (uint32_t k = 0; k < w.n; k++)
        loop[k] = w.loop[w.n - 1 - k];
    *out = (struct plan_op){.src = place->base,
                            .dst = dst,
                            .run = w.run,
                            .nloops = w.n,
                            .flags = place->flags,
                            .component = (uint8_t)component,
                            .loop = loop};
    return 0;
}

void run_list_release(struct run_list *l)
{
    free(l->run);
    *l = (struct run_list){0};
}

/* Makes room for n more runs. */
static int run_list_grow(struct run_list *l, uint64_t n, struct err *e)
{
    size_t cap = l->cap ? l->cap : 16;
    uint64_t need;
    struct plan_run *run;

    if (n <= l->cap - l->count)
        return 0;
    if (add_overflows(l->count, n, &need) || need > SIZE_MAX / 2)
        return err_nomem(e);
    while (cap < need)
        cap *= 2;
    run = reallocarray(l->run, cap, sizeof *run);
    if (!run)
        return err_nomem(e);
    l->run = run;
    l->cap = cap;
    return 0;
}

/*
 * What is left to cut: the part of `op` inside its loops [0, level), for one step of each
 * of them, which starts at these bytes.
 */
struct part {
    uint64_t src, dst;
    uint32_t level;
};

struct cutter {
    const struct plan_op *op;
    uint64_t off, end; /* the window */
    uint32_t tag;
    struct run_list *out;
    uint64_t
        extent[SHAPE_MAX_DIMS + 1]; /* bytes from first to last of a part, by level */
};

/* The address of step i of a loop. Source steps may be negative: sums wrap. */
static struct part part_at(const struct part *p, const struct plan_loop *l, uint64_t i)
{
    return (struct part){p->src + i * (uint64_t)l->src_step, p->dst + i * l->dst_step,
                         p->level + 1};
}

/* A run that the window may cut at either end. */
static int emit_row(const struct cutter *t, const struct part *p, struct err *e)
{
    uint64_t from = MAX(p->dst, t->off), to = MIN(p->dst + t->op->run, t->end);

    if (run_list_grow(t->out, 1, e) < 0)
        return -ENOMEM;
    t->out->run[t->out->count++] = (struct plan_run){
        .src = p->src + (from - p->dst),
        .dst = from - t->off,
        .len = to - from,
        .count = 1,
        .tag = t->tag,
        .flags = t->op->flags,
        .component = t->op->component,
    };
    return 0;
}

/* The longest of the loops from p->level on, of which the first runs `count` times. */
static uint32_t longest_loop(const struct cutter *t, const struct part *p,
                             uint64_t count)
{
    uint32_t best = p->level;

    for (uint32_t k = p->level + 1; k < t->op->nloops; k++) {
        if (t->op->loop[k].count >= count) {
            count = t->op->loop[k].count;
            best = k;
        }
    }
    return best;
}

/*
 * `count` steps of loop p->level from p on, all of them whole. The longest loop becomes
 * the count of the runs, the others are unrolled: the fewest runs.
 */
static int emit_whole(const struct cutter *t, const struct part *p, uint64_t count,
                      struct err *e)
{
    uint32_t longest = longest_loop(t, p, count);
    uint64_t index[SHAPE_MAX_DIMS] = {0}, total = 1;
    const struct plan_loop *loop = t->op->loop;
    struct part at = *p;

    for (uint32_t k = p->level; k < t->op->nloops; k++) {
        if (k != longest &&
            mul_overflows(total, k == p->level ? count : loop[k].count, &total))
            return err_nomem(e);
    }
    if (run_list_grow(t->out, total, e) < 0)
        return -ENOMEM;
    for (; total; total--) {
        t->out->run[t->out->count++] = (struct plan_run){
            .src = at.src,
            .dst = at.dst - t->off,
            .len = t->op->run,
            .count = longest == p->level ? count : loop[longest].count,
            .src_step = loop[longest].src_step,
            .dst_step = loop[longest].dst_step,
            .tag = t->tag,
            .flags = t->op->flags,
            .component = t->op->component,
        };
        for (uint32_t k = t->op->nloops; k-- > p->level;) {
            uint64_t n = k == p->level ? count : loop[k].count;

            if (k == longest)
                continue;
            at.src += (uint64_t)loop[k].src_step;
            at.dst += loop[k].dst_step;
            if (++index[k] < n)
                break;
            at.src -= n * (uint64_t)loop[k].src_step;
            at.dst -= n * loop[k].dst_step;
            index[k] = 0;
        }
    }
    return 0;
}

/* Is all of the part within the window? */
static bool part_is_whole(const struct cutter *t, const struct part *p)
{
    return p->dst >= t->off && p->dst + t->extent[p->level] <= t->end;
}

/*
 * Emits the steps of loop p->level that are whole in the window, and puts the first and
 * the last into todo[0..return value) when the window cuts them.
 */
static int cut_loop(const struct cutter *t, const struct part *p, struct part *todo,
                    struct err *e)
{
    const struct plan_loop *l = &t->op->loop[p->level];
    uint64_t extent = t->extent[p->level + 1], first = 0, last;
    struct part at;
    int n = 0, ret;

    if (p->dst >= t->end || p->dst + t->extent[p->level] <= t->off)
        return 0;
    if (t->off >= p->dst + extent)
        first = (t->off - p->dst - extent) / l->dst_step + 1;
    last = MIN(l->count - 1, (t->end - 1 - p->dst) / l->dst_step);
    if (first <= last) {
        at = part_at(p, l, last);
        if (!part_is_whole(t, &at)) {
            todo[n++] = at;
            if (last-- == first)
                return n;
        }
    }
    if (first <= last) {
        at = part_at(p, l, first);
        if (!part_is_whole(t, &at)) {
            todo[n++] = at;
            first++;
        }
    }
    if (first > last)
        return n;
    at = part_at(p, l, first);
    at.level = p->level;
    ret = emit_whole(t, &at, last - first + 1, e);
    return ret < 0 ? ret : n;
}

int plan_op_cut(const struct plan_op *op, uint64_t off, uint64_t len, uint32_t tag,
                struct run_list *out, struct err *e)
{
    /*
     * A part is here because the window begins or ends within it, so there are never
     * more than two; cut_loop puts its two in the place of the one it took.
     */
    struct part todo[3] = {{.src = op->src, .dst = op->dst}};
    struct cutter t = {.op = op, .off = off, .tag = tag, .out = out};
    int n = 1;

    if (add_overflows(off, len, &t.end))
        t.end = UINT64_MAX;
    t.extent[op->nloops] = op->run;
    for (uint32_t k = op->nloops; k-- > 0;)
        t.extent[k] = t.extent[k + 1] + (op->loop[k].count - 1) * op->loop[k].dst_step;
    if (op->dst >= t.end || op->dst + t.extent[0] <= off || !len)
        return 0;
    while (n) {
        struct part p = todo[--n];
        int ret;

        if (p.level == op->nloops) {
            ret = emit_row(&t, &p, e);
        } else {
            ret = cut_loop(&t, &p, todo + n, e);
            n += MAX(ret, 0);
        }
        if (ret < 0)
            return ret;
    }
    return 0;
}

void plan_widen(const struct plan *p, uint64_t *off, uint64_t *len)
{
    uint64_t unit = plan_unit(p), end = *off + *len;

    if (!*len)
        return;
    *off -= *off % unit;
    end += (unit - end % unit) % unit;
    *len = end - *off;
}
