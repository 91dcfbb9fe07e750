/* SPDX-License-Identifier: MIT */
/* tests/formats/fixture.c - a checkpoint as the index has it, against NAME.expected.json. */
#include "fixture.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <sys/stat.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/guard.h"
#include "base/json.h"
#include "tests/unit/unit.h"

static const char suffix[] = ".expected.json";

/* Reads a whole file; the test fails when it cannot. */
void read_file(const char *path, struct buf *out)
{
    FILE *f = fopen(path, "rb");
    struct stat st;
    size_t len = f && fstat(fileno(f), &st) == 0 ? (size_t)st.st_size : 0;
    char *dst = buf_grow(out, len + 1); /* not more: meson has each byte filled */

    if (!f || !dst)
        fail_msg("%s: cannot be read", path);
    out->len = fread(dst, 1, len, f);
    fclose(f);
}

struct json *read_json(const char *path)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct json *doc = NULL;
    struct err e = {0};

    read_file(path, &text);
    assert_ok(json_parse(text.data, text.len, NULL, &doc, &e), &e);
    return doc;
}

void open_checkpoint(const char *path, struct opened *o)
{
    struct err e = {0};

    *o = (struct opened){0};
    assert_ok(world_open(path, &o->w, &e), &e);
    assert_ok(scanner_get(o->w.scanner, "", NULL, o->w.arena, &o->info, &e), &e);
    assert_ok(world_tensors(&o->w, o->info.id, &o->t, &o->count, &e), &e);
}

void close_checkpoint(struct opened *o)
{
    world_close(&o->w);
}

const struct tensor_info *tensor(const struct opened *o, const char *key)
{
    for (size_t i = 0; i < o->count; i++)
        if (o->t[i].key_len == strlen(key) && strcmp(o->t[i].key, key) == 0)
            return &o->t[i];
    fail_msg("no tensor %s", key);
    abort(); /* not reached; gcc does not know */
}

/* Real checkpoints. */

static void check_shape(const struct tensor_info *t, const struct json *want)
{
    uint32_t nd = 0;

    for (const struct json *v = json_first(want); v; v = json_next(v), nd++) {
        uint64_t dim = UINT64_MAX;

        assert_true(json_u64(v, &dim));
        if (nd >= t->shape.nd || t->shape.dim[nd] != dim)
            fail_msg("%s: dimension %u is not %" PRIu64, t->key, nd, dim);
    }
    assert_int_equal(t->shape.nd, nd);
}

static void check_hash(const struct tensor_info *t, const struct buf *bytes,
                       const char *want, const char *how)
{
    char got[65];

    assert_int_equal(bytes->len, t->bytes);
    sha256_hex(bytes->data, bytes->len, got);
    if (strcmp(got, want) != 0)
        fail_msg("%s, %s: sha256 %s, not %s", t->key, how, got, want);
}

void check_tensor(struct opened *o, const struct tensor_info *t,
                  const struct json *want)
{
    CLEANUP(buf_release) struct buf bytes = {0}, naive = {0};
    const char *dtype, *hash;
    struct err e = {0};

    assert_true(json_string(json_get(want, "dtype"), &dtype));
    assert_true(json_string(json_get(want, "sha256"), &hash));
    if (strcmp(dtype_name(t->dtype), dtype) != 0)
        fail_msg("%s: %s, not %s", t->key, dtype_name(t->dtype), dtype);
    check_shape(t, json_get(want, "shape"));
    if (read_tensor(&o->w, o->info.id, t, &bytes, &e) < 0)
        fail_msg("%s: %s", t->key, e.text);
    check_hash(t, &bytes, hash, "assembled");
    if (world_read(&o->w, o->info.id, t, &naive, &e) < 0)
        fail_msg("%s: %s", t->key, e.text);
    check_hash(t, &naive, hash, "element by element");
}

/* `inside`: tensors within objects, which torch's own flattening does not show. */
static void check_tensors(struct opened *o, const struct json *want)
{
    const struct json *tensors = json_get(want, "tensors");
    const struct json *inside = json_get(want, "inside_objects");

    for (size_t i = 0; i < o->count; i++) {
        const struct tensor_info *t = &o->t[i];
        const struct json *one = json_get(tensors, t->key);

        if (!one && (one = json_get(inside, t->key)))
            assert_int_equal(t->role, ROLE_OTHER);
        if (!one)
            fail_msg("%s: it should not be there", t->key);
        check_tensor(o, t, one);
    }
    assert_int_equal(o->count, json_count(tensors) + json_count(inside));
    assert_int_equal(o->info.faults, 0);
}

void check_readable(struct opened *o, const char *expected)
{
    CLEANUP(json_freep) struct json *want = read_json(expected);

    for (size_t i = 0; i < o->count; i++) {
        const struct json *one = json_get(json_get(want, "tensors"), o->t[i].key);

        if (o->t[i].fault)
            continue;
        if (!one)
            fail_msg("%s: it should not be there", o->t[i].key);
        check_tensor(o, &o->t[i], one);
    }
}

void check_readable_of(struct opened *o, void *const *state, const char *name)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s%s", (const char *)*state, name, suffix);
    check_readable(o, path);
}

/* The text of a JSON number is not kept: equal as doubles, and exact as integers. */
static bool same_number(const struct json *a, const struct json *b)
{
    int64_t i, j;
    double x, y;

    if (json_i64(a, &i) && json_i64(b, &j))
        return i == j;
    return json_double(a, &x) && json_double(b, &y) && fabs(x - y) <= 0;
}

bool same_json(const struct json *a, const struct json *b)
{
    const char *x, *y;
    bool p, q;

    if (json_kind(a) != json_kind(b) || json_count(a) != json_count(b))
        return false;
    switch (json_kind(a)) {
    case JSON_NULL:
        return true;
    case JSON_BOOL:
        return json_bool(a, &p) && json_bool(b, &q) && p == q;
    case JSON_NUMBER:
        return same_number(a, b);
    case JSON_STRING:
        return json_string(a, &x) && json_string(b, &y) && strcmp(x, y) == 0;
    case JSON_ARRAY:
        for (a = json_first(a), b = json_first(b); a;
             a = json_next(a), b = json_next(b))
            if (!same_json(a, b))
                return false;
        return true;
    case JSON_OBJECT:
    default:
        for (a = json_first(a); a; a = json_next(a)) {
            const struct json *other = json_get(b, json_key(a));

            if (!other || !same_json(a, other))
                return false;
        }
        return true;
    }
}

struct objects {
    const struct json *want;
    size_t count;
};

static int check_object(void *user, const char *key, size_t key_len, const char *text,
                        size_t len)
{
    struct objects *o = user;
    CLEANUP(json_freep) struct json *got = NULL;
    const struct json *want = json_get(o->want, key);
    struct err e = {0};

    assert_int_equal(strlen(key), key_len);
    if (!want)
        fail_msg("object %s: it should not be there", key);
    assert_ok(json_parse(text, len, NULL, &got, &e), &e);
    if (!same_json(got, want))
        fail_msg("object %s: %.*s", key, (int)len, text);
    o->count++;
    return 0;
}

static void check_objects(struct opened *o, const struct json *want)
{
    struct objects objects = {.want = json_get(want, "objects")};
    struct err e = {0};

    assert_ok(catalog_objects(o->w.catalog, o->info.id, check_object, &objects, &e),
              &e);
    assert_int_equal(objects.count, json_count(objects.want));
}

static int note_warning(void *user, const char *code, const char *text)
{
    return buf_addf(user, "%s: %s\n", code, text);
}

static int note_object(void *user, const char *key, size_t key_len, const char *json,
                       size_t len)
{
    return buf_addf(user, "%.*s=%.*s\n", (int)key_len, key, (int)len, json);
}

/* All objects, or all warnings, as lines of text. */
void all_objects(struct opened *o, struct buf *out)
{
    struct err e = {0};

    assert_ok(catalog_objects(o->w.catalog, o->info.id, note_object, out, &e), &e);
}

void all_warnings(struct opened *o, struct buf *out)
{
    struct err e = {0};

    buf_adds(out, "");
    assert_ok(catalog_warnings(o->w.catalog, o->info.id, note_warning, out, &e), &e);
}
void test_fixture(void **state)
{
    const char *fixture = *state, *format, *framework = "PyTorch";
    CLEANUP(json_freep) struct json *want = NULL;
    uint64_t warnings = 0;
    struct opened o;
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s%s", fixture, suffix);
    want = read_json(path);
    open_checkpoint(fixture, &o);
    if (o.info.error)
        fail_msg("%s", o.info.error);
    check_tensors(&o, want);
    check_objects(&o, want);
    assert_true(json_string(json_get(want, "format"), &format));
    assert_string_equal(o.info.format, format);
    json_string(json_get(want, "framework"), &framework);
    assert_string_equal(o.info.framework, framework);
    json_u64(json_get(want, "warnings"), &warnings);
    assert_int_equal(o.info.warnings, warnings);
    close_checkpoint(&o);
}

int folder_score(const struct format_driver *driver, const char *dir)
{
    static const struct store_options options;
    struct store *store;
    struct listing *l;
    struct bid b = {0};
    struct err e = {0};

    assert_ok(store_open_local(dir, &options, &store, &e), &e);
    assert_ok(store->ops->list(store, "", &l, &e), &e);
    driver->bid(l, &b);
    listing_free(l);
    store_close(store);
    return b.score;
}

/* Such tests for all fixtures of the folder, up to `max`; states are to be freed. */
static size_t fixture_tests(const char *folder, struct CMUnitTest *tests, size_t max)
{
    struct dirent **names = NULL;
    int n = scandir(folder, &names, NULL, alphasort);
    size_t count = 0;

    for (int i = 0; i < n; i++) {
        size_t len = strlen(names[i]->d_name), end = sizeof suffix - 1;
        char path[PATH_MAX];

        if (len > end && strcmp(names[i]->d_name + len - end, suffix) == 0 &&
            count < max) {
            snprintf(path, sizeof path, "%s/%.*s", folder, (int)(len - end),
                     names[i]->d_name);
            tests[count] = (struct CMUnitTest){.test_func = test_fixture,
                                               .initial_state = strdup(path)};
            tests[count].name = strrchr(tests[count].initial_state, '/') + 1;
            count++;
        }
        free(names[i]);
    }
    free(names);
    return count;
}

int run_with(const char *name, int argc, char **argv, CMUnitTestFunction fixture,
             const struct CMUnitTest *others, size_t n)
{
    static struct CMUnitTest tests[256];
    size_t fixtures, count;
    int rc;

    if (argc != 2 || n >= ARRAY_SIZE(tests) || guard_install() < 0)
        return 2;
    count = fixtures = fixture_tests(argv[1], tests, ARRAY_SIZE(tests) - n);
    if (fixtures == 0)
        return 2; /* a test that looked at nothing has not passed */
    for (size_t i = 0; i < fixtures; i++)
        tests[i].test_func = fixture;
    for (size_t i = 0; i < n; i++) {
        tests[count] = others[i];
        tests[count++].initial_state = argv[1];
    }
    rc = _cmocka_run_group_tests(name, tests, count, NULL, NULL);
    for (size_t i = 0; i < fixtures; i++)
        free(tests[i].initial_state);
    return rc;
}

int run_with_fixtures(const char *name, int argc, char **argv,
                      const struct CMUnitTest *others, size_t n)
{
    return run_with(name, argc, argv, test_fixture, others, n);
}
