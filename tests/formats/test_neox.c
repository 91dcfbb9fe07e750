/* SPDX-License-Identifier: MIT */
/* tests/formats/test_neox.c - GPT-NeoX's layers merged, and damaged ones. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/err.h"
#include "index/formats/neox/neox_rules.h"
#include "edited.h"

static void test_names(void **state)
{
    static const struct {
        const char *name;
        bool good;
        uint32_t layer, rank;
        int digits;
    } cases[] = {
        {"layer_00-model_01-model_states.pt", true, 0, 1, 2},
        {"layer_102-model_00-model_states.pt", true, 102, 0, 3},
        {"layer_2-model_00-model_states.pt", false, 0, 0, 0},
        {"layer_02-model_0-model_states.pt", false, 0, 0, 0},
        {"layer_02-model_00-model_states.pt.tmp", false, 0, 0, 0},
        {"layer_02-model_00_optim_states.pt", false, 0, 0, 0},
        {"layer_9999999999-model_00-model_states.pt", false, 0, 0, 0},
        {"layer_", false, 0, 0, 0},
        {"", false, 0, 0, 0},
    };
    uint32_t layer, rank;
    int digits;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        bool good = neox_layer_name(cases[i].name, &layer, &rank, &digits);

        if (good != cases[i].good ||
            (good && (layer != cases[i].layer || rank != cases[i].rank ||
                      digits != cases[i].digits)))
            fail_msg("%s: %d %u %u", cases[i].name, good, layer, rank);
    }
    assert_true(neox_rank_name("mp_rank_12_model_states.pt", &rank));
    assert_int_equal(rank, 12);
    assert_false(neox_rank_name("mp_rank_12_003_model_states.pt", &rank));
    assert_false(neox_rank_name("mp_rank_1_model_states.pt", &rank));
}

static void copy_layer(void *const *state, const struct made *m, const char *fixture,
                       const char *name)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s/%s", (const char *)*state, fixture, name);
    made_copy(m, name, path);
}

/* A rank's file is lost: what it had a piece of cannot be read, copies can. */
static void test_missing_rank(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "global_step20");
    copy_layer(state, &m, "neox_tp2", "layer_00-model_00-model_states.pt");
    copy_layer(state, &m, "neox_tp2", "layer_02-model_00-model_states.pt");
    copy_layer(state, &m, "neox_tp2", "layer_02-model_01-model_states.pt");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_fault(&o, "layer_00/word_embeddings.weight",
                "layer_00-model_01-model_states.pt: it is missing");
    assert_int_equal(o.info.faults, 1);
    check_readable_of(&o, state, "neox_tp2");
    check_warnings(&o, "missing-file: layer_00-model_01-model_states.pt is missing\n");
    close_checkpoint(&o);
    made_end(&m);
}

static void test_missing_layer(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "global_step20");
    copy_layer(state, &m, "neox_tp2", "layer_02-model_00-model_states.pt");
    copy_layer(state, &m, "neox_tp2", "layer_02-model_01-model_states.pt");
    copy_layer(state, &m, "neox_tp2", "mp_rank_00_model_states.pt");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_warnings(&o,
                   "missing-layers: args tell of 2 layers with attention, the files "
                   "have 1\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* A summand is lost: the sum of the others would be a wrong one. */
static void test_missing_summand(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "global_step7");
    copy_layer(state, &m, "hand_sum_f32_tp3", "layer_02-model_00-model_states.pt");
    made_text(&m, "layer_02-model_01-model_states.pt", "PK");
    copy_layer(state, &m, "hand_sum_f32_tp3", "layer_02-model_02-model_states.pt");
    made_open(&m, &o);
    check_fault(&o, "layer_02/attention.dense.bias",
                "layer_02-model_01-model_states.pt: ");
    check_fault(&o, "layer_02/mlp.dense_4h_to_h.bias",
                "layer_02-model_01-model_states.pt: ");
    assert_null(tensor(&o, "layer_02/input_layernorm.bias")->fault);
    assert_int_equal(o.info.faults, 5);
    close_checkpoint(&o);
    made_end(&m);
}

/* Shards of the optimizer are shown as each rank has them. */
static void test_optimizer(void **state)
{
    struct made m;
    struct opened o;
    char path[PATH_MAX];

    made_begin(&m, "global_step3");
    copy_layer(state, &m, "hand_bloom_tp2", "layer_05-model_00-model_states.pt");
    copy_layer(state, &m, "hand_bloom_tp2", "layer_05-model_01-model_states.pt");
    snprintf(path, sizeof path, "%s/hand_tp1/layer_02-model_00-model_states.pt",
             (const char *)*state);
    made_copy(&m, "zero_pp_rank_0_mp_rank_00_optim_states.pt", path);
    made_copy(&m, "zero_pp_rank_1_mp_rank_00_optim_states.pt", path);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.step, 3);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 10);
    assert_int_equal(tensor(&o, "zero_pp_rank_1_mp_rank_00_optim_states.pt/x.y")->role,
                     ROLE_OPTIMIZER);
    check_warnings(&o,
                   "optimizer: there are no model states, only optimizer states\n"
                   "optimizer-not-merged: 2 files of the ranks' optimizers are shown "
                   "as they are, not merged\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* How many tensor ranks there are is told by args alone. */
static void test_ranks_told(void **state)
{
#define MODEL "neox_tp2", "mp_rank_00_model_states.pt"
    static const struct edited rows[] = {
        /* Of a pipeline of two stages: DeepSpeed counts their ranks too. */
        {MODEL, EDIT("mp_world_sizeq\17K\2", "mp_world_sizeq\17K\4"), EDITED_SOUND,
         NULL, NULL, NULL},
        {MODEL, EDIT("parallel_sizeq\24K\2", "parallel_sizeq\24K\3"),
         "layer_00/word_embeddings.weight",
         "layer_00-model_02-model_states.pt: it is missing", NULL, NULL},
        {MODEL, EDIT("parallel_sizeq\24K\2", "parallel_sizeq\24K\1"), NULL,
         "there are layers of 2 tensor ranks, and args tell of 1", NULL, NULL},
    };

    check_edited(*state, rows, ARRAY_SIZE(rows));
#undef MODEL
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),         cmocka_unit_test(test_missing_rank),
        cmocka_unit_test(test_missing_layer), cmocka_unit_test(test_missing_summand),
        cmocka_unit_test(test_optimizer),     cmocka_unit_test(test_ranks_told),
    };

    return run_with_fixtures("neox", argc, argv, tests, ARRAY_SIZE(tests));
}
