/* SPDX-License-Identifier: MIT */
/* tests/hostile/test_hostile_olmo.c - damaged metadata.json of early OLMo-core: DATA. */
#include "tests/hostile/manifest.h"
#include "tests/unit/unit.h"

#include <limits.h>
#include <stdio.h>

#include "base/err.h"
#include "tests/formats/made.h"

enum { MAX_CASES = 64, HALF = 12 };

/* Why the tensor of each case is not read. */
static const struct {
    const char *name, *fault;
} faults[] = {
    {"beyond", "rank_1.safetensors: an interval of elements"},
    {"both_specs", "both flattened_offsets and local_shape"}, /* ours: they disagree */
    {"dtype_bad", "\"torch.evil\""},
    {"hole", "rank_1.safetensors: an interval of elements"},
    {"inverted", "rank_0.safetensors: an interval of elements"},
    {"length_mismatch", "rank_1.safetensors has 12 elements of it"},
    {"nd_beyond", "the box is not within the tensor"},
    {"negative", "rank_0.safetensors: an interval of elements"},
    {"no_spec", "neither flattened_offsets nor local_shape"},
    {"overlap", "overlap"},
    {"path_up", "a file that is never opened: \"../../x.safetensors\""},
    {"self_overlap", "overlap"},
};

static const char *fault_of(const char *name)
{
    for (size_t i = 0; i < ARRAY_SIZE(faults); i++)
        if (strcmp(faults[i].name, name) == 0)
            return faults[i].fault;
    fail_msg("%s: what is wrong is missing in this test", name);
    abort(); /* not reached; gcc does not know */
}

/* 0..11 of rank 0, then 0..11 of rank 1; `turned`: rank 0 has 6..11 first. */
static void check_accepted(struct opened *o, bool turned)
{
    float want[2 * HALF];

    for (size_t i = 0; i < HALF; i++)
        want[i] = want[HALF + i] = (float)i;
    for (size_t i = 0; turned && i < HALF; i++)
        want[i] = (float)((i + HALF / 2) % HALF);
    check_floats(o, "w", want, 2 * HALF);
}

static void test_case(void **state)
{
    const struct row *row = *state;
    char path[PATH_MAX], name[64];
    struct opened o;

    snprintf(path, sizeof path, "%s/%s", row->data, row->file);
    *strrchr(path, '/') = '\0'; /* metadata.json stands for its folder */
    snprintf(name, sizeof name, "%s", strrchr(path, '/') + 1);
    open_checkpoint(path, &o);
    if (o.info.error)
        fail_msg("refused as a whole: %s", o.info.error);
    assert_string_equal(o.info.format, "olmo-core-v0");
    assert_int_equal(o.count, 1);
    if (strcmp(row->verdict, "accept") == 0) {
        check_accepted(&o, strcmp(name, "unsorted") == 0);
    } else {
        check_fault(&o, "w", fault_of(name));
        print_message("# %s\n", o.t[0].fault);
    }
    close_checkpoint(&o);
}

int main(int argc, char **argv)
{
    return manifest_run(argc, argv, "olmo", test_case);
}
