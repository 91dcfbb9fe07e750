/* SPDX-License-Identifier: MIT */
/* tests/formats/test_torchtune.c - torchtune's epochs: which files are one model. */
#include "made.h"

#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>

#include "base/err.h"
#include "fixture_tree.h"
#include "index/formats/format.h"
#include "tests/unit/unit.h"

extern const struct format_driver format_torchtune;

static const char first[] = "torchtune_old_pt/hf_model_0001_0.pt";  /* 3 tensors */
static const char second[] = "torchtune_old_pt/hf_model_0002_0.pt"; /* 2 */
static const char adapter[] = "torchtune_epoch/epoch_0/adapter_model.pt"; /* 2 */
static const char recipe[] = "torchtune_old_pt/recipe_state.pt";          /* 4 */

static void drop(const struct made *m, const char *name)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", m->dir, name);
    assert_int_equal(remove(path), 0);
}

/* Epoch 10 is newer than 9; older ones stay files. */
static void test_newest(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "run");
    made_from(&m, "hf_model_0001_9.pt", state, second);
    made_from(&m, "hf_model_0002_9.pt", state, first);
    made_from(&m, "hf_model_0001_10.pt", state, first);
    made_from(&m, "hf_model_0002_10.pt", state, second);
    made_from(&m, "adapter_9.pt", state, adapter);
    made_from(&m, "adapter_10.pt", state, adapter);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "torchtune");
    assert_string_equal(o.info.topology,
                        "{\"files\": 2, \"epoch\": 10, \"names\": \"old\"}");
    assert_int_equal(o.info.by_role[ROLE_MODEL], 5);
    assert_int_equal(o.info.by_role[ROLE_OTHER], 2);
    assert_non_null(tensor(&o, "adapter_10.pt:layers.0.attn.q_proj.lora_a.weight"));
    check_warnings(&o, "older-files: 3 files as adapter_9.pt are of other epochs than "
                       "10: they are shown as they are\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* How many files there should be only another epoch tells. */
static void test_lost_file(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "run");
    made_from(&m, "hf_model_0001_0.pt", state, first);
    made_from(&m, "hf_model_0002_0.pt", state, second);
    made_from(&m, "hf_model_0001_1.pt", state, first);
    made_open(&m, &o);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 3);
    check_warnings(&o, "older-files: 2 files as hf_model_0001_0.pt are of other epochs "
                       "than 1: they are shown as they are\n"
                       "missing-file: epoch 1 has 1 model files of 2\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* No index says which file is right. */
static void test_twice(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "run");
    made_from(&m, "hf_model_0001_0.pt", state, second);
    made_from(&m, "hf_model_0002_0.pt", state, second);
    made_open(&m, &o);
    assert_int_equal(o.count, 2);
    check_fault(&o, "lm_head.weight", "it is in several files, and no index decides");
    close_checkpoint(&o);
    made_end(&m);
}

static void test_damaged_recipe(void **state)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    made_begin(&m, "run");
    made_from(&m, "meta_model_3.pt", state, first);
    made_from(&m, "recipe_state.pt", state, recipe);
    made_open(&m, &o);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 3);
    assert_int_equal(tensor(&o, "optimizer.state.0.exp_avg")->role, ROLE_OPTIMIZER);
    check_warnings(&o, "");
    all_objects(&o, &text);
    assert_has(text.data, "recipe_state.pt:epochs_run=1\n");
    assert_has(text.data, "recipe_state.pt:optimizer={");
    close_checkpoint(&o);
    made_text(&m, "recipe_state.pt", "PK\003\004 but no zip");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 3);
    assert_int_equal(o.info.warnings, 1);
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- bids ---- */

static int bid_for(const struct made *m)
{
    static const struct store_options options;
    CLEANUP(listing_freep) struct listing *l = NULL;
    char top[sizeof m->dir];
    const char *name = strrchr(m->dir, '/') + 1;
    struct store *store;
    struct bid bid;
    struct err e = {0};

    snprintf(top, sizeof top, "%.*s", (int)(name - 1 - m->dir), m->dir);
    assert_ok(store_open_local(top, &options, &store, &e), &e);
    assert_ok(store->ops->list(store, name, &l, &e), &e);
    format_torchtune.bid(l, &bid);
    listing_free(steal(&l));
    store_close(store);
    return bid.score;
}

static void test_bids(void **state)
{
    static const char header[] =
        "{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
    struct made m;
    char path[sizeof m.dir + 16];

    made_begin(&m, "epoch_3");
    assert_int_equal(bid_for(&m), 0);
    made_safetensors(&m, "model.safetensors", header, 1, 1);
    assert_int_equal(bid_for(&m), 0); /* anybody's */
    snprintf(path, sizeof path, "%.*s/recipe_state", (int)(strrchr(m.dir, '/') - m.dir),
             m.dir);
    assert_int_equal(mkdir(path, 0777), 0);
    assert_int_equal(bid_for(&m), 87);
    made_from(&m, "recipe_state.pt", state, recipe);
    assert_int_equal(bid_for(&m), 89);
    drop(&m, "model.safetensors");
    assert_int_equal(bid_for(&m), 0);
    made_from(&m, "hf_model_0001_0.pt", state, first);
    assert_int_equal(bid_for(&m), 85);
    drop(&m, "recipe_state.pt");
    assert_int_equal(bid_for(&m), 55);
    made_text(&m, "hf_model_0001_0.pt", "no torch file");
    assert_int_equal(bid_for(&m), 0);
    made_from(&m, "hf_model_x_0.pt", state, first);
    made_from(&m, "model_0.pt", state, first);
    drop(&m, "hf_model_0001_0.pt");
    assert_int_equal(bid_for(&m), 0);
    made_end(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "newest epoch", .test_func = test_newest},
        {.name = "lost file", .test_func = test_lost_file},
        {.name = "twice", .test_func = test_twice},
        {.name = "damaged recipe", .test_func = test_damaged_recipe},
        {.name = "bids", .test_func = test_bids},
    };

    return run_with("torchtune", argc, argv, test_fixture_tree, others,
                    ARRAY_SIZE(others));
}
