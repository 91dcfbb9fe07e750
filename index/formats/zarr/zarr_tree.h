/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_tree.h - the groups and arrays below a directory, reported one by one. */
#ifndef UFS_INDEX_FORMATS_ZARR_TREE_H
#define UFS_INDEX_FORMATS_ZARR_TREE_H

#include "base/base.h"

struct err;
struct scan_context;
struct sink;

/* What was learnt of the checkpoint on the way. */
struct zarr_found {
    uint64_t arrays[4]; /* by zarr_format: 2, 3 */
    uint64_t groups;
    bool has_step; /* an attribute "step" of the root */
    int64_t step;
    char metadata[4096]; /* a file of the root or of the first array; "": none */
};

/*
 * Reports every array as a tensor, whose key is its path, and attributes as objects; hides
 * what is zarr's. Damage of one array is its tensor's fault.
 */
int zarr_tree_report(const struct scan_context *c, struct sink *sink,
                     struct zarr_found *out, struct err *e);

#endif
