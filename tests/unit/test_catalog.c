/* SPDX-License-Identifier: MIT */
/* tests/unit/test_catalog.c - the file of an index: made anew, shared, damaged, cut off. */
#include <glob.h>
#include <pthread.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>
#include <xxhash.h>

#include "catalog_fixture.h"

#include "base/endian.h"
#include "base/log.h"
#include "index/catalog_conn.h"
#include "index/catalog_tensor.h"

/* Takes libc's place: the file system says that it is NFS. */
static bool on_network;

int statfs(const char *path, struct statfs *out)
{
    int rc = (int)syscall(SYS_statfs, path, out);

    if (rc == 0 && on_network)
        out->f_type = 0x6969;
    return rc;
}

static struct fake_store the_store(void)
{
    struct fake_store f = fake_new();

    f.size_of_all = (uint64_t)1 << 40;
    return f;
}

/* Scans `path` with n tensors of one chunk. */
static int64_t scan(struct catalog *c, const char *path, const char *file, unsigned n)
{
    struct fake_store store = the_store();
    struct sink *s = scan_begin(c, &store, path, file);
    uint32_t number = scan_file(s, "shard");
    char key[64];

    for (unsigned i = 0; i < n; i++) {
        snprintf(key, sizeof key, "layers.%u.w", i);
        scan_plain(s, key, 4, number, 16 * (uint64_t)i);
    }
    return scan_commit(s);
}

/* Tensors of the checkpoint at a place, or -1: it is not there. */
static int64_t count(struct catalog *c, const char *path, const char *file)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct checkpoint_info cp;
    struct err e = {0};
    int rc = catalog_checkpoint(c, path, file, a, &cp, &e);

    if (rc == -ENOENT)
        return -1;
    assert_ok(rc, &e);
    return (int64_t)cp.tensors;
}

/* The index's only file of that kind ("sqlite", "sqlite-wal"). */
static char *index_file(const struct tmp *t, const char *kind)
{
    static char path[400];
    char pattern[400];
    glob_t g;

    snprintf(pattern, sizeof pattern, "%s/index/*.%s", t->path, kind);
    assert_int_equal(glob(pattern, 0, NULL, &g), 0);
    assert_int_equal(g.gl_pathc, 1);
    snprintf(path, sizeof path, "%s", g.gl_pathv[0]);
    globfree(&g);
    return path;
}

/* --- the file --- */

static void test_file_is_private(void **state)
{
    const struct tmp *t = *state;
    mode_t old = umask(0);
    struct catalog *c = index_open(t, "source");
    struct stat st;

    umask(old);
    scan(c, "run", NULL, 3);
    assert_int_equal(stat(index_file(t, "sqlite"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(stat(index_file(t, "sqlite-wal"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(stat(tmp_at(t, "index"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    catalog_close(c);
}

static void test_it_lasts(void **state)
{
    struct catalog *c = index_open(*state, "source");
    int64_t id = scan(c, "run", NULL, 5);
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);

    catalog_close(c);
    c = index_open(*state, "source");
    assert_int_equal(count(c, "run", NULL), 5);
    assert_int_equal(get_key(c, id, "layers.3.w", a).bytes, 16);
    catalog_close(c);
}

/* Two sources have two files in one directory. */
static void test_sources_are_apart(void **state)
{
    struct catalog *x = index_open(*state, "x"), *y = index_open(*state, "y");

    scan(x, "run", NULL, 1);
    assert_int_equal(count(y, "run", NULL), -1);
    scan(y, "run", NULL, 2);
    assert_int_equal(count(x, "run", NULL), 1);
    catalog_close(x);
    catalog_close(y);
}

static void test_places_and_ids(void **state)
{
    struct catalog *c = index_open(*state, "source");
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct checkpoint_info cp;
    struct tensor_info t;
    struct err e = {0};
    int64_t dir = scan(c, "run", NULL, 1), file = scan(c, "run", "x.pt", 2), anew;

    assert_int_not_equal(dir, file);
    assert_int_equal(count(c, "run", NULL), 1);
    assert_int_equal(count(c, "run", "x.pt"), 2);
    assert_int_equal(count(c, "run", "y.pt"), -1);
    assert_int_equal(count(c, "", NULL), -1);
    assert_ok(catalog_checkpoint_by_id(c, file, a, &cp, &e), &e);
    assert_string_equal(cp.file, "x.pt");
    anew = scan(c, "run", NULL, 3);
    assert_true(anew > file);
    assert_int_equal(catalog_checkpoint_by_id(c, dir, a, &cp, &e), -ESTALE);
    assert_int_equal(catalog_tensor(c, dir, 0, a, &t, &e), -ESTALE);
    assert_int_equal(catalog_tensor_by_name(c, dir, "layers.0.w", false, a, &t, &e),
                     -ESTALE);
    assert_int_equal(count(c, "run", NULL), 3);
    assert_int_equal(count(c, "run", "x.pt"), 2);
    assert_ok(catalog_drop(c, anew, &e), &e);
    assert_int_equal(count(c, "run", NULL), -1);
    assert_int_equal(count(c, "run", "x.pt"), 2);
    assert_int_equal(catalog_checkpoint_by_id(c, 0, a, &cp, &e), -ESTALE);
    assert_int_equal(catalog_checkpoint_by_id(c, INT64_MAX, a, &cp, &e), -ESTALE);
    assert_int_equal(catalog_tensor(c, INT64_MIN, 0, a, &t, &e), -ESTALE);
    catalog_close(c);
}

/* A scan of a directory with one below it, where something may have come to either. */
static int64_t scan_again(struct catalog *c, uint64_t names, int64_t time,
                          const char *warning)
{
    struct fake_store store = the_store();
    const struct catalog_place place = {.path = "run",
                                        .store = &store.store,
                                        .dir_id = {1, 2, 4096, time, time},
                                        .names_hash = names};
    struct sink *s;
    struct err e = {0};

    store.file[store.n++] =
        (struct fake_file){"run/part", 4096, S_IFDIR | 0755, 0, 0, time};
    assert_ok(sink_begin(c, &place, &s, &e), &e);
    scan_plain(s, "a.b", 4, scan_file(s, "shard"), 0);
    assert_ok(sink_watch(s, "part", &e), &e);
    assert_ok(sink_object(s, "o", 1, "1", 1, &e), &e);
    sink_warning(s, "odd", "%s", warning);
    return scan_commit(s);
}

static int see_part(void *user, const struct catalog_file *f)
{
    if (strcmp(f->path, "run/part") == 0)
        *(struct file_id *)user = f->id;
    return 0;
}

/* Who reads by an id goes on while logs and the like come to the directory. */
static void test_the_same_again_keeps_its_id(void **state)
{
    struct catalog *c = index_open(*state, "source");
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct checkpoint_info cp;
    struct file_id part = {0};
    struct err e = {0};
    int64_t id = scan_again(c, 7, 1000, "x");

    assert_int_equal(scan_again(c, 8, 2000, "x"), id);
    assert_ok(catalog_checkpoint(c, "run", NULL, a, &cp, &e), &e);
    assert_int_equal(cp.names_hash, 8);
    assert_int_equal(cp.dir_id.mtime_ns, 2000);
    assert_int_equal(cp.tensors, 1);
    assert_int_equal(cp.warnings, 1);
    assert_int_equal(catalog_files(c, id, see_part, &part, &e), 0);
    assert_int_equal(part.mtime_ns, 2000); /* it is not looked at again and again */
    assert_int_equal(count(c, "run", NULL), 1);
    assert_true(scan_again(c, 8, 2000, "y") > id);
    catalog_close(c);
}

static int stop_at_two(void *user, const struct tensor_info *t)
{
    unsigned *n = user;

    return ++*n == 2 ? 1000 + (int)t->ord : 0;
}

static int stop_file(void *user, const struct catalog_file *f)
{
    (void)user;
    (void)f;
    return -EINTR;
}

static void test_callbacks_stop(void **state)
{
    struct catalog *c = index_open(*state, "source");
    int64_t id = scan(c, "run", NULL, 9);
    unsigned n = 0;
    struct err e = {0};

    assert_int_equal(catalog_tensors(c, id, 4, stop_at_two, &n, &e), 1005);
    assert_int_equal(n, 2);
    assert_int_equal(catalog_files(c, id, stop_file, NULL, &e), -EINTR);
    assert_int_equal(catalog_tensors(c, id + 1, 0, stop_at_two, &n, &e), -ESTALE);
    assert_int_equal(catalog_files(c, id + 1, stop_file, NULL, &e), -ESTALE);
    catalog_close(c);
}

static int see_total(void *user, const struct type_total *t)
{
    *(struct type_total *)user = *t;
    return 0;
}

/* Sparse arrays may say any size: what they add up to must not look like damage. */
static void test_totals_past_63_bits(void **state)
{
    struct catalog *c = index_open(*state, "source");
    struct fake_store store = the_store();
    struct sink *s = scan_begin(c, &store, "run", NULL);
    struct type_total total = {0};
    struct err e = {0};
    int64_t id;

    for (unsigned i = 0; i < 3; i++)
        scan_plain(s, (const char *[]){"a", "b", "c"}[i], UINT64_C(1) << 60,
                   scan_file(s, "shard"), 0);
    id = scan_commit(s);
    assert_ok(catalog_types(c, id, see_total, &total, &e), &e);
    assert_int_equal(total.tensors, 3);
    assert_int_equal(total.bytes, INT64_MAX);
    assert_int_equal(total.elements, INT64_MAX / 4);
    assert_ok(catalog_has(c, id, &e), &e); /* the index was not made anew */
    catalog_close(c);
}

/* Nothing of a checkpoint that was replaced or dropped stays in the tables. */
static void test_old_rows_go(void **state)
{
    static const char *const tables[] = {
        "checkpoint", "file", "hidden",  "tensor",      "tensor_name", "tree",
        "object",     "view", "warning", "view_header", "view_member",
    };
    struct catalog *c = index_open(*state, "source");
    struct fake_store store = the_store();
    struct err e = {0};
    sqlite3 *db;

    for (unsigned i = 0; i < 2; i++) {
        struct sink *s = scan_begin(c, &store, "run", NULL);

        scan_plain(s, "a.b", 4, scan_file(s, "shard"), 0);
        assert_ok(sink_object(s, "o", 1, "1", 1, &e), &e);
        sink_warning(s, "odd", "x");
        if (i == 0)
            scan_commit(s);
        else
            assert_ok(catalog_drop(c, scan_commit(s), &e), &e);
    }
    catalog_close(c);
    assert_int_equal(sqlite3_open(index_file(*state, "sqlite"), &db), SQLITE_OK);
    for (size_t i = 0; i < ARRAY_SIZE(tables); i++) {
        sqlite3_stmt *stmt;
        char sql[100];

        snprintf(sql, sizeof sql, "SELECT count(*) FROM %s", tables[i]);
        assert_int_equal(sqlite3_prepare_v2(db, sql, -1, &stmt, NULL), SQLITE_OK);
        assert_int_equal(sqlite3_step(stmt), SQLITE_ROW);
        if (sqlite3_column_int(stmt, 0) != 0)
            fail_msg("%d rows in %s", sqlite3_column_int(stmt, 0), tables[i]);
        sqlite3_finalize(stmt);
    }
    sqlite3_close(db);
}

static void test_touch(void **state)
{
    struct catalog *c = index_open(*state, "source");
    int64_t id = scan(c, "run", NULL, 1);
    const struct file_id seen = {11, 12, 13, -14, 15};
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct checkpoint_info cp;
    struct err e = {0};

    assert_ok(catalog_touch(c, id, &seen, &e), &e);
    assert_ok(catalog_checkpoint(c, "run", NULL, a, &cp, &e), &e);
    assert_true(file_id_equal(&cp.dir_id, &seen));
    assert_int_equal(cp.names_hash, 77);
    assert_int_equal(catalog_touch(c, id + 1, &seen, &e), -ESTALE);
    catalog_close(c);
}

static void test_in_memory(void **state)
{
    struct catalog *c = index_open(NULL, "source");
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    int64_t id = scan(c, "run", NULL, 5);

    (void)state;
    assert_int_equal(get_key(c, id, "layers.3.w", a).bytes, 16);
    id = scan(c, "run", NULL, 4);
    assert_int_equal(count(c, "run", NULL), 4);
    catalog_close(c);
}

/* In memory there is one connection: callbacks use it again. */
struct nested {
    struct catalog *c;
    int64_t id;
    unsigned n;
};

static int look_again(void *user, const struct tensor_info *t)
{
    struct nested *n = user;
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct tree_entry entry;
    struct view_info v;
    unsigned stop = 0;
    struct err e = {0};

    assert_int_equal(get_key(n->c, n->id, t->key, a).ord, t->ord);
    assert_ok(catalog_tree_find(n->c, n->id, 0, "layers", &entry, &e), &e);
    assert_ok(view_get(n->c, n->id, VIEW_MODEL, PREFIX_DROP, a, &v, &e), &e);
    assert_int_equal(catalog_tensors(n->c, n->id, 1, stop_at_two, &stop, &e), 1002);
    n->n++;
    return 0;
}

static void test_calls_in_callbacks(void **state)
{
    for (unsigned memory = 0; memory < 2; memory++) {
        struct catalog *c = index_open(memory ? NULL : *state, "source");
        struct nested n = {.c = c, .id = scan(c, "run", NULL, 7)};
        struct err e = {0};

        assert_ok(catalog_tensors(c, n.id, 0, look_again, &n, &e), &e);
        assert_int_equal(n.n, 7);
        catalog_close(c);
    }
}

/* --- files that are not what they should be --- */

static void write_garbage(const char *path)
{
    int fd = open(path, O_WRONLY | O_TRUNC);

    assert_int_equal(write(fd, "this is no database at all", 26), 26);
    close(fd);
}

static void cut_in_half(const char *path)
{
    struct stat st;

    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(truncate(path, st.st_size / 2), 0);
}

static void flip_pages(const char *path)
{
    int fd = open(path, O_RDWR);
    char page[4096];

    memset(page, 0x5a, sizeof page);
    for (off_t at = 3 * 4096; at < 12 * 4096; at += 4096)
        assert_int_equal(pwrite(fd, page, sizeof page, at), sizeof page);
    close(fd);
}

static void run_sql(const char *path, const char *sql)
{
    sqlite3 *db;
    char *message = NULL;

    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    if (sqlite3_exec(db, sql, NULL, NULL, &message) != SQLITE_OK)
        fail_msg("%s: %s", sql, message);
    sqlite3_close(db);
}

static void other_version(const char *path)
{
    run_sql(path, "PRAGMA user_version = 999");
}

static void other_program(const char *path)
{
    run_sql(path, "PRAGMA application_id = 7");
}

static void other_source(const char *path)
{
    run_sql(path, "UPDATE source SET identity = x'41'");
}

static void no_source(const char *path)
{
    run_sql(path, "DELETE FROM source");
}

static void with_trigger(const char *path)
{
    run_sql(path, "CREATE TRIGGER t AFTER INSERT ON tensor BEGIN"
                  " UPDATE tensor SET fault = NULL; END");
}

static void without_table(const char *path)
{
    run_sql(path, "DROP TABLE tensor_name");
}

/* A row of the schema that says it is larger than any memory; the fuzzer found it. */
static void grow_length(const char *path)
{
    static const unsigned char row[] = {0xed, 0xed, 0xed, 0xed, 0xff, 0xff, 0xff, 0xff,
                                        0xff, 0,    0x6b, 0,    0,    0,    0,    0xf3};
    unsigned char first[112], page[512];
    int fd = open(path, O_RDWR), last;
    off_t at;

    assert_int_equal(pread(fd, first, sizeof first, 0), sizeof first);
    assert_int_equal(first[100],
                     5); /* it has pages below, the last one's number here */
    at = ((off_t)(get_be64(first + 104) & UINT32_MAX) - 1) * 4096;
    assert_int_equal(pread(fd, page, sizeof page, at), sizeof page);
    last = 8 + 2 * ((page[3] << 8 | page[4]) - 1); /* the row that lies first in it */
    at += page[last] << 8 | page[last + 1];
    assert_int_equal(pwrite(fd, row, sizeof row, at), sizeof row);
    close(fd);
}

static void make_directory(const char *path)
{
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
}

static void make_link(const char *path)
{
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink("/nowhere/at/all", path), 0);
}

static void make_foreign(const char *path)
{
    assert_int_equal(unlink(path), 0);
    run_sql(path, "CREATE TABLE songs (name TEXT); INSERT INTO songs VALUES ('x')");
}

static void make_empty(const char *path)
{
    assert_int_equal(truncate(path, 0), 0);
}

static void test_made_anew(void **state)
{
    static const struct {
        const char *name;
        void (*damage)(const char *path);
    } cases[] = {
        {"garbage", write_garbage}, {"half", cut_in_half},
        {"pages", flip_pages},      {"version", other_version},
        {"program", other_program}, {"source", other_source},
        {"no source", no_source},   {"trigger", with_trigger},
        {"table", without_table},   {"directory", make_directory},
        {"link", make_link},        {"foreign", make_foreign},
        {"empty", make_empty},      {"length", grow_length},
    };
    int null = open("/dev/null", O_WRONLY);

    log_to(null); /* each is told */
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct catalog *c = index_open(*state, "source");

        scan(c, "run", NULL, 300);
        catalog_close(c);
        cases[i].damage(index_file(*state, "sqlite"));
        c = index_open(*state, "source");
        if (count(c, "run", NULL) != -1)
            fail_msg("%s: it is still there", cases[i].name);
        scan(c, "run", NULL, 2);
        if (count(c, "run", NULL) != 2)
            fail_msg("%s: the new one does not work", cases[i].name);
        catalog_close(c);
        c = index_open(*state, "source");
        assert_int_equal(count(c, "run", NULL), 2);
        catalog_close(c);
    }
    log_to(2);
    close(null);
}

struct walk {
    struct catalog *c;
    int64_t id;
    uint32_t dir;
    struct err *e;
};

static int read_object(void *user, const char *key, size_t key_len, const char *json,
                       size_t len)
{
    (void)user;
    (void)key;
    (void)key_len;
    (void)json;
    (void)len;
    return 0;
}

static int read_all_of_tensor(void *user, const struct tensor_info *t)
{
    const struct walk *w = user;
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    const struct chunk *chunk;
    struct tensor_info again;
    size_t n;
    int rc = catalog_tensor_by_name(w->c, w->id, t->name, false, a, &again, w->e);

    return rc < 0 ? rc : catalog_chunks(w->c, w->id, t, a, &chunk, &n, w->e);
}

static int read_dir(void *user, const struct tree_entry *t)
{
    const struct walk *w = user;
    struct tree_entry again;

    return catalog_tree_find(w->c, w->id, w->dir, t->name, &again, w->e);
}

static int read_file(void *user, const struct catalog_file *f)
{
    (void)user;
    (void)f;
    return 0;
}

/* Everything of a view. */
static int read_view(struct walk *w, struct arena *a, struct err *e)
{
    struct view_member *member = NULL;
    struct view_info v;
    char header[4096];
    size_t n;
    int rc = view_get(w->c, w->id, VIEW_MODEL, PREFIX_AUTO, a, &v, e);

    if (rc == 0)
        rc = view_header(w->c, &v, 0, MIN(v.header, sizeof header), header, e);
    if (rc == 0)
        rc = view_members(w->c, &v, &member, &n, e);
    free(member);
    return rc;
}

/* Reads all there is of the checkpoint "run": 0, or the first error. */
static int read_everything(struct catalog *c, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(16 << 20);
    struct checkpoint_info cp;
    struct walk w = {.c = c, .e = e};
    struct tree_entry entry;
    int rc = catalog_checkpoint(c, "run", NULL, a, &cp, e);

    w.id = cp.id;
    if (rc == 0)
        rc = catalog_files(c, w.id, read_file, NULL, e);
    if (rc == 0)
        rc = catalog_tensors(c, w.id, 0, read_all_of_tensor, &w, e);
    if (rc == 0)
        rc = catalog_objects(c, w.id, read_object, NULL, e);
    if (rc == 0)
        rc = catalog_tree_list(c, w.id, 0, 0, read_dir, &w, e);
    if (rc == 0)
        rc = catalog_tree_find(c, w.id, 0, "a", &entry, e);
    w.dir = rc == 0 ? entry.dir : 0;
    if (rc == 0)
        rc = catalog_tree_list(c, w.id, w.dir, 0, read_dir, &w, e);
    return rc == 0 ? read_view(&w, a, e) : rc;
}

/*
 * Every column that decides about bytes, changed behind our back: the row's sum tells, the
 * call fails, and the index is made anew.
 */
static void test_changed_rows(void **state)
{
    static const char *const changes[] = {
        "UPDATE checkpoint SET uid = uid + 1",
        "UPDATE checkpoint SET tensors = 9999",
        "UPDATE file SET size = size + 1",
        "UPDATE file SET path = x'41'",
        "UPDATE tensor SET bytes = bytes + 1",
        "UPDATE tensor SET shape = x'0105'",
        "UPDATE tensor SET dtype = dtype + 1",
        "UPDATE tensor SET fault = NULL, role = 1",
        "UPDATE tensor SET key = CAST(x'42' || key AS BLOB)",
        "UPDATE tensor SET codec_key = x'43'",
        "UPDATE tensor SET pieces = CAST(substr(pieces, 1, 3) || x'77' AS BLOB)",
        "UPDATE tensor SET pieces = x''",
        "UPDATE tensor SET id = id + 1000 WHERE id & 0xffffffff = 0",
        "UPDATE tensor_name SET data = substr(data, 1, 12)",
        "UPDATE tree SET data = substr(data, 1, length(data) - 1)",
        "UPDATE tree SET parent = 1",
        "UPDATE object SET json = x'31'",
        "UPDATE view SET size = size + 1",
        "UPDATE view_header SET data = substr(data, 1, length(data) - 1)",
        "UPDATE view_member SET data = substr(data, 1, 1)",
    };
    int null = open("/dev/null", O_WRONLY);

    log_to(null);
    for (size_t i = 0; i < ARRAY_SIZE(changes); i++) {
        struct catalog *c = index_open(*state, "source");
        struct fake_store store = the_store();
        struct sink *s = scan_begin(c, &store, "run", NULL);
        uint32_t number = scan_file(s, "shard");
        struct err e = {0};
        int rc;

        scan_plain(s, "a.b", 4, number, 0);
        scan_plain(s, "a.c", 4, number, 16);
        assert_ok(sink_object(s, "o", 1, "0", 1, &e), &e);
        scan_commit(s);
        assert_int_equal(read_everything(c, &e), 0);
        catalog_close(c);
        run_sql(index_file(*state, "sqlite"), changes[i]);
        c = index_open(*state, "source");
        rc = read_everything(c, &e);
        if (rc != -EBADMSG)
            fail_msg("%d: %s", rc, changes[i]);
        if (count(c, "run", NULL) != -1)
            fail_msg("still there: %s", changes[i]);
        catalog_close(c);
    }
    log_to(2);
    close(null);
}

/* ---- rows whose sum is right, and which say what cannot be ---- */

static struct cell cell_of_value(sqlite3_value *v)
{
    switch (sqlite3_value_type(v)) {
    case SQLITE_INTEGER:
        return cell_int((uint64_t)sqlite3_value_int64(v));
    case SQLITE_BLOB:
        return cell_blob(sqlite3_value_blob(v), (size_t)sqlite3_value_bytes(v));
    default:
        return (struct cell){.kind = CELL_NULL};
    }
}

/* row_sum(columns...) of SQL. */
static void row_sum(sqlite3_context *context, int n, sqlite3_value **v)
{
    struct cell cell[TENSOR_COLUMNS];

    assert_true(n <= TENSOR_COLUMNS);
    for (int i = 0; i < n; i++)
        cell[i] = cell_of_value(v[i]);
    sqlite3_result_int64(context, (int64_t)cells_sum(cell, (size_t)n));
}

/* blob_sum(blob) of SQL. */
static void blob_sum(sqlite3_context *context, int n, sqlite3_value **v)
{
    assert_int_equal(n, 1);
    sqlite3_result_int64(context,
                         (int64_t)XXH3_64bits(sqlite3_value_blob(v[0]),
                                              (size_t)sqlite3_value_bytes(v[0])));
}

/* All sums as the index would have made them. */
static void sum_rows(sqlite3 *db)
{
    static const char *const lists[][2] = {
        {"tensor", TENSOR_LIST("")},
        {"tensor_name", "checkpoint, hash, data, sum"},
        {"tree", "dir, pos, parent, data, sum"},
        {"file", "id, path, dev, ino, size, mtime_ns, ctime_ns, mode, storage, whole, "
                 "tensors, sum"},
        {"object", "id, key, json, sum"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(lists); i++) {
        CLEANUP(buf_release) struct buf sql = {0};
        size_t columns = strlen(lists[i][1]) - strlen(", sum");
        char *message = NULL;

        buf_addf(&sql, "UPDATE %s SET sum = row_sum(%.*s)", lists[i][0], (int)columns,
                 lists[i][1]);
        if (sqlite3_exec(db, sql.data, NULL, NULL, &message) != SQLITE_OK)
            fail_msg("%s: %s", sql.data, message);
    }
}

static void run_sql_summed(const char *path, const char *sql)
{
    sqlite3 *db;
    char *message = NULL;

    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    sqlite3_create_function(db, "row_sum", -1, SQLITE_UTF8, NULL, row_sum, NULL, NULL);
    sqlite3_create_function(db, "blob_sum", 1, SQLITE_UTF8, NULL, blob_sum, NULL, NULL);
    if (sqlite3_exec(db, sql, NULL, NULL, &message) != SQLITE_OK)
        fail_msg("%s: %s", sql, message);
    sum_rows(db);
    sqlite3_close(db);
}

#define PIECES(set)                                                                    \
    "UPDATE tensor SET " set "; UPDATE tensor SET pieces_sum = blob_sum(pieces)"

static void test_rows_that_lie(void **state)
{
    static const struct {
        const char *sql, *why; /* NULL: the row is sound */
    } changes[] = {
        {"UPDATE tensor SET mode = 256", NULL},
        {"UPDATE tensor SET name = x'2f'", "its file name is impossible"},
        {"UPDATE tensor SET name = x''", "its file name is impossible"},
        {"UPDATE tensor SET name = x'4100'", "its file name is impossible"},
        {"UPDATE tensor SET name = zeroblob(256)", "its file name is impossible"},
        {"UPDATE tensor SET name_npy = x'2f'", "its file name is impossible"},
        {"UPDATE tensor SET name_npy = x''", "its file name is impossible"},
        {"UPDATE tensor SET key = x'612f62'", "its file name is impossible"},
        {"UPDATE tensor SET dtype = 200", "its element type is unknown"},
        {"UPDATE tensor SET dtype = -1", "its element type is unknown"},
        {"UPDATE tensor SET stored = 200", "its element type is unknown"},
        {"UPDATE tensor SET bits = bits + 1", "its element type is unknown"},
        {"UPDATE tensor SET role = 4", "its role is unknown"},
        {"UPDATE tensor SET mode = 512", "a number is out of range"},
        {"UPDATE tensor SET uid = 4294967296", "a number is out of range"},
        {"UPDATE tensor SET gid = -1", "a number is out of range"},
        {"UPDATE tensor SET wrapper = length(key) + 1", "a number is out of range"},
        {"UPDATE tensor SET bytes = -1", "a number is out of range"},
        {"UPDATE tensor SET ino = ino + 1", "its inode number is out of range"},
        {"UPDATE tensor SET ino = 4294967294", "its inode number is out of range"},
        {"UPDATE tensor SET bytes = bytes + 4",
         "its size does not follow from its shape"},
        {"UPDATE tensor SET shape = x'0105'",
         "its size does not follow from its shape"},
        {"UPDATE tensor SET shape = x''", "its shape is malformed"},
        {"UPDATE tensor SET shape = x'41'", "its shape is malformed"},
        {"UPDATE tensor SET shape = x'01'", "its shape is malformed"},
        {"UPDATE tensor SET shape = x'010404'", "its shape is malformed"},
        {"UPDATE tensor_name SET data = CAST(data || x'00' AS BLOB)",
         "hashes of names are malformed"},
        {"UPDATE tensor_name SET data = CAST(substr(data, 1, 8) || x'63000000' AS BLOB)",
         "tensor 99 of a name is missing"},
        /* one chunk: its tag, file, offset, length, start and size */
        {PIECES("pieces = CAST(pieces || x'00' AS BLOB)"), "chunks of tensor 0: "},
        {PIECES("pieces = x'00'"), NULL}, /* the plan will see the hole */
        {PIECES("pieces = x'01000200200008'"),
         "chunks of tensor 0: chunk 0 is in file 1 of 1"},
        {PIECES("pieces = x'0100000020020a'"),
         "chunks of tensor 0: chunk 0 lies outside the tensor"},
        {PIECES("pieces = x'01000000200a00'"),
         "chunks of tensor 0: chunk 0 lies outside the tensor"},
        {PIECES("pieces = x'010000feffffffffffffffff01200008'"),
         "chunks of tensor 0: chunk 0 lies beyond any file"},
        {"UPDATE tensor SET pieces = x'01000000200008', pieces_sum = 7",
         "chunks of tensor 0: their sum is wrong"},
        {PIECES("pieces = x''"), "chunks of tensor 0: there are none"},
        {"UPDATE tree SET parent = 2147483648", "a row of tree/ is impossible"},
        {"UPDATE tree SET data = x'0000'", "an entry of tree/ is malformed"},
        {"UPDATE tree SET data = x'05006162'", "an entry of tree/ is malformed"},
        {"UPDATE tree SET data = x'010000'", "an entry of tree/ is impossible"},
        {"UPDATE tree SET data = x'01808080802061'", "an entry of tree/ is impossible"},
        {"UPDATE file SET path = x''", "the path of a file is impossible"},
        {"UPDATE file SET path = x'6100'", "the path of a file is impossible"},
        {"UPDATE file SET path = zeroblob(4096)", "the path of a file is impossible"},
    };
    int null = open("/dev/null", O_WRONLY);

    log_to(null);
    for (size_t i = 0; i < ARRAY_SIZE(changes); i++) {
        struct catalog *c = index_open(*state, "source");
        struct fake_store store = the_store();
        struct sink *s = scan_begin(c, &store, "run", NULL);
        uint32_t number = scan_file(s, "shard");
        struct err e = {0};
        int rc;

        scan_plain(s, "a.b", 4, number, 0);
        assert_ok(sink_object(s, "o", 1, "0", 1, &e), &e);
        scan_commit(s);
        catalog_close(c);
        run_sql_summed(index_file(*state, "sqlite"), changes[i].sql);
        c = index_open(*state, "source");
        rc = read_everything(c, &e);
        if (rc != (changes[i].why ? -EBADMSG : 0))
            fail_msg("%s: %d, %s", changes[i].sql, rc, e.text);
        if (changes[i].why && !strstr(e.text, changes[i].why))
            fail_msg("%s: it should say %s: %s", changes[i].sql, changes[i].why,
                     e.text);
        catalog_close(c);
        run_sql(index_file(*state, "sqlite"),
                "PRAGMA user_version = 999"); /* made anew */
    }
    log_to(2);
    close(null);
}

/* Many threads and little memory: what others have open is no damaged file. */
static void test_without_memory_it_stays(void **state)
{
    struct catalog *c = index_open(*state, "source");
    int64_t id = scan(c, "run", NULL, 5);
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct conn *used = NULL, *more = NULL;
    struct err e = {0};
    sqlite3_int64 before;
    struct stat st, now;

    assert_ok(conn_take(c, false, &used, &e), &e);
    assert_int_equal(stat(index_file(*state, "sqlite"), &st), 0);
    if (sqlite3_memory_used() == 0) {
        conn_put(used);
        catalog_close(c);
        leave_out("this sqlite does not count its memory");
    }
    before = sqlite3_hard_heap_limit64(sqlite3_memory_used() + 1);
    assert_int_equal(conn_take(c, false, &more, &e), -ENOMEM);
    sqlite3_hard_heap_limit64(before);
    assert_null(more);
    conn_put(used);
    assert_int_equal(stat(index_file(*state, "sqlite"), &now), 0);
    assert_int_equal(now.st_ino, st.st_ino);
    assert_int_equal(get_key(c, id, "layers.3.w", a).ord, 3);
    catalog_close(c);
}

/* --- disks that refuse --- */

static void test_directory_cannot_be_written(void **state)
{
    const struct catalog_options options = {.dir = "/proc/self/nope"};
    struct catalog *c = NULL;
    struct err e = {0};

    (void)state;
    assert_true(catalog_open(&options, "source", &c, &e) < 0);
    assert_null(c);
    assert_has(e.text, "/proc/self/nope");
}

/*
 * In a process whose files cannot grow: 0 when the commit failed as it should, or went on in
 * memory (with sqlite 3.45 it does, 3.40 tells no errno).
 */
static int commit_on_full_disk(const struct tmp *t)
{
    const struct rlimit limit = {1 << 20, 1 << 20};
    struct catalog *c = index_open(t, "source");
    struct fake_store store = the_store();
    struct sink *s = scan_begin(c, &store, "run", NULL);
    uint32_t number = scan_file(s, "shard");
    struct err e = {0};
    int64_t id;
    int rc;

    signal(SIGXFSZ, SIG_IGN);
    for (unsigned i = 0; i < 5000; i++) {
        char key[300];

        snprintf(key, sizeof key, "%0250u", i);
        scan_plain(s, key, 4, number, 16);
    }
    if (setrlimit(RLIMIT_FSIZE, &limit) < 0)
        return 1;
    rc = sink_commit(s, NULL, &id, &e);
    if (rc == -EFBIG || rc == -ENOSPC || rc == -EIO ||
        (rc == 0 && count(c, "run", NULL) == 5000))
        return 0;
    fprintf(stderr, "# %d %s\n", rc, e.text);
    return 1;
}

static void test_full_disk(void **state)
{
    struct catalog *c = index_open(*state, "source");
    pid_t child;
    int status;

    scan(c, "run", NULL, 3);
    catalog_close(c);
    child = fork();
    if (child == 0)
        _exit(commit_on_full_disk(*state));
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    c = index_open(*state, "source");
    assert_int_equal(count(c, "run", NULL), 3);
    scan(c, "run", NULL, 4);
    assert_int_equal(count(c, "run", NULL), 4);
    catalog_close(c);
}

/* --- several at once --- */

/* Each process scans its own and a common checkpoint again and again. */
static void scan_often(const struct tmp *t, unsigned who)
{
    struct catalog *c = index_open(t, "source");
    char own[20];

    snprintf(own, sizeof own, "own%u", who);
    for (unsigned i = 0; i < 10; i++) {
        scan(c, own, NULL, 50 + who);
        scan(c, "common", NULL, 200);
        if (count(c, own, NULL) != 50 + who || count(c, "common", NULL) != 200)
            _exit(1);
    }
    catalog_close(c);
    _exit(0);
}

static void test_processes_at_once(void **state)
{
    enum { PROCESSES = 4 };
    pid_t child[PROCESSES];
    struct catalog *c;

    for (unsigned i = 0; i < PROCESSES; i++) {
        child[i] = fork();
        if (child[i] == 0)
            scan_often(*state, i);
    }
    for (unsigned i = 0; i < PROCESSES; i++) {
        int status;

        assert_int_equal(waitpid(child[i], &status, 0), child[i]);
        assert_int_equal(status, 0);
    }
    c = index_open(*state, "source");
    assert_int_equal(count(c, "common", NULL), 200);
    assert_int_equal(count(c, "own3", NULL), 53);
    catalog_close(c);
}

struct reader {
    struct catalog *c;
    bool memory;
    atomic_bool stop, wrong;
    atomic_uint reads;
};

/* Reads while others scan: a whole old state or a whole new one. */
static void *read_often(void *user)
{
    struct reader *r = user;

    while (!atomic_load(&r->stop)) {
        CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
        struct checkpoint_info cp;
        struct tensor_info t;
        struct err e = {0};
        int rc = catalog_checkpoint(r->c, "run", NULL, a, &cp, &e);

        if (rc == 0)
            rc = catalog_tensor(r->c, cp.id, (uint32_t)cp.tensors - 1, a, &t, &e);
        if (rc != 0 && rc != -ESTALE && rc != -ENOENT) {
            fprintf(stderr, "# %s\n", e.text);
            atomic_store(&r->wrong, true);
        }
        if (rc == 0 && cp.tensors != 100 && cp.tensors != 150)
            atomic_store(&r->wrong, true);
        atomic_fetch_add(&r->reads, 1);
    }
    return NULL;
}

static void test_threads_at_once(void **state)
{
    for (unsigned memory = 0; memory < 2; memory++) {
        struct reader r = {.c = index_open(memory ? NULL : *state, "source")};
        pthread_t thread[4];

        for (size_t i = 0; i < ARRAY_SIZE(thread); i++)
            assert_int_equal(pthread_create(&thread[i], NULL, read_often, &r), 0);
        for (unsigned i = 0; i < 20 || atomic_load(&r.reads) < 100; i++)
            scan(r.c, "run", NULL, i % 2 ? 100 : 150);
        atomic_store(&r.stop, true);
        for (size_t i = 0; i < ARRAY_SIZE(thread); i++)
            pthread_join(thread[i], NULL);
        assert_false(atomic_load(&r.wrong));
        catalog_close(r.c);
    }
}

/* A scan that is going on keeps nobody from reading or scanning. */
static void test_scan_holds_no_lock(void **state)
{
    struct catalog *c = index_open(*state, "source"),
                   *other = index_open(*state, "source");
    struct fake_store store = the_store();
    struct sink *slow = scan_begin(c, &store, "slow", NULL);
    uint32_t number = scan_file(slow, "shard");
    struct timespec a, b;

    scan_plain(slow, "w", 4, number, 0);
    clock_gettime(CLOCK_MONOTONIC, &a);
    scan(other, "quick", NULL, 5);
    clock_gettime(CLOCK_MONOTONIC, &b);
    assert_true(b.tv_sec - a.tv_sec < 20); /* a lock would take the 30 s of busy */
    assert_int_equal(count(c, "quick", NULL), 5);
    assert_int_equal(count(other, "slow", NULL), -1);
    scan_plain(slow, "v", 4, number, 16);
    scan_commit(slow);
    assert_int_equal(count(other, "slow", NULL), 2);
    catalog_close(c);
    catalog_close(other);
}

static void test_abort_leaves_the_old(void **state)
{
    struct catalog *c = index_open(*state, "source");
    struct fake_store store = the_store();
    int64_t id = scan(c, "run", NULL, 5);
    struct sink *s = scan_begin(c, &store, "run", NULL);
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);

    scan_plain(s, "w", 4, scan_file(s, "shard"), 0);
    sink_abort(s);
    assert_int_equal(count(c, "run", NULL), 5);
    assert_int_equal(get_key(c, id, "layers.0.w", a).ord, 0);
    catalog_close(c);
}

/* Scans 4,000 tensors and says when the commit begins. */
static void scan_and_tell(const struct tmp *t, int fd)
{
    struct catalog *c = index_open(t, "source");
    struct fake_store store = the_store();
    struct sink *s = scan_begin(c, &store, "run", NULL);
    uint32_t number = scan_file(s, "shard");

    for (unsigned i = 0; i < 4000; i++) {
        char key[32];

        snprintf(key, sizeof key, "k%u", i);
        scan_plain(s, key, 4, number, 0);
    }
    if (write(fd, "x", 1) != 1)
        _exit(1);
    scan_commit(s);
    _exit(0);
}

/* Lets a process be killed so many microseconds into its commit. */
static void kill_in_commit(const struct tmp *t, unsigned delay_us)
{
    int ready[2];
    char byte;
    pid_t child;

    assert_int_equal(pipe(ready), 0);
    child = fork();
    if (child == 0)
        scan_and_tell(t, ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    usleep(delay_us);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    close(ready[0]);
    close(ready[1]);
}

/* The old state or the new one, never a mix. */
static void killed_in_a_commit(const struct tmp *t, unsigned rounds)
{
    unsigned old = 0;

    /* On a busy machine a kill comes late: none at all came in time is what may not be. */
    for (unsigned round = 0; round < rounds || (!old && round < 200); round++) {
        struct catalog *c = index_open(t, "source");
        int64_t n;

        scan(c, "run", NULL, 10);
        catalog_close(c);
        kill_in_commit(t, round < rounds ? round * 100000 / rounds : 0);
        c = index_open(t, "source");
        n = count(c, "run", NULL);
        if (n != 10 && n != 4000)
            fail_msg("round %u: %" PRId64 " tensors", round, n);
        old += n == 10;
        scan(c, "after", NULL, 1);
        assert_int_equal(count(c, "after", NULL), 1);
        catalog_close(c);
    }
    assert_true(old > 0); /* the first is killed at once */
}

static void test_killed_in_a_commit(void **state)
{
    killed_in_a_commit(*state, 20);
}

/* No shared memory there: a journal that is rolled back, and no write-ahead log. */
static void test_network_disk(void **state)
{
    struct catalog *c, *other;
    unsigned char header[20] = {0};
    glob_t g;
    int fd;

    on_network = true;
    c = index_open(*state, "source");
    other = index_open(*state, "source");
    scan(c, "run", NULL, 5);
    assert_int_equal(count(other, "run", NULL), 5);
    scan(other, "run", NULL, 6);
    assert_int_equal(count(c, "run", NULL), 6);
    assert_int_equal(glob(tmp_at(*state, "index/*-wal"), 0, NULL, &g), GLOB_NOMATCH);
    catalog_close(c);
    catalog_close(other);
    fd = open(index_file(*state, "sqlite"), O_RDONLY);
    assert_int_equal(read(fd, header, sizeof header), sizeof header);
    close(fd);
    assert_int_equal(header[18], 1); /* 2: a write-ahead log */
    killed_in_a_commit(*state, 8);
    on_network = false;
    /* And the same file on a local disk again, and back. */
    c = index_open(*state, "source");
    scan(c, "run", NULL, 7);
    catalog_close(c);
    on_network = true;
    c = index_open(*state, "source");
    assert_int_equal(count(c, "run", NULL), 7);
    scan(c, "run", NULL, 8);
    assert_int_equal(count(c, "run", NULL), 8);
    catalog_close(c);
    on_network = false;
}

/* --- what others do to the file meanwhile --- */

static void test_deleted_under_us(void **state)
{
    struct catalog *c = index_open(*state, "source");
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    int64_t id = scan(c, "run", NULL, 5), anew;
    struct checkpoint_info cp;
    struct stat st;
    struct err e = {0};

    assert_int_equal(unlink(index_file(*state, "sqlite")), 0);
    assert_int_equal(count(c, "run", NULL), 5); /* what is open stays */
    anew = scan(c, "run", NULL, 6);
    assert_int_equal(count(c, "run", NULL), 6);
    assert_int_equal(stat(index_file(*state, "sqlite"), &st), 0);
    if (anew != id) /* ids start at random */
        assert_int_equal(catalog_checkpoint_by_id(c, id, a, &cp, &e), -ESTALE);
    catalog_close(c);
    c = index_open(*state, "source");
    assert_int_equal(count(c, "run", NULL), 6);
    catalog_close(c);
}

/* One process makes it anew; what another still does with the old file hurts nobody. */
static void test_replaced_under_us(void **state)
{
    struct catalog *old = index_open(*state, "source"), *c;
    int null = open("/dev/null", O_WRONLY);

    scan(old, "run", NULL, 5);
    run_sql(index_file(*state, "sqlite"), "PRAGMA user_version = 999");
    log_to(null);
    c = index_open(*state, "source");
    log_to(2);
    close(null);
    scan(c, "run", NULL, 7);
    count(old, "run", NULL);
    catalog_close(old); /* must not delete the new one's journal */
    assert_int_equal(count(c, "run", NULL), 7);
    catalog_close(c);
    c = index_open(*state, "source");
    assert_int_equal(count(c, "run", NULL), 7);
    catalog_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        tmp_test(test_file_is_private),
        tmp_test(test_it_lasts),
        tmp_test(test_sources_are_apart),
        tmp_test(test_places_and_ids),
        tmp_test(test_without_memory_it_stays),
        tmp_test(test_the_same_again_keeps_its_id),
        tmp_test(test_callbacks_stop),
        tmp_test(test_totals_past_63_bits),
        tmp_test(test_old_rows_go),
        tmp_test(test_touch),
        cmocka_unit_test(test_in_memory),
        tmp_test(test_calls_in_callbacks),
        tmp_test(test_made_anew),
        tmp_test(test_changed_rows),
        tmp_test(test_rows_that_lie),
        cmocka_unit_test(test_directory_cannot_be_written),
        tmp_test(test_full_disk),
        tmp_test(test_processes_at_once),
        tmp_test(test_threads_at_once),
        tmp_test(test_scan_holds_no_lock),
        tmp_test(test_abort_leaves_the_old),
        tmp_test(test_killed_in_a_commit),
        tmp_test(test_network_disk),
        tmp_test(test_deleted_under_us),
        tmp_test(test_replaced_under_us),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
