/* SPDX-License-Identifier: MIT */
/* tests/formats/test_olmo_unsharded.c - full copies by OLMo and OLMo-core, and look-alikes. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/olmo/olmo_key.h"
#include "made.h"

extern const struct format_driver format_olmo_unsharded;

static void fixture_path(void **state, const char *name, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/%s", (const char *)*state, name);
}

static void open_fixture(void **state, const char *name, struct opened *o)
{
    char path[PATH_MAX];

    fixture_path(state, name, path);
    open_checkpoint(path, o);
}

/* ---- names and roles ---- */

static void test_names(void **state)
{
    static const char *const core[] = {"core_one_file", "core_chunks",
                                       "core_per_tensor", "core_per_tensor_pt",
                                       "core_chunks_pt"};
    struct opened o;

    for (size_t i = 0; i < ARRAY_SIZE(core); i++) {
        const struct tensor_info *t;

        open_fixture(state, core[i], &o);
        t = tensor(&o, "model.blocks.0.attention.w_q.weight");
        assert_int_equal(t->wrapper, strlen("model."));
        assert_int_equal(t->role, ROLE_MODEL);
        assert_null(t->part);
        close_checkpoint(&o);
    }
    open_fixture(state, "core_one_file", &o);
    assert_int_equal(tensor(&o, "optim.state.embeddings.weight.step")->role,
                     ROLE_OPTIMIZER);
    close_checkpoint(&o);
}

static void test_classic(void **state)
{
    static const char *const names[] = {"step1000-unsharded", "step2000-unsharded"};
    struct opened o;

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        open_fixture(state, names[i], &o);
        assert_int_equal(o.info.step, 1000 * (int)(i + 1));
        assert_int_equal(tensor(&o, "transformer.wte.weight")->wrapper, 0);
        assert_int_equal(tensor(&o, "transformer.wte.weight")->role, ROLE_MODEL);
        assert_int_equal(tensor(&o, "train.pt:rng.torch")->role, ROLE_OTHER);
        close_checkpoint(&o);
    }
    open_fixture(state, "step2000-unsharded", &o);
    assert_int_equal(tensor(&o, "state.0.exp_avg")->role, ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "param_groups")->role, ROLE_OTHER);
    close_checkpoint(&o);
}

/* A folder of a set by itself: its files' names tell what it is, or its own. */
static void test_alone(void **state)
{
    struct made m;
    struct opened o;

    open_fixture(state, "core_per_tensor/model", &o);
    assert_string_equal(o.info.format, "olmo-core-unsharded");
    assert_int_equal(o.count, 25);
    close_checkpoint(&o);
    open_fixture(state, "core_chunks/model", &o);
    assert_string_equal(o.info.format, "olmo-core-unsharded");
    assert_int_equal(o.count, 25);
    close_checkpoint(&o);

    made_begin(&m, "dataset"); /* anybody may call files so */
    made_from(&m, "chunk-00000.safetensors", state,
              "core_chunks/model/chunk-00000.safetensors");
    made_open(&m, &o);
    assert_string_equal(o.info.format, "safetensors");
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- damage ---- */

static const char header[] =
    "{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
static const char header_v[] =
    "{\"v\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";

static void test_chunks(void **state)
{
    static const float want[] = {1, 2};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "copy");
    made_safetensors(&m, "model/chunk-00000.safetensors", header, 1, 2);
    made_safetensors(&m, "model/chunk-00002.safetensors", header_v, 5, 2);
    made_open(&m, &o);
    check_floats(&o, "model.w", want, 2);
    check_warnings(&o, "missing-file: model: 2 of the chunks up to "
                       "chunk-00002.safetensors are there\n");
    close_checkpoint(&o);

    /* The same key twice: nothing says which one counts. */
    made_safetensors(&m, "model/chunk-00001.safetensors", header_v, 9, 2);
    made_open(&m, &o);
    check_floats(&o, "model.w", want, 2);
    check_fault(&o, "model.v",
                "it is in model/chunk-00001.safetensors and in "
                "model/chunk-00002.safetensors, and nothing decides");
    close_checkpoint(&o);

    made_text(&m, "model/chunk-00001.safetensors", "no header, but some text");
    made_open(&m, &o);
    check_floats(&o, "model.w", want, 2);
    assert_int_equal(o.count, 2);
    assert_int_equal(o.info.warnings, 1);
    close_checkpoint(&o);
    made_end(&m);
}

/* The optimizer is damaged: the model is shown. */
static void test_damaged_optimizer(void **state)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    made_begin(&m, "step1-unsharded");
    made_from(&m, "model.pt", state, "step1000-unsharded/model.pt");
    made_text(&m, "optim.pt", "PK\3\4 no zip at all");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.count, 3);
    all_warnings(&o, &text);
    assert_has(text.data, "damaged-part: ");
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- keys ---- */

static void test_keys(void **state)
{
    static const struct {
        const char *text, *key;
        bool pickled;
    } good[] = {
        /* pickle.dumps((("a", "b.c"), False)), protocol 4 */
        {"gASVEAAAAAAAAACMAWGUjANiLmOUhpSJhpQu", "a.b.c", false},
        /* pickle.dumps((("state", 12, "x"), True)), protocol 2 */
        {"gAJYBQAAAHN0YXRlcQBLDFgBAAAAeHEBh3ECiIZxAy4=", "state.12.x", true},
    };
    static const char *const bad[] = {
        "",
        "a",
        "weight",
        "gASVEAAAAAAAAACMAWGUjANiLmOUhpSJhpQ",
        "gASV",
        "gAJdcQAu",             /* a list */
        "gAJLAUsChnEALg==",     /* (1, 2) */
        "gAIpiYZxAC4=",         /* ((), False) */
        "gAJdcQBhhXEBiYZxAi4=", /* damaged */
        "gASVEAAAAAAAAACMAWGUjANiLmOUhpSJhpQu====",
        "gASVEAAAAAAAAACMAWGUjANiLmOUhpSJhpQ+",
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(good); i++) {
        CLEANUP(buf_release) struct buf key = {0};
        struct err e = {0};
        bool pickled = !good[i].pickled;

        assert_ok(
            olmo_key_decode(good[i].text, strlen(good[i].text), &key, &pickled, &e),
            &e);
        assert_string_equal(key.data, good[i].key);
        assert_int_equal(pickled, good[i].pickled);
    }
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        CLEANUP(buf_release) struct buf key = {0};
        struct err e = {0};
        bool pickled;

        if (olmo_key_decode(bad[i], strlen(bad[i]), &key, &pickled, &e) != -EBADMSG)
            fail_msg("\"%s\" is a key: %s", bad[i], key.data);
    }
}

/* ---- bids ---- */

/* What others write, which only looks alike. */
static void test_bids(void **state)
{
    static const struct {
        const char *name;
        struct {
            const char *to, *from;
        } file[4];
        int score;
    } cases[] = {
        {"copy",
         {{"model.pt", "core_one_file/model.pt"},
          {"optim.pt", "core_one_file/optim.pt"}},
         85},
        {"run", /* anybody's model and torch's own optimizer */
         {{"model.pt", "core_one_file/model.pt"},
          {"optim.pt", "step1000-unsharded/optim.pt"}},
         0},
        {"step7-unsharded",
         {{"model.pt", "core_one_file/model.pt"},
          {"optim.pt", "step1000-unsharded/optim.pt"}},
         80},
        {"run", {{"model.pt", "core_one_file/model.pt"}}, 0},
        {"run",
         {{"model.pt", "step1000-unsharded/model.pt"},
          {"train.pt", "step1000-unsharded/train.pt"}},
         0},
        {"run",
         {{"model.pt", "step1000-unsharded/model.pt"},
          {"other.pt", "step1000-unsharded/train.pt"},
          {"config.yaml", "step1000-unsharded/config.yaml"}},
         80},
        {"run",
         {{"model.safetensors", "core_chunks/model/chunk-00001.safetensors"}},
         0},
        {"run", {{"model.safetensors", "step2000-unsharded/model.safetensors"}}, 90},
        {"run", /* called as another tensor */
         {{"model/model-blocks-0-x.safetensors",
           "core_chunks/model/chunk-00001.safetensors"}},
         0},
        {"run",
         {{"model/model-00001-of-00002.safetensors",
           "core_chunks/model/chunk-00001.safetensors"}},
         0},
        {"run", {{"model-best.pt", "step1000-unsharded/model.pt"}}, 0},
        {"run", {{"model/chunk-00000.pt", "core_chunks_pt/model/chunk-00000.pt"}}, 88},
        {"run", {{"model/chunk-00000.pt", "step1000-unsharded/config.yaml"}}, 0},
        {"model", {{"chunk-00000.pt", "core_chunks_pt/model/chunk-00000.pt"}}, 75},
        {"data", {{"chunk-00000.pt", "core_chunks_pt/model/chunk-00000.pt"}}, 0},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct made m;
        int score;

        made_begin(&m, cases[i].name);
        for (size_t k = 0; cases[i].file[k].to; k++)
            made_from(&m, cases[i].file[k].to, state, cases[i].file[k].from);
        score = folder_score(&format_olmo_unsharded, m.dir);
        if (score != cases[i].score)
            fail_msg("case %zu: %d, not %d", i, score, cases[i].score);
        made_end(&m);
    }
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "names", .test_func = test_names},
        {.name = "classic", .test_func = test_classic},
        {.name = "a set alone", .test_func = test_alone},
        {.name = "chunks", .test_func = test_chunks},
        {.name = "a damaged optimizer", .test_func = test_damaged_optimizer},
        {.name = "keys", .test_func = test_keys},
        {.name = "bids", .test_func = test_bids},
    };

    return run_with_fixtures("olmo_unsharded", argc, argv, others, ARRAY_SIZE(others));
}
