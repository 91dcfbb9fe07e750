/* SPDX-License-Identifier: MIT */
/* index/sink_files.h - the files of a running scan: numbers, sizes, rights. */
#ifndef UFS_INDEX_SINK_FILES_H
#define UFS_INDEX_SINK_FILES_H

#include "base/base.h"
#include "index/catalog_write.h"
#include "remote/store.h"

/*
 * What is needed of each file for each chunk. A zarr checkpoint has a file a chunk, so
 * that a million of these must not hurt: paths and the rest are in the stage.
 */
struct sink_file {
    uint64_t size;
    uint64_t identity;  /* hash of path, size, inode and times */
    uint64_t low, high; /* hash of the path */
    struct stage_rights rights;
    uint32_t tensors;     /* with chunks in it */
    uint32_t last_tensor; /* the one counted last, from 1 */
    int problem;          /* errno, 0: it is there and regular */
    bool storage, whole, copy;
};

struct sink_files {
    struct store *store;
    struct stage *stage;
    struct sink_file *file; /* malloc; by number */
    uint32_t count, cap;
    uint32_t *slot; /* malloc; open addressing, number + 1, 0: free */
    uint32_t nslots;
    uint64_t seed;
};

int sink_files_init(struct sink_files *f, struct store *store, struct stage *stage,
                    struct err *e);
void sink_files_release(struct sink_files *f);

/*
 * The number of the file at this path of the store; it is looked at when it is new
 * (*known false). A file that is not there, or no regular one, is no error.
 */
int sink_files_add(struct sink_files *f, const char *path, bool storage,
                   uint32_t *number, bool *known, struct err *e);

/* Its path without the first `skip` bytes and slashes, for a message. */
int sink_files_name(struct sink_files *f, uint32_t number, size_t skip, char *dst,
                    size_t size, struct err *e);

/* The rights of the file whose path is the first in byte order among those there. */
int sink_files_first(struct sink_files *f, struct stage_rights *out, struct err *e);

#endif
