/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_affine.c - AutoTP's affine maps as boxes. */
#include "index/formats/deepspeed/deepspeed_cut.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/deepspeed/deepspeed_scan.h"
#include "index/formats/torch/torch_walk.h"

/*
 * Source: DeepSpeed 0.19.8, checkpoint/affine.py. {"logical_shape": [...], "ranks": {RANK:
 * {"shard_shape": [...], "pieces": [{"shape", "source": [offset, strides], "dest": [offset,
 * strides], "locations": [ranks], "scale"}]}}}. Offsets and strides are elements; those of
 * all layouts that it makes are the rows of the whole and of the rank's piece, so that
 * pieces are boxes of both.
 */

enum { MAX_PIECES = 4096 /* of a rank; one a head at most */ };

static bool is_list(const struct pv *v)
{
    return v->kind == PV_LIST || v->kind == PV_TUPLE;
}

/* A list of sizes; elements of a shape are counted. */
static bool take_sizes(const struct pv *v, struct shape *out)
{
    struct err ignored = {0};
    uint64_t count;

    if (!is_list(v) || pv_count(v) > SHAPE_MAX_DIMS)
        return false;
    out->nd = (uint32_t)pv_count(v);
    for (uint32_t k = 0; k < out->nd; k++) {
        struct pv one = pv_at(v, k);

        if (!pv_u64(&one, &out->dim[k]))
            return false;
    }
    return shape_elements(out, &count, &ignored) == 0;
}

/* [offset, strides]: where a box of `size` begins in `shape`, whose rows it is of. */
static bool take_place(const struct pv *v, const struct shape *shape,
                       const struct shape *size, uint64_t *start)
{
    struct pv offset, list;
    uint64_t at, step = 1;

    if (!is_list(v) || pv_count(v) != 2 || size->nd != shape->nd)
        return false;
    offset = pv_at(v, 0);
    list = pv_at(v, 1);
    if (!pv_u64(&offset, &at) || !is_list(&list) || pv_count(&list) != shape->nd)
        return false;
    for (uint32_t k = shape->nd; k-- > 0;) {
        struct pv one = pv_at(&list, k);
        uint64_t stride;

        if (!pv_u64(&one, &stride) || (size->dim[k] > 1 && stride != step) ||
            shape->dim[k] == 0)
            return false;
        start[k] = at % shape->dim[k];
        at /= shape->dim[k];
        step *= shape->dim[k];
        if (range_outside(start[k], size->dim[k], shape->dim[k]))
            return false;
    }
    return at == 0;
}

/* The lowest rank that has the piece stands for all that do. */
static bool is_other_ranks(const struct pv *piece, uint32_t rank)
{
    struct pv list;
    uint64_t lowest = UINT64_MAX, n;

    if (!ds_get(piece, "locations", &list) || !is_list(&list))
        return false;
    for (size_t i = 0; i < pv_count(&list); i++) {
        struct pv one = pv_at(&list, i);

        if (pv_u64(&one, &n))
            lowest = MIN(lowest, n);
    }
    return lowest < rank;
}

static bool is_scaled(const struct pv *piece)
{
    struct pv scale;

    return ds_get(piece, "scale", &scale) &&
           !(scale.kind == PV_FLOAT && scale.f == 1.0) &&
           !(scale.kind == PV_INT && scale.i == 1);
}

static int take_piece(const struct pv *piece, uint32_t rank, struct ds_cut *out)
{
    uint64_t from[SHAPE_MAX_DIMS] = {0}, to[SHAPE_MAX_DIMS] = {0};
    struct shape size;
    struct pv v, source, dest;
    bool empty = false;

    if (!ds_get(piece, "shape", &v) || !take_sizes(&v, &size) ||
        !ds_get(piece, "source", &source) || !ds_get(piece, "dest", &dest))
        return ds_cut_refuse(out, "its affine map has a piece that is none");
    for (uint32_t k = 0; k < size.nd; k++)
        empty |= size.dim[k] == 0;
    if (empty || is_other_ranks(piece, rank))
        return 0;
    if (is_scaled(piece))
        return ds_cut_refuse(out, "its affine map has scaled pieces, which are not "
                                  "supported");
    if (!take_place(&source, &out->whole, &size, to) ||
        !take_place(&dest, &out->piece[rank], &size, from))
        return ds_cut_refuse(out, "its affine map has a piece that is no box of the "
                                  "tensor");
    ds_cut_box(&out->boxes[rank], from, to, size.dim);
    return 0;
}

static int take_rank(struct ds_notes *n, struct arena *a, const struct pv *entry,
                     const struct shape *local, uint32_t rank, struct ds_cut *out,
                     struct err *e)
{
    struct shape *piece = &out->piece[rank];
    struct err ignored = {0};
    struct pv v, pieces;
    uint64_t here, noted;

    if (!ds_get(entry, "shard_shape", &v) || !take_sizes(&v, piece) ||
        !ds_get(entry, "pieces", &pieces) || !is_list(&pieces))
        return ds_cut_refuse(out, "its affine map does not tell of rank %u", rank);
    if (shape_elements(piece, &noted, &ignored) < 0 ||
        shape_elements(local, &here, &ignored) < 0 || noted != here)
        return ds_cut_refuse(out,
                             "rank %u has another number of elements than its "
                             "affine map says",
                             rank);
    if (pv_count(&pieces) > MAX_PIECES)
        return ds_cut_refuse(out, "its affine map has %zu pieces", pv_count(&pieces));
    TRY(ds_cut_room(n, a, out->whole.nd, pv_count(&pieces), &out->boxes[rank], e));
    for (size_t i = 0; i < pv_count(&pieces) && !out->why[0]; i++) {
        struct pv one = pv_at(&pieces, i);

        take_piece(&one, rank, out);
    }
    return 0;
}

/* The entry of a rank: its key is a number. */
static bool rank_entry(const struct pv *ranks, uint32_t rank, struct pv *out)
{
    for (size_t i = 0; i < pv_count(ranks); i++) {
        struct pv key = pv_key_at(ranks, i);
        uint64_t n;

        if (!pv_u64(&key, &n) || n != rank)
            continue;
        *out = pv_value_at(ranks, i);
        return true;
    }
    return false;
}

int ds_cut_affine(struct ds_notes *n, struct arena *a, const struct pv *map,
                  struct shape *local, struct ds_cut *out, struct err *e)
{
    struct shape *piece = arena_array(a, n->ranks, sizeof *piece);
    struct pv v, ranks;

    if (!piece)
        return err_nomem(e);
    out->kind = DS_CUT_JOINED;
    out->piece = piece;
    if (!ds_get(map, "logical_shape", &v) || !take_sizes(&v, &out->whole) ||
        !ds_get(map, "ranks", &v) || !torch_mapping(&v, &ranks) ||
        ranks.kind != PV_DICT || pv_count(&ranks) != n->ranks)
        return ds_cut_refuse(out, "its affine map is not of %u ranks", n->ranks);
    for (uint32_t r = 0; r < n->ranks && !out->why[0]; r++) {
        struct pv entry;

        if (!rank_entry(&ranks, r, &entry))
            return ds_cut_refuse(out, "its affine map does not tell of rank %u", r);
        TRY(take_rank(n, a, &entry, &local[r], r, out, e));
    }
    return 0;
}
