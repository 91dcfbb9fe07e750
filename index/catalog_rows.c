/* SPDX-License-Identifier: MIT */
/* index/catalog_rows.c - rows that are kept in memory, to be sorted. */
#include "index/catalog_rows.h"

#include "base/endian.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

enum {
    FIRST_ROWS = 256,
    VARINT_MAX = 10, /* bytes */
};

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

static char *put_varint(char *p, uint64_t v)
{
    for (; v >= 0x80; v >>= 7)
        *p++ = (char)(v | 0x80);
    *p++ = (char)v;
    return p;
}

/* The kind, then a number or a length and bytes. */
static char *put_cell(char *p, const struct cell *c)
{
    *p++ = (char)c->kind;
    if (c->kind == CELL_INT)
        return put_varint(p, c->num);
    if (c->kind == CELL_NULL)
        return p;
    p = put_varint(p, c->len);
    if (c->len > 0)
        memcpy(p, c->data, c->len);
    return p + c->len;
}

static size_t most_bytes(const struct cell *cell, size_t n)
{
    size_t most = 0;

    for (size_t i = 0; i < n; i++)
        most += 1 + VARINT_MAX + (cell[i].kind == CELL_BLOB ? cell[i].len : 0);
    return most;
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
    char *p;

    assert(n > 0 && cell[0].kind == CELL_BLOB);
    if (make_room(r) < 0)
        return -ENOMEM;
    p = buf_grow(&r->data, most_bytes(cell, n));
    if (!p) {
        bool full = r->data.failed == EFBIG;

        r->data.failed = 0; /* what was added before is whole */
        return full ? 0 : -ENOMEM;
    }
    for (size_t i = 0; i < n; i++)
        p = put_cell(p, &cell[i]);
    r->data.len = (size_t)(p - r->data.data);
    r->row[r->count++] = (struct row_ref){.at = at};
    return 1;
}

static uint64_t get_number(const struct rows *r, size_t *at)
{
    uint64_t n = (unsigned char)r->data.data[*at];
    bool ok;

    if (n < 0x80) {
        ++*at;
        return n;
    }
    ok = varint_get((const unsigned char *)r->data.data, r->data.len, at, &n);

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

static struct cell first_cell(const struct rows *r, size_t i)
{
    size_t at = r->row[i].at;

    return get_cell(r, &at);
}

/* How many bytes are the same at the beginning of all. */
static size_t same_bytes(const struct rows *r)
{
    const struct cell first = first_cell(r, 0);
    size_t same = first.len;

    for (size_t i = 1; same > 0 && i < r->count; i++) {
        const struct cell key = first_cell(r, i);
        size_t n = 0;

        while (n < MIN(same, key.len) && key.data[n] == first.data[n])
            n++;
        same = n;
    }
    return same;
}

/* Eight bytes of each, behind those that all begin with: few comparisons go further. */
static void set_prefixes(struct rows *r)
{
    size_t skip = same_bytes(r);

    for (size_t i = 0; i < r->count; i++) {
        const struct cell key = first_cell(r, i);
        unsigned char next[8] = {0};

        memcpy(next, key.data + skip, MIN(key.len - skip, sizeof next));
        r->row[i].prefix = get_be64(next);
    }
}

static bool is_sorted(struct rows *r)
{
    size_t i = 1;

    while (i < r->count && by_first(&r->row[i - 1], &r->row[i], r) < 0)
        i++;
    return i >= r->count;
}

void rows_sort(struct rows *r)
{
    if (r->count < 2)
        return;
    set_prefixes(r);
    if (!is_sorted(r))
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
