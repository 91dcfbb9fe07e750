/* SPDX-License-Identifier: MIT */
/* index/map/shares.h - which elements of an axis go where, by groups and blocks. */
#ifndef UFS_INDEX_MAP_SHARES_H
#define UFS_INDEX_MAP_SHARES_H

#include "index/map/boxes.h"

/* Pieces in a list that grows; malloc. */
struct piece_list {
    struct axis_piece *at;
    size_t n, cap;
};

void piece_list_release(struct piece_list *l);

/*
 * An axis in `groups` groups of `group` elements each, of which every group has a part of
 * `rows` elements from element `at` on (q, k and v of each group of heads).
 */
struct share {
    uint64_t groups, group, at, rows;
};

/* Takes the part out of all groups: its rows come to lie back to back. */
int shares_take(const struct share *s, struct piece_list *out, struct err *e);

/* The mirror: rows that lie back to back go to their places in the groups. */
int shares_put(const struct share *s, struct piece_list *out, struct err *e);

/*
 * An axis of `dim` elements in `groups` groups, each of blocks of two kinds. Deinterleave:
 * blocks a0 b0 a1 b1 ... become a0 a1 ... b0 b1 ...; interleave is the mirror. -EINVAL
 * where the numbers do not divide.
 */
struct interleave {
    uint64_t dim, groups, block;
    bool undo; /* deinterleave */
};
int shares_interleave(const struct interleave *i, struct piece_list *out,
                      struct err *e);

#endif
