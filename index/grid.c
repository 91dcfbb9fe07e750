/* SPDX-License-Identifier: MIT */
/* index/grid.c - follows the boxes of a grid, whose cuts it learns from the first ones. */
#include "index/grid.h"

#include <errno.h>
#include <stdlib.h>

#include "base/vec.h"

/* Where a dimension is cut: the ends of its parts, as far as they were met. */
struct cuts {
    uint64_t *end;
    size_t n, cap;
};

struct grid {
    const struct shape *units;
    bool whole, broken;
    uint64_t at[SHAPE_MAX_DIMS]; /* where the next box has to start */
    size_t part[SHAPE_MAX_DIMS]; /* in which part of each dimension; of the first: 0 */
    struct cuts cuts[SHAPE_MAX_DIMS];
};

struct grid *grid_new(const struct shape *units)
{
    struct grid *g = calloc(1, sizeof *g);

    if (g)
        g->units = units;
    return g;
}

void grid_free(struct grid *g)
{
    for (uint32_t k = 0; g && k < g->units->nd; k++)
        free(g->cuts[k].end);
    free(g);
}

void grid_freep(struct grid **g)
{
    grid_free(*g);
    *g = NULL;
}

/*
 * The part that ends there is the one that the dimension has, or a new one behind all.
 */
static int end_part(struct grid *g, uint32_t k, uint64_t end)
{
    struct cuts *c = &g->cuts[k];

    if (g->part[k] < c->n)
        return c->end[g->part[k]] == end;
    if (!VEC_ROOM(c->end, c->n, c->cap))
        return -ENOMEM;
    c->end[c->n++] = end;
    return 1;
}

/* Goes on to the next box: the innermost dimension that does not end there moves. */
static void advance(struct grid *g)
{
    for (uint32_t k = g->units->nd; k-- > 0;) {
        g->at[k] = g->cuts[k].end[g->part[k]];
        if (k == 0)
            g->cuts[0].n = 0; /* each part of the first dimension is met once */
        if (g->at[k] < g->units->dim[k]) {
            g->part[k] += k > 0;
            return;
        }
        if (k > 0) {
            g->at[k] = 0;
            g->part[k] = 0;
        }
    }
    g->whole = true;
}

int grid_add(struct grid *g, const uint64_t *start, const uint64_t *size)
{
    int ret = !g->whole && !g->broken;

    for (uint32_t k = 0; ret == 1 && k < g->units->nd; k++) {
        if (start[k] != g->at[k] || size[k] == 0 ||
            size[k] > g->units->dim[k] - start[k])
            ret = 0;
        else
            ret = end_part(g, k, start[k] + size[k]);
    }
    if (ret == 1)
        advance(g);
    else
        g->broken = true;
    return ret;
}

bool grid_is_whole(const struct grid *g)
{
    return g->whole && !g->broken;
}
