/* SPDX-License-Identifier: MIT */
/* index/formats/flax/flax_elsewhere.h - arrays of several processes, which flax keeps beside its file. */
#ifndef UFS_INDEX_FORMATS_FLAX_ELSEWHERE_H
#define UFS_INDEX_FORMATS_FLAX_ELSEWHERE_H

#include "base/base.h"

struct buf;
struct err;

/* The directory is called as the file with this behind. */
#define FLAX_ELSEWHERE_DIR "_gda"

/* Does the text of an object name any? */
bool flax_has_elsewhere(const char *json, size_t len);

/* An array at `key`, in the directory `path` of those; what it adds to the key is kept. */
typedef int flax_elsewhere_fn(void *user, struct buf *key, const char *path,
                              struct err *e);

/*
 * Calls fn for each array that the object `name` only names. `out` gets the object as
 * objects.json has it, {"$type": "tensor", "key": KEY} in their places, and nothing where
 * it holds arrays alone.
 */
int flax_elsewhere(const char *name, size_t name_len, const char *json, size_t len,
                   flax_elsewhere_fn *fn, void *user, struct buf *out, struct err *e);

#endif
