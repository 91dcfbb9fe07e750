/* SPDX-License-Identifier: MIT */
/* tests/hostile/test_hostile.c - each case of a manifest gets its verdict: DATA KIND */
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/err.h"
#include "tests/formats/world.h"
#include "tests/hostile/manifest.h"

/* What we chose where the manifest leaves it open (docs/formats). */
static const struct {
    const char *file;
    bool accepted;
} choices[] = {
    {"gguf/bool_7.gguf", true},
    {"gguf/unaligned.gguf", true},
    {"nemo/dup_member.nemo", true},
    {"npy/dup_key.npy", false},
    {"safetensors/dims_5000.safetensors", false},
    {"safetensors/dup_key.safetensors", false},
    {"safetensors/dup_key_escaped.safetensors", false},
    {"safetensors/extra_field.safetensors", true},
    {"safetensors/json_leading_space.safetensors", true},
    {"safetensors/shape_zero_and_huge.safetensors", true},
};

/* How many tensors what is accepted holds, where that is not one. */
static const struct {
    const char *file;
    size_t tensors;
} counts[] = {
    {"safetensors/case_key.safetensors", 2},
    {"safetensors/json_empty_object.safetensors", 0},
    {"safetensors/json_many_keys.safetensors", 1500},
    {"safetensors/name_collision.safetensors", 3},
    {"safetensors/name_file_and_dir.safetensors", 3},
    {"safetensors/name_nfc_nfd.safetensors", 2},
    {"nemo/longname.nemo", 0}, /* no weights where NeMo has them: side files alone */
    /* The index lists nothing: its files count by their own numbers. */
    {"hf_index/unlisted_tensor/model.safetensors.index.json", 1},
};

/* What the tensors are called: the control's, and the one that is bad. */
static const struct {
    const char *kind, *control, *bad;
} keys[] = {
    {"gguf/", "w", "w"},
    {"nemo/", "w", NULL},
};

static const char *key_of(const struct row *row, bool bad)
{
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        if (strncmp(row->file, keys[i].kind, strlen(keys[i].kind)) == 0)
            return bad ? keys[i].bad : keys[i].control;
    return bad && !strstr(row->file, "/wrong_file/") ? "b" : "a";
}

static bool is_accepted(const char *file)
{
    for (size_t i = 0; i < ARRAY_SIZE(choices); i++)
        if (strcmp(choices[i].file, file) == 0)
            return choices[i].accepted;
    fail_msg("%s: a choice of ours is missing in this test", file);
    return false;
}

static size_t tensors_of(const char *file)
{
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++)
        if (strcmp(counts[i].file, file) == 0)
            return counts[i].tensors;
    return 1;
}

/* A file that marks a directory stands for that directory. */
static bool is_marker(const char *file)
{
    return strstr(file, ".index.json") || strstr(file, "/.metadata");
}

/* The bytes of the control's tensor, 2x3 floats 0..5, as the case has put them. */
static void control_bytes(const struct row *row, uint32_t out[6])
{
    static const float rows[6] = {0, 1, 2, 3, 4, 5}, columns[6] = {0, 2, 4, 1, 3, 5};

    memcpy(out, strcmp(row->file, "npy/fortran.npy") == 0 ? columns : rows,
           sizeof rows);
    for (int i = 0; strcmp(row->file, "npy/big_endian.npy") == 0 && i < 6; i++)
        out[i] = __builtin_bswap32(out[i]);
}

/* The control's tensor in all cases that say so; that of an .npy file has its name. */
static void check_control(struct world *w, const struct row *row, int64_t id,
                          const struct tensor_info *t)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    struct err e = {0};
    uint32_t want[6];

    assert_ok(world_read(w, id, t, &bytes, &e), &e);
    if (strcmp(row->file, "gguf/unaligned.gguf") == 0)
        return; /* other bytes, where it says */
    if ((strcmp(t->key, key_of(row, false)) != 0 &&
         strncmp(row->file, "npy/", 4) != 0) ||
        t->bytes != sizeof want || t->dtype != DTYPE_F32)
        return;
    assert_int_equal(t->shape.nd, 2);
    assert_int_equal(t->shape.dim[0], 2);
    control_bytes(row, want);
    assert_memory_equal(bytes.data, want, sizeof want);
}

static void check_name(const char *name)
{
    size_t len = strlen(name);

    if (len < 1 || len > 255 || strchr(name, '/') || name[0] == '.')
        fail_msg("\"%s\" is no name for a file", name);
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            fail_msg("\"%s\" holds a control byte", name);
}

static void check_names(const struct tensor_info *t, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        check_name(t[i].name);
        check_name(t[i].name_npy);
        for (size_t k = 0; k < i; k++) {
            assert_string_not_equal(t[i].name, t[k].name);
            assert_string_not_equal(t[i].name_npy, t[k].name_npy);
        }
        if (count > 100)
            break; /* numbers, all alike */
    }
}

static void check_refused(const struct checkpoint_info *info, size_t count)
{
    if (!info->error)
        fail_msg("accepted, with %zu tensors", count);
    assert_int_equal(count, 0);
    assert_int_equal(info->tensors, 0);
    print_message("# %s\n", info->error);
}

static void check_accepted(struct world *w, const struct row *row,
                           const struct checkpoint_info *info,
                           const struct tensor_info *t, size_t count)
{
    if (info->error)
        fail_msg("refused: %s", info->error);
    assert_int_equal(count, tensors_of(row->file));
    assert_int_equal(info->faults, 0);
    for (size_t i = 0; i < count; i++)
        check_control(w, row, info->id, &t[i]);
    check_names(t, count);
}

/* One tensor is named in the case and cannot be read; all others can. */
static void check_one_bad(struct world *w, const struct row *row,
                          const struct checkpoint_info *info,
                          const struct tensor_info *t, size_t count)
{
    const char *bad = key_of(row, true);
    size_t faults = 0;

    if (info->error)
        fail_msg("refused as a whole: %s", info->error);
    for (size_t i = 0; i < count; i++) {
        if (strcmp(t[i].key, bad) == 0) {
            assert_non_null(t[i].fault);
            print_message("# %s: %s\n", t[i].key, t[i].fault);
            faults++;
        } else {
            check_control(w, row, info->id, &t[i]);
        }
    }
    assert_int_equal(faults, 1);
    assert_int_equal(info->faults, 1);
    assert_int_equal(count, strcmp(bad, "b") == 0 ? 2 : 1);
}

static void judge(struct world *w, const struct row *row,
                  const struct checkpoint_info *info)
{
    struct tensor_info *t;
    struct err e = {0};
    size_t count;

    assert_ok(world_tensors(w, info->id, &t, &count, &e), &e);
    if (strcmp(row->verdict, "reject") == 0 ||
        (strcmp(row->verdict, "either") == 0 && !is_accepted(row->file)))
        check_refused(info, count);
    else if (strcmp(row->verdict, "tensor") == 0)
        check_one_bad(w, row, info, t, count);
    else
        check_accepted(w, row, info, t, count);
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
    if (is_marker(row->file))
        *strrchr(path, '/') = '\0';
    assert_ok(world_open(path, &w, &e), &e);
    assert_ok(scanner_get(w.scanner, "", NULL, w.arena, &info, &e), &e);
    judge(&w, row, &info);
    assert_true(cpu_seconds() - start < cpu_allowed());
}

int main(int argc, char **argv)
{
    return argc == 3 ? manifest_run(argc - 1, argv, argv[2], test_case) : 2;
}
