/* SPDX-License-Identifier: MIT */
/*
 * tests/fuzz/fuzz_catalog.c - a damaged index: it is refused or what it says is checked.
 *
 * The input says how a good index is changed. First byte 'f': the rest is the file. 'p':
 * patches of it, each 3 bytes of offset, 1 of length, the bytes. 's': each of table, column,
 * kind of value, length, bytes: a value in every row, and all sums put right again, so that
 * the checks behind the sums are reached.
 */
#include <errno.h>
#include <fcntl.h>
#include <sqlite3.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/log.h"
#include "index/catalog.h"
#include "index/catalog_conn.h"
#include "index/npy.h"
#include "index/view.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { TENSORS = 20 };

/* The good index, made once. */
struct good {
    char dir[64], path[128];
    uint8_t *bytes;
    size_t len;
};

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

static int stat_any(struct store *s, const char *path, struct entry_stat *out,
                    struct err *e)
{
    (void)s;
    (void)path;
    (void)e;
    *out = (struct entry_stat){.kind = ENTRY_FILE, .mode = 0644};
    out->id = (struct file_id){1, 2, 1 << 20, 3, 4};
    return 0;
}

static struct catalog *open_index(const struct good *g)
{
    const struct catalog_options options = {.dir = g->dir};
    struct catalog *c = NULL;
    struct err e = {0};

    if (catalog_open(&options, "fuzz", &c, &e) < 0) {
        fprintf(stderr, "%s\n", e.text);
        return NULL;
    }
    return c;
}

/* The tensor number i: key "a.I", offset 64 * i. */
static void scan(struct catalog *c)
{
    static const struct store_ops ops = {.name = "any", .stat = stat_any};
    struct store store = {.ops = &ops};
    const struct catalog_place place = {.path = "run", .store = &store};
    const struct shape shape = {1, {16}};
    struct sink *s;
    struct err e = {0};
    uint32_t file;
    int64_t id;

    require(sink_begin(c, &place, &s, &e) == 0, e.text);
    require(sink_file(s, "shard", 5, &file, &e) == 0, e.text);
    for (unsigned i = 0; i < TENSORS; i++) {
        char key[16];
        const struct sink_tensor t = {.key = key,
                                      .key_len =
                                          (size_t)snprintf(key, sizeof key, "a.%u", i),
                                      .dtype = DTYPE_F32,
                                      .shape = &shape,
                                      .role = -1,
                                      .wrapper = 2};

        require(sink_tensor_plain(s, &t, file, 64 * (uint64_t)i, &e) == 0, e.text);
    }
    require(sink_object(s, "o", 1, "{}", 2, &e) == 0, e.text);
    sink_warning(s, "odd", "a warning");
    require(sink_commit(s, NULL, &id, &e) == 0, e.text);
}

static void find_file(struct good *g)
{
    char command[200];
    FILE *f;

    snprintf(command, sizeof command, "ls %s/index/*.sqlite", g->dir);
    f = popen(command, "r");
    require(f && fgets(g->path, sizeof g->path, f), "no index file");
    g->path[strcspn(g->path, "\n")] = '\0';
    pclose(f);
}

static struct good the_good; /* for remove_dir(), which takes no argument */

static void remove_dir(void)
{
    char command[100];

    snprintf(command, sizeof command, "rm -rf %s", the_good.dir);
    if (system(command) != 0)
        fprintf(stderr, "%s stays\n", the_good.dir);
    free(the_good.bytes);
}

static const struct good *good_index(void)
{
    struct good *const g = &the_good;
    struct catalog *c;
    FILE *f;
    long len = 0;

    if (g->bytes)
        return g;
    snprintf(g->dir, sizeof g->dir, "/tmp/unshardfs-fuzz-XXXXXX");
    require(mkdtemp(g->dir) != NULL, "mkdtemp");
    atexit(remove_dir);
    c = open_index(g);
    require(c != NULL, "no index");
    scan(c);
    catalog_close(c);
    find_file(g);
    f = fopen(g->path, "rb");
    require(f && fseek(f, 0, SEEK_END) == 0 && (len = ftell(f)) > 0, "no length");
    rewind(f);
    g->len = (size_t)len;
    g->bytes = malloc(g->len);
    require(g->bytes && fread(g->bytes, 1, g->len, f) == g->len, "not read");
    fclose(f);
    return g;
}

static void write_index(const struct good *g, const uint8_t *data, size_t len)
{
    static const char *const suffixes[] = {"-wal", "-shm", "-journal", ""};
    char path[160];
    FILE *f;

    for (size_t i = 0; i < ARRAY_SIZE(suffixes); i++) {
        snprintf(path, sizeof path, "%s%s", g->path, suffixes[i]);
        remove(path);
    }
    f = fopen(g->path, "wb");
    require(f && fwrite(data, 1, len, f) == len && fclose(f) == 0, "not written");
}

static void write_patched(const struct good *g, const uint8_t *data, size_t size)
{
    CLEANUP_FREE uint8_t *copy = malloc(g->len);

    require(copy != NULL, "memory");
    memcpy(copy, g->bytes, g->len);
    while (size >= 4) {
        size_t at = (data[0] | (size_t)data[1] << 8 | (size_t)data[2] << 16) % g->len;
        size_t len = MIN(MIN((size_t)data[3], size - 4), g->len - at);

        memcpy(copy + at, data + 4, len);
        data += 4 + len;
        size -= 4 + len;
    }
    write_index(g, copy, g->len);
}

/* --- a value in every row, and the sums put right --- */

static const struct {
    const char *name, *columns;
    bool summed;
} tables[] = {
    {"checkpoint",
     "id path file format framework version topology step adapter error"
     " metadata_file mode uid gid mtime_ns tensors chunks bytes faults"
     " objects files model_tensors optimizer_tensors other_tensors"
     " model_bytes optimizer_bytes other_bytes names_hash",
     true},
    {"file", "id path dev ino size mtime_ns ctime_ns mode storage whole tensors", true},
    {"tensor",
     "id key name name_npy part wrapper dtype bits shape role bytes chunks fault"
     " codec_key attributes ino mode uid gid mtime_ns single_file pieces_sum",
     true},
    {"tensor_name", "checkpoint hash data", true},
    {"tree", "dir pos parent data", true},
    {"object", "id key json", true},
    {"view",
     "id checkpoint kind prefix name size header whole_file fault ino mode uid gid"
     " mtime_ns members",
     true},
    {"view_header", "id data", true},
    {"view_member", "id data", true},
    {"hidden", "checkpoint name part", false},
    {"warning", "id code text", false},
};

/* The n-th word (counted round), and how many there are. */
static unsigned pick(const char *words, unsigned n, char out[32])
{
    unsigned count = 1, at = 0;
    const char *p = words;

    for (const char *q = words; *q; q++)
        count += *q == ' ';
    for (n %= count; at < n; at++)
        p = strchr(p, ' ') + 1;
    snprintf(out, 32, "%.*s", (int)strcspn(p, " "), p);
    return count;
}

static void set_value(sqlite3 *db, const char *table, const char *column, unsigned kind,
                      const uint8_t *value, size_t len)
{
    char sql[200];
    sqlite3_stmt *stmt;
    int64_t number = 0;

    snprintf(sql, sizeof sql, "UPDATE OR IGNORE %s SET %s = ?1", table, column);
    if (sqlite3_prepare_v2(db, sql, -1, &stmt, NULL) != SQLITE_OK)
        return;
    memcpy(&number, value, MIN(len, sizeof number));
    if (kind % 3 == 1)
        sqlite3_bind_int64(stmt, 1, number);
    else if (kind % 3 == 2)
        sqlite3_bind_blob(stmt, 1, value, (int)len, SQLITE_STATIC);
    sqlite3_step(stmt); /* a constraint may say no */
    sqlite3_finalize(stmt);
}

/* The SQL function that computes what a row's last column has to be. */
static void sum_of(sqlite3_context *context, int n, sqlite3_value **v)
{
    struct cell cell[32];

    for (int i = 0; i < n; i++) {
        cell[i] = (struct cell){.kind = CELL_NULL};
        if (sqlite3_value_type(v[i]) == SQLITE_INTEGER)
            cell[i] = cell_int((uint64_t)sqlite3_value_int64(v[i]));
        else if (sqlite3_value_type(v[i]) == SQLITE_BLOB)
            cell[i] =
                cell_blob(sqlite3_value_blob(v[i]), (size_t)sqlite3_value_bytes(v[i]));
    }
    sqlite3_result_int64(context, (int64_t)cells_sum(cell, (size_t)n));
}

static void put_sums_right(sqlite3 *db, const char *table, const char *columns)
{
    char sql[600], list[500];
    size_t n = 0;

    for (const char *p = columns; *p && n + 2 < sizeof list; p++)
        n += (size_t)snprintf(list + n, sizeof list - n, "%s",
                              *p == ' ' ? ", " : (char[]){*p, '\0'});
    snprintf(sql, sizeof sql, "UPDATE %s SET sum = sum_of(%s)", table, list);
    require(sqlite3_exec(db, sql, NULL, NULL, NULL) == SQLITE_OK, sqlite3_errmsg(db));
}

static void write_changed(const struct good *g, const uint8_t *data, size_t size)
{
    sqlite3 *db;

    write_index(g, g->bytes, g->len);
    require(sqlite3_open(g->path, &db) == SQLITE_OK, "not opened");
    sqlite3_exec(db, "PRAGMA synchronous=OFF; BEGIN", NULL, NULL, NULL);
    sqlite3_create_function(db, "sum_of", -1, SQLITE_UTF8, NULL, sum_of, NULL, NULL);
    while (size >= 4) {
        unsigned t = data[0] % ARRAY_SIZE(tables);
        size_t len = MIN((size_t)data[3], size - 4);
        char column[32];

        pick(tables[t].columns, data[1], column);
        set_value(db, tables[t].name, column, data[2], data + 4, len);
        data += 4 + len;
        size -= 4 + len;
    }
    for (size_t t = 0; t < ARRAY_SIZE(tables); t++)
        if (tables[t].summed)
            put_sums_right(db, tables[t].name, tables[t].columns);
    sqlite3_exec(db, "COMMIT", NULL, NULL, NULL);
    sqlite3_close(db);
}

/* --- reading all of it --- */

struct walk {
    struct catalog *c;
    int64_t id;
    bool exact;    /* nobody put sums right: what is given is what was written */
    unsigned left; /* entries of tree/ to look at: a hostile one has no end */
};

static int see_tensor(void *user, const struct tensor_info *t)
{
    const struct walk *w = user;
    struct arena *a = arena_new(1 << 20);
    const struct chunk *chunk;
    struct tensor_info other;
    struct err e = {0};
    struct buf npy = {0};
    unsigned number = 0;
    size_t n;

    require(strlen(t->name) <= 255 && strlen(t->name_npy) <= 255, "a long name");
    if (w->exact)
        require(sscanf(t->key, "a.%u", &number) == 1 && number < TENSORS,
                "a wrong key");
    if (catalog_chunks(w->c, w->id, t, a, &chunk, &n, &e) == 0 && w->exact)
        require(n == 1 && chunk[0].offset == 64 * (uint64_t)number &&
                    chunk[0].length == 64,
                "a wrong chunk");
    catalog_tensor_by_key(w->c, w->id, t->key, t->key_len, a, &other, &e);
    catalog_tensor_by_name(w->c, w->id, t->name_npy, true, a, &other, &e);
    npy_header(t->dtype, &t->shape, &npy, &e);
    buf_release(&npy);
    arena_free(a);
    return 0;
}

static int see_file(void *user, const struct catalog_file *f)
{
    const struct walk *w = user;
    struct arena *a = arena_new(1 << 20);
    struct catalog_file again;
    struct err e = {0};

    require(f->path[0] != '\0', "a file without a path");
    catalog_file(w->c, w->id, f->number, a, &again, &e);
    arena_free(a);
    return 0;
}

static int see_entry(void *user, const struct tree_entry *t)
{
    struct walk *w = user;
    struct tree_entry found;
    uint32_t parent;
    struct err e = {0};

    if (w->left-- == 0)
        return 1;
    catalog_tree_find(w->c, w->id, t->dir, t->name, &found, &e);
    catalog_tree_parent(w->c, w->id, t->dir, &parent, &e);
    return 0;
}

static void see_view(const struct walk *w, enum view_kind kind, enum view_prefix prefix)
{
    struct arena *a = arena_new(1 << 20);
    struct view_member *m = NULL;
    struct view_info v;
    struct err e = {0};
    char header[300];
    size_t n;

    if (view_get(w->c, w->id, kind, prefix, a, &v, &e) == 0) {
        view_header(w->c, &v, 0, MIN(v.header, sizeof header), header, &e);
        if (view_members(w->c, &v, &m, &n, &e) == 0)
            free(m);
    }
    arena_free(a);
}

static void see_all(struct catalog *c, bool exact)
{
    struct arena *a = arena_new(16 << 20);
    struct walk w = {.c = c, .exact = exact, .left = 1000};
    struct checkpoint_info cp;
    struct err e = {0};
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);

    if (catalog_checkpoint(c, "run", NULL, a, &cp, &e) == 0) {
        w.id = cp.id;
        catalog_files(c, w.id, see_file, &w, &e);
        catalog_tensors(c, w.id, 0, see_tensor, &w, &e);
        for (uint32_t dir = 0; dir < 3; dir++)
            catalog_tree_list(c, w.id, dir, 0, see_entry, &w, &e);
        for (unsigned kind = VIEW_MODEL; kind <= VIEW_OPTIMIZER; kind++)
            for (unsigned prefix = PREFIX_AUTO; prefix <= PREFIX_DROP; prefix++)
                see_view(&w, (enum view_kind)kind, (enum view_prefix)prefix);
        report_checkpoint(c, w.id, null, &e);
        report_objects(c, w.id, null, &e);
    }
    close(null);
    arena_free(a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct good *g = good_index();
    struct catalog *c;
    int null;

    if (size == 0)
        return 0;
    if (data[0] == 'f')
        write_index(g, data + 1, size - 1);
    else if (data[0] == 'p')
        write_patched(g, data + 1, size - 1);
    else
        write_changed(g, data + 1, size - 1);
    null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    log_to(null); /* it is made anew, with a line each time */
    c = open_index(g);
    require(c != NULL, "a damaged index keeps the place");
    see_all(c, data[0] != 's');
    scan(c); /* whatever it was, it works again */
    see_all(c, true);
    catalog_close(c);
    log_to(2);
    close(null);
    return 0;
}
