/* SPDX-License-Identifier: MIT */
/* index/map/boxes.c - cuts, moves and turns boxes. */
#include "index/map/boxes.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"

enum { BOXES_MAX = 10000000 }; /* as many as a tensor may have in the index */

/* Room for one more; its numbers, three rows of `nd`, are zero. */
static int add_box(struct boxes *b, const struct chunk *like, uint32_t nd,
                   struct chunk **out, uint64_t **start, uint64_t **size,
                   int64_t **step, struct err *e)
{
    uint64_t *numbers;

    if (b->n == BOXES_MAX)
        return err_set(e, E2BIG, "more than %d boxes", BOXES_MAX);
    if (b->n == b->cap) {
        size_t cap = b->cap ? b->cap * 2 : 16;
        struct chunk *grown = arena_array(b->arena, cap, sizeof *grown);

        if (!grown)
            return err_nomem(e);
        if (b->n)
            memcpy(grown, b->chunk, b->n * sizeof *grown);
        b->chunk = grown;
        b->cap = cap;
    }
    numbers = arena_array(b->arena, 3 * (size_t)nd + 1, sizeof *numbers);
    if (!numbers)
        return err_nomem(e);
    *out = &b->chunk[b->n++];
    **out = *like;
    (*out)->start = *start = numbers;
    (*out)->size = *size = numbers + nd;
    *step = (int64_t *)(numbers + 2 * (size_t)nd);
    (*out)->step = *step;
    return 0;
}

/* A copy whose numbers are its own; steps of a box without any are row-major. */
static int add_copy(struct boxes *b, const struct chunk *c, struct err *e)
{
    uint32_t nd = b->shape.nd;
    uint64_t *start, *size, unit = 1;
    int64_t *step;
    struct chunk *out;
    int ret = add_box(b, c, nd, &out, &start, &size, &step, e);

    for (uint32_t k = nd; ret == 0 && k-- > 0;) {
        start[k] = c->start[k];
        size[k] = c->size[k];
        step[k] = c->step ? c->step[k] : (int64_t)unit;
        if (mul_overflows(unit, size[k], &unit) || unit > INT64_MAX)
            ret = err_set(e, EBADMSG, "a box of more than 2^63 elements");
    }
    return ret;
}

static bool is_empty(const struct chunk *c, uint32_t nd)
{
    for (uint32_t k = 0; k < nd; k++)
        if (c->size[k] == 0)
            return true;
    return false;
}

int boxes_load(struct arena *a, const struct shape *units, const void *packed,
               size_t len, struct boxes *out, struct err *e)
{
    const struct chunk *chunk;
    size_t n;
    int ret = chunks_unpack(a, packed, len, units->nd, &chunk, &n, e);

    *out = (struct boxes){.arena = a, .shape = *units};
    for (size_t i = 0; ret == 0 && i < n; i++) {
        struct chunk c = chunk[i];

        if (is_empty(&c, units->nd))
            continue;
        if (c.encoding != CHUNK_PLAIN && !c.step && !c.first) {
            c.whole = c.size; /* the box is its piece */
            c.whole_nd = units->nd;
        }
        ret = add_copy(out, &c, e);
    }
    return ret;
}

int boxes_append(struct boxes *b, const struct boxes *more, struct err *e)
{
    int ret = 0;

    assert(b->shape.nd == more->shape.nd);
    for (size_t i = 0; ret == 0 && i < more->n; i++)
        ret = add_copy(b, &more->chunk[i], e);
    return ret;
}

/* ---- a selection along one axis ---- */

static uint64_t last_of(const struct axis_piece *p)
{
    return p->from + (p->count - 1) * p->step;
}

/* What the piece takes of a box: indices first, first + 1, ... of the piece; 0: nothing. */
static uint64_t overlap(const struct axis_piece *p, uint64_t start, uint64_t size,
                        uint64_t *first)
{
    uint64_t last = start + size - 1, end;

    if (p->count == 0 || p->from > last || last_of(p) < start)
        return 0;
    *first = p->from >= start ? 0 : (start - p->from + p->step - 1) / p->step;
    end = last >= last_of(p) ? p->count - 1 : (last - p->from) / p->step;
    return end >= *first ? end - *first + 1 : 0;
}

/* The part of box c that the piece takes, as a box of its own. */
static int take_part(struct boxes *out, const struct chunk *c, uint32_t axis,
                     const struct axis_piece *p, struct err *e)
{
    uint32_t nd = out->shape.nd;
    uint64_t first, *start, *size,
        count = overlap(p, c->start[axis], c->size[axis], &first), skip;
    int64_t *step, moved;
    struct chunk *box;

    if (count == 0)
        return 0;
    TRY(add_box(out, c, nd, &box, &start, &size, &step, e));
    memcpy(start, c->start, nd * sizeof *start);
    memcpy(size, c->size, nd * sizeof *size);
    memcpy(step, c->step, nd * sizeof *step);
    skip = p->from + first * p->step - c->start[axis];
    start[axis] = p->to + first;
    size[axis] = count;
    /* Steps that lead out of the piece are found by the codec or the sink. */
    if (__builtin_mul_overflow((int64_t)skip, c->step[axis], &moved) ||
        __builtin_add_overflow(box->first, (uint64_t)moved, &box->first) !=
            (moved < 0) ||
        __builtin_mul_overflow(c->step[axis], (int64_t)p->step, &step[axis]))
        return err_set(e, EBADMSG, "a box that reaches past what is stored");
    return 0;
}

/* reach[i]: the last element that any of the pieces 0 to i takes. */
static uint64_t *piece_reach(const struct axis_piece *piece, size_t n)
{
    uint64_t *reach = calloc(n + 1, sizeof *reach), most = 0;

    for (size_t i = 0; reach && i < n; i++) {
        if (piece[i].count)
            most = MAX(most, last_of(&piece[i]));
        reach[i] = most;
    }
    return reach;
}

/* The first piece that may take something from `at` on. */
static size_t first_piece(const uint64_t *reach, size_t n, uint64_t at)
{
    size_t lo = 0, hi = n;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (reach[mid] < at)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

int boxes_select(struct boxes *b, uint32_t axis, const struct axis_piece *piece,
                 size_t n, uint64_t dim, struct err *e)
{
    CLEANUP_FREE uint64_t *reach = piece_reach(piece, n);
    struct boxes out = {.arena = b->arena, .shape = b->shape};
    int ret = reach ? 0 : err_nomem(e);

    for (size_t i = 0; ret == 0 && i < b->n; i++) {
        const struct chunk *c = &b->chunk[i];
        uint64_t end = c->start[axis] + c->size[axis];

        for (size_t k = first_piece(reach, n, c->start[axis]);
             ret == 0 && k < n && piece[k].from < end; k++)
            ret = take_part(&out, c, axis, &piece[k], e);
    }
    out.shape.dim[axis] = dim;
    *b = out;
    return ret;
}

/* ---- other arrangements ---- */

/* Numbers of boxes are in the arena, and theirs alone: boxes_load and all else copy. */
static uint64_t *own(const uint64_t *numbers)
{
    return (uint64_t *)(uintptr_t)numbers;
}

void boxes_drop_axis(struct boxes *b, uint32_t axis)
{
    size_t behind = b->shape.nd - axis - 1;

    assert(axis < b->shape.nd && b->shape.dim[axis] == 1);
    for (size_t i = 0; i < b->n; i++) {
        uint64_t *row[] = {own(b->chunk[i].start), own(b->chunk[i].size),
                           own((const uint64_t *)b->chunk[i].step)};

        for (size_t k = 0; k < ARRAY_SIZE(row); k++)
            memmove(row[k] + axis, row[k] + axis + 1, behind * sizeof **row);
    }
    memmove(b->shape.dim + axis, b->shape.dim + axis + 1,
            behind * sizeof *b->shape.dim);
    b->shape.nd--;
}

int boxes_insert_axis(struct boxes *b, uint32_t axis, struct err *e)
{
    struct boxes out = {.arena = b->arena, .shape = b->shape};
    uint32_t nd = b->shape.nd, behind = nd - axis;
    int ret = 0;

    if (nd == SHAPE_MAX_DIMS)
        return err_set(e, E2BIG, "more than %d dimensions", SHAPE_MAX_DIMS);
    for (size_t i = 0; ret == 0 && i < b->n; i++) {
        const struct chunk *c = &b->chunk[i];
        uint64_t *start, *size;
        int64_t *step;
        struct chunk *box;

        ret = add_box(&out, c, nd + 1, &box, &start, &size, &step, e);
        if (ret < 0)
            break;
        memcpy(start, c->start, axis * sizeof *start);
        memcpy(size, c->size, axis * sizeof *size);
        memcpy(step, c->step, axis * sizeof *step);
        size[axis] = 1;
        memcpy(start + axis + 1, c->start + axis, behind * sizeof *start);
        memcpy(size + axis + 1, c->size + axis, behind * sizeof *size);
        memcpy(step + axis + 1, c->step + axis, behind * sizeof *step);
    }
    memmove(out.shape.dim + axis + 1, out.shape.dim + axis,
            behind * sizeof *out.shape.dim);
    out.shape.dim[axis] = 1;
    out.shape.nd++;
    *b = out;
    return ret;
}

static void permute_row(uint64_t *row, const uint32_t *order, uint32_t nd)
{
    uint64_t old[SHAPE_MAX_DIMS];

    memcpy(old, row, nd * sizeof *old);
    for (uint32_t k = 0; k < nd; k++)
        row[k] = old[order[k]];
}

void boxes_permute(struct boxes *b, const uint32_t *order)
{
    uint32_t nd = b->shape.nd;

    for (size_t i = 0; i < b->n; i++) {
        permute_row(own(b->chunk[i].start), order, nd);
        permute_row(own(b->chunk[i].size), order, nd);
        permute_row(own((const uint64_t *)b->chunk[i].step), order, nd);
    }
    permute_row(b->shape.dim, order, nd);
}
