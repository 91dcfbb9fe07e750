/* SPDX-License-Identifier: MIT */
/* index/catalog_stage.c - rows of a running scan in a private temporary database. */
#include "index/catalog_stage.h"

#include "base/err.h"
#include "base/keyset.h"
#include "index/catalog_write.h"
#include "index/names.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

/*
 * Of some 100,000 tensors or files: in memory they cost a quarter of what the tables do.
 * A million would be a gigabyte.
 */
enum {
    FILES_MEMORY = 16 << 20,
    ROWS_MEMORY = 32 << 20,
    PLACES_MEMORY = 16 << 20,
};

/* Keys and names are blobs: they compare as bytes. */
static const char tables[] =
    "CREATE TABLE file (path BLOB, number INTEGER PRIMARY KEY, dev, ino, size, mtime,"
    " ctime, mode);"
    "CREATE TABLE hidden (name BLOB PRIMARY KEY, part) WITHOUT ROWID;"
    "CREATE TABLE object (seq INTEGER PRIMARY KEY, key BLOB, json BLOB);"
    "CREATE TABLE warning (seq INTEGER PRIMARY KEY, code BLOB, text BLOB);"
    "CREATE TABLE tensor (seq INTEGER PRIMARY KEY, " STAGED_LIST ");"
    "CREATE TABLE tree (path BLOB PRIMARY KEY, ord) WITHOUT ROWID;"
    "BEGIN";

int stage_open(bool memory, struct stage **out, struct err *e)
{
    struct stage *st = calloc(1, sizeof *st);
    int rc;

    if (!st)
        return err_nomem(e);
    st->files.data.max = FILES_MEMORY;
    st->rows.data.max = ROWS_MEMORY;
    st->places.data.max = PLACES_MEMORY;
    rc = conn_open_private(memory, &st->conn, e);
    if (rc == 0)
        rc = conn_exec(st->conn, tables, e);
    if (rc < 0) {
        stage_close(st);
        return err_wrap(e, "temporary index");
    }
    *out = st;
    return 0;
}

void stage_close(struct stage *st)
{
    if (!st)
        return;
    conn_close(st->conn);
    rows_release(&st->files);
    rows_release(&st->rows);
    rows_release(&st->places);
    keyset_release(&st->taken);
    buf_release(&st->text);
    buf_release(&st->dirs);
    free(st);
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

/* ---- files ---- */

static int put_file(struct stage *st, const struct cell *row, struct err *e)
{
    static const char sql[] =
        "INSERT INTO file VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";

    return stage_put(st, sql, row, STAGED_FILE_COLUMNS, e);
}

static int spill_files(struct stage *st, struct err *e)
{
    struct cell row[STAGED_FILE_COLUMNS];
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < st->files.count; i++) {
        rows_get(&st->files, i, row, STAGED_FILE_COLUMNS);
        rc = put_file(st, row, e);
    }
    rows_release(&st->files);
    st->files_spilled = true;
    return rc;
}

int stage_file(struct stage *st, uint32_t number, const char *path,
               const struct entry_stat *stat, struct err *e)
{
    const struct file_id *id = &stat->id;
    const struct cell row[STAGED_FILE_COLUMNS] = {
        cell_text(path),
        cell_int(number),
        cell_int(id->dev),
        cell_int(id->ino),
        cell_int(id->size),
        cell_int((uint64_t)id->mtime_ns),
        cell_int((uint64_t)id->ctime_ns),
        cell_int(stat->mode),
    };
    int rc = 0;

    if (!st->files_spilled) {
        assert(number == st->files.count);
        rc = rows_add(&st->files, row, STAGED_FILE_COLUMNS);
        if (rc == 1)
            return 0;
        rc = rc < 0 ? err_nomem(e) : spill_files(st, e);
    }
    return rc == 0 ? put_file(st, row, e) : rc;
}

/* The row of a file that was staged; its cells belong to the stage or to q. */
static int get_file(struct stage *st, uint32_t number, struct query *q,
                    struct cell *cell, struct err *e)
{
    static const char sql[] = "SELECT * FROM file WHERE number = ?1";
    int rc;

    if (!st->files_spilled && number < st->files.count) {
        rows_get(&st->files, number, cell, STAGED_FILE_COLUMNS);
        return 0;
    }
    rc = conn_find(st->conn, sql, (const int64_t[]){number}, 1, q, e);
    if (rc == 0)
        return conn_damaged(st->conn, e, "file %u is gone", number);
    return rc == 1 ? query_row(q, cell, STAGED_FILE_COLUMNS, e) : rc;
}

int stage_file_path(struct stage *st, uint32_t number, struct buf *out, struct err *e)
{
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[STAGED_FILE_COLUMNS];
    int rc = get_file(st, number, &q, cell, e);

    if (rc == 0 &&
        buf_add(out, cell[STAGED_FILE_PATH].data, cell[STAGED_FILE_PATH].len) < 0)
        rc = err_nomem(e);
    return rc;
}

int stage_file_id(struct stage *st, uint32_t number, struct file_id *out, struct err *e)
{
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[STAGED_FILE_COLUMNS];
    int rc = get_file(st, number, &q, cell, e);

    if (rc == 0)
        *out = (struct file_id){cell[STAGED_FILE_DEV].num, cell[STAGED_FILE_INO].num,
                                cell[STAGED_FILE_SIZE].num,
                                (int64_t)cell[STAGED_FILE_MTIME].num,
                                (int64_t)cell[STAGED_FILE_CTIME].num};
    return rc;
}

int stage_files(struct stage *st,
                int (*fn)(void *user, const struct cell *file, struct err *e),
                void *user, struct err *e)
{
    static const char sql[] = "SELECT * FROM file ORDER BY number";
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[STAGED_FILE_COLUMNS];
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < st->files.count; i++) {
        rows_get(&st->files, i, cell, STAGED_FILE_COLUMNS);
        rc = fn(user, cell, e);
    }
    if (rc == 0)
        rc = query_begin(st->conn, sql, &q, e);
    while (rc == 0 && (rc = query_step(&q, e)) == 1) {
        rc = query_row(&q, cell, STAGED_FILE_COLUMNS, e);
        if (rc == 0)
            rc = fn(user, cell, e);
    }
    return rc;
}

/* Of the files that are there the first by name. */
struct first_file {
    struct buf path;
    uint32_t number;
    bool any;
};

static int see_file(void *user, const struct cell *file, struct err *e)
{
    struct first_file *f = user;
    const struct cell *path = &file[STAGED_FILE_PATH];
    int order =
        f->any ? memcmp(path->data, f->path.data, MIN(path->len, f->path.len)) : -1;

    if (file[STAGED_FILE_INO].num == 0 && file[STAGED_FILE_SIZE].num == 0 &&
        file[STAGED_FILE_MTIME].num == 0)
        return 0;
    if (order > 0 || (order == 0 && path->len >= f->path.len))
        return 0;
    f->any = true;
    f->number = (uint32_t)file[STAGED_FILE_NUMBER].num;
    buf_clear(&f->path);
    return buf_add(&f->path, path->data, path->len) < 0 ? err_nomem(e) : 0;
}

int stage_first_file(struct stage *st, uint32_t *number, struct err *e)
{
    struct first_file f = {0};
    int rc = stage_files(st, see_file, &f, e);

    *number = f.number;
    buf_release(&f.path);
    return rc < 0 ? rc : f.any;
}

/* ---- names, objects, warnings ---- */

int stage_hidden(struct stage *st, const char *name, size_t len, bool part,
                 struct err *e)
{
    static const char sql[] =
        "INSERT INTO hidden VALUES (?1, ?2)"
        " ON CONFLICT (name) DO UPDATE SET part = max(part, excluded.part)";
    const struct cell row[] = {cell_blob(name, len), cell_int(part)};

    return stage_put(st, sql, row, ARRAY_SIZE(row), e);
}

int stage_object(struct stage *st, const char *key, size_t key_len, const char *json,
                 size_t len, struct err *e)
{
    static const char sql[] = "INSERT INTO object VALUES (?1, ?2, ?3)";
    const struct cell row[] = {cell_int(st->objects), cell_blob(key, key_len),
                               cell_blob(json, len)};

    if (st->objects == UINT32_MAX)
        return err_set(e, EFBIG, "too many objects");
    st->objects++;
    return stage_put(st, sql, row, ARRAY_SIZE(row), e);
}

int stage_warning(struct stage *st, const char *code, const char *text, struct err *e)
{
    static const char sql[] = "INSERT INTO warning VALUES (?1, ?2, ?3)";
    const struct cell row[] = {cell_int(st->warnings), cell_text(code),
                               cell_text(text)};

    st->warnings++;
    return stage_put(st, sql, row, ARRAY_SIZE(row), e);
}

/* ---- tensors ---- */

void rights_add(struct stage_rights *r, const struct stage_rights *file)
{
    if (!file->any)
        return;
    if (!r->any) {
        *r = *file;
        return;
    }
    r->mixed |= file->mixed || r->uid != file->uid;
    r->mixed_groups |= file->mixed_groups || r->gid != file->gid;
    r->mode &= file->mode;
    r->mtime_ns = MAX(r->mtime_ns, file->mtime_ns);
}

static struct cell cell_unless(bool null, uint64_t v)
{
    return null ? (struct cell){.kind = CELL_NULL} : cell_int(v);
}

static void add_shape(struct buf *b, const struct shape *s)
{
    buf_add_varint(b, s->nd);
    for (uint32_t k = 0; k < s->nd; k++)
        buf_add_varint(b, s->dim[k]);
}

static int put_tensor(struct stage *st, const struct cell *row, struct err *e)
{
    static const char sql[] =
        "INSERT INTO tensor (" STAGED_LIST
        ") VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9,"
        " ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21)";

    return stage_put(st, sql, row, STAGED_COLUMNS, e);
}

/* From memory to the table, in the order in which they came. */
static int spill(struct stage *st, struct err *e)
{
    struct cell row[STAGED_COLUMNS];
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < st->rows.count; i++) {
        rows_get(&st->rows, i, row, STAGED_COLUMNS);
        rc = put_tensor(st, row, e);
    }
    rows_release(&st->rows);
    st->spilled = true;
    return rc;
}

int stage_tensor(struct stage *st, const struct stage_tensor *t, struct err *e)
{
    const struct stage_rights *r = &t->rights;
    struct cell row[STAGED_COLUMNS];
    size_t name_len;
    int rc = 0;

    buf_clear(&st->text);
    name_of_key(t->key, t->key_len, "", &st->text);
    name_len = st->text.len;
    add_shape(&st->text, t->shape);
    if (buf_failed(&st->text))
        return err_nomem(e);
    row[STAGED_NAME] = cell_blob(st->text.data, name_len);
    row[STAGED_KEY] = cell_blob(t->key, t->key_len);
    row[STAGED_RAW_KEY] = cell_text(NULL);
    row[STAGED_PART] = cell_text(t->part);
    row[STAGED_WRAPPER] = cell_int(t->wrapper);
    row[STAGED_DTYPE] = cell_int(t->dtype);
    row[STAGED_STORED] = cell_int(t->stored);
    row[STAGED_SHAPE] = cell_blob(st->text.data + name_len, st->text.len - name_len);
    row[STAGED_ROLE] = cell_int(t->role);
    row[STAGED_BYTES] = cell_int(t->bytes);
    row[STAGED_CHUNKS] = cell_int(t->chunks);
    row[STAGED_FAULT] = cell_text(t->fault);
    row[STAGED_CODEC_KEY] =
        t->codec_key ? cell_blob(t->codec_key, t->codec_key_len) : cell_text(NULL);
    row[STAGED_ATTRIBUTES] = cell_text(t->attributes);
    row[STAGED_IDENTITY] = cell_int(t->identity);
    row[STAGED_MODE] = cell_unless(!r->any, r->mode);
    row[STAGED_UID] = cell_unless(r->mixed, r->uid);
    row[STAGED_GID] = cell_unless(r->mixed_groups, r->gid);
    row[STAGED_MTIME] = cell_int(r->mtime_ns);
    row[STAGED_SINGLE_FILE] = cell_unless(t->single_file < 0, (uint64_t)t->single_file);
    row[STAGED_PIECES] = cell_blob(t->pieces, t->pieces_len);
    st->tensors++;
    if (!st->spilled)
        rc = rows_add(&st->rows, row, STAGED_COLUMNS);
    if (rc == 1)
        return 0;
    if (rc < 0)
        return err_nomem(e);
    if (!st->spilled)
        rc = spill(st, e);
    return rc == 0 ? put_tensor(st, row, e) : rc;
}

int stage_order_begin(struct stage *st, struct stage_order *out, struct err *e)
{
    static const char sorted[] =
        "SELECT " STAGED_LIST " FROM tensor ORDER BY name, seq";
    int rc;

    *out = (struct stage_order){.st = st};
    if (!st->spilled) {
        rows_sort(&st->rows);
        return 0;
    }
    rc = query_begin(st->conn, sorted, &out->q, e);
    if (rc == 0)
        out->more = rc = query_step(&out->q, e); /* sorts them */
    return MIN(rc, 0);
}

int stage_order_next(struct stage_order *o, struct cell cell[STAGED_COLUMNS],
                     struct err *e)
{
    size_t i = o->next++;
    int rc;

    if (!o->st->spilled) {
        if (i == o->st->rows.count)
            return 0;
        rows_get(&o->st->rows, i, cell, STAGED_COLUMNS);
        return 1;
    }
    rc = i == 0 ? o->more : query_step(&o->q, e);
    if (rc == 1 && query_row(&o->q, cell, STAGED_COLUMNS, e) < 0)
        return -e->code;
    return rc;
}

void stage_order_end(struct stage_order *o)
{
    query_end(&o->q);
}

/* ---- keys that meet ---- */

/* Renaming keys that meet. */
struct settle {
    struct stage *st;
    struct keyset taken; /* keys that are final */
    struct buf key, name;
};

static void settle_release(struct settle *s)
{
    keyset_release(&s->taken);
    buf_release(&s->key);
    buf_release(&s->name);
}

/* 1 when it was free and now is taken. */
static int take_key(struct settle *s, const char *key, size_t len, struct err *e)
{
    int rc = keyset_add(&s->taken, key, len);

    return rc < 0 ? err_nomem(e) : rc;
}

/* Makes s->key one that nobody has, by ":2", ":3", ... behind it. */
static int make_unique(struct settle *s, struct err *e)
{
    size_t len = s->key.len;
    unsigned n = 1;
    int rc;

    if (buf_failed(&s->key))
        return err_nomem(e);
    while ((rc = take_key(s, s->key.data, s->key.len, e)) == 0) {
        s->key.len = len;
        if (buf_addf(&s->key, ":%u", ++n) < 0)
            return err_nomem(e);
    }
    return rc < 0 ? rc : (int)(n > 1);
}

static int warn_renamed(struct settle *s, const struct cell *key,
                        const struct cell *part, struct err *e)
{
    char text[600];

    snprintf(text, sizeof text,
             "key %.*s of %.*s is shown as %.200s: the name was taken",
             (int)MIN(key->len, (size_t)200), key->data,
             (int)MIN(part->len, (size_t)100), part->data, s->key.data);
    return stage_warning(s->st, "key-renamed", text, e);
}

/* A tensor whose key another part has too becomes PART/KEY. */
static int rename_tensor(struct settle *s, int64_t seq, const struct cell *key,
                         const struct cell *part, struct err *e)
{
    static const char sql[] = "UPDATE tensor SET key = ?2, name = ?3, raw_key = key,"
                              " wrapper = 0, single_file = NULL WHERE seq = ?1";
    struct cell row[3];
    int rc;

    buf_clear(&s->key);
    buf_clear(&s->name);
    buf_add(&s->key, part->data, part->len);
    buf_addc(&s->key, '/');
    buf_add(&s->key, key->data, key->len);
    rc = make_unique(s, e);
    if (rc == 1)
        rc = warn_renamed(s, key, part, e);
    if (rc < 0)
        return rc;
    if (name_of_key(s->key.data, s->key.len, "", &s->name) < 0)
        return err_nomem(e);
    row[0] = cell_int((uint64_t)seq);
    row[1] = cell_blob(s->key.data, s->key.len);
    row[2] = cell_blob(s->name.data, s->name.len);
    return stage_put(s->st, sql, row, ARRAY_SIZE(row), e);
}

/* Sequence numbers of the tensors that have to change, found before any is changed. */
static int note_meeting(struct settle *s, struct err *e)
{
    static const char find[] =
        "CREATE TABLE met AS SELECT t.seq AS seq FROM tensor t JOIN"
        " (SELECT key FROM tensor GROUP BY key HAVING count(*) > 1) g ON t.key = g.key"
        " WHERE t.part IS NOT NULL ORDER BY t.key, t.part";
    static const char keep[] = "SELECT key FROM tensor"
                               " WHERE seq NOT IN (SELECT seq FROM met)";
    CLEANUP(query_end) struct query q = {0};
    struct cell key;
    int rc = conn_exec(s->st->conn, find, e);

    if (rc == 0)
        rc = query_begin(s->st->conn, keep, &q, e);
    if (rc < 0)
        return rc;
    while ((rc = query_step(&q, e)) == 1) {
        rc = query_row(&q, &key, 1, e);
        if (rc == 0)
            rc = take_key(s, key.data, key.len, e);
        if (rc < 0)
            return rc;
    }
    return rc;
}

int stage_settle_keys(struct stage *st, struct err *e)
{
    static const char sql[] = "SELECT t.seq, t.key, t.part FROM met m"
                              " JOIN tensor t ON t.seq = m.seq ORDER BY m.rowid";
    CLEANUP(settle_release) struct settle s = {.st = st};
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[3];
    int rc = st->spilled ? 0 : spill(st, e);

    if (rc == 0)
        rc = note_meeting(&s, e);
    if (rc == 0)
        rc = query_begin(st->conn, sql, &q, e);
    if (rc < 0)
        return rc;
    while ((rc = query_step(&q, e)) == 1) {
        rc = query_row(&q, cell, 3, e);
        if (rc == 0)
            rc = rename_tensor(&s, (int64_t)cell[0].num, &cell[1], &cell[2], e);
        if (rc < 0)
            return rc;
    }
    return rc;
}

/* Gives an object whose key is taken another one. */
static int rename_object(struct settle *s, const struct cell *seq,
                         const struct cell *key, struct err *e)
{
    static const char sql[] = "UPDATE object SET key = ?2 WHERE seq = ?1";
    const struct cell part = cell_text("an object");
    struct cell row[2] = {*seq};
    int rc;

    buf_clear(&s->key);
    buf_add(&s->key, key->data, key->len);
    rc = make_unique(s, e);
    if (rc == 1)
        rc = warn_renamed(s, key, &part, e);
    if (rc < 0)
        return rc;
    row[1] = cell_blob(s->key.data, s->key.len);
    return stage_put(s->st, sql, row, 2, e);
}

int stage_settle_objects(struct stage *st, struct err *e)
{
    static const char all[] = "SELECT seq, key FROM object ORDER BY seq";
    CLEANUP(settle_release) struct settle s = {.st = st};
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[2];
    int rc = query_begin(st->conn, all, &q, e);

    if (rc < 0)
        return rc;
    while ((rc = query_step(&q, e)) == 1) {
        rc = query_row(&q, cell, 2, e);
        if (rc == 0)
            rc = take_key(&s, cell[1].data, cell[1].len, e);
        if (rc == 0)
            rc = rename_object(&s, &cell[0], &cell[1], e);
        if (rc < 0)
            return rc;
    }
    return rc;
}
