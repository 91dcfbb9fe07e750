/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_flat.h - which ranges of parameters a rank of OLMo's type local holds. */
#ifndef UFS_INDEX_FORMATS_OLMO_OLMO_FLAT_H
#define UFS_INDEX_FORMATS_OLMO_OLMO_FLAT_H

#include "base/base.h"
#include "index/formats/torch/torch_zip.h"
#include "index/shape.h"

struct buf;
struct err;

/*
 * Elements [begin, begin + count) of a parameter are x[offset, offset + count): a flat
 * parameter of FSDP. A rank tells of all parameters, also of those that it has none of.
 */
struct olmo_flat {
    const char *name; /* of the parameter in the whole model */
    size_t len;
    struct shape shape; /* of the whole */
    struct torch_tensor x;
    uint64_t offset, begin, count;
};
typedef int olmo_flat_fn(void *user, const struct olmo_flat *f, struct err *e);

/*
 * Calls fn for each parameter of model/rankN.pt: {"modules": [{"name", "handles": [{
 * "flat_param.data", "flat_param._fqns", "flat_param._shapes", ...}]}]} (OLMo, olmo/
 * checkpoint.py, LocalShardedCheckpointer, 0.2 to 0.6), by FSDP's own notes of torch 2.0
 * (_shard_indices) or of 2.1 and later (_shard_param_infos). -EBADMSG where it contradicts
 * itself, -ENOTSUP where names cannot be told, or what fn returned.
 */
int olmo_flat_read(struct torch_zip *zip, olmo_flat_fn *fn, void *user, struct err *e);

/* Appends the name, a PV_STR, without the parts that FSDP put into it; 0, or -ENOMEM. */
int olmo_flat_name(const struct pv *name, struct buf *out);

#endif
