/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/rank_boxes.c - which boxes of one rank's piece stand where in the whole. */
#include "index/formats/ranks/rank_boxes.h"

#include <assert.h>
#include <errno.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/flat_boxes.h"
#include "index/sink.h"

/* `count` boxes, all numbers zero; NULL: no memory. */
static uint64_t *new_boxes(struct arena *a, size_t count, uint32_t nd,
                           struct rank_boxes *out)
{
    struct rank_box *box = arena_array(a, count, sizeof *box);
    uint64_t *number = arena_array(a, count * 3 * (nd + 1), sizeof *number);

    if (!box || !number)
        return NULL;
    for (size_t i = 0; i < count; i++) {
        box[i].from = number + i * 3 * nd;
        box[i].to = box[i].from + nd;
        box[i].size = box[i].to + nd;
    }
    *out = (struct rank_boxes){.nd = nd, .count = count, .box = box};
    return number;
}

int rank_boxes_cut(struct arena *a, const struct rank_cut *cut,
                   const struct shape *piece, uint64_t before, uint64_t whole,
                   struct rank_boxes *out, struct err *e)
{
    uint32_t nd = piece->nd, axis = cut->axis, n = cut->blocks;
    uint64_t *number = new_boxes(a, n, nd, out);

    assert(axis < nd && n > 0);
    if (!number)
        return err_nomem(e);
    for (uint32_t i = 0; i < n; i++, number += 3 * (size_t)nd) {
        for (uint32_t k = 0; k < nd; k++)
            number[2 * (size_t)nd + k] = piece->dim[k];
        number[axis] = i * (piece->dim[axis] / n);
        number[nd + axis] = i * (whole / n) + before / n;
        number[2 * (size_t)nd + axis] = piece->dim[axis] / n;
    }
    return 0;
}

int rank_boxes_all(struct arena *a, const struct shape *piece, struct rank_boxes *out,
                   struct err *e)
{
    uint64_t *number = new_boxes(a, 1, piece->nd, out);

    if (!number)
        return err_nomem(e);
    for (uint32_t k = 0; k < piece->nd; k++)
        number[2 * (size_t)piece->nd + k] = piece->dim[k];
    return 0;
}

int rank_boxes_report(struct sink *sink, const struct rank_boxes *b,
                      const struct chunk *c, struct err *e)
{
    for (size_t i = 0; i < b->count; i++) {
        const struct rank_box *box = &b->box[i];
        struct chunk part = *c;

        part.start = box->to;
        part.size = box->size;
        for (uint32_t k = 0; k < b->nd; k++)
            part.first += box->from[k] * (uint64_t)c->step[k];
        TRY(sink_chunk(sink, &part, e));
    }
    return 0;
}

/* What box `b` of the piece and box `f` of its flat elements have in common. */
static bool meet(const struct rank_box *b, const struct flat_box *f, uint32_t nd,
                 uint64_t *start, uint64_t *size)
{
    for (uint32_t k = 0; k < nd; k++) {
        uint64_t end = MIN(b->from[k] + b->size[k], f->start[k] + f->size[k]);

        start[k] = MAX(b->from[k], f->start[k]);
        if (start[k] >= end)
            return false;
        size[k] = end - start[k];
    }
    return true;
}

static int report_meeting(struct sink *sink, const struct rank_boxes *b,
                          const struct flat_boxes *flat, const struct flat_box *f,
                          const struct chunk *c, struct err *e)
{
    for (size_t i = 0; i < b->count; i++) {
        uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS];
        int64_t step[SHAPE_MAX_DIMS];
        struct chunk part = *c;
        uint64_t first = f->first;

        if (!meet(&b->box[i], f, b->nd, start, size))
            continue;
        for (uint32_t k = 0; k < b->nd; k++) {
            first += (start[k] - f->start[k]) * flat->stride[k];
            step[k] = (int64_t)flat->stride[k] * c->step[0];
            start[k] += b->box[i].to[k] - b->box[i].from[k];
        }
        part.first += first * (uint64_t)c->step[0];
        part.start = start;
        part.size = size;
        part.step = step;
        TRY(sink_chunk(sink, &part, e));
    }
    return 0;
}

int rank_boxes_report_flat(struct sink *sink, const struct rank_boxes *b,
                           const struct shape *piece, uint64_t begin, uint64_t count,
                           const struct chunk *c, struct err *e)
{
    struct flat_boxes flat;
    struct flat_box f;

    if (count > UINT64_MAX - begin ||
        !flat_boxes_begin(&flat, piece, begin, begin + count))
        return err_set(e, EBADMSG,
                       "elements %" PRIu64 "+%" PRIu64 " are not within the piece",
                       begin, count);
    while (flat_boxes_next(&flat, &f))
        TRY(report_meeting(sink, b, &flat, &f, c, e));
    return 0;
}
