/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_walk.h - all tensors of an object graph, with the keys they get. */
#ifndef UFS_INDEX_FORMATS_TORCH_WALK_H
#define UFS_INDEX_FORMATS_TORCH_WALK_H

#include "base/base.h"
#include "base/buf.h"
#include "index/formats/torch/torch_zip.h"

struct err;

/* One tensor that was met; texts hold until the callback returns. */
struct torch_item {
    /*
     * Its path in the object: keys, positions and attributes, joined by dots. Modules'
     * "_parameters", "_buffers" and "_modules" are left out, as state_dict() does; the
     * parts of quantised and sparse tensors have names.
     */
    const char *key;
    size_t key_len;
    /* The path as object_to_json() gives it. */
    const char *path;
    size_t path_len;
    const struct torch_tensor *tensor; /* NULL: damaged, or without bytes */
    const char *why;                   /* then; "" for what `claims` took */
    const struct pv *value;
    /* Within an instance of a class that is only data to us, or an attribute of a module
     * that is neither parameter nor buffer, or a buffer that is not persistent. */
    bool opaque;
    bool shard; /* within one of torch.distributed: a piece of some larger tensor */
};

typedef int torch_item_fn(void *user, const struct torch_item *item, struct err *e);

/*
 * `struct torch_walk w = {...}`: the first group is the caller's. Buffers hold the path so
 * far, which may be put there before.
 */
struct torch_walk {
    struct torch_zip *zip;
    torch_item_fn *fn;
    void *user;
    /*
     * Optional: is this instance of a class of torch.distributed a tensor for fn, which
     * gets it as `value`? It is not entered then. fn's user is not its.
     */
    bool (*claims)(const struct pv *v);
    struct buf key, path; /* with .max = TORCH_MAX_PATH */

    uint64_t visits;  /* of values, in all walks with this struct */
    uint64_t tensors; /* reported */
    uint64_t others;  /* values that are no tensors and no containers of some */
    uint64_t shards;  /* outermost instances of classes of torch.distributed */
    uint64_t
        too_deep;     /* containers that were not entered: cycles, or past the limits */
    uint64_t unnamed; /* tensors in them that got no key: paths over TORCH_MAX_PATH */
};

enum { TORCH_MAX_PATH = 64 << 10 };

void torch_walk_release(struct torch_walk *w);

/*
 * Calls fn for each tensor of `v`, a tensor by two paths twice. Stops at and returns what fn
 * returns below 0. -EFBIG when references multiply the values (more visits than the
 * pickle could have asked for honestly).
 */
int torch_walk_value(struct torch_walk *w, struct pv v, struct err *e);

/* Appends a part to a path, with a dot where one is needed. */
int torch_path_add(struct buf *path, const char *part, size_t len);

/* The items of what is a dict: a dict, an OrderedDict, Counter or defaultdict. */
bool torch_mapping(const struct pv *v, struct pv *items);

/*
 * The part of a path that a key of a dict gives, into `out`: Python's str() of it, as torch
 * spells the paths of a state dict, or `i`, its position, for what is no number, text or
 * short tuple of these.
 */
int torch_key_part(const struct pv *key, size_t i, struct buf *out);

#endif
