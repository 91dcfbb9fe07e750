/* SPDX-License-Identifier: MIT */
/* index/catalog_rows.c - rows that are kept in memory, to be sorted. */
#include "index/catalog_rows.h"

#include "base/endian.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

enum { FIRST_ROWS = 256 };

void rows_release(struct rows *r)
{
    buf_release(&r->data);
    free(r->row);
    r->row = NULL;
    r->count = r->cap = 0;
}

void rows_clear(struct rows *r)
{
    buf_clear(&r->data);
    r->count = 0;
}

static uint64_t prefix_of(const struct cell *key)
{
    unsigned char first[8] = {0};

    memcpy(first, key->data, MIN(key->len, sizeof first));
    return get_be64(first);
}

/* The kind, then a number or a length and bytes. */
static void add_cell(struct buf *b, const struct cell *c)
{
    buf_addc(b, (char)c->kind);
    if (c->kind == CELL_INT) {
        buf_add_varint(b, c->num);
    } else if (c->kind == CELL_BLOB) {
        buf_add_varint(b, c->len);
        buf_add(b, c->data, c->len);
    }
}

static int make_room(struct rows *r)
{
    size_t cap = r->cap ? r->cap * 2 : FIRST_ROWS;
    struct row_ref *grown;

    if (r->count < r->cap)
        return 0;
    grown = reallocarray(r->row, cap, sizeof *grown);
    if (!grown)
        return -ENOMEM;
    r->row = grown;
    r->cap = cap;
    return 0;
}

int rows_add(struct rows *r, const struct cell *cell, size_t n)
{
    size_t at = r->data.len;

    assert(n > 0 && cell[0].kind == CELL_BLOB);
    if (make_room(r) < 0)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        add_cell(&r->data, &cell[i]);
    if (buf_failed(&r->data)) {
        bool full = r->data.failed == EFBIG;

        r->data.failed = 0; /* what was added before is whole */
        r->data.len = at;
        return full ? 0 : -ENOMEM;
    }
    r->row[r->count++] = (struct row_ref){prefix_of(&cell[0]), at};
    return 1;
}

static uint64_t get_number(const struct rows *r, size_t *at)
{
    uint64_t n = 0;
    bool ok = varint_get((const unsigned char *)r->data.data, r->data.len, at, &n);

    assert(ok);
    (void)ok;
    return n;
}

static struct cell get_cell(const struct rows *r, size_t *at)
{
    struct cell c = {.kind = (enum cell_kind)r->data.data[(*at)++]};

    if (c.kind == CELL_INT) {
        c.num = get_number(r, at);
    } else if (c.kind == CELL_BLOB) {
        c.len = (size_t)get_number(r, at);
        c.data = r->data.data + *at;
        *at += c.len;
    }
    return c;
}

static int by_first(const void *a, const void *b, void *user)
{
    const struct row_ref *x = a, *y = b;
    size_t x_at = x->at, y_at = y->at;
    struct cell m, n;
    int order;

    if (x->prefix != y->prefix)
        return x->prefix < y->prefix ? -1 : 1;
    m = get_cell(user, &x_at);
    n = get_cell(user, &y_at);
    order = memcmp(m.data, n.data, MIN(m.len, n.len));
    if (order == 0)
        order = (m.len > n.len) - (m.len < n.len);
    return order ? order : (x->at > y->at) - (x->at < y->at);
}

void rows_sort(struct rows *r)
{
    if (r->count > 1)
        qsort_r(r->row, r->count, sizeof *r->row, by_first, r);
}

void rows_get(const struct rows *r, size_t i, struct cell *cell, size_t n)
{
    size_t at;

    assert(i < r->count);
    at = r->row[i].at;
    for (size_t k = 0; k < n; k++)
        cell[k] = get_cell(r, &at);
}
