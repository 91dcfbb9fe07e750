/* SPDX-License-Identifier: MIT */
/* index/catalog_tensor.c - reads tensors and their chunks, and trusts no row. */
#include "index/catalog_tensor.h"

#include "base/arena.h"
#include "base/endian.h"
#include "base/err.h"
#include "index/names.h"

#include <xxhash.h>

#include <errno.h>
#include <string.h>

enum {
    /* Strings of so many bytes are kept before tensor_arena() makes the arena anew. */
    ARENA_TURN = 1 << 18,
    ARENA_MAX = 1 << 30, /* one row cannot be larger: SQLITE_LIMIT_LENGTH */
};

static const char leaf_suffix[] = ".npy";

uint64_t name_hash(int64_t checkpoint, const char *name, size_t len)
{
    return XXH3_64bits_withSeed(name, len, (uint64_t)checkpoint);
}

/* --- a row --- */

/* A copy of a blob in the arena, NULL for NULL. */
static int copy_text(struct arena *a, const struct cell *c, const char **out,
                     struct err *e)
{
    *out = NULL;
    if (c->kind != CELL_BLOB)
        return 0;
    *out = arena_memdup(a, c->data, c->len);
    return *out ? 0 : err_nomem(e);
}

/* The same, and NULL stands for another text. */
static int copy_text_or(struct arena *a, const struct cell *c, const char *other,
                        const char **out, struct err *e)
{
    *out = other;
    return c->kind == CELL_BLOB ? copy_text(a, c, out, e) : 0;
}

static bool read_shape(const struct cell *c, struct shape *out)
{
    const unsigned char *data = (const unsigned char *)c->data;
    uint64_t nd;
    size_t pos = 0;

    if (c->kind != CELL_BLOB || !varint_get(data, c->len, &pos, &nd) ||
        nd > SHAPE_MAX_DIMS)
        return false;
    out->nd = (uint32_t)nd;
    for (uint32_t k = 0; k < out->nd; k++)
        if (!varint_get(data, c->len, &pos, &out->dim[k]))
            return false;
    return pos == c->len;
}

/* A name of a file in the mount: what the kernel takes as one. */
static bool is_name(const char *name, size_t len)
{
    return len > 0 && len <= NAME_MAX_BYTES && !memchr(name, '\0', len) &&
           !memchr(name, '/', len);
}

static int read_names(struct arena *a, const struct cell *row, struct tensor_info *t,
                      struct err *e)
{
    const struct cell *npy = &row[TENSOR_NAME_NPY];
    size_t len;
    char *made;

    TRY(copy_text_or(a, &row[TENSOR_NAME], t->key, &t->name, e));
    len = row[TENSOR_NAME].kind == CELL_BLOB ? row[TENSOR_NAME].len : t->key_len;
    if (!is_name(t->name, len))
        return err_set(e, EBADMSG, "its file name is impossible");
    if (npy->kind == CELL_BLOB && !is_name(npy->data, npy->len))
        return err_set(e, EBADMSG, "its file name is impossible");
    if (npy->kind == CELL_BLOB)
        return copy_text(a, npy, &t->name_npy, e);
    made = arena_alloc(a, len + sizeof leaf_suffix);
    if (!made)
        return err_nomem(e);
    memcpy(made, t->name, len);
    memcpy(made + len, leaf_suffix, sizeof leaf_suffix);
    t->name_npy = made;
    return 0;
}

static int read_texts(struct arena *a, const struct cell *row, struct tensor_info *t,
                      struct err *e)
{
    int rc;

    t->key_len = row[TENSOR_KEY].len;
    if (row[TENSOR_KEY].kind != CELL_BLOB)
        return err_set(e, EBADMSG, "it has no key");
    rc = copy_text(a, &row[TENSOR_KEY], &t->key, e);
    if (rc == 0)
        rc = read_names(a, row, t, e);
    if (rc == 0)
        rc = copy_text(a, &row[TENSOR_PART], &t->part, e);
    if (rc == 0)
        rc = copy_text(a, &row[TENSOR_FAULT], &t->fault, e);
    if (rc == 0)
        rc = copy_text_or(a, &row[TENSOR_CODEC_KEY], t->key, &t->codec_key, e);
    t->codec_key_len = row[TENSOR_CODEC_KEY].kind == CELL_BLOB
                           ? row[TENSOR_CODEC_KEY].len
                           : t->key_len;
    if (rc == 0)
        rc = copy_text(a, &row[TENSOR_ATTRIBUTES], &t->attributes, e);
    return rc;
}

/* What must hold between the numbers; a tensor with a fault may have strange ones. */
static int check_numbers(const struct cell *row, const struct tensor_info *t,
                         struct err *e)
{
    uint64_t bytes;

    if (row[TENSOR_DTYPE].num >= DTYPE_COUNT ||
        row[TENSOR_BITS].num != dtype_bits(t->dtype) ||
        row[TENSOR_STORED].num >= DTYPE_COUNT)
        return err_set(e, EBADMSG, "its element type is unknown");
    if (row[TENSOR_ROLE].num > ROLE_OTHER)
        return err_set(e, EBADMSG, "its role is unknown");
    if (row[TENSOR_MODE].num > 0777 || row[TENSOR_UID].num > UINT32_MAX ||
        row[TENSOR_GID].num > UINT32_MAX || t->wrapper > t->key_len ||
        t->bytes > INT64_MAX)
        return err_set(e, EBADMSG, "a number is out of range");
    if (t->ino < (uint64_t)1 << 32 || t->ino % 2 != 0)
        return err_set(e, EBADMSG, "its inode number is out of range");
    if (!t->fault &&
        (shape_bytes(&t->shape, t->dtype, &bytes, e) < 0 || bytes != t->bytes))
        return err_set(e, EBADMSG, "its size does not follow from its shape");
    return 0;
}

static int read_numbers(const struct cell *row, struct tensor_row *out, struct err *e)
{
    struct tensor_info *t = &out->info;
    const struct cell *single = &row[TENSOR_SINGLE_FILE];

    out->checkpoint = (int64_t)(row[TENSOR_ID].num >> 32);
    out->single_file = -1;
    if (single->kind == CELL_INT && single->num <= UINT32_MAX)
        out->single_file = (int64_t)single->num;
    t->first_file = -1;
    if (row[TENSOR_FIRST_FILE].kind == CELL_INT &&
        row[TENSOR_FIRST_FILE].num <= UINT32_MAX)
        t->first_file = (int64_t)row[TENSOR_FIRST_FILE].num;
    t->rule = (uint32_t)row[TENSOR_RULE].num;
    t->ord = (uint32_t)row[TENSOR_ID].num;
    t->wrapper = row[TENSOR_WRAPPER].num & ~(uint64_t)WRAPPER_MODULES;
    t->modules = row[TENSOR_WRAPPER].num & WRAPPER_MODULES;
    t->dtype = (enum dtype)row[TENSOR_DTYPE].num;
    t->stored = (enum dtype)row[TENSOR_STORED].num;
    t->role = (enum role)row[TENSOR_ROLE].num;
    t->bytes = row[TENSOR_BYTES].num;
    t->chunks = row[TENSOR_CHUNKS].num;
    t->ino = row[TENSOR_INO].num;
    t->mode = (mode_t)row[TENSOR_MODE].num;
    t->uid = (uid_t)row[TENSOR_UID].num;
    t->gid = (gid_t)row[TENSOR_GID].num;
    t->mtime_ns = (int64_t)row[TENSOR_MTIME].num;
    if (!read_shape(&row[TENSOR_SHAPE], &t->shape))
        return err_set(e, EBADMSG, "its shape is malformed");
    return check_numbers(row, t, e);
}

int tensor_row_read(struct query *q, struct arena *a, struct tensor_row *out,
                    struct err *e)
{
    struct cell row[TENSOR_COLUMNS];
    int rc = query_row_summed(q, row, TENSOR_COLUMNS, e);
    char why[200];

    if (rc < 0)
        return rc;
    *out = (struct tensor_row){0};
    rc = read_texts(a, row, &out->info, e);
    if (rc == 0)
        rc = read_numbers(row, out, e);
    if (rc != -EBADMSG)
        return rc;
    strncpy(why, e->text, sizeof why - 1);
    why[sizeof why - 1] = '\0';
    return conn_damaged(q->conn, e, "tensor %u: %s", (uint32_t)row[TENSOR_ID].num, why);
}

int tensor_arena(struct arena **a, struct err *e)
{
    if (*a && arena_used(*a) <= ARENA_TURN)
        return 0;
    arena_free(*a);
    *a = arena_new(ARENA_MAX);
    return *a ? 0 : err_nomem(e);
}

int tensor_each(struct query *q, int (*fn)(void *user, const struct tensor_row *t),
                void *user, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = NULL;
    struct tensor_row row;
    int rc;

    while ((rc = query_step(q, e)) == 1) {
        rc = tensor_arena(&a, e);
        if (rc == 0)
            rc = tensor_row_read(q, a, &row, e);
        if (rc == 0)
            rc = fn(user, &row);
        if (rc != 0)
            return rc;
    }
    return rc;
}

/* --- one tensor --- */

int tensor_by_ord(struct conn *n, int64_t checkpoint, uint32_t ord, struct arena *a,
                  struct tensor_info *out, struct err *e)
{
    static const char sql[] = "SELECT " TENSOR_LIST("") " FROM tensor WHERE id = ?1";
    CLEANUP(query_end) struct query q = {0};
    struct tensor_row row;
    int rc;

    if (!owner_is_valid(checkpoint))
        return conn_missing(n, checkpoint, "tensor", e);
    rc = conn_find(n, sql, (const int64_t[]){row_id(checkpoint, ord)}, 1, &q, e);
    if (rc == 0)
        return conn_missing(n, checkpoint, "tensor", e);
    if (rc == 1)
        rc = tensor_row_read(&q, a, &row, e);
    if (rc == 0)
        *out = row.info;
    return rc;
}

int catalog_tensor(struct catalog *c, int64_t checkpoint, uint32_t ord, struct arena *a,
                   struct tensor_info *out, struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    int rc = conn_take(c, false, &n, e);

    return rc == 0 ? tensor_by_ord(n, checkpoint, ord, a, out, e) : rc;
}

/* What makes a row with the right hash the right one. */
struct wanted {
    const char *text;
    size_t len;
    enum { BY_NAME, BY_NAME_NPY, BY_KEY } by;
};

static bool is_wanted(const struct wanted *w, const struct tensor_info *t)
{
    const char *name = w->by == BY_NAME ? t->name : t->name_npy;

    if (w->by == BY_KEY)
        return t->key_len == w->len && memcmp(t->key, w->text, w->len) == 0;
    return strlen(name) == w->len && memcmp(name, w->text, w->len) == 0;
}

/* The first of n entries whose hash is not less: as sqlite compares, as signed ones. */
static size_t lower_bound(const char *entry, size_t n, uint64_t hash)
{
    size_t low = 0, high = n;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if ((int64_t)get_le64(entry + mid * NAME_ENTRY) < (int64_t)hash)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* 1 when found, 0 when no tensor whose name has this hash is the one wanted. */
static int find_hashed(struct conn *n, int64_t checkpoint, uint64_t hash,
                       const struct wanted *w, struct arena *a, struct tensor_info *out,
                       struct err *e)
{
    static const char sql[] =
        "SELECT checkpoint, hash, data, sum FROM tensor_name"
        " WHERE checkpoint = ?1 AND hash <= ?2 ORDER BY hash DESC LIMIT 1";
    CLEANUP(query_end) struct query q = {0};
    struct tensor_info found;
    struct cell row[3];
    const char *entry;
    size_t count;
    int rc = conn_find(n, sql, (const int64_t[]){checkpoint, (int64_t)hash}, 2, &q, e);

    if (rc != 1) /* 0: all names have a greater hash */
        return rc;
    rc = query_row_summed(&q, row, ARRAY_SIZE(row), e);
    if (rc < 0)
        return rc;
    if (row[2].kind != CELL_BLOB || row[2].len % NAME_ENTRY != 0)
        return conn_damaged(n, e, "hashes of names are malformed");
    entry = row[2].data;
    count = row[2].len / NAME_ENTRY;
    for (size_t i = lower_bound(entry, count, hash);
         i < count && get_le64(entry + i * NAME_ENTRY) == hash; i++) {
        uint32_t ord = get_le32(entry + i * NAME_ENTRY + sizeof hash);

        rc = tensor_by_ord(n, checkpoint, ord, a, &found, e);
        if (rc == -ENOENT)
            return conn_damaged(n, e, "tensor %u of a name is missing", ord);
        if (rc < 0)
            return rc;
        if (is_wanted(w, &found)) {
            *out = found;
            return 1;
        }
    }
    return 0;
}

static int find_name(struct conn *n, int64_t checkpoint, const char *name, size_t len,
                     const struct wanted *w, struct arena *a, struct tensor_info *out,
                     struct err *e)
{
    if (!owner_is_valid(checkpoint))
        return 0;
    return find_hashed(n, checkpoint, name_hash(checkpoint, name, len), w, a, out, e);
}

int catalog_tensor_by_key(struct catalog *c, int64_t checkpoint, const char *key,
                          size_t len, struct arena *a, struct tensor_info *out,
                          struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    const struct wanted w = {key, len, BY_KEY};
    struct buf name = {.max = 4 * NAME_MAX_BYTES};
    int rc = conn_take(c, false, &n, e);

    if (rc == 0 && name_of_key(key, len, "", &name) < 0)
        rc = err_nomem(e);
    if (rc == 0)
        rc = find_name(n, checkpoint, name.data, name.len, &w, a, out, e);
    buf_release(&name);
    if (rc == 0)
        return conn_missing(n, checkpoint, "tensor", e);
    return rc == 1 ? 0 : rc;
}

int catalog_tensor_by_name(struct catalog *c, int64_t checkpoint, const char *name,
                           bool npy, struct arena *a, struct tensor_info *out,
                           struct err *e)
{
    CLEANUP(conn_putp) struct conn *n = NULL;
    const struct wanted w = {name, strlen(name), npy ? BY_NAME_NPY : BY_NAME};
    size_t tail = npy ? sizeof leaf_suffix - 1 : 0;
    int rc = conn_take(c, false, &n, e);

    if (rc == 0 && w.len > tail)
        rc = find_name(n, checkpoint, name, w.len - tail, &w, a, out, e);
    if (rc == 0 && npy && n) /* a name that was cut to make room for ".npy" */
        rc = find_name(n, checkpoint, name, w.len, &w, a, out, e);
    if (rc == 0)
        return conn_missing(n, checkpoint, "tensor", e);
    return rc == 1 ? 0 : rc;
}

/* --- many --- */

struct each {
    int (*fn)(void *user, const struct tensor_info *t);
    void *user;
};

static int each_info(void *user, const struct tensor_row *t)
{
    const struct each *each = user;

    return each->fn(each->user, &t->info);
}

int catalog_tensors(struct catalog *c, int64_t checkpoint, uint32_t from,
                    int (*fn)(void *user, const struct tensor_info *t), void *user,
                    struct err *e)
{
    static const char sql[] =
        "SELECT " TENSOR_LIST("") " FROM tensor"
                                  " WHERE id BETWEEN ?1 AND ?2 ORDER BY id";
    CLEANUP(conn_putp) struct conn *n = NULL;
    CLEANUP(query_end) struct query q = {0};
    struct each each = {fn, user};
    int rc = conn_take(c, false, &n, e);

    if (rc == 0 && (rc = conn_missing(n, checkpoint, "tensor", e)) == -ENOENT) {
        *e = (struct err){0}; /* the checkpoint is there */
        rc = 0;
    }
    if (rc == 0)
        rc = query_begin(n, sql, &q, e);
    if (rc == 0)
        rc = query_bind_ints(
            &q, (const int64_t[]){row_id(checkpoint, from), row_id_last(checkpoint)}, 2,
            e);
    return rc == 0 ? tensor_each(&q, each_info, &each, e) : rc;
}

/* --- chunks --- */

/* What the chunks of a tensor are wanted for. */
struct reading {
    struct arena *arena;
    struct shape units;
    uint64_t files;
    /* unpacked */
    const struct chunk **chunk;
    size_t *n;
    /* or one by one */
    chunk_list_fn *fn;
    void *user;
    const struct chunk_list **list;
};

static int check_chunk(const struct reading *r, const struct chunk *c, size_t i,
                       struct err *e)
{
    const struct shape *units = &r->units;

    if (c->file >= r->files)
        return err_set(e, EBADMSG, "chunk %zu is in file %u of %" PRIu64, i, c->file,
                       r->files);
    if (c->offset > INT64_MAX || c->length > INT64_MAX - c->offset)
        return err_set(e, EBADMSG, "chunk %zu lies beyond any file", i);
    for (uint32_t k = 0; k < units->nd; k++)
        if (c->start[k] > units->dim[k] || c->size[k] > units->dim[k] - c->start[k])
            return err_set(e, EBADMSG, "chunk %zu lies outside the tensor", i);
    return 0;
}

/* chunk_list_fn */
static int check_and_show(void *user, const struct chunk *c, size_t i, size_t n,
                          struct err *e)
{
    const struct reading *r = user;
    int rc = check_chunk(r, c, i, e);

    return rc == 0 ? r->fn(r->user, c, i, n, e) : rc;
}

static int unpack(struct reading *r, const struct cell *blob, struct err *e)
{
    int rc;

    if (r->fn)
        return chunk_list_new(r->arena, blob->data, blob->len, r->units.nd,
                              check_and_show, r, r->list, e);
    rc = chunks_unpack(r->arena, blob->data, blob->len, r->units.nd, r->chunk, r->n, e);
    for (size_t i = 0; rc == 0 && i < *r->n; i++)
        rc = check_chunk(r, &(*r->chunk)[i], i, e);
    return rc;
}

/* Unpacks the row on which q stands: the sum of the blob, the blob, number of files. */
static int read_chunks(struct query *q, const struct tensor_info *t, struct reading *r,
                       struct err *e)
{
    struct cell cell[3];
    int rc = query_row(q, cell, 3, e);

    if (rc < 0)
        return rc;
    if (cell[1].kind != CELL_BLOB ||
        XXH3_64bits(cell[1].data, cell[1].len) != cell[0].num)
        return err_set(e, EBADMSG, "their sum is wrong");
    if (cell[1].len == 0)
        return t->fault ? 0 : err_set(e, EBADMSG, "there are none");
    r->files = cell[2].num;
    rc = shape_units(&t->shape, t->stored, &r->units, e);
    return rc == 0 ? unpack(r, &cell[1], e) : rc;
}

static int find_chunks(struct catalog *c, int64_t checkpoint,
                       const struct tensor_info *t, struct reading *r, struct err *e)
{
    static const char sql[] = "SELECT t.pieces_sum, t.pieces, c.files FROM tensor t"
                              " JOIN checkpoint c ON c.id = ?2 WHERE t.id = ?1";
    CLEANUP(conn_putp) struct conn *conn = NULL;
    CLEANUP(query_end) struct query q = {0};
    char why[200];
    int rc = conn_take(c, false, &conn, e);

    if (rc == 0)
        rc = conn_find(conn, sql,
                       (const int64_t[]){row_id(checkpoint, t->ord), checkpoint}, 2, &q,
                       e);
    if (rc == 0)
        return conn_missing(conn, checkpoint, "tensor", e);
    if (rc == 1)
        rc = read_chunks(&q, t, r, e);
    if (rc != -EBADMSG)
        return rc;
    strncpy(why, e->text, sizeof why - 1);
    why[sizeof why - 1] = '\0';
    return conn_damaged(conn, e, "chunks of tensor %u: %s", t->ord, why);
}

int catalog_chunks(struct catalog *c, int64_t checkpoint, const struct tensor_info *t,
                   struct arena *a, const struct chunk **out, size_t *n, struct err *e)
{
    struct reading r = {.arena = a, .chunk = out, .n = n};

    *out = NULL;
    *n = 0;
    return find_chunks(c, checkpoint, t, &r, e);
}

int catalog_chunk_list(struct catalog *c, int64_t checkpoint,
                       const struct tensor_info *t, struct arena *a, chunk_list_fn *fn,
                       void *user, const struct chunk_list **out, struct err *e)
{
    struct reading r = {.arena = a, .fn = fn, .user = user, .list = out};

    *out = NULL;
    return find_chunks(c, checkpoint, t, &r, e);
}
