/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/ocdbt_node.h - OCDBT's manifests and B+tree nodes, out of their bytes. */
#ifndef UFS_INDEX_FORMATS_ORBAX_OCDBT_NODE_H
#define UFS_INDEX_FORMATS_ORBAX_OCDBT_NODE_H

#include "base/base.h"

struct arena;
struct err;

/* Numbers that tensorstore 0.1.86 (kvstore/ocdbt/format) sets too, where it says so. */
enum {
    OCDBT_MAX_PLAIN = 64 << 20,  /* of a node when decoded; written ones have 8 MiB */
    OCDBT_MAX_ENTRIES = 1 << 20, /* of a node: kMaxNodeArity */
    OCDBT_MAX_FILES = 1 << 20,   /* of a node */
    OCDBT_MAX_PATH = 65535,      /* kMaxPathLength */
    OCDBT_MAX_KEY = 65535,       /* KeyLength has 16 bits */
    OCDBT_MAX_INLINE = 1 << 20,  /* kMaxInlineValueLength */
    OCDBT_UUID = 16,
};

/* A data file that a node names; relative to the directory of the manifest. */
struct ocdbt_file {
    const char *path; /* NUL behind; may hold others */
    uint32_t len;
    uint32_t base_len; /* so much of it stands before the files of nodes in it */
};

/* Bytes [offset, offset + length) of a file, by its number in the node's list. */
struct ocdbt_place {
    uint32_t file;
    uint64_t offset, length;
};

struct ocdbt_manifest {
    unsigned char uuid[OCDBT_UUID]; /* of the database */
    bool numbered; /* only this: the tree is in the newest manifest.<16 hex digits> */
    bool empty;    /* no keys: there is no root */
    uint64_t generation;
    unsigned height; /* of the root; 0: a leaf */
    struct ocdbt_file file;
    uint64_t offset, length;
};

/*
 * Reads a manifest; strings live in `a`. Of the versions the newest counts: nodes of the
 * version tree hold only older ones. -EBADMSG, -ENOTSUP (a format that is not known).
 */
int ocdbt_manifest_parse(struct arena *a, const void *data, size_t len,
                         struct ocdbt_manifest *out, struct err *e);

/*
 * The most bytes that keys and paths may come to in memory that had `stored` bytes in their
 * files: each may repeat 64 KiB of the one before it by a number of three. Honest ones repeat
 * some hundred and add a few of their own.
 */
uint64_t ocdbt_unfolded_max(uint64_t stored);

/* One entry of a node: a value in a leaf, a child elsewhere. */
struct ocdbt_entry {
    const char *key; /* what follows the node's prefix */
    uint32_t key_len;
    uint32_t child_prefix; /* so much of key is part of the child's prefix */
    bool is_inline;        /* `place` counts bytes of `plain`, or of the node (below) */
    struct ocdbt_place place;
};

struct ocdbt_node {
    unsigned height;
    const struct ocdbt_file *file;
    size_t files;
    const struct ocdbt_entry *entry;
    size_t entries; /* at least one; keys strictly ascending */
    /*
     * The decoded body, which inline values count in; NULL when the node is stored as it
     * is: they then count in the node's own bytes.
     */
    const unsigned char *plain;
};

/*
 * Reads a node, data[0..len), whose files' paths continue `base`. All memory is in `a`.
 * Checked: magic, length, CRC-32C, that nothing is left over, order of the keys, what they
 * come to (-EFBIG), numbers of files. Not: that places are within their files.
 */
int ocdbt_node_parse(struct arena *a, const void *data, size_t len,
                     const struct ocdbt_file *base, struct ocdbt_node *out,
                     struct err *e);

#endif
