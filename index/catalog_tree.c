/* SPDX-License-Identifier: MIT */
/* index/catalog_tree.c - tree/: tensors by the dotted parts of their keys. */
#include "index/catalog_stage.h"

#include "base/arena.h"
#include "base/err.h"
#include "index/catalog.h"
#include "index/catalog_tensor.h"
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

int stage_tree(struct stage *st, const char *key, size_t len, uint32_t ord,
               struct err *e)
{
    static const char sql[] = "INSERT OR IGNORE INTO tree VALUES (?1, ?2)";
    bool flat = st->ndirs > FREE_DIRS + (uint64_t)DIRS_A_TENSOR * ord;
    CLEANUP(query_end) struct query q = {0};
    const char *leaf = key;
    size_t leaf_len = len, leaf_at, stem;
    int rc;

    buf_clear(&st->text);
    if (!flat)
        add_dirs(st, key, len, &leaf, &leaf_len);
    rc = count_dirs(st, e);
    if (rc == 0)
        rc = query_begin(st->conn, sql, &q, e);
    if (rc < 0)
        return rc;
    leaf_at = st->text.len;
    name_of_part(leaf, leaf_len, true, &st->text);
    stem = st->text.len - leaf_at - strlen(leaf_suffix);
    for (unsigned n = 2; rc == 0; n++) {
        const struct cell row[] = {cell_blob(st->text.data, st->text.len),
                                   cell_int(ord)};

        if (buf_failed(&st->text))
            return err_nomem(e);
        rc = query_write(&q, row, ARRAY_SIZE(row), e);
        if (rc < 0 || conn_changes(st->conn) == 1)
            break;
        add_number(st, leaf_at, stem, n);
    }
    return rc;
}

/* --- rows of the index --- */

struct level {
    uint32_t dir, entries;
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

static int write_entry(struct writer *w, const char *name, size_t len, int64_t child,
                       struct err *e)
{
    static const char sql[] =
        "INSERT INTO tree_entry (dir, pos, name, child, sum) VALUES (?1, ?2, ?3, ?4, ?5)";
    struct level *top = &w->level[w->depth];
    CLEANUP(query_end) struct query q = {0};
    struct cell row[] = {
        cell_int((uint64_t)row_id(w->checkpoint, top->dir)),
        cell_int(top->entries),
        cell_blob(name, len),
        cell_int((uint64_t)child),
        {0},
    };
    int rc = query_begin(w->conn, sql, &q, e);

    row[4] = cell_int(cells_sum(row, 4));
    top->entries++;
    return rc == 0 ? query_write(&q, row, ARRAY_SIZE(row), e) : rc;
}

/* All entries of the innermost directory are written: its own row. */
static int write_dir(struct writer *w, struct err *e)
{
    static const char sql[] =
        "INSERT INTO tree_dir (id, parent, entries, sum) VALUES (?1, ?2, ?3, ?4)";
    const struct level *top = &w->level[w->depth];
    CLEANUP(query_end) struct query q = {0};
    struct cell row[] = {
        cell_int((uint64_t)row_id(w->checkpoint, top->dir)),
        cell_int(w->depth > 0 ? top[-1].dir : 0),
        cell_int(top->entries),
        {0},
    };
    int rc = query_begin(w->conn, sql, &q, e);

    row[3] = cell_int(cells_sum(row, 3));
    return rc == 0 ? query_write(&q, row, ARRAY_SIZE(row), e) : rc;
}

/* Leaves the innermost directory. */
static int leave_dir(struct writer *w, struct err *e)
{
    int rc = write_dir(w, e);

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
    int rc;

    if (w->depth == MAX_DEPTH || dir > INT32_MAX)
        return conn_damaged(w->conn, e, "too many directories in tree/");
    rc = write_entry(w, name, len, -(int64_t)dir, e);
    if (rc < 0)
        return rc;
    buf_add(&w->path, name, len);
    if (buf_addc(&w->path, '\0') < 0)
        return err_nomem(e);
    w->ndirs = dir;
    w->level[++w->depth] = (struct level){.dir = dir};
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
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[2];
    int rc = query_begin(st->conn, sql, &q, e);

    if (rc < 0)
        return rc;
    while ((rc = query_step(&q, e)) == 1) {
        rc = query_row(&q, cell, 2, e);
        if (rc == 0)
            rc = write_place(w, cell[0].data, cell[0].len, (uint32_t)cell[1].num, e);
        if (rc < 0)
            return rc;
    }
    while (rc == 0 && w->depth > 0)
        rc = leave_dir(w, e);
    return rc == 0 ? write_dir(w, e) : rc;
}

int tree_write(struct conn *n, struct stage *st, int64_t checkpoint, struct err *e)
{
    struct writer w = {.conn = n, .checkpoint = checkpoint};
    int rc = write_places(&w, st, e);

    buf_release(&w.path);
    return rc;
}

/* --- reading --- */

/* parent and number of entries; -ENOENT. */
static int get_dir(struct conn *n, int64_t checkpoint, uint32_t dir, uint32_t *parent,
                   uint32_t *entries, struct err *e)
{
    static const char sql[] =
        "SELECT id, parent, entries, sum FROM tree_dir WHERE id = ?1";
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[3];
    int rc = conn_find(n, sql, (const int64_t[]){row_id(checkpoint, dir)}, 1, &q, e);

    if (rc == 0)
        return err_set(e, ENOENT, "no such directory in tree/");
    if (rc == 1)
        rc = query_row_summed(&q, cell, 3, e);
    if (rc < 0)
        return rc;
    if (cell[1].num > INT32_MAX || cell[2].num > UINT32_MAX)
        return conn_damaged(n, e, "a directory of tree/ is impossible");
    *parent = (uint32_t)cell[1].num;
    *entries = (uint32_t)cell[2].num;
    return 0;
}

/* The row that q stands on; the name belongs to q. */
static int read_entry(struct query *q, struct tree_entry *out, const char **name,
                      size_t *len, struct err *e)
{
    struct cell cell[4];
    int rc = query_row_summed(q, cell, 4, e);
    int64_t child;

    if (rc < 0)
        return rc;
    child = (int64_t)cell[3].num;
    if (cell[2].kind != CELL_BLOB || cell[2].len == 0 || cell[2].len > NAME_MAX_BYTES ||
        memchr(cell[2].data, '\0', cell[2].len) || cell[1].num > UINT32_MAX ||
        child > UINT32_MAX || child < -INT32_MAX)
        return conn_damaged(q->conn, e, "an entry of tree/ is impossible");
    *out = (struct tree_entry){.pos = (uint32_t)cell[1].num};
    if (child < 0)
        out->dir = (uint32_t)-child;
    else
        out->tensor = (uint32_t)child;
    *name = cell[2].data;
    *len = cell[2].len;
    return 0;
}

static int compare(const char *a, size_t alen, const char *b, size_t blen)
{
    int order = memcmp(a, b, MIN(alen, blen));

    return order ? order : (alen > blen) - (alen < blen);
}

/* Compares the entry at `pos` with a name: *order < 0 when it is before. */
static int probe(struct conn *n, int64_t dir, uint32_t pos, const char *name,
                 struct tree_entry *out, int *order, struct err *e)
{
    static const char sql[] = "SELECT dir, pos, name, child, sum FROM tree_entry"
                              " WHERE dir = ?1 AND pos = ?2";
    CLEANUP(query_end) struct query q = {0};
    const char *found;
    size_t len;
    int rc = conn_find(n, sql, (const int64_t[]){dir, pos}, 2, &q, e);

    if (rc == 0)
        return conn_damaged(n, e, "an entry of tree/ is missing");
    if (rc == 1)
        rc = read_entry(&q, out, &found, &len, e);
    if (rc == 0)
        *order = compare(found, len, name, strlen(name));
    return rc;
}

/* Entries lie in the order of their names. */
static int find_entry(struct conn *n, int64_t checkpoint, uint32_t dir,
                      const char *name, struct tree_entry *out, struct err *e)
{
    uint32_t low = 0, high, parent;
    int rc = get_dir(n, checkpoint, dir, &parent, &high, e);

    while (rc == 0 && low < high) {
        uint32_t mid = low + (high - low) / 2;
        int order = 1;

        rc = probe(n, row_id(checkpoint, dir), mid, name, out, &order, e);
        if (rc < 0 || order == 0)
            return rc;
        if (order < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return rc < 0 ? rc : err_set(e, ENOENT, "no such name in tree/");
}

int catalog_tree_find(struct catalog *c, int64_t checkpoint, uint32_t dir,
                      const char *name, struct tree_entry *out, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    int rc = conn_take(c, false, &n, e);

    if (rc == 0)
        rc = conn_begin(n, false, e); /* all steps see one state, and lock once */
    if (rc == 0)
        rc = find_entry(n, checkpoint, dir, name, out, e);
    if (rc == 0)
        out->name = name;
    return rc == -ENOENT ? conn_missing(n, checkpoint, "name in tree/", e) : rc;
}

/* The tensor of an entry; strings live in *a, which is made anew now and then. */
static int entry_tensor(struct conn *n, int64_t checkpoint, uint32_t ord,
                        struct arena **a, struct tensor_info *out, struct err *e)
{
    int rc = tensor_arena(a, e);

    if (rc == 0)
        rc = tensor_by_ord(n, checkpoint, ord, *a, out, e);
    return rc == -ENOENT ? conn_damaged(n, e, "tensor %u of tree/ is missing", ord)
                         : rc;
}

static int list_rows(struct query *q, int64_t checkpoint,
                     int (*fn)(void *user, const struct tree_entry *t), void *user,
                     struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = NULL;
    char name[NAME_MAX_BYTES + 1];
    struct tensor_info info;
    struct tree_entry entry;
    const char *text;
    size_t len;
    int rc;

    while ((rc = query_step(q, e)) == 1) {
        rc = read_entry(q, &entry, &text, &len, e);
        if (rc < 0)
            return rc;
        memcpy(name, text, len);
        name[len] = '\0';
        entry.name = name;
        if (!entry.dir) {
            rc = entry_tensor(q->conn, checkpoint, entry.tensor, &a, &info, e);
            entry.info = &info;
        }
        if (rc == 0)
            rc = fn(user, &entry);
        if (rc != 0)
            return rc;
    }
    return rc;
}

int catalog_tree_list(struct catalog *c, int64_t checkpoint, uint32_t dir,
                      uint32_t from, int (*fn)(void *user, const struct tree_entry *t),
                      void *user, struct err *e)
{
    static const char sql[] = "SELECT dir, pos, name, child, sum FROM tree_entry"
                              " WHERE dir = ?1 AND pos >= ?2 ORDER BY pos";
    CLEANUP(conn_putp) struct conn *n = NULL;
    CLEANUP(query_end) struct query q = {0};
    uint32_t parent, entries;
    int rc = conn_take(c, false, &n, e);

    if (rc == 0)
        rc = conn_begin(n, false, e); /* all rows are of one state, and lock once */
    if (rc == 0)
        rc = get_dir(n, checkpoint, dir, &parent, &entries, e);
    if (rc == -ENOENT)
        return conn_missing(n, checkpoint, "directory in tree/", e);
    if (rc == 0)
        rc = query_begin(n, sql, &q, e);
    if (rc == 0)
        rc =
            query_bind_ints(&q, (const int64_t[]){row_id(checkpoint, dir), from}, 2, e);
    return rc == 0 ? list_rows(&q, checkpoint, fn, user, e) : rc;
}

int catalog_tree_parent(struct catalog *c, int64_t checkpoint, uint32_t dir,
                        uint32_t *parent, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    uint32_t entries;
    int rc = conn_take(c, false, &n, e);

    if (rc == 0)
        rc = get_dir(n, checkpoint, dir, parent, &entries, e);
    return rc == -ENOENT ? conn_missing(n, checkpoint, "directory in tree/", e) : rc;
}
