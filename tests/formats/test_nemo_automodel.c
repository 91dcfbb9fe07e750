/* SPDX-License-Identifier: MIT */
/* tests/formats/test_nemo_automodel.c - epoch_E_step_S: parts, names, state, what is lost. */
#include "made.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>

#include "base/err.h"
#include "base/json.h"
#include "index/formats/format.h"
#include "index/view.h"
#include "tests/unit/unit.h"

extern const struct format_driver format_nemo_automodel;

static const char suffix[] = ".expected.json";

/* ---- fixtures ---- */

/*
 * "epoch_0_step_2/PART:KEY" is KEY in the model and the optimizer (none of theirs meet),
 * and "PART:KEY" in files of other state.
 */
static const char *shown_key(const char *expected, const char *epoch)
{
    size_t len = strlen(epoch);
    const char *rest = expected + len + 1;

    if (strncmp(expected, epoch, len) != 0 || expected[len] != '/')
        return NULL;
    return strncmp(rest, "model:", 6) == 0 || strncmp(rest, "optim:", 6) == 0 ? rest + 6
                                                                              : rest;
}

static enum role role_in(const char *expected, const char *epoch)
{
    const char *rest = expected + strlen(epoch) + 1;

    return strncmp(rest, "model:", 6) == 0   ? ROLE_MODEL
           : strncmp(rest, "optim:", 6) == 0 ? ROLE_OPTIMIZER
                                             : ROLE_OTHER;
}

static void check_epoch(const char *fixture, const char *epoch, const struct json *want)
{
    char path[PATH_MAX];
    struct opened o;
    size_t count = 0;

    snprintf(path, sizeof path, "%s/%s", fixture, epoch);
    open_checkpoint(path, &o);
    if (o.info.error)
        fail_msg("%s", o.info.error);
    assert_string_equal(o.info.format, "nemo-automodel");
    assert_string_equal(o.info.framework, "NeMo AutoModel");
    assert_int_equal(o.info.warnings, 0);
    assert_int_equal(o.info.faults, 0);
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, strcmp(epoch, "epoch_0_step_2") == 0 ? 2 : 4);
    for (const struct json *v = json_first(want); v; v = json_next(v)) {
        const char *key = shown_key(json_key(v), epoch);

        if (!key)
            continue;
        check_tensor(&o, tensor(&o, key), v);
        assert_int_equal(tensor(&o, key)->role, role_in(json_key(v), epoch));
        count++;
    }
    assert_true(count > 0);
    assert_int_equal(o.count, count);
    close_checkpoint(&o);
}

static void test_epochs(void **state)
{
    const char *fixture = *state;
    CLEANUP(json_freep) struct json *want = NULL;
    char path[PATH_MAX];
    struct dirent *d;
    size_t epochs = 0;
    DIR *dir = opendir(fixture);

    snprintf(path, sizeof path, "%s%s", fixture, suffix);
    want = read_json(path);
    assert_non_null(dir);
    while ((d = readdir(dir))) {
        if (strncmp(d->d_name, "epoch_", 6) != 0)
            continue;
        check_epoch(fixture, d->d_name, json_get(want, "tensors"));
        epochs++;
    }
    closedir(dir);
    assert_true(epochs > 0);
}

/* ---- details ---- */

static void open_fixture(void **state, const char *name, struct opened *o)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s/epoch_0_step_2", (const char *)*state, name);
    open_checkpoint(path, o);
}

static void test_state(void **state)
{
    static const char *const lines[] = {
        "step_scheduler.pt={\"step\":1,\"epoch\":0}\n",
        "sched.lr_decay_style=\"cosine\"\n",
        "optim.param_groups.lm_head.weight.betas={\"$type\":\"tuple\",\"items\":[0.9,0.999]}\n",
        "dataloader/dataloader_dp_rank_1.pt={\"_index_sampler_state\":null,"
        "\"_sampler_iter_state\":{\"samples_yielded\":4},",
        "\"torch_rng_state\":{\"$type\":\"tensor\","
        "\"key\":\"rng/rng_global_rank_1.pt:torch_rng_state\"",
    };
    CLEANUP(buf_release) struct buf objects = {0};
    struct opened o;

    open_fixture(state, "nemo_full_recipe_safetensors", &o);
    all_objects(&o, &objects);
    for (size_t i = 0; i < ARRAY_SIZE(lines); i++)
        assert_has(objects.data, lines[i]);
    assert_string_equal(
        o.info.topology,
        "{\"ranks\": 2, \"epoch\": 0, \"model\": \"shards in safetensors\"}");
    assert_has(o.info.metadata_file, "model/shard-00001-model-00001-of-00001");
    close_checkpoint(&o);
}

static int note_part(void *user, const char *name, bool part)
{
    return part ? buf_addf(user, "%s ", name) : 0;
}

static int note_copy(void *user, const struct catalog_file *f)
{
    return f->copy ? buf_addf(user, "%s ", f->path) : 0;
}

static void test_parts(void **state)
{
    CLEANUP(buf_release) struct buf parts = {0}, copies = {0};
    struct opened o;
    struct err e = {0};

    open_fixture(state, "nemo_full_recipe_safetensors", &o);
    assert_ok(catalog_hidden(o.w.catalog, o.info.id, note_part, &parts, &e), &e);
    assert_string_equal(parts.data, "dataloader model model/.hf_metadata "
                                    "model/consolidated optim rng ");
    assert_ok(catalog_files(o.w.catalog, o.info.id, note_copy, &copies, &e), &e);
    assert_string_equal(copies.data,
                        "model/consolidated/model-00001-of-00001.safetensors ");
    close_checkpoint(&o);
}

static int note_name(void *user, const struct tensor_info *t)
{
    return t->role == ROLE_MODEL && strstr(t->key, "lm_head")
               ? buf_addf(user, "%s %zu\n", t->key, t->wrapper)
               : 0;
}

/* What the savers put in front of lm_head, in both eras. */
static void test_wrappers(void **state)
{
    static const struct {
        const char *fixture, *head;
    } cases[] = {
        {"nemo_full_dcp", "lm_head.weight 0\n"},
        {"nemo_full_recipe_safetensors", "lm_head.weight 0\n"},
        {"nemo_seed_dcp", "model.lm_head.weight 6\n"},
        {"nemo_seed_safetensors", "model.lm_head.weight 6\n"},
        {"nemo_seed_tied_dup_dcp", "model.lm_head.weight 6\n"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf got = {0};
        struct opened o;
        struct err e = {0};

        open_fixture(state, cases[i].fixture, &o);
        assert_ok(catalog_tensors(o.w.catalog, o.info.id, 0, note_name, &got, &e), &e);
        assert_string_equal(got.data, cases[i].head);
        close_checkpoint(&o);
    }
}

/* A tied output layer is told where a config.json is; no tensor is made up. */
static void test_tied(void **state)
{
    CLEANUP(buf_release) struct buf objects = {0};
    struct opened o;

    open_fixture(state, "nemo_tied_consolidated", &o);
    all_objects(&o, &objects);
    assert_has(objects.data, "lm_head.weight=\"tied, not stored\"\n");
    close_checkpoint(&o);
}

static void test_adapter(void **state)
{
    struct opened o;

    open_fixture(state, "nemo_peft_dora", &o);
    assert_true(o.info.adapter);
    assert_string_equal(o.info.topology,
                        "{\"epoch\": 0, \"model\": \"a PEFT adapter\"}");
    close_checkpoint(&o);
}

/* ---- made from a fixture ---- */

static void copy_tree(const struct made *m, const char *from, const char *below)
{
    char dir[PATH_MAX], path[PATH_MAX + 300], to[PATH_MAX];
    struct dirent *d;
    DIR *handle;

    snprintf(dir, sizeof dir, "%s/%s", from, below);
    handle = opendir(dir);
    assert_non_null(handle);
    while ((d = readdir(handle))) {
        if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0)
            continue;
        snprintf(to, sizeof to, "%.512s%s%.255s", below, below[0] ? "/" : "",
                 d->d_name);
        snprintf(path, sizeof path, "%s/%s", dir, d->d_name);
        if (d->d_type == DT_DIR)
            copy_tree(m, from, to);
        else
            made_copy(m, to, path);
    }
    closedir(handle);
}

static void drop(const struct made *m, const char *name)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", m->dir, name);
    assert_int_equal(remove(path), 0);
}

static void begin_copy(void **state, const char *fixture, struct made *m)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s/epoch_0_step_2", (const char *)*state, fixture);
    made_begin(m, "epoch_0_step_2");
    copy_tree(m, path, "");
}

/* The optimizer's metadata tells the sizes of all parameters. */
static void test_lost_shard(void **state)
{
    struct made m;
    struct opened o;

    begin_copy(state, "nemo_seed_safetensors", &m);
    drop(&m, "model/shard-00002-model-00001-of-00001.safetensors");
    made_open(&m, &o);
    check_fault(&o, "model.lm_head.weight", "hole at [51, 0]");
    check_fault(&o, "model.norm.weight", "hole at [18]");
    check_warnings(&o, "lost-files: pieces of model.embed_tokens.weight are missing\n");
    assert_int_equal(o.info.faults, 21);
    assert_int_equal(tensor(&o, "model.norm.weight")->shape.dim[0], 36);
    close_checkpoint(&o);
    made_end(&m);
}

static void check_unsaved(struct opened *o, const char *key)
{
    check_fault(o, key,
                "no shard has it, but the optimizer or the list of names in "
                ".hf_metadata does");
}

/* A stage of a pipeline has whole layers: without its file there is no hole anywhere. */
static void test_lost_stage(void **state)
{
    static const char lost[] = "lost-files: no shard has %s, of which the optimizer or "
                               "fqn_to_file_index_mapping.json knows\n";
    static const char *const listings[] = {
        "model/.hf_metadata/fqn_to_file_index_mapping.json", "optim/.metadata"};
    char want[256];

    for (size_t i = 0; i < 1 + ARRAY_SIZE(listings); i++) {
        CLEANUP(buf_release) struct buf text = {0};
        struct made m;
        struct opened o;

        begin_copy(state, "nemo_pp_tied", &m);
        drop(&m, "model/shard-00002-model-00001-of-00001.safetensors");
        if (i > 0) /* one of both is enough */
            drop(&m, listings[i - 1]);
        made_open(&m, &o);
        check_unsaved(&o, "model.layers.1.mlp.up_proj.weight");
        check_unsaved(&o, "model.layers.1.input_layernorm.weight");
        check_unsaved(&o, "model.norm.weight");
        /* The head is tied by config.json: it is not stored where it is the same tensor. */
        assert_int_equal(o.info.faults, 10);
        assert_int_equal(o.info.by_role[ROLE_MODEL], 20);
        snprintf(want, sizeof want, lost, "model.layers.1.input_layernorm.weight");
        all_warnings(&o, &text);
        assert_has(text.data, want);
        close_checkpoint(&o);
        made_end(&m);
    }
}

/* Experts have other names in the files than in the optimizer. */
static void test_lost_experts(void **state)
{
    struct made m;
    struct opened o;

    begin_copy(state, "nemo_pp_ep", &m);
    drop(&m, "model/shard-00004-model-00001-of-00001.safetensors");
    made_open(&m, &o);
    check_fault(&o, "model.norm.weight", "hole at [6]");
    check_unsaved(&o, "model.layers.1.mlp.experts.2.up_proj.weight");
    check_unsaved(&o, "model.layers.1.mlp.experts.3.down_proj.weight");
    assert_int_equal(o.info.by_role[ROLE_MODEL], 45);
    check_warnings(&o, "lost-files: pieces of lm_head.weight are missing\n");
    close_checkpoint(&o);
    drop(&m, "model/shard-00003-model-00001-of-00001.safetensors");
    made_open(&m, &o);
    check_unsaved(&o, "model.layers.1.mlp.experts.0.up_proj.weight");
    check_unsaved(&o, "lm_head.weight");
    assert_int_equal(o.info.by_role[ROLE_MODEL], 45);
    close_checkpoint(&o);
    drop(&m, "model/.hf_metadata/fqn_to_file_index_mapping.json");
    made_open(&m, &o);
    check_unsaved(&o, "model.layers.1.mlp.experts.gate_and_up_projs");
    close_checkpoint(&o);
    made_end(&m);
}

/* A stage that has the head keeps it, though config.json calls it tied. */
static void test_head_of_stage(void **state)
{
    CLEANUP(buf_release) struct buf objects = {0};
    struct opened o;

    open_fixture(state, "nemo_pp_tied", &o);
    assert_int_equal(tensor(&o, "lm_head.weight")->role, ROLE_MODEL);
    all_objects(&o, &objects);
    assert_null(strstr(objects.data, "tied, not stored"));
    close_checkpoint(&o);
}

static void test_damaged_parts(void **state)
{
    CLEANUP(buf_release) struct buf text = {0}, objects = {0};
    struct made m;
    struct opened o;

    begin_copy(state, "nemo_full_recipe_safetensors", &m);
    made_text(&m, "optim/.metadata", "no pickle");
    made_text(&m, "rng/rng_global_rank_0.pt", "no torch file");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 21);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 0);
    assert_int_equal(o.info.by_role[ROLE_OTHER], 2);
    assert_int_equal(o.info.faults, 0);
    all_warnings(&o, &text);
    assert_has(text.data, "damaged-part: optim: optim/.metadata: ");
    all_objects(&o, &objects);
    assert_has(objects.data, "rng/rng_global_rank_0.pt={\"$type\":\"opaque\","
                             "\"class\":\"unreadable\"");
    close_checkpoint(&o);
    /* Without a model that can be read there is nothing to show. */
    drop(&m, "model/shard-00002-model-00001-of-00001.safetensors");
    made_text(&m, "model/shard-00001-model-00001-of-00001.safetensors", "damaged");
    made_open(&m, &o);
    assert_non_null(o.info.error);
    assert_has(o.info.error, "shard-00001-model-00001-of-00001.safetensors");
    close_checkpoint(&o);
    made_end(&m);
}

/* Rank 0 of a pipeline saved the layers of its own stage, before 0.6. */
static void test_adapter_of_stage(void **state)
{
    struct made m;
    struct opened o;

    begin_copy(state, "nemo_peft_dora", &m);
    made_safetensors(&m, "model/adapter_model.safetensors",
                     "{\"base_model.model.model.layers.1.mlp.down_proj.lora_A.weight\":"
                     "{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}",
                     1, 2);
    made_open(&m, &o);
    assert_null(o.info.error);
    check_warnings(&o,
                   "missing-layers: the adapter has nothing of 1 layers that the "
                   "optimizer has the state of, as "
                   "model.layers.0.mlp.down_proj.lora_A.weight: before 0.6 only the "
                   "first stage of a pipeline was saved\n");
    assert_int_equal(o.info.faults, 0);
    close_checkpoint(&o);
    made_end(&m);
}

/* What a save leaves that ended before the optimizer was whole; the model is. */
static void test_unfinished_optimizer(void **state)
{
    struct made m;
    struct opened o;

    begin_copy(state, "nemo_full_recipe_safetensors", &m);
    drop(&m, "optim/.metadata");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 21);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 0);
    assert_int_equal(o.info.faults, 0);
    check_warnings(&o,
                   "missing-part: optim/ holds nothing that is known: its .metadata "
                   "is lost, or the save was not finished\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* The shards were removed, the full files kept. */
static void test_only_consolidated(void **state)
{
    struct made m;
    struct opened o;

    begin_copy(state, "nemo_full_recipe_safetensors", &m);
    drop(&m, "model/shard-00001-model-00001-of-00001.safetensors");
    drop(&m, "model/shard-00002-model-00001-of-00001.safetensors");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 21);
    assert_int_equal(o.info.faults, 0);
    check_warnings(&o, "");
    close_checkpoint(&o);
    made_end(&m);
}

static enum place_kind kind_of(const struct made *m, const char *below)
{
    static const struct store_options options;
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP(place_release) struct place place = {0};
    struct store *store;
    struct err e = {0};
    char top[PATH_MAX];
    enum place_kind kind;

    snprintf(top, sizeof top, "%s", m->dir);
    *strrchr(top, '/') = '\0';
    assert_ok(store_open_local(top, &options, &store, &e), &e);
    assert_ok(store->ops->list(store, below, &l, &e), &e);
    assert_ok(place_of(l, NULL, &place, &e), &e);
    kind = place.kind;
    listing_free(steal(&l));
    store_close(store);
    return kind;
}

/* Nothing of it is a checkpoint, not even what looks complete by itself. */
static void test_incomplete(void **state)
{
    static const char *const below[] = {"epoch_0_step_2", "epoch_0_step_2/model",
                                        "epoch_0_step_2/model/consolidated",
                                        "epoch_0_step_2/optim", "epoch_0_step_2/rng"};
    struct made m;

    begin_copy(state, "nemo_full_recipe_safetensors", &m);
    assert_int_equal(kind_of(&m, below[0]), PLACE_CHECKPOINT);
    assert_int_equal(kind_of(&m, below[2]), PLACE_CHECKPOINT);
    made_text(&m, ".incomplete", "");
    for (size_t i = 0; i < ARRAY_SIZE(below); i++)
        assert_int_equal(kind_of(&m, below[i]), PLACE_PLAIN);
    made_end(&m);
}

/* ---- bids ---- */

static void test_bids(void **state)
{
    char path[PATH_MAX], other[PATH_MAX];
    struct made m;

    begin_copy(state, "nemo_full_dcp", &m);
    assert_int_equal(folder_score(&format_nemo_automodel, m.dir), 95);
    snprintf(other, sizeof other, "%.*s/last", (int)(strrchr(m.dir, '/') - m.dir),
             m.dir);
    snprintf(path, sizeof path, "%s", m.dir);
    assert_int_equal(rename(path, other), 0);
    assert_int_equal(folder_score(&format_nemo_automodel, other), 90);
    assert_int_equal(rename(other, path), 0);
    drop(&m, "model/.metadata"); /* not complete: the optimizer alone */
    assert_int_equal(folder_score(&format_nemo_automodel, m.dir), 95);
    assert_int_equal(rename(path, other), 0);
    assert_int_equal(folder_score(&format_nemo_automodel, other), 0);
    assert_int_equal(rename(other, path), 0);
    drop(&m, "optim/.metadata");
    assert_int_equal(folder_score(&format_nemo_automodel, m.dir), 0);
    made_end(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "state", .test_func = test_state},
        {.name = "parts", .test_func = test_parts},
        {.name = "wrappers", .test_func = test_wrappers},
        {.name = "tied", .test_func = test_tied},
        {.name = "adapter", .test_func = test_adapter},
        {.name = "lost shard", .test_func = test_lost_shard},
        {.name = "lost stage", .test_func = test_lost_stage},
        {.name = "lost experts", .test_func = test_lost_experts},
        {.name = "head of a stage", .test_func = test_head_of_stage},
        {.name = "damaged parts", .test_func = test_damaged_parts},
        {.name = "adapter of a stage", .test_func = test_adapter_of_stage},
        {.name = "unfinished optimizer", .test_func = test_unfinished_optimizer},
        {.name = "only consolidated", .test_func = test_only_consolidated},
        {.name = "incomplete", .test_func = test_incomplete},
        {.name = "bids", .test_func = test_bids},
    };

    return run_with("nemo_automodel", argc, argv, test_epochs, others,
                    ARRAY_SIZE(others));
}
