/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/rank_boxes.h - which boxes of one rank's piece stand where in the whole. */
#ifndef UFS_INDEX_FORMATS_RANKS_RANK_BOXES_H
#define UFS_INDEX_FORMATS_RANKS_RANK_BOXES_H

#include "index/chunk.h"

struct arena;
struct err;
struct sink;

/*
 * whole[to, to + size) = piece[from, from + size), for each box. Most pieces have one; a
 * rank's piece of fused rows (q, k and v; gate and up) has one for each part of them.
 */
struct rank_box {
    const uint64_t *from, *to, *size; /* nd of each, elements */
};

struct rank_boxes {
    uint32_t nd;
    size_t count;
    const struct rank_box *box;
};

/* How ranks have cut a tensor along one dimension. */
struct rank_cut {
    uint32_t axis;
    /*
     * Each piece is so many equal blocks along the axis, and the whole is the first blocks
     * of all ranks, then all second ones, ...; 1: pieces simply follow each other.
     */
    uint32_t blocks;
};

/*
 * The boxes of the piece of shape `piece` that has `before` elements along the axis in the
 * pieces of the ranks before it, of `whole` in all. All three are multiples of the
 * blocks. -ENOMEM.
 */
int rank_boxes_cut(struct arena *a, const struct rank_cut *cut,
                   const struct shape *piece, uint64_t before, uint64_t whole,
                   struct rank_boxes *out, struct err *e);

/* The piece is the whole. */
int rank_boxes_all(struct arena *a, const struct shape *piece, struct rank_boxes *out,
                   struct err *e);

/*
 * Reports the boxes of a piece as chunks of the tensor that was begun at the sink. `c` is
 * the whole piece: its file, bytes, first element and step (not NULL).
 */
int rank_boxes_report(struct sink *sink, const struct rank_boxes *b,
                      const struct chunk *c, struct err *e);

/*
 * The same where a file has only the row-major elements [begin, begin + count) of the
 * piece, one after the other: `c` with a step of one dimension. -EBADMSG when they are
 * not within the piece.
 */
int rank_boxes_report_flat(struct sink *sink, const struct rank_boxes *b,
                           const struct shape *piece, uint64_t begin, uint64_t count,
                           const struct chunk *c, struct err *e);

#endif
