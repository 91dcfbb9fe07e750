/* SPDX-License-Identifier: MIT */
/* index/catalog_held.c - rows of a scan: in memory, or in its private temporary database. */
#include "index/catalog_stage.h"

#include "base/err.h"

#include <errno.h>

/* Keys and names are blobs: they compare as bytes. */
static const char tables[] =
    "CREATE TABLE file (path BLOB, number INTEGER PRIMARY KEY, dev, ino, size, mtime,"
    " ctime, mode, dir);"
    "CREATE TABLE hidden (name BLOB PRIMARY KEY, part) WITHOUT ROWID;"
    "CREATE TABLE object (seq INTEGER PRIMARY KEY, key BLOB, json BLOB);"
    "CREATE TABLE warning (seq INTEGER PRIMARY KEY, code BLOB, text BLOB);"
    "CREATE TABLE origin (seq INTEGER PRIMARY KEY, text BLOB, passed);"
    "CREATE TABLE tensor (seq INTEGER PRIMARY KEY, " STAGED_LIST ");"
    "CREATE TABLE tree (path BLOB PRIMARY KEY, ord) WITHOUT ROWID;"
    "BEGIN";

int stage_database(struct stage *st, struct err *e)
{
    struct conn *n = NULL;
    int rc;

    if (st->conn)
        return 0;
    rc = conn_open_private(st->memory, &n, e);
    if (rc == 0)
        rc = conn_exec(n, tables, e);
    if (rc < 0) {
        conn_close(n);
        return err_wrap(e, "temporary index");
    }
    st->conn = n;
    return 0;
}

int stage_put(struct stage *st, const char *sql, const struct cell *cell, size_t n,
              struct err *e)
{
    CLEANUP(query_end) struct query q = {0};
    int rc = query_begin(st->conn, sql, &q, e);

    if (rc == 0)
        rc = query_write(&q, cell, n, e);
    return rc < 0 ? err_wrap(e, "temporary index") : 0;
}

void held_init(struct held *h, const char *insert, size_t columns, size_t max)
{
    *h = (struct held){.insert = insert, .columns = columns, .rows.data.max = max};
}

void held_release(struct held *h)
{
    rows_release(&h->rows);
}

int held_spill(struct stage *st, struct held *h, struct err *e)
{
    struct cell row[STAGED_COLUMNS];
    int rc = stage_database(st, e);

    for (size_t i = 0; rc == 0 && i < h->rows.count; i++) {
        rows_get(&h->rows, i, row, h->columns);
        rc = stage_put(st, h->insert, row, h->columns, e);
    }
    rows_release(&h->rows);
    h->spilled = true;
    return rc;
}

int held_add(struct stage *st, struct held *h, const struct cell *row, struct err *e)
{
    int rc = 0;

    if (!h->spilled) {
        rc = rows_add(&h->rows, row, h->columns);
        if (rc == 1)
            return 0;
        rc = rc < 0 ? err_nomem(e) : held_spill(st, h, e);
    }
    return rc == 0 ? stage_put(st, h->insert, row, h->columns, e) : rc;
}

void held_sort(struct held *h)
{
    if (!h->spilled)
        rows_sort(&h->rows);
}

int held_begin(struct stage *st, struct held *h, const char *sql, struct held_walk *out,
               struct err *e)
{
    int rc = 0;

    *out = (struct held_walk){.held = h};
    if (h->spilled)
        rc = query_begin(st->conn, sql, &out->q, e);
    if (h->spilled && rc == 0)
        out->more = rc = query_step(&out->q, e); /* sorts them */
    return MIN(rc, 0);
}

int held_next(struct held_walk *w, struct cell *cell, struct err *e)
{
    size_t i = w->next++;
    int rc;

    if (!w->held->spilled) {
        if (i == w->held->rows.count)
            return 0;
        rows_get(&w->held->rows, i, cell, w->held->columns);
        return 1;
    }
    rc = i == 0 ? w->more : query_step(&w->q, e);
    if (rc == 1)
        TRY(query_row(&w->q, cell, w->held->columns, e));
    return rc;
}

void held_end(struct held_walk *w)
{
    query_end(&w->q);
}
