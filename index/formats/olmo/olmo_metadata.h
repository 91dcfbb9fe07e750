/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_metadata.h - metadata.json of early OLMo-core: which file has what. */
#ifndef UFS_INDEX_FORMATS_OLMO_METADATA_H
#define UFS_INDEX_FORMATS_OLMO_METADATA_H

#include "base/base.h"
#include "index/dtype.h"
#include "index/shape.h"

struct arena;
struct err;

/*
 * What one file has of one tensor: intervals of its row-major elements, one behind the
 * other in the order given, or a box. Within the tensor, and never without elements.
 */
struct olmo_piece {
    uint32_t file; /* of olmo_metadata.file */
    bool box;
    uint32_t count;     /* intervals */
    const uint64_t *at; /* begin and end of each; of a box: its start, then its size */
};

/* All is borrowed from the metadata. */
struct olmo_tensor {
    const char *key; /* NUL-terminated, holds no NUL */
    uint32_t nd;
    enum dtype dtype; /* DTYPE_NONE: not told, as before 24 March 2024 */
    const uint64_t *dim;
    uint64_t elements;
    const char *fault; /* NULL, or why it must not be read; it has no pieces then */
    struct olmo_piece
        *piece; /* in the order of the file, which decides about replicas */
    size_t npieces;
};

struct olmo_metadata {
    struct olmo_tensor *tensor; /* in the order of the file */
    size_t count;
    const char **file; /* names as they stand there: not safe to open */
    size_t nfiles;
    bool legacy; /* `flattened_offsets_per_file`, as before 13 May 2024 */
    struct arena *arena;
};

void olmo_metadata_release(struct olmo_metadata *m);

/*
 * Reads {"tensors": {KEY: {"shape", "dtype", "shard_spec_per_file": {FILE: SPEC}}}} and the
 * forms before it (docs/formats/olmo_v0.md). What is wrong with one tensor is its fault.
 * -EBADMSG when it is no such thing. *out is released after 0 only.
 */
int olmo_metadata_parse(const char *text, size_t len, struct olmo_metadata *out,
                        struct err *e);

/*
 * Do these first bytes of a metadata.json begin one? 2: it says where a tensor lies, 1:
 * that much is not to be seen, as the text is empty or damaged, 0: no.
 */
int olmo_metadata_sniff(const char *head, size_t len);

void olmo_shape(const struct olmo_tensor *t, struct shape *out);

/* Does the piece cover the whole tensor? Such a one wins over all others. */
bool olmo_piece_is_whole(const struct olmo_tensor *t, const struct olmo_piece *p);

#endif
