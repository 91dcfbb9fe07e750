/* SPDX-License-Identifier: MIT */
/* tests/formats/test_colossalai.c - Colossal-AI's optimizers in several files, and steps. */
#include "made.h"

#include <stdio.h>

#include "fixture_tree.h"
#include "tests/unit/unit.h"

#define PREFIX "booster/prefix/"
#define ASYNC "booster/async/"

static const char optim_index[] = PREFIX "pytorch_optim.bin.index.second.json";

/* All of the fixture but the first of the four files, which has parameter 0. */
static void make_optim(struct made *m, void **state)
{
    made_begin(m, "optimizer");
    made_from(m, "pytorch_optim.bin.index.second.json", state, optim_index);
    made_from(m, "pytorch_optim_group.second.bin", state,
              PREFIX "pytorch_optim_group.second.bin");
    made_from(m, "pytorch_optim.second-00002.bin", state,
              PREFIX "pytorch_optim.second-00002.bin");
    made_from(m, "pytorch_optim.second-00003.bin", state,
              PREFIX "pytorch_optim.second-00003.bin");
    made_from(m, "pytorch_optim.second-00004.bin", state,
              PREFIX "pytorch_optim.second-00004.bin");
}

/* What is lost is listed by the number that the index has of it. */
static void test_lost_file(void **state)
{
    struct made m;
    struct opened o;

    make_optim(&m, state);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 16);
    check_fault(&o, "state.0",
                "the index says that it is in pytorch_optim.second-00001.bin, which "
                "does not hold it");
    assert_int_equal(tensor(&o, "state.5.exp_avg")->role, ROLE_OPTIMIZER);
    close_checkpoint(&o);
    /* A file of other parameters in its place. */
    made_from(&m, "pytorch_optim.second-00001.bin", state,
              ASYNC "pytorch_optim_group.bin");
    made_open(&m, &o);
    check_fault(&o, "state.0",
                "the index says that it is in pytorch_optim.second-00001.bin, which "
                "does not hold it");
    close_checkpoint(&o);
    made_text(&m, "pytorch_optim.second-00001.bin", "no torch file");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_fault(&o, "state.0",
                "the index says that it is in pytorch_optim.second-00001.bin, which "
                "does not hold it");
    close_checkpoint(&o);
    made_end(&m);
}

static void test_lost_safetensors(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "optimizer");
    made_from(&m, "optimizer.safetensors.index.json", state,
              ASYNC "optimizer.safetensors.index.json");
    made_from(&m, "optimizer-00002.safetensors", state,
              ASYNC "optimizer-00002.safetensors");
    made_text(&m, "optimizer-00003.safetensors", "no safetensors file");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "colossalai");
    check_fault(&o, "state.0",
                "the index says that it is in optimizer-00001.safetensors, which does "
                "not hold it");
    check_fault(&o, "state.2",
                "the index says that it is in optimizer-00003.safetensors, which does "
                "not hold it");
    assert_int_equal(tensor(&o, "state.1.exp_avg")->role, ROLE_OPTIMIZER);
    close_checkpoint(&o);
    made_end(&m);
}

/* Names that lead elsewhere are never opened; an index of other things is not ours. */
static void test_index(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "optimizer");
    made_text(&m, "pytorch_optim.bin.index.json",
              "{\"metadata\": {\"param_groups\": \"pytorch_optim_group.bin\"}, "
              "\"weight_map\": {\"0\": \"../pytorch_optim-00001.bin\"}}");
    made_from(&m, "pytorch_optim_group.bin", state, ASYNC "pytorch_optim_group.bin");
    made_open(&m, &o);
    assert_string_equal(o.info.format, "colossalai");
    check_fault(&o, "state.0", "the index gives a name that is no plain file name");
    close_checkpoint(&o);
    made_text(&m, "pytorch_optim.bin.index.json",
              "{\"metadata\": {\"param_groups\": 1}, \"weight_map\": 5}");
    made_open(&m, &o);
    assert_has(o.info.error, "pytorch_optim.bin.index.json: weight_map is no object");
    close_checkpoint(&o);
    made_end(&m);
}

#define PIPELINE "pipeline/epoch-0_step-2/optimizer/"

static void make_pipeline(struct made *m, void **state, bool with_last)
{
    static const char *const names[] = {"pytorch_optim.bin.index.json",
                                        "pytorch_optim-stage-00001-shard-00001.bin",
                                        "pytorch_optim-stage-00001-shard-00002.bin",
                                        "pytorch_optim-stage-00001-shard-00003.bin",
                                        "pytorch_optim-stage-00002-shard-00002.bin",
                                        "pytorch_optim-stage-00002-shard-00003.bin",
                                        "pytorch_optim-stage-00002-shard-00001.bin"};
    char from[128];

    made_begin(m, "optimizer");
    for (size_t i = 0; i < ARRAY_SIZE(names) - !with_last; i++) {
        snprintf(from, sizeof from, PIPELINE "%s", names[i]);
        made_from(m, names[i], state, from);
    }
}

/*
 * A pipeline whose ends are tied: the first stage's file has the states of parameter 0 too,
 * which the index puts into a file of the last stage.
 */
static void test_tied_ends(void **state)
{
    struct made m;
    struct opened o;

    make_pipeline(&m, state, true);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 60);
    check_warnings(&o,
                   "unlisted-tensor: pytorch_optim-stage-00001-shard-00001.bin holds "
                   "states of 1 parameters that the index puts into other files: they "
                   "are not shown\n");
    close_checkpoint(&o);
    made_end(&m);
    /* Where that file is lost, what there is of it counts. */
    make_pipeline(&m, state, false);
    made_open(&m, &o);
    assert_int_equal(tensor(&o, "state.0.exp_avg")->role, ROLE_OPTIMIZER);
    check_fault(&o, "state.10",
                "the index says that it is in "
                "pytorch_optim-stage-00002-shard-00001.bin, which does not hold it");
    close_checkpoint(&o);
    made_end(&m);
}

/* The same of safetensors files; "0" is in both. */
static void test_tied_ends_safetensors(void **state)
{
    static const float first[] = {1, 2}, last[] = {5, 6};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "optimizer");
    made_text(
        &m, "optimizer.safetensors.index.json",
        "{\"metadata\": {\"param_groups\": \"pytorch_optim_group.bin\"}, "
        "\"weight_map\": {\"0\": \"optimizer-stage-00002-shard-00001.safetensors\", "
        "\"1\": \"optimizer-stage-00001-shard-00001.safetensors\"}}");
    made_safetensors(&m, "optimizer-stage-00001-shard-00001.safetensors",
                     "{\"state.0.exp_avg\":{\"dtype\":\"F32\",\"shape\":[2],"
                     "\"data_offsets\":[8,16]},\"state.1.exp_avg\":{\"dtype\":\"F32\","
                     "\"shape\":[2],\"data_offsets\":[0,8]}}",
                     1, 4);
    made_safetensors(&m, "optimizer-stage-00002-shard-00001.safetensors",
                     "{\"state.0.exp_avg\":{\"dtype\":\"F32\",\"shape\":[2],"
                     "\"data_offsets\":[0,8]}}",
                     5, 2);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 2);
    check_floats(&o, "state.0.exp_avg", last, 2);
    check_floats(&o, "state.1.exp_avg", first, 2);
    check_warnings(
        &o, "unlisted-tensor: optimizer-stage-00001-shard-00001.safetensors holds "
            "states of 1 parameters that the index puts into other files: they "
            "are not shown\n");
    close_checkpoint(&o);
    made_end(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "lost file", .test_func = test_lost_file},
        {.name = "lost safetensors file", .test_func = test_lost_safetensors},
        {.name = "tied ends", .test_func = test_tied_ends},
        {.name = "tied ends, safetensors", .test_func = test_tied_ends_safetensors},
        {.name = "index", .test_func = test_index},
    };

    return run_with("colossalai", argc, argv, test_fixture_tree, others,
                    ARRAY_SIZE(others));
}
