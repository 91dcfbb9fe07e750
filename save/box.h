/* SPDX-License-Identifier: MIT */
/* save/box.h - what of a tensor's window belongs to a box of it. */
#ifndef UFS_SAVE_BOX_H
#define UFS_SAVE_BOX_H

#include "base/base.h"
#include "index/shape.h"

/*
 * A box of a tensor in units of `unit` bytes. In row-major order the box's elements have
 * rising places in the tensor, so that a window of the tensor always holds a consecutive
 * range of the box.
 */
struct box {
    const struct shape *units;
    unsigned unit;
    const uint64_t *start, *size;
};

/*
 * Bytes *at and following of the box, *len of them (0: none), are in the window
 * [off, off + window_len) of the tensor, both multiples of the unit.
 */
void box_overlap(const struct box *b, uint64_t off, uint64_t window_len, uint64_t *at,
                 uint64_t *len);

/*
 * Brings bytes [at, at + len) of the box, which the window holds, together: returns where
 * they are, in the window itself when they lie in one piece there, else in `scratch`
 * (len bytes).
 */
const void *box_take(const struct box *b, uint64_t off, const void *window, uint64_t at,
                     uint64_t len, void *scratch);

/*
 * The other way: puts bytes [at, at + len) of the box to where the window, which holds them, has
 * them.
 */
void box_spread(const struct box *b, uint64_t off, void *window, uint64_t at,
                uint64_t len, const void *bytes);

/* Bytes of the box that lie together in the tensor: a row, or several whole ones. */
uint64_t box_run(const struct box *b);

/* Where byte `at` of the box, which is not empty, stands in the tensor. */
uint64_t box_place(const struct box *b, uint64_t at);

/* First byte of the tensor that belongs to the box, and the one behind its last. */
void box_span(const struct box *b, uint64_t *first, uint64_t *end);

#endif
