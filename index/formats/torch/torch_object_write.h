/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_object_write.h - torch.save of objects that hold tensors. */
#ifndef UFS_INDEX_FORMATS_TORCH_OBJECT_WRITE_H
#define UFS_INDEX_FORMATS_TORCH_OBJECT_WRITE_H

#include "base/base.h"
#include "index/formats/pickle/pickle_write.h"

struct arena;
struct err;
struct layout_file;
struct layout_input;
struct layout_object;
struct zip_write;

/* The tensors of an input by their keys; all of it is the arena's. */
struct torch_objects {
    const struct layout_input *in;
    size_t *by_key; /* tensors, sorted by key */
    bool *taken;    /* by torch_object_take(): they stand in an object's archive */
};

int torch_objects_new(const struct layout_input *in, struct arena *a,
                      struct torch_objects *out, struct err *e);

/* One object: data.pkl, and the tensors whose bytes are its members data/0, data/1, ... */
struct torch_object {
    const struct torch_objects *all;
    struct pickler pickle;
    size_t *tensor; /* of the input */
    size_t tensors, cap;
    bool nomem;
};

/*
 * Makes the pickle of an object as objects.json tells it (object_pickle_with()); `alone`:
 * it becomes the one element of a list, as Megatron Core saves them. 1: done; 0: it
 * cannot be rebuilt; or -errno. torch_object_release() in any case.
 */
int torch_object_make(const struct torch_objects *all, const struct layout_object *o,
                      bool alone, struct torch_object *out, struct err *e);
void torch_object_release(struct torch_object *x);

/* Its tensors are no tensors by themselves any more. */
void torch_object_take(const struct torch_object *x);

/* The archive, where the file stands; *len: its bytes. */
int torch_object_put(const struct torch_object *x, struct zip_write *z,
                     struct layout_file *f, uint64_t *len, struct err *e);

/* A file of its own, of stage 0. */
struct layout;
int torch_object_file(const struct torch_object *x, struct layout *l, const char *path,
                      struct err *e);

#endif
