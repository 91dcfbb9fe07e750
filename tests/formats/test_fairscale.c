/* SPDX-License-Identifier: MIT */
/* tests/formats/test_fairscale.c - fairscale's flat shards, and damaged ones. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/err.h"
#include "index/formats/fairscale/fairscale_names.h"
#include "edited.h"

static void test_names(void **state)
{
    static const struct {
        const char *name;
        bool good, has_part;
        size_t stem;
        uint32_t part, shard;
    } cases[] = {
        {"checkpoint_3-model_part-0-shard1.pt", true, true, 12, 0, 1},
        {"checkpoint_last-model_part-12-shard1023.pt", true, true, 15, 12, 1023},
        {"checkpoint_last-shard7.pt", true, false, 15, 0, 7},
        {"checkpoint12-shard0.pt", true, false, 12, 0, 0},
        {"checkpoint_3-model_part-0-shard.pt", false, false, 0, 0, 0},
        {"checkpoint_3-shard1.pt.tmp", false, false, 0, 0, 0},
        {"checkpoint_3-shard9999999.pt", false, false, 0, 0, 0},
        {"data-shard1.pt", false, false, 0, 0, 0},
        {"checkpoint_3.pt", false, false, 0, 0, 0},
        {".pt", false, false, 0, 0, 0},
        {"", false, false, 0, 0, 0},
    };
    struct shard_name n;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        bool good = shard_name(cases[i].name, &n);

        if (good != cases[i].good ||
            (good && (n.has_part != cases[i].has_part || n.stem != cases[i].stem ||
                      n.part != cases[i].part || n.shard != cases[i].shard)))
            fail_msg("%s: %d %zu %u %u", cases[i].name, good, n.stem, n.part, n.shard);
    }
}

static void test_rules(void **state)
{
    static const struct {
        const char *name;
        enum rank_rule rule;
    } cases[] = {
        {"decoder.embed_tokens.weight", RANK_ROWS},
        {"decoder.layers.0.fc1.bias", RANK_ROWS},
        {"decoder.layers.0.fc2.weight", RANK_COLUMNS},
        {"decoder.layers.0.fc2.bias", RANK_SAME},
        {"decoder.layers.0.self_attn.qkv_proj.weight", RANK_THIRDS},
        {"decoder.layers.0.self_attn.k_proj.weight", RANK_ROWS},
        {"decoder.layers.0.self_attn.out_proj.weight", RANK_COLUMNS},
        {"decoder.layers.0.self_attn_layer_norm.bias", RANK_SAME},
        {"decoder.layer_norm.weight", RANK_SAME},
        {"decoder.output_projection.weight", RANK_UNKNOWN},
        {"decoder.my_fc1.weight", RANK_UNKNOWN},
        {"", RANK_UNKNOWN},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        if (metaseq_rule(cases[i].name, strlen(cases[i].name)) != cases[i].rule)
            fail_msg("%s: not %d", cases[i].name, cases[i].rule);
}

/* What lies in the lost shard alone is lost; where the others' elements are is known. */
static void test_missing(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "run");
    made_from(&m, "checkpoint_3-model_part-0-shard0.pt", state,
              "fairscale_flat_3r/checkpoint_3-model_part-0-shard0.pt");
    made_from(&m, "checkpoint_3-model_part-0-shard2.pt", state,
              "fairscale_flat_3r/checkpoint_3-model_part-0-shard2.pt");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.count, 67);
    check_fault(&o, "decoder.embed_tokens.weight",
                "checkpoint_3-model_part-0-shard1.pt is missing");
    assert_true(o.info.faults > 10 && o.info.faults < 60);
    check_readable_of(&o, state, "fairscale_flat_3r");
    check_warnings(&o,
                   "missing-file: checkpoint_3-model_part-0-shard1.pt is missing\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* Nothing tells that there was one more: the elements that it had are missed. */
static void test_last_missing(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "run");
    for (unsigned i = 0; i < 2; i++) {
        char name[80];

        snprintf(name, sizeof name,
                 "metaseq_flat_3r/checkpoint_7-model_part-0-shard%u.pt", i);
        made_from(&m, strchr(name, '/') + 1, state, name);
    }
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_null(tensor(&o, "decoder.layers.0.self_attn.qkv_proj.bias")->fault);
    check_fault(&o, "decoder.layer_norm.bias",
                "of the 1045 elements of its flat parameter: a shard is missing");
    check_readable_of(&o, state, "metaseq_flat_3r");
    close_checkpoint(&o);
    made_end(&m);
}

/* Shards of two different saves under one name. */
static void test_mixed(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "run");
    made_from(&m, "checkpoint_3-model_part-0-shard0.pt", state,
              "fairscale_flat_3r/checkpoint_3-model_part-0-shard0.pt");
    made_from(&m, "checkpoint_3-model_part-0-shard1.pt", state,
              "metaseq_flat_3r/checkpoint_7-model_part-0-shard1.pt");
    made_from(&m, "checkpoint_3-model_part-0-shard2.pt", state,
              "fairscale_flat_3r/checkpoint_3-model_part-0-shard2.pt");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_fault(&o, "decoder.embed_tokens.weight",
                "checkpoint_3-model_part-0-shard1.pt is damaged");
    check_readable_of(&o, state, "fairscale_flat_3r");
    close_checkpoint(&o);
    made_end(&m);
}

/* A file that only looks so by its name; and one of before shard_metadata. */
static void test_refused(void **state)
{
    char path[PATH_MAX];
    struct made m;
    struct opened o;

    made_begin(&m, "run");
    snprintf(path, sizeof path, "%s/../llama/llama_mp2/consolidated.00.pth",
             (const char *)*state);
    made_copy(&m, "checkpoint_3-shard0.pt", path);
    made_open(&m, &o);
    assert_has(o.info.error, "checkpoint_3-shard0.pt: it holds no model");
    close_checkpoint(&o);
    made_end(&m);
}

struct places {
    char text[1024];
};

static int note_place(void *user, const char *dir, const char *file,
                      const struct format_driver *d)
{
    struct places *p = user;
    size_t n = strlen(p->text);

    snprintf(p->text + n, sizeof p->text - n, "%s %s %s\n", dir, file ? file : "-",
             d->name);
    return 0;
}

/* A run's folder with several saves: each is a checkpoint by its first file. */
static void test_run(void **state)
{
    static const char first[] = "checkpoint_3-model_part-0-shard0.pt";
    struct places p = {""};
    struct checkpoint_info info;
    struct err e = {0};
    struct made m;
    struct world w;

    made_begin(&m, "run");
    for (unsigned i = 0; i < 3; i++) {
        char name[80];

        snprintf(name, sizeof name,
                 "fairscale_flat_3r/checkpoint_3-model_part-0-shard%u.pt", i);
        made_from(&m, strchr(name, '/') + 1, state, name);
        snprintf(name, sizeof name,
                 "metaseq_flat_3r/checkpoint_7-model_part-0-shard%u.pt", i);
        made_from(&m, strchr(name, '/') + 1, state, name);
    }
    assert_ok(world_open(m.dir, &w, &e), &e);
    assert_ok(scanner_walk(w.scanner, "", note_place, &p, &e), &e);
    assert_has(p.text, "checkpoint_3-model_part-0-shard0.pt fairscale\n");
    assert_has(p.text, "checkpoint_7-model_part-0-shard0.pt fairscale\n");
    assert_null(strstr(p.text, "shard1.pt"));
    assert_ok(scanner_get(w.scanner, "", first, w.arena, &info, &e), &e);
    assert_null(info.error);
    assert_int_equal(info.tensors, 67);
    assert_int_equal(info.step, 3);
    world_close(&w);
    made_end(&m);
}

/* ---- shard_metadata and flat parameters that do not hold ---- */

#define SHARD_0 "fairscale_flat_2r_tied_f16", "checkpoint_3-model_part-0-shard0.pt"
#define SHARD_1 "fairscale_flat_2r_tied_f16", "checkpoint_3-model_part-0-shard1.pt"
#define DAMAGED(was, is, why)                                                          \
    {                                                                                  \
        SHARD_0, EDIT(was, is), EDITED_WARNS, why, NULL, NULL                          \
    }

static const struct edited rows[] = {
    DAMAGED("param_metadata", "-aram_metadata", "shard_metadata has no param_metadata"),
    DAMAGED("fsdp_path", "-sdp_path", "fsdp_path is no text"),
    DAMAGED("X\6\0\0\0params", "X\6\0\0\0-arams", "params is no dict"),
    DAMAGED("q6h\12}", "q6K\12}", "unit \"\": a name of params is no text"),
    DAMAGED("X\5\0\0\0names", "X\5\0\0\0-ames",
            "flat_param_0: names, shapes, numels or padding is missing"),
    DAMAGED("X\7\0\0\0padding", "X\7\0\0\0-adding",
            "flat_param_0: names, shapes, numels or padding is missing"),
    DAMAGED("(M\357\3K\23K\23e", "(M\357\3K\23e",
            "names, shapes and numels are not of one length"),
    DAMAGED("qKK\0u", "qKNu", "names, shapes and numels are not of one length"),
    DAMAGED("(M\357\3K\23K\23e", "(M\357\3K\23K\24e",
            "flat_param_0: member 2: name, shape and numel do not fit"),
    DAMAGED("K5K\23\206q@", "K5J\377\377\377\377\206q@",
            "flat_param_0: member 0: name, shape and numel do not fit"),
    DAMAGED("X\33\0\0\0decoder.embed_tokens.weight", "K\1",
            "flat_param_0: member 0: name, shape and numel do not fit"),
    DAMAGED("\27\0\0\0decoder.layer_norm.bias", "\33\0\0\0decoder.embed_tokens.weight",
            "shard_metadata has decoder.embed_tokens.weight twice"),
    DAMAGED("\206qQa", "\206qQ\205a", "unit \"\": shared_param_info has no pairs"),
    DAMAGED("X\40\0\0\0decoder.output_projection.weight", "K\1",
            "shared_param_info has no names"),
    DAMAGED("X\17\0\0\0decoder.versionq\256", "K\1q\256",
            "a name of a buffer is no text"),
    {SHARD_1, EDIT("M\13\2\205", "M\12\2\205"), "decoder.embed_tokens.weight",
     "checkpoint_3-model_part-0-shard1.pt: its part does not fit to those of the other ranks",
     NULL, NULL},
    {SHARD_1, EDIT("torch\nHalfStorage", "torch\nBFloat16Storage"),
     "decoder.embed_tokens.weight",
     "checkpoint_3-model_part-0-shard1.pt: its part does not fit to those of the other ranks",
     NULL, NULL},
    {SHARD_1, EDIT("qKK\1u", "qKK\2u"), "decoder.embed_tokens.weight",
     "the ranks have 1044 of its 1045 elements", NULL, NULL},
    {SHARD_1, EDIT("qKK\1u", "qKK\0u"), "decoder.embed_tokens.weight",
     "shard1.pt: its part does not fit to those of the other ranks", NULL, NULL},
};

static void test_edited(void **state)
{
    check_edited(*state, rows, ARRAY_SIZE(rows));
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),   cmocka_unit_test(test_rules),
        cmocka_unit_test(test_missing), cmocka_unit_test(test_last_missing),
        cmocka_unit_test(test_mixed),   cmocka_unit_test(test_refused),
        cmocka_unit_test(test_run),     cmocka_unit_test(test_edited),
    };

    return run_with_fixtures("fairscale", argc, argv, tests, ARRAY_SIZE(tests));
}
