/* SPDX-License-Identifier: MIT */
/* tests/hostile/test_hostile_dcp.c - damaged DCP checkpoints: DATA, with dcp.json in it. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <sys/resource.h>
#include <time.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/guard.h"
#include "base/json.h"
#include "tests/formats/read_tensor.h"

enum { MAX_MANIFEST = 1 << 20, MAX_CASES = 256 };

/* One row of the manifest. */
struct row {
    const char *data, *file, *verdict;
};

/* Cases that the general rule of their verdict does not tell. */
static const struct {
    const char *name;
    bool ok, w; /* is this tensor read exactly? */
} exceptions[] = {
    {"data_empty", false, false},
    {"data_missing", false, false},
    {"data_truncated", false, true}, /* cut behind w, within ok */
};

static bool is_exception(const char *file, bool *ok, bool *w)
{
    for (size_t i = 0; i < ARRAY_SIZE(exceptions); i++) {
        size_t len = strlen(exceptions[i].name);

        if (strncmp(file + 4, exceptions[i].name, len) == 0 && file[4 + len] == '/') {
            *ok = exceptions[i].ok;
            *w = exceptions[i].w;
            return true;
        }
    }
    return false;
}

/* w is 0..23 as 4x6 floats, ok is 0..4. */
static void check_values(const struct tensor_info *t, const struct buf *bytes)
{
    bool is_w = strcmp(t->key, "w") == 0;
    size_t n = is_w ? 24 : 5;

    assert_int_equal(t->dtype, DTYPE_F32);
    assert_int_equal(t->shape.nd, is_w ? 2 : 1);
    assert_int_equal(bytes->len, n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        float v;

        memcpy(&v, bytes->data + i * sizeof v, sizeof v);
        assert_int_equal((int)v, i);
    }
}

/* Either exactly what was saved, or an error and not one byte. */
static void check_tensor(struct world *w, int64_t id, const struct tensor_info *t,
                         bool readable)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    struct err e = {0};
    int rc = read_tensor(w, id, t, &bytes, &e);

    if (readable) {
        assert_ok(rc, &e);
        check_values(t, &bytes);
        return;
    }
    if (rc == 0)
        fail_msg("%s was read, %zu bytes", t->key, bytes.len);
    print_message("# %s: %s\n", t->key, e.text);
}

static const struct tensor_info *find(const struct tensor_info *t, size_t count,
                                      const char *key)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(t[i].key, key) == 0)
            return &t[i];
    fail_msg("%s is not listed", key);
    abort(); /* not reached; gcc does not know */
}

/* The keys of name_escape are listed, under names that no file system minds. */
static void check_escaped(const struct tensor_info *t, size_t count)
{
    assert_string_equal(find(t, count, "../../up")->name, "%2E.%2F..%2Fup");
    assert_string_equal(find(t, count, "")->name, "%empty");
    assert_string_equal(find(t, count, "a\nb")->name, "a%0Ab");
    assert_int_equal(count, 5);
}

static void judge(struct world *w, const struct row *row,
                  const struct checkpoint_info *info)
{
    bool tensor = strcmp(row->verdict, "tensor") == 0, ok = true, whole = !tensor;
    struct tensor_info *t;
    struct err e = {0};
    size_t count;

    assert_ok(world_tensors(w, info->id, &t, &count, &e), &e);
    if (strcmp(row->verdict, "reject") == 0 || strcmp(row->verdict, "opaque") == 0) {
        if (!info->error)
            fail_msg("accepted, with %zu tensors", count);
        print_message("# %s\n", info->error);
        assert_int_equal(count, 0);
        return;
    }
    if (info->error)
        fail_msg("refused as a whole: %s", info->error);
    is_exception(row->file, &ok, &whole);
    check_tensor(w, info->id, find(t, count, "ok"), ok);
    check_tensor(w, info->id, find(t, count, "w"), whole);
    if (strcmp(row->verdict, "escape") == 0)
        check_escaped(t, count);
    else
        assert_int_equal(count, 2);
}

static double cpu_seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void test_case(void **state)
{
    const struct row *row = *state;
    CLEANUP(world_close) struct world w = {0};
    struct checkpoint_info info;
    struct err e = {0};
    double start = cpu_seconds();
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", row->data, row->file);
    *strrchr(path, '/') = '\0';
    assert_ok(world_open(path, &w, &e), &e);
    assert_ok(scanner_get(w.scanner, "", NULL, w.arena, &info, &e), &e);
    judge(&w, row, &info);
    assert_true(cpu_seconds() - start < 1);
}

/* The last one: what all of them together did and needed. */
static void test_after(void **state)
{
    struct rusage use;

    (void)state;
    assert_int_equal(access("PWNED", F_OK), -1);
    getrusage(RUSAGE_SELF, &use);
    print_message("# at most %ld KiB resident\n", use.ru_maxrss);
#ifndef __SANITIZE_ADDRESS__
    if (!getenv("UNSHARD_VALGRIND"))
        assert_true(use.ru_maxrss < 64 * 1024);
#endif
}

static struct json *manifest_of(const char *data)
{
    char path[PATH_MAX];
    CLEANUP_FREE char *text = malloc(MAX_MANIFEST);
    struct json *doc = NULL;
    struct err e = {0};
    FILE *f;

    snprintf(path, sizeof path, "%s/dcp.json", data);
    f = fopen(path, "rb");
    if (!f || !text)
        return NULL;
    json_parse(text, fread(text, 1, MAX_MANIFEST, f), NULL, &doc, &e);
    fclose(f);
    return doc;
}

int main(int argc, char **argv)
{
    static struct CMUnitTest tests[MAX_CASES + 1];
    static struct row rows[MAX_CASES];
    struct json *doc;
    size_t count = 0;
    int rc;

    if (argc != 2 || guard_install() < 0 || access("PWNED", F_OK) == 0)
        return 2;
    doc = manifest_of(argv[1]);
    if (json_count(doc) == 0 || json_count(doc) > MAX_CASES)
        return 2; /* a test that looked at nothing has not passed */
    for (const struct json *v = json_first(doc); v; v = json_next(v), count++) {
        struct row *row = &rows[count];

        row->data = argv[1];
        if (!json_string(json_get(v, "file"), &row->file) ||
            !json_string(json_get(v, "verdict"), &row->verdict))
            return 2;
        tests[count] = (struct CMUnitTest){
            .name = row->file, .test_func = test_case, .initial_state = row};
    }
    tests[count++] = (struct CMUnitTest){.name = "after all", .test_func = test_after};
    rc = _cmocka_run_group_tests("hostile dcp", tests, count, NULL, NULL);
    json_free(doc);
    return rc;
}
