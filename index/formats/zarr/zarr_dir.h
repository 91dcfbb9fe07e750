/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_dir.h - an array that lies in a directory, a file for each chunk. */
#ifndef UFS_INDEX_FORMATS_ZARR_DIR_H
#define UFS_INDEX_FORMATS_ZARR_DIR_H

#include "base/base.h"
#include "index/formats/zarr/zarr_array.h"

struct listing;
struct store;

struct zarr_dir {
    struct store *store;
    const char *root;       /* the checkpoint's directory, relative to the store */
    const char *path;       /* the array's, relative to that; "": the same */
    const char *metadata;   /* ".zarray" or "zarr.json", which is in it */
    bool all_chunks_needed; /* see struct zarr_how */
    /* What the caller has already, each of it made after it was watched; or NULL. */
    const struct listing *listing; /* of the array's directory */
    const char *text;              /* all of the metadata */
    size_t len;
};

/*
 * Reads the metadata and reports the array as the tensor `about` (dtype and shape are
 * filled in). All that is read is registered or watched. `a` gets what the metadata say;
 * what is wrong with them or with chunks is the tensor's fault. Errors: those of the index
 * and what leaves no sense in going on (-ESTALE, -ENOMEM, -EMFILE); -EEXIST as
 * sink_tensor_begin().
 */
int zarr_dir_report(const struct zarr_dir *d, const struct sink_tensor *about,
                    struct sink *sink, struct zarr_array *a, struct err *e);

/* The same when `a` is known already: `file` is the metadata's number. */
int zarr_dir_chunks(const struct zarr_dir *d, const struct sink_tensor *about,
                    const struct zarr_array *a, uint32_t file, struct sink *sink,
                    struct err *e);

/*
 * All of a small file of the directory `path` below the root, and a NUL behind; the caller
 * frees it. -EFBIG: more than `max` bytes.
 */
int zarr_dir_read(struct store *store, const char *root, const char *path,
                  const char *name, size_t max, char **text, size_t *len,
                  struct err *e);

#endif
