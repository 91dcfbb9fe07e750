/* SPDX-License-Identifier: MIT */
/* index/catalog.c - reads checkpoints, their files, objects and warnings. */
#include "index/catalog.h"

#include "base/arena.h"
#include "base/err.h"
#include "index/catalog_conn.h"
#include "index/catalog_tensor.h"
#include "index/catalog_write.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

/* Rows of one owner: ?1 and ?2 are its first and last id. */
static int begin_range(struct conn *n, const char *sql, int64_t owner, struct query *q,
                       struct err *e)
{
    int rc = query_begin(n, sql, q, e);

    return rc == 0
               ? query_bind_ints(
                     q, (const int64_t[]){row_id(owner, 0), row_id_last(owner)}, 2, e)
               : rc;
}

/* 0 when the checkpoint is there, else -ESTALE. */
static int check_there(struct conn *n, int64_t checkpoint, struct err *e)
{
    int rc = conn_missing(n, checkpoint, "row", e);

    if (rc != -ENOENT)
        return rc;
    *e = (struct err){0};
    return 0;
}

/* Begins a list of a checkpoint's rows, on a connection that the caller gives back. */
static int list_begin(struct catalog *c, const char *sql, int64_t checkpoint,
                      struct conn **n, struct query *q, struct err *e)
{
    TRY(conn_take(c, false, n, e));
    TRY(check_there(*n, checkpoint, e));
    return begin_range(*n, sql, checkpoint, q, e);
}

static int text_of(struct arena *a, const struct cell *c, const char **out,
                   struct err *e)
{
    *out = NULL;
    if (c->kind != CELL_BLOB)
        return 0;
    *out = arena_memdup(a, c->data, c->len);
    return *out ? 0 : err_nomem(e);
}

/* --- checkpoints --- */

static void read_file_id(const struct cell *c, struct file_id *out)
{
    *out = (struct file_id){c[0].num, c[1].num, c[2].num, (int64_t)c[3].num,
                            (int64_t)c[4].num};
}

static int read_checkpoint_texts(const struct cell *row, struct arena *a,
                                 struct checkpoint_info *out, struct err *e)
{
    const struct {
        enum checkpoint_column column;
        const char **out;
    } texts[] = {
        {CP_PATH, &out->path},
        {CP_FILE, &out->file},
        {CP_FORMAT, &out->format},
        {CP_FRAMEWORK, &out->framework},
        {CP_VERSION, &out->version},
        {CP_TOPOLOGY, &out->topology},
        {CP_HEADER, &out->header},
        {CP_ERROR, &out->error},
        {CP_METADATA_FILE, &out->metadata_file},
    };

    for (size_t i = 0; i < ARRAY_SIZE(texts); i++)
        TRY(text_of(a, &row[texts[i].column], texts[i].out, e));
    if (out->file && out->file[0] == '\0')
        out->file = NULL;
    return 0;
}

static void read_checkpoint_numbers(const struct cell *row, struct checkpoint_info *out)
{
    out->id = (int64_t)row[CP_ID].num;
    out->has_step = row[CP_STEP].kind == CELL_INT;
    out->step = (int64_t)row[CP_STEP].num;
    out->adapter = row[CP_ADAPTER].num != 0;
    out->mode = (mode_t)(row[CP_MODE].num & 0777);
    out->uid = (uid_t)row[CP_UID].num;
    out->gid = (gid_t)row[CP_GID].num;
    out->mtime_ns = (int64_t)row[CP_MTIME].num;
    out->tensors = row[CP_TENSORS].num;
    out->chunks = row[CP_CHUNKS].num;
    out->bytes = row[CP_BYTES].num;
    out->faults = row[CP_FAULTS].num;
    out->objects = row[CP_OBJECTS].num;
    out->files = row[CP_FILES].num;
    for (unsigned i = 0; i < 3; i++) {
        out->by_role[i] = row[CP_ROLE_TENSORS + i].num;
        out->bytes_by_role[i] = row[CP_ROLE_BYTES + i].num;
    }
    out->print = row[CP_PRINT].num;
    out->names_hash = row[CP_NAMES_HASH].num;
    read_file_id(row + CP_DIR, &out->dir_id);
}

/* Warnings may be added after the scan, by views. */
static int count_warnings(struct conn *n, struct checkpoint_info *out, struct err *e)
{
    static const char sql[] = "SELECT count(*) FROM warning WHERE id BETWEEN ?1 AND ?2";
    CLEANUP(query_end) struct query q = {0};
    struct cell cell = {0};
    int rc = begin_range(n, sql, out->id, &q, e);

    if (rc == 0)
        rc = query_step(&q, e);
    if (rc == 1)
        rc = query_row(&q, &cell, 1, e);
    if (rc == 0)
        out->warnings = cell.num;
    return rc;
}

/* The row on which q stands. */
static int read_checkpoint(struct query *q, struct arena *a,
                           struct checkpoint_info *out, struct err *e)
{
    struct cell row[CP_ALL];
    int rc = query_row(q, row, CP_ALL, e);

    if (rc < 0)
        return rc;
    *out = (struct checkpoint_info){0};
    if (row[CP_COLUMNS].num != cells_sum(row, CP_COLUMNS))
        return conn_damaged(q->conn, e, "the sum of a checkpoint is wrong");
    read_checkpoint_numbers(row, out);
    rc = read_checkpoint_texts(row, a, out, e);
    if (rc == 0 && (!out->path || !out->format || !owner_is_valid(out->id) ||
                    out->tensors > UINT32_MAX || out->files > UINT32_MAX ||
                    row[CP_UID].num > UINT32_MAX || row[CP_GID].num > UINT32_MAX))
        return conn_damaged(q->conn, e, "a checkpoint is impossible");
    return rc;
}

int checkpoint_read(struct conn *n, int64_t id, struct arena *a,
                    struct checkpoint_info *out, struct err *e)
{
    static const char sql[] =
        "SELECT " CHECKPOINT_LIST " FROM checkpoint WHERE id = ?1";
    CLEANUP(query_end) struct query q = {0};
    int rc = conn_find(n, sql, &id, 1, &q, e);

    if (rc == 0)
        return err_set(e, ESTALE, "the checkpoint was scanned anew");
    if (rc == 1)
        rc = read_checkpoint(&q, a, out, e);
    return rc == 0 ? count_warnings(n, out, e) : rc;
}

int checkpoint_at(struct conn *n, const char *path, const char *file, int64_t *id,
                  struct err *e)
{
    static const char sql[] = "SELECT id FROM checkpoint WHERE path = ?1 AND file = ?2";
    CLEANUP(query_end) struct query q = {0};
    const struct cell place[] = {cell_text(path), cell_text(file ? file : "")};
    struct cell found;
    int rc = query_begin(n, sql, &q, e);

    *id = 0;
    if (rc == 0)
        rc = query_bind(&q, place, ARRAY_SIZE(place), e);
    if (rc == 0)
        rc = query_step(&q, e);
    if (rc == 1)
        rc = query_row(&q, &found, 1, e);
    else
        return rc;
    if (rc == 0)
        *id = (int64_t)found.num;
    return rc;
}

int catalog_checkpoint(struct catalog *c, const char *path, const char *file,
                       struct arena *a, struct checkpoint_info *out, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    int64_t id = 0;
    int rc = conn_take(c, false, &n, e);

    if (rc == 0) /* or another process could replace it between the two */
        rc = conn_begin(n, false, e);
    if (rc == 0)
        rc = checkpoint_at(n, path, file, &id, e);
    if (rc == 0)
        rc = id ? checkpoint_read(n, id, a, out, e) : -ENOENT;
    if (rc == -ENOENT || rc == -ESTALE)
        return err_set(e, ENOENT, "%s is not in the index", path);
    if (rc == 0 && (strcmp(out->path, path) != 0 || !out->file != !file ||
                    (file && strcmp(out->file, file) != 0)))
        return conn_damaged(n, e, "a checkpoint is at another place");
    return rc;
}

int catalog_checkpoint_by_id(struct catalog *c, int64_t id, struct arena *a,
                             struct checkpoint_info *out, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    int rc = conn_take(c, false, &n, e);

    return rc == 0 ? checkpoint_read(n, id, a, out, e) : rc;
}

int catalog_has(struct catalog *c, int64_t id, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    int rc = conn_take(c, false, &n, e);

    if (rc == 0)
        rc = conn_missing(n, id, "row", e);
    if (rc != -ENOENT)
        return rc;
    *e = (struct err){0};
    return 0;
}

/* Views have ids of their own. */
static int delete_views(struct conn *n, int64_t checkpoint, struct err *e)
{
    static const char *const blocks[] = {
        "DELETE FROM view_header WHERE id IN (SELECT h.id FROM view v JOIN view_header h"
        " ON h.id BETWEEN v.id << 32 AND (v.id << 32) + 0xffffffff"
        " WHERE v.checkpoint = ?1)",
        "DELETE FROM view_member WHERE id IN (SELECT m.id FROM view v JOIN view_member m"
        " ON m.id BETWEEN v.id << 32 AND (v.id << 32) + 0xffffffff"
        " WHERE v.checkpoint = ?1)",
        "DELETE FROM view WHERE checkpoint = ?1",
        "DELETE FROM hidden WHERE checkpoint = ?1",
        "DELETE FROM tensor_name WHERE checkpoint = ?1",
        "DELETE FROM checkpoint WHERE id = ?1",
    };
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < ARRAY_SIZE(blocks); i++)
        rc = conn_write_ints(n, blocks[i], &checkpoint, 1, e);
    return rc;
}

int checkpoint_delete(struct conn *n, int64_t checkpoint, struct err *e)
{
    static const char *const ranges[] = {
        "DELETE FROM file WHERE id BETWEEN ?1 AND ?2",
        "DELETE FROM tensor WHERE id BETWEEN ?1 AND ?2",
        "DELETE FROM tree WHERE dir BETWEEN ?1 AND ?2",
        "DELETE FROM object WHERE id BETWEEN ?1 AND ?2",
        "DELETE FROM warning WHERE id BETWEEN ?1 AND ?2",
        "DELETE FROM origin WHERE id BETWEEN ?1 AND ?2",
    };
    const int64_t range[] = {row_id(checkpoint, 0), row_id_last(checkpoint)};
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < ARRAY_SIZE(ranges); i++)
        rc = conn_write_ints(n, ranges[i], range, 2, e);
    return rc == 0 ? delete_views(n, checkpoint, e) : rc;
}

int catalog_drop(struct catalog *c, int64_t id, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    int rc;

    if (!owner_is_valid(id))
        return 0;
    rc = conn_take(c, false, &n, e);
    if (rc == 0)
        rc = conn_begin(n, true, e);
    if (rc == 0)
        rc = checkpoint_delete(n, id, e);
    if (rc == 0)
        rc = conn_commit(n, e);
    if (rc < 0 && n)
        conn_rollback(n);
    return rc;
}

int checkpoint_set_dir(struct conn *n, int64_t id, const struct file_id *dir,
                       struct err *e)
{
    static const char sql[] = "UPDATE checkpoint SET dir_dev = ?2, dir_ino = ?3,"
                              " dir_size = ?4, dir_mtime_ns = ?5, dir_ctime_ns = ?6"
                              " WHERE id = ?1";
    const int64_t values[] = {id,
                              (int64_t)dir->dev,
                              (int64_t)dir->ino,
                              (int64_t)dir->size,
                              dir->mtime_ns,
                              dir->ctime_ns};

    return conn_write_ints(n, sql, values, ARRAY_SIZE(values), e);
}

int catalog_touch(struct catalog *c, int64_t id, const struct file_id *dir_id,
                  struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    int rc = conn_take(c, false, &n, e);

    if (rc < 0)
        return rc;
    conn_set_patience(n, false); /* not worth waiting for another scan's commit */
    rc = checkpoint_set_dir(n, id, dir_id, e);
    conn_set_patience(n, true);
    if (rc == 0 && conn_changes(n) == 0)
        return err_set(e, ESTALE, "the checkpoint was scanned anew");
    return rc;
}

/* --- files --- */

#define FILE_LIST                                                                      \
    "id, path, dev, ino, size, mtime_ns, ctime_ns, mode, storage, whole, tensors, sum"
enum { FILE_COLUMNS = 11 };

/* The row on which q stands. */
static int read_file(struct query *q, struct arena *a, struct catalog_file *out,
                     struct err *e)
{
    struct cell row[FILE_COLUMNS];

    TRY(query_row_summed(q, row, FILE_COLUMNS, e));
    if (row[1].kind != CELL_BLOB || row[1].len == 0 || row[1].len >= PATH_MAX ||
        memchr(row[1].data, '\0', row[1].len))
        return conn_damaged(q->conn, e, "the path of a file is impossible");
    *out = (struct catalog_file){
        .number = (uint32_t)row[0].num,
        .storage = row[8].num == FILE_STORAGE,
        .copy = row[8].num == FILE_COPY,
        .mode = (mode_t)(row[7].num & 0777),
    };
    read_file_id(row + 2, &out->id);
    return text_of(a, &row[1], &out->path, e);
}

int catalog_files(struct catalog *c, int64_t checkpoint,
                  int (*fn)(void *user, const struct catalog_file *f), void *user,
                  struct err *e)
{
    static const char sql[] =
        "SELECT " FILE_LIST " FROM file WHERE id BETWEEN ?1 AND ?2 ORDER BY id";
    CLEANUP(conn_putp) struct conn *n = NULL;
    CLEANUP(query_end) struct query q = {0};
    int rc = list_begin(c, sql, checkpoint, &n, &q, e);

    if (rc < 0)
        return rc;
    while ((rc = query_step(&q, e)) == 1) {
        CLEANUP(arena_freep) struct arena *a = arena_new(2 * PATH_MAX);
        struct catalog_file f;

        rc = a ? read_file(&q, a, &f, e) : err_nomem(e);
        if (rc == 0)
            rc = fn(user, &f);
        if (rc != 0)
            return rc;
    }
    return rc;
}

int catalog_file(struct catalog *c, int64_t checkpoint, uint32_t number,
                 struct arena *a, struct catalog_file *out, struct err *e)
{
    static const char sql[] = "SELECT " FILE_LIST " FROM file WHERE id = ?1";
    CLEANUP(conn_putp) struct conn *n = NULL;
    CLEANUP(query_end) struct query q = {0};
    int rc = conn_take(c, false, &n, e);

    if (rc == 0)
        rc = conn_find(n, sql, (const int64_t[]){row_id(checkpoint, number)}, 1, &q, e);
    if (rc == 0)
        return conn_missing(n, checkpoint, "file", e);
    return rc == 1 ? read_file(&q, a, out, e) : rc;
}

int catalog_hidden(struct catalog *c, int64_t checkpoint,
                   int (*fn)(void *user, const char *name, bool part), void *user,
                   struct err *e)
{
    static const char sql[] =
        "SELECT name, part FROM hidden WHERE checkpoint = ?1 ORDER BY name";
    CLEANUP(conn_putp) struct conn *n = NULL;
    CLEANUP(query_end) struct query q = {0};
    char name[PATH_MAX];
    struct cell cell[2];
    int rc = conn_take(c, false, &n, e);

    if (rc == 0)
        rc = check_there(n, checkpoint, e);
    if (rc == 0)
        rc = query_begin(n, sql, &q, e);
    if (rc == 0)
        rc = query_bind_ints(&q, &checkpoint, 1, e);
    if (rc < 0)
        return rc;
    while ((rc = query_step(&q, e)) == 1) {
        rc = query_row(&q, cell, 2, e);
        if (rc == 0 && (cell[0].kind != CELL_BLOB || cell[0].len >= sizeof name))
            rc = conn_damaged(n, e, "a hidden name is impossible");
        if (rc < 0)
            return rc;
        memcpy(name, cell[0].data, cell[0].len);
        name[cell[0].len] = '\0';
        rc = fn(user, name, cell[1].num != 0);
        if (rc != 0)
            return rc;
    }
    return rc;
}

/* --- objects and warnings --- */

int catalog_objects(struct catalog *c, int64_t checkpoint,
                    int (*fn)(void *user, const char *key, size_t key_len,
                              const char *json, size_t len),
                    void *user, struct err *e)
{
    static const char sql[] = "SELECT id, key, json, sum FROM object"
                              " WHERE id BETWEEN ?1 AND ?2 ORDER BY id";
    CLEANUP(conn_putp) struct conn *n = NULL;
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[3];
    int rc = list_begin(c, sql, checkpoint, &n, &q, e);

    if (rc < 0)
        return rc;
    while ((rc = query_step(&q, e)) == 1) {
        rc = query_row_summed(&q, cell, 3, e);
        if (rc == 0 && (cell[1].kind != CELL_BLOB || cell[2].kind != CELL_BLOB))
            rc = conn_damaged(n, e, "an object is impossible");
        if (rc == 0)
            rc = fn(user, cell[1].data, cell[1].len, cell[2].data, cell[2].len);
        if (rc != 0)
            return rc;
    }
    return rc;
}

int catalog_warnings(struct catalog *c, int64_t checkpoint,
                     int (*fn)(void *user, const char *code, const char *text),
                     void *user, struct err *e)
{
    static const char sql[] = "SELECT code, text FROM warning"
                              " WHERE id BETWEEN ?1 AND ?2 ORDER BY id";
    CLEANUP(conn_putp) struct conn *n = NULL;
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[2];
    int rc = list_begin(c, sql, checkpoint, &n, &q, e);

    if (rc < 0)
        return rc;
    while ((rc = query_step(&q, e)) == 1) {
        CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
        const char *code = NULL, *text = NULL;

        rc = a ? query_row(&q, cell, 2, e) : err_nomem(e);
        if (rc == 0)
            rc = text_of(a, &cell[0], &code, e);
        if (rc == 0)
            rc = text_of(a, &cell[1], &text, e);
        if (rc == 0 && (!code || !text))
            rc = conn_damaged(n, e, "a warning is impossible");
        if (rc == 0)
            rc = fn(user, code, text);
        if (rc != 0)
            return rc;
    }
    return rc;
}

bool warning_is_loss(const char *code)
{
    static const char *const losses[] = {"damaged-", "missing-", "lost-"};
    bool lost = false;

    for (size_t i = 0; i < ARRAY_SIZE(losses); i++)
        lost |= strncmp(code, losses[i], strlen(losses[i])) == 0;
    return lost;
}

int catalog_origins(struct catalog *c, int64_t checkpoint,
                    int (*fn)(void *user, const char *text, bool passed), void *user,
                    struct err *e)
{
    static const char sql[] = "SELECT text, passed FROM origin"
                              " WHERE id BETWEEN ?1 AND ?2 ORDER BY id";
    CLEANUP(conn_putp) struct conn *n = NULL;
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[2];
    int rc = list_begin(c, sql, checkpoint, &n, &q, e);

    if (rc < 0)
        return rc;
    while ((rc = query_step(&q, e)) == 1) {
        CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
        const char *text = NULL;

        rc = a ? query_row(&q, cell, 2, e) : err_nomem(e);
        if (rc == 0)
            rc = text_of(a, &cell[0], &text, e);
        if (rc == 0 && !text)
            rc = conn_damaged(n, e, "an origin is impossible");
        if (rc == 0)
            rc = fn(user, text, cell[1].num != 0);
        if (rc != 0)
            return rc;
    }
    return rc;
}

int catalog_rule(struct catalog *c, int64_t checkpoint, const struct tensor_info *t,
                 struct arena *a, const char **out, struct err *e)
{
    static const char sql[] = "SELECT text FROM origin WHERE id = ?1";
    CLEANUP(conn_putp) struct conn *n = NULL;
    CLEANUP(query_end) struct query q = {0};
    struct cell cell;
    int rc = conn_take(c, false, &n, e);

    *out = NULL;
    if (rc < 0 || t->rule == 0)
        return rc;
    rc = conn_find(n, sql, (const int64_t[]){row_id(checkpoint, t->rule)}, 1, &q, e);
    if (rc == 1)
        rc = query_row(&q, &cell, 1, e);
    return rc == 0 && cell.kind == CELL_BLOB ? text_of(a, &cell, out, e) : rc;
}

/*
 * What tensors of one role and type add up to, out of the sums of the upper and the lower
 * halves of their sizes: sqlite's own sum fails where it passes 63 bits, as the sizes that
 * sparse arrays tell soon do. Then it stays at INT64_MAX, as totals in the index.
 */
static bool read_total(const struct cell *cell, struct type_total *out)
{
    uint64_t bits, high = cell[3].num, low = cell[4].num;

    if (cell[0].num > ROLE_OTHER || cell[1].num >= DTYPE_COUNT)
        return false;
    *out = (struct type_total){.role = (enum role)cell[0].num,
                               .dtype = (enum dtype)cell[1].num,
                               .tensors = cell[2].num,
                               .bytes = INT64_MAX};
    if (high <= INT32_MAX && low <= INT64_MAX - (high << 32))
        out->bytes = (high << 32) + low;
    bits = dtype_bits(out->dtype);
    if (bits)
        out->elements = (uint64_t)((unsigned __int128)out->bytes * 8 / bits);
    return true;
}

int catalog_types(struct catalog *c, int64_t checkpoint,
                  int (*fn)(void *user, const struct type_total *t), void *user,
                  struct err *e)
{
    static const char sql[] = "SELECT role, dtype, count(*), sum(bytes >> 32),"
                              " sum(bytes & 0xffffffff) FROM tensor"
                              " WHERE id BETWEEN ?1 AND ?2 GROUP BY role, dtype"
                              " ORDER BY role, dtype";
    CLEANUP(conn_putp) struct conn *n = NULL;
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[5];
    int rc = list_begin(c, sql, checkpoint, &n, &q, e);

    if (rc < 0)
        return rc;
    while ((rc = query_step(&q, e)) == 1 && (rc = query_row(&q, cell, 5, e)) == 0) {
        struct type_total t;

        if (!read_total(cell, &t))
            return conn_damaged(n, e, "a tensor is impossible");
        rc = fn(user, &t);
        if (rc != 0)
            return rc;
    }
    return rc;
}
