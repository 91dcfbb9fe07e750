/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/dist_tensor.h - a DTensor or ShardedTensor in one rank's pickle. */
#ifndef UFS_INDEX_FORMATS_RANKFILES_DIST_TENSOR_H
#define UFS_INDEX_FORMATS_RANKFILES_DIST_TENSOR_H

#include "base/base.h"
#include "index/formats/rankfiles/mesh_cut.h"
#include "index/formats/torch/torch_zip.h"
#include "index/shape.h"

struct err;

enum { DIST_MAX_NAME = 32 };

/* The mesh of a DTensor, for people to read. */
struct dist_mesh {
    uint32_t naxes; /* 0: a ShardedTensor has none */
    uint64_t size[MESH_MAX_AXES];
    char name[MESH_MAX_AXES][DIST_MAX_NAME]; /* "" where the axis has none */
};

/* What the rank tells of the full tensor, as far as that was read. */
struct dist_tensor {
    enum dtype dtype; /* DTYPE_NONE: nothing was read */
    struct shape shape;
    struct dist_mesh mesh;
};

/*
 * A piece that this rank holds: all of `x` is the box that starts at start[0..nd), in
 * units (shape_units()). Both hold until it returns.
 */
typedef int dist_piece_fn(void *user, const struct torch_tensor *x,
                          const uint64_t *start, struct err *e);

/* A tuple, list or torch.Size of integers >= 0, at most `max` of them. */
bool dist_numbers(const struct pv *v, uint64_t *out, uint32_t max, uint32_t *n);

/* Is it one of them, by its class? Its numbers may be bad nevertheless. */
bool dist_tensor_is(const struct pv *v);

/*
 * 1: it is one, and fn was called for each piece that has its place: none for a rank that
 * is not of the mesh, one for a DTensor (also where it is empty), any number for a
 * ShardedTensor. 0: it is none. -EBADMSG when what it tells contradicts itself, -ENOTSUP
 * for placements that no cut of the tensor describes (partial sums), or what fn returned.
 *
 * Pickles of torch 2.2 to 2.15 are known: classes by the last part of their names below
 * torch.distributed, which moved; a mesh as a tensor of ranks, or since 2.9 as a layout.
 */
int dist_tensor_read(struct torch_zip *zip, const struct pv *v, struct dist_tensor *out,
                     dist_piece_fn *fn, void *user, struct err *e);

#endif
