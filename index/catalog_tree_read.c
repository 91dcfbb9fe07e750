/* SPDX-License-Identifier: MIT */
/* index/catalog_tree_read.c - tree/: its directories are listed, and names found in them. */
#include "index/catalog.h"

#include "base/arena.h"
#include "base/err.h"
#include "index/catalog_tensor.h"
#include "index/names.h"

#include <errno.h>
#include <string.h>

/* A row: entries of a directory that follow each other. */
struct block {
    uint32_t pos, parent;
    const unsigned char *data; /* of the query */
    size_t len, at;            /* bytes, and those that were read */
};

/* An entry as a block has it; the name belongs to the query. */
struct entry {
    const char *name;
    size_t len;
    int64_t child;
};

/* --- rows --- */

/* The row on which q stands. */
static int read_block(struct query *q, struct block *out, struct err *e)
{
    struct cell cell[4];

    TRY(query_row_summed(q, cell, ARRAY_SIZE(cell), e));
    if (cell[1].num > UINT32_MAX || cell[2].num > INT32_MAX ||
        cell[3].kind != CELL_BLOB)
        return conn_damaged(q->conn, e, "a row of tree/ is impossible");
    *out = (struct block){.pos = (uint32_t)cell[1].num,
                          .parent = (uint32_t)cell[2].num,
                          .data = (const unsigned char *)cell[3].data,
                          .len = cell[3].len};
    return 0;
}

/* 1: the block's next entry; 0: there is no more. */
static int next_entry(struct conn *n, struct block *b, struct entry *out, struct err *e)
{
    uint64_t len, child;

    if (b->at == b->len)
        return 0;
    if (!varint_get(b->data, b->len, &b->at, &len) ||
        !varint_get(b->data, b->len, &b->at, &child) || len == 0 ||
        len > NAME_MAX_BYTES || len > b->len - b->at)
        return conn_damaged(n, e, "an entry of tree/ is malformed");
    *out = (struct entry){.name = (const char *)b->data + b->at,
                          .len = (size_t)len,
                          .child = unzigzag(child)};
    b->at += (size_t)len;
    if (memchr(out->name, '\0', out->len) || out->child > UINT32_MAX ||
        out->child < -INT32_MAX)
        return conn_damaged(n, e, "an entry of tree/ is impossible");
    return 1;
}

static struct tree_entry entry_at(const struct entry *x, uint32_t pos)
{
    struct tree_entry out = {.pos = pos};

    if (x->child < 0)
        out.dir = (uint32_t)-x->child;
    else
        out.tensor = (uint32_t)x->child;
    return out;
}

/* The block of a directory that has `pos`; behind its end the last one. -ENOENT. */
static int find_block(struct conn *n, int64_t checkpoint, uint32_t dir, uint32_t pos,
                      struct query *q, struct block *out, struct err *e)
{
    static const char sql[] = "SELECT dir, pos, parent, data, sum FROM tree"
                              " WHERE dir = ?1 AND pos <= ?2 ORDER BY pos DESC LIMIT 1";
    int rc =
        conn_find(n, sql, (const int64_t[]){row_id(checkpoint, dir), pos}, 2, q, e);

    if (rc == 0)
        return err_set(e, ENOENT, "no such directory in tree/");
    return rc == 1 ? read_block(q, out, e) : rc;
}

/* --- a name --- */

static int compare(const char *a, size_t alen, const char *b, size_t blen)
{
    int order = memcmp(a, b, MIN(alen, blen));

    return order ? order : (alen > blen) - (alen < blen);
}

/* Where a name is. `end`: the position behind the block. */
struct search {
    const char *name;
    enum { FOUND, NOWHERE, BEFORE, BEHIND } is;
    uint32_t end;
    struct tree_entry entry;
};

static int search_block(struct conn *n, struct block *b, struct search *s,
                        struct err *e)
{
    size_t len = strlen(s->name);
    struct entry x;
    int rc;

    s->is = BEHIND;
    s->end = b->pos;
    while ((rc = next_entry(n, b, &x, e)) == 1) {
        int order = compare(x.name, x.len, s->name, len);

        if (order == 0) {
            s->is = FOUND;
            s->entry = entry_at(&x, s->end);
            return 0;
        }
        if (order > 0) {
            s->is = s->end == b->pos ? BEFORE : NOWHERE;
            return 0;
        }
        s->end++;
    }
    return rc;
}

/* Entries lie in the order of their names: first the last block, then by halves. */
static int find_entry(struct conn *n, int64_t checkpoint, uint32_t dir,
                      struct search *s, struct err *e)
{
    uint32_t low = 0, high = UINT32_MAX, at = UINT32_MAX;

    for (;;) {
        CLEANUP(query_end) struct query q = {0};
        struct block b;
        int rc = find_block(n, checkpoint, dir, at, &q, &b, e);

        if (rc == 0)
            rc = search_block(n, &b, s, e);
        if (rc < 0 || s->is == FOUND)
            return rc;
        if (s->is == BEHIND && at != UINT32_MAX && s->end <= at)
            return conn_damaged(n, e, "entries of tree/ are missing");
        if (s->is == BEFORE)
            high = b.pos;
        else if (s->is == BEHIND && at != UINT32_MAX)
            low = s->end;
        else
            high = low;
        if (low >= high)
            return err_set(e, ENOENT, "no such name in tree/");
        at = low + (high - low) / 2;
    }
}

int catalog_tree_find(struct catalog *c, int64_t checkpoint, uint32_t dir,
                      const char *name, struct tree_entry *out, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    struct search s = {.name = name};
    int rc = conn_take(c, false, &n, e);

    if (rc == 0)
        rc = conn_begin(n, false, e); /* all steps see one state, and lock once */
    if (rc == 0)
        rc = find_entry(n, checkpoint, dir, &s, e);
    if (rc == 0) {
        *out = s.entry;
        out->name = name;
    }
    return rc == -ENOENT ? conn_missing(n, checkpoint, "name in tree/", e) : rc;
}

/* --- a listing --- */

struct lister {
    struct conn *conn;
    int64_t checkpoint;
    uint32_t from, pos;  /* the first that is wanted, and the next one that is read */
    struct arena *arena; /* of one tensor, made anew now and then */
    int (*fn)(void *user, const struct tree_entry *t);
    void *user;
};

static int list_entry(struct lister *l, const struct entry *x, struct err *e)
{
    struct tree_entry entry = entry_at(x, l->pos);
    char name[NAME_MAX_BYTES + 1];
    struct tensor_info info;
    int rc = 0;

    memcpy(name, x->name, x->len);
    name[x->len] = '\0';
    entry.name = name;
    if (!entry.dir) {
        rc = tensor_arena(&l->arena, e);
        if (rc == 0)
            rc =
                tensor_by_ord(l->conn, l->checkpoint, entry.tensor, l->arena, &info, e);
        if (rc == -ENOENT)
            return conn_damaged(l->conn, e, "tensor %u of tree/ is missing",
                                entry.tensor);
        entry.info = &info;
    }
    return rc == 0 ? l->fn(l->user, &entry) : rc;
}

static int list_block(struct lister *l, struct block *b, struct err *e)
{
    struct entry x;
    int rc;

    if (b->pos != l->pos)
        return conn_damaged(l->conn, e, "entries of tree/ are missing");
    while ((rc = next_entry(l->conn, b, &x, e)) == 1) {
        rc = l->pos < l->from ? 0 : list_entry(l, &x, e);
        l->pos++;
        if (rc != 0)
            return rc;
    }
    return rc;
}

static int list_rows(struct lister *l, uint32_t dir, struct err *e)
{
    static const char sql[] = "SELECT dir, pos, parent, data, sum FROM tree"
                              " WHERE dir = ?1 AND pos >= ?2 ORDER BY pos";
    const int64_t range[] = {row_id(l->checkpoint, dir), l->pos};
    CLEANUP(query_end) struct query q = {0};
    struct block b;
    int rc = query_begin(l->conn, sql, &q, e);

    if (rc == 0)
        rc = query_bind_ints(&q, range, ARRAY_SIZE(range), e);
    while (rc == 0 && (rc = query_step(&q, e)) == 1) {
        rc = read_block(&q, &b, e);
        if (rc == 0)
            rc = list_block(l, &b, e);
        if (rc != 0)
            return rc;
    }
    return rc;
}

/* The row in which the listing begins. */
static int first_row(struct lister *l, uint32_t dir, struct err *e)
{
    CLEANUP(query_end) struct query q = {0};
    struct block b;
    int rc = find_block(l->conn, l->checkpoint, dir, l->from, &q, &b, e);

    if (rc == 0)
        l->pos = b.pos;
    return rc;
}

int catalog_tree_list(struct catalog *c, int64_t checkpoint, uint32_t dir,
                      uint32_t from, int (*fn)(void *user, const struct tree_entry *t),
                      void *user, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    struct lister l = {.checkpoint = checkpoint, .from = from, .fn = fn, .user = user};
    int rc = conn_take(c, false, &n, e);

    l.conn = n;
    if (rc == 0)
        rc = conn_begin(n, false, e); /* all rows are of one state, and lock once */
    if (rc == 0)
        rc = first_row(&l, dir, e);
    if (rc == -ENOENT)
        return conn_missing(n, checkpoint, "directory in tree/", e);
    if (rc == 0)
        rc = list_rows(&l, dir, e);
    arena_free(l.arena);
    return rc;
}

int catalog_tree_parent(struct catalog *c, int64_t checkpoint, uint32_t dir,
                        uint32_t *parent, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    CLEANUP(query_end) struct query q = {0};
    struct block b;
    int rc = conn_take(c, false, &n, e);

    if (rc == 0)
        rc = find_block(n, checkpoint, dir, 0, &q, &b, e);
    if (rc == 0)
        *parent = b.parent;
    return rc == -ENOENT ? conn_missing(n, checkpoint, "directory in tree/", e) : rc;
}
