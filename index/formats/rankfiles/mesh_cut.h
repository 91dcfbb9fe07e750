/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/mesh_cut.h - which box of a tensor a rank of a device mesh holds. */
#ifndef UFS_INDEX_FORMATS_RANKFILES_MESH_CUT_H
#define UFS_INDEX_FORMATS_RANKFILES_MESH_CUT_H

#include "base/base.h"
#include "index/shape.h"

struct err;

/* More axes than any mesh has: pipeline, replicas, FSDP, context, expert, tensor. */
enum { MESH_MAX_AXES = 16 };

/* What a placement does along one axis of the mesh. */
enum mesh_cut {
    MESH_REPLICATE, /* nothing: its ranks hold the same */
    MESH_SHARD,     /* Shard(dim) */
    MESH_STRIDED    /* _StridedShard(dim, split_factor): cut after axes to its right */
};

struct mesh_axis {
    uint64_t size; /* ranks along it */
    uint64_t at;   /* this rank's coordinate */
    enum mesh_cut cut;
    uint32_t dim;   /* of the tensor; not for MESH_REPLICATE */
    uint64_t split; /* MESH_STRIDED: its split_factor */
};

/*
 * The axes that cut, in the order in which they did, into order[*n]. An axis whose split
 * factor is P came after such axes to its right whose sizes multiply to P (PyTorch 2.15,
 * DTensorSpec: FSDP cuts what tensor parallelism has cut). -ENOTSUP when no order gives
 * these factors.
 */
int mesh_cut_order(const struct mesh_axis *axis, uint32_t naxes,
                   uint32_t order[MESH_MAX_AXES], uint32_t *n, struct err *e);

/*
 * Cuts `whole` by the axes order[0..n): each leaves the piece number `at` of ceil(rows /
 * size) rows, the last ones shorter or empty. start and size have whole->nd numbers.
 * -EBADMSG for a coordinate outside the mesh or a dimension that the tensor has not.
 */
int mesh_cut_box(const struct shape *whole, const struct mesh_axis *axis,
                 const uint32_t *order, uint32_t n, uint64_t *start, uint64_t *size,
                 struct err *e);

#endif
