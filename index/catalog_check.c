/* SPDX-License-Identifier: MIT */
/* index/catalog_check.c - what a file has to be before a connection to it is used. */
#include "index/catalog_open.h"

#include "base/buf.h"
#include "base/err.h"
#include "index/catalog_conn.h"
#include "index/catalog_rows.h"
#include "index/names.h"
#include "index/readers.h"
#include "index/schema.h"

#include <sqlite3.h>

#include <stdio.h>
#include <string.h>

enum {
    BUSY_MS = 30000, /* the longest commit of another process */
    QUICK_CHECK_MAX =
        2 << 20,            /* bytes: checked in full in a few ms, as mounting has 50 */
    CACHE_KIB = 2048,       /* of a pooled connection */
    SCAN_CACHE_KIB = 16384, /* of a scan's own database */
    WAL_KEPT = 4 << 20,     /* bytes of journal left after a commit */
    NEW_MAX = 1 << 16,      /* a file without tables is not larger */
};

/* What a statement on a hostile file can cost at most, and what it cannot do. */
static void set_limits(struct sqlite3 *db, bool hostile)
{
    static const struct {
        int id, value;
    } limits[] = {
        {SQLITE_LIMIT_LENGTH, 768 << 20}, /* 10 M chunks in one blob */
        {SQLITE_LIMIT_SQL_LENGTH, 1 << 16},      {SQLITE_LIMIT_COLUMN, 100},
        {SQLITE_LIMIT_EXPR_DEPTH, 50},           {SQLITE_LIMIT_COMPOUND_SELECT, 4},
        {SQLITE_LIMIT_FUNCTION_ARG, 8},          {SQLITE_LIMIT_ATTACHED, 0},
        {SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100}, {SQLITE_LIMIT_VARIABLE_NUMBER, 100},
        {SQLITE_LIMIT_TRIGGER_DEPTH, 1},         {SQLITE_LIMIT_WORKER_THREADS, 0},
    };

    for (size_t i = 0; i < ARRAY_SIZE(limits); i++)
        sqlite3_limit(db, limits[i].id, limits[i].value);
    /* A scan's own file has no journal, which this would forbid. */
    sqlite3_db_config(db, SQLITE_DBCONFIG_DEFENSIVE, hostile, (int *)NULL);
    sqlite3_db_config(db, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, (int *)NULL);
    sqlite3_db_config(db, SQLITE_DBCONFIG_ENABLE_TRIGGER, 0, (int *)NULL);
    sqlite3_db_config(db, SQLITE_DBCONFIG_ENABLE_VIEW, 0, (int *)NULL);
    sqlite3_db_config(db, SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0, (int *)NULL);
    sqlite3_extended_result_codes(db, 1);
    sqlite3_busy_timeout(db, BUSY_MS);
}

void conn_set_patience(struct conn *n, bool patient)
{
    sqlite3_busy_timeout(n->db, patient ? BUSY_MS : 0);
}

/* own_name(name, wrapper): the name as a view with names of the module itself has it. */
static void own_name(sqlite3_context *x, int count, sqlite3_value **v)
{
    CLEANUP(buf_release) struct buf own = {0};
    const char *name = sqlite3_value_blob(v[0]);
    size_t len = (size_t)sqlite3_value_bytes(v[0]);

    if (count != 2 || !name || !(sqlite3_value_int64(v[1]) & WRAPPER_MODULES))
        sqlite3_result_value(x, v[0]);
    else if (name_without_modules(name, len, &own) < 0)
        sqlite3_result_error_nomem(x);
    else
        sqlite3_result_blob64(x, own.data, own.len, SQLITE_TRANSIENT);
}

int conn_open(struct catalog *c, const char *path, struct conn **out, struct err *e)
{
    int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, keep = 1;
    struct conn *n = calloc(1, sizeof *n);
    int rc = 0;

    if (!n)
        return err_nomem(e);
    n->catalog = c;
    if (path[0] == '\0' || path[0] == ':')
        flags |= SQLITE_OPEN_CREATE;
    if (sqlite3_open_v2(path, &n->db, flags, NULL) != SQLITE_OK) {
        rc = n->db ? conn_err(n, "open", e) : err_nomem(e);
        conn_close(n);
        return rc;
    }
    set_limits(n->db, c != NULL);
    if (sqlite3_create_function(n->db, "own_name", 2,
                                SQLITE_UTF8 | SQLITE_DETERMINISTIC, NULL, own_name,
                                NULL, NULL) != SQLITE_OK) {
        conn_close(n);
        return err_nomem(e);
    }
    /*
     * sqlite deletes its journal by name when the last connection goes: by then another
     * process may have made the index anew, and the name is that of a journal in use.
     */
    sqlite3_file_control(n->db, "main", SQLITE_FCNTL_PERSIST_WAL, &keep);
    *out = n;
    return 0;
}

int conn_set_int(struct conn *n, const char *pragma, int64_t value, struct err *e)
{
    char sql[100];

    snprintf(sql, sizeof sql, "PRAGMA %s=%" PRId64, pragma, value);
    return conn_exec(n, sql, e);
}

int conn_open_private(bool memory, struct conn **out, struct err *e)
{
    struct conn *n;
    int rc = conn_open(NULL, memory ? ":memory:" : "", &n, e);

    if (rc < 0)
        return rc;
    rc = conn_exec(n, "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF", e);
    if (rc == 0)
        rc = conn_set_int(n, "cache_size", -SCAN_CACHE_KIB, e);
    if (rc == 0 && memory)
        rc = conn_set_int(n, "temp_store", 2, e);
    if (rc < 0)
        conn_close(n);
    else
        *out = n;
    return rc;
}

/* A result of one integer. */
static int get_int(struct conn *n, const char *sql, int64_t *out, struct err *e)
{
    CLEANUP(query_end) struct query q = {0};
    struct cell cell;
    int rc = query_begin(n, sql, &q, e);

    if (rc == 0)
        rc = query_step(&q, e);
    if (rc == 1)
        rc = query_row(&q, &cell, 1, e);
    else if (rc == 0)
        rc = conn_damaged(n, e, "no answer to %s", sql);
    if (rc == 0)
        *out = (int64_t)cell.num;
    return rc;
}

/* Names and definitions of all that is in a database, and who it belongs to. */
static int describe(struct conn *n, struct buf *out, struct err *e)
{
    static const char sql[] =
        "SELECT CAST(type || ' ' || name || ' ' || tbl_name || ' '"
        " || ifnull(sql, '') AS BLOB)"
        " FROM sqlite_schema ORDER BY type, name";
    CLEANUP(query_end) struct query q = {0};
    int64_t application, version;
    struct cell cell;
    int rc = get_int(n, "PRAGMA application_id", &application, e);

    if (rc == 0)
        rc = get_int(n, "PRAGMA user_version", &version, e);
    if (rc == 0)
        rc = query_begin(n, sql, &q, e);
    if (rc < 0)
        return rc;
    buf_addf(out, "%" PRIx64 " %" PRId64 "\n", application, version);
    while ((rc = query_step(&q, e)) == 1 && (rc = query_row(&q, &cell, 1, e)) == 0) {
        buf_add(out, cell.data, cell.len);
        buf_addc(out, '\n');
    }
    if (rc == 0 && buf_failed(out))
        rc = err_nomem(e);
    return rc;
}

/*
 * Whose index it is, and what wrote it: other sources of this program may read the same
 * shards another way, so what they found is not believed.
 */
static int owner_of(const struct conn *n, struct buf *out, struct err *e)
{
    buf_addf(out, "%s\nunshardfs " UFS_VERSION " " UFS_READERS, n->catalog->identity);
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int put_schema(struct conn *n, struct err *e)
{
    static const char sql[] = "INSERT INTO source (identity) VALUES (?1)";
    CLEANUP(query_end) struct query q = {0};
    CLEANUP(buf_release) struct buf owner = {0};
    struct cell identity;
    int rc = owner_of(n, &owner, e);

    if (rc < 0 || (rc = conn_begin(n, true, e)) < 0)
        return rc;
    identity = cell_text(owner.data);
    rc = conn_exec(n, schema_sql, e);
    if (rc == 0)
        rc = query_begin(n, sql, &q, e);
    if (rc == 0)
        rc = query_write(&q, &identity, 1, e);
    return rc == 0 ? conn_commit(n, e) : rc;
}

/* A trigger or a column more could make our statements do what we do not mean. */
static int check_schema(struct conn *n, struct err *e)
{
    struct buf is = {.max = 1 << 20}, wanted = {.max = 1 << 20};
    struct conn *model = NULL;
    int rc = describe(n, &is, e);

    if (rc == 0)
        rc = conn_open(n->catalog, ":memory:", &model, e);
    if (rc == 0)
        rc = conn_exec(model, schema_sql, e);
    if (rc == 0)
        rc = describe(model, &wanted, e);
    if (rc == 0 && (is.len != wanted.len || memcmp(is.data, wanted.data, is.len) != 0))
        rc = conn_damaged(n, e, "it is of another version or another program");
    conn_close(model);
    buf_release(&is);
    buf_release(&wanted);
    return rc;
}

static int check_identity(struct conn *n, struct err *e)
{
    static const char sql[] = "SELECT identity FROM source";
    CLEANUP(query_end) struct query q = {0};
    CLEANUP(buf_release) struct buf want = {0};
    struct cell cell;
    int rc = owner_of(n, &want, e);

    if (rc == 0)
        rc = conn_find(n, sql, NULL, 0, &q, e);
    else
        return rc;
    if (rc == 1)
        rc = query_row(&q, &cell, 1, e);
    else if (rc == 0)
        return conn_damaged(n, e, "it does not name its source");
    if (rc == 0 && (cell.kind != CELL_BLOB || cell.len != want.len ||
                    memcmp(cell.data, want.data, cell.len) != 0))
        rc = conn_damaged(n, e, "it is of another source or another version");
    return rc;
}

/*
 * A full check of half a gigabyte takes seconds. Large files have their rows' sums, and
 * sqlite's checks of each page as it is read (cell_size_check).
 */
static int check_pages(struct conn *n, const struct stat *st, struct err *e)
{
    /* No argument: sqlite 3.46 takes that of a table-valued pragma for a table's name. */
    static const char ok[] =
        "SELECT quick_check = 'ok' FROM pragma_quick_check LIMIT 1";
    int64_t good = 0;
    int rc;

    if (st->st_size > QUICK_CHECK_MAX)
        return 0;
    rc = get_int(n, ok, &good, e);
    if (rc == 0 && good != 1)
        rc = conn_damaged(n, e, "sqlite's check finds faults");
    return rc;
}

int conn_configure(struct conn *n, struct err *e)
{
    int rc = conn_exec(n,
                       "PRAGMA cell_size_check=ON; PRAGMA mmap_size=0;"
                       "PRAGMA synchronous=NORMAL",
                       e);

    if (rc == 0)
        rc = conn_set_int(n, "cache_size", -CACHE_KIB, e);
    if (rc == 0 && n->memory)
        rc = conn_set_int(n, "temp_store", 2, e);
    if (rc == 0 && !n->memory)
        rc = conn_exec(n,
                       n->catalog->wal ? "PRAGMA journal_mode=WAL"
                                       : "PRAGMA journal_mode=TRUNCATE",
                       e);
    if (rc == 0)
        rc = conn_set_int(n, "journal_size_limit", WAL_KEPT, e);
    return rc;
}

/* Makes the tables in an empty file, checks what is there in others. */
int conn_ready(struct conn *n, const struct stat *st, struct err *e)
{
    int64_t tables;
    int rc = conn_configure(n, e);

    if (rc == 0)
        rc = get_int(n, "SELECT count(*) FROM sqlite_schema", &tables, e);
    if (rc == 0 && tables == 0 && (!st || st->st_size <= NEW_MAX)) {
        int64_t application;

        rc = get_int(n, "PRAGMA application_id", &application, e);
        if (rc == 0 && application == 0)
            return put_schema(n, e);
    }
    if (rc == 0)
        rc = check_schema(n, e);
    if (rc == 0)
        rc = check_identity(n, e);
    if (rc == 0 && st)
        rc = check_pages(n, st, e);
    return rc;
}
