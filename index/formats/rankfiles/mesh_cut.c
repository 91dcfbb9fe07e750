/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/mesh_cut.c - which box of a tensor a rank of a device mesh holds. */
#include "index/formats/rankfiles/mesh_cut.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"

/*
 * Where axis `a` belongs among those to its right: behind axes of its dimension whose
 * sizes multiply to its split factor; n + 1 when there is no such place.
 */
static uint32_t place_of(const struct mesh_axis *axis, uint32_t a,
                         const uint32_t *order, uint32_t n)
{
    uint64_t wanted = axis[a].cut == MESH_STRIDED ? axis[a].split : 1, before = 1;

    for (uint32_t i = 0;; i++) {
        if (before == wanted)
            return i;
        if (i == n)
            return n + 1;
        if (axis[order[i]].dim == axis[a].dim &&
            mul_overflows(before, axis[order[i]].size, &before))
            return n + 1;
    }
}

int mesh_cut_order(const struct mesh_axis *axis, uint32_t naxes,
                   uint32_t order[MESH_MAX_AXES], uint32_t *n, struct err *e)
{
    *n = 0;
    if (naxes > MESH_MAX_AXES)
        return err_set(e, ENOTSUP, "a mesh of %" PRIu32 " axes", naxes);
    for (uint32_t a = naxes; a-- > 0;) {
        uint32_t at;

        if (axis[a].cut == MESH_REPLICATE)
            continue;
        at = place_of(axis, a, order, *n);
        if (at > *n)
            return err_set(e, ENOTSUP,
                           "a strided shard of split factor %" PRIu64
                           " on axis %" PRIu32
                           ", which is no product of the axes that it came after",
                           axis[a].split, a);
        memmove(order + at + 1, order + at, (*n - at) * sizeof *order);
        order[at] = a;
        ++*n;
    }
    return 0;
}

/* Rows [*start, *start + *size) become the axis's piece of them. */
static void cut(const struct mesh_axis *x, uint64_t *start, uint64_t *size)
{
    uint64_t rows = *size, piece = rows / x->size + (rows % x->size != 0), low;

    if (mul_overflows(piece, x->at, &low) || low > rows)
        low = rows;
    *start += low;
    *size = MIN(piece, rows - low);
}

int mesh_cut_box(const struct shape *whole, const struct mesh_axis *axis,
                 const uint32_t *order, uint32_t n, uint64_t *start, uint64_t *size,
                 struct err *e)
{
    memset(start, 0, whole->nd * sizeof *start);
    memcpy(size, whole->dim, whole->nd * sizeof *size);
    for (uint32_t i = 0; i < n; i++) {
        const struct mesh_axis *x = &axis[order[i]];

        if (x->at >= x->size)
            return err_set(e, EBADMSG,
                           "coordinate %" PRIu64 " on axis %" PRIu32
                           " of the mesh, which has %" PRIu64 " ranks",
                           x->at, order[i], x->size);
        if (x->dim >= whole->nd)
            return err_set(e, EBADMSG,
                           "it is cut along dimension %" PRIu32 " of %" PRIu32, x->dim,
                           whole->nd);
        cut(x, &start[x->dim], &size[x->dim]);
    }
    return 0;
}
