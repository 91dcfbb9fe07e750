/* SPDX-License-Identifier: MIT */
/* tests/formats/test_lightning.c - Lightning's .ckpt files, and directories of DCP and meta.pt. */
#include "made.h"

#include <limits.h>
#include <stdio.h>

#include "base/err.h"
#include "fixture_tree.h"
#include "index/formats/format.h"
#include "tests/unit/unit.h"

extern const struct format_driver format_lightning;

static void begin_copy(void **state, struct made *m)
{
    made_begin(m, "epoch=1-step=4.ckpt");
    made_from(m, ".metadata", state, "trainer_two_optimizers/.metadata");
    made_from(m, "__0_0.distcp", state, "trainer_two_optimizers/__0_0.distcp");
    made_from(m, "meta.pt", state, "trainer_two_optimizers/meta.pt");
}

static void drop(const struct made *m, const char *name)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", m->dir, name);
    assert_int_equal(remove(path), 0);
}

/* optimizer_0 is no word of CONTRACT's table: it is Lightning that calls it so. */
static void test_roles(void **state)
{
    struct made m;
    struct opened o;

    begin_copy(state, &m);
    made_open(&m, &o);
    assert_int_equal(tensor(&o, "model.up.weight")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "optimizer_0.state.up.weight.exp_avg")->role,
                     ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "optimizer_1.state.down.weight.step")->role,
                     ROLE_OPTIMIZER);
    assert_int_equal(
        tensor(&o, "meta.pt:callbacks.ModelCheckpoint{'monitor': None}.kth_value")
            ->role,
        ROLE_OTHER);
    close_checkpoint(&o);
    made_end(&m);
}

/* What is beside the model cannot be read: the model can. */
static void test_damaged_meta(void **state)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    begin_copy(state, &m);
    made_from(&m, "meta.pt", state, "trainer_two_optimizers/__0_0.distcp");
    made_text(&m, "config.yaml", "a: 1\n");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 3);
    assert_int_equal(o.info.faults, 0);
    assert_int_equal(o.info.warnings, 1);
    all_objects(&o, &text);
    assert_has(text.data, "meta.pt:={\"$type\":\"opaque\",\"class\":\"unreadable\"");
    close_checkpoint(&o);
    made_end(&m);
}

static void test_lost_shard(void **state)
{
    struct made m;
    struct opened o;

    begin_copy(state, &m);
    drop(&m, "__0_0.distcp");
    made_open(&m, &o);
    check_fault(&o, "model.up.weight", "__0_0.distcp is missing");
    assert_int_equal(o.info.by_role[ROLE_OTHER], 1);
    close_checkpoint(&o);
    made_end(&m);
}

static void test_bids(void **state)
{
    struct made m;

    begin_copy(state, &m);
    assert_int_equal(folder_score(&format_lightning, m.dir), 90);
    made_text(&m, "meta.pt", "of somebody else");
    assert_int_equal(folder_score(&format_lightning, m.dir), 0);
    made_from(&m, "meta.pt", state, "trainer_two_optimizers/meta.pt");
    drop(&m, ".metadata");
    assert_int_equal(folder_score(&format_lightning, m.dir), 0); /* not complete */
    made_end(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "roles", .test_func = test_roles},
        {.name = "damaged meta.pt", .test_func = test_damaged_meta},
        {.name = "lost shard", .test_func = test_lost_shard},
        {.name = "bids", .test_func = test_bids},
    };

    return run_with("lightning", argc, argv, test_fixture_tree, others,
                    ARRAY_SIZE(others));
}
