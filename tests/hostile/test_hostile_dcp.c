/* SPDX-License-Identifier: MIT */
/* tests/hostile/test_hostile_dcp.c - damaged DCP checkpoints: DATA, with dcp.json in it. */
#include "tests/hostile/manifest.h"
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/err.h"
#include "tests/formats/read_tensor.h"

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
    assert_true(cpu_seconds() - start < cpu_allowed());
}

int main(int argc, char **argv)
{
    return manifest_run(argc, argv, "dcp", test_case);
}
