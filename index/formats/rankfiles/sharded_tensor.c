/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/sharded_tensor.c - the boxes that a ShardedTensor's shards name. */
#include "index/formats/rankfiles/dist_priv.h"

#include <errno.h>
#include <string.h>

#include "base/checked.h"
#include "base/err.h"

/* A local Shard: its tensor, and a ShardMetadata with the box. */
static int add_shard(const struct dist_call *c, const struct pv *shard, struct err *e)
{
    uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS];
    struct pv metadata, offsets, sizes, tensor;
    uint32_t nstart = 0, nsize = 0;
    struct torch_tensor x;
    struct shape units;

    if (!dist_instance(shard, "Shard") || !dist_member(shard, "tensor", &tensor) ||
        !dist_member(shard, "metadata", &metadata) ||
        !dist_member(&metadata, "shard_offsets", &offsets) ||
        !dist_member(&metadata, "shard_sizes", &sizes) ||
        !dist_numbers(&offsets, start, SHAPE_MAX_DIMS, &nstart) ||
        !dist_numbers(&sizes, size, SHAPE_MAX_DIMS, &nsize))
        return err_set(e, EBADMSG, "a shard without its place");
    if (nstart != c->units.nd || nsize != c->units.nd)
        return err_set(e, EBADMSG, "a shard of %" PRIu32 " dimensions, of %" PRIu32,
                       nsize, c->units.nd);
    for (uint32_t i = 0; i < nsize; i++)
        if (start[i] > c->units.dim[i] || size[i] > c->units.dim[i] - start[i])
            return err_set(e, EBADMSG, "a shard that reaches past the tensor");
    TRY(dist_local(c, &tensor, &x, &units, e));
    if (units.nd != nsize ||
        (nsize > 0 && memcmp(units.dim, size, nsize * sizeof *size) != 0))
        return err_set(e, EBADMSG, "a shard of another size than its place has");
    return c->fn(c->user, &x, start, e);
}

/* ShardedTensorMetadata tells the size again. */
static int check_metadata(const struct dist_call *c, struct err *e)
{
    struct pv metadata = pv_at(&c->state, 1), size;
    uint64_t dim[SHAPE_MAX_DIMS];
    uint32_t nd = 0;

    if (!dist_member(&metadata, "size", &size))
        return err_set(e, EBADMSG, "a ShardedTensor without metadata");
    if (!dist_numbers(&size, dim, SHAPE_MAX_DIMS, &nd) || nd != c->units.nd ||
        (nd > 0 && memcmp(dim, c->units.dim, nd * sizeof *dim) != 0))
        return err_set(e, EBADMSG, "its size is told twice, and not the same");
    return 0;
}

/*
 * (local shards, ShardedTensorMetadata, ProcessGroupState, sharding spec, init_rrefs), as
 * torch 2.4 and 2.15 write it. A rank whose piece is empty has no shard.
 */
int sharded_tensor_read(struct dist_call *c, struct err *e)
{
    struct pv shards, shard;

    if (c->state.kind != PV_TUPLE || pv_count(&c->state) != 5)
        return err_set(e, ENOTSUP, "a ShardedTensor of an unknown kind");
    shards = pv_at(&c->state, 0);
    if (shards.kind != PV_LIST)
        return err_set(e, ENOTSUP, "a ShardedTensor of an unknown kind");
    TRY(check_metadata(c, e));
    for (size_t i = 0; i < pv_count(&shards); i++) {
        shard = pv_at(&shards, i);
        TRY(add_shard(c, &shard, e));
    }
    return 0;
}
