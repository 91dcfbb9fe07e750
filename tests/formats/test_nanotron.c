/* SPDX-License-Identifier: MIT */
/* tests/formats/test_nanotron.c - nanotron's files put together, and damaged ones. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/nanotron/nanotron_names.h"
#include "edited.h"

static void test_weight_names(void **state)
{
    static const struct {
        const char *name, *last; /* NULL: none of ours */
        int pp, tp, ep;          /* -1: not said */
    } cases[] = {
        {"model_weight.safetensors", "weight", -1, -1, -1},
        {"model_A_log.safetensors", "A_log", -1, -1, -1},
        {"model_weight_pp-rank-1-of-2_tp-rank-3-of-4.safetensors", "weight", 1, 3, -1},
        {"model_weight_pp-rank-0-of-1_tp-rank-0-of-2_exp-rank-7-of-8.safetensors",
         "weight", 0, 0, 7},
        {"model_model_weight.safetensors_pp-rank-0-of-2_tp-rank-1-of-2.safetensors",
         "weight", 0, 1, -1},
        {"model_model_weight.safetensors.safetensors", "weight", -1, -1, -1},
        {"model_model_x.safetensors", "model_x", -1, -1, -1},
        {"model_weight_pp-rank-2-of-2_tp-rank-0-of-2.safetensors", NULL, 0, 0, 0},
        {"model_weight_pp-rank-0-of-2.safetensors", NULL, 0, 0, 0},
        {"model_weight_pp-rank-0-of-2_tp-rank-0-of-2_x.safetensors", NULL, 0, 0, 0},
        {"model_.safetensors", NULL, 0, 0, 0},
        {"weight.safetensors", NULL, 0, 0, 0},
        {"model_weight.pt", NULL, 0, 0, 0},
        {"", NULL, 0, 0, 0},
    };
    struct nano_weight_name n;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        bool good = nano_weight_name(cases[i].name, &n);

        if (good != (cases[i].last != NULL))
            fail_msg("%s: %d", cases[i].name, good);
        if (!good)
            continue;
        assert_int_equal(n.len, strlen(cases[i].last));
        assert_memory_equal(cases[i].name + n.start, cases[i].last, n.len);
        assert_int_equal(n.rank.pp.is ? (int)n.rank.pp.at : -1, cases[i].pp);
        assert_int_equal(n.rank.tp.is ? (int)n.rank.tp.at : -1, cases[i].tp);
        assert_int_equal(n.rank.ep.is ? (int)n.rank.ep.at : -1, cases[i].ep);
    }
}

static void test_optimizer_names(void **state)
{
    struct nano_ranks r;

    (void)state;
    assert_true(nano_optimizer_name("optimizer_pp-1-of-2_tp-3-of-4.pt", &r));
    assert_true(r.pp.at == 1 && r.tp.at == 3 && !r.dp.is && !r.ep.is);
    assert_true(nano_optimizer_name(
        "optimizer_pp-0-of-1_dp-2-of-3_tp-0-of-2_exp-1-of-2.pt", &r));
    assert_true(r.dp.is && r.dp.at == 2 && r.dp.of == 3 && r.ep.at == 1);
    assert_false(nano_optimizer_name("optimizer_config.json", &r));
    assert_false(nano_optimizer_name("optimizer_pp-0-of-1.pt", &r));
    assert_false(nano_optimizer_name("optimizer_pp-0-of-1_tp-0-of-2_x.pt", &r));
    assert_false(nano_optimizer_name(".pt", &r));
    assert_int_equal(nano_version("1.4"), 1004);
    assert_int_equal(nano_version("1.5.0"), 1005);
    assert_int_equal(nano_version("2"), 0);
    assert_int_equal(nano_version("1.x"), 0);
    assert_int_equal(nano_version(""), 0);
}

static void test_shapes(void **state)
{
    static const struct {
        const char *text;
        int nd; /* -1: no shape */
        uint64_t dim[3];
    } cases[] = {
        {"(60, 20)", 2, {60, 20}},
        {"(20,)", 1, {20}},
        {"()", 0, {0}},
        {"(np.int64(60), 20)", 2, {60, 20}},
        {"torch.Size([4, 3, 2])", 3, {4, 3, 2}},
        {"torch.Size([])", 0, {0}},
        {"(60, 20", -1, {0}},
        {"60, 20)", -1, {0}},
        {"(-1, 20)", -1, {0}},
        {"(6 0)", -1, {0}},
        {"(60, 20) ", -1, {0}},
        {"(99999999999999999999)", -1, {0}},
        {"torch.Size([4)", -1, {0}},
        {"", -1, {0}},
    };
    struct shape s;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        bool good = nano_shape(cases[i].text, &s);

        if (good != (cases[i].nd >= 0))
            fail_msg("%s: %d", cases[i].text, good);
        for (uint32_t k = 0; good && k < s.nd; k++)
            assert_int_equal(s.dim[k], cases[i].dim[k]);
        if (good)
            assert_int_equal(s.nd, cases[i].nd);
    }
}

static void test_slices(void **state)
{
    static const struct shape local = {.nd = 2, .dim = {4, 3}},
                              whole = {.nd = 2, .dim = {8, 3}};
    static const struct {
        const char *text, *why; /* NULL: it is good */
    } cases[] = {
        {"None,None,None|None,None,None#4,8,None|None,None,None", NULL},
        {"0,2,1#0,2,1;2,4,None|0,3,None#6,8,None", NULL},
        {"0,2,1#0,3,1", "different sizes"},
        {"0,5,1#0,5,1", "slice 0:5 of a dimension of 4"},
        {"3,2,1#3,2,1", "slice 3:2"},
        {"0,4,2#0,4,2", "steps over 1"},
        {"-1,4,1#0,4,1", "no start,stop,step"},
        {"0,4#0,4", "no start,stop,step"},
        {"0,4,1|0,3,1|0,1,1#0,4,1", "more slices than dimensions"},
        {"0,4,1", "more slices than dimensions"},
        {"0,4,1#0,4,1;", "no start,stop,step"},
        {"0,4,1#0,4,1x", "more slices than dimensions"},
        {"", "no start,stop,step"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(arena_freep) struct arena *a = arena_new(1 << 16);
        struct rank_boxes b;
        struct err e = {0};
        int r = nano_slices(cases[i].text, &local, &whole, a, &b, &e);

        if (cases[i].why ? r == 0 || !strstr(e.text, cases[i].why) : r < 0)
            fail_msg("%s: %d %s", cases[i].text, r, e.text);
    }
}

static void test_slices_of_other_shapes(void **state)
{
    static const struct shape row = {.nd = 1, .dim = {4}}, none = {.nd = 0},
                              whole = {.nd = 2, .dim = {8, 3}};
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 16);
    CLEANUP(buf_release) struct buf many = {0};
    struct rank_boxes b;
    struct err e = {0};

    (void)state;
    assert_true(nano_slices("0,4,1#0,4,1", &row, &whole, a, &b, &e) < 0);
    assert_has(e.text, "slices of 1 dimensions in a tensor of 2");
    e = (struct err){0};
    assert_true(nano_slices("", &none, &none, a, &b, &e) < 0);
    assert_has(e.text, "slices of 0 dimensions in a tensor of 0");
    e = (struct err){0};
    for (int i = 0; i < 1 << 16; i++)
        buf_adds(&many, "0,1,1#0,1,1;");
    buf_adds(&many, "0,1,1#0,1,1");
    assert_true(nano_slices(many.data, &row, &row, a, &b, &e) < 0);
    assert_has(e.text, "65537 pairs of slices");
}

/* A copy of a fixture, all of it. */
static void copy(void *const *state, const struct made *m, const char *fixture)
{
    char command[2 * PATH_MAX];

    snprintf(command, sizeof command, "cp -r '%s/%s/.' '%s'", (const char *)*state,
             fixture, m->dir);
    assert_int_equal(system(command), 0);
}

static void lose(const struct made *m, const char *path)
{
    char full[PATH_MAX];

    snprintf(full, sizeof full, "%s/%s", m->dir, path);
    assert_int_equal(unlink(full), 0);
}

static void test_missing_weight(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "4");
    copy(state, &m, "hand_tp2_pp2_ep2");
    lose(&m,
         "model/decoder/1/experts/model_weight_pp-rank-1-of-2_tp-rank-1-of-2_exp-rank-"
         "0-of-2.safetensors");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_fault(&o, "decoder.1.experts.weight",
                "no file of tensor rank 1 of 2, expert rank 0 of 2");
    check_fault(&o, "decoder.1.experts.weight.exp_avg",
                "no file of model/ tells which slice of the parameter it is");
    assert_int_equal(o.info.faults, 2);
    check_readable_of(&o, state, "hand_tp2_pp2_ep2");
    close_checkpoint(&o);
    made_end(&m);
}

/* Norms have one file: only the optimizer, which has states of them, tells that it is lost. */
static void test_missing_norm(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "3");
    copy(state, &m, "nanotron_tp2_ep2");
    lose(&m, "model/model/final_layer_norm/pp_block/model_weight.safetensors");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_warnings(&o, "missing-file: model/ has no file of 1 parameters that the "
                       "optimizer has states of, as "
                       "model.final_layer_norm.pp_block.weight\n"
                       "not-merged: 6 tensors of the optimizer are of no parameter of "
                       "model/: they are shown as each rank has them\n");
    close_checkpoint(&o);
    made_end(&m);
}

static void test_missing_optimizer(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "3");
    copy(state, &m, "nanotron_tp2_dp3_zero1");
    lose(&m, "optimizer/optimizer_pp-0-of-1_dp-1-of-3_tp-0-of-2_exp-0-of-1.pt");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 15);
    check_fault(&o, "model.final_layer_norm.pp_block.weight.exp_avg", "");
    assert_null(tensor(&o, "model.final_layer_norm.pp_block.weight")->fault);
    assert_int_equal(o.info.faults, 30);
    close_checkpoint(&o);
    made_end(&m);
}

static void copy_in(const struct made *m, const char *from, const char *to)
{
    char command[3 * PATH_MAX];

    snprintf(command, sizeof command, "cp '%s/%s' '%s/%s'", m->dir, from, m->dir, to);
    assert_int_equal(system(command), 0);
}

/* Files of an older save by other numbers of ranks, in the same directory. */
static void test_two_saves(void **state)
{
#define QKV "model/decoder/0/qkv/model_weight_pp-rank-0-of-2_tp-rank-0-of-2.safetensors"
#define OLD "model/decoder/0/qkv/model_weight_pp-rank-0-of-"
#define EXPERTS                                                                        \
    "model/decoder/1/experts/model_weight_pp-rank-1-of-2_tp-rank-0-of-2_exp-rank-0-"
    static const struct {
        const char *from, *to;
    } cases[] = {
        {QKV, OLD "1_tp-rank-0-of-2.safetensors"},
        {QKV, OLD "2_tp-rank-0-of-4.safetensors"},
        {EXPERTS "of-2.safetensors", EXPERTS "of-4.safetensors"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct made m;
        struct opened o;

        made_begin(&m, "4");
        copy(state, &m, "hand_tp2_pp2_ep2");
        copy_in(&m, cases[i].from, cases[i].to);
        made_open(&m, &o);
        assert_has(o.info.error, "are of saves by other numbers of ranks");
        assert_has(o.info.error, cases[i].to);
        close_checkpoint(&o);
        made_end(&m);
    }
#undef QKV
#undef OLD
#undef EXPERTS
}

/* Of the optimizer alone: the model tells which files are of its save. */
static void test_other_optimizer(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "3");
    copy(state, &m, "nanotron_tp2_dp3_zero1");
    copy_in(&m, "optimizer/optimizer_pp-0-of-1_dp-1-of-3_tp-0-of-2_exp-0-of-1.pt",
            "optimizer/optimizer_pp-1-of-2_dp-1-of-3_tp-0-of-2_exp-0-of-1.pt");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 0);
    check_warnings(&o,
                   "unlisted-file: 1 files of the optimizer as "
                   "optimizer/optimizer_pp-1-of-2_dp-1-of-3_tp-0-of-2_exp-0-of-1.pt "
                   "are of a save by other numbers of ranks than model/: they are "
                   "not shown\n");
    close_checkpoint(&o);
    made_end(&m);
}

static void rename_in(const struct made *m, const char *from, const char *to)
{
    char a[PATH_MAX], b[PATH_MAX];

    snprintf(a, sizeof a, "%s/%s", m->dir, from);
    snprintf(b, sizeof b, "%s/%s", m->dir, to);
    assert_int_equal(rename(a, b), 0);
}

/*
 * Two ranks' files that were exchanged: the weight goes where the slices say, but no piece of
 * the optimizer is known to be of the one slice or the other.
 */
static void test_exchanged_weights(void **state)
{
#define EXPERTS "model/decoder/1/experts/model_weight_pp-rank-1-of-2_tp-rank-"
#define QKV "model/decoder/0/qkv/model_weight_pp-rank-0-of-2_tp-rank-"
    static const struct {
        const char *a, *b, *key, *state;
    } cases[] = {
        {QKV "0-of-2.safetensors", QKV "1-of-2.safetensors", "decoder.0.qkv.weight",
         "decoder.0.qkv.weight.exp_avg"},
        {EXPERTS "0-of-2_exp-rank-0-of-2.safetensors",
         EXPERTS "0-of-2_exp-rank-1-of-2.safetensors", "decoder.1.experts.weight",
         "decoder.1.experts.weight.exp_avg"},
        {EXPERTS "0-of-2_exp-rank-1-of-2.safetensors",
         EXPERTS "1-of-2_exp-rank-1-of-2.safetensors", "decoder.1.experts.weight",
         "decoder.1.experts.weight.exp_avg"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct made m;
        struct opened o;

        made_begin(&m, "4");
        copy(state, &m, "hand_tp2_pp2_ep2");
        rename_in(&m, cases[i].a, "kept");
        rename_in(&m, cases[i].b, cases[i].a);
        rename_in(&m, "kept", cases[i].b);
        made_open(&m, &o);
        assert_null(o.info.error);
        assert_null(tensor(&o, cases[i].key)->fault);
        check_fault(&o, cases[i].state, "in another order than their ranks");
        assert_int_equal(o.info.faults, 1);
        check_readable_of(&o, state, "hand_tp2_pp2_ep2");
        close_checkpoint(&o);
        made_end(&m);
    }
#undef QKV
#undef EXPERTS
}

/* Damage in the first bytes of the metadata does not make it a folder of other files. */
static void test_damaged_metadata(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "4");
    copy(state, &m, "hand_tp2_pp2_ep2");
    made_text(&m, "checkpoint_metadata.json",
              "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff");
    made_open(&m, &o);
    assert_has(o.info.error, "checkpoint_metadata.json");
    close_checkpoint(&o);
    made_end(&m);
}

/* Without its offsets a piece of ZeRO-1 has no place. */
static void test_no_offsets(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "3");
    copy(state, &m, "nanotron_tp2_dp3_zero1");
    made_text(&m, "optimizer/optimizer_config.json", "{\"type\": \"Zero\"}");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_fault(&o, "model.lm_head.pp_block.weight.exp_avg",
                "optimizer_config.json does not tell its offsets");
    assert_int_equal(o.info.faults, 30);
    close_checkpoint(&o);
    made_end(&m);
}

static void test_versions(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "4");
    copy(state, &m, "hand_tp2_pp2_ep2");
    made_text(&m, "checkpoint_metadata.json",
              "{\"version\": \"1.6\", \"tp\": 2, \"dp\": 1}");
    made_open(&m, &o);
    assert_has(o.info.error, "version \"1.6\"");
    close_checkpoint(&o);
    made_text(&m, "checkpoint_metadata.json",
              "{\"version\": \"1.1\", \"tp\": 2, \"dp\": 1}");
    made_open(&m, &o);
    assert_has(o.info.error, "version \"1.1\"");
    close_checkpoint(&o);
    made_end(&m);
}

/* Files of before slices were told, and files that contradict each other. */
static void test_damaged_headers(void **state)
{
    static const char *const names[] = {
        "model/a/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors",
        "model/a/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"};
    static const struct {
        const char *metadata[2], *why;
    } cases[] = {
        {{"{}", "{}"}, "does not say which slice it is"},
        {{"{\"version\": \"1.9\", \"unsharded_shape\": \"(4,)\", "
          "\"local_global_slices_pairs\": \"0,2,None#0,2,None\"}",
          "{}"},
         "is of version 1.9"},
        {{"{\"version\": \"1.5\", \"unsharded_shape\": \"(4,)\", "
          "\"local_global_slices_pairs\": \"0,2,None#0,2,None\"}",
          "{\"version\": \"1.5\", \"unsharded_shape\": \"(5,)\", "
          "\"local_global_slices_pairs\": \"0,2,None#2,4,None\"}"},
         "another shape or type"},
        {{"{\"version\": \"1.5\", \"unsharded_shape\": \"(4,)\", "
          "\"local_global_slices_pairs\": \"0,2,None#0,2,None\"}",
          "{\"version\": \"1.5\", \"unsharded_shape\": \"(4,)\", "
          "\"local_global_slices_pairs\": \"0,2,None#1,3,None\"}"},
         "overlap"},
        {{"{\"version\": \"1.5\", \"unsharded_shape\": \"(9,)\", "
          "\"local_global_slices_pairs\": \"0,2,None#0,2,None\"}",
          "{\"version\": \"1.5\", \"unsharded_shape\": \"(9,)\", "
          "\"local_global_slices_pairs\": \"0,2,None#7,9,None\"}"},
         "hole"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct made m;
        struct opened o;

        made_begin(&m, "4");
        made_text(&m, "checkpoint_metadata.json",
                  "{\"version\": \"1.5\", \"tp\": 2, \"dp\": 1}");
        for (unsigned t = 0; t < 2; t++) {
            char header[512];

            snprintf(header, sizeof header,
                     "{\"__metadata__\": %s, \"data\": {\"dtype\": \"F32\", \"shape\": "
                     "[2], \"data_offsets\": [0, 8]}}",
                     cases[i].metadata[t]);
            made_safetensors(&m, names[t], header, 1, 2);
        }
        made_open(&m, &o);
        assert_null(o.info.error);
        check_fault(&o, "a.weight", cases[i].why);
        close_checkpoint(&o);
        made_end(&m);
    }
}

/* Numbers that contradict each other. */
static void test_edited(void **state)
{
#define DIR "nanotron_tp2_dp3_zero1"
#define CONFIG DIR, "optimizer/optimizer_config.json"
#define OPTIM DIR, "optimizer/optimizer_pp-0-of-1_dp-1-of-3_tp-0-of-2_exp-0-of-1.pt"
#define HEAD "model.lm_head.pp_block.weight"
#define EMBEDDING "model.token_position_embeddings.pp_block.token_embedding.weight"
#define QKV                                                                            \
    "hand_tp2_pp2_ep2",                                                                \
        "model/decoder/0/qkv/model_weight_pp-rank-0-of-2_tp-rank-1-of-2.safetensors"
    static const struct edited rows[] = {
        {OPTIM, EDIT("X\5\0\0\0state", "X\5\0\0\0-tate"), EDITED_WARNS,
         "dp-1-of-3_tp-0-of-2_exp-0-of-1.pt: it holds no state", NULL, NULL},
        {OPTIM, EDIT("X\5\0\0\0names", "X\5\0\0\0-ames"), EDITED_WARNS,
         "dp-1-of-3_tp-0-of-2_exp-0-of-1.pt: it has no names of parameters", NULL,
         NULL},
        {OPTIM, EDIT("K\0X\77\0\0\0" EMBEDDING, "NX\77\0\0\0" EMBEDDING), EDITED_WARNS,
         "dp-1-of-3_tp-0-of-2_exp-0-of-1.pt: its names of parameters are none", NULL,
         NULL},
        {OPTIM, EDIT("K\0X\77\0\0\0" EMBEDDING, "K\0K\0"), EDITED_WARNS,
         "dp-1-of-3_tp-0-of-2_exp-0-of-1.pt: its names of parameters are none", NULL,
         NULL},
        {OPTIM, EDIT("torch\nFloatStorage", "torch\nIntStorage"), HEAD ".exp_avg",
         "dp-1-of-3_tp-0-of-2_exp-0-of-1.pt: its type is not that of the other ranks'",
         NULL, NULL},
        {OPTIM, EDIT("K\255\205", "K\254\205"), EMBEDDING ".exp_avg",
         "dp-1-of-3_tp-0-of-2_exp-0-of-1.pt: it is not as long as its offsets tell",
         NULL, NULL},
        {CONFIG, EDIT("\"174\", \"347\"", "\"474\", \"647\""), EMBEDDING ".exp_avg",
         "elements 474+173 are not within the piece", NULL, NULL},
        {CONFIG, EDIT("\"174\", \"347\"", "\"347\", \"174\""), EMBEDDING ".exp_avg",
         "optimizer_config.json does not tell its offsets", NULL, NULL},
        {CONFIG, EDIT("\"174\", \"347\"", "\"173\", \"346\""), EMBEDDING ".exp_avg",
         "overlap", NULL, NULL},
        {CONFIG, EDIT("\"174\", \"347\"", "\"175\", \"348\""), EMBEDDING ".exp_avg",
         "overlap", NULL, NULL},
        {CONFIG, EDIT("{", "["), EDITED_WARNS,
         "damaged-file: optimizer/optimizer_config.json: ", NULL, NULL},
        {DIR,
         "model/model/lm_head/pp_block/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors",
         EDIT("\"data\"", "\"dato\""), HEAD, "it holds no tensor \"data\"", NULL, NULL},
        {QKV, EDIT("(np.int64(12), 3)", "(np.int64(36),  )"), "decoder.0.qkv.weight",
         "tells of another shape or type than", NULL, NULL},
        {QKV, EDIT("(np.int64(12), 3)", "(np.int32(12), x)"), "decoder.0.qkv.weight",
         "unsharded_shape \"(np.int32(12), x)\" is no shape", NULL, NULL},
        {QKV, EDIT("0,4,None|", "1,5,None|"), "decoder.0.qkv.weight", "overlap", NULL,
         NULL},
        {QKV, EDIT("#4,8,", "#0,4,"), "decoder.0.qkv.weight",
         "chunks at [0, 0]+[4, 3] and [0, 0]+[4, 3] overlap", NULL, NULL},
        {QKV, EDIT("#10,12,", "#10,13,"), "decoder.0.qkv.weight",
         "pair 1 of local_global_slices_pairs: slice 10:13 of a dimension of 12", NULL,
         NULL},
        {"hand_tp2_pp2_ep2", "optimizer/optimizer_pp-1-of-2_tp-1-of-2_exp-0-of-2.pt",
         EDIT("K\2K\3K\1\207q\13K\3K\1K\1\207", "K\3K\2K\1\207q\13K\2K\1K\1\207"),
         "decoder.1.experts.weight.exp_avg",
         "its shape is not that of the rank's parameter", NULL, NULL},
    };

    check_edited(*state, rows, ARRAY_SIZE(rows));
#undef DIR
#undef CONFIG
#undef OPTIM
#undef HEAD
#undef EMBEDDING
#undef QKV
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weight_names),
        cmocka_unit_test(test_optimizer_names),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_slices_of_other_shapes),
        cmocka_unit_test(test_missing_weight),
        cmocka_unit_test(test_missing_norm),
        cmocka_unit_test(test_missing_optimizer),
        cmocka_unit_test(test_exchanged_weights),
        cmocka_unit_test(test_two_saves),
        cmocka_unit_test(test_other_optimizer),
        cmocka_unit_test(test_damaged_metadata),
        cmocka_unit_test(test_no_offsets),
        cmocka_unit_test(test_versions),
        cmocka_unit_test(test_damaged_headers),
        cmocka_unit_test(test_edited),
    };

    return run_with_fixtures("nanotron", argc, argv, tests, ARRAY_SIZE(tests));
}
