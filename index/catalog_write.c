/* SPDX-License-Identifier: MIT */
/* index/catalog_write.c - puts a staged scan into the index, in one transaction. */
#include "index/catalog_write.h"

#include "base/arena.h"
#include "base/checked.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/vec.h"
#include "index/catalog_open.h"
#include "index/catalog_stage.h"
#include "index/catalog_tensor.h"
#include "index/catalog_view.h"
#include "index/names.h"

#include <xxhash.h>

#include <errno.h>
#include <string.h>

enum {
    NAMES_A_ROW = 64, /* a fifth of a page of sqlite's: what is longer overflows */
    FEW_ROWS = 1000,  /* 500 KiB of pages: the cache of a pooled connection has them */
    INFO_MEMORY = 1 << 20,
};

/* An entry of the index of names, before it is sorted. */
struct name_ref {
    uint64_t hash;
    uint32_t ord;
};

struct totals {
    uint64_t tensors, chunks, bytes, faults;
    uint64_t by_role[3], bytes_by_role[3];
};

/* One attempt to write. */
struct commit {
    struct stage *st;
    struct conn *conn;
    const struct stage_result *result;
    int64_t id; /* of the new checkpoint, or of the old one that stays */
    uint64_t print;
    bool kept;
    struct totals totals;
    uint32_t objects, warnings, origins; /* rows that were put */
    struct name_ref *names;              /* malloc */
    size_t nnames, names_cap;
    struct buf scratch;
};

static void commit_release(struct commit *c)
{
    free(c->names);
    buf_release(&c->scratch);
}

/* A sum that stays at its largest value instead of wrapping. */
static void count(uint64_t *total, uint64_t v)
{
    if (add_overflows(*total, v, total) || *total > INT64_MAX)
        *total = INT64_MAX;
}

/* Runs an INSERT that is kept; the last cell becomes the sum of those before. */
static int put_summed(struct conn *n, const char *sql, struct cell *row, size_t count,
                      struct err *e)
{
    CLEANUP(query_end) struct query q = {0};
    int rc = query_begin(n, sql, &q, e);

    row[count - 1] = cell_int(cells_sum(row, count - 1));
    return rc == 0 ? query_write(&q, row, count, e) : rc;
}

/*
 * Who shares the metadata file's group must not read or write through us what he could not
 * in the shards.
 */
static uint32_t effective_mode(const struct stage_rights *r,
                               const struct stage_rights *owner)
{
    uint32_t mode = r->mode;

    if (r->mixed || r->uid != owner->uid)
        return 0400;
    if (r->mixed_groups || r->gid != owner->gid)
        mode &= ~(uint32_t)070 | (mode & 07) << 3;
    return mode;
}

/* What the tensor's (or else the metadata) file allows. */
static struct stage_rights tensor_rights(const struct commit *c, const struct cell *row)
{
    struct stage_rights owner = c->result->owner, r = {0};

    r.any = row[STAGED_MODE].kind == CELL_INT;
    if (!r.any)
        r = owner;
    if (row[STAGED_MODE].kind == CELL_INT) {
        r.mode = (uint32_t)row[STAGED_MODE].num;
        r.mixed = row[STAGED_UID].kind != CELL_INT;
        r.mixed_groups = row[STAGED_GID].kind != CELL_INT;
        r.uid = (uint32_t)row[STAGED_UID].num;
        r.gid = (uint32_t)row[STAGED_GID].num;
        r.mtime_ns = (int64_t)row[STAGED_MTIME].num;
    }
    r.mode = r.any ? effective_mode(&r, &owner) : 0400;
    return r;
}

/*
 * Even and at least 2^32 (the .npy has the next number, small ones are the mount's own).
 * The same for the same place, key and shards, whatever the order of the scan.
 */
static uint64_t inode_of(const struct stage_result *r, const struct cell *key,
                         uint64_t identity)
{
    const char *file = r->file ? r->file : "";
    uint64_t h = XXH3_64bits_withSeed(r->path, strlen(r->path) + 1, identity);

    h = XXH3_64bits_withSeed(file, strlen(file) + 1, h);
    h = XXH3_64bits_withSeed(key->data, key->len, h) & INT64_MAX & ~(uint64_t)1;
    return h >> 32 ? h : h | (uint64_t)1 << 32;
}

static int note_name(struct commit *c, const struct cell *name, uint32_t ord,
                     struct err *e)
{
    if (!VEC_ROOM(c->names, c->nnames, c->names_cap))
        return err_nomem(e);
    c->names[c->nnames++] =
        (struct name_ref){name_hash(c->id, name->data, name->len), ord};
    return 0;
}

static bool cells_equal(const struct cell *a, const struct cell *b)
{
    return a->len == b->len && memcmp(a->data, b->data, a->len) == 0;
}

/* The names of the files: NULL where they follow from the key. */
static int settle_names(struct commit *c, const struct cell *staged, struct cell *row,
                        uint32_t ord, struct err *e)
{
    const struct cell *key = &staged[STAGED_KEY], *name = &staged[STAGED_NAME];
    struct buf *npy = &c->scratch;
    int rc = note_name(c, name, ord, e);

    row[TENSOR_NAME] = cells_equal(key, name) ? cell_text(NULL) : *name;
    row[TENSOR_NAME_NPY] = cell_text(NULL);
    buf_clear(npy);
    if (rc == 0 && name_of_key(key->data, key->len, ".npy", npy) < 0)
        rc = err_nomem(e);
    if (rc == 0 &&
        (npy->len != name->len + 4 || memcmp(npy->data, name->data, name->len) != 0)) {
        row[TENSOR_NAME_NPY] = cell_blob(npy->data, npy->len);
        rc = note_name(c, &row[TENSOR_NAME_NPY], ord, e);
    }
    return rc;
}

static void count_tensor(struct totals *t, const struct cell *staged)
{
    unsigned role = (unsigned)staged[STAGED_ROLE].num % 3;

    t->tensors++;
    t->faults += staged[STAGED_FAULT].kind == CELL_BLOB;
    t->by_role[role]++;
    count(&t->chunks, staged[STAGED_CHUNKS].num);
    count(&t->bytes, staged[STAGED_BYTES].num);
    count(&t->bytes_by_role[role], staged[STAGED_BYTES].num);
}

static void fill_row(const struct commit *c, const struct cell *staged, uint32_t ord,
                     struct cell *row)
{
    const struct stage_rights r = tensor_rights(c, staged);
    const struct cell *pieces = &staged[STAGED_PIECES];
    bool renamed = staged[STAGED_RAW_KEY].kind == CELL_BLOB;
    enum dtype dtype = (enum dtype)staged[STAGED_DTYPE].num;

    row[TENSOR_ID] = cell_int((uint64_t)row_id(c->id, ord));
    row[TENSOR_KEY] = staged[STAGED_KEY];
    row[TENSOR_PART] = staged[STAGED_PART];
    row[TENSOR_WRAPPER] = staged[STAGED_WRAPPER];
    row[TENSOR_DTYPE] = staged[STAGED_DTYPE];
    row[TENSOR_STORED] = staged[STAGED_STORED];
    row[TENSOR_BITS] = cell_int(dtype_bits(dtype));
    row[TENSOR_SHAPE] = staged[STAGED_SHAPE];
    row[TENSOR_ROLE] = staged[STAGED_ROLE];
    row[TENSOR_BYTES] = staged[STAGED_BYTES];
    row[TENSOR_CHUNKS] = staged[STAGED_CHUNKS];
    row[TENSOR_FAULT] = staged[STAGED_FAULT];
    row[TENSOR_CODEC_KEY] = staged[STAGED_CODEC_KEY];
    if (renamed && staged[STAGED_CODEC_KEY].kind == CELL_NULL)
        row[TENSOR_CODEC_KEY] = staged[STAGED_RAW_KEY];
    row[TENSOR_ATTRIBUTES] = staged[STAGED_ATTRIBUTES];
    row[TENSOR_INO] =
        cell_int(inode_of(c->result, &staged[STAGED_KEY], staged[STAGED_IDENTITY].num));
    row[TENSOR_MODE] = cell_int(r.mode);
    row[TENSOR_UID] = cell_int(c->result->owner.uid);
    row[TENSOR_GID] = cell_int(c->result->owner.gid);
    row[TENSOR_MTIME] = cell_int((uint64_t)r.mtime_ns);
    row[TENSOR_SINGLE_FILE] = staged[STAGED_SINGLE_FILE];
    row[TENSOR_RULE] = staged[STAGED_RULE];
    row[TENSOR_FIRST_FILE] = staged[STAGED_FIRST_FILE];
    row[TENSOR_PIECES_SUM] = cell_int(XXH3_64bits(pieces->data, pieces->len));
    row[TENSOR_COLUMNS] = cell_int(cells_sum(row, TENSOR_COLUMNS));
    row[TENSOR_COLUMNS + 1] = *pieces;
}

static int put_tensor(struct commit *c, const struct cell *staged, struct err *e)
{
    static const char sql[] = "INSERT INTO tensor (" TENSOR_LIST(
        "") ", pieces) VALUES (?1, ?2, ?3, ?4, ?5, ?6,"
            " ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22,"
            " ?23, ?24, ?25, ?26, ?27)";
    CLEANUP(query_end) struct query q = {0};
    const struct cell *key = &staged[STAGED_KEY];
    struct cell row[TENSOR_COLUMNS + 2];
    uint32_t ord = (uint32_t)c->totals.tensors;
    int rc = settle_names(c, staged, row, ord, e);

    if (rc < 0)
        return rc;
    fill_row(c, staged, ord, row);
    count_tensor(&c->totals, staged);
    rc = query_begin(c->conn, sql, &q, e);
    if (rc == 0)
        rc = query_write(&q, row, ARRAY_SIZE(row), e);
    return rc == 0 ? stage_tree(c->st, key->data, key->len, ord, e) : rc;
}

/* Tensors in byte order of their names. */
static int put_tensors(struct commit *c, struct held_walk *order, struct err *e)
{
    struct cell staged[STAGED_COLUMNS];
    int rc;

    while ((rc = held_next(order, staged, e)) == 1) {
        rc = put_tensor(c, staged, e);
        if (rc < 0)
            return rc;
    }
    return rc;
}

static int by_hash(const void *a, const void *b)
{
    const struct name_ref *x = a, *y = b;

    if (x->hash != y->hash)
        return (int64_t)x->hash < (int64_t)y->hash ? -1 : 1; /* as sqlite compares */
    return (x->ord > y->ord) - (x->ord < y->ord);
}

/* `n` names, in their order, as one row. */
static int put_name_row(struct commit *c, const struct name_ref *name, size_t n,
                        struct err *e)
{
    static const char sql[] = "INSERT INTO tensor_name VALUES (?1, ?2, ?3, ?4)";
    struct buf *data = &c->scratch;
    struct cell row[4] = {cell_int((uint64_t)c->id), cell_int(name[0].hash)};

    buf_clear(data);
    for (size_t i = 0; i < n; i++) {
        char entry[NAME_ENTRY];

        put_le64(entry, name[i].hash);
        put_le32(entry + sizeof name[i].hash, name[i].ord);
        buf_add(data, entry, sizeof entry);
    }
    if (buf_failed(data))
        return err_nomem(e);
    row[2] = cell_blob(data->data, data->len);
    return put_summed(c->conn, sql, row, ARRAY_SIZE(row), e);
}

/* Sorted, so that each goes to the end of the table. Those of one hash share a row. */
static int put_names(struct commit *c, struct err *e)
{
    size_t done = 0;
    int rc = 0;

    if (c->nnames > 0)
        qsort(c->names, c->nnames, sizeof *c->names, by_hash);
    while (rc == 0 && done < c->nnames) {
        size_t end = MIN(done + NAMES_A_ROW, c->nnames);

        while (end < c->nnames && c->names[end].hash == c->names[end - 1].hash)
            end++;
        rc = put_name_row(c, c->names + done, end - done, e);
        done = end;
    }
    free(steal(&c->names));
    return rc;
}

static int put_file(void *user, const struct cell *staged, struct err *e)
{
#define FILE_VALUES                                                                    \
    " INTO file VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)"
    static const char insert[] = "INSERT" FILE_VALUES,
                      replace[] = "REPLACE" FILE_VALUES;
    struct commit *c = user;
    const struct stage_result *r = c->result;
    uint32_t number = (uint32_t)staged[STAGED_FILE_NUMBER].num;
    struct stage_use use;
    struct cell row[12];

    r->file_use(r->user, number, &use);
    row[0] = cell_int((uint64_t)row_id(c->id, number));
    row[1] = staged[STAGED_FILE_PATH];
    memcpy(row + 2, staged + STAGED_FILE_DEV, 6 * sizeof *row);
    row[8] = cell_int(use.storage ? FILE_STORAGE : use.copy ? FILE_COPY : FILE_WATCHED);
    row[9] = cell_int(use.whole);
    row[10] = cell_int(use.tensors);
    return put_summed(c->conn, c->kept ? replace : insert, row, ARRAY_SIZE(row), e);
}

/* Two staged columns behind the id of a row; what is summed has its sum as the last one. */
static int copy_row(struct commit *c, const char *to, uint32_t number,
                    const struct cell *staged, bool summed, struct err *e)
{
    CLEANUP(query_end) struct query put = {0};
    struct cell row[4] = {cell_int((uint64_t)row_id(c->id, number)), staged[0],
                          staged[1]};
    int rc = query_begin(c->conn, to, &put, e);

    row[3] = cell_int(cells_sum(row, 3));
    return rc == 0 ? query_write(&put, row, summed ? 4 : 3, e) : rc;
}

static int put_hidden(void *user, const struct cell *staged, struct err *e)
{
    static const char to[] = "INSERT INTO hidden VALUES (?1 >> 32, ?2, ?3)";

    return copy_row(user, to, 0, staged, false, e);
}

static int put_object(void *user, const struct cell *staged, struct err *e)
{
    static const char to[] = "INSERT INTO object VALUES (?1, ?2, ?3, ?4)";
    struct commit *c = user;

    return copy_row(c, to, c->objects++, staged, true, e);
}

static int put_warning(void *user, const struct cell *staged, struct err *e)
{
    static const char to[] = "INSERT INTO warning VALUES (?1, ?2, ?3)";
    struct commit *c = user;

    return copy_row(c, to, c->warnings++, staged, false, e);
}

static int put_origin(void *user, const struct cell *staged, struct err *e)
{
    static const char to[] = "INSERT INTO origin VALUES (?1, ?2, ?3)";
    struct commit *c = user;

    return copy_row(c, to, ++c->origins, staged, false, e);
}

/* Of what tells of all of it: the metadata file counts as well. */
static uint32_t mode_of_all(const struct stage_result *r,
                            const struct stage_rights *storage)
{
    uint32_t mode = effective_mode(storage, &r->owner);

    return r->owner.any ? mode & r->owner.mode : mode;
}

static int put_checkpoint(struct commit *c, struct err *e)
{
    static const char sql[] =
        "INSERT INTO checkpoint (" CHECKPOINT_LIST
        ") VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7,"
        " ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23,"
        " ?24, ?25, ?26, ?27, ?28, ?29, ?30, ?31, ?32, ?33, ?34, ?35, ?36)";
    const struct stage_result *r = c->result;
    const struct sink_checkpoint *about = r->about;
    const struct stage_rights *all = r->all.any ? &r->all : &r->owner;
    CLEANUP(query_end) struct query q = {0};
    struct cell row[CP_ALL];
    int rc;

    row[CP_ID] = cell_int((uint64_t)c->id);
    row[CP_PATH] = cell_text(r->path);
    row[CP_FILE] = cell_text(r->file ? r->file : "");
    row[CP_FORMAT] = cell_text(about->format ? about->format : "");
    row[CP_FRAMEWORK] = cell_text(about->framework);
    row[CP_VERSION] = cell_text(about->version);
    row[CP_TOPOLOGY] = cell_text(about->topology);
    row[CP_HEADER] = cell_text(about->header);
    row[CP_STEP] = about->has_step ? cell_int((uint64_t)about->step) : cell_text(NULL);
    row[CP_ADAPTER] = cell_int(about->adapter);
    row[CP_ERROR] = cell_text(r->error);
    row[CP_METADATA_FILE] = cell_text(about->metadata_file);
    row[CP_MODE] = cell_int(all->any ? mode_of_all(r, all) : 0400);
    row[CP_UID] = cell_int(r->owner.uid);
    row[CP_GID] = cell_int(r->owner.gid);
    row[CP_MTIME] = cell_int((uint64_t)all->mtime_ns);
    row[CP_TENSORS] = cell_int(c->totals.tensors);
    row[CP_CHUNKS] = cell_int(c->totals.chunks);
    row[CP_BYTES] = cell_int(c->totals.bytes);
    row[CP_FAULTS] = cell_int(c->totals.faults);
    row[CP_OBJECTS] = cell_int(r->error ? 0 : c->st->objects);
    row[CP_FILES] = cell_int(r->files);
    for (unsigned i = 0; i < 3; i++) {
        row[CP_ROLE_TENSORS + i] = cell_int(c->totals.by_role[i]);
        row[CP_ROLE_BYTES + i] = cell_int(c->totals.bytes_by_role[i]);
    }
    row[CP_PRINT] = cell_int(c->print);
    row[CP_COLUMNS] = cell_int(cells_sum(row, CP_COLUMNS));
    row[CP_NAMES_HASH] = cell_int(r->names_hash);
    row[CP_DIR] = cell_int(r->dir_id.dev);
    row[CP_DIR + 1] = cell_int(r->dir_id.ino);
    row[CP_DIR + 2] = cell_int(r->dir_id.size);
    row[CP_DIR + 3] = cell_int((uint64_t)r->dir_id.mtime_ns);
    row[CP_DIR + 4] = cell_int((uint64_t)r->dir_id.ctime_ns);
    rc = query_begin(c->conn, sql, &q, e);
    return rc == 0 ? query_write(&q, row, CP_ALL, e) : rc;
}

/* The views that a mount shows by default; others are made when they are asked for. */
static int put_views(struct commit *c, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(INFO_MEMORY);
    struct checkpoint_info cp;
    int rc = a ? checkpoint_read(c->conn, c->id, a, &cp, e) : err_nomem(e);

    if (rc == 0)
        rc = view_build(c->conn, &cp, VIEW_MODEL, PREFIX_AUTO, e);
    if (rc == 0)
        rc = view_build(c->conn, &cp, VIEW_OPTIMIZER, PREFIX_AUTO, e);
    return rc;
}

/* The next id: below 2^31, as it stands in the upper half of row ids. */
static int next_id(struct commit *c, struct err *e)
{
    static const char sql[] =
        "SELECT seq FROM sqlite_sequence WHERE name = 'checkpoint'";
    CLEANUP(query_end) struct query q = {0};
    struct cell seq;
    int rc = conn_find(c->conn, sql, NULL, 0, &q, e);

    if (rc == 1)
        rc = query_row(&q, &seq, 1, e);
    else if (rc == 0)
        rc = conn_damaged(c->conn, e, "no ids");
    if (rc < 0)
        return rc;
    c->id = (int64_t)seq.num + 1;
    return owner_is_valid(c->id) ? 0 : conn_damaged(c->conn, e, "ids are used up");
}

/* ---- what was there before ---- */

/* The id of what the index has of the place, 0: nothing; and what was found then. */
static int find_old(struct commit *c, int64_t *old, uint64_t *print, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = NULL;
    const struct stage_result *r = c->result;
    struct checkpoint_info info = {0};
    int rc = checkpoint_at(c->conn, r->path, r->file, old, e);

    if (rc == 0 && *old) {
        a = arena_new(INFO_MEMORY);
        rc = a ? checkpoint_read(c->conn, *old, a, &info, e) : err_nomem(e);
    }
    *print = info.print;
    return rc;
}

static int renew_directory(void *user, const struct cell *staged, struct err *e)
{
    return staged[STAGED_FILE_DIR].num ? put_file(user, staged, e) : 0;
}

/* The same was found again: the id stays, and whoever reads by it goes on. */
static int keep_old(struct commit *c, int64_t old, struct err *e)
{
    static const char sql[] = "UPDATE checkpoint SET names_hash = ?2 WHERE id = ?1";
    const int64_t values[] = {old, (int64_t)c->result->names_hash};
    int rc = conn_write_ints(c->conn, sql, values, ARRAY_SIZE(values), e);

    if (rc == 0)
        rc = checkpoint_set_dir(c->conn, old, &c->result->dir_id, e);
    c->id = old;
    c->kept = true;
    return rc == 0 ? stage_files(c->st, renew_directory, c, e) : rc;
}

/* ---- one attempt ---- */

static int write_new(struct commit *c, struct held_walk *order, struct err *e)
{
    bool failed = c->result->error != NULL;
    int rc = next_id(c, e);

    if (rc == 0 && !failed)
        rc = put_tensors(c, order, e);
    if (rc == 0)
        rc = put_names(c, e);
    if (rc == 0 && !failed)
        rc = tree_write(c->conn, c->st, c->id, e);
    if (rc == 0)
        rc = stage_files(c->st, put_file, c, e);
    if (rc == 0)
        rc = stage_each_hidden(c->st, put_hidden, c, e);
    if (rc == 0 && !failed)
        rc = stage_each_object(c->st, put_object, c, e);
    if (rc == 0)
        rc = stage_each_warning(c->st, put_warning, c, e);
    if (rc == 0)
        rc = stage_each_origin(c->st, put_origin, c, e);
    if (rc == 0)
        rc = put_checkpoint(c, e);
    if (rc == 0)
        rc = put_views(c, e);
    return rc;
}

static int write_all_rows(struct commit *c, struct held_walk *order, struct err *e)
{
    uint64_t print = 0;
    int64_t old = 0;
    int rc = find_old(c, &old, &print, e);

    if (rc < 0)
        return rc;
    if (old && c->result->guarded && old != c->result->seen)
        return err_set(e, EAGAIN, "another process has scanned it meanwhile");
    if (old && print && print == c->print)
        return keep_old(c, old, e);
    if (old)
        rc = checkpoint_delete(c->conn, old, e);
    return rc == 0 ? write_new(c, order, e) : rc;
}

/* May the pool's connection write it? It has its statements, and who reads the rows next. */
static bool is_small(const struct stage *st)
{
    return st->tensors + st->files.rows.count + st->hidden.rows.count +
                   st->object.rows.count <=
               FEW_ROWS &&
           !st->conn;
}

/* Sorts before it takes the lock on the index. */
static int commit_once(struct commit *c, struct catalog *catalog, struct err *e)
{
    CLEANUP(held_end) struct held_walk order = {0};
    int rc = stage_tree_clear(c->st, e);

    if (rc == 0)
        rc = stage_order(c->st, &order, e);
    if (rc < 0)
        return rc;
    catalog_check_moved(catalog);
    rc = conn_take(catalog, !is_small(c->st), &c->conn, e);
    if (rc == 0)
        rc = conn_begin(c->conn, true, e);
    if (rc == 0)
        rc = write_all_rows(c, &order, e);
    if (rc == 0)
        rc = conn_commit(c->conn, e);
    if (rc < 0 && c->conn)
        conn_rollback(c->conn);
    return rc;
}

int stage_commit(struct stage *st, struct catalog *catalog,
                 const struct stage_result *r, int64_t *id, struct err *e)
{
    int rc = r->many_parts ? stage_settle_keys(st, e) : 0;

    if (rc == 0)
        rc = stage_settle_objects(st, e);
    /* The second attempt is on a new file, or in memory: the old one was damaged, or full. */
    for (unsigned attempt = 0; rc == 0 && attempt < 2; attempt++) {
        struct commit c = {.st = st, .result = r, .print = stage_print(st, r)};
        bool memory = catalog_in_memory(catalog);

        rc = commit_once(&c, catalog, e);
        conn_put(c.conn);
        commit_release(&c);
        *id = c.id;
        if (rc != -EBADMSG && (memory || !catalog_leave_disk(catalog, rc, e)))
            return rc;
        if (attempt == 0) {
            *e = (struct err){0};
            rc = 0;
        }
    }
    return rc;
}
