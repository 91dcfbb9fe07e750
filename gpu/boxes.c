/* SPDX-License-Identifier: MIT */
/* gpu/boxes.c - copies of a plan made boxes: dimensions, cuts, packed lines, tiles. */
#include "gpu/boxes.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"
#include "base/vec.h"
#include "gpu/cast.h"
#include "gpu/gather_priv.h"

_Static_assert(CORE_SWAP == CHUNK_SWAP && CORE_CONJ == CHUNK_CONJ &&
                   CORE_NEG == CHUNK_NEG,
               "flags are those of chunks");
_Static_assert(sizeof(struct core_box) % sizeof(uint64_t) == 0, "copied by words");

enum {
    /* A gap that is skipped however short the lines are: what a disk's request costs. */
    GAP_ALWAYS = 16 << 10,
    /* Shorter lines are not worth being packed. */
    LINE_MIN = 64,
    /* Lines that share what is between them with another box (GLU, QKV) stay as they are. */
    GAP_TIMES = 2,
    /* Cuts of a contiguous dimension keep vectors whole. */
    GRAIN = 256,
    DIRECT_MIN =
        64 << 10, /* below it a copy of its own costs more than a kernel's row */
};

void work_list_release(struct work_list *l)
{
    free(l->work);
    *l = (struct work_list){0};
}

static int work_push(struct work_list *l, const struct work *w, struct err *e)
{
    if (!VEC_ROOM(l->work, l->count, l->cap))
        return err_nomem(e);
    l->work[l->count++] = *w;
    return 0;
}

/* ---- lines ---- */

static uint64_t step_size(int64_t step)
{
    return step < 0 ? -(uint64_t)step : (uint64_t)step;
}

/* The dimension, of those not in `seen`, with the shortest step from element to element. */
static int next_dim(const struct core_box *b, uint32_t seen)
{
    int best = -1;

    for (uint32_t k = 0; k < b->nd; k++)
        if (!(seen >> k & 1) &&
            (best < 0 || step_size(b->src_step[k]) < step_size(b->src_step[best])))
            best = (int)k;
    return best;
}

static bool gap_is_long(uint64_t gap, uint64_t line)
{
    return gap >= GAP_ALWAYS || (line >= LINE_MIN && gap > GAP_TIMES * line);
}

struct box_lines box_lines_of(const struct core_box *b)
{
    uint32_t seen = 1u << (b->nd - 1);
    uint64_t below = 0; /* how far a line reaches below its first element */
    struct box_lines l = {
        .length = b->count[b->nd - 1] * (uint64_t)b->src_step[b->nd - 1], .count = 1};

    for (int k; (k = next_dim(b, seen)) >= 0; seen |= 1u << k) {
        uint64_t step = step_size(b->src_step[k]), n = b->count[k];

        if (l.sparse ||
            (n > 1 && step > l.length && gap_is_long(step - l.length, l.length))) {
            l.sparse |= 1u << k;
            l.count *= n;
            continue;
        }
        if (b->src_step[k] < 0)
            below += (n - 1) * step;
        l.length += (n - 1) * step;
    }
    l.first = b->src - below;
    return l;
}

uint64_t box_pitch(const struct box_lines *l)
{
    return (l->length + CORE_ALIGN - 1) / CORE_ALIGN * CORE_ALIGN;
}

uint64_t box_footprint(const struct box_lines *l)
{
    return l->count * box_pitch(l) + CORE_ALIGN;
}

uint64_t box_line(const struct core_box *b, const struct box_lines *l, uint64_t n)
{
    uint64_t at = l->first;

    for (uint32_t k = b->nd; k-- > 0;) {
        if (!(l->sparse >> k & 1))
            continue;
        at += n % b->count[k] * (uint64_t)b->src_step[k];
        n /= b->count[k];
    }
    return at;
}

void box_pack(struct core_box *b, const struct box_lines *l, uint64_t at)
{
    uint64_t step = box_pitch(l);

    b->src = at + (b->src - l->first);
    for (uint32_t k = b->nd; k-- > 0;) {
        if (!(l->sparse >> k & 1))
            continue;
        b->src_step[k] = (int64_t)step;
        step *= b->count[k];
    }
}

uint64_t box_direct(const struct core_box *b)
{
    uint64_t bytes = b->count[0];

    return b->nd == 1 && b->from == CAST_NONE && !b->flags && bytes >= DIRECT_MIN
               ? bytes
               : 0;
}

/* ---- cutting ---- */

/* How many steps of dimension k fit in the room; 0: no cut there helps. */
static uint64_t steps_that_fit(const struct core_box *b, const struct box_lines *l,
                               uint32_t k, uint64_t room)
{
    uint64_t step = step_size(b->src_step[k]), n;

    if (l->sparse >> k & 1) {
        n = (room - CORE_ALIGN) / (l->count / b->count[k] * box_pitch(l));
    } else {
        uint64_t rest = l->length - (b->count[k] - 1) * step + 2 * CORE_ALIGN;

        n = step == 0 ? 0 : room > rest ? (room - rest) / step + 1 : 1;
    }
    if (k + 1 == b->nd && n > GRAIN)
        n -= n % GRAIN;
    return MIN(MAX(n, (uint64_t)(step != 0)), b->count[k]);
}

/* Lines are cut from each other first, outermost first; then the one that reaches farthest. */
static uint32_t dim_to_cut(const struct core_box *b, const struct box_lines *l)
{
    uint32_t best = 0;
    uint64_t reach = 0;

    for (uint32_t k = 0; k < b->nd; k++) {
        uint64_t way = (b->count[k] - 1) * step_size(b->src_step[k]);

        if ((l->sparse >> k & 1) && b->count[k] > 1)
            return k;
        if (way > reach) {
            reach = way;
            best = k;
        }
    }
    return best;
}

/* Dimensions of one step say nothing; the last one stays, for it is contiguous. */
static void drop_dims_of_one(struct core_box *b)
{
    uint32_t nd = 0, last = b->nd - 1;

    for (uint32_t k = 0; k <= last; k++) {
        if (k < last && b->count[k] == 1)
            continue;
        b->count[nd] = b->count[k];
        b->src_step[nd] = b->src_step[k];
        b->dst_step[nd] = b->dst_step[k];
        nd++;
    }
    b->nd = nd;
}

/* Adds the box in pieces that fit. A cut leaves one rest for each dimension to do. */
static int push_cut(struct work_list *out, const struct work *w, uint64_t room,
                    struct err *e)
{
    struct work todo[2 * CORE_DIMS + 2] = {*w};
    size_t n = 1;

    while (n > 0) {
        struct work *at = &todo[n - 1];
        struct core_box *b = &at->box;
        struct box_lines l = box_lines_of(b);
        uint32_t k;
        uint64_t steps;
        int ret;

        if (box_footprint(&l) <= room) {
            drop_dims_of_one(b);
            ret = work_push(out, at, e);
            if (ret < 0)
                return ret;
            n--;
            continue;
        }
        k = dim_to_cut(b, &l);
        steps = steps_that_fit(b, &l, k, room);
        assert(steps > 0 && steps < b->count[k] && n < ARRAY_SIZE(todo));
        todo[n] = *at;
        todo[n].box.count[k] = steps;
        b->count[k] -= steps;
        b->src += steps * (uint64_t)b->src_step[k];
        b->dst += steps * b->dst_step[k];
        n++;
    }
    return 0;
}

/* ---- from the plan ---- */

/* Bytes of an element at the source, and of what becomes of it. */
static void element_sizes(const struct gather *g, const struct plan_op *op,
                          unsigned *from, unsigned *to)
{
    *from = *to = 1;
    if (gather_casts(g)) {
        *from = g->stored_unit;
        *to = g->unit;
    } else if (op->flags) {
        *from = *to = op->component;
    }
}

/* The box of the loops [first, nloops) and of the run. */
static struct core_box box_of(const struct gather *g, const struct plan_op *op,
                              uint32_t first)
{
    unsigned from, to;
    struct core_box b = {.nd = op->nloops - first + 1, .flags = op->flags};

    element_sizes(g, op, &from, &to);
    for (uint32_t k = 0; k + 1 < b.nd; k++) {
        const struct plan_loop *loop = &op->loop[first + k];

        b.count[k] = loop->count;
        b.src_step[k] = loop->src_step;
        b.dst_step[k] = loop->dst_step / from * to;
    }
    b.count[b.nd - 1] = op->run / from;
    b.src_step[b.nd - 1] = from;
    b.dst_step[b.nd - 1] = to;
    b.component = (uint8_t)from;
    if (gather_casts(g)) {
        b.from = (uint8_t)cast_kind_of(g->stored);
        b.to = (uint8_t)cast_kind_of(g->dtype);
    }
    b.src = op->src;
    b.dst = op->dst / from * to;
    return b;
}

/* The next of all steps of the loops [0, n); false: that was the last. */
static bool next_step(const struct plan_op *op, uint32_t n, uint64_t *index,
                      uint64_t *src, uint64_t *dst)
{
    for (uint32_t k = n; k-- > 0;) {
        const struct plan_loop *l = &op->loop[k];

        *src += (uint64_t)l->src_step;
        *dst += l->dst_step;
        if (++index[k] < l->count)
            return true;
        *src -= l->count * (uint64_t)l->src_step;
        *dst -= l->count * l->dst_step;
        index[k] = 0;
    }
    return false;
}

int work_add(struct work_list *l, const struct work_target *t, size_t i, uint64_t room,
             struct err *e)
{
    const struct gather *g = t->gather;
    const struct plan_op *op = &g->copy[i].op;
    uint32_t outer = op->nloops >= CORE_DIMS ? op->nloops + 1 - CORE_DIMS : 0;
    uint64_t index[SHAPE_MAX_DIMS] = {0}, src = 0, dst = 0;
    struct work base = {.box = box_of(g, op, outer), .source = g->copy[i].source};
    unsigned from, to;
    int ret;

    element_sizes(g, op, &from, &to);
    base.box.dst += t->address;
    base.box.result = t->address;
    base.box.scale = t->scale;
    do {
        struct work w = base;

        w.box.src += src;
        w.box.dst += dst / from * to;
        ret = push_cut(l, &w, room, e);
    } while (ret == 0 && next_step(op, outer, index, &src, &dst));
    return ret;
}

/* ---- tiles ---- */

/* The largest power of two, 16 at most, that divides all of it. */
static unsigned common_unit(uint64_t all)
{
    all |= CORE_ALIGN;
    return (unsigned)(all & -all);
}

static void choose_units(struct core_box *b)
{
    uint32_t last = b->nd - 1;
    uint64_t src = b->src, dst = b->dst;

    for (uint32_t k = 0; k < last; k++) {
        src |= (uint64_t)b->src_step[k];
        dst |= b->dst_step[k];
    }
    if (b->from == CAST_NONE && !b->flags) {
        b->src_unit = (uint8_t)common_unit(src | dst | b->count[last]);
        b->dst_unit = b->src_unit;
        b->run = b->count[last] / b->src_unit;
    } else {
        b->src_unit = (uint8_t)b->src_step[last];
        b->dst_unit = (uint8_t)b->dst_step[last];
        b->bytewise = (src & (b->src_unit - 1u)) || (dst & (b->dst_unit - 1u));
        b->run = b->count[last];
    }
}

void box_finish(struct core_box *b, uint64_t *tiles)
{
    uint64_t row;

    choose_units(b);
    b->rows = 1;
    for (uint32_t k = 0; k + 1 < b->nd; k++)
        b->rows *= b->count[k];
    row = b->run * b->dst_unit;
    b->first_tile = *tiles;
    b->tiles_per_row = b->rows_per_tile = 1;
    if (row > CORE_TILE_BYTES) {
        b->units_per_tile = CORE_TILE_BYTES / b->dst_unit;
        b->tiles_per_row = (uint32_t)((b->run - 1) / b->units_per_tile + 1);
        *tiles += b->rows * b->tiles_per_row;
    } else {
        b->rows_per_tile = (uint32_t)(CORE_TILE_BYTES / row);
        *tiles += (b->rows - 1) / b->rows_per_tile + 1;
    }
    b->lanes_log2 = 0;
    while (b->lanes_log2 < CORE_LANES_LOG2 && 1ull << b->lanes_log2 < b->run)
        b->lanes_log2++;
}
