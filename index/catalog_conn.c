/* SPDX-License-Identifier: MIT */
/* index/catalog_conn.c - statements on a connection, rows with sums, sqlite's errors. */
#include "index/catalog_conn.h"

#include "base/err.h"
#include "base/interrupt.h"
#include "index/catalog_open.h"

#include <sqlite3.h>
#include <xxhash.h>

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LOOK_EVERY = 1024 };

static int errno_of(struct sqlite3 *db)
{
    int code = sqlite3_extended_errcode(db), system = sqlite3_system_errno(db);

    switch (code & 0xff) {
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
    case SQLITE_FORMAT:
    case SQLITE_MISMATCH:
    case SQLITE_CONSTRAINT: /* we never insert twice what must be there once */
    case SQLITE_SCHEMA:
    case SQLITE_ERROR: /* our statements are right: the tables are not */
        return EBADMSG;
    case SQLITE_FULL:
        return ENOSPC;
    case SQLITE_NOMEM:
        return ENOMEM;
    case SQLITE_TOOBIG:
        return EFBIG;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        return EBUSY;
    case SQLITE_READONLY:
        return code == SQLITE_READONLY_DBMOVED ? ESTALE : EROFS;
    case SQLITE_PERM:
    case SQLITE_AUTH:
        return EACCES;
    case SQLITE_CANTOPEN:
        return system ? system : EACCES;
    default:
        return system ? system : EIO;
    }
}

int conn_err(struct conn *n, const char *doing, struct err *e)
{
    int code = errno_of(n->db);

    if (code == ENOMEM)
        return err_nomem(e);
    if (code == EBADMSG && n->catalog)
        catalog_mark_damaged(n->catalog);
    err_set(e, code, "%s: %s", doing, sqlite3_errmsg(n->db));
    if (!n->catalog) {
        err_wrap(e, "temporary index");
        err_hint(
            e,
            "a large one needs space for temporary files: SQLITE_TMPDIR=DIR says where");
        return -code;
    }
    err_wrap(e, "index %s", catalog_path(n->catalog));
    if (code == ENOSPC || code == EROFS || code == EACCES)
        err_hint(e, "free space, choose another cache_dir=, or use index=memory");
    return -code;
}

int conn_damaged(struct conn *n, struct err *e, const char *fmt, ...)
{
    char what[256];
    va_list args;

    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    if (!n->catalog)
        return err_set(e, EBADMSG, "temporary index: %s", what);
    catalog_mark_damaged(n->catalog);
    err_set(e, EBADMSG, "index %s cannot be used: %s", catalog_path(n->catalog), what);
    return err_hint(e, "it is made anew by itself");
}

int conn_missing(struct conn *n, int64_t checkpoint, const char *what, struct err *e)
{
    static const char sql[] = "SELECT 1 FROM checkpoint WHERE id = ?1";
    CLEANUP(query_end) struct query q = {0};
    int rc = conn_find(n, sql, &checkpoint, 1, &q, e);

    if (rc < 0)
        return rc;
    if (rc == 0)
        return err_set(e, ESTALE, "the checkpoint was scanned anew");
    return err_set(e, ENOENT, "no such %s", what);
}

int conn_exec(struct conn *n, const char *sql, struct err *e)
{
    if (sqlite3_exec(n->db, sql, NULL, NULL, NULL) != SQLITE_OK)
        return conn_err(n, sql, e);
    return 0;
}

/* A statement without parameters and results that is kept. */
static int run_kept(struct conn *n, const char *sql, struct err *e)
{
    CLEANUP(query_end) struct query q = {0};
    int rc = query_begin(n, sql, &q, e);

    if (rc == 0 && sqlite3_step(q.stmt) != SQLITE_DONE)
        rc = conn_err(n, sql, e);
    return rc;
}

int conn_begin(struct conn *n, bool write, struct err *e)
{
    static const char reads[] = "BEGIN", writes[] = "BEGIN IMMEDIATE";

    /* In memory the mutex keeps writers out, and the caller's caller may be reading. */
    if (!write && n->memory)
        return 0;
    return run_kept(n, write ? writes : reads, e);
}

int conn_commit(struct conn *n, struct err *e)
{
    static const char sql[] = "COMMIT";

    return run_kept(n, sql, e);
}

void conn_rollback(struct conn *n)
{
    if (!sqlite3_get_autocommit(n->db))
        sqlite3_exec(n->db, "ROLLBACK", NULL, NULL, NULL);
}

int64_t conn_changes(const struct conn *n)
{
    return sqlite3_changes(n->db);
}

void conn_close(struct conn *n)
{
    if (!n)
        return;
    for (size_t i = 0; i < ARRAY_SIZE(n->stmt); i++)
        sqlite3_finalize(n->stmt[i].stmt);
    sqlite3_close(n->db);
    free(n);
}

struct cell cell_text(const char *s)
{
    return s ? cell_blob(s, strlen(s)) : (struct cell){.kind = CELL_NULL};
}

/* The slot of a statement, or a free one; NULL when all are taken by others. */
static struct conn_stmt *find_slot(struct conn *n, const char *sql)
{
    for (size_t i = 0; i < ARRAY_SIZE(n->stmt); i++)
        if (n->stmt[i].sql == sql || !n->stmt[i].sql)
            return &n->stmt[i];
    return NULL;
}

int query_begin(struct conn *n, const char *sql, struct query *q, struct err *e)
{
    struct conn_stmt *slot = find_slot(n, sql);
    bool keep = slot && !slot->sql;

    *q = (struct query){.conn = n};
    /* A callback may run the statement that is calling it (index=memory). */
    if (slot && slot->sql && !sqlite3_stmt_busy(slot->stmt)) {
        q->stmt = slot->stmt;
        q->cached = true;
        return 0;
    }
    if (sqlite3_prepare_v3(n->db, sql, -1, keep ? SQLITE_PREPARE_PERSISTENT : 0,
                           &q->stmt, NULL) != SQLITE_OK)
        return conn_err(n, "prepare a statement", e);
    if (keep) {
        *slot = (struct conn_stmt){sql, q->stmt};
        q->cached = true;
    }
    return 0;
}

void query_end(struct query *q)
{
    if (!q->stmt)
        return;
    if (q->cached) {
        sqlite3_reset(q->stmt);
        sqlite3_clear_bindings(q->stmt);
    } else {
        sqlite3_finalize(q->stmt);
    }
    q->stmt = NULL;
}

static int bind_one(struct sqlite3_stmt *stmt, int at, const struct cell *c)
{
    switch (c->kind) {
    case CELL_INT:
        return sqlite3_bind_int64(stmt, at, (sqlite3_int64)c->num);
    case CELL_BLOB:
        return sqlite3_bind_blob64(stmt, at, c->data, c->len, SQLITE_STATIC);
    case CELL_NULL:
        break;
    }
    return sqlite3_bind_null(stmt, at);
}

int query_bind(struct query *q, const struct cell *cell, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++)
        if (bind_one(q->stmt, (int)i + 1, &cell[i]) != SQLITE_OK)
            return conn_err(q->conn, "bind a value", e);
    return 0;
}

int query_bind_ints(struct query *q, const int64_t *v, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++)
        if (sqlite3_bind_int64(q->stmt, (int)i + 1, v[i]) != SQLITE_OK)
            return conn_err(q->conn, "bind a value", e);
    return 0;
}

int query_step(struct query *q, struct err *e)
{
    if (++q->conn->steps % LOOK_EVERY == 0)
        TRY(interrupt_check_late(e));
    switch (sqlite3_step(q->stmt)) {
    case SQLITE_ROW:
        return 1;
    case SQLITE_DONE:
        return 0;
    default:
        return conn_err(q->conn, "run a statement", e);
    }
}

int query_row(struct query *q, struct cell *cell, size_t n, struct err *e)
{
    assert((int)n <= sqlite3_column_count(q->stmt));
    for (size_t i = 0; i < n; i++) {
        struct cell *c = &cell[i];

        *c = (struct cell){.kind = CELL_NULL};
        switch (sqlite3_column_type(q->stmt, (int)i)) {
        case SQLITE_NULL:
            break;
        case SQLITE_INTEGER:
            *c = cell_int((uint64_t)sqlite3_column_int64(q->stmt, (int)i));
            break;
        case SQLITE_BLOB: {
            const void *data = sqlite3_column_blob(q->stmt, (int)i);
            size_t len = (size_t)sqlite3_column_bytes(q->stmt, (int)i);

            if (!data && sqlite3_errcode(q->conn->db) == SQLITE_NOMEM)
                return err_nomem(e);
            *c = cell_blob(data, len);
            break;
        }
        default:
            return conn_damaged(q->conn, e, "a column has the wrong type");
        }
    }
    return 0;
}

int query_row_summed(struct query *q, struct cell *cell, size_t n, struct err *e)
{
    TRY(query_row(q, cell, n, e));
    if ((uint64_t)sqlite3_column_int64(q->stmt, (int)n) != cells_sum(cell, n))
        return conn_damaged(q->conn, e, "the sum of a row is wrong");
    return 0;
}

int query_write(struct query *q, const struct cell *cell, size_t n, struct err *e)
{
    int rc = query_bind(q, cell, n, e);

    if (rc == 0)
        rc = query_step(q, e);
    sqlite3_reset(q->stmt);
    return rc;
}

int conn_find(struct conn *n, const char *sql, const int64_t *v, size_t count,
              struct query *q, struct err *e)
{
    int rc = query_begin(n, sql, q, e);

    if (rc == 0)
        rc = query_bind_ints(q, v, count, e);
    return rc == 0 ? query_step(q, e) : rc;
}

int conn_write_ints(struct conn *n, const char *sql, const int64_t *v, size_t count,
                    struct err *e)
{
    CLEANUP(query_end) struct query q = {0};

    return conn_find(n, sql, v, count, &q, e);
}

/*
 * sqlite has no sums of its own: a bit that flips on the disk inside a blob would become a
 * wrong offset. The kind takes part, so that NULL, 0 and "" differ.
 */
uint64_t cells_sum(const struct cell *cell, size_t n)
{
    uint64_t sum = n;

    for (size_t i = 0; i < n; i++) {
        const struct cell *c = &cell[i];

        sum = sum * 31 + c->kind;
        if (c->kind == CELL_INT)
            sum = XXH3_64bits_withSeed(&c->num, sizeof c->num, sum);
        else if (c->kind == CELL_BLOB)
            sum = XXH3_64bits_withSeed(c->data, c->len, sum);
    }
    return sum;
}
