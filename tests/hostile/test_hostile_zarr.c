/* SPDX-License-Identifier: MIT */
/* tests/hostile/test_hostile_zarr.c - damaged zarr arrays: DATA, with zarr.json in it. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/err.h"
#include "tests/formats/read_tensor.h"
#include "tests/hostile/manifest.h"

/* What we chose where the manifest leaves it open (docs/formats/zarr.md). */
static const struct {
    const char *file;
    bool read;
    uint64_t bytes; /* too many to be read here */
} choices[] = {
    {"zarr/json_dup/.zarray", false, 0},
    {"zarr/one_element_chunks/.zarray", true, 4000000000},
    {"zarr/shape_2e60/.zarray", false, 0},
    {"zarr/zlib_truncated/.zarray", false, 0},
};

/* 4x6 floats, each chunk of 2x3 is 0..5. */
static void check_values(const struct tensor_info *t, const struct buf *bytes)
{
    assert_int_equal(t->dtype, DTYPE_F32);
    assert_int_equal(t->shape.nd, 2);
    assert_int_equal(bytes->len, 24 * sizeof(float));
    for (size_t i = 0; i < 24; i++) {
        float v;

        memcpy(&v, bytes->data + i * sizeof v, sizeof v);
        assert_int_equal((int)v, i / 6 % 2 * 3 + i % 6 % 3);
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
    assert_true(e.text[0]);
    print_message("# %s: %s\n", t->key, e.text);
}

static bool is_readable(const struct row *row, const struct tensor_info *t, bool *large)
{
    *large = false;
    if (strcmp(row->verdict, "either") != 0)
        return strcmp(row->verdict, "accept") == 0;
    for (size_t i = 0; i < ARRAY_SIZE(choices); i++) {
        if (strcmp(choices[i].file, row->file) != 0)
            continue;
        *large = choices[i].bytes > 0;
        if (*large)
            assert_int_equal(t->bytes, choices[i].bytes);
        return choices[i].read;
    }
    fail_msg("%s: a choice of ours is missing in this test", row->file);
    return false;
}

/* The key that leads elsewhere has a name that does not. */
static void check_escaped(const struct row *row, const struct tensor_info *t,
                          size_t count)
{
    if (strcmp(row->file, "zarr/consolidated_traversal/.zmetadata") != 0) {
        assert_int_equal(count, 1);
        return;
    }
    assert_int_equal(count, 2);
    assert_string_equal(t[0].key, "../../x");
    assert_string_equal(t[0].name, "%2E.%2F..%2Fx");
    assert_string_equal(t[1].key, "a");
}

static void judge(struct world *w, const struct row *row,
                  const struct checkpoint_info *info)
{
    struct tensor_info *t;
    struct err e = {0};
    size_t count;

    if (info->error)
        fail_msg("refused as a whole: %s", info->error);
    assert_ok(world_tensors(w, info->id, &t, &count, &e), &e);
    check_escaped(row, t, count);
    for (size_t i = 0; i < count; i++) {
        bool large, readable = is_readable(row, &t[i], &large);

        if (large)
            assert_null(t[i].fault);
        else
            check_tensor(w, info->id, &t[i], readable);
    }
}

static void test_case(void **state)
{
    const struct row *row = *state;
    CLEANUP(world_close) struct world w = {0};
    struct checkpoint_info info;
    struct err e = {0};
    double start = cpu_seconds();
    char path[PATH_MAX];
    int rc;

    snprintf(path, sizeof path, "%s/%s", row->data, row->file);
    *strrchr(path, '/') = '\0';
    assert_ok(world_open(path, &w, &e), &e);
    rc = scanner_get(w.scanner, "", NULL, w.arena, &info, &e);
    if (strcmp(row->verdict, "reject") == 0) {
        assert_int_equal(rc, -ENOENT); /* no checkpoint, a plain directory */
    } else {
        assert_ok(rc, &e);
        judge(&w, row, &info);
    }
    assert_true(cpu_seconds() - start < cpu_allowed());
}

int main(int argc, char **argv)
{
    return manifest_run(argc, argv, "zarr", test_case);
}
