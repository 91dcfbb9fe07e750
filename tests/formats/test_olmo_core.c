/* SPDX-License-Identifier: MIT */
/* tests/formats/test_olmo_core.c - OLMo-core's stepN: its fixtures, and what may be missing. */
#include "tests/unit/unit.h"

#include <limits.h>
#include <stdio.h>

#include "index/formats/format.h"
#include "made.h"

extern const struct format_driver format_olmo_core;

static void open_fixture(void **state, const char *name, struct opened *o)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", (const char *)*state, name);
    open_checkpoint(path, o);
}

static void test_facts(void **state)
{
    struct opened o;

    open_fixture(state, "step100", &o);
    assert_string_equal(o.info.version, "3.0.0");
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 100);
    assert_string_equal(o.info.topology, "{\"ranks\": 3, \"files\": 9}");
    assert_int_equal(tensor(&o, "model.lm_head.w_out.weight")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "model.lm_head.w_out.weight")->wrapper, 6);
    assert_int_equal(tensor(&o, "optim.state.lm_head.w_out.weight.exp_avg")->role,
                     ROLE_OPTIMIZER);
    close_checkpoint(&o);
}

/* The module for experts writes no prefixes; only the suffixes tell. */
static void test_experts(void **state)
{
    struct opened o;

    open_fixture(state, "step9", &o);
    assert_int_equal(tensor(&o, "blocks.0.w.main")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "blocks.0.w.exp_avg")->role, ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "blocks.0.w.exp_avg_sq")->role, ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "blocks.0.w.step")->role, ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "router.bias")->role, ROLE_MODEL);
    assert_string_equal(o.info.topology,
                        "{\"ranks\": 1, \"files\": 1, \"ephemeral\": true}");
    close_checkpoint(&o);

    /* Written by OLMo-core. */
    open_fixture(state, "step7", &o);
    assert_int_equal(tensor(&o, "module.blocks.0.w_up_gate.main")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "module.blocks.0.w_up_gate.main")->shape.dim[0], 120);
    assert_int_equal(tensor(&o, "module.blocks.0.w_up_gate.main")->chunks, 4);
    assert_int_equal(tensor(&o, "module.blocks.0.w_up_gate.step")->role,
                     ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "model_buffer.blocks.0.score_bias")->role, ROLE_MODEL);
    assert_string_equal(o.info.topology, "{\"ranks\": 4, \"files\": 4}");
    close_checkpoint(&o);
}

/* ---- what may be missing ---- */

/* step9 without what is named in `without` (NULL-terminated). */
static void copy_step(void **state, struct made *m, const char *name,
                      const char *const *without)
{
    static const char *const files[] = {"model_and_optim/.metadata",
                                        "model_and_optim/__0_0.distcp",
                                        "train/rank0.pt", ".metadata.json"};

    made_begin(m, name);
    for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
        const char *const *w = without;
        char from[PATH_MAX];

        while (*w && strcmp(*w, files[i]) != 0)
            w++;
        if (*w)
            continue;
        snprintf(from, sizeof from, "%s/step9/%s", (const char *)*state, files[i]);
        made_copy(m, files[i], from);
    }
}

static void test_mark(void **state)
{
    static const char *const without[] = {".metadata.json", NULL};
    struct made m;
    struct opened o;

    copy_step(state, &m, "step30", without);
    made_open(&m, &o);
    assert_string_equal(o.info.format, "olmo-core-step");
    assert_int_equal(o.info.step, 30); /* the name, not train/ */
    check_warnings(&o, "no-mark: there is no .metadata.json: from 1.5.0 on OLMo-core "
                       "takes this save for unfinished\n");
    close_checkpoint(&o);

    made_text(&m, "config.yaml", "run_name: classic\n");
    made_open(&m, &o);
    check_warnings(&o, "");
    close_checkpoint(&o);

    made_text(&m, ".metadata.json", "{\"version\": ");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_null(o.info.version);
    check_warnings(&o, "damaged-file: .metadata.json: JSON byte 12 (the end): no JSON "
                       "value\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* train/ says itself how many ranks there were. */
static void test_ranks(void **state)
{
    static const char *const without[] = {NULL};
    char from[PATH_MAX];
    struct made m;
    struct opened o;

    copy_step(state, &m, "step9", without);
    snprintf(from, sizeof from, "%s/step100/train/rank1.pt", (const char *)*state);
    made_copy(&m, "train/rank1.pt", from);
    made_open(&m, &o);
    check_warnings(&o, "missing-file: train holds the state of 2 of 3 ranks\n");
    assert_string_equal(o.info.topology,
                        "{\"ranks\": 3, \"files\": 1, \"ephemeral\": true}");
    close_checkpoint(&o);
    made_end(&m);
}

static void test_damaged(void **state)
{
    static const char *const without[] = {NULL};
    struct made m;
    struct opened o;

    copy_step(state, &m, "step9", without);
    made_text(&m, "model_and_optim/__0_0.distcp", "short");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_fault(&o, "blocks.0.w.main", "model_and_optim/__0_0.distcp");
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- bids ---- */

static void test_bids(void **state)
{
    static const struct {
        const char *name, *without[4];
        int score;
    } cases[] = {
        {"step9", {NULL}, 95},
        {"step9", {".metadata.json", NULL}, 95},
        {"step9", {"train/rank0.pt", NULL}, 95},
        {"step9", {"train/rank0.pt", ".metadata.json", NULL}, 85},
        {"step9", {"model_and_optim/.metadata", NULL}, 0},
        {"step9-tmp", {NULL}, 0},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct made m;

        copy_step(state, &m, cases[i].name, cases[i].without);
        assert_int_equal(folder_score(&format_olmo_core, m.dir), cases[i].score);
        made_end(&m);
    }
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "facts", .test_func = test_facts},
        {.name = "experts", .test_func = test_experts},
        {.name = "mark", .test_func = test_mark},
        {.name = "ranks", .test_func = test_ranks},
        {.name = "damaged", .test_func = test_damaged},
        {.name = "bids", .test_func = test_bids},
    };

    return run_with_fixtures("olmo_core", argc, argv, others, ARRAY_SIZE(others));
}
