/* SPDX-License-Identifier: MIT */
/* index/catalog_stage.h - the private database of a scan, as the commit reads it. */
#ifndef UFS_INDEX_CATALOG_STAGE_H
#define UFS_INDEX_CATALOG_STAGE_H

#include "base/buf.h"
#include "index/catalog_conn.h"

struct err;

struct stage {
    struct conn *conn;
    uint32_t tensors, objects, warnings;
    struct buf text; /* scratch */
    struct buf dirs; /* of the last place in tree/ */
    uint64_t ndirs;  /* in tree/, or some more */
};

/* Columns of a staged tensor, in this order. */
enum staged {
    STAGED_KEY, /* final, once keys are settled */
    STAGED_NAME,
    STAGED_RAW_KEY, /* NULL: the same as key */
    STAGED_PART,
    STAGED_WRAPPER,
    STAGED_DTYPE,
    STAGED_STORED,
    STAGED_SHAPE,
    STAGED_ROLE,
    STAGED_BYTES,
    STAGED_CHUNKS,
    STAGED_FAULT,
    STAGED_CODEC_KEY,
    STAGED_ATTRIBUTES,
    STAGED_IDENTITY,
    STAGED_MODE, /* NULL: no file contributes */
    STAGED_UID,  /* NULL: several */
    STAGED_GID,  /* NULL: several */
    STAGED_MTIME,
    STAGED_SINGLE_FILE, /* NULL: none */
    STAGED_PIECES,
    STAGED_COLUMNS
};

#define STAGED_LIST                                                                    \
    "key, name, raw_key, part, wrapper, dtype, stored, shape, role, bytes, chunks, "   \
    "fault, codec_key, attributes, identity, mode, uid, gid, mtime, single_file, "     \
    "pieces"

/* Tensors with equal keys in several parts: the model's keeps it, others get PART/KEY. */
int stage_settle_keys(struct stage *st, struct err *e);

/* Objects with equal keys: the second becomes KEY:2. */
int stage_settle_objects(struct stage *st, struct err *e);

/*
 * The place of a tensor in tree/: names of directories with a NUL behind each, and the
 * file name. What is there already gets "~2".
 */
int stage_tree(struct stage *st, const char *key, size_t len, uint32_t ord,
               struct err *e);

/* Writes the rows of tree/ from the staged places. */
int tree_write(struct conn *n, struct stage *st, int64_t checkpoint, struct err *e);

#endif
