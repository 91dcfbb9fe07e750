/* SPDX-License-Identifier: MIT */
/* tests/formats/test_dcp_trainers.c - torchtitan and Composer, who use torch's own formats. */
#include "made.h"

#include "fixture_tree.h"
#include "index/formats/dcp/dcp_experts.h"
#include "index/formats/dcp/dcp_origin.h"
#include "tests/unit/unit.h"

static void note(struct dcp_origin *o, const char *key, const char *json)
{
    dcp_origin_note(o, key, strlen(key), json, strlen(json));
}

/* What a hostile object says must not become more than a number or a short text. */
static void test_origin(void **state UNUSED)
{
    struct dcp_origin o = {0};

    note(&o, "optimizer.param_groups.0.lr", "0.1");
    note(&o, "train_state", "{}");
    note(&o, "dataloader.dp_rank_", "1");
    assert_null(o.framework);
    note(&o, "dataloader.dp_rank_0", "{}");
    assert_string_equal(o.framework, "torchtitan");
    note(&o, "train_state.step", "\"12\"");
    assert_false(o.has_step);
    note(&o, "train_state.step", "1e3");
    assert_false(o.has_step);
    note(&o, "train_state.step", "12");
    assert_true(o.has_step);
    assert_int_equal(o.step, 12);

    o = (struct dcp_origin){0};
    note(&o, "state.metadata.composer_env_info.composer_version", "\"0.32.1\"");
    note(&o, "state.timestamp.Timestamp.batch", "7");
    note(&o, "state.timestamp.Timestamp.epoch", "1");
    assert_string_equal(o.framework, "Composer");
    assert_string_equal(o.version, "0.32.1");
    assert_int_equal(o.step, 7);
    assert_int_equal(o.epoch, 1);
    note(&o, "state.metadata.composer_env_info.composer_version",
         "\"0123456789012345678901234567890123456789\"");
    assert_string_equal(o.version, "0123456789012345678901234567890");

    /* With torch before 2.4 each of these is one object. */
    o = (struct dcp_origin){0};
    note(&o, "state.timestamp", "{\"Timestamp\": {\"epoch\": 2, \"batch\": 9}}");
    note(&o, "state.metadata",
         "{\"torch_version\": \"2.1.2\", "
         "\"composer_env_info\": {\"composer_version\": \"0.17.2\"}}");
    assert_string_equal(o.framework, "Composer");
    assert_string_equal(o.version, "0.17.2");
    assert_int_equal(o.step, 9);
    assert_int_equal(o.epoch, 2);
    note(&o, "state.timestamp", "{\"Timestamp\": [{\"batch\": 10}]}");
    note(&o, "state.timestamp", "7");
    note(&o, "state.metadata", "{\"composer_env_info\": null}");
    assert_int_equal(o.step, 9);
    assert_string_equal(o.version, "0.17.2");

    /* Anybody's state may have a progress; it tells no trainer. */
    o = (struct dcp_origin){0};
    note(&o, "app.progress.step", "5");
    assert_null(o.framework);
    assert_true(o.has_step);
    assert_int_equal(o.step, 5);

    o = (struct dcp_origin){0};
    note(&o, "iteration", "\"7\"");
    assert_false(o.has_step);
    note(&o, "iteration", "7");
    note(&o, "iterations", "8");
    assert_int_equal(o.step, 7);
    assert_null(o.framework);
    note(&o, "checkpoint_version", "3.0");
    assert_string_equal(o.framework, "Megatron-LM");
}

static void test_experts(void **state UNUSED)
{
    static const struct {
        const char *key;
        uint64_t weights, biases; /* with those before */
    } cases[] = {
        {"model.module.decoder.layers.0.mlp.experts.linear_fc1.weight3_w", 4, 0},
        {"model.module.decoder.layers.0.mlp.experts.linear_fc2.weight11", 12, 0},
        {"model.module.decoder.layers.0.mlp.experts.linear_fc1.bias1_v", 12, 2},
        {"x.mlp.experts.linear_fc2.bias5", 12, 6},
        {"x.mlp.experts.linear_fc2.bias", 12, 6},
        {"x.mlp.experts.linear_fc2.bias20_x", 12, 6},
        {"x.mlp.experts.linear_fc2.bias20.exp_avg", 12, 6},
        {"x.mlp.experts.linear_fc2.weight0123456789", 12, 6},
        {"x.mlp.experts.linear_fc2.", 12, 6},
        {"x.mlp.experts.linear_fc", 12, 6},
        {"x.mlp.linear_fc1.bias30", 12, 6},
    };
    struct dcp_experts x = {0};

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        dcp_experts_note(&x, cases[i].key, strlen(cases[i].key));
        assert_int_equal(x.weights, cases[i].weights);
        assert_int_equal(x.biases, cases[i].biases);
    }
}

static void test_roles(void **state UNUSED)
{
    static const struct {
        const char *key;
        int role;
    } cases[] = {
        {"rng_state.(0, 1).0.torch_rng_state", ROLE_OTHER},
        {"rng_state.0.torch_rng_state", ROLE_OTHER},
        {"rng_state.", -1},
        {"rng_state", -1},
        {"rng_states.x", -1},
        {"model.rng_state.x", -1},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        assert_int_equal(dcp_origin_role(cases[i].key, strlen(cases[i].key)),
                         cases[i].role);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "origin", .test_func = test_origin},
        {.name = "roles", .test_func = test_roles},
        {.name = "experts", .test_func = test_experts},
    };

    return run_with("dcp_trainers", argc, argv, test_fixture_tree, others,
                    ARRAY_SIZE(others));
}
