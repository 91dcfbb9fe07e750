/* SPDX-License-Identifier: MIT */
/* index/catalog_stage.c - the rows of a running scan, and keys that meet in it. */
#include "index/catalog_stage.h"

#include "base/err.h"
#include "base/keyset.h"
#include "index/catalog_write.h"
#include "index/names.h"

#include <xxhash.h>

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
    NAMES_MEMORY = 4 << 20,
    OBJECTS_MEMORY = 16 << 20,
    WARNINGS_MEMORY = 4 << 20,
    ORIGINS_MEMORY = 4 << 20,
};

enum { ROW_FILE = 1, ROW_HIDDEN, ROW_OBJECT, ROW_WARNING, ROW_TENSOR, ROW_ORIGIN };

static const char put_file[] =
    "INSERT INTO file VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
static const char put_tensor[] =
    "INSERT INTO tensor (" STAGED_LIST ") VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9,"
    " ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23)";
static const char put_place[] = "INSERT OR IGNORE INTO tree VALUES (?1, ?2)";
static const char put_hidden[] =
    "INSERT INTO hidden VALUES (?1, ?2)"
    " ON CONFLICT (name) DO UPDATE SET part = max(part, excluded.part)";
static const char put_object[] = "INSERT INTO object (key, json) VALUES (?1, ?2)";
static const char put_warning[] = "INSERT INTO warning (code, text) VALUES (?1, ?2)";
static const char put_origin[] = "INSERT INTO origin (text, passed) VALUES (?1, ?2)";

int stage_open(bool memory, struct stage **out, struct err *e)
{
    struct stage *st = calloc(1, sizeof *st);

    if (!st)
        return err_nomem(e);
    st->memory = memory;
    held_init(&st->files, put_file, STAGED_FILE_COLUMNS, FILES_MEMORY);
    held_init(&st->rows, put_tensor, STAGED_COLUMNS, ROWS_MEMORY);
    held_init(&st->places, put_place, 2, PLACES_MEMORY);
    held_init(&st->hidden, put_hidden, 2, NAMES_MEMORY);
    held_init(&st->object, put_object, 2, OBJECTS_MEMORY);
    held_init(&st->warning, put_warning, 2, WARNINGS_MEMORY);
    held_init(&st->origin, put_origin, 2, ORIGINS_MEMORY);
    *out = st;
    return 0;
}

void stage_close(struct stage *st)
{
    if (!st)
        return;
    conn_close(st->conn);
    held_release(&st->files);
    held_release(&st->rows);
    held_release(&st->places);
    held_release(&st->hidden);
    held_release(&st->object);
    held_release(&st->warning);
    held_release(&st->origin);
    keyset_release(&st->taken);
    buf_release(&st->text);
    buf_release(&st->dirs);
    free(st);
}

static void note_row(struct stage *st, unsigned kind, const struct cell *row, size_t n)
{
    uint64_t sum = cells_sum(row, n);

    st->print += XXH3_64bits_withSeed(&sum, sizeof sum, kind);
}

/* ---- files ---- */

int stage_file(struct stage *st, uint32_t number, const char *path,
               const struct entry_stat *stat, struct err *e)
{
    const struct file_id *id = &stat->id;
    bool dir = stat->kind == ENTRY_DIR;
    struct cell known[STAGED_FILE_COLUMNS];
    const struct cell row[STAGED_FILE_COLUMNS] = {
        cell_text(path),
        cell_int(number),
        cell_int(id->dev),
        cell_int(id->ino),
        cell_int(id->size),
        cell_int((uint64_t)id->mtime_ns),
        cell_int((uint64_t)id->ctime_ns),
        cell_int(stat->mode),
        cell_int(dir),
    };

    assert(st->files.spilled || number == st->files.rows.count);
    memcpy(known, row, sizeof known);
    for (unsigned i = STAGED_FILE_DEV; dir && i <= STAGED_FILE_CTIME; i++)
        known[i] = cell_int(0);
    note_row(st, ROW_FILE, known, ARRAY_SIZE(known));
    return held_add(st, &st->files, row, e);
}

/* The row of a file that was staged; its cells belong to the stage or to q. */
static int get_file(struct stage *st, uint32_t number, struct query *q,
                    struct cell *cell, struct err *e)
{
    static const char sql[] = "SELECT * FROM file WHERE number = ?1";
    int rc;

    if (!st->files.spilled) {
        assert(number < st->files.rows.count);
        rows_get(&st->files.rows, number, cell, STAGED_FILE_COLUMNS);
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

/* Calls fn with each row, as held_begin gives them. */
static int each_held(struct stage *st, struct held *h, const char *sql,
                     int (*fn)(void *user, const struct cell *row, struct err *e),
                     void *user, struct err *e)
{
    CLEANUP(held_end) struct held_walk w = {0};
    struct cell cell[STAGED_COLUMNS];
    int rc = held_begin(st, h, sql, &w, e);

    while (rc == 0 && (rc = held_next(&w, cell, e)) == 1)
        rc = fn(user, cell, e);
    return rc;
}

int stage_files(struct stage *st,
                int (*fn)(void *user, const struct cell *file, struct err *e),
                void *user, struct err *e)
{
    return each_held(st, &st->files, "SELECT * FROM file ORDER BY number", fn, user, e);
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
    const struct cell row[] = {cell_blob(name, len), cell_int(part)};

    note_row(st, ROW_HIDDEN, row, ARRAY_SIZE(row));
    return held_add(st, &st->hidden, row, e);
}

int stage_each_hidden(struct stage *st,
                      int (*fn)(void *user, const struct cell *row, struct err *e),
                      void *user, struct err *e)
{
    static const char sql[] = "SELECT name, part FROM hidden ORDER BY name";
    CLEANUP(held_end) struct held_walk w = {0};
    struct cell row[2], last[2];
    bool any = false;
    int rc;

    held_sort(&st->hidden);
    rc = held_begin(st, &st->hidden, sql, &w, e);
    /* Of a name that came twice the rows lie together in memory; the table has one. */
    while (rc == 0 && (rc = held_next(&w, row, e)) == 1) {
        rc = 0;
        if (st->hidden.spilled) {
            rc = fn(user, row, e);
        } else if (any && row[0].len == last[0].len &&
                   memcmp(row[0].data, last[0].data, row[0].len) == 0) {
            last[1].num |= row[1].num;
        } else {
            rc = any ? fn(user, last, e) : 0;
            memcpy(last, row, sizeof last);
            any = true;
        }
    }
    return rc == 0 && any ? fn(user, last, e) : rc;
}

int stage_object(struct stage *st, const char *key, size_t key_len, const char *json,
                 size_t len, struct err *e)
{
    const struct cell row[] = {cell_blob(key, key_len), cell_blob(json, len)};

    if (st->objects == UINT32_MAX)
        return err_set(e, EFBIG, "too many objects");
    st->objects++;
    note_row(st, ROW_OBJECT, row, ARRAY_SIZE(row));
    return held_add(st, &st->object, row, e);
}

int stage_each_object(struct stage *st,
                      int (*fn)(void *user, const struct cell *row, struct err *e),
                      void *user, struct err *e)
{
    static const char sql[] = "SELECT key, json FROM object ORDER BY key";

    held_sort(&st->object);
    return each_held(st, &st->object, sql, fn, user, e);
}

int stage_warning(struct stage *st, const char *code, const char *text, struct err *e)
{
    const struct cell row[] = {cell_text(code), cell_text(text)};

    st->warnings++;
    note_row(st, ROW_WARNING, row, ARRAY_SIZE(row));
    return held_add(st, &st->warning, row, e);
}

int stage_each_warning(struct stage *st,
                       int (*fn)(void *user, const struct cell *row, struct err *e),
                       void *user, struct err *e)
{
    static const char sql[] = "SELECT code, text FROM warning ORDER BY seq";

    return each_held(st, &st->warning, sql, fn, user, e);
}

int stage_origin(struct stage *st, const char *text, bool passed, struct err *e)
{
    const struct cell row[] = {cell_text(text), cell_int(passed)};

    note_row(st, ROW_ORIGIN, row, ARRAY_SIZE(row));
    return held_add(st, &st->origin, row, e);
}

int stage_each_origin(struct stage *st,
                      int (*fn)(void *user, const struct cell *row, struct err *e),
                      void *user, struct err *e)
{
    static const char sql[] = "SELECT text, passed FROM origin ORDER BY seq";

    return each_held(st, &st->origin, sql, fn, user, e);
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

int stage_tensor(struct stage *st, const struct stage_tensor *t, struct err *e)
{
    const struct stage_rights *r = &t->rights;
    struct cell row[STAGED_COLUMNS];
    size_t name_len;

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
    row[STAGED_RULE] = cell_int(t->rule);
    row[STAGED_FIRST_FILE] = cell_unless(t->first_file < 0, (uint64_t)t->first_file);
    row[STAGED_PIECES] = cell_blob(t->pieces, t->pieces_len);
    st->tensors++;
    note_row(st, ROW_TENSOR, row, ARRAY_SIZE(row));
    return held_add(st, &st->rows, row, e);
}

int stage_order(struct stage *st, struct held_walk *out, struct err *e)
{
    static const char sorted[] =
        "SELECT " STAGED_LIST " FROM tensor ORDER BY name, seq";

    held_sort(&st->rows);
    return held_begin(st, &st->rows, sorted, out, e);
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
    int rc = st->rows.spilled ? 0 : held_spill(st, &st->rows, e);

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

/* 1: no two objects in memory have the same key; 0: two have, or they are in the table. */
static int objects_differ(const struct stage *st, struct err *e)
{
    CLEANUP(keyset_release) struct keyset seen = {0};
    struct cell cell[2];
    int rc = !st->object.spilled;

    for (size_t i = 0; rc == 1 && i < st->object.rows.count; i++) {
        rows_get(&st->object.rows, i, cell, ARRAY_SIZE(cell));
        rc = keyset_add(&seen, cell[0].data, cell[0].len);
    }
    return rc < 0 ? err_nomem(e) : rc;
}

int stage_settle_objects(struct stage *st, struct err *e)
{
    static const char all[] = "SELECT seq, key FROM object ORDER BY seq";
    CLEANUP(settle_release) struct settle s = {.st = st};
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[2];
    int rc = objects_differ(st, e);

    if (rc != 0)
        return MIN(rc, 0);
    if (!st->object.spilled)
        rc = held_spill(st, &st->object, e);
    if (rc == 0)
        rc = query_begin(st->conn, all, &q, e);
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
