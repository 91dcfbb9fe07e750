/* SPDX-License-Identifier: MIT */
/* index/catalog_tree.c - tree/: the places of tensors by the dotted parts of their keys. */
#include "index/catalog_stage.h"

#include "base/err.h"
#include "index/names.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

enum {
    /* Keys of real models have up to 12 parts; what is deeper stays one name. */
    MAX_DEPTH = 64,
    /* A header of 100 MB that is all dots must not become gigabytes of directories. */
    FREE_DIRS = 1 << 20,
    DIRS_A_TENSOR = 4,
    /* With one entry more a row has under 1000 bytes: sqlite keeps those within a page. */
    BLOCK_BYTES = 640,
};

static const char leaf_suffix[] = ".npy";

/* --- places, before they are written --- */

/* Directories of a key into st->text; *leaf is what is left for the file's name. */
static void add_dirs(struct stage *st, const char *key, size_t len, const char **leaf,
                     size_t *leaf_len)
{
    const char *part;
    size_t pos = 0, n;

    for (unsigned depth = 0; depth < MAX_DEPTH; depth++) {
        size_t before = pos;

        if (!key_part(key, len, &pos, &part, &n) || pos > len) {
            pos = before;
            break;
        }
        name_of_part(part, n, false, &st->text);
        buf_addc(&st->text, '\0');
    }
    *leaf = key + pos;
    *leaf_len = len - pos;
}

/* Counts the directories that the last place did not have. */
static int count_dirs(struct stage *st, struct err *e)
{
    size_t same = 0, most = MIN(st->text.len, st->dirs.len);

    while (same < most && st->text.data[same] == st->dirs.data[same])
        same++;
    for (size_t i = same; i < st->text.len; i++)
        st->ndirs += st->text.data[i] == '\0';
    buf_clear(&st->dirs);
    buf_add(&st->dirs, st->text.data, st->text.len);
    return buf_failed(&st->text) || buf_failed(&st->dirs) ? err_nomem(e) : 0;
}

/* The n-th name for a file whose name is taken: NAME~2.npy, within 255 bytes. */
static int add_number(struct stage *st, size_t leaf_at, size_t stem, unsigned n)
{
    char number[16];
    int len = snprintf(number, sizeof number, "~%u%s", n, leaf_suffix);
    size_t room = NAME_MAX_BYTES - (size_t)len;

    st->text.len = leaf_at + MIN(stem, room);
    return buf_add(&st->text, number, (size_t)len);
}

/* 1: the place in st->text is this tensor's now; 0: it is taken. */
static int take_place(struct stage *st, uint32_t ord, struct err *e)
{
    const struct cell row[] = {cell_blob(st->text.data, st->text.len), cell_int(ord)};
    bool in_table = st->places.spilled;
    int rc = 1;

    if (buf_failed(&st->text))
        return err_nomem(e);
    if (!in_table)
        rc = keyset_add(&st->taken, row[0].data, row[0].len);
    if (rc < 1)
        return rc < 0 ? err_nomem(e) : 0;
    TRY(held_add(st, &st->places, row, e));
    if (in_table)
        return conn_changes(st->conn) == 1;
    if (st->places.spilled) { /* its names are the table's key */
        keyset_release(&st->taken);
        st->taken = (struct keyset){0};
    }
    return 1;
}

int stage_tree_clear(struct stage *st, struct err *e)
{
    bool in_table = st->places.spilled;

    st->ndirs = 0;
    buf_clear(&st->dirs);
    rows_clear(&st->places.rows);
    keyset_clear(&st->taken);
    st->places.spilled = false;
    return in_table ? conn_exec(st->conn, "DELETE FROM tree", e) : 0;
}

int stage_tree(struct stage *st, const char *key, size_t len, uint32_t ord,
               struct err *e)
{
    bool flat = st->ndirs > FREE_DIRS + (uint64_t)DIRS_A_TENSOR * ord;
    const char *leaf = key;
    size_t leaf_len = len, leaf_at, stem;
    int rc;

    buf_clear(&st->text);
    if (!flat)
        add_dirs(st, key, len, &leaf, &leaf_len);
    rc = count_dirs(st, e);
    if (rc < 0)
        return rc;
    leaf_at = st->text.len;
    name_of_part(leaf, leaf_len, true, &st->text);
    stem = st->text.len - leaf_at - strlen(leaf_suffix);
    for (unsigned n = 2; (rc = take_place(st, ord, e)) == 0; n++)
        add_number(st, leaf_at, stem, n);
    return MIN(rc, 0);
}

/* --- rows of the index --- */

/* A directory that is open: its entries that have no row yet. */
struct level {
    uint32_t dir, entries;
    uint32_t first; /* of the block */
    struct buf block;
};

/* Walks the places in order; level[0] is tree/ itself. */
struct writer {
    struct conn *conn;
    int64_t checkpoint;
    struct buf
        path; /* of the directories that are open: names with a NUL behind each */
    uint32_t depth, ndirs;
    struct level level[MAX_DEPTH + 1];
};

static void writer_release(struct writer *w)
{
    buf_release(&w->path);
    for (size_t i = 0; i < ARRAY_SIZE(w->level); i++)
        buf_release(&w->level[i].block);
}

/* The entries of the innermost directory that are not written yet. */
static int write_block(struct writer *w, struct err *e)
{
    static const char sql[] =
        "INSERT INTO tree (dir, pos, parent, data, sum) VALUES (?1, ?2, ?3, ?4, ?5)";
    struct level *top = &w->level[w->depth];
    CLEANUP(query_end) struct query q = {0};
    struct cell row[] = {
        cell_int((uint64_t)row_id(w->checkpoint, top->dir)),
        cell_int(top->first),
        cell_int(w->depth > 0 ? top[-1].dir : 0),
        cell_blob(top->block.data, top->block.len),
        {0},
    };
    int rc = buf_failed(&top->block) ? err_nomem(e) : query_begin(w->conn, sql, &q, e);

    row[4] = cell_int(cells_sum(row, 4));
    if (rc == 0)
        rc = query_write(&q, row, ARRAY_SIZE(row), e);
    buf_clear(&top->block);
    top->first = top->entries;
    return rc;
}

static int write_entry(struct writer *w, const char *name, size_t len, int64_t child,
                       struct err *e)
{
    struct level *top = &w->level[w->depth];

    buf_add_varint(&top->block, len);
    buf_add_varint(&top->block, zigzag(child));
    buf_add(&top->block, name, len);
    top->entries++;
    return top->block.len >= BLOCK_BYTES ? write_block(w, e) : 0;
}

/* Leaves the innermost directory; one without entries (tree/ itself) has a row too. */
static int end_dir(struct writer *w, struct err *e)
{
    const struct level *top = &w->level[w->depth];

    return top->entries == 0 || top->first < top->entries ? write_block(w, e) : 0;
}

static int leave_dir(struct writer *w, struct err *e)
{
    int rc = end_dir(w, e);

    assert(w->depth > 0);
    w->depth--;
    w->path.len--; /* its NUL */
    while (w->path.len > 0 && w->path.data[w->path.len - 1] != '\0')
        w->path.len--;
    return rc;
}

static int enter_dir(struct writer *w, const char *name, size_t len, struct err *e)
{
    uint32_t dir = w->ndirs + 1;
    struct level *top;

    if (w->depth == MAX_DEPTH || dir > INT32_MAX)
        return conn_damaged(w->conn, e, "too many directories in tree/");
    TRY(write_entry(w, name, len, -(int64_t)dir, e));
    buf_add(&w->path, name, len);
    if (buf_addc(&w->path, '\0') < 0)
        return err_nomem(e);
    w->ndirs = dir;
    top = &w->level[++w->depth];
    buf_clear(&top->block);
    *top = (struct level){.dir = dir, .block = top->block};
    return 0;
}

/* One staged place: leaves and enters directories, then writes the file. */
static int write_place(struct writer *w, const char *path, size_t len, uint32_t ord,
                       struct err *e)
{
    const char *nul;
    int rc = 0;

    while (rc == 0 && w->depth > 0 &&
           (w->path.len > len || memcmp(w->path.data, path, w->path.len) != 0))
        rc = leave_dir(w, e);
    path += w->path.len;
    len -= w->path.len;
    while (rc == 0 && (nul = memchr(path, '\0', len)) != NULL) {
        rc = enter_dir(w, path, (size_t)(nul - path), e);
        len -= (size_t)(nul + 1 - path);
        path = nul + 1;
    }
    return rc == 0 ? write_entry(w, path, len, ord, e) : rc;
}

static int write_places(struct writer *w, struct stage *st, struct err *e)
{
    static const char sql[] = "SELECT path, ord FROM tree ORDER BY path";
    CLEANUP(held_end) struct held_walk places = {0};
    struct cell cell[2];
    int rc;

    held_sort(&st->places);
    rc = held_begin(st, &st->places, sql, &places, e);
    while (rc == 0 && (rc = held_next(&places, cell, e)) == 1)
        rc = write_place(w, cell[0].data, cell[0].len, (uint32_t)cell[1].num, e);
    while (rc == 0 && w->depth > 0)
        rc = leave_dir(w, e);
    return rc == 0 ? end_dir(w, e) : rc;
}

int tree_write(struct conn *n, struct stage *st, int64_t checkpoint, struct err *e)
{
    struct writer w = {.conn = n, .checkpoint = checkpoint};
    int rc = write_places(&w, st, e);

    writer_release(&w);
    return rc;
}
