/* SPDX-License-Identifier: MIT */
/* tests/unit/test_scan.c - which place is what; one scan for all, and only when needed. */
#include "remote_tmp.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/endian.h"
#include "base/err.h"
#include "index/catalog.h"
#include "index/formats/scan.h"
#include "index/formats/scan_priv.h"
#include "index/watched.h"
#include "remote/store.h"

/* ---- a store that counts, and that something happens behind the back of ---- */

struct counting {
    struct store store;
    struct store *inner;
    atomic_uint stats, lists, opens;
    void (*on_open)(struct counting *c, const char *path);   /* once */
    void (*on_opened)(struct counting *c, const char *path); /* each time, behind it */
    const char *forbidden;                                   /* may not be listed */
    const struct tmp *tmp;
};

static struct counting *counting_of(struct store *s)
{
    return container_of(s, struct counting, store);
}

static int count_stat(struct store *s, const char *path, struct entry_stat *out,
                      struct err *e)
{
    struct counting *c = counting_of(s);

    atomic_fetch_add(&c->stats, 1);
    return c->inner->ops->stat(c->inner, path, out, e);
}

static int count_list(struct store *s, const char *path, struct listing **out,
                      struct err *e)
{
    struct counting *c = counting_of(s);

    atomic_fetch_add(&c->lists, 1);
    if (c->forbidden && strcmp(path, c->forbidden) == 0)
        return err_set(e, EACCES, "%s: Permission denied", path);
    return c->inner->ops->list(c->inner, path, out, e);
}

static int count_open(struct store *s, const char *path, struct source **out,
                      struct err *e)
{
    struct counting *c = counting_of(s);
    void (*hook)(struct counting * c, const char *path) = c->on_open;
    int rc;

    atomic_fetch_add(&c->opens, 1);
    c->on_open = NULL;
    if (hook)
        hook(c, path);
    rc = c->inner->ops->open(c->inner, path, out, e);
    if (c->on_opened)
        c->on_opened(c, path);
    return rc;
}

static int count_readlink(struct store *s, const char *path, char *dst, size_t size,
                          struct err *e)
{
    struct counting *c = counting_of(s);

    return c->inner->ops->readlink(c->inner, path, dst, size, e);
}

static void count_close(struct store *s)
{
    store_close(counting_of(s)->inner);
}

static const struct store_ops counting_ops = {.name = "counting",
                                              .stat = count_stat,
                                              .list = count_list,
                                              .open = count_open,
                                              .readlink = count_readlink,
                                              .close = count_close};

/* All that a scanner needs, over a directory of the test. */
struct rig {
    struct counting c;
    struct catalog *catalog;
    struct scanner *scanner;
    struct arena *arena;
};

static void rig_open(struct rig *r, const struct tmp *t, const char *path)
{
    static const struct store_options options;
    static const struct catalog_options memory = {.memory = true};
    struct err e = {0};

    *r = (struct rig){.arena = arena_new(1 << 24)};
    assert_ok(store_open_local(tmp_at(t, path), &options, &r->c.inner, &e), &e);
    r->c.tmp = t;
    r->c.store.ops = &counting_ops;
    r->c.store.url = strdup(r->c.inner->url);
    r->c.store.file = r->c.inner->file ? strdup(r->c.inner->file) : NULL;
    r->c.store.identity = strdup(r->c.inner->identity);
    assert_ok(catalog_open(&memory, r->c.store.identity, &r->catalog, &e), &e);
    assert_ok(scanner_new(&r->c.store, r->catalog, NULL, &r->scanner, &e), &e);
}

static void rig_close(struct rig *r)
{
    scanner_free(r->scanner);
    catalog_close(r->catalog);
    store_close(&r->c.store);
    arena_free(r->arena);
}

static struct checkpoint_info get(struct rig *r, const char *path, const char *file)
{
    struct checkpoint_info info;
    struct err e = {0};

    assert_ok(scanner_get(r->scanner, path, file, r->arena, &info, &e), &e);
    return info;
}

static int get_code(struct rig *r, const char *path, const char *file)
{
    struct checkpoint_info info;
    struct err e = {0};

    return scanner_get(r->scanner, path, file, r->arena, &info, &e);
}

/* A safetensors file of one tensor of n bytes. */
static void put_model(const struct tmp *t, const char *name, const char *key,
                      unsigned n)
{
    CLEANUP(buf_release) struct buf b = {0};

    buf_add(&b, "\0\0\0\0\0\0\0", 8);
    buf_addf(&b, "{\"%s\":{\"dtype\":\"U8\",\"shape\":[%u],\"data_offsets\":[0,%u]}}",
             key, n, n);
    put_le64(b.data, b.len - 8);
    for (unsigned i = 0; i < n; i++)
        buf_addc(&b, (char)i);
    tmp_bytes(t, name, b.data, b.len);
}

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

/* ---- which place is what ---- */

static struct listing *list(struct rig *r, const char *path)
{
    struct listing *l;
    struct err e = {0};

    assert_ok(r->c.inner->ops->list(r->c.inner, path, &l, &e), &e);
    return l;
}

static struct place place_at(struct rig *r, struct listing *l, const char *only)
{
    struct place p;
    struct err e = {0};

    (void)r;
    assert_ok(place_of(l, only, &p, &e), &e);
    return p;
}

static void count_bid(void *user, const struct format_driver *d, const char *file,
                      const struct bid *b)
{
    assert_non_null(d);
    assert_true(b->score > 0 && b->reason[0]);
    *(unsigned *)user += file ? 1 : 100;
}

static void test_places(void **state)
{
    const struct tmp *t = *state;
    struct rig r;
    struct listing *l;
    struct place p;
    unsigned bids = 0;

    tmp_dir(t, "model");
    put_model(t, "model/model.safetensors", "w", 3);
    put_model(t, "model/other.safetensors", "w", 3);
    tmp_dir(t, "lone");
    put_model(t, "lone/x.safetensors", "w", 3);
    tmp_file(t, "lone/README.md", "text");
    tmp_dir(t, "two");
    put_model(t, "two/x.safetensors", "w", 3);
    put_model(t, "two/y.safetensors", "w", 3);
    tmp_dir(t, "plain");
    tmp_file(t, "plain/README.md", "text");
    rig_open(&r, t, "");

    l = list(&r, "model");
    p = place_at(&r, l, NULL);
    assert_int_equal(p.kind, PLACE_CHECKPOINT);
    assert_string_equal(p.driver->name, "safetensors");
    assert_null(p.file);
    place_bids(l, count_bid, &bids);
    assert_int_equal(bids, 102);
    p = place_at(&r, l, "other.safetensors");
    assert_int_equal(p.kind, PLACE_CHECKPOINT);
    assert_string_equal(p.file, "other.safetensors");
    assert_int_equal(place_at(&r, l, "none.safetensors").kind, PLACE_PLAIN);
    listing_free(l);

    l = list(&r, "lone");
    p = place_at(&r, l, NULL);
    assert_int_equal(p.kind, PLACE_CHECKPOINT);
    assert_string_equal(p.file, "x.safetensors");
    assert_int_equal(place_at(&r, l, "README.md").kind, PLACE_PLAIN);
    place_release(&p);
    listing_free(l);

    l = list(&r, "two");
    p = place_at(&r, l, NULL);
    assert_int_equal(p.kind, PLACE_FILES);
    assert_int_equal(p.nfiles, 2);
    assert_string_equal(p.files[0].name, "x.safetensors");
    assert_string_equal(p.files[1].name, "y.safetensors");
    place_release(&p);
    listing_free(l);

    l = list(&r, "plain");
    p = place_at(&r, l, NULL);
    assert_int_equal(p.kind, PLACE_PLAIN);
    assert_null(p.driver);
    listing_free(l);
    rig_close(&r);
}

/* ---- fresh or not ---- */

static int64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void test_memory_of_a_second(void **state)
{
    const struct tmp *t = *state;
    struct checkpoint_info first, second;
    int64_t begun = now_ms();
    struct rig r;

    tmp_dir(t, "m");
    put_model(t, "m/model.safetensors", "w", 3);
    rig_open(&r, t, "");
    first = get(&r, "m", NULL);
    assert_int_equal(first.tensors, 1);
    assert_int_equal(first.bytes, 3);
    assert_string_equal(first.path, "m");
    r.c.stats = r.c.lists = r.c.opens = 0;
    second = get(&r, "m", NULL);
    assert_int_equal(second.id, first.id);
    while (now_ms() - begun >= 1000) { /* that took too long: once more */
        pause_ms(1100);
        begun = now_ms();
        get(&r, "m", NULL);
        r.c.stats = r.c.lists = r.c.opens = 0;
        second = get(&r, "m", NULL);
        assert_int_equal(second.id, first.id);
    }
    assert_int_equal(r.c.stats + r.c.lists + r.c.opens, 0);
    pause_ms(1100); /* then it looks, and scans nothing */
    second = get(&r, "m", NULL);
    assert_int_equal(second.id, first.id);
    assert_int_not_equal(r.c.stats, 0);
    assert_int_equal(r.c.opens, 0);
    rig_close(&r);
}

static void test_change_shows_within_a_second(void **state)
{
    const struct tmp *t = *state;
    struct checkpoint_info first, second;
    struct rig r;

    tmp_dir(t, "m");
    put_model(t, "m/model.safetensors", "w", 3);
    rig_open(&r, t, "");
    first = get(&r, "m", NULL);
    put_model(t, "m/model.safetensors", "v", 4);
    pause_ms(1050);
    second = get(&r, "m", NULL);
    assert_int_not_equal(second.id, first.id);
    assert_int_equal(second.bytes, 4);
    rig_close(&r);
}

static void test_suspect_looks_at_once(void **state)
{
    const struct tmp *t = *state;
    struct checkpoint_info first, second;
    struct rig r;

    tmp_dir(t, "m");
    put_model(t, "m/model.safetensors", "w", 3);
    rig_open(&r, t, "");
    first = get(&r, "m", NULL);
    scanner_suspect(r.scanner, "m", NULL);
    assert_int_equal(get(&r, "m", NULL).id, first.id);
    put_model(t, "m/model.safetensors", "w", 5);
    scanner_suspect(r.scanner, "m", NULL);
    second = get(&r, "m", NULL);
    assert_int_not_equal(second.id, first.id);
    assert_int_equal(second.bytes, 5);
    scanner_suspect(r.scanner, "unknown", "x");
    rig_close(&r);
}

/* What counts are names and kinds, not the directory's time. */
static void test_names_decide(void **state)
{
    const struct tmp *t = *state;
    int64_t first;
    struct rig r;

    tmp_dir(t, "m");
    put_model(t, "m/model.safetensors", "w", 3);
    rig_open(&r, t, "");
    first = get(&r, "m", NULL).id;
    tmp_file(t, "m/x", "");
    assert_int_equal(unlink(tmp_at(t, "m/x")), 0); /* same names, newer time */
    scanner_suspect(r.scanner, "m", NULL);
    assert_int_equal(get(&r, "m", NULL).id, first);
    tmp_file(t, "m/model.safetensors.index.json", "{\"weight_map\":{}}");
    scanner_suspect(r.scanner, "m", NULL);
    assert_int_not_equal(get(&r, "m", NULL).id, first);
    rig_close(&r);
}

static void test_gone(void **state)
{
    const struct tmp *t = *state;
    struct checkpoint_info info;
    struct err e = {0};
    struct rig r;

    tmp_dir(t, "m");
    put_model(t, "m/model.safetensors", "w", 3);
    rig_open(&r, t, "");
    get(&r, "m", NULL);
    assert_int_equal(unlink(tmp_at(t, "m/model.safetensors")), 0);
    scanner_suspect(r.scanner, "m", NULL);
    assert_int_equal(get_code(&r, "m", NULL), -ENOENT);
    assert_int_equal(catalog_checkpoint(r.catalog, "m", NULL, r.arena, &info, &e),
                     -ENOENT);
    assert_int_equal(get_code(&r, "never", NULL), -ENOENT);
    assert_int_equal(get_code(&r, "m", "x.safetensors"), -ENOENT);
    put_model(t, "m/model.safetensors", "w", 7);
    assert_int_equal(get(&r, "m", NULL).bytes, 7);
    rig_close(&r);
}

static void test_failed_scan_is_kept_until_it_changes(void **state)
{
    const struct tmp *t = *state;
    struct checkpoint_info first, second;
    struct rig r;

    tmp_dir(t, "m");
    tmp_file(t, "m/model.safetensors", "this is no header");
    rig_open(&r, t, "");
    first = get(&r, "m", NULL);
    assert_non_null(first.error);
    assert_has(first.error, "m/model.safetensors: byte 0: a header of");
    assert_int_equal(first.tensors, 0);
    r.c.opens = 0;
    scanner_suspect(r.scanner, "m", NULL);
    assert_int_equal(get(&r, "m", NULL).id, first.id);
    assert_int_equal(r.c.opens, 0);
    put_model(t, "m/model.safetensors", "w", 3);
    scanner_suspect(r.scanner, "m", NULL);
    second = get(&r, "m", NULL);
    assert_null(second.error);
    assert_int_equal(second.tensors, 1);
    rig_close(&r);
}

static void replace_model(struct counting *c, const char *path)
{
    put_model(c->tmp, path, "newer", 9);
}

static void test_change_during_the_scan(void **state)
{
    const struct tmp *t = *state;
    struct checkpoint_info info;
    struct rig r;

    tmp_dir(t, "m");
    put_model(t, "m/model.safetensors", "w", 3);
    rig_open(&r, t, "");
    r.c.on_open = replace_model;
    info = get(&r, "m", NULL);
    assert_null(info.error);
    assert_int_equal(info.bytes, 9);
    assert_int_equal(r.c.opens, 2);
    rig_close(&r);
}

static void remove_model(struct counting *c, const char *path)
{
    assert_int_equal(unlink(tmp_at(c->tmp, path)), 0);
}

static void test_gone_during_the_scan(void **state)
{
    const struct tmp *t = *state;
    struct rig r;

    tmp_dir(t, "m");
    put_model(t, "m/model.safetensors", "w", 3);
    rig_open(&r, t, "");
    r.c.on_open = remove_model;
    assert_int_equal(get_code(&r, "m", NULL), -ENOENT);
    rig_close(&r);
}

/* A file of the fixture torch_dcp/dcp_objects_only. */
static void put_objects(const struct tmp *t, const char *name)
{
    char path[PATH_MAX], bytes[8192];
    FILE *f;
    size_t len;

    snprintf(path, sizeof path, "%s/torch_dcp/dcp_objects_only/%s", TEST_DATA,
             name + strlen("m/"));
    f = fopen(path, "rb");
    assert_non_null(f);
    len = fread(bytes, 1, sizeof bytes, f);
    assert_true(len > 0 && len < sizeof bytes);
    assert_int_equal(fclose(f), 0);
    tmp_bytes(t, name, bytes, len);
}

/* Once it is open, another file is put in its place: what is read is the old one. */
static void replace_objects(struct counting *c, const char *path)
{
    if (strcmp(path, "m/__0_0.distcp") != 0)
        return;
    c->on_opened = NULL;
    tmp_file(c->tmp, "new", "no archive");
    assert_int_equal(rename(tmp_at(c->tmp, "new"), tmp_at(c->tmp, path)), 0);
}

/* Objects that were read of a file count only as long as it is the one that is watched. */
static void test_objects_change_during_the_scan(void **state)
{
    const struct tmp *t = *state;
    struct checkpoint_info info;
    struct rig r;

    tmp_dir(t, "m");
    put_objects(t, "m/.metadata");
    put_objects(t, "m/__0_0.distcp");
    rig_open(&r, t, "");
    info = get(&r, "m", NULL);
    assert_null(info.error);
    assert_int_equal(info.objects, 2);
    assert_int_equal(info.warnings, 0);
    rig_close(&r);

    rig_open(&r, t, "");
    r.c.on_opened = replace_objects;
    info = get(&r, "m", NULL);
    assert_null(info.error);
    assert_null(r.c.on_opened);
    assert_int_equal(info.warnings, 2); /* neither can be read */
    rig_close(&r);
}

static void slow_open(struct counting *c, const char *path)
{
    (void)c;
    (void)path;
    pause_ms(200);
}

static void slower_than_allowed(struct counting *c, const char *path)
{
    (void)c;
    (void)path;
    pause_ms(1100);
}

/* It is broken, with a reason, and is not tried again and again by who found that out. */
static void test_a_scan_has_a_time(void **state)
{
    const struct tmp *t = *state;
    struct checkpoint_info info;
    struct rig r;

    tmp_dir(t, "m");
    put_model(t, "m/model.safetensors", "w", 3);
    rig_open(&r, t, "");
    setenv("UNSHARD_SCAN_SECONDS", "1", 1);
    r.c.on_open = slower_than_allowed;
    info = get(&r, "m", NULL);
    assert_non_null(info.error);
    assert_has(info.error, "the scan took longer than 1 s (");
    assert_has(info.error, "UNSHARD_SCAN_SECONDS");
    r.c.opens = 0;
    scanner_suspect(r.scanner, "m", NULL);
    assert_int_equal(get(&r, "m", NULL).id, info.id);
    assert_int_equal(r.c.opens, 0);
    scanner_free(r.scanner); /* another process: it has more time, maybe */
    assert_int_equal(
        scanner_new(&r.c.store, r.catalog, NULL, &r.scanner, &(struct err){0}), 0);
    unsetenv("UNSHARD_SCAN_SECONDS");
    info = get(&r, "m", NULL);
    assert_null(info.error);
    assert_int_equal(info.tensors, 1);
    rig_close(&r);
}

struct asker {
    struct rig *r;
    pthread_t thread;
    int64_t id;
    int rc;
};

static void *ask(void *user)
{
    struct asker *a = user;
    struct arena *arena = arena_new(1 << 20);
    struct checkpoint_info info = {0};
    struct err e = {0};

    a->rc = scanner_get(a->r->scanner, "m", NULL, arena, &info, &e);
    a->id = info.id;
    arena_free(arena);
    return NULL;
}

static void test_many_wait_for_one_scan(void **state)
{
    const struct tmp *t = *state;
    struct asker askers[8];
    struct rig r;

    tmp_dir(t, "m");
    put_model(t, "m/model.safetensors", "w", 3);
    rig_open(&r, t, "");
    r.c.on_open = slow_open;
    for (size_t i = 0; i < ARRAY_SIZE(askers); i++) {
        askers[i].r = &r;
        assert_int_equal(pthread_create(&askers[i].thread, NULL, ask, &askers[i]), 0);
    }
    for (size_t i = 0; i < ARRAY_SIZE(askers); i++) {
        pthread_join(askers[i].thread, NULL);
        assert_int_equal(askers[i].rc, 0);
        assert_int_equal(askers[i].id, askers[0].id);
    }
    assert_int_equal(r.c.opens, 1);
    rig_close(&r);
}

static void test_source_is_one_file(void **state)
{
    const struct tmp *t = *state;
    struct checkpoint_info info;
    struct rig r;

    put_model(t, "a.safetensors", "w", 3);
    put_model(t, "b.safetensors", "w", 4);
    rig_open(&r, t, "b.safetensors");
    info = get(&r, "", NULL);
    assert_int_equal(info.bytes, 4);
    assert_string_equal(info.file, "b.safetensors");
    assert_string_equal(info.format, "safetensors");
    assert_int_equal(get(&r, "", "b.safetensors").id, info.id);
    put_model(t, "c.safetensors", "w", 5); /* is no matter of b's */
    scanner_suspect(r.scanner, "", NULL);
    assert_int_equal(get(&r, "", NULL).id, info.id);
    rig_close(&r);
}

/* ---- who has looked already, and what is forgotten ---- */

/* A mount of a server looks before it asks for the checkpoint: one look does for both. */
static void test_what_is_known_is_not_looked_at_twice(void **state)
{
    const struct tmp *t = *state;
    struct err e = {0};
    struct listing *l;
    int64_t id, begun;
    struct rig r;

    tmp_dir(t, "m");
    put_model(t, "m/model.safetensors", "w", 3);
    rig_open(&r, t, "");
    l = list(&r, "m");
    assert_int_equal(scanner_knows(r.scanner, "m", l, &e), 0);
    assert_int_equal(scanner_places(r.scanner), 0);
    id = get(&r, "m", NULL).id;
    do {                /* once more where it takes longer than a look counts */
        pause_ms(1100); /* the get is forgotten */
        begun = now_ms();
        r.c.stats = r.c.lists = r.c.opens = 0;
        assert_int_equal(scanner_knows(r.scanner, "m", l, &e), 1);
        assert_int_equal(r.c.stats, 1);
        assert_int_equal(get(&r, "m", NULL).id, id);
    } while (now_ms() - begun >= 1000);
    assert_int_equal(r.c.stats + r.c.lists + r.c.opens, 1);

    /* Somebody saw it change: that it is the same for us says nothing. */
    scanner_suspect(r.scanner, "m", NULL);
    assert_int_equal(scanner_knows(r.scanner, "m", l, &e), 1);
    r.c.stats = 0;
    assert_int_equal(get(&r, "m", NULL).id, id);
    assert_int_not_equal(r.c.stats, 0);

    put_model(t, "m/model.safetensors", "w", 5);
    assert_int_equal(scanner_knows(r.scanner, "m", l, &e), 0);
    scanner_suspect(r.scanner, "m", NULL);
    assert_int_not_equal(get(&r, "m", NULL).id, id);
    tmp_file(t, "m/model.safetensors.index.json", "{\"weight_map\":{}}");
    listing_free(l);
    l = list(&r, "m");
    assert_int_equal(scanner_knows(r.scanner, "m", l, &e), 0);
    listing_free(l);
    rig_close(&r);
}

enum { SWEPT_FROM = 256 }; /* scanner.c: SWEEP_FROM */

static int64_t get_numbered(struct rig *r, unsigned number)
{
    char path[16];

    snprintf(path, sizeof path, "p%u", number);
    return get(r, path, NULL).id;
}

static void put_numbered(const struct tmp *t, unsigned count)
{
    char path[40];

    for (unsigned i = 0; i < count; i++) {
        snprintf(path, sizeof path, "p%u", i);
        tmp_dir(t, path);
        snprintf(path, sizeof path, "p%u/model.safetensors", i);
        put_model(t, path, "w", i + 1);
    }
}

static void test_old_places_are_forgotten(void **state)
{
    const struct tmp *t = *state;
    int64_t first;
    struct rig r;

    put_numbered(t, SWEPT_FROM + 1);
    rig_open(&r, t, "");
    first = get_numbered(&r, 0);
    for (unsigned i = 1; i < SWEPT_FROM; i++)
        get_numbered(&r, i);
    assert_int_equal(scanner_places(r.scanner), SWEPT_FROM);
    scanner_suspect(r.scanner, "p7", NULL);
    pause_ms(1100);
    r.c.opens = 0;
    get_numbered(&r, SWEPT_FROM); /* one too many */
    assert_int_equal(r.c.opens, 1);
    assert_int_equal(scanner_places(r.scanner), 2); /* it, and what is suspect */
    assert_int_equal(get_numbered(&r, 0), first);   /* the index has it still */
    assert_int_equal(r.c.opens, 1);
    assert_int_equal(scanner_places(r.scanner), 3);
    rig_close(&r);
}

/* While a place is scanned so many others are asked for that old ones are forgotten. */
static void crowd(struct counting *c, const char *path)
{
    struct rig *r = container_of(c, struct rig, c);

    (void)path;
    for (unsigned i = 0; i + 1 < SWEPT_FROM; i++)
        get_numbered(r, i);
    assert_int_equal(scanner_places(r->scanner), SWEPT_FROM);
    pause_ms(1100);
    get_numbered(r, SWEPT_FROM - 1);
    assert_int_equal(scanner_places(r->scanner), 2);
}

static void test_a_place_in_use_is_not_forgotten(void **state)
{
    const struct tmp *t = *state;
    struct rig r;
    int64_t id;

    put_numbered(t, SWEPT_FROM);
    tmp_dir(t, "m");
    put_model(t, "m/model.safetensors", "w", 3);
    rig_open(&r, t, "");
    r.c.on_open = crowd;
    id = get(&r, "m", NULL).id;
    assert_int_equal(scanner_places(r.scanner), 2);
    r.c.opens = 0;
    assert_int_equal(get(&r, "m", NULL).id, id);
    assert_int_equal(r.c.opens, 0);
    rig_close(&r);
}

/* ---- the walk ---- */

struct seen {
    struct buf text;
    unsigned left; /* stop after that many */
};

static int see(void *user, const char *dir, const char *file,
               const struct format_driver *d)
{
    struct seen *s = user;

    assert_non_null(d);
    buf_addf(&s->text, "%s%s%s ", dir, file ? ":" : "", file ? file : "");
    return --s->left ? 0 : 77;
}

static void make_tree(const struct tmp *t)
{
    tmp_dir(t, "run/checkpoint-10");
    tmp_dir(t, "run/checkpoint-9");
    tmp_dir(t, "run/files/deep/er");
    tmp_dir(t, "other");
    put_model(t, "run/model.safetensors", "w", 1);
    put_model(t, "run/checkpoint-10/model.safetensors", "w", 1);
    put_model(t, "run/checkpoint-9/model.safetensors", "w", 1);
    put_model(t, "run/files/b.safetensors", "w", 1);
    put_model(t, "run/files/a.safetensors", "w", 1);
    put_model(t, "run/files/deep/er/x.safetensors", "w", 1);
    tmp_link(t, "../run", "other/again");
    tmp_link(t, ".", "run/self");
}

static void test_walk(void **state)
{
    const struct tmp *t = *state;
    struct seen s = {.left = 100};
    struct err e = {0};
    struct rig r;

    make_tree(t);
    rig_open(&r, t, "");
    assert_ok(scanner_walk(r.scanner, "", see, &s, &e), &e);
    assert_string_equal(
        s.text.data, "run run/checkpoint-10 run/checkpoint-9 run/files:a.safetensors "
                     "run/files:b.safetensors run/files/deep/er ");
    buf_clear(&s.text);
    s.left = 2;
    assert_int_equal(scanner_walk(r.scanner, "run", see, &s, &e), 77);
    assert_string_equal(s.text.data, "run run/checkpoint-10 ");
    assert_int_equal(scanner_walk(r.scanner, "none", see, &s, &e), -ENOENT);
    buf_release(&s.text);
    rig_close(&r);
}

static void test_walk_of_one_file(void **state)
{
    const struct tmp *t = *state;
    struct seen s = {.left = 100};
    struct err e = {0};
    struct rig r;

    make_tree(t);
    rig_open(&r, t, "run/files/b.safetensors");
    assert_ok(scanner_walk(r.scanner, "", see, &s, &e), &e);
    assert_string_equal(s.text.data, ":b.safetensors ");
    buf_release(&s.text);
    rig_close(&r);
}

static void test_walk_goes_round_what_it_may_not_read(void **state)
{
    const struct tmp *t = *state;
    struct seen s = {.left = 100};
    struct err e = {0};
    struct rig r;

    make_tree(t);
    rig_open(&r, t, "");
    r.c.forbidden = "run/checkpoint-10";
    assert_ok(scanner_walk(r.scanner, "run", see, &s, &e), &e);
    assert_has(s.text.data, "run run/checkpoint-9 run/files:a.safetensors ");
    r.c.forbidden = "run";
    assert_int_equal(scanner_walk(r.scanner, "run", see, &s, &e), -EACCES);
    buf_release(&s.text);
    rig_close(&r);
}

/* Trees that are made the same everywhere have files and directories of time 0. */
static void test_a_directory_of_time_0(void **state)
{
    struct tmp *t = *state;
    CLEANUP(store_closep) struct store *s = NULL;
    struct entry_stat st;
    struct file_id was;
    struct err e = {0};

    tmp_dir(t, "part");
    assert_ok(store_open_local(t->path, NULL, &s, &e), &e);
    assert_ok(s->ops->stat(s, "part", &st, &e), &e);
    st.id.mtime_ns = 0;
    st.id.ctime_ns = 1; /* long ago */
    assert_ok(watched_directory(s, "part", &st, &was, &e), &e);
    assert_true(watched_same(s, "part", &st, &was));
    st.id.ctime_ns = 2;
    assert_false(watched_same(s, "part", &st, &was));
}

/* One that has just been changed is known by its names. */
static void test_a_directory_just_changed(void **state)
{
    struct tmp *t = *state;
    CLEANUP(store_closep) struct store *s = NULL;
    struct entry_stat st;
    struct file_id was;
    struct err e = {0};

    tmp_dir(t, "part");
    assert_ok(store_open_local(t->path, NULL, &s, &e), &e);
    assert_ok(s->ops->stat(s, "part", &st, &e), &e);
    assert_ok(watched_directory(s, "part", &st, &was, &e), &e);
    st.id.ctime_ns++;
    assert_true(watched_same(s, "part", &st, &was));
    tmp_dir(t, "part/more");
    assert_false(watched_same(s, "part", &st, &was));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        tmp_test(test_places),
        tmp_test(test_memory_of_a_second),
        tmp_test(test_change_shows_within_a_second),
        tmp_test(test_suspect_looks_at_once),
        tmp_test(test_names_decide),
        tmp_test(test_gone),
        tmp_test(test_failed_scan_is_kept_until_it_changes),
        tmp_test(test_change_during_the_scan),
        tmp_test(test_gone_during_the_scan),
        tmp_test(test_objects_change_during_the_scan),
        tmp_test(test_a_scan_has_a_time),
        tmp_test(test_many_wait_for_one_scan),
        tmp_test(test_source_is_one_file),
        tmp_test(test_what_is_known_is_not_looked_at_twice),
        tmp_test(test_old_places_are_forgotten),
        tmp_test(test_a_place_in_use_is_not_forgotten),
        tmp_test(test_a_directory_of_time_0),
        tmp_test(test_a_directory_just_changed),
        tmp_test(test_walk),
        tmp_test(test_walk_of_one_file),
        tmp_test(test_walk_goes_round_what_it_may_not_read),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
