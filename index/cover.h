/* SPDX-License-Identifier: MIT */
/* index/cover.h - do boxes cover a tensor exactly once? */
#ifndef UFS_INDEX_COVER_H
#define UFS_INDEX_COVER_H

#include "index/chunk.h"
#include "index/shape.h"

struct err;

/*
 * Checks that every element of the tensor (which has some) lies in exactly one of the n
 * boxes, which are within it and not empty. -EBADMSG names two boxes that overlap or
 * the first element that is in none. Boxes that straight cuts can separate cost n log n
 * a level of cuts; beyond a fixed budget of work the answer is -EBADMSG too ("too
 * irregular"): nothing that was not proved is served.
 */
int cover_check(const struct shape *units, const struct chunk *const *box, size_t n,
                struct err *e);

/* Appends "[0, 0]+[2, 3]": start and size of a box, for messages. */
int box_format(const struct chunk *c, uint32_t nd, struct buf *out);

#endif
