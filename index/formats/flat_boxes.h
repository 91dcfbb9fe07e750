/* SPDX-License-Identifier: MIT */
/* index/formats/flat_boxes.h - a range of a block's flat elements as boxes of the block. */
#ifndef UFS_INDEX_FORMATS_FLAT_BOXES_H
#define UFS_INDEX_FORMATS_FLAT_BOXES_H

#include "base/base.h"
#include "index/shape.h"

/*
 * Optimizers cut tensors into ranges of their row-major elements, at any element. Such a
 * range of a tensor of n dimensions is at most 2n - 1 boxes: the rest of a row, the rest
 * of a plane, ..., whole planes, ..., the beginning of a row.
 */
struct flat_boxes {
    const struct shape *block;
    uint64_t stride[SHAPE_MAX_DIMS]; /* elements, row-major */
    uint64_t begin, at, end;         /* elements of the block */
};

struct flat_box {
    uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS]; /* in the block */
    uint64_t first; /* its first element, counted from the range's beginning */
};

/*
 * The boxes of elements [begin, end) of a block, which is borrowed; false when the range
 * is not within it (or it has more than 2^63 elements).
 */
bool flat_boxes_begin(struct flat_boxes *f, const struct shape *block, uint64_t begin,
                      uint64_t end);

/* The next box, in the range's order and never empty; false at the end. */
bool flat_boxes_next(struct flat_boxes *f, struct flat_box *out);

#endif
