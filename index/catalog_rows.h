/* SPDX-License-Identifier: MIT */
/* index/catalog_rows.h - rows that are kept in memory, to be sorted. */
#ifndef UFS_INDEX_CATALOG_ROWS_H
#define UFS_INDEX_CATALOG_ROWS_H

#include "base/buf.h"
#include "index/catalog_conn.h"

/* `struct rows r = {.data.max = CEILING};` has none. */
struct rows {
    struct buf data; /* cells */
    struct row_ref {
        uint64_t prefix; /* of what differs in the first cell, while they are sorted */
        uint64_t at;     /* in data; grows from row to row */
    } * row;             /* malloc */
    size_t count, cap;
};

void rows_release(struct rows *r);
void rows_clear(struct rows *r); /* keeps the memory */

/*
 * `n` cells, of which the first is a blob. 1: added; 0: it would pass the ceiling, and
 * nothing is added; -ENOMEM.
 */
int rows_add(struct rows *r, const struct cell *cell, size_t n);

/* By the bytes of the first cell; where it is the same, in the order in which they came. */
void rows_sort(struct rows *r);

/* The cells of row i, as many as were added; blobs belong to r, until the next add. */
void rows_get(const struct rows *r, size_t i, struct cell *cell, size_t n);

/* In the columns of wrappers: see struct tensor_info.modules. Keys are far shorter. */
enum { WRAPPER_MODULES = 1 << 30 };

#endif
