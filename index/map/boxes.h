/* SPDX-License-Identifier: MIT */
/* index/map/boxes.h - the boxes of a tensor, rearranged without touching a byte. */
#ifndef UFS_INDEX_MAP_BOXES_H
#define UFS_INDEX_MAP_BOXES_H

#include "base/base.h"
#include "index/chunk.h"
#include "index/shape.h"

struct arena;
struct err;

/*
 * A tensor in the making: its shape in units (elements of whole-byte types) and the boxes
 * that cover it. A rearrangement changes where boxes lie in the tensor and how they step
 * through their pieces, so that what comes out is a plan as before. All is in the arena,
 * also what has become useless.
 */
struct boxes {
    struct arena *arena;
    struct shape shape;
    struct chunk *chunk;
    size_t n, cap;
};

/* Unpacks chunks of the index (chunks_pack) of a tensor of this shape, steps spelt out. */
int boxes_load(struct arena *a, const struct shape *units, const void *packed,
               size_t len, struct boxes *out, struct err *e);

/* Elements from, from + step, ... (count of them) of an axis go to to, to + 1, ... */
struct axis_piece {
    uint64_t from, step, count, to;
};

/*
 * The axis gets `dim` elements, which come from where the pieces say; what no piece names
 * is left out. Pieces are sorted by `from` and lie within the axis. -E2BIG: more boxes
 * than a tensor can have.
 */
int boxes_select(struct boxes *b, uint32_t axis, const struct axis_piece *piece,
                 size_t n, uint64_t dim, struct err *e);

/* Takes out an axis that has one element. */
void boxes_drop_axis(struct boxes *b, uint32_t axis);

/* Puts in an axis of one element. -E2BIG: too many dimensions. */
int boxes_insert_axis(struct boxes *b, uint32_t axis, struct err *e);

/* New axis k is the old axis order[k]; `order` is a permutation. */
void boxes_permute(struct boxes *b, const uint32_t *order);

/* The boxes of `more`, which covers its part of the same shape, as further ones of b. */
int boxes_append(struct boxes *b, const struct boxes *more, struct err *e);

#endif
