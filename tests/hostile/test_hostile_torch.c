/* SPDX-License-Identifier: MIT */
/* tests/hostile/test_hostile_torch.c - damaged torch.save files: DATA, with torch_zip.json. */
#include "tests/hostile/manifest.h"
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/err.h"
#include "tests/formats/read_tensor.h"

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
    assert_true(cpu_seconds() - start < cpu_allowed());
}

int main(int argc, char **argv)
{
    return manifest_run(argc, argv, "torch_zip", test_case);
}
