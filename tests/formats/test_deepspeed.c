/* SPDX-License-Identifier: MIT */
/* tests/formats/test_deepspeed.c - DeepSpeed's saves: what is lost, left over, or refused. */
#include "edited.h"

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

/* ---- files of the optimizer that are lost ---- */

static void read_bytes(struct opened *o, const char *key, struct buf *out)
{
    const struct tensor_info *t = tensor(o, key);
    struct err e = {0};

    if (t->fault)
        fail_msg("%s: %s", key, t->fault);
    assert_ok(read_tensor(&o->w, o->info.id, t, out, &e), &e);
}

/* NAME is the same as module.NAME, which the model computed with. */
static void check_copy(struct opened *o, const char *name)
{
    CLEANUP(buf_release) struct buf model = {0}, copy = {0};
    char key[64];

    snprintf(key, sizeof key, "module.%s", name);
    assert_int_equal(tensor(o, name)->role, ROLE_MODEL);
    assert_int_equal(tensor(o, name)->dtype, DTYPE_BF16);
    assert_int_equal(tensor(o, key)->role, ROLE_OTHER);
    read_bytes(o, name, &model);
    read_bytes(o, key, &copy);
    assert_int_equal(model.len, copy.len);
    assert_memory_equal(model.data, copy.data, copy.len);
}

static void remove_in(const struct made *m, const char *name)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", m->dir, name);
    assert_int_equal(remove(path), 0);
}

/* Files of ranks from `first` to `last` are lost: what the model computed with is the model. */
static void check_lost(void **state, const char *fixture, int first, int last,
                       const char *why)
{
    static const char *const names[] = {"emb.weight", "l1.weight", "l2.bias"};
    CLEANUP(buf_release) struct buf warning = {0};
    char name[80];
    struct opened o;
    struct made m;

    make(&m, *state, fixture, NULL);
    for (int r = first; r <= last; r++) {
        snprintf(name, sizeof name, "bf16_zero_pp_rank_%d_mp_rank_00_optim_states.pt",
                 r);
        remove_in(&m, name);
    }
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 0);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 0);
    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        check_copy(&o, names[i]);
    buf_addf(&warning,
             "lost-files: %s: the fp32 weights and the optimizer's states are lost "
             "with it; the model is the copy that it computed with\n",
             why);
    check_warnings(&o, warning.data);
    close_checkpoint(&o);
    made_end(&m);
}

static void test_ranks_are_missing(void **state)
{
    check_lost(state, "z1_bf16_gradfp32_w2", 1, 1,
               "partition_count says 2 files of optimizer states, there are 1; rank 1 "
               "of mp_rank_00 is missing");
    check_lost(state, "z1_bf16_gradfp32_w2", 0, 0,
               "rank 0 of the optimizer's files is missing (mp_rank_00)");
    check_lost(state, "z2_bf16_padded_w8", 3, 7,
               "partition_count says 8 files of optimizer states, there are 3; rank 3 "
               "to 7 of mp_rank_00 is missing");
}

/* A parameter that has no copy either is lost, and listed. */
static void test_a_copy_that_lacks_a_parameter(void **state)
{
    static const char fixture[] = "z1_bf16_gradfp32_w2",
                      model[] = "mp_rank_00_model_states.pt";
    struct opened o;
    struct made m;

    make(&m, *state, fixture, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
    copy_changed(&m, *state, fixture, model, "l1.weightq2", "l7.weightq2", 1);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 1);
    check_fault(&o, "l1.weight", "rank 1 of mp_rank_00 is missing");
    check_copy(&o, "emb.weight");
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- groups, and optimizers of stages ---- */

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

/* Without ZeRO each stage of a pipeline has its optimizer in its own model states. */
static void test_optimizers_of_stages(void **state)
{
    static const char fixture[] = "z0_fp32_w2", first[] = "mp_rank_00_model_states.pt",
                      second[] = "mp_rank_01_model_states.pt";
    CLEANUP(buf_release) struct buf objects = {0};
    const struct tensor_info *t;
    char from[PATH_MAX];
    struct temp dir = {0};
    struct opened o;
    struct made m;

    make(&m, *state, fixture, first);
    snprintf(dir.dir, sizeof dir.dir, "%s", m.dir);
    snprintf(from, sizeof from, "%s/%s/%s", (const char *)*state, fixture, first);
    put_changed(&dir, first, from, "pp_degree", "-p_degree"); /* it says one stage */
    put_changed(&dir, second, from, "pp_degree", "-p_degree");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(tensor(&o, "optimizer.state.0.exp_avg")->role, ROLE_OPTIMIZER);
    t = tensor(&o, "mp_rank_01_model_states.pt:optimizer.state.0.exp_avg");
    assert_int_equal(t->role, ROLE_OPTIMIZER);
    assert_null(t->fault);
    all_objects(&o, &objects);
    assert_has(objects.data, "mp_rank_01_model_states.pt:optimizer={\"state\":");
    assert_has(objects.data,
               "\"key\":\"mp_rank_01_model_states.pt:optimizer.state.0.exp_avg\"");
    close_checkpoint(&o);
    made_end(&m);
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

/*
 * Some rank's notes are gone, or do not fit to the model's shapes, or an element of
 * lin.weight is in neither order what the model computed with.
 */
static void test_notes_that_do_not_tell(void **state)
{
    static const char moe[] = "moe_0154_z1_ep2_w4",
                      rank[] = "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt";
    static const struct {
        const char *fixture, *file, *was, *is;
    } changes[] = {{moe, rank, "param_slice_mappings", "-aram_slice_mappings"},
                   {moe, rank, "numel", "-umel"},
                   {moe, rank, "lin.bias", "-in.bias"},
                   {"moe_0169_z2_rr_w2", "mp_rank_00_model_states.pt",
                    "\x1e\xbd\x11\x3d", "\x1e\xbd\x12\x3d"}};

    for (size_t i = 0; i < ARRAY_SIZE(changes); i++) {
        struct opened o;
        struct made m;

        make(&m, *state, changes[i].fixture, changes[i].file);
        copy_changed(&m, *state, changes[i].fixture, changes[i].file, changes[i].was,
                     changes[i].is, 1);
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

/* An optimizer on NVMe is saved without what was swapped out, and with a folder of that. */
static void test_swapped_out(void **state)
{
    static const char fixture[] = "z3_frozen_codes_w2",
                      first[] = "zero_pp_rank_0_mp_rank_00_model_states.pt";
    struct made m;

    for (int nvme = 0; nvme < 2; nvme++) {
        make(&m, *state, fixture, first);
        copy_as(&m, *state, "z3_fp16_w2/zero_pp_rank_0_mp_rank_00_model_states.pt",
                first);
        if (nvme)
            made_text(&m, "offloaded_tensors/rank0/0_1.tensor.swp", "");
        check_refused(&m, nvme ? "an optimizer on NVMe (offloaded_tensors)"
                               : "elements of each rank, there are");
    }
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

/* A tied module's layer is told by its tensors, where only one layer has such. */
static void test_tied_layers(void **state)
{
    static const char *const folders[] = {"pipe2_z1_w4", "pipe2_tied_z1_bf16_w4"};
    struct made m;
    struct opened o;

    for (size_t i = 0; i < ARRAY_SIZE(folders); i++) {
        make(&m, *state, folders[i], NULL);
        made_open(&m, &o);
        assert_int_equal(tensor(&o, "tied_modules.embed.weight")->role, ROLE_MODEL);
        assert_int_equal(tensor(&o, "layer_00/weight")->role, ROLE_OTHER);
        close_checkpoint(&o);
        made_end(&m);
    }
    make(&m, *state, "pipe2_tied_z1_bf16_w4", NULL);
    copy_as(&m, *state, "pipe2_tied_z1_bf16_w4/layer_00-model_states.pt",
            "layer_07-model_states.pt");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(tensor(&o, "layer_00/weight")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "layer_07/weight")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "layer_07/tb")->role, ROLE_MODEL);
    close_checkpoint(&o);
    made_end(&m);
    make(&m, *state, "pipe2_tied_z1_bf16_w4", "layer_00-model_states.pt");
    copy_as(&m, *state, "pipe2_z1_w4/layer_02-model_states.pt",
            "layer_00-model_states.pt");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(tensor(&o, "layer_00/weight")->role, ROLE_MODEL);
    close_checkpoint(&o);
    made_end(&m);
}

/*
 * What is frozen in a layer with something of its own number is N.KEY; a layer that is
 * frozen as a whole keeps its file's name, as it may be a tied module.
 */
static void test_frozen_layers(void **state)
{
    struct made m;
    struct opened o;

    make(&m, *state, "pipe2_frozen_z1_w2", NULL);
    made_open(&m, &o);
    assert_int_equal(tensor(&o, "1.w.weight")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "layer_01/w.weight")->role, ROLE_OTHER);
    assert_int_equal(tensor(&o, "2.w.weight")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "layer_02/w.weight")->role, ROLE_OTHER);
    assert_int_equal(tensor(&o, "layer_03/weight")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "layer_00/weight")->role, ROLE_MODEL);
    close_checkpoint(&o);
    made_end(&m);
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

/* A parameter's state that is lost is told by what the others have. */
static void test_universal_without_a_state(void **state)
{
    struct made m;
    struct opened o;

    make(&m, *state, "ucp_z1_bf16_w2", NULL);
    made_open(&m, &o);
    check_warnings(&o, "");
    close_checkpoint(&o);
    remove_in(&m, "zero/l1.bias/step.pt");
    remove_in(&m, "zero/norm.bias/step.pt");
    remove_in(&m, "zero/l2.bias/exp_avg.pt");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_warnings(&o, "missing-file: zero/l1.bias has no step.pt, which other "
                       "parameters with its other states have\n"
                       "missing-file: zero/l2.bias has no exp_avg.pt, which other "
                       "parameters with its other states have\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- checks of what the files say ---- */

#define ELASTIC "z1_elastic_w2", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
#define ELASTIC_1 "z1_elastic_w2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
#define ELASTIC_MODEL "z1_elastic_w2", "mp_rank_00_model_states.pt"
#define SUBGROUPS "z3_fp16_w2", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
#define Z3_MODEL "z3_fp16_w2", "zero_pp_rank_0_mp_rank_00_model_states.pt"
#define TP_MODEL "tp2_z1_bf16_w4", "mp_rank_00_model_states.pt"
#define PIPE_MODEL "pipe2_z1_w4", "mp_rank_00_model_states.pt"
#define AUTOEP_MODEL "autoep2_z2_w4", "mp_rank_00_model_states.pt"

/* Groups and counts that the optimizer's files tell. */
static const struct edited optim_rows[] = {
    {ELASTIC, EDIT("optimizer_state_dict", "xptimizer_state_dict"), NULL,
     "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt has no optimizer_state_dict", NULL,
     NULL},
    {ELASTIC, EDIT("ZeroStageEnum\nqOK\1", "ZeroStageEnum\nqON"), NULL,
     "zero_stage is no number", NULL, NULL},
    {ELASTIC, EDIT("ZeroStageEnum\nqOK\1", "ZeroStageEnum\nqOK\0"), NULL,
     "ZeRO stage 0 is not supported", NULL, NULL},
    {ELASTIC, EDIT("single_partition_of", "-ingle_partition_of"), NULL,
     "optimizer_state_dict has no single_partition_of_fp32_groups", NULL, NULL},
    {ELASTIC,
     EDIT("\37\0\0\0single_partition_of_fp32_groups",
          "\43\0\0\0local_sub_partitions_of_fp32_groups"),
     NULL, "ZeRO 1 in sub-partitions (DeepSpeed until 0.3.16) is not supported", NULL,
     NULL},
    {ELASTIC, EDIT("\16\0\0\0group_paddings", "\30\0\0\0ds_zero_partition_groups"),
     NULL, "groups that are partitioned over different ranks (AutoEP)", NULL, NULL},
    {ELASTIC, EDIT("partition_count", "-artition_count"), NULL,
     "optimizer_state_dict has no partition_count", NULL, NULL},
    {ELASTIC, EDIT("]qY(K\2K\2e", "]qY(K\2e"), NULL,
     "rank_0_mp_rank_00_optim_states.pt: partition_count is of 1 groups, not 2", NULL,
     NULL},
    {ELASTIC, EDIT("]qY(K\2K\2e", "]qY(K\2K\0e"), NULL,
     "rank_0_mp_rank_00_optim_states.pt: partition_count is no count", NULL, NULL},
    {ELASTIC_1, EDIT("]qY(K\2K\2e", "]qY(K\2K\2K\2e"), NULL,
     "rank_1_mp_rank_00_optim_states.pt: partition_count is of 3 groups, not 2", NULL,
     NULL},
    {ELASTIC_1, EDIT("]qY(K\2K\2e", "]qY(K\2Ne"), NULL,
     "rank_1_mp_rank_00_optim_states.pt: partition_count is no count", NULL, NULL},
    {ELASTIC, EDIT("K\0K$\205qI", "K\0K%\205qI"), NULL,
     "rank_0_mp_rank_00_optim_states.pt: group 1: ", NULL, NULL},
    {ELASTIC, EDIT("K\0K$\205qIK\1\205", "K\0K\4K\11\206qIK\11K\1\206"), NULL,
     "group 1 is no tensor of one dimension", NULL, NULL},
    {ELASTIC, EDIT("K\0K$\205q2K\1\205", "K\0K\4K\11\206q2K\11K\1\206"), EDITED_WARNS,
     "flat-state: ", NULL, NULL},
    {"z3_bf16_subgroups_w2", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
     EDIT("(K\0}q\23(X\4\0\0\0step", "(K\177}q\23(X\4\0\0\0step"), EDITED_WARNS,
     "lost-states: 1 of ", NULL, NULL},
};

/* Where the groups' elements lie. */
static const struct edited layout_rows[] = {
    {ELASTIC, EDIT("]qU(]qV(K\0K\0K\0e", "]qU(]qV(K\0K\0e"), NULL,
     "param_alignment_paddings of group 0 is not of its 3 parameters", NULL, NULL},
    {ELASTIC, EDIT("]qV(K\0K\0K\0e", "K\0"), NULL,
     "param_alignment_paddings of group 0 is not of its 3 parameters", NULL, NULL},
    {ELASTIC, EDIT("]qV(K\0K\0K\0e", ""), NULL,
     "param_alignment_paddings is not of 2 groups", NULL, NULL},
    {ELASTIC, EDIT("]qV(K\0", "]qV(J\377\377\377\377"), NULL,
     "a padding of group 0 is no count", NULL, NULL},
    {ELASTIC,
     EDIT("]qV(K\0K\0K\0e",
          "]qV(\212\10\377\377\377\377\377\377\377\177\212\10\377\377\377\377\377\377"
          "\377\177\212\10\377\377\377\377\377\377\377\177e"),
     NULL, "group 0 has more than 2^64 elements", NULL, NULL},
    {ELASTIC_MODEL,
     EDIT("ueX\23\0\0\0frozen_param_shapes", "u}eX\23\0\0\0frozen_param_shapes"), NULL,
     "2 groups of weights, param_shapes has 3", NULL, NULL},
    {"moe_z2_ep2_w4", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
     EDIT("]qr(K\4K\2e", "]qr(K\3K\4e"), NULL,
     "group 0 is in 3 partitions, there are 4 ranks", NULL, NULL},
    {ELASTIC, EDIT("emb.weight", "emb.weighs"), NULL,
     "param_slice_mappings of group 0: \"emb.weighs\" is not in its param_shapes", NULL,
     NULL},
    {ELASTIC, EDIT("numelqcM\341\1", "numelqcM\340\1"), NULL,
     "param_slice_mappings: emb.weight is noted at 0 to 480 of the partition, it lies "
     "at 0 to 481",
     NULL, NULL},
    {ELASTIC_1, EDIT("torch\nFloatStorage", "torch\nIntStorage"), NULL,
     "rank_1_mp_rank_00_optim_states.pt: group 0 is I32, on the first rank F32", NULL,
     NULL},
    {"moe_z2_ep2_w4", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
     EDIT_AT("K\0K\204\205", "K\0K\203\205", 2), NULL,
     "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt: the partition of group 0 has "
     "131 elements, that of bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt 132",
     NULL, NULL},
    {SUBGROUPS, EDIT("M\351\1\205", "M\350\1\205"), NULL,
     "rank_1_mp_rank_00_optim_states.pt: sub-group 0 has 488 elements, on the first "
     "rank 489",
     NULL, NULL},
    {SUBGROUPS, EDIT("torch\nFloatStorage", "torch\nIntStorage"), NULL,
     "rank_1_mp_rank_00_optim_states.pt: group 0 is I32, on the first rank F32", NULL,
     NULL},
    {Z3_MODEL, EDIT("torch\nSize\nq\202K%", "torch\nSize\nq\202K&"), NULL,
     "elements of each rank, there are", NULL, NULL},
    {Z3_MODEL,
     EDIT("torch\nSize\nq\202K%K\r\206",
          "torch\nSize\nq\202\212\10\377\377\377\377\377\377\377\177\205"),
     NULL, "elements of each rank, there are", NULL, NULL},
};

#define VOCABULARY "\21\0\0\0padded_vocab_sizer\257\1\0\0K\20"
#define AFFINE(more) "\12\0\0\0affine_mapr\257\1\0\0}" more "s"

/* What the model states tell. */
static const struct edited model_rows[] = {
    {ELASTIC_MODEL, EDIT_AT("u.", "u\205.", EDIT_LAST), NULL,
     "mp_rank_00_model_states.pt: the object is no dict", NULL, NULL},
    {ELASTIC_MODEL,
     EDIT("ueX\23\0\0\0frozen_param_shapes", "uNeX\23\0\0\0frozen_param_shapes"), NULL,
     "param_shapes: group 2 is no dict", NULL, NULL},
    {ELASTIC_MODEL, EDIT_AT("X\12\0\0\0emb.weight", "K\1", 1), NULL,
     "param_shapes: a parameter's name is no text", NULL, NULL},
    {ELASTIC_MODEL, EDIT_AT("\7\0\0\0l1.bias", "\11\0\0\0l1.weight", 1), NULL,
     "param_shapes: l1.weight is there twice", NULL, NULL},
    {ELASTIC_MODEL, EDIT("\15\0\0\0skipped_steps", "\7\0\0\0folding"), NULL,
     "mp_rank_00_model_states.pt: AutoEP folded with AutoTP is not supported", NULL,
     NULL},
    {ELASTIC_MODEL, EDIT_AT("\13\0\0\0head.weight", "\11\0\0\0l1.weight", EDIT_LAST),
     NULL,
     "mp_rank_00_model_states.pt: shared_params: l1.weight is a parameter of its own",
     NULL, NULL},
    {ELASTIC_MODEL, EDIT("X\3\0\0\0pos", "K\1"), NULL,
     "mp_rank_00_model_states.pt: a name of the module is no text", NULL, NULL},
    {AUTOEP_MODEL, EDIT("(K\0K\1eu}", "(K\1K\0eu}"), NULL,
     "model.layers.0.mlp.experts.w1: experts in another order than the ranks' are not "
     "supported",
     NULL, NULL},
    {AUTOEP_MODEL, EDIT("ep_sizeq\263K\2", "ep_sizeq\263K\1"), NULL,
     "ds_autoep_layers has other experts than those of its ranks", NULL, NULL},
    {AUTOEP_MODEL, EDIT("num_local_experts", "num_local_expertz"), NULL,
     "ds_autoep_layers does not tell the number of its experts", NULL, NULL},
    {AUTOEP_MODEL, EDIT("expert_key_prefix", "expert_key_prefiy"), NULL,
     "only some ranks share it, and it is no expert of DeepSpeed's MoE layer", NULL,
     NULL},
    {"pipe2_z1_w4", "mp_rank_01_model_states.pt", EDIT("K\25K\12\206", "K\12K\25\206"),
     NULL,
     "mp_rank_01_model_states.pt: tied_modules.embed.weight has another shape on "
     "another rank",
     NULL, NULL},
    {"pipe2_z1_w4", "layer_00-model_states.pt", EDIT_AT(".", "\205.", EDIT_LAST), NULL,
     "layer_00-model_states.pt: the object is no dict", NULL, NULL},
    {TP_MODEL,
     EDIT("X\70\0\0\0language_model.encoder.layers.\\d+.mlp.dense_h_to_4h.bias", "K\1"),
     NULL, "parameter_with_2_sub_params_cat_dim_0: a pattern is no text", NULL, NULL},
    {TP_MODEL,
     EDIT("\21\0\0\0padded_vocab_size", "\35\0\0\0parameter_to_average_patterns"), NULL,
     "parameter_to_average_patterns is no list", NULL, NULL},
    {TP_MODEL, EDIT("\21\0\0\0padded_vocab_size", "\31\0\0\0parameter_with_sub_params"),
     NULL, "parameter_with_sub_params is no list", NULL, NULL},
    {TP_MODEL,
     EDIT("\45\0\0\0parameter_with_2_sub_params_cat_dim_0",
          "\31\0\0\0parameter_with_sub_params"),
     NULL, "parameter_with_sub_params has no patterns", NULL, NULL},
    {TP_MODEL, EDIT(VOCABULARY, AFFINE("X\7\0\0\0versionK\11")), NULL,
     "affine_map is of a version that is not known", NULL, NULL},
    {TP_MODEL, EDIT(VOCABULARY, AFFINE("X\7\0\0\0versionK\1")), NULL,
     "affine_map has no params", NULL, NULL},
    {TP_MODEL, EDIT(VOCABULARY, AFFINE("X\6\0\0\0paramsK\1")), NULL,
     "affine_map: it is no dict", NULL, NULL},
};

/* States of single tensors. */
static const struct edited state_rows[] = {
    {ELASTIC_1, EDIT("K\0K#\205q2K\1\205", "K\0K\5K\7\206q2K\7K\1\206"),
     "optimizer.state.l2.bias.exp_avg",
     "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt: group 1 has no exp_avg", NULL,
     NULL},
    {ELASTIC_1, EDIT("K\0K#\205q2", "K\0K\42\205q2"), "optimizer.state.l2.bias.exp_avg",
     "rank_1_mp_rank_00_optim_states.pt: exp_avg of group 1 is 34 elements of F32, which "
     "is too short or another type",
     NULL, NULL},
    {"tp2_z1_bf16_w4", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt",
     EDIT("exp_avg", "exp_avh"), NULL, "mp_rank_01 has other states than mp_rank_00",
     NULL, NULL},
};

/* Which files there are. */
static const struct edited file_rows[] = {
    {SUBGROUPS, EDIT("", ""), NULL, "mp_rank_01 has no model states",
     "zero_pp_rank_0_mp_rank_01_optim_states.pt", NULL},
    {"z1_elastic_w2", "mp_rank_00_model_states.pt", EDIT("", ""), NULL,
     "there are no model states, only optimizer states", "readme", "model_states"},
    {TP_MODEL,
     EDIT("pp_degreer\225\1\0\0K\1X\11\0\0\0tp_degreer\226\1\0\0K\2",
          "-p_degreer\225\1\0\0K\1X\11\0\0\0tp_degreer\226\1\0\0K\3"),
     NULL, "2 model-parallel ranks are no stages of 3 tensor-parallel ranks", NULL,
     NULL},
    {PIPE_MODEL, EDIT("pp_degreeq-K\2", "pp_degreeq-K\3"), NULL,
     "2 model-parallel ranks, not 3 stages of 1 ranks", NULL, NULL},
    {PIPE_MODEL, EDIT("mp_world_sizeq*K\2", "mp_world_sizeq*K\3"), NULL,
     "3 model-parallel ranks saved, there are files of 2", NULL, NULL},
    {TP_MODEL, EDIT("", ""), NULL,
     "experts on 2 model-parallel ranks are not supported",
     "layer_0_expert_0_mp_rank_00_model_states.pt", NULL},
    {"moe_z0_ep2_w4", "layer_0_expert_0_mp_rank_00_model_states.pt",
     EDIT_AT("u.", "u\205.", EDIT_LAST), NULL,
     "layer_0_expert_0_mp_rank_00_model_states.pt: the object is no dict", NULL, NULL},
    {"pipe2_z1_w4", "mp_rank_00_model_states.pt", EDIT("", ""), NULL,
     "mp_rank_01 has no optimizer states", NULL, "mp_rank_01_optim_states"},
    {ELASTIC_MODEL, EDIT("", ""), NULL,
     "zero_pp_rank_0_mp_rank_00_model_states.pt: not the model states of stage 1",
     "zero_pp_rank_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt"},
    {Z3_MODEL, EDIT("param_shapes", "-aram_shapes"), NULL,
     "zero_pp_rank_0_mp_rank_00_model_states.pt has no param_shapes", NULL, NULL},
    {"z1_elastic_w2", "../../torch_file/legacy_proto3/m.th", EDIT("", ""), NULL,
     "mp_rank_01_model_states.pt-0.2: torch's old format by 2 writers is not supported",
     "mp_rank_01_model_states.pt-0.2", NULL},
    {ELASTIC_MODEL, EDIT("", ""), EDITED_WARNS,
     "unknown-file: 1 files of states are not DeepSpeed's (mp_rank_zz_model_states.pt)",
     "mp_rank_zz_model_states.pt", NULL},
};

static void test_edited(void **state)
{
    check_edited(*state, optim_rows, ARRAY_SIZE(optim_rows));
    check_edited(*state, layout_rows, ARRAY_SIZE(layout_rows));
    check_edited(*state, model_rows, ARRAY_SIZE(model_rows));
    check_edited(*state, state_rows, ARRAY_SIZE(state_rows));
    check_edited(*state, file_rows, ARRAY_SIZE(file_rows));
}

/*
 * Stage 3 keeps frozen parameters as codes if it is told to, and saves them without their
 * scales. A parameter that is of 8-bit integers itself is as it was.
 */
static void test_frozen_codes(void **state)
{
    static const char fixture[] = "z3_frozen_codes_w2",
                      first[] = "zero_pp_rank_0_mp_rank_00_model_states.pt";
    struct opened o;
    struct made m;

    make(&m, *state, fixture, NULL);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 1);
    check_fault(&o, "0.weight", "it is quantised, and its scales were not saved");
    assert_null(tensor(&o, "1.weight")->fault);
    close_checkpoint(&o);
    made_end(&m);

    make(&m, *state, fixture, first);
    copy_changed(&m, *state, fixture, first, "zero_quantized_nontrainable_weights",
                 "zero_quantized_nontrainable_weightz", 1);
    made_open(&m, &o);
    assert_int_equal(o.info.faults, 0);
    assert_int_equal(tensor(&o, "0.weight")->dtype, DTYPE_I8);
    close_checkpoint(&o);
    made_end(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_left_over_file),
        cmocka_unit_test(test_one_rank_too_many),
        cmocka_unit_test(test_first_rank_is_missing),
        cmocka_unit_test(test_ranks_are_missing),
        cmocka_unit_test(test_a_copy_that_lacks_a_parameter),
        cmocka_unit_test(test_ranks_that_changed_places),
        cmocka_unit_test(test_groups_in_another_order),
        cmocka_unit_test(test_optimizers_of_stages),
        cmocka_unit_test(test_notes),
        cmocka_unit_test(test_notes_of_other_versions),
        cmocka_unit_test(test_notes_that_do_not_tell),
        cmocka_unit_test(test_groups_without_shapes),
        cmocka_unit_test(test_stages_are_mixed),
        cmocka_unit_test(test_other_sub_groups),
        cmocka_unit_test(test_swapped_out),
        cmocka_unit_test(test_model_states_of_a_rank_are_missing),
        cmocka_unit_test(test_ranks_that_are_no_stages),
        cmocka_unit_test(test_number_of_experts),
        cmocka_unit_test(test_notes_of_pieces),
        cmocka_unit_test(test_pieces_that_are_not_told),
        cmocka_unit_test(test_tensor_rank_is_missing),
        cmocka_unit_test(test_rank_of_a_stage_is_missing),
        cmocka_unit_test(test_tied_layers),
        cmocka_unit_test(test_frozen_layers),
        cmocka_unit_test(test_only_model_states),
        cmocka_unit_test(test_only_placeholders),
        cmocka_unit_test(test_universal_without_a_file),
        cmocka_unit_test(test_universal_without_a_state),
        cmocka_unit_test(test_frozen_codes),
        cmocka_unit_test(test_edited),
    };

    return run_with_fixtures("deepspeed", argc, argv, tests, ARRAY_SIZE(tests));
}
