/* SPDX-License-Identifier: MIT */
/* index/catalog_stage.h - the private database of a scan, as the commit reads it. */
#ifndef UFS_INDEX_CATALOG_STAGE_H
#define UFS_INDEX_CATALOG_STAGE_H

#include "base/buf.h"
#include "base/keyset.h"
#include "index/catalog_conn.h"
#include "index/catalog_rows.h"

struct err;

struct stage {
    struct conn *conn;
    uint32_t tensors, objects, warnings;
    /* Files, tensors, places in tree/: in memory until they are many, then in the tables. */
    struct rows files, rows, places;
    bool files_spilled, spilled, places_spilled;
    struct keyset taken; /* places in memory */
    struct buf text;     /* scratch */
    struct buf dirs;     /* of the last place in tree/ */
    uint64_t ndirs;      /* in tree/, or some more */
};

/* Columns of a staged file, in this order. */
enum staged_file {
    STAGED_FILE_PATH,
    STAGED_FILE_NUMBER,
    STAGED_FILE_DEV,
    STAGED_FILE_INO,
    STAGED_FILE_SIZE,
    STAGED_FILE_MTIME,
    STAGED_FILE_CTIME,
    STAGED_FILE_MODE,
    STAGED_FILE_COLUMNS
};

/* Calls fn with each file in the order of the numbers, until it fails. */
int stage_files(struct stage *st,
                int (*fn)(void *user, const struct cell *file, struct err *e),
                void *user, struct err *e);

/* Columns of a staged tensor, in this order. */
enum staged {
    STAGED_NAME,    /* the order in which they are committed */
    STAGED_KEY,     /* final, once keys are settled */
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
    "name, key, raw_key, part, wrapper, dtype, stored, shape, role, bytes, chunks, "   \
    "fault, codec_key, attributes, identity, mode, uid, gid, mtime, single_file, "     \
    "pieces"

/* Tensors in byte order of their names, of one name in the order in which they came. */
struct stage_order {
    struct stage *st;
    struct query q;
    int more; /* what the step to the first row gave */
    size_t next;
};

int stage_order_begin(struct stage *st, struct stage_order *out, struct err *e);
/* 1: the cells of the next one, which stay valid until the one after; 0: no more. */
int stage_order_next(struct stage_order *o, struct cell cell[STAGED_COLUMNS],
                     struct err *e);
void stage_order_end(struct stage_order *o); /* for CLEANUP() */

/* One row of the private database by a statement that is kept. */
int stage_put(struct stage *st, const char *sql, const struct cell *cell, size_t n,
              struct err *e);

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

/* Forgets the places. */
int stage_tree_clear(struct stage *st, struct err *e);

/* Writes the rows of tree/ from the staged places. */
int tree_write(struct conn *n, struct stage *st, int64_t checkpoint, struct err *e);

#endif
