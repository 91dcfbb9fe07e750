/* SPDX-License-Identifier: MIT */
/* index/catalog_tensor.h - rows of the table of tensors. */
#ifndef UFS_INDEX_CATALOG_TENSOR_H
#define UFS_INDEX_CATALOG_TENSOR_H

#include "index/catalog.h"
#include "index/catalog_conn.h"
#include "index/catalog_rows.h"

/* Columns in the order of TENSOR_LIST; the sum is of these. */
enum tensor_column {
    TENSOR_ID,
    TENSOR_KEY,
    TENSOR_NAME,
    TENSOR_NAME_NPY,
    TENSOR_PART,
    TENSOR_WRAPPER, /* with WRAPPER_MODULES */
    TENSOR_DTYPE,
    TENSOR_STORED,
    TENSOR_BITS,
    TENSOR_SHAPE,
    TENSOR_ROLE,
    TENSOR_BYTES,
    TENSOR_CHUNKS,
    TENSOR_FAULT,
    TENSOR_CODEC_KEY,
    TENSOR_ATTRIBUTES,
    TENSOR_INO,
    TENSOR_MODE,
    TENSOR_UID,
    TENSOR_GID,
    TENSOR_MTIME,
    TENSOR_SINGLE_FILE,
    TENSOR_RULE,
    TENSOR_FIRST_FILE,
    TENSOR_PIECES_SUM,
    TENSOR_COLUMNS
};

#define TENSOR_LIST(t)                                                                 \
    t "id, " t "key, " t "name, " t "name_npy, " t "part, " t "wrapper, " t            \
      "dtype, " t "stored, " t "bits, " t "shape, " t "role, " t "bytes, " t           \
      "chunks, " t "fault, " t "codec_key, " t "attributes, " t "ino, " t "mode, " t   \
      "uid, " t "gid, " t "mtime_ns, " t "single_file, " t "rule, " t "first_file, " t \
      "pieces_sum, " t "sum"

struct tensor_row {
    struct tensor_info info;
    int64_t checkpoint;
    int64_t single_file; /* or -1 */
};

/*
 * The row on which q stands (selected by TENSOR_LIST), checked; strings are copied to the
 * arena.
 */
int tensor_row_read(struct query *q, struct arena *a, struct tensor_row *out,
                    struct err *e);

/*
 * Calls fn for each row of a query that was begun and bound, until it returns non-zero.
 * The row is valid during the call.
 */
int tensor_each(struct query *q, int (*fn)(void *user, const struct tensor_row *t),
                void *user, struct err *e);

/* For who reads many rows: makes *a, and makes it anew when it holds many strings. */
int tensor_arena(struct arena **a, struct err *e);

/* catalog_tensor() on a connection, in the transaction that it may be in. */
int tensor_by_ord(struct conn *n, int64_t checkpoint, uint32_t ord, struct arena *a,
                  struct tensor_info *out, struct err *e);

/* What tensor_name holds of a name; its entries have so many bytes. */
enum { NAME_ENTRY = 12 };

uint64_t name_hash(int64_t checkpoint, const char *name, size_t len);

/* Deletes all rows of a checkpoint; within a transaction. */
int checkpoint_delete(struct conn *n, int64_t checkpoint, struct err *e);

/* The id of the checkpoint at a place, or 0. */
int checkpoint_at(struct conn *n, const char *path, const char *file, int64_t *id,
                  struct err *e);

/* Notes what its directory is known by; 0 also where no such checkpoint is there. */
int checkpoint_set_dir(struct conn *n, int64_t id, const struct file_id *dir,
                       struct err *e);

/* The columns of the table of checkpoints that the sum is of; then names_hash, dir_*. */
enum checkpoint_column {
    CP_ID,
    CP_PATH,
    CP_FILE,
    CP_FORMAT,
    CP_FRAMEWORK,
    CP_VERSION,
    CP_TOPOLOGY,
    CP_HEADER,
    CP_STEP,
    CP_ADAPTER,
    CP_ERROR,
    CP_METADATA_FILE,
    CP_MODE,
    CP_UID,
    CP_GID,
    CP_MTIME,
    CP_TENSORS,
    CP_CHUNKS,
    CP_BYTES,
    CP_FAULTS,
    CP_OBJECTS,
    CP_FILES,
    CP_ROLE_TENSORS, /* three */
    CP_ROLE_BYTES = CP_ROLE_TENSORS + 3,
    CP_PRINT = CP_ROLE_BYTES + 3,
    CP_COLUMNS,
    CP_NAMES_HASH = CP_COLUMNS + 1, /* behind the sum */
    CP_DIR,                         /* five */
    CP_ALL = CP_DIR + 5
};

#define CHECKPOINT_LIST                                                                  \
    "id, path, file, format, framework, version, topology, header, step, adapter, "      \
    "error, metadata_file, mode, uid, gid, mtime_ns, tensors, chunks, bytes, faults, "   \
    "objects, files, model_tensors, optimizer_tensors, other_tensors, model_bytes, "     \
    "optimizer_bytes, other_bytes, print, sum, names_hash, dir_dev, dir_ino, dir_size, " \
    "dir_mtime_ns, dir_ctime_ns"

/* A checkpoint by id, or -ESTALE. */
int checkpoint_read(struct conn *n, int64_t id, struct arena *a,
                    struct checkpoint_info *out, struct err *e);

#endif
