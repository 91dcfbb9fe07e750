/* SPDX-License-Identifier: MIT */
/* tests/hostile/test_hostile_torch.c - damaged torch.save files: DATA, with torch_zip.json. */
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

/* What is to be seen: each tensor with its floats, or '!' where it cannot be read. */
#define CONTROL "0 1 2 3 4 5"
#define REFUSED "refused"
#define NOTHING "no checkpoint"

/* What the verdict alone does not tell, and our choices where the manifest has none. */
static const struct {
    const char *name, *seen;
} seen_of[] = {
    {"deflated_pickle", "w=" CONTROL},
    {"deflated_storage", "w=" CONTROL},
    {"evil_in_dict", "w=" CONTROL},
    {"legacy_evil", REFUSED},
    {"storage_shared", "a=" CONTROL ";b=1 3"},
    {"tensor_expand_huge", "ok=" CONTROL ";w!"},
    {"tensor_many_dims", "ok=" CONTROL ";w!"},
    {"tensor_numel_negative", "ok=" CONTROL ";w!"},
    {"tensor_numel_overflow", "ok=" CONTROL ";w!"},
    {"tensor_overlapping_view", "ok=" CONTROL ";w=0 1 2 1 2 3 2 3 4 3 4 5"},
    {"tensor_transposed", "ok=" CONTROL ";w=0 3 1 4 2 5"},
    {"tensor_zero_elements", "ok=" CONTROL ";w="},
    {"two_storage_dtypes", "a=" CONTROL ";b=F64"},
    {"wrong_crc", "w=1.4013e-45 1 2 3 4 5"}, /* nobody's loader looks at it */
    {"zip_empty_zip", NOTHING},
    {"zip_entry_zip64_marker_without_extra", REFUSED},
    {"zip_eocd_comment_len", REFUSED},
    {"zip_junk_before", NOTHING},
    {"zip_local_extra_differs", "w!"},
    {"zip_local_name_differs", "w!"},
    {"zip_local_offset_past_end", REFUSED},
    {"zip_local_offset_wrong", REFUSED},
    {"zip_overlap", REFUSED},
    {"zip_size_past_end", REFUSED},
    {"zip_traversal_names", REFUSED},
    {"zip_two_roots", REFUSED},
};

static const char *expected(const struct row *row)
{
    const char *name = strchr(row->file, '/') + 1;

    for (size_t i = 0; i < ARRAY_SIZE(seen_of); i++) {
        size_t len = strlen(seen_of[i].name);

        if (strncmp(name, seen_of[i].name, len) == 0 && strcmp(name + len, ".pt") == 0)
            return seen_of[i].seen;
    }
    if (strcmp(row->verdict, "accept") == 0)
        return "w=" CONTROL;
    if (strcmp(row->verdict, "tensor") == 0)
        return "ok=" CONTROL ";w!";
    if (strcmp(row->verdict, "reject") == 0)
        return REFUSED;
    fail_msg("%s: a choice of ours is missing in this test", row->file);
    return "";
}

static void tell_tensor(struct world *w, int64_t id, const struct tensor_info *t,
                        struct buf *out)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    struct err e = {0};

    buf_addf(out, "%s%s", out->len ? ";" : "", t->key);
    if (read_tensor(w, id, t, &bytes, &e) < 0) {
        buf_addc(out, '!');
        print_message("# %s: %s\n", t->key, e.text);
        return;
    }
    assert_int_equal(bytes.len, t->bytes);
    buf_addc(out, '=');
    if (t->dtype != DTYPE_F32) {
        buf_adds(out, dtype_name(t->dtype));
        return;
    }
    for (size_t i = 0; i < bytes.len / sizeof(float); i++) {
        float v;

        memcpy(&v, bytes.data + i * sizeof v, sizeof v);
        buf_addf(out, "%s%g", i ? " " : "", (double)v);
    }
}

/* Shows what a user would see of the file. */
static void look(struct world *w, struct buf *out)
{
    struct checkpoint_info info;
    struct tensor_info *t;
    struct err e = {0};
    size_t count;

    if (scanner_get(w->scanner, "", NULL, w->arena, &info, &e) == -ENOENT) {
        buf_adds(out, NOTHING);
        return;
    }
    assert_ok(-e.code, &e);
    assert_ok(world_tensors(w, info.id, &t, &count, &e), &e);
    if (info.error) {
        print_message("# %s\n", info.error);
        assert_int_equal(count, 0);
        buf_adds(out, REFUSED);
    }
    for (size_t i = 0; i < count; i++)
        tell_tensor(w, info.id, &t[i], out);
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
    CLEANUP(buf_release) struct buf seen = {0};
    struct err e = {0};
    double start = cpu_seconds();
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", row->data, row->file);
    assert_ok(world_open(path, &w, &e), &e);
    look(&w, &seen);
    assert_string_equal(seen.data, expected(row));
    assert_true(cpu_seconds() - start < (getenv("UNSHARD_VALGRIND") ? 60 : 1));
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

    snprintf(path, sizeof path, "%s/torch_zip.json", data);
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
    rc = _cmocka_run_group_tests("hostile torch", tests, count, NULL, NULL);
    json_free(doc);
    return rc;
}
