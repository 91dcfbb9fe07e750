/* SPDX-License-Identifier: MIT */
/* index/catalog_stage.h - the rows of a scan, as the commit reads them. */
#ifndef UFS_INDEX_CATALOG_STAGE_H
#define UFS_INDEX_CATALOG_STAGE_H

#include "base/buf.h"
#include "base/keyset.h"
#include "index/catalog_conn.h"
#include "index/catalog_rows.h"

struct err;
struct stage_result;

/* Rows of one kind: in memory until they are many, then in a table of the database. */
struct held {
    struct rows rows;
    const char *insert; /* puts one into its table */
    size_t columns;
    bool spilled;
};

struct stage {
    bool memory;
    struct conn *conn; /* NULL until something spills or has to be settled */
    uint32_t tensors, objects, warnings;
    uint64_t print; /* of all rows, in whatever order they came; see stage_print */
    struct held files, rows, places, hidden, object, warning, origin;
    struct keyset taken; /* places in memory */
    struct buf text;     /* scratch */
    struct buf dirs;     /* of the last place in tree/ */
    uint64_t ndirs;      /* in tree/, or some more */
};

/* The private database is there: st->conn, with its tables. */
int stage_database(struct stage *st, struct err *e);

/* What fits into `max` bytes stays in memory. */
void held_init(struct held *h, const char *insert, size_t columns, size_t max);
void held_release(struct held *h);

/* One row more, of which the first cell is a blob; to the table with all others if need be. */
int held_add(struct stage *st, struct held *h, const struct cell *row, struct err *e);

/* Moves what is in memory to the table, in the order in which it came. */
int held_spill(struct stage *st, struct held *h, struct err *e);

/* By their first cells, those in memory; of those in the table it is said in the `sql` below. */
void held_sort(struct held *h);

/* Goes through the rows. `struct held_walk w = {0};` */
struct held_walk {
    struct held *held;
    struct query q;
    int more; /* what the step to the first row of the table gave */
    size_t next;
};

/* `sql` selects the columns from the table; those in memory come as they lie there. */
int held_begin(struct stage *st, struct held *h, const char *sql, struct held_walk *out,
               struct err *e);
/* 1: the cells of the next one, which stay valid until the one after; 0: no more. */
int held_next(struct held_walk *w, struct cell *cell, struct err *e);
void held_end(struct held_walk *w); /* for CLEANUP() */

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
    STAGED_FILE_DIR, /* 1: a directory, which is watched */
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
    STAGED_WRAPPER, /* with WRAPPER_MODULES */
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
    STAGED_RULE,
    STAGED_FIRST_FILE, /* NULL: none */
    STAGED_PIECES,
    STAGED_COLUMNS
};

#define STAGED_LIST                                                                    \
    "name, key, raw_key, part, wrapper, dtype, stored, shape, role, bytes, chunks, "   \
    "fault, codec_key, attributes, identity, mode, uid, gid, mtime, single_file, "     \
    "rule, first_file, pieces"

/* Tensors in byte order of their names, of one name in the order in which they came. */
int stage_order(struct stage *st, struct held_walk *out, struct err *e);

/* Names that are hidden, each once, with whether it is a part. */
int stage_each_hidden(struct stage *st,
                      int (*fn)(void *user, const struct cell *row, struct err *e),
                      void *user, struct err *e);

/* Objects in byte order of their keys; warnings in the order in which they came. */
int stage_each_object(struct stage *st,
                      int (*fn)(void *user, const struct cell *row, struct err *e),
                      void *user, struct err *e);
int stage_each_warning(struct stage *st,
                       int (*fn)(void *user, const struct cell *row, struct err *e),
                       void *user, struct err *e);
int stage_each_origin(struct stage *st,
                      int (*fn)(void *user, const struct cell *row, struct err *e),
                      void *user, struct err *e);

/*
 * All that the scan found, as one number, the same for the same; 0: it failed. Of directories
 * it has the paths alone: what comes to them and is no part of the checkpoint changes nothing.
 */
uint64_t stage_print(const struct stage *st, const struct stage_result *r);

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
