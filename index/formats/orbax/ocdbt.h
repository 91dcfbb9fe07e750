/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/ocdbt.h - the newest state of an OCDBT store: all its keys, in order. */
#ifndef UFS_INDEX_FORMATS_ORBAX_OCDBT_H
#define UFS_INDEX_FORMATS_ORBAX_OCDBT_H

#include "base/base.h"

struct err;
struct ocdbt;
struct ocdbt_manifest;

/* Where a value lies. */
struct ocdbt_value {
    const char *key; /* any bytes; NUL behind */
    uint32_t key_len;
    uint32_t file;           /* number that ocdbt_io.file gave */
    uint64_t offset, length; /* of the value, or of the node that `literal` is out of */
    const void *literal;     /* a value inside a compressed node, or NULL */
    uint32_t literal_len;
};

/* What the walk needs of the outside. Paths are relative to the manifest's directory. */
struct ocdbt_io {
    /* Gives a number to the file of this path (len bytes); the same for the same. */
    int (*file)(void *user, const char *path, size_t len, uint32_t *number,
                struct err *e);
    int (*read)(void *user, uint32_t number, uint64_t off, size_t len, void *dst,
                struct err *e);
    void *user;
};

/*
 * Walks the whole tree and keeps where each value lies. A node that cannot be read or is
 * not what its parent says (height, keys in order and within their bounds) fails all of
 * it: nobody can tell which keys would be missing. -EBADMSG; -EFBIG over the ceilings
 * that keep a hostile tree, whose nodes may lead to one another, from growing for ever.
 */
int ocdbt_open(const struct ocdbt_manifest *m, const struct ocdbt_io *io,
               struct ocdbt **out, struct err *e);
void ocdbt_free(struct ocdbt *o);
void ocdbt_freep(struct ocdbt **o);

/* Sorted by the bytes of the keys. */
size_t ocdbt_count(const struct ocdbt *o);
const struct ocdbt_value *ocdbt_at(const struct ocdbt *o, size_t i);

/* The first value whose key is not before this one. */
size_t ocdbt_lower_bound(const struct ocdbt *o, const char *key, size_t len);

#endif
