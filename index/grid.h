/* SPDX-License-Identifier: MIT */
/* index/grid.h - are boxes, one after the other, those of a grid? */
#ifndef UFS_INDEX_GRID_H
#define UFS_INDEX_GRID_H

#include "index/shape.h"

struct grid;

/*
 * A grid cuts each dimension at places of its own: its boxes hold every element once.
 * Begins with none of its boxes. The shape has a dimension and elements; it is
 * borrowed. NULL: out of memory.
 */
struct grid *grid_new(const struct shape *units);
void grid_free(struct grid *g); /* NULL is fine */
void grid_freep(struct grid **g);

/*
 * The next box in row-major order of the grid. 1; 0: it is none, nor is any behind it;
 * -ENOMEM. Memory is that of the cuts of all dimensions but the first.
 */
int grid_add(struct grid *g, const uint64_t *start, const uint64_t *size);

/* Were they all of the grid's boxes? */
bool grid_is_whole(const struct grid *g);

#endif
