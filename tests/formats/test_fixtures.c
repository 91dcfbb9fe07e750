/* SPDX-License-Identifier: MIT */
/* tests/formats/test_fixtures.c - scans real checkpoints: test_fixtures FOLDER... */
#include "tests/unit/unit.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/json.h"

#include "world.h"

static const char suffix[] = ".expected.json";

/* The whole of FOLDER/NAME.expected.json. */
static struct json *expected_of(const char *fixture)
{
    char path[PATH_MAX];
    CLEANUP_FREE char *text = NULL;
    struct json *doc = NULL;
    struct err e = {0};
    struct stat st;
    size_t len;
    FILE *f;

    snprintf(path, sizeof path, "%s%s", fixture, suffix);
    f = fopen(path, "rb");
    if (!f || fstat(fileno(f), &st) < 0 || !(text = malloc((size_t)st.st_size + 1)))
        fail_msg("%s: cannot be read", path);
    len = fread(text, 1, (size_t)st.st_size, f);
    fclose(f);
    assert_ok(json_parse(text, len, NULL, &doc, &e), &e);
    return doc;
}

/* What must be there for one key: dtype, shape, and the hash of its bytes. */
static void check_tensor(struct world *w, int64_t id, const struct tensor_info *t,
                         const struct json *want)
{
    CLEANUP(buf_release) struct buf bytes = {0}, shape = {0}, want_shape = {0};
    const char *dtype = "", *hash = "";
    struct err e = {0};
    char got[65];

    for (const struct json *v = json_first(json_get(want, "shape")); v;
         v = json_next(v)) {
        uint64_t dim = UINT64_MAX;

        json_u64(v, &dim);
        buf_addf(&want_shape, "%s%" PRIu64, want_shape.len ? ", " : "", dim);
    }
    json_string(json_get(want, "dtype"), &dtype);
    json_string(json_get(want, "sha256"), &hash);
    shape_format(&t->shape, &shape);
    if (strcmp(dtype_name(t->dtype), dtype) != 0 ||
        strlen(shape.data) != want_shape.len + 2 ||
        memcmp(shape.data + 1, want_shape.data ? want_shape.data : "",
               want_shape.len) != 0)
        fail_msg("%s: %s %s, not %s [%s]", t->key, dtype_name(t->dtype), shape.data,
                 dtype, want_shape.data ? want_shape.data : "");
    if (world_read(w, id, t, &bytes, &e) < 0)
        fail_msg("%s: %s", t->key, e.text);
    sha256_hex(bytes.data, bytes.len, got);
    if (strcmp(got, hash) != 0)
        fail_msg("%s: bytes with sha256 %s, not %s", t->key, got, hash);
}

static void check_tensors(struct world *w, const struct checkpoint_info *info,
                          const struct json *want)
{
    struct tensor_info *t;
    struct err e = {0};
    size_t count;

    assert_ok(world_tensors(w, info->id, &t, &count, &e), &e);
    for (size_t i = 0; i < count; i++) {
        const struct json *one = json_get(want, t[i].key);

        if (!one)
            fail_msg("%s: it should not be there", t[i].key);
        check_tensor(w, info->id, &t[i], one);
    }
    assert_int_equal(count, json_count(want));
    assert_int_equal(info->tensors, count);
    assert_int_equal(info->faults, 0);
}

struct objects {
    const struct json *want;
    size_t count;
};

static int check_object(void *user, const char *key, size_t key_len, const char *json,
                        size_t len)
{
    struct objects *o = user;
    CLEANUP(buf_release) struct buf want = {0};
    const char *text;

    assert_int_equal(strlen(key), key_len);
    if (!json_string(json_get(o->want, key), &text))
        fail_msg("object %s: it should not be there", key);
    buf_add_json(&want, text, strlen(text));
    assert_int_equal(len, want.len);
    assert_memory_equal(json, want.data, len);
    o->count++;
    return 0;
}

/* state: FOLDER/NAME. */
static void test_fixture(void **state)
{
    const char *fixture = *state, *format;
    CLEANUP(json_freep) struct json *want = expected_of(fixture);
    CLEANUP(world_close) struct world w = {0};
    struct checkpoint_info info;
    struct objects objects = {.want = json_get(want, "objects")};
    struct err e = {0};

    assert_ok(world_open(fixture, &w, &e), &e);
    assert_ok(scanner_get(w.scanner, "", NULL, w.arena, &info, &e), &e);
    if (info.error)
        fail_msg("%s", info.error);
    check_tensors(&w, &info, json_get(want, "tensors"));
    assert_true(json_string(json_get(want, "format"), &format));
    /* The rank-0 save of torch's writer is a plain folder for every reader. */
    if (strcmp(format, "hf-dcp-rank0") == 0)
        format = "hf-safetensors";
    assert_string_equal(info.format, format);
    assert_ok(catalog_objects(w.catalog, info.id, check_object, &objects, &e), &e);
    assert_int_equal(objects.count, json_count(objects.want));
    assert_int_equal(info.warnings, 0);
}

static size_t add_tests(const char *folder, struct CMUnitTest *tests, size_t max)
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

int main(int argc, char **argv)
{
    static struct CMUnitTest tests[1024];
    size_t count = 0;
    int rc;

    for (int i = 1; i < argc; i++)
        count += add_tests(argv[i], tests + count, ARRAY_SIZE(tests) - count);
    if (count == 0)
        return 2; /* a test that looked at nothing has not passed */
    rc = _cmocka_run_group_tests("fixtures", tests, count, NULL, NULL);
    for (size_t i = 0; i < count; i++)
        free(tests[i].initial_state);
    return rc;
}
