/* SPDX-License-Identifier: MIT */
/* index/catalog_view.c - rows of views, and tensors in the order in which views have them. */
#include "index/catalog_view.h"

#include "base/arena.h"
#include "base/err.h"

#include <errno.h>
#include <string.h>

/* Columns of a view that the sum is of. */
enum view_column {
    VIEW_ID,
    VIEW_CHECKPOINT,
    VIEW_KIND,
    VIEW_PREFIX,
    VIEW_NAME,
    VIEW_SIZE,
    VIEW_HEADER,
    VIEW_WHOLE_FILE,
    VIEW_FAULT,
    VIEW_INO,
    VIEW_MODE,
    VIEW_UID,
    VIEW_GID,
    VIEW_MTIME,
    VIEW_COUNT,
    VIEW_COLUMNS
};

#define VIEW_LIST                                                                      \
    "id, checkpoint, kind, prefix, name, size, header, whole_file, fault, ino, mode, " \
    "uid, gid, mtime_ns, members, sum"

static int read_view(struct query *q, struct arena *a, struct view_info *out,
                     struct err *e)
{
    struct cell row[VIEW_COLUMNS];

    TRY(query_row_summed(q, row, VIEW_COLUMNS, e));
    if (row[VIEW_NAME].kind != CELL_BLOB || row[VIEW_KIND].num > VIEW_OPTIMIZER ||
        !owner_is_valid((int64_t)row[VIEW_ID].num) || row[VIEW_SIZE].num > INT64_MAX ||
        row[VIEW_HEADER].num > row[VIEW_SIZE].num || row[VIEW_MODE].num > 0777 ||
        row[VIEW_WHOLE_FILE].num > UINT32_MAX)
        return conn_damaged(q->conn, e, "a view is impossible");
    *out = (struct view_info){
        .id = (int64_t)row[VIEW_ID].num,
        .kind = (enum view_kind)row[VIEW_KIND].num,
        .name = arena_memdup(a, row[VIEW_NAME].data, row[VIEW_NAME].len),
        .size = row[VIEW_COUNT].num || row[VIEW_WHOLE_FILE].kind == CELL_INT
                    ? row[VIEW_SIZE].num
                    : 0,
        .header = row[VIEW_HEADER].num,
        .whole_file = -1,
        .ino = row[VIEW_INO].num,
        .mode = (mode_t)row[VIEW_MODE].num,
        .uid = (uid_t)row[VIEW_UID].num,
        .gid = (gid_t)row[VIEW_GID].num,
        .mtime_ns = (int64_t)row[VIEW_MTIME].num,
    };
    if (row[VIEW_WHOLE_FILE].kind == CELL_INT)
        out->whole_file = (int64_t)row[VIEW_WHOLE_FILE].num;
    if (row[VIEW_FAULT].kind == CELL_BLOB)
        out->fault = arena_memdup(a, row[VIEW_FAULT].data, row[VIEW_FAULT].len);
    if (!out->name || (row[VIEW_FAULT].kind == CELL_BLOB && !out->fault))
        return err_nomem(e);
    return 1;
}

int view_row_get(struct conn *n, int64_t checkpoint, enum view_kind kind,
                 enum view_prefix prefix, struct arena *a, struct view_info *out,
                 struct err *e)
{
    static const char sql[] = "SELECT " VIEW_LIST " FROM view"
                              " WHERE checkpoint = ?1 AND kind = ?2 AND prefix = ?3";
    CLEANUP(query_end) struct query q = {0};
    int rc = conn_find(n, sql, (const int64_t[]){checkpoint, kind, prefix}, 3, &q, e);

    return rc == 1 ? read_view(&q, a, out, e) : rc;
}

int view_missing(struct conn *n, int64_t view, struct err *e)
{
    static const char sql[] = "SELECT 1 FROM view WHERE id = ?1";
    CLEANUP(query_end) struct query q = {0};
    int rc = conn_find(n, sql, &view, 1, &q, e);

    if (rc < 0)
        return rc;
    return rc == 0 ? err_set(e, ESTALE, "the checkpoint was scanned anew")
                   : conn_damaged(n, e, "a part of a view is missing");
}

int view_row_id(struct conn *n, int64_t *id, struct err *e)
{
    static const char sql[] = "UPDATE sqlite_sequence SET seq = seq + 1"
                              " WHERE name = 'view' RETURNING seq";
    CLEANUP(query_end) struct query q = {0};
    struct cell seq;
    int rc = conn_find(n, sql, NULL, 0, &q, e);

    if (rc == 1)
        rc = query_row(&q, &seq, 1, e);
    else if (rc == 0)
        rc = conn_damaged(n, e, "no ids of views");
    if (rc < 0)
        return rc;
    *id = (int64_t)seq.num;
    return owner_is_valid(*id) ? 0 : conn_damaged(n, e, "ids of views are used up");
}

int view_row_put(struct conn *n, int64_t checkpoint, enum view_prefix prefix,
                 const struct view_info *v, uint64_t members, struct err *e)
{
    static const char sql[] =
        "INSERT INTO view (" VIEW_LIST ") VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9,"
        " ?10, ?11, ?12, ?13, ?14, ?15, ?16)";
    CLEANUP(query_end) struct query q = {0};
    struct cell row[VIEW_COLUMNS + 1];
    int rc = query_begin(n, sql, &q, e);

    row[VIEW_ID] = cell_int((uint64_t)v->id);
    row[VIEW_CHECKPOINT] = cell_int((uint64_t)checkpoint);
    row[VIEW_KIND] = cell_int(v->kind);
    row[VIEW_PREFIX] = cell_int(prefix);
    row[VIEW_NAME] = cell_text(v->name);
    row[VIEW_SIZE] = cell_int(v->size);
    row[VIEW_HEADER] = cell_int(v->header);
    row[VIEW_WHOLE_FILE] =
        v->whole_file >= 0 ? cell_int((uint64_t)v->whole_file) : cell_text(NULL);
    row[VIEW_FAULT] = cell_text(v->fault);
    row[VIEW_INO] = cell_int(v->ino);
    row[VIEW_MODE] = cell_int(v->mode);
    row[VIEW_UID] = cell_int(v->uid);
    row[VIEW_GID] = cell_int(v->gid);
    row[VIEW_MTIME] = cell_int((uint64_t)v->mtime_ns);
    row[VIEW_COUNT] = cell_int(members);
    row[VIEW_COLUMNS] = cell_int(cells_sum(row, VIEW_COLUMNS));
    return rc == 0 ? query_write(&q, row, VIEW_COLUMNS + 1, e) : rc;
}

/* --- blocks --- */

int view_block_put(struct conn *n, enum view_table table, int64_t view, uint32_t number,
                   const void *data, size_t len, struct err *e)
{
    static const char *const sql[] = {
        [VIEW_HEADERS] = "INSERT OR REPLACE INTO view_header VALUES (?1, ?2, ?3)",
        [VIEW_MEMBERS] = "INSERT OR REPLACE INTO view_member VALUES (?1, ?2, ?3)",
    };
    CLEANUP(query_end) struct query q = {0};
    struct cell row[] = {
        cell_int((uint64_t)row_id(view, number)), cell_blob(data, len), {0}};
    int rc = query_begin(n, sql[table], &q, e);

    row[2] = cell_int(cells_sum(row, 2));
    return rc == 0 ? query_write(&q, row, ARRAY_SIZE(row), e) : rc;
}

int view_block_get(struct conn *n, enum view_table table, int64_t view, uint32_t number,
                   struct buf *out, struct err *e)
{
    static const char *const sql[] = {
        [VIEW_HEADERS] = "SELECT id, data, sum FROM view_header WHERE id = ?1",
        [VIEW_MEMBERS] = "SELECT id, data, sum FROM view_member WHERE id = ?1",
    };
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[2];
    int rc =
        conn_find(n, sql[table], (const int64_t[]){row_id(view, number)}, 1, &q, e);

    buf_clear(out);
    if (rc != 1)
        return rc;
    TRY(query_row_summed(&q, cell, 2, e));
    return buf_add(out, cell[1].data, cell[1].len) < 0 ? err_nomem(e) : 1;
}

int view_blocks_delete(struct conn *n, int64_t view, struct err *e)
{
    static const char headers[] = "DELETE FROM view_header WHERE id BETWEEN ?1 AND ?2";
    static const char members[] = "DELETE FROM view_member WHERE id BETWEEN ?1 AND ?2";
    const int64_t range[] = {row_id(view, 0), row_id_last(view)};
    int rc = conn_write_ints(n, headers, range, 2, e);

    return rc == 0 ? conn_write_ints(n, members, range, 2, e) : rc;
}

/* --- tensors of a role --- */

static int each_in_key_order(struct conn *n, const int64_t *args,
                             int (*fn)(void *user, const struct tensor_row *t),
                             void *user, struct err *e)
{
    static const char sql[] = "SELECT " TENSOR_LIST(
        "") " FROM tensor"
            " WHERE id BETWEEN ?1 AND ?2 AND role = ?3 ORDER BY id";
    CLEANUP(query_end) struct query q = {0};
    int rc = query_begin(n, sql, &q, e);

    if (rc == 0)
        rc = query_bind_ints(&q, args, 3, e);
    return rc == 0 ? tensor_each(&q, fn, user, e) : rc;
}

/* Only what decides the order is sorted: whole rows would be a gigabyte of a million. */
static int each_sorted(struct conn *n, bool modules, const int64_t *args,
                       int (*fn)(void *user, const struct tensor_row *t), void *user,
                       struct err *e)
{
    static const char sql[] = "SELECT " TENSOR_LIST(
        "t.") " FROM (SELECT id AS ref FROM tensor"
              " WHERE id BETWEEN ?1 AND ?2 AND role = ?3 ORDER BY bits DESC,"
              " substr(key, 1 + CASE WHEN ?4 THEN wrapper ELSE ?5 END) LIMIT -1 OFFSET 0) o"
              " CROSS JOIN tensor t ON t.id = o.ref";
    static const char own[] = "SELECT " TENSOR_LIST(
        "t.") " FROM (SELECT id AS ref FROM tensor"
              " WHERE id BETWEEN ?1 AND ?2 AND role = ?3 ORDER BY bits DESC, own_name("
              " substr(key, 1 + CASE WHEN ?4 THEN wrapper & 1073741823 ELSE ?5 END),"
              " wrapper) LIMIT -1 OFFSET 0) o CROSS JOIN tensor t ON t.id = o.ref";
    CLEANUP(query_end) struct query q = {0};
    int rc = query_begin(n, modules ? own : sql, &q, e);

    if (rc == 0)
        rc = query_bind_ints(&q, args, 5, e);
    return rc == 0 ? tensor_each(&q, fn, user, e) : rc;
}

int view_tensors(struct conn *n, int64_t checkpoint, const struct view_order *order,
                 int (*fn)(void *user, const struct tensor_row *t), void *user,
                 struct err *e)
{
    const int64_t args[] = {row_id(checkpoint, 0), row_id_last(checkpoint), order->role,
                            order->by_wrapper, (int64_t)order->drop};

    return order->sorted ? each_sorted(n, order->modules, args, fn, user, e)
                         : each_in_key_order(n, args, fn, user, e);
}

int view_wrapper(struct conn *n, int64_t checkpoint, enum role role, uint64_t *out,
                 bool *same, bool *modules, struct err *e)
{
    static const char sql[] =
        "SELECT max(w), min(w) = max(w) AND min(substr(key, 1, w)) = max(substr(key, 1, w)),"
        " max(wrapper) > max(w) FROM (SELECT key, wrapper, wrapper & 1073741823 AS w"
        " FROM tensor WHERE id BETWEEN ?1 AND ?2 AND role = ?3)";
    CLEANUP(query_end) struct query q = {0};
    const int64_t args[] = {row_id(checkpoint, 0), row_id_last(checkpoint), role};
    struct cell cell[3] = {0};
    int rc = conn_find(n, sql, args, 3, &q, e);

    if (rc == 1)
        rc = query_row(&q, cell, 3, e);
    *out = cell[0].num;
    *same = cell[1].num == 1;
    *modules = cell[2].num == 1;
    return rc;
}

/* How many tensors of the role are all in this one file, under their own keys. */
static int count_single(struct conn *n, int64_t checkpoint, enum role role,
                        uint32_t number, uint64_t *out, struct err *e)
{
    static const char sql[] =
        "SELECT count(*) FROM tensor"
        " WHERE id BETWEEN ?1 AND ?2 AND role = ?3 AND single_file = ?4";
    CLEANUP(query_end) struct query q = {0};
    const int64_t args[] = {row_id(checkpoint, 0), row_id_last(checkpoint), role,
                            number};
    struct cell cell = {0};
    int rc = conn_find(n, sql, args, 4, &q, e);

    if (rc == 1)
        rc = query_row(&q, &cell, 1, e);
    *out = cell.num;
    return rc;
}

int view_whole_file(struct conn *n, int64_t checkpoint, enum role role,
                    uint64_t tensors, uint32_t *number, uint64_t *size, struct err *e)
{
    static const char sql[] = "SELECT id, size FROM file"
                              " WHERE id BETWEEN ?1 AND ?2 AND whole AND tensors = ?3";
    CLEANUP(query_end) struct query q = {0};
    const int64_t args[] = {row_id(checkpoint, 0), row_id_last(checkpoint),
                            (int64_t)tensors};
    int rc = conn_find(n, sql, args, 3, &q, e);

    for (; rc == 1; rc = query_step(&q, e)) {
        struct cell cell[2];
        uint64_t single = 0;

        rc = query_row(&q, cell, 2, e);
        if (rc == 0)
            rc = count_single(n, checkpoint, role, (uint32_t)cell[0].num, &single, e);
        if (rc < 0)
            return rc;
        if (single == tensors) {
            *number = (uint32_t)cell[0].num;
            *size = cell[1].num;
            return 1;
        }
    }
    return rc;
}

int view_file_attributes(struct conn *n, int64_t checkpoint, uint32_t number,
                         struct view_info *out, struct err *e)
{
    static const char sql[] = "SELECT mode, mtime_ns FROM file WHERE id = ?1";
    CLEANUP(query_end) struct query q = {0};
    struct cell cell[2];
    int rc = conn_find(n, sql, (const int64_t[]){row_id(checkpoint, number)}, 1, &q, e);

    if (rc == 1)
        rc = query_row(&q, cell, 2, e);
    else if (rc == 0)
        rc = conn_damaged(n, e, "a file of a view is missing");
    if (rc < 0)
        return rc;
    out->mode &= (mode_t)cell[0].num & 0444;
    out->mtime_ns = (int64_t)cell[1].num;
    return 0;
}

int view_warning(struct conn *n, int64_t checkpoint, const char *code, const char *text,
                 struct err *e)
{
    static const char sql[] =
        "INSERT INTO warning SELECT ifnull((SELECT max(id) FROM warning"
        " WHERE id BETWEEN ?1 AND ?2), ?1 - 1) + 1, ?3, ?4"
        " WHERE NOT EXISTS (SELECT 1 FROM warning"
        " WHERE id BETWEEN ?1 AND ?2 AND code = ?3 AND text = ?4)";
    CLEANUP(query_end) struct query q = {0};
    const struct cell row[] = {cell_int((uint64_t)row_id(checkpoint, 0)),
                               cell_int((uint64_t)row_id_last(checkpoint)),
                               cell_text(code), cell_text(text)};
    int rc = query_begin(n, sql, &q, e);

    return rc == 0 ? query_write(&q, row, ARRAY_SIZE(row), e) : rc;
}
