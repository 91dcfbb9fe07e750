/* SPDX-License-Identifier: MIT */
/* tests/formats/test_hf_trainer.c - Trainer's and Accelerate's checkpoints, whole and broken. */
#include "made.h"

#include <limits.h>
#include <stdio.h>

#include "base/err.h"
#include "fixture_tree.h"
#include "index/formats/format.h"
#include "index/formats/hf/train_parts.h"
#include "index/formats/json_object.h"
#include "tests/unit/unit.h"

extern const struct format_driver format_hf_trainer;

static const char one_float[] =
    "{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";
static const char other_float[] =
    "{\"v\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}";

/* A file of a fixture, under another name. */
static const char small_bin[] = "accelerate_fsdp2_full_2r/custom_checkpoint_0.pkl";
static const char model_bin[] = "accelerate_fsdp2_full_2r/pytorch_model_fsdp.bin";
static const char rng_bin[] = "accelerate_fsdp2_full_2r/random_states_0.pkl";

static const char *objects_of(struct opened *o, struct buf *text)
{
    buf_clear(text);
    all_objects(o, text);
    return text->data;
}

/* ---- names ---- */

static void test_names(void **state UNUSED)
{
    static const struct {
        const char *name;
        bool dir;
        int kind; /* -1: nothing of ours */
        uint64_t index, rank;
    } cases[] = {
        {"pytorch_model_fsdp_0", true, TRAIN_MODEL_DCP, 0, 0},
        {"pytorch_model_fsdp_12", true, TRAIN_MODEL_DCP, 12, 0},
        {"pytorch_model_fsdp_0", false, -1, 0, 0},
        {"pytorch_model_fsdp", true, -1, 0, 0},
        {"pytorch_model_fsdp.bin", false, TRAIN_MODEL_FILE, 0, 0},
        {"pytorch_model_fsdp_1.bin", false, TRAIN_MODEL_FILE, 1, 0},
        {"pytorch_model_fsdp_rank3.bin", false, TRAIN_MODEL_LOCAL, 0, 3},
        {"pytorch_model_fsdp_0_rank3.bin", false, TRAIN_MODEL_RANK, 0, 3},
        {"pytorch_model_fsdp_2_rank3.bin", false, TRAIN_MODEL_RANK, 2, 3},
        {"optimizer.bin", false, TRAIN_OPTIM_FILE, 0, 0},
        {"optimizer.pt", false, TRAIN_OPTIM_FILE, 0, 0},
        {"optimizer_1.bin", false, TRAIN_OPTIM_FILE, 1, 0},
        {"optimizer_1.pt", false, -1, 0, 0},
        {"optimizer_0_rank10.bin", false, TRAIN_OPTIM_RANK, 0, 10},
        {"optimizer_0", true, TRAIN_OPTIM_DCP, 0, 0},
        {"model_1.safetensors", false, TRAIN_MORE_MODEL, 1, 0},
        {"model_0.safetensors", false, -1, 0, 0},
        {"model.safetensors", false, -1, 0, 0},
        {"pytorch_model_1.bin", false, TRAIN_MORE_MODEL_BIN, 1, 0},
        {"pytorch_model.bin", false, -1, 0, 0},
        {"pytorch_lora_weights.safetensors", false, TRAIN_LORA, 0, 0},
        {"pytorch_lora_weights.bin", false, TRAIN_LORA, 0, 0},
        {"pytorch_lora_weights_1.bin", false, -1, 0, 0},
        {"rng_state.pth", false, TRAIN_RNG, 0, 0},
        {"rng_state_7.pth", false, TRAIN_RNG, 7, 7},
        {"random_states_7.pkl", false, TRAIN_RNG, 7, 7},
        {"random_states.pkl", false, -1, 0, 0},
        {"random_states_007.pkl", false, -1, 0, 0},
        {"random_states_1234567890.pkl", false, -1, 0, 0},
        {"scheduler.pt", false, TRAIN_STATE, 0, 0},
        {"scheduler_1.bin", false, TRAIN_STATE, 1, 0},
        {"dl_state_dict.bin", false, TRAIN_STATE, 0, 0},
        {"custom_checkpoint_3.pkl", false, TRAIN_STATE, 3, 0},
        {"training_args.bin", false, TRAIN_ARGS, 0, 0},
        {"trainer_state.json", false, TRAIN_JSON, 0, 0},
        {"global_step400", true, TRAIN_DEEPSPEED, 400, 0},
        {"config.json", false, -1, 0, 0},
        {"checkpoint-2", true, -1, 0, 0},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const struct listing_entry entry = {
            .name = cases[i].name, .st.kind = cases[i].dir ? ENTRY_DIR : ENTRY_FILE};
        struct train_part part = {0};
        bool found = train_part_of(&entry, &part);

        if (found != (cases[i].kind >= 0) ||
            (found && ((int)part.kind != cases[i].kind ||
                       part.index != cases[i].index || part.rank != cases[i].rank)))
            fail_msg("%s: kind %d, index %" PRIu64 ", rank %" PRIu64, cases[i].name,
                     found ? (int)part.kind : -1, part.index, part.rank);
    }
}

/* ---- trainer_state.json ---- */

static void test_json(void **state UNUSED)
{
    static const char *const cases[][2] = {
        {"{\"a\": NaN, \"b\": [Infinity, -Infinity, -1.5e-3]}",
         "{\"a\": {\"$type\":\"float\",\"value\":\"nan\"}, \"b\": "
         "[{\"$type\":\"float\",\"value\":\"inf\"}, "
         "{\"$type\":\"float\",\"value\":\"-inf\"}, -1.5e-3]}"},
        {"[9007199254740992, 9007199254740993, -9007199254740993, 12345678901234567890]",
         "[9007199254740992, {\"$type\":\"int\",\"value\":\"9007199254740993\"}, "
         "{\"$type\":\"int\",\"value\":\"-9007199254740993\"}, "
         "{\"$type\":\"int\",\"value\":\"12345678901234567890\"}]"},
        {"{\"$type\": \"NaN\", \"x\" : \"$type\", \"$$type\":{}}",
         "{\"$$type\": \"NaN\", \"x\" : \"$type\", \"$$$type\":{}}"},
        {"{\"a\\\"NaN\": \"-Infinity\\\\\"}", "{\"a\\\"NaN\": \"-Infinity\\\\\"}"},
        {"{\"\\u0024typ\\u0065\": 1, \"a\\u0041\": 2}", "{\"$$type\": 1, \"aA\": 2}"},
        {"\"cut", "\"cut"},
        {"{\"\\x\": 1", "{\"\\x\": 1"},
        {"", ""},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf out = {0};
        struct err e = {0};

        buf_adds(&out, "");
        assert_ok(json_to_object(cases[i][0], strlen(cases[i][0]), &out, &e), &e);
        assert_string_equal(out.data, cases[i][1]);
    }
}

static void make_trainer(struct made *m, const char *trainer_state)
{
    made_begin(m, "checkpoint-7");
    made_safetensors(m, "model.safetensors", one_float, 5, 1);
    made_text(m, "config.json", "{\"transformers_version\": \"4.40.1\"}");
    made_text(m, "trainer_state.json", trainer_state);
}

static void test_state(void **state UNUSED)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    make_trainer(&m, "{\"epoch\": 1.5, \"global_step\": 12, \"loss\": NaN}");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "hf-trainer");
    assert_string_equal(o.info.version, "4.40.1");
    assert_int_equal(o.info.step, 12); /* the file knows better than the name */
    assert_string_equal(o.info.topology,
                        "{\"epoch\": 1.5, \"model\": \"Hugging Face\", "
                        "\"optimizer\": \"none\"}");
    assert_string_equal(objects_of(&o, &text),
                        "trainer_state.json={\"epoch\": 1.5, \"global_step\": 12, "
                        "\"loss\": {\"$type\":\"float\",\"value\":\"nan\"}}\n");
    check_floats(&o, "w", (const float[]){5}, 1);
    check_warnings(&o, "");
    close_checkpoint(&o);
    made_end(&m);
}

static void test_damaged_state(void **state)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    make_trainer(&m, "{\"global_step\": 12,");
    made_text(&m, "optimizer.pt", "PK\003\004 but no zip");
    made_from(&m, "rng_state.pth", state, rng_bin);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.step, 7);
    check_floats(&o, "w", (const float[]){5}, 1);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 0);
    assert_non_null(tensor(&o, "rng_state.pth:torch_manual_seed"));
    assert_int_equal(o.info.warnings, 2);
    objects_of(&o, &text);
    assert_has(text.data,
               "optimizer.pt:={\"$type\":\"opaque\",\"class\":\"unreadable\"");
    assert_has(text.data,
               "trainer_state.json={\"$type\":\"opaque\",\"class\":\"unreadable\"");
    close_checkpoint(&o);
    /* The model is what counts. */
    made_text(&m, "model.safetensors", "damaged");
    made_open(&m, &o);
    assert_non_null(o.info.error);
    assert_has(o.info.error, "model.safetensors");
    assert_string_equal(o.info.format, "hf-trainer");
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- several models and copies ---- */

/* Keys that meet have their file before them; both are of role model. */
static void test_two_models(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "checkpoint_3");
    made_safetensors(&m, "model.safetensors", one_float, 5, 1);
    made_safetensors(&m, "model_1.safetensors", one_float, 6, 1);
    made_safetensors(&m, "model_2.safetensors", other_float, 7, 1);
    made_from(&m, "random_states_0.pkl", state, rng_bin);
    made_from(&m, "random_states_1.pkl", state, rng_bin);
    made_from(&m, "optimizer.bin", state, small_bin);
    made_from(&m, "optimizer_1.bin", state, small_bin);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "accelerate");
    assert_false(o.info.has_step); /* the third save, of whatever step */
    check_floats(&o, "w", (const float[]){5}, 1);
    check_floats(&o, "model_1.safetensors/w", (const float[]){6}, 1);
    check_floats(&o, "v", (const float[]){7}, 1);
    assert_int_equal(tensor(&o, "model_1.safetensors/w")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "optimizer.bin/w")->role, ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "optimizer_1.bin/w")->role, ROLE_OPTIMIZER);
    assert_int_equal(o.info.by_role[ROLE_OTHER], 2);
    assert_string_equal(o.info.topology, "{\"ranks\": 2, \"model\": \"Hugging Face\", "
                                         "\"optimizer\": \"in one file\"}");
    check_warnings(&o, "");
    close_checkpoint(&o);
    made_end(&m);
}

/* Trainer with FULL_STATE_DICT writes the model twice. */
static void test_copy(void **state)
{
    struct made m;
    struct opened o;

    make_trainer(&m, "{\"global_step\": 7}");
    made_from(&m, "pytorch_model_fsdp.bin", state, model_bin);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 1);
    assert_int_equal(o.info.by_role[ROLE_OTHER], 21);
    assert_int_equal(tensor(&o, "lm_head.weight")->role, ROLE_OTHER);
    check_warnings(&o, "two-models: pytorch_model_fsdp.bin holds the model a second "
                       "time: its tensors are of role other\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* The adapter stays what it is beside the model that FSDP saved. */
static void test_adapter(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "checkpoint-7");
    made_safetensors(&m, "adapter_model.safetensors", one_float, 5, 1);
    made_text(&m, "adapter_config.json", "{}");
    made_text(&m, "trainer_state.json", "{\"global_step\": 7}");
    made_open(&m, &o);
    assert_true(o.info.adapter);
    assert_int_equal(tensor(&o, "w")->role, ROLE_MODEL);
    close_checkpoint(&o);
    made_from(&m, "pytorch_model_fsdp.bin", state, model_bin);
    made_open(&m, &o);
    assert_false(o.info.adapter);
    assert_int_equal(tensor(&o, "w")->role, ROLE_OTHER);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 21);
    check_floats(&o, "w", (const float[]){5}, 1);
    check_warnings(&o, "");
    close_checkpoint(&o);
    made_end(&m);
}

/* diffusers' scripts save a LoRA in place of the model, which its loader finds by name. */
static void test_lora(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "checkpoint-7");
    made_from(&m, "random_states_0.pkl", state, rng_bin);
    made_from(&m, "pytorch_lora_weights.bin", state, model_bin); /* before 0.20 */
    made_open(&m, &o);
    assert_string_equal(o.info.format, "accelerate");
    assert_int_equal(o.info.by_role[ROLE_MODEL], 21);
    check_warnings(&o, "");
    close_checkpoint(&o);
    made_safetensors(&m, "pytorch_lora_weights.safetensors", one_float, 5, 1);
    made_open(&m, &o); /* the other one is as if it were not there */
    assert_int_equal(o.info.by_role[ROLE_MODEL], 1);
    check_floats(&o, "w", (const float[]){5}, 1);
    close_checkpoint(&o);
    made_safetensors(&m, "model.safetensors", other_float, 6, 1);
    made_open(&m, &o);
    assert_int_equal(tensor(&o, "v")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "w")->role, ROLE_OTHER);
    check_floats(&o, "w", (const float[]){5}, 1);
    check_warnings(&o, "");
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- shards ---- */

static const char sharded[] = "accelerate_fsdp2_sharded_2r";

static void copy_dcp(void **state, const struct made *m, const char *dir)
{
    static const char *const names[] = {".metadata", "__0_0.distcp", "__1_0.distcp"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        char path[300], to[300];

        snprintf(path, sizeof path, "%s/%s/%s", sharded, dir, names[i]);
        snprintf(to, sizeof to, "%s/%s", dir, names[i]);
        made_from(m, to, state, path);
    }
}

static void drop(const struct made *m, const char *name)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", m->dir, name);
    assert_int_equal(remove(path), 0);
}

static void test_lost_shard(void **state)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    made_begin(&m, "save");
    copy_dcp(state, &m, "pytorch_model_fsdp_0");
    copy_dcp(state, &m, "optimizer_0");
    drop(&m, "pytorch_model_fsdp_0/__1_0.distcp");
    made_text(&m, "optimizer_0/.metadata", "no pickle");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_fault(&o, "model.lm_head.weight", "__1_0.distcp is missing");
    assert_int_equal(o.info.by_role[ROLE_MODEL], 21);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 0);
    assert_int_equal(o.info.warnings, 1);
    all_warnings(&o, &text);
    assert_has(text.data,
               "missing-part: optimizer_0 has .distcp files and no .metadata: ");
    close_checkpoint(&o);
    made_end(&m);
}

static const char ranks[] = "accelerate_fsdp2_rankfiles_2r";

/* The shards tell how many ranks there were, numbers how many files of a kind. */
static void test_lost_states(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "save");
    copy_dcp(state, &m, "pytorch_model_fsdp_0");
    made_from(&m, "random_states_0.pkl", state, rng_bin);
    made_from(&m, "random_states_1.pkl", state, rng_bin);
    made_from(&m, "custom_checkpoint_0.pkl", state, small_bin);
    made_from(&m, "custom_checkpoint_2.pkl", state, small_bin);
    made_from(&m, "custom_checkpoint_1.pkl", state, small_bin);
    made_from(&m, "scheduler.bin", state, small_bin);
    made_from(&m, "scheduler_1.bin", state, small_bin);
    made_from(&m, "sampler_1.bin", state, small_bin); /* not all loaders have one */
    made_open(&m, &o);
    check_warnings(&o, "");
    close_checkpoint(&o);
    drop(&m, "random_states_1.pkl");
    drop(&m, "custom_checkpoint_1.pkl");
    drop(&m, "scheduler.bin");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_warnings(&o, "missing-file: 1 of the 3 files of custom_checkpoint that their "
                       "numbers count are missing\n"
                       "missing-file: 1 of the 2 files of scheduler that their numbers "
                       "count are missing\n"
                       "missing-file: random states of 1 of 2 ranks are missing\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* Rank 1 of 2 is gone: whole is only what rank 0 holds whole. */
static void test_lost_rank(void **state)
{
    static const char *const names[] = {
        "pytorch_model_fsdp_0_rank0.bin", "pytorch_model_fsdp_0_rank1.bin",
        "optimizer_0_rank0.bin", "optimizer_0_rank1.bin"};
    CLEANUP(buf_release) struct buf text = {0};
    char path[300];
    struct made m;
    struct opened o;

    made_begin(&m, "save");
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        snprintf(path, sizeof path, "%s/%s", ranks, names[i]);
        made_from(&m, names[i], state, path);
    }
    drop(&m, names[0]);
    made_text(&m, names[2], "damaged");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.topology,
                        "{\"ranks\": 2, \"model\": \"FSDP, a file a rank\", "
                        "\"optimizer\": \"FSDP, a file a rank\"}");
    assert_int_equal(o.info.by_role[ROLE_MODEL], 21);
    check_fault(&o, "lm_head.weight", "parts of it are in 1 of 2 ranks' files");
    all_warnings(&o, &text);
    assert_has(text.data, "missing-file: ");
    assert_has(text.data, "damaged-file: ");
    assert_true(o.info.faults > 0);
    close_checkpoint(&o);
    made_end(&m);
}

/* A file a rank beside the Hugging Face model is a copy; LOCAL_STATE_DICT a set by itself. */
static void test_sets(void **state)
{
    char path[300];
    struct made m;
    struct opened o;

    make_trainer(&m, "{\"global_step\": 7}");
    for (int r = 0; r < 2; r++) {
        char name[64];

        snprintf(path, sizeof path, "%s/pytorch_model_fsdp_0_rank%d.bin", ranks, r);
        snprintf(name, sizeof name, "pytorch_model_fsdp_rank%d.bin", r);
        made_from(&m, name, state, path);
    }
    made_open(&m, &o);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 1);
    assert_int_equal(o.info.by_role[ROLE_OTHER], 21);
    check_warnings(&o, "two-models: pytorch_model_fsdp holds the model a second time: "
                       "its tensors are of role other\n");
    close_checkpoint(&o);
    drop(&m, "model.safetensors");
    made_open(&m, &o);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 21);
    assert_int_equal(o.info.faults, 0);
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- a model file of other shapes than FSDP's files ---- */

static int note_passed(void *user, const char *text, bool passed)
{
    return passed ? buf_addf(user, "%s\n", text) : 0;
}

/* lm_head.weight is [97, 24] in FSDP's files. */
static void check_head(const struct made *m, unsigned rows, const char *from)
{
    CLEANUP(buf_release) struct buf passed = {0}, want = {0};
    struct err e = {0};
    struct opened o;
    char header[200];

    snprintf(header, sizeof header,
             "{\"lm_head.weight\":{\"dtype\":\"F32\",\"shape\":[%u,24],"
             "\"data_offsets\":[0,%u]}}",
             rows, rows * 24 * 4);
    made_safetensors(m, "model.safetensors", header, 5, (size_t)rows * 24);
    made_open(m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 0);
    buf_adds(&passed, "");
    assert_ok(catalog_origins(o.w.catalog, o.info.id, note_passed, &passed, &e), &e);
    buf_adds(&want, "");
    if (rows != 97)
        buf_addf(&want,
                 "model.safetensors: its lm_head.weight has shape [%u, 24], in %s "
                 "[97, 24]\n",
                 rows, from);
    assert_string_equal(passed.data, want.data);
    assert_int_equal(o.info.by_role[ROLE_MODEL], rows == 97 ? 1 : 21);
    close_checkpoint(&o);
}

/* The shards are the model then: a file of one rank's slices looks whole by itself. */
static void test_other_shapes(void **state)
{
    static const char *const rank_files[] = {"pytorch_model_fsdp_0_rank0.bin",
                                             "pytorch_model_fsdp_0_rank1.bin"};
    struct made m;

    made_begin(&m, "save");
    made_from(&m, "pytorch_model_fsdp.bin", state, model_bin);
    check_head(&m, 97, "");
    check_head(&m, 48, "pytorch_model_fsdp.bin");
    made_end(&m);
    made_begin(&m, "save");
    for (size_t i = 0; i < ARRAY_SIZE(rank_files); i++) {
        char path[300];

        snprintf(path, sizeof path, "%s/%s", ranks, rank_files[i]);
        made_from(&m, rank_files[i], state, path);
    }
    check_head(&m, 97, "");
    check_head(&m, 48, "pytorch_model_fsdp_0_rank0.bin");
    made_end(&m);
    made_begin(&m, "save");
    copy_dcp(state, &m, "pytorch_model_fsdp_0");
    check_head(&m, 97, "");
    check_head(&m, 48, "pytorch_model_fsdp_0");
    made_end(&m);
}

/* ---- DeepSpeed ---- */

/* global_step4/ of the fixture, under another name. */
static void copy_deepspeed(void **state, const struct made *m, const char *dir)
{
    static const char *const names[] = {
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "zero_pp_rank_1_mp_rank_00_model_states.pt"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        char path[300], to[300];

        snprintf(path, sizeof path,
                 "trainer_deepspeed_1_and_3/checkpoint-4/global_step4/%s", names[i]);
        snprintf(to, sizeof to, "%s/%s", dir, names[i]);
        made_from(m, to, state, path);
    }
}

static void check_tag(const struct made *m, const char *tag, const char *part)
{
    struct opened o;

    made_text(m, "latest", tag);
    made_open(m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 1);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 24);
    assert_int_equal(o.info.by_role[ROLE_OTHER], 12); /* its masters */
    assert_int_equal(tensor(&o, part)->role, ROLE_OTHER);
    check_warnings(&o, "");
    close_checkpoint(&o);
}

/* The file `latest` decides; where it names nothing, the number does. */
static void test_tags(void **state)
{
    struct made m;
    struct opened o;

    make_trainer(&m, "{\"global_step\": 7}");
    made_safetensors(&m, "model.safetensors",
                     "{\"scale\":{\"dtype\":\"F32\",\"shape\":[1],"
                     "\"data_offsets\":[0,4]}}",
                     5, 1);
    copy_deepspeed(state, &m, "global_step9");
    copy_deepspeed(state, &m, "global_step10");
    check_tag(&m, "global_step9\n", "global_step9/scale");
    check_tag(&m, "global_step10", "global_step10/scale");
    check_tag(&m, "global_step8", "global_step10/scale");
    check_tag(&m, "", "global_step10/scale");
    drop(&m, "model.safetensors");
    made_open(&m, &o);
    assert_int_equal(tensor(&o, "scale")->role, ROLE_MODEL);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 12);
    assert_int_equal(o.info.by_role[ROLE_OTHER], 0);
    assert_int_equal(o.info.step, 7); /* Trainer's, not DeepSpeed's */
    close_checkpoint(&o);
    made_end(&m);
}

/* Accelerate has a directory a model; a damaged one is told where another model is there. */
static void test_damaged_deepspeed(void **state)
{
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    made_begin(&m, "save");
    copy_deepspeed(state, &m, "pytorch_model");
    copy_deepspeed(state, &m, "pytorch_model_1");
    made_from(&m, "random_states_0.pkl", state, rng_bin);
    made_text(&m, "latest", "pytorch_model_1");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "accelerate");
    assert_int_equal(o.info.by_role[ROLE_MODEL], 24);
    assert_int_equal(tensor(&o, "pytorch_model_1/scale")->role, ROLE_MODEL);
    assert_non_null(tensor(&o, "scale"));
    close_checkpoint(&o);
    made_text(&m, "pytorch_model_1/zero_pp_rank_0_mp_rank_00_model_states.pt", "bad");
    made_text(&m, "pytorch_model_1/zero_pp_rank_1_mp_rank_00_model_states.pt", "bad");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_non_null(tensor(&o, "scale"));
    all_warnings(&o, &text);
    assert_has(text.data, "damaged-part: pytorch_model_1: ");
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- bids ---- */

static void test_bids(void **state)
{
    struct made m;

    made_begin(&m, "run");
    assert_int_equal(folder_score(&format_hf_trainer, m.dir), 0);
    made_from(&m, "random_states_0.pkl", state, rng_bin);
    made_text(&m, "trainer_state.json", "{\"global_step\": 1}");
    assert_int_equal(folder_score(&format_hf_trainer, m.dir), 0); /* state of nothing */
    made_safetensors(&m, "model.safetensors", one_float, 5, 1);
    assert_int_equal(folder_score(&format_hf_trainer, m.dir), 92);
    made_text(&m, "trainer_state.json", "{}");
    assert_int_equal(folder_score(&format_hf_trainer, m.dir), 90);
    made_text(&m, "random_states_0.pkl", "no torch file");
    assert_int_equal(folder_score(&format_hf_trainer, m.dir),
                     0); /* the model's own driver is enough */
    made_from(&m, "training_args.bin", state, small_bin);
    assert_int_equal(folder_score(&format_hf_trainer, m.dir), 84);
    made_from(&m, "optimizer.bin", state, small_bin);
    assert_int_equal(folder_score(&format_hf_trainer, m.dir), 86);
    drop(&m, "model.safetensors");
    assert_int_equal(folder_score(&format_hf_trainer, m.dir), 0);
    copy_dcp(state, &m, "pytorch_model_fsdp_0");
    assert_int_equal(folder_score(&format_hf_trainer, m.dir), 88);
    drop(&m, "pytorch_model_fsdp_0/.metadata"); /* not complete */
    made_from(&m, "random_states_0.pkl", state, rng_bin);
    assert_int_equal(folder_score(&format_hf_trainer, m.dir), 0);
    made_end(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "names", .test_func = test_names},
        {.name = "json", .test_func = test_json},
        {.name = "state", .test_func = test_state},
        {.name = "damaged state", .test_func = test_damaged_state},
        {.name = "two models", .test_func = test_two_models},
        {.name = "copy", .test_func = test_copy},
        {.name = "adapter", .test_func = test_adapter},
        {.name = "LoRA of diffusers", .test_func = test_lora},
        {.name = "lost shard", .test_func = test_lost_shard},
        {.name = "lost states", .test_func = test_lost_states},
        {.name = "lost rank", .test_func = test_lost_rank},
        {.name = "sets of ranks", .test_func = test_sets},
        {.name = "other shapes", .test_func = test_other_shapes},
        {.name = "DeepSpeed's tags", .test_func = test_tags},
        {.name = "damaged DeepSpeed", .test_func = test_damaged_deepspeed},
        {.name = "bids", .test_func = test_bids},
    };

    return run_with("hf_trainer", argc, argv, test_fixture_tree, others,
                    ARRAY_SIZE(others));
}
