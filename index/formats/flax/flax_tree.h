/* SPDX-License-Identifier: MIT */
/* index/formats/flax/flax_tree.h - the tree that flax.serialization packed: arrays and values. */
#ifndef UFS_INDEX_FORMATS_FLAX_TREE_H
#define UFS_INDEX_FORMATS_FLAX_TREE_H

#include "base/base.h"
#include "index/dtype.h"
#include "index/shape.h"

struct err;
struct source;

/* Bytes of the source that are the next elements of an array, in row-major order. */
struct flax_piece {
    uint64_t off, len;
};

enum { FLAX_DTYPE_NAME = 32 };

/*
 * An array (ext type 1), a NumPy scalar (ext type 3) or a chunked array (the map with
 * "__msgpack_chunked_array__"), little-endian.
 */
struct flax_array {
    /*
     * DTYPE_NONE: no elements that a tensor can have (text, dates). Types of ml_dtypes
     * that safetensors does not know have one byte an element: U8, and is_raw.
     */
    enum dtype dtype;
    bool is_raw;
    char name[FLAX_DTYPE_NAME]; /* as NumPy calls the type */
    struct shape shape;
    struct flax_piece *piece;
    size_t count;
    const char *fault; /* NULL, or why its bytes are not what it says */
};

/*
 * Both get keys joined by dots (positions of lists as numbers), without a NUL behind and
 * borrowed for the call, and stop the walk by returning an error. What `array` adds to a
 * key stands in the objects too.
 */
struct flax_visitor {
    int (*array)(void *user, struct buf *key, const struct flax_array *a,
                 struct err *e);
    /*
     * An entry of the outermost map that holds anything but arrays: as objects.json has
     * it; arrays in it are {"$type": "tensor", "key": KEY}.
     */
    int (*object)(void *user, const char *key, size_t len, const char *json,
                  size_t json_len, struct err *e);
    void *user;
};

/*
 * Walks the one map that is bytes [off, off + len) of the source, or the records of EasyLM's
 * stream: [[name, ...], bytes], where the bytes are one value as flax packs it. Each record
 * is an entry of the outermost map, its names joined. Bytes of arrays are not read.
 * -EBADMSG when it is damaged (also a key twice, bytes behind the end), -ENOTSUP when it is
 * no map or a key is no text, -EFBIG when it is nested too deep or has too many values.
 */
int flax_walk(struct source *src, uint64_t off, uint64_t len,
              const struct flax_visitor *v, struct err *e);

/* Do these first bytes of a file begin such a map: its first key is text? */
bool flax_sniff(const void *head, size_t len);

/* Or EasyLM's stream: a list of names, and bytes? */
bool flax_sniff_stream(const void *head, size_t len);

#endif
