/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/dist_priv.h - what both kinds of distributed tensors are made of. */
#ifndef UFS_INDEX_FORMATS_RANKFILES_DIST_PRIV_H
#define UFS_INDEX_FORMATS_RANKFILES_DIST_PRIV_H

#include "index/formats/rankfiles/dist_tensor.h"

/* One that is read: _rebuild_from_type_v2(function, type, arguments, state). */
struct dist_call {
    struct torch_zip *zip;
    struct pv args, state;
    struct dist_tensor *out;
    struct shape units; /* of the full tensor */
    dist_piece_fn *fn;
    void *user;
};

/* An instance of the class of this name, wherever below torch.distributed that is. */
bool dist_instance(const struct pv *v, const char *name);

/*
 * An attribute of an instance that BUILD gave a dict, or a pair of dicts (classes with
 * __slots__). `state` is the state itself.
 */
bool dist_attribute(const struct pv *state, const char *name, struct pv *out);

/* The attribute of an instance. */
bool dist_member(const struct pv *object, const char *name, struct pv *out);

/*
 * The strided tensor of this rank, of the full one's element type; `units` is its shape.
 * -ENOTSUP when it is a tensor of some other class.
 */
int dist_local(const struct dist_call *c, const struct pv *v, struct torch_tensor *out,
               struct shape *units, struct err *e);

/* Read the pieces: 0, or what is wrong. */
int dtensor_read(struct dist_call *c, struct err *e);
int sharded_tensor_read(struct dist_call *c, struct err *e);

#endif
