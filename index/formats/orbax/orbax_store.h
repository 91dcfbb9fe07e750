/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_store.h - zarr arrays by name: values of an OCDBT store, or directories. */
#ifndef UFS_INDEX_FORMATS_ORBAX_ORBAX_STORE_H
#define UFS_INDEX_FORMATS_ORBAX_ORBAX_STORE_H

#include "base/base.h"

struct buf;
struct err;
struct listing;
struct orbax_files;
struct orbax_store;
struct sink_tensor;

struct orbax_array {
    const char *name; /* the path of the array in the store; NUL behind */
    size_t len;
    bool zarr3;
};

/* Has the directory the manifest of an OCDBT store? */
bool orbax_has_ocdbt(const struct listing *l);

/*
 * Finds all arrays below the listed directory, which is the one of `files`: through
 * manifest.ocdbt where that is there, else in directories with .zarray or zarr.json.
 * `files` and `l` are borrowed for as long as the store lives. An OCDBT store that is
 * damaged anywhere is an error: which arrays and chunks would be missing nobody knows.
 */
int orbax_store_open(struct orbax_files *files, struct listing *l,
                     struct orbax_store **out, struct err *e);
void orbax_store_free(struct orbax_store *s);
void orbax_store_freep(struct orbax_store **s);

bool orbax_store_is_ocdbt(const struct orbax_store *s);

/* Sorted by name; groups of zarr v3 are among them. */
size_t orbax_store_count(const struct orbax_store *s);
const struct orbax_array *orbax_store_at(const struct orbax_store *s, size_t i);

/* The array of that name; false: there is none. */
bool orbax_store_find(const struct orbax_store *s, const char *name, size_t len,
                      size_t *i);

/*
 * Reports array number i as the tensor `about` (which has no dtype and shape yet), or
 * nothing when it is a group. `all_chunks`: one that is missing is a fault.
 */
int orbax_store_report(struct orbax_store *s, size_t i, const struct sink_tensor *about,
                       bool all_chunks, struct err *e);

/*
 * The only element of an array without dimensions, as JSON of objects.json. 1: appended;
 * 0: it has dimensions or a type that is no number, report it as a tensor.
 */
int orbax_store_number(struct orbax_store *s, size_t i, struct buf *out, struct err *e);

#endif
