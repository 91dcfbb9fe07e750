/* SPDX-License-Identifier: MIT */
/* index/formats/flax/flax_array.h - arrays as flax packs them, whole or in chunks. */
#ifndef UFS_INDEX_FORMATS_FLAX_ARRAY_H
#define UFS_INDEX_FORMATS_FLAX_ARRAY_H

#include "index/formats/flax/flax_tree.h"
#include "index/formats/flax/msgpack.h"

enum { FLAX_EXT_ARRAY = 1, FLAX_EXT_COMPLEX = 2, FLAX_EXT_SCALAR = 3 };

/* The first key of a map that is an array cut into chunks of its flat elements. */
extern const char flax_chunked_mark[];

void flax_array_release(struct flax_array *a);

/* What an ext value of type 1 or 3 holds: MessagePack of [shape, name, bytes]. */
int flax_array_read(const struct msgpack *m, const struct msgpack_value *v,
                    struct flax_array *out, struct err *e);

/*
 * The rest of a map of `pairs` pairs whose first key was the mark: {mark: true, "shape":
 * {"0": n, ...}, "chunks": {"0": ext, ...}}.
 */
int flax_chunked_read(struct msgpack *m, uint64_t pairs, struct flax_array *out,
                      struct err *e);

#endif
