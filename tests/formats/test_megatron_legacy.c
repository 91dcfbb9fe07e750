/* SPDX-License-Identifier: MIT */
/* tests/formats/test_megatron_legacy.c - Megatron-LM's rank files merged, and damaged ones. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/err.h"
#include "edited.h"
#include "fixture.h"
#include "index/formats/megatron/megatron_rules.h"
#include "temp_tree.h"

/* ---- names ---- */

static void test_rules(void **state)
{
    static const struct {
        const char *name;
        enum megatron_rule rule;
    } cases[] = {
        {"embedding.word_embeddings.weight", MEGATRON_ROWS},
        {"output_layer.weight", MEGATRON_ROWS},
        {"decoder.layers.0.self_attention.linear_qkv.weight", MEGATRON_QKV},
        {"decoder.layers.0.self_attention.linear_qkv.bias", MEGATRON_QKV},
        {"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", MEGATRON_SAME},
        {"decoder.layers.0.self_attention.linear_proj.weight", MEGATRON_COLUMNS},
        {"decoder.layers.0.self_attention.linear_proj.bias", MEGATRON_SAME},
        {"decoder.layers.0.self_attention.q_layernorm.weight", MEGATRON_SAME},
        {"decoder.layers.0.mlp.linear_fc1.weight", MEGATRON_FC1},
        {"decoder.layers.0.mlp.linear_fc2.weight", MEGATRON_COLUMNS},
        {"decoder.layers.0.mlp.linear_fc2.bias", MEGATRON_SAME},
        {"decoder.layers.0.mlp.router.weight", MEGATRON_SAME},
        {"decoder.layers.0.input_layernorm.bias", MEGATRON_SAME},
        {"decoder.final_layernorm.weight", MEGATRON_SAME},
        {"decoder.layers.0.mlp.experts.linear_fc1.weight12", MEGATRON_FC1},
        {"decoder.layers.0.mlp.experts.linear_fc2.weight0", MEGATRON_COLUMNS},
        {"language_model.encoder.layers.1.attention.dense.weight", MEGATRON_COLUMNS},
        {"language_model.encoder.layers.1.self_attention.dense.bias", MEGATRON_SAME},
        {"language_model.embedding.position_embeddings.weight", MEGATRON_SAME},
        {"language_model.pooler.dense.weight", MEGATRON_SAME},
        {"language_model.encoder.layers.0.input_norm.weight", MEGATRON_SAME},
        {"language_model.decoder.layers.0.post_inter_attention_norm.bias",
         MEGATRON_SAME},
        {"lm_head.norm.weight", MEGATRON_SAME},
        {"lm_head.dense.weight", MEGATRON_SAME},
        {"lm_head.bias", MEGATRON_ROWS},
        {"language_model.decoder.layers.0.inter_attention.query.weight", MEGATRON_ROWS},
        {"language_model.decoder.layers.0.inter_attention.key_value.bias", MEGATRON_KV},
        /* Cut, or not, in ways that the name does not tell. */
        {"decoder.layers.0.mixer.norm.weight", MEGATRON_UNKNOWN},
        {"decoder.layers.0.mixer.in_proj.weight", MEGATRON_UNKNOWN},
        {"decoder.layers.0.self_attention.linear_kv_down_proj.weight",
         MEGATRON_UNKNOWN},
        {"my_linear_fc2.weight", MEGATRON_UNKNOWN},
        {"decoder.layers.0.mlp.experts.weight1", MEGATRON_UNKNOWN},
        {"linear_fc1.weight1", MEGATRON_UNKNOWN},
        {"weight", MEGATRON_UNKNOWN},
        {"", MEGATRON_UNKNOWN},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct megatron_name n;

        megatron_name(cases[i].name, strlen(cases[i].name), &n);
        if (n.rule != cases[i].rule)
            fail_msg("%s: rule %d, not %d", cases[i].name, n.rule, cases[i].rule);
    }
}

static void test_numbers(void **state)
{
    static const struct {
        const char *name;
        struct megatron_number layer, expert;
    } cases[] = {
        {"decoder.layers.12.mlp.experts.local_experts.3.linear_fc1.weight",
         {15, 2, 12},
         {44, 1, 3}},
        {"decoder.layers.0.mlp.experts.linear_fc2.weight10", {15, 1, 0}, {46, 2, 10}},
        {"layers.1.layers.2.x", {7, 1, 1}, {0}},
        {"decoder.layers.x.1.w", {0}, {0}},
        {"decoder.layers.01.w", {0}, {0}},
        {"decoder.layers.1", {0}, {0}},
        {"decoder.mylayers.1.w", {0}, {0}},
        {"decoder.layers.1234567890.w", {0}, {0}},
        {"mlp.linear_fc1.weight1", {0}, {0}},
        {"layers.", {0}, {0}},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct megatron_name n;

        megatron_name(cases[i].name, strlen(cases[i].name), &n);
        if (n.layer.len != cases[i].layer.len || n.expert.len != cases[i].expert.len)
            fail_msg("%s: %zu, %zu digits", cases[i].name, n.layer.len, n.expert.len);
        if (n.layer.len > 0) {
            assert_int_equal(n.layer.at, cases[i].layer.at);
            assert_int_equal(n.layer.value, cases[i].layer.value);
        }
        if (n.expert.len > 0) {
            assert_int_equal(n.expert.at, cases[i].expert.at);
            assert_int_equal(n.expert.value, cases[i].expert.value);
        }
    }
}

/* ---- what cannot be merged ---- */

static const char *const real[] = {"mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000",
                                   "mp_rank_01_001"};

static void put_rank(void **state, const struct temp *t, const char *dir,
                     const char *was, const char *is, size_t times)
{
    char from[PATH_MAX], name[PATH_MAX];

    snprintf(from, sizeof from, "%s/legacy_tp2_pp2", (const char *)*state);
    snprintf(name, sizeof name, "%s/model_optim_rng.pt", dir);
    put_copy(t, name, from, was, is, times);
}

/* A tensor rank that is missing or damaged: what it has a part of cannot be read. */
static void test_lost_rank(void **state)
{
    for (int damaged = 0; damaged < 2; damaged++) {
        struct opened o;
        struct temp t;

        temp_make(&t, "iter_0000010");
        for (size_t i = 0; i < 3; i++)
            put_rank(state, &t, real[i], NULL, NULL, 0);
        if (damaged)
            put_text(&t, "mp_rank_01_001/model_optim_rng.pt", "PK\3\4 not");
        open_checkpoint(t.dir, &o);
        assert_null(o.info.error);
        assert_int_equal(o.info.step, 10);
        assert_null(tensor(&o, "decoder.layers.1.mlp.linear_fc1.weight")->fault);
        assert_null(tensor(&o, "decoder.layers.2.input_layernorm.weight")->fault);
        assert_has(tensor(&o, "decoder.layers.2.mlp.linear_fc1.weight")->fault,
                   damaged ? "mp_rank_01_001/model_optim_rng.pt, zip at byte 0"
                           : "tensor rank 1: it is missing");
        assert_int_equal(
            tensor(&o, "decoder.layers.2.mlp.linear_fc1.weight")->shape.dim[0], 40);
        assert_int_equal(
            tensor(&o, "decoder.layers.3.mlp.linear_fc2.weight")->shape.dim[1], 20);
        assert_int_equal(o.info.faults, 2 * 5);
        close_checkpoint(&o);
        temp_remove(&t);
    }
}

/* A file that comes into a part later, as in a copy that is under way, is found. */
static void test_late_file(void **state)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    struct checkpoint_info second;
    struct err e = {0};
    char from[PATH_MAX];
    struct opened o;
    struct temp t;

    snprintf(from, sizeof from, "%s/hand_gates_tp2", (const char *)*state);
    temp_make(&t, "iter_0000010");
    put_copy(&t, "mp_rank_00/model_optim_rng.pt", from, NULL, NULL, 0);
    put_copy(&t, "mp_rank_01/model_optim_rng.pt", from, NULL, NULL, 0);
    open_checkpoint(t.dir, &o);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 0);
    snprintf(from, sizeof from, "%s/hand_gates_tp2/mp_rank_00/model_optim_rng.pt",
             (const char *)*state);
    read_file(from, &bytes);
    put(&t, "mp_rank_00/distrib_optim.pt", bytes.data, bytes.len);
    scanner_suspect(o.w.scanner, o.info.path, o.info.file);
    assert_ok(
        scanner_get(o.w.scanner, o.info.path, o.info.file, o.w.arena, &second, &e), &e);
    assert_int_equal(second.by_role[ROLE_OPTIMIZER], 8);
    close_checkpoint(&o);
    temp_remove(&t);
}

static void assert_error(const struct temp *t, const char *error)
{
    struct opened o;

    open_checkpoint(t->dir, &o);
    assert_has(o.info.error ? o.info.error : "no error", error);
    assert_string_equal(o.info.format, "megatron-legacy");
    close_checkpoint(&o);
}

/* Without the first tensor rank of a stage nothing tells what that stage has. */
static void test_lost_stage(void **state)
{
    struct temp t;

    temp_make(&t, "iter_0000010");
    put_rank(state, &t, real[0], NULL, NULL, 0);
    put_rank(state, &t, real[2], NULL, NULL, 0);
    put_rank(state, &t, real[3], NULL, NULL, 0);
    assert_error(&t, "pipeline rank 1 is missing");
    temp_remove(&t);
}

static void test_refused(void **state)
{
    struct temp t;

    temp_make(&t, "iter_0000010");
    put_text(&t, "mp_rank_00/model_rng.pt", "x");
    assert_error(&t, "mp_rank_00 has model_rng.pt");
    temp_remove(&t);

    temp_make(&t, "iter_0000010");
    put_text(&t, "mp_rank_00/model_optim_rng.pt", "x");
    assert_error(&t, "mp_rank_00/model_optim_rng.pt: ");
    temp_remove(&t);

    /* args tell of two tensor ranks. */
    temp_make(&t, "iter_0000010");
    for (int i = 0; i < 3; i++) {
        char dir[40];

        snprintf(dir, sizeof dir, "mp_rank_%02d_000", i);
        put_rank(state, &t, real[0], NULL, NULL, 0);
        put_text(&t, "mp_rank_02_000/model_optim_rng.pt", "x");
    }
    assert_error(&t, "there are 3 tensor ranks, and args tell of 2");
    temp_remove(&t);

    temp_make(&t, "iter_0000010");
    put_rank(state, &t, real[0], NULL, NULL, 0);
    put_text(&t, "mp_rank_0_000/model_optim_rng.pt", "x");
    assert_error(&t, "are of one rank");
    temp_remove(&t);
}

/* A fixture of experts on tensor ranks of their own, without one of its directories. */
static void put_experts(void **state, struct temp *t, const char *fixture,
                        const char *without, const char *was, const char *is)
{
    static const char *const dirs[] = {"mp_rank_00_000", "mp_rank_01_000",
                                       "mp_rank_02_001", "mp_rank_03_001",
                                       "mp_rank_01_001", "mp_rank_02_000"};

    temp_make(t, "iter_0000010");
    for (size_t i = 0; i < ARRAY_SIZE(dirs); i++) {
        char from[PATH_MAX], name[PATH_MAX], path[2 * PATH_MAX];

        snprintf(from, sizeof from, "%s/%s", (const char *)*state, fixture);
        snprintf(name, sizeof name, "%s/model_optim_rng.pt", dirs[i]);
        snprintf(path, sizeof path, "%s/%s", from, name);
        if (strcmp(dirs[i], without) != 0 && access(path, F_OK) == 0)
            put_copy(t, name, from, was, is, was ? 1 : 0);
    }
}

static const char expert_0[] =
    "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight";
static const char expert_2[] =
    "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight";
static const char dense[] = "decoder.layers.0.self_attention.linear_qkv.weight";

/* Of a part that a lost directory had: a fault; what others have as well is read. */
static void test_expert_tensor_lost(void **state)
{
    struct temp t;
    struct opened o;

    put_experts(state, &t, "hand_expert_tensor2_tp4_ep2", "mp_rank_03_001", NULL, NULL);
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    assert_has(tensor(&o, dense)->fault, "tensor rank 3: it is missing");
    assert_has(tensor(&o, expert_2)->fault, "tensor rank 1: it is missing");
    assert_null(tensor(&o, expert_0)->fault);
    close_checkpoint(&o);
    temp_remove(&t);
    put_experts(state, &t, "hand_expert_tensor1_tp4_ep2", "mp_rank_03_001", NULL, NULL);
    open_checkpoint(t.dir, &o);
    assert_has(tensor(&o, dense)->fault, "tensor rank 3: it is missing");
    assert_null(tensor(&o, expert_2)->fault);
    close_checkpoint(&o);
    temp_remove(&t);
}

/* Where args do not tell which part a rank has, each is shown as it is. */
static void test_expert_tensor_untold(void **state)
{
    static const struct {
        const char *was, *is;
    } cases[] = {
        /* Experts on more tensor ranks than all else: several would write one file. */
        {"expert_tensor_parallel_sizeq\tK\2", "expert_tensor_parallel_sizeq\tK\10"},
        {"expert_tensor_parallel_sizeq\tK\2", "expert_tensor_parallel_sizeq\tK\3"},
        /* More experts than a rank of so many has. */
        {"num_expertsq\10K\4", "num_expertsq\10K\2"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct temp t;
        struct opened o;

        put_experts(state, &t, "hand_expert_tensor2_tp4_ep2", "", cases[i].was,
                    cases[i].is);
        open_checkpoint(t.dir, &o);
        assert_null(o.info.error);
        assert_int_equal(o.count, 3 + 4 * 5);
        assert_null(tensor(&o, "mp_rank_03_001/model_optim_rng.pt:model.decoder.layers."
                               "0.mlp.experts.local_experts.1.linear_fc2.weight")
                        ->fault);
        assert_null(tensor(&o, dense)->fault);
        close_checkpoint(&o);
        temp_remove(&t);
    }
}

/* A stage whose numbers do not start at 0 leaves open which layers it has. */
static void test_gap(void **state)
{
    struct temp t;

    temp_make(&t, "iter_0000010");
    for (size_t i = 0; i < ARRAY_SIZE(real); i++) {
        bool odd = i == 1;

        put_rank(state, &t, real[i], odd ? "decoder.layers.0." : NULL,
                 "decoder.layers.7.", odd ? 25 : 0);
    }
    assert_error(&t, "layers without tensors");
    temp_remove(&t);
}

/* Before version 2, rows of q, k and v are told apart by the heads that a rank has. */
static void test_heads(void **state)
{
    static const struct edited rows[] = {
#define ARGS "hand_version1_tp2", "mp_rank_00/model_optim_rng.pt"
#define QKV "language_model.encoder.layers.0.attention.query_key_value.weight"
#define HEADS(is) EDIT("num_attention_headsq\10K\4", "num_attention_headsq\10" is)
        {ARGS, HEADS("K\5"), QKV,
         "checkpoint version 1, and args do not tell how many attention heads a rank has",
         NULL, NULL},
        {ARGS, HEADS("K\0"), QKV, "args do not tell how many attention heads", NULL,
         NULL},
        {ARGS, HEADS("K\1"), QKV, "args do not tell how many attention heads", NULL,
         NULL},
        {ARGS, HEADS("N"), QKV, "args do not tell how many attention heads", NULL,
         NULL},
        {ARGS, HEADS("K\10"), QKV,
         "its rows in mp_rank_00/model_optim_rng.pt are not those of 4 heads", NULL,
         NULL},
        {ARGS, HEADS("K\22"), QKV,
         "its rows in mp_rank_00/model_optim_rng.pt are not those of 9 heads", NULL,
         NULL},
#undef ARGS
#undef QKV
#undef HEADS
    };

    check_edited(*state, rows, ARRAY_SIZE(rows));
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "rules", .test_func = test_rules},
        {.name = "numbers", .test_func = test_numbers},
        {.name = "lost rank", .test_func = test_lost_rank},
        {.name = "late file", .test_func = test_late_file},
        {.name = "lost stage", .test_func = test_lost_stage},
        {.name = "refused", .test_func = test_refused},
        {.name = "expert tensor lost", .test_func = test_expert_tensor_lost},
        {.name = "expert tensor untold", .test_func = test_expert_tensor_untold},
        {.name = "gap", .test_func = test_gap},
        cmocka_unit_test(test_heads),
    };

    return run_with_fixtures("megatron_legacy", argc, argv, others, ARRAY_SIZE(others));
}
