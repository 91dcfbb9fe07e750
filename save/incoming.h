/* SPDX-License-Identifier: MIT */
/* save/incoming.h - files that were written into a mount: what they are, what they hold. */
#ifndef UFS_SAVE_INCOMING_H
#define UFS_SAVE_INCOMING_H

#include "base/base.h"
#include "base/buf.h"
#include "index/dtype.h"
#include "index/shape.h"
#include "index/sink.h"

struct err;
struct source;

/* What a file's path in a checkpoint's mount says it is. */
enum incoming_kind {
    INCOMING_SIDE,        /* kept as it is */
    INCOMING_SAFETENSORS, /* at the top, or in optimizer/ */
    INCOMING_INDEX,   /* model.safetensors.index.json: names files that must be there */
    INCOMING_NPY,     /* tensors/KEY.npy, tree/a/b.npy */
    INCOMING_RAW,     /* raw/KEY */
    INCOMING_IGNORED, /* .unshard/... */
};

enum incoming_kind incoming_kind(const char *path);

/* The same where a base model is there: an adapter beside it stays a file of its own. */
enum incoming_kind incoming_kind_beside(const char *path, bool base);
bool incoming_is_adapter(const char *path);

/*
 * Of a safetensors file: the role that it is the whole of ("model.safetensors", one of
 * "model-00001-of-00002.safetensors", optimizer/optimizer.safetensors), or false: its
 * tensors are merged with those that are there.
 */
bool incoming_is_whole(const char *path, enum role *role);

/* "x-00001-of-00003.safetensors": the number of files in its set; 0: it is none of one. */
unsigned incoming_set(const char *path, unsigned *number, size_t *stem);

/*
 * The key of tensors/NAME.npy or tree/A/B.npy, appended. -EINVAL for a name that was cut,
 * from which the key cannot be told.
 */
int incoming_key(const char *path, struct buf *key, struct err *e);

/* The elements of one tensor in a file. */
struct incoming_data {
    enum dtype dtype;
    struct shape shape;
    uint64_t at, bytes;
    bool fortran, swap; /* column-major, big-endian */
};

/*
 * Reads the header of a whole .npy file. `one_byte` is what |V1 stands for (DTYPE_NONE:
 * not known). -EINVAL: it is not whole, or none.
 */
int incoming_npy(struct source *src, enum dtype one_byte, struct incoming_data *out,
                 struct err *e);

/* What the header of a safetensors file says of it. */
struct incoming_header {
    uint64_t size; /* of the whole file */
    bool pt;       /* its metadata say what transformers wants to see */
};

/*
 * Judges the header of a safetensors file that is being written, of which the first
 * `prefix` bytes are there: 0: more of it must come, 1: it is sound, and *out is filled.
 * -EINVAL with words.
 */
int incoming_judge(int fd, uint64_t prefix, struct incoming_header *out, struct err *e);

/*
 * Reads elements [off, off + len) bytes of row-major, little-endian order. `fd` is of a
 * regular file that nobody writes.
 */
int incoming_read(int fd, const struct incoming_data *d, uint64_t off, size_t len,
                  void *dst, struct err *e);

#endif
