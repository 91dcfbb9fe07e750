/* SPDX-License-Identifier: MIT */
/* index/catalog_conn.h - connections to an index, statements on them, rows with sums. */
#ifndef UFS_INDEX_CATALOG_CONN_H
#define UFS_INDEX_CATALOG_CONN_H

#include "base/base.h"
#include "base/buf.h"

struct catalog;
struct err;
struct sqlite3;
struct sqlite3_stmt;

/* One sqlite connection; used by one thread at a time. */
struct conn {
    struct catalog *catalog; /* NULL: a scan's private database */
    struct sqlite3 *db;
    struct conn *next;   /* in the pool */
    uint64_t generation; /* of the file that it is connected to */
    bool memory;         /* it is the index, and not connected to a file */
    unsigned depth;      /* in memory: how often it is taken */
    unsigned steps;
    struct conn_stmt {
        const char *sql; /* compared by address */
        struct sqlite3_stmt *stmt;
    } stmt[48]; /* more than there are statements */
};

/*
 * A connection out of the pool, opened when there is none; goes back with conn_put. When
 * the index was found damaged, or somebody deleted it, it is made anew first. With
 * `dedicated` it is a new one with a large cache for a commit, and closed by conn_put.
 */
int conn_take(struct catalog *c, bool dedicated, struct conn **out, struct err *e);
void conn_put(struct conn *n);   /* rolls back what is still open; NULL is fine */
void conn_putp(struct conn **n); /* for CLEANUP() */

/* A database of its own for one scan, in memory or in a deleted temporary file. */
int conn_open_private(bool memory, struct conn **out, struct err *e);
void conn_close(struct conn *n);

/* Does a write wait for another writer to end (as it does at first), or fail at once? */
void conn_set_patience(struct conn *n, bool patient);

/* Statements without parameters and results. */
int conn_exec(struct conn *n, const char *sql, struct err *e);
int conn_begin(struct conn *n, bool write, struct err *e);
int conn_commit(struct conn *n, struct err *e);
void conn_rollback(struct conn *n);
int64_t conn_changes(const struct conn *n);

/* A row of this checkpoint is not there: -ENOENT, or -ESTALE when all of it is gone. */
int conn_missing(struct conn *n, int64_t checkpoint, const char *what, struct err *e);

/* What sqlite says went wrong, as an errno: damage is -EBADMSG and marks the index. */
int conn_err(struct conn *n, const char *doing, struct err *e);

/* The index holds what it cannot: marks it, so that the next call makes it anew. */
int conn_damaged(struct conn *n, struct err *e, const char *fmt, ...) PRINTF(3, 4);

/*
 * A value of a row. Blobs that were read belong to sqlite, until the next step. Numbers
 * are stored as two's complement, so that all 64 bits come back.
 */
struct cell {
    enum cell_kind { CELL_NULL, CELL_INT, CELL_BLOB } kind;
    uint64_t num;
    const char *data;
    size_t len;
};

static inline struct cell cell_int(uint64_t v)
{
    return (struct cell){.kind = CELL_INT, .num = v};
}

static inline struct cell cell_blob(const void *data, size_t len)
{
    return (struct cell){
        .kind = CELL_BLOB, .data = data ? (const char *)data : "", .len = len};
}

struct cell cell_text(const char *s); /* NULL gives a NULL */

/* A statement that is being run. `struct query q = {0};` */
struct query {
    struct conn *conn;
    struct sqlite3_stmt *stmt;
    bool cached;
};

/* `sql` is a constant: its address is the name under which the statement is kept. */
int query_begin(struct conn *n, const char *sql, struct query *q, struct err *e);
void query_end(struct query *q); /* for CLEANUP() */

/* Binds ?1, ?2, ...; blobs are borrowed until query_end or the next bind. */
int query_bind(struct query *q, const struct cell *cell, size_t n, struct err *e);
int query_bind_ints(struct query *q, const int64_t *v, size_t n, struct err *e);

/*
 * 1: there is a row; 0: no more; or an error. One of many is -EINTR once nobody wants what
 * comes of them (interrupt_late).
 */
int query_step(struct query *q, struct err *e);

/* The row's columns; -EBADMSG when one is neither integer, blob nor NULL. */
int query_row(struct query *q, struct cell *cell, size_t n, struct err *e);

/* The same when a sum of the n columns stands behind them, and it has to be right. */
int query_row_summed(struct query *q, struct cell *cell, size_t n, struct err *e);

/* Runs a statement that writes: bind, one step, reset. */
int query_write(struct query *q, const struct cell *cell, size_t n, struct err *e);

/* begin, bind ints, write, end. */
int conn_write_ints(struct conn *n, const char *sql, const int64_t *v, size_t count,
                    struct err *e);

/* Begins, binds integers and steps; 1, 0 or an error. */
int conn_find(struct conn *n, const char *sql, const int64_t *v, size_t count,
              struct query *q, struct err *e);

/* The sum of cells: what query_row_summed expects in the last column. */
uint64_t cells_sum(const struct cell *cell, size_t n);

/* The id of row `number` of a checkpoint (or block `number` of a view). */
static inline int64_t row_id(int64_t owner, uint32_t number)
{
    return (int64_t)((uint64_t)owner << 32 | number);
}

static inline int64_t row_id_last(int64_t owner)
{
    return row_id(owner, UINT32_MAX);
}

/* Ids that a caller hands in: what is out of range cannot be in the index. */
static inline bool owner_is_valid(int64_t owner)
{
    return owner > 0 && owner <= INT32_MAX;
}

#endif
