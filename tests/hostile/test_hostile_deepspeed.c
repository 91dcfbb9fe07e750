/* SPDX-License-Identifier: MIT */
/* tests/hostile/test_hostile_deepspeed.c - damaged DeepSpeed saves: DATA, with deepspeed.json. */
#include "tests/hostile/manifest.h"
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/err.h"
#include "tests/formats/made.h"

enum { MAX_CASES = 64 };

/* Why each case is refused. */
static const struct {
    const char *name, *error;
} errors[] = {
    {"count_lie", "partition_count says 3 files of optimizer states, there are 2"},
    {"missing_rank", "partition_count says 2 files of optimizer states, there are 1"},
    {"negative_shape", "param_shapes: a: dimension 0 of its shape is no size"},
    {"partition_uneven", "its parameters need 22 elements, its partitions have 17"},
    {"shape_overflow", "param_shapes: a: its shape: "},
    {"shape_too_big", "its parameters need 85 elements, its partitions have 24"},
    {"shape_too_small", "its parameters need 15 elements, its partitions have 24"},
    {"stage_9", "ZeRO stage 9 is not supported"},
};

static const char *error_of(const char *name)
{
    for (size_t i = 0; i < ARRAY_SIZE(errors); i++)
        if (strcmp(errors[i].name, name) == 0)
            return errors[i].error;
    fail_msg("%s: what is wrong is missing in this test", name);
    abort(); /* not reached; gcc does not know */
}

static void check_accepted(const char *path, const char *name)
{
    float a[15], b[7];
    struct opened o;

    for (int i = 0; i < 22; i++)
        *(i < 15 ? &a[i] : &b[i - 15]) = (float)i;
    open_checkpoint(path, &o);
    if (o.info.error)
        fail_msg("refused as a whole: %s", o.info.error);
    assert_string_equal(o.info.format, "deepspeed-zero2");
    assert_int_equal(o.count, 2);
    check_floats(&o, "a", a, 15);
    check_floats(&o, "b", b, 7);
    assert_int_equal(tensor(&o, "a")->shape.dim[0], 3);
    assert_int_equal(tensor(&o, "a")->role, ROLE_MODEL);
    check_warnings(&o, strcmp(name, "shared_unknown") == 0
                           ? "tied: c is tied to nope, which does not exist\n"
                           : "");
    close_checkpoint(&o);
}

static void check_refused(const char *path, const char *name)
{
    struct opened o;

    open_checkpoint(path, &o);
    if (!o.info.error)
        fail_msg("accepted, with %zu tensors", o.count);
    print_message("# %s\n", o.info.error);
    assert_has(o.info.error, error_of(name));
    assert_int_equal(o.count, 0);
    close_checkpoint(&o);
}

/* A tracker that names no directory of its own is a file like others. */
static void check_no_checkpoint(const char *path)
{
    CLEANUP(world_close) struct world w = {0};
    struct checkpoint_info info;
    struct err e = {0};

    assert_ok(world_open(path, &w, &e), &e);
    assert_int_equal(scanner_get(w.scanner, "", NULL, w.arena, &info, &e), -ENOENT);
}

static void test_case(void **state)
{
    const struct row *row = *state;
    char name[64], path[PATH_MAX];

    snprintf(name, sizeof name, "%s", row->file + strlen("deepspeed/"));
    *strchr(name, '/') = '\0';
    snprintf(path, sizeof path, "%s/deepspeed/%s", row->data, name);
    check_no_checkpoint(path); /* a run's root is none */
    if (strncmp(name, "latest_", 7) == 0)
        return;
    snprintf(path, sizeof path, "%s/deepspeed/%s/global_step1", row->data, name);
    if (strcmp(row->verdict, "accept") == 0)
        check_accepted(path, name);
    else
        check_refused(path, name);
}

int main(int argc, char **argv)
{
    return manifest_run(argc, argv, "deepspeed", test_case);
}
