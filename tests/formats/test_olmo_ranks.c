/* SPDX-License-Identifier: MIT */
/* tests/formats/test_olmo_ranks.c - OLMo's types local and torch_legacy: merged, missing, changed. */
#include "edited.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "index/formats/format.h"
#include "index/view.h"
#include "temp_tree.h"
#include "tests/unit/unit.h"

extern const struct format_driver format_olmo_ranks;

/* ---- copies of fixtures ---- */

static void path_of(void **state, const char *fixture, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/%s", (const char *)*state, fixture);
}

static void expected_of(void **state, const char *fixture, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/%s.expected.json", (const char *)*state, fixture);
}

/* A file a rank of that folder of a fixture ("": its own), but for one rank. */
static void copy_ranks(void **state, const struct temp *t, const char *fixture,
                       const char *dir, int world, int without)
{
    char from[PATH_MAX], name[64];

    path_of(state, fixture, from);
    for (int r = 0; r < world; r++) {
        snprintf(name, sizeof name, "%s%srank%d.pt", dir, *dir ? "/" : "", r);
        if (r != without)
            put_copy(t, name, from, NULL, NULL, 0);
    }
}

/* local_w3 without the files of one rank. */
static void copy_local(void **state, const struct temp *t, int without)
{
    put_text(t, "metadata.yaml", "world_size: 3\n");
    copy_ranks(state, t, "local_w3", "model", 3, without);
    copy_ranks(state, t, "local_w3", "optim", 3, without);
}

/* Opens it, and holds what can be read against the fixture it was made of. */
static void open_copy(void **state, const struct temp *t, const char *fixture,
                      struct opened *o)
{
    char path[PATH_MAX];

    open_checkpoint(t->dir, o);
    assert_null(o->info.error);
    expected_of(state, fixture, path);
    check_readable(o, path);
}

/* ---- roles ---- */

static void test_roles(void **state)
{
    static const char *const names[] = {"local_w3", "legacy_w3"};
    char path[PATH_MAX];
    struct opened o;

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        const struct tensor_info *t;

        path_of(state, names[i], path);
        open_checkpoint(path, &o);
        t = tensor(&o, "transformer.wte.weight");
        assert_int_equal(t->role, ROLE_MODEL);
        assert_null(t->part);
        t = tensor(&o, "state.transformer.wte.weight.exp_avg");
        assert_int_equal(t->role, ROLE_OPTIMIZER);
        assert_string_equal(t->part, "optim");
        assert_int_equal(o.info.step, 6); /* of the trainer */
        close_checkpoint(&o);
    }
}

/* ---- missing and damaged ---- */

static void test_missing_rank(void **state)
{
    struct opened o;
    struct temp t;

    temp_make(&t, "step9");
    copy_local(state, &t, 1);
    open_copy(state, &t, "local_w3", &o);
    assert_int_equal(o.count, 56);
    assert_int_equal(o.info.step, 9); /* no trainer's state: of the folder */
    check_fault(&o, "transformer.wte.weight",
                "parts of it are in 1 of 3 ranks' files that are missing");
    check_fault(&o, "state.transformer.wte.weight.exp_avg",
                "parts of it are in 1 of 3 ranks' files that are missing");
    assert_null(tensor(&o, "transformer.blocks.1.ff_out.weight")->fault);
    check_warnings(&o, "missing-file: 1 of 3 ranks' files are missing beside "
                       "model/rank0.pt\n"
                       "missing-file: 1 of 3 ranks' files are missing beside "
                       "optim/rank0.pt\n");
    close_checkpoint(&o);
    temp_remove(&t);
}

/* The last rank is one that nothing but metadata.yaml tells of. */
static void test_missing_last(void **state)
{
    struct opened o;
    struct temp t;

    temp_make(&t, "step9");
    copy_local(state, &t, 2);
    open_copy(state, &t, "local_w3", &o);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 14);
    check_fault(&o, "transformer.wte.weight", "1 of 3 ranks' files");
    close_checkpoint(&o);
    temp_remove(&t);
}

static void test_damaged_rank(void **state)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct opened o;
    struct temp t;

    temp_make(&t, "step9");
    copy_local(state, &t, 1);
    put_text(&t, "model/rank1.pt", "PK\3\4 and nothing else");
    put_text(&t, "optim/rank1.pt", "PK\3\4 and nothing else");
    open_copy(state, &t, "local_w3", &o);
    check_fault(&o, "transformer.wte.weight",
                "1 of 3 ranks' files that are missing or damaged, as model/rank1.pt");
    all_warnings(&o, &text);
    assert_has(text.data, "damaged-file: model/rank1.pt: ");
    close_checkpoint(&o);
    temp_remove(&t);
}

/* A rank's moments have no place without its file of the model: none is shown as merged. */
static void test_model_of_rank_missing(void **state)
{
    const struct tensor_info *t;
    struct opened o;
    struct temp tmp;

    temp_make(&tmp, "step9");
    put_text(&tmp, "metadata.yaml", "world_size: 3\n");
    copy_ranks(state, &tmp, "local_w3", "model", 3, 0);
    copy_ranks(state, &tmp, "local_w3", "optim", 3, -1);
    open_checkpoint(tmp.dir, &o);
    assert_null(o.info.error);
    t = tensor(&o, "state.transformer.wte.weight.exp_avg");
    assert_non_null(t->fault);
    close_checkpoint(&o);
    temp_remove(&tmp);
}

static void test_legacy_missing(void **state)
{
    char path[PATH_MAX];
    struct opened o;
    struct temp t;

    path_of(state, "legacy_w3", path);
    temp_make(&t, "step9");
    put_copy(&t, "config.yaml", path, NULL, NULL, 0);
    copy_ranks(state, &t, "legacy_w3", "", 3, 0);
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "olmo-torch-legacy");
    assert_int_equal(o.info.by_role[ROLE_MODEL], 8);
    check_fault(&o, "transformer.wte.weight", "1 of 3 ranks' files");
    close_checkpoint(&o);
    temp_remove(&t);
}

/* ---- the number of ranks ---- */

static void test_world(void **state)
{
    struct opened o;
    struct temp t;

    temp_make(&t, "step9");
    copy_local(state, &t, -1);
    put_text(&t, "metadata.yaml", "world_size: 2\n");
    open_checkpoint(t.dir, &o);
    assert_has(o.info.error,
               "metadata.yaml tells of 2 ranks, and there is a file of rank 2");
    assert_string_equal(o.info.format, "olmo-local");
    close_checkpoint(&o);
    put_text(&t, "metadata.yaml", "world_size: many\n");
    open_copy(state, &t, "local_w3", &o);
    assert_int_equal(o.info.faults, 0);
    check_warnings(&o, "damaged-file: metadata.yaml does not tell how many ranks there "
                       "are: 3 by the files\n");
    close_checkpoint(&o);
    temp_remove(&t);
}

/* ---- changed ---- */

/* Some bytes of model/rank1.pt are others: what is told of that file. */
static void check_changed(void **state, const char *was, const char *is, size_t times,
                          const char *why)
{
    CLEANUP(buf_release) struct buf text = {0};
    char from[PATH_MAX];
    struct opened o;
    struct temp t;

    path_of(state, "local_w3", from);
    temp_make(&t, "step9");
    copy_local(state, &t, 1);
    put_copy(&t, "model/rank1.pt", from, was, is, times);
    open_copy(state, &t, "local_w3", &o);
    all_warnings(&o, &text);
    assert_has(text.data, why);
    assert_non_null(tensor(&o, "transformer.wte.weight")->fault);
    close_checkpoint(&o);
    temp_remove(&t);
}

static void test_changed(void **state)
{
    check_changed(state, "flat_param._fqns", "flat_param._fqnz", 3,
                  "a flat parameter without names and shapes");
    check_changed(state, "flat_param._shard_param_infos",
                  "flat_param._shard_param_infoz", 3,
                  "a flat parameter that does not tell which elements a rank has");
    check_changed(state, "flat_param.data", "flat_param.dato", 1,
                  "a flat parameter without its data or its padding");
    check_changed(state, "modules", "modulos", 1, "it holds no list of modules");
    check_changed(state, "handles", "handlez", 1, "a module without its handles");
}

/* Groups without names: the moments are each rank's own. */
static void test_unnamed(void **state)
{
    char from[PATH_MAX];
    struct opened o;
    struct temp t;

    path_of(state, "local_w3", from);
    temp_make(&t, "step9");
    put_text(&t, "metadata.yaml", "world_size: 3\n");
    copy_ranks(state, &t, "local_w3", "model", 3, -1);
    for (int r = 0; r < 3; r++) {
        char name[32];

        snprintf(name, sizeof name, "optim/rank%d.pt", r);
        put_copy(&t, name, from, "param_names", "param_namez", 1);
    }
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 0);
    assert_int_equal(tensor(&o, "optim/rank1.pt:state.0.exp_avg")->role,
                     ROLE_OPTIMIZER);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 14);
    close_checkpoint(&o);
    temp_remove(&t);
}

/* OLMo 0.2.5 with torch 2.2: all flat parameters are the root's. */
static void test_several_handles(void **state)
{
    char path[PATH_MAX];
    struct opened o;

    path_of(state, "refused_025_w2", path);
    open_checkpoint(path, &o);
    assert_has(o.info.error, "a module with several flat parameters");
    assert_string_equal(o.info.format, "olmo-local");
    assert_int_equal(o.count, 0);
    close_checkpoint(&o);
}

/* A few kilobytes that are 180,000 parameters: one module by 3,000 references. */
static void test_bomb(void **state)
{
    char path[PATH_MAX];
    struct opened o;

    path_of(state, "refused_bomb_w1", path);
    open_checkpoint(path, &o);
    assert_has(o.info.error, "too many parameters for its size");
    close_checkpoint(&o);
}

/* ---- bids ---- */

static void test_bids(void **state)
{
    char from[PATH_MAX];
    struct temp t;

    temp_make(&t, "step9");
    assert_int_equal(folder_score(&format_olmo_ranks, t.dir), 0);
    put_text(&t, "model/rank0.pt", "text");
    put_text(&t, "metadata.yaml", "world_size: 1\n");
    put_text(&t, "config.yaml", "run_name: x\n");
    assert_int_equal(folder_score(&format_olmo_ranks, t.dir), 0);
    copy_ranks(state, &t, "local_w3", "model", 1, -1);
    assert_int_equal(folder_score(&format_olmo_ranks, t.dir), 85);
    temp_remove(&t);

    /* A file a rank of somebody's plain tensors. */
    temp_make(&t, "step9");
    path_of(state, "local_w3/train", from);
    put_text(&t, "config.yaml", "run_name: x\n");
    put_copy(&t, "rank0.pt", from, NULL, NULL, 0);
    assert_int_equal(folder_score(&format_olmo_ranks, t.dir), 0);
    copy_ranks(state, &t, "legacy_w3", "", 1, -1);
    assert_int_equal(folder_score(&format_olmo_ranks, t.dir), 70);
    temp_remove(&t);
}

/* Numbers of a flat parameter that contradict each other: of local_w3's model/rank1.pt. */
static const struct edited flat_rows[] = {
#define RANK_1 "local_w3", "model/rank1.pt"
#define TORCH20_1 "local_torch20_w3", "model/rank1.pt"
#define TOLD(edit, why)                                                                \
    {                                                                                  \
        RANK_1, edit, EDITED_WARNS, why, NULL, NULL                                    \
    }
#define TOLD20(edit, why)                                                              \
    {                                                                                  \
        TORCH20_1, edit, EDITED_WARNS, why, NULL, NULL                                 \
    }
    /* One name too many: which is whose is not told. */
    {"local_w3", "optim/rank1.pt",
     EDIT("K\0K\1K\2K\3K\4K\5K\6K\7e", "K\0K\1K\2K\3K\4K\5K\6e"),
     "state.transformer.blocks.0.att_proj.weight.exp_avg", "hole", NULL, NULL},
    {"local_w3", "optim/rank1.pt",
     EDIT("K\0K\1K\2K\3K\4K\5K\6K\7e", "K\0K\1K\2K\3K\4K\5K\6K\6e"), EDITED_WARNS,
     "two parameters have the number 6", NULL, NULL},
    {"local_w3", "optim/rank1.pt",
     EDIT("K\0K\1K\2K\3K\4K\5K\6K\7e", "K\0K\1K\2K\3K\4K\5K\6Ne"), EDITED_WARNS,
     "a group whose params are no numbers with names", NULL, NULL},
    TOLD(EDIT("q%K\0", "q%J\377\377\377\377"),
         "a flat parameter without its data or its padding"),
    TOLD(EDIT("q%K\0", "q%K\245"),
         "a flat parameter whose padding is longer than it is"),
    TOLD(EDIT("K\0K\244\205q\16K\1\205", "K\0K\4K\51\206q\16K\51K\1\206"),
         "a flat parameter whose padding is longer than it is"),
    TOLD(EDIT("tq(\201q)h'(\211NNNNtq*\201q+\206", "tq(\201q)\205"),
         "a flat parameter whose _shard_param_infos are not those of its names"),
    TOLD(EDIT("(\210K\0K\244K\244MG\1t", "(\210K\0K\244K\244t"),
         "a flat parameter with a _shard_param_infos of another kind"),
    TOLD(EDIT("(\210K\0K\244K\244MG\1t", "(K\1K\0K\244K\244MG\1t"),
         "a flat parameter with a _shard_param_infos of another kind"),
    TOLD(EDIT("(\210K\0K\244K\244MG\1t", "(\210K\0NK\244MG\1t"),
         "a flat parameter with a place that is no number"),
    TOLD(EDIT("(\210K\0K\244K\244MG\1t", "(\210K\0K\244K\244MH\1t"),
         "a flat parameter whose places contradict each other"),
    TOLD(EDIT("(\210K\0K\244K\244MG\1t", "(\210K\0K\244MG\1K\244t"),
         "a flat parameter whose places contradict each other"),
    TOLD(EDIT("(\210K\0K\244K\244MG\1t", "(\210K\1K\244K\244MG\1t"),
         "a flat parameter that has fewer elements than its notes tell"),
    TOLD(EDIT("X\26\0\0\0transformer.wte.weight", "K\1"),
         "a flat parameter with a name that is no text"),
    TOLD(EDIT("K(K\f\206q\37", "K(J\377\377\377\377\206q\37"),
         "a flat parameter with an impossible shape"),
    TOLD(EDIT("X\4\0\0\0nameq-X\0\0\0\0", "X\4\0\0\0nameq-K\1"),
         "a module without a name"),
    {TORCH20_1, EDIT("q$K\0K\0\206", "q$K\1K\2\206"), "transformer.wte.weight",
     "hole at [13, 8]: no chunk holds it", NULL, NULL},
    {TORCH20_1, EDIT("q$K\0K\0\206", "q$K\1K\2\206"), "transformer.ln_f.weight",
     "model/rank1.pt: its range is not within its shape", NULL, NULL},
    TOLD20(EDIT("q$K\0K\0\206", "q$K\2K\2\206"),
           "a flat parameter whose _shard_indices are not those of its names"),
    TOLD20(EDIT("q$K\0K\0\206", "q$K\0"),
           "a flat parameter that does not tell which elements a rank has"),
    TOLD20(EDIT("q$K\0K\0\206", "q$K\0\205"),
           "a flat parameter that does not tell which elements a rank has"),
    TOLD20(EDIT("q$K\0K\0\206", "q$NK\2\206"),
           "a flat parameter whose _shard_indices are not those of its names"),
    TOLD20(EDIT("q$K\0K\0\206", "q$K\0\205"),
           "a flat parameter that does not tell which elements a rank has"),
    TOLD20(EDIT("K\244MG\1\206q(", "MG\1K\244\206q("),
           "a flat parameter whose places contradict each other"),
    TOLD20(EDIT("K\244MG\1\206q(", "K\244MH\1\206q("),
           "a flat parameter that has fewer elements than its notes tell"),
};

static void test_flat_parameters(void **state)
{
    check_edited(*state, flat_rows, ARRAY_SIZE(flat_rows));
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "roles", .test_func = test_roles},
        {.name = "a rank is missing", .test_func = test_missing_rank},
        {.name = "the last rank is missing", .test_func = test_missing_last},
        {.name = "a rank is damaged", .test_func = test_damaged_rank},
        {.name = "an optimizer without its model",
         .test_func = test_model_of_rank_missing},
        {.name = "a legacy rank is missing", .test_func = test_legacy_missing},
        {.name = "the number of ranks", .test_func = test_world},
        {.name = "changed", .test_func = test_changed},
        {.name = "an optimizer without names", .test_func = test_unnamed},
        {.name = "several handles", .test_func = test_several_handles},
        {.name = "a bomb", .test_func = test_bomb},
        {.name = "bids", .test_func = test_bids},
        cmocka_unit_test(test_flat_parameters),
    };

    return run_with_fixtures("olmo_ranks", argc, argv, others, ARRAY_SIZE(others));
}
