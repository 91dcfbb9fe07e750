/* SPDX-License-Identifier: MIT */
/* tests/formats/test_deepspeed.c - DeepSpeed's saves: what is lost, left over, or refused. */
#include "made.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/err.h"
#include "temp_tree.h"
#include "tests/unit/unit.h"

/* ---- fixtures with a change ---- */

/* All files of a fixture's folder but `without` (or NULL), below `to`. */
static void copy_dir(const struct made *m, const char *from, const char *to,
                     const char *without)
{
    DIR *d = opendir(from);
    char path[PATH_MAX], name[PATH_MAX];

    assert_non_null(d);
    for (struct dirent *entry; (entry = readdir(d));) {
        struct stat st;

        if (entry->d_name[0] == '.' || (without && strcmp(entry->d_name, without) == 0))
            continue;
        snprintf(path, sizeof path, "%s/%s", from, entry->d_name);
        snprintf(name, sizeof name, "%s%s%s", to, to[0] ? "/" : "", entry->d_name);
        assert_int_equal(stat(path, &st), 0);
        if (S_ISDIR(st.st_mode))
            copy_dir(m, path, name, without);
        else
            made_copy(m, name, path);
    }
    closedir(d);
}

static void make(struct made *m, const char *data, const char *fixture,
                 const char *without)
{
    char from[PATH_MAX];

    made_begin(m, "global_step2");
    snprintf(from, sizeof from, "%s/%s", data, fixture);
    copy_dir(m, from, "", without);
}

static void copy_as(const struct made *m, const char *data, const char *file,
                    const char *name)
{
    char from[PATH_MAX];

    snprintf(from, sizeof from, "%s/%s", data, file);
    made_copy(m, name, from);
}

/* The checkpoint is refused with these words. */
static void check_refused(const struct made *m, const char *why)
{
    struct opened o;

    made_open(m, &o);
    if (!o.info.error)
        fail_msg("accepted, with %zu tensors; it should say %s", o.count, why);
    assert_has(o.info.error, why);
    assert_int_equal(o.count, 0);
    close_checkpoint(&o);
    made_end(m);
}

/* ---- files ---- */

static void test_left_over_file(void **state)
{
    struct made m;

    make(&m, *state, "z1_bf16_gradfp32_w2", NULL);
    copy_as(&m, *state,
            "z1_bf16_gradfp32_w2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt");
    check_refused(&m, "are of the same rank");
}

static void test_one_rank_too_many(void **state)
{
    struct made m;

    make(&m, *state, "z1_bf16_gradfp32_w2", NULL);
    copy_as(&m, *state,
            "z1_bf16_gradfp32_w2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt");
    check_refused(&m, "partition_count says 2 files of optimizer states, there are 3");
}

static void test_first_rank_is_missing(void **state)
{
    struct made m;

    make(&m, *state, "z3_fp32_w3", "zero_pp_rank_0_mp_rank_00_optim_states.pt");
    check_refused(&m, "rank 0 of the optimizer's files is missing");
}

/* The ranks' own notes tell that the files are not in their places. */
static void test_ranks_that_changed_places(void **state)
{
    struct made m;

    make(&m, *state, "z1_elastic_w2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
    copy_as(&m, *state, "z1_elastic_w2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
    check_refused(&m, "param_slice_mappings: emb.weight is not in this rank's");
}

/* Copies a file with another text at each of `times` places. */
static void copy_changed(const struct made *m, const char *data, const char *fixture,
                         const char *file, const char *was, const char *is,
                         size_t times)
{
    struct temp t = {0};
    char from[PATH_MAX];

    snprintf(t.dir, sizeof t.dir, "%s", m->dir);
    snprintf(from, sizeof from, "%s/%s", data, fixture);
    put_copy(&t, file, from, was, is, times);
}

/*
 * Python shuffles the groups of layers with several ep_size. All partitions are equally long
 * here: only partition_count tells that the second rank's are others.
 */
static void test_groups_in_another_order(void **state)
{
    static const char fixture[] = "moe_z1_ep1_ep2_w2",
                      second[] = "zero_pp_rank_1_mp_rank_00_optim_states.pt";
    struct made m;

    make(&m, *state, fixture, second);
    copy_changed(&m, *state, fixture, second, "param_slice_mappings",
                 "-aram_slice_mappings", 1);
    check_refused(&m, "zero_pp_rank_1_mp_rank_00_optim_states.pt: its groups are not "
                      "those of the first rank in their order (partition_count)");
}

/* All of it is what NAME.json (or NAME.expected.json) says, and nothing is warned of. */
static void check_whole(const char *dir, const char *data, const char *expected,
                        size_t count)
{
    char path[PATH_MAX];
    struct opened o;

    open_checkpoint(dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 0);
    assert_int_equal(o.info.warnings, 0);
    assert_int_equal(o.count, count);
    snprintf(path, sizeof path, "%s/%s", data, expected);
    check_readable(&o, path);
    close_checkpoint(&o);
}

/* DeepSpeed 0.15 writes no param_shapes beside experts: the ranks' notes have them. */
static void test_notes(void **state)
{
    static const struct {
        const char *name;
        size_t count;
    } saves[] = {{"moe_0154_z1_ep2_w4", 107}, {"moe_0154_z2_ep2_w2", 67}};

    for (size_t i = 0; i < ARRAY_SIZE(saves); i++) {
        char dir[PATH_MAX], expected[64];

        snprintf(dir, sizeof dir, "%s/%s", (const char *)*state, saves[i].name);
        snprintf(expected, sizeof expected, "%s.json", saves[i].name);
        check_whole(dir, *state, expected, saves[i].count);
    }
}

/* A save of 0.19 without its param_shapes has the same tensors. */
static void test_notes_of_other_versions(void **state)
{
    static const char fixture[] = "moe_z2_ep2_w4",
                      model[] = "mp_rank_00_model_states.pt";
    struct opened o;
    struct made m;
    char path[PATH_MAX];

    make(&m, *state, fixture, model);
    copy_changed(&m, *state, fixture, model, "param_shapes", "-aram_shapes", 2);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 0);
    assert_int_equal(o.info.warnings, 0);
    snprintf(path, sizeof path, "%s/%s.expected.json", (const char *)*state, fixture);
    check_readable(&o, path);
    close_checkpoint(&o);
    made_end(&m);
}

/* Some rank's notes are gone, or do not fit to the model's shapes. */
static void test_notes_that_do_not_tell(void **state)
{
    static const char fixture[] = "moe_0154_z1_ep2_w4",
                      file[] = "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt";
    static const struct {
        const char *was, *is;
    } changes[] = {{"param_slice_mappings", "-aram_slice_mappings"},
                   {"numel", "-umel"},
                   {"lin.bias", "-in.bias"}};

    for (size_t i = 0; i < ARRAY_SIZE(changes); i++) {
        struct opened o;
        struct made m;

        make(&m, *state, fixture, file);
        copy_changed(&m, *state, fixture, file, changes[i].was, changes[i].is, 1);
        made_open(&m, &o);
        assert_null(o.info.error);
        assert_int_equal(tensor(&o, "emb.weight")->dtype, DTYPE_BF16);
        check_warnings(&o, "no-masters: param_shapes is missing: nothing tells where "
                           "the masters lie\n");
        close_checkpoint(&o);
        made_end(&m);
    }
}

/* Nothing tells which of a rank's groups is which of the first one's. */
static void test_groups_without_shapes(void **state)
{
    static const char fixture[] = "moe_z1_ep1_ep2_w2",
                      model[] = "mp_rank_00_model_states.pt";
    struct made m;
    struct opened o;

    make(&m, *state, fixture, model);
    copy_changed(&m, *state, fixture, model, "param_shapes", "-aram_shapes", 2);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_null(tensor(&o, "emb.weight")->fault);
    check_warnings(&o, "no-masters: param_shapes is missing: nothing tells where the "
                       "masters lie\n");
    close_checkpoint(&o);
    made_end(&m);
}

static void test_stages_are_mixed(void **state)
{
    struct made m;

    make(&m, *state, "z3_bf16_subgroups_w2",
         "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
    copy_as(&m, *state,
            "z2_bf16_aligned_rr_w2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
    check_refused(&m, "is of ZeRO stage 2, others are of 3");
}

static void test_other_sub_groups(void **state)
{
    struct made m;

    make(&m, *state, "z3_bf16_subgroups_w2",
         "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
    copy_as(&m, *state, "z3_fp16_w2/zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
    check_refused(&m, "has 2 groups, the first rank has 3");
}

static void test_model_states_of_a_rank_are_missing(void **state)
{
    struct made m;

    make(&m, *state, "z3_fp32_w3", "zero_pp_rank_2_mp_rank_00_model_states.pt");
    check_refused(&m, "2 files of model states, 3 of optimizer states");
    make(&m, *state, "z3_fp32_w3", "zero_pp_rank_1_mp_rank_00_model_states.pt");
    check_refused(&m, "model states of rank 1 are missing");
}

/* Nobody can tell how slices of tensor-parallel ranks go together. */
static void test_ranks_that_are_no_stages(void **state)
{
    struct made m;

    make(&m, *state, "z1_elastic_w2", NULL);
    copy_as(&m, *state, "z1_elastic_w2/mp_rank_00_model_states.pt",
            "mp_rank_01_model_states.pt");
    check_refused(&m, "2 model-parallel ranks, not 1 stages of 1 ranks");
}

/* Where num_experts does not tell how many experts a layer has, their files do. */
static void test_number_of_experts(void **state)
{
    static const char fixture[] = "moe_frozen_z1_ep2_w2",
                      model[] = "mp_rank_00_model_states.pt";
    struct opened o;
    struct made m;

    make(&m, *state, fixture, model);
    copy_changed(&m, *state, fixture, model, "num_experts", "-um_experts", 1);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 0);
    assert_int_equal(
        tensor(&o, "moe.deepspeed_moe.experts.deepspeed_experts.2.weight")->dtype,
        DTYPE_F32);
    assert_int_equal(
        tensor(&o, "moe.deepspeed_moe.experts.deepspeed_experts.1.weight")->dtype,
        DTYPE_BF16); /* frozen */
    close_checkpoint(&o);
    made_end(&m);
    made_begin(&m, "global_step2");
    copy_as(&m, *state,
            "moe_frozen_z1_ep2_w2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt");
    copy_as(&m, *state,
            "moe_frozen_z1_ep2_w2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
    copy_changed(&m, *state, fixture, model, "num_experts", "-um_experts", 1);
    check_refused(&m, "moe: nothing tells how many experts it has");
}

/* Pieces of tensor-parallel ranks: notes that lack, that do not fit, that are others. */
static void test_notes_of_pieces(void **state)
{
    static const char fixture[] = "tp2_z1_bf16_w4",
                      first[] = "mp_rank_00_model_states.pt";
    static const struct {
        const char *was, *is, *why;
    } saves[] = {
        {"universal_checkpoint_info", "-niversal_checkpoint_info",
         "tensors are in slices of 2 tensor-parallel ranks, and no "
         "universal_checkpoint_info in mp_rank_00_model_states.pt tells"},
        {"parameter_with_row_parallelism_patterns",
         "-arameter_with_row_parallelism_patterns", "tells how they go together"},
        {"\\d+.mlp.dense_4h_to_h.weight", "\\d+.mlp.dense_4h_to_h.weighs",
         "has a pattern that is no parameter's: language_model.encoder.layers."
         "\\d+.mlp.dense_4h_to_h.weighs"},
        {"\\d+.mlp.dense_4h_to_h.weight", "\\w+.mlp.dense_4h_to_h.weight",
         "an escape other than"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(saves); i++) {
        struct made m;

        make(&m, *state, fixture, first);
        copy_changed(&m, *state, fixture, first, saves[i].was, saves[i].is, 1);
        check_refused(&m, saves[i].why);
    }
}

/* What has no noted size is a fault of its own. */
static void test_pieces_that_are_not_told(void **state)
{
    static const char fixture[] = "tp2_z1_bf16_w4",
                      first[] = "mp_rank_00_model_states.pt";
    struct made m;
    struct opened o;

    make(&m, *state, fixture, first);
    copy_changed(&m, *state, fixture, first, "original_vocab_size",
                 "-riginal_vocab_size", 1);
    made_open(&m, &o);
    assert_null(o.info.error);
    check_fault(&o, "language_model.embedding.word_embeddings.weight",
                "the size of the vocabulary is not told");
    assert_null(
        tensor(&o, "language_model.embedding.position_embeddings.weight")->fault);
    close_checkpoint(&o);
    made_end(&m);
}

static void test_tensor_rank_is_missing(void **state)
{
    struct made m;

    make(&m, *state, "tp2_z1_bf16_w4",
         "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt");
    check_refused(&m, "partition_count says 2 files of optimizer states, there are 1");
    make(&m, *state, "tp2_z1_bf16_w4", "mp_rank_00_model_states.pt");
    check_refused(&m, "some of the model states up to mp_rank_01 are missing");
    make(&m, *state, "autotp2_z3_bf16_w4", "zero_pp_rank_1_mp_rank_01_model_states.pt");
    check_refused(&m, "1 files of model states, 2 of optimizer states");
}

static void test_rank_of_a_stage_is_missing(void **state)
{
    struct made m;

    make(&m, *state, "pipe2_z1_w4", "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt");
    check_refused(&m, "partition_count says 2 files of optimizer states, there are 1");
    make(&m, *state, "pipe2_z1_w4", "mp_rank_00_model_states.pt");
    check_refused(&m, "some of the model states up to mp_rank_01 are missing");
}

/* Without the optimizer's files the copy of the model is what there is. */
static void test_only_model_states(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "global_step2");
    copy_as(&m, *state, "z2_bf16_aligned_rr_w2/mp_rank_00_model_states.pt",
            "mp_rank_00_model_states.pt");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "deepspeed-zero0");
    assert_int_equal(tensor(&o, "emb.weight")->dtype, DTYPE_BF16);
    assert_int_equal(tensor(&o, "emb.weight")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "module.emb.weight")->role, ROLE_OTHER);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 12);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 0);
    check_warnings(&o, "no-masters: there are no optimizer states: NAME is what the "
                       "model computed with\n");
    close_checkpoint(&o);
    made_end(&m);
}

static void test_only_placeholders(void **state)
{
    struct made m;

    made_begin(&m, "global_step2");
    copy_as(&m, *state, "z3_fp16_w2/zero_pp_rank_0_mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_model_states.pt");
    check_refused(&m, "1 files of model states, 0 of optimizer states");
}

/* ---- universal checkpoints ---- */

static void test_universal_without_a_file(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "global_step2_universal");
    copy_as(&m, *state, "ucp_z3_bf16_w2/zero_pp_rank_0_mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_model_states.pt");
    copy_as(&m, *state, "ucp_z3_bf16_w2/zero/emb.weight/fp32.pt",
            "zero/emb.weight/fp32.pt");
    copy_as(&m, *state, "ucp_z3_bf16_w2/zero/emb.weight/exp_avg.pt",
            "zero/emb.weight/exp_avg.pt");
    made_text(&m, "zero/emb.weight/exp_avg_sq.pt", "PK\x03\x04 cut");
    made_text(&m, "zero/note.txt", "hello");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "deepspeed-universal");
    assert_null(tensor(&o, "emb.weight")->fault);
    assert_null(tensor(&o, "head.weight")->fault); /* tied to it */
    assert_null(tensor(&o, "optimizer.state.emb.weight.exp_avg")->fault);
    check_fault(&o, "optimizer.state.emb.weight.exp_avg_sq",
                "zero/emb.weight/exp_avg_sq.pt");
    check_fault(&o, "l1.bias", "zero/NAME/fp32.pt is missing");
    check_fault(&o, "frozen.weight", "rank 0 has 33 elements of it, its part has 65");
    check_warnings(&o, "unknown-file: zero/ holds 1 things that are no tensor of a "
                       "parameter\n");
    close_checkpoint(&o);
    made_end(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_left_over_file),
        cmocka_unit_test(test_one_rank_too_many),
        cmocka_unit_test(test_first_rank_is_missing),
        cmocka_unit_test(test_ranks_that_changed_places),
        cmocka_unit_test(test_groups_in_another_order),
        cmocka_unit_test(test_notes),
        cmocka_unit_test(test_notes_of_other_versions),
        cmocka_unit_test(test_notes_that_do_not_tell),
        cmocka_unit_test(test_groups_without_shapes),
        cmocka_unit_test(test_stages_are_mixed),
        cmocka_unit_test(test_other_sub_groups),
        cmocka_unit_test(test_model_states_of_a_rank_are_missing),
        cmocka_unit_test(test_ranks_that_are_no_stages),
        cmocka_unit_test(test_number_of_experts),
        cmocka_unit_test(test_notes_of_pieces),
        cmocka_unit_test(test_pieces_that_are_not_told),
        cmocka_unit_test(test_tensor_rank_is_missing),
        cmocka_unit_test(test_rank_of_a_stage_is_missing),
        cmocka_unit_test(test_only_model_states),
        cmocka_unit_test(test_only_placeholders),
        cmocka_unit_test(test_universal_without_a_file),
    };

    return run_with_fixtures("deepspeed", argc, argv, tests, ARRAY_SIZE(tests));
}
