/* SPDX-License-Identifier: MIT */
/* tests/formats/test_megatron.c - Megatron Core and Bridge checkpoints, and damaged ones. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/err.h"
#include "base/json.h"
#include "edited.h"
#include "fixture.h"
#include "index/formats/format.h"
#include "index/formats/megatron/megatron.h"
#include "index/formats/megatron/megatron_tracker.h"
#include "temp_tree.h"

extern const struct format_driver format_megatron;

/* ---- what the frameworks' own reading does not tell ---- */

static void fixture_path(void **state, const char *name, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/%s", (const char *)*state, name);
}

static void test_topology(void **state)
{
    static const struct {
        const char *fixture, *topology;
    } cases[] = {
        {"mcore019_torch_dist_tp2_pp2",
         "{\"backend\": \"torch_dist\", \"ranks\": 4, \"files\": 4, "
         "\"tensor_parallel\": 2, \"pipeline_parallel\": 2, "
         "\"optimizer_sharding\": \"fully_reshardable\", "
         "\"model\": {\"num_layers\": 4, \"hidden_size\": 10, \"vocab_size\": 48, "
         "\"params_dtype\": \"torch.bfloat16\"}}"},
        {"mcore05_zarr_tp2_pp2_flat",
         "{\"backend\": \"zarr\", \"tensor_parallel\": 2, \"pipeline_parallel\": 2, "
         "\"model\": {\"num_layers\": 4, \"hidden_size\": 10, \"vocab_size\": 48, "
         "\"params_dtype\": \"torch.bfloat16\"}}"},
        {"bridge_dp_reshardable",
         "{\"backend\": \"torch_dist\", \"ranks\": 4, \"files\": 4, \"world_size\": 4, "
         "\"tensor_parallel\": 2, \"pipeline_parallel\": 1, \"context_parallel\": 1, "
         "\"expert_parallel\": 1, \"data_parallel\": 2, "
         "\"optimizer_sharding\": \"dp_reshardable\"}"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct opened o;
        char path[PATH_MAX];

        fixture_path(state, cases[i].fixture, path);
        open_checkpoint(path, &o);
        assert_string_equal(o.info.topology, cases[i].topology);
        /* No directory tells it: the common state does. */
        assert_true(o.info.has_step);
        assert_int_equal(o.info.step, 10);
        close_checkpoint(&o);
    }
}

/* The last ranks of a job may have had nothing to write. */
static void test_silent_ranks(void **state)
{
    char from[PATH_MAX], command[2 * PATH_MAX];
    struct temp t;
    struct opened o;

    temp_make(&t, "iter_0000010");
    fixture_path(state, "mcore019_torch_dist_tp2_pp2", from);
    snprintf(command, sizeof command, "cp -r '%s/.' '%s'", from, t.dir);
    assert_int_equal(system(command), 0);
    put_text(&t, "run_config.yaml", "model:\n  world_size: 8\n");
    open_checkpoint(t.dir, &o);
    assert_has(o.info.topology, "\"ranks\": 8, \"files\": 4, \"world_size\": 8, ");
    close_checkpoint(&o);
    temp_remove(&t);
}

/* Names and senses that Bridge has for what Megatron-LM was told. */
static void test_terms(void **state)
{
    static const char args[] =
        "{\"num_layers\": 2, \"num_experts\": 8, \"norm_epsilon\": 1e-05,"
        " \"untie_embeddings_and_output_weights\": true, \"swiglu\": true,"
        " \"group_query_attention\": true, \"num_query_groups\": 4,"
        " \"num_attention_heads\": 16, \"kv_channels\": null,"
        " \"position_embedding_type\": \"rope\"}";
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP(buf_release) struct buf out = {0};
    struct err e = {0};

    (void)state;
    assert_ok(json_parse(args, strlen(args), NULL, &doc, &e), &e);
    megatron_model_terms(doc, &out);
    assert_string_equal(out.data,
                        "{\"num_layers\": 2, \"num_attention_heads\": 16, "
                        "\"num_moe_experts\": 8, \"layernorm_epsilon\": 1e-05, "
                        "\"position_embedding_type\": \"rope\", "
                        "\"share_embeddings_and_output_weights\": false, "
                        "\"num_query_groups\": 4, \"gated_linear_unit\": true, "
                        "\"activation_func\": \"silu\"}");
}

static void test_roles(void **state)
{
    static const struct {
        const char *key;
        int role;
    } cases[] = {
        {"optimizer.state.exp_avg.decoder.weight", ROLE_OPTIMIZER},
        {"optimizer.distributed.dp_group_idx_0", ROLE_OPTIMIZER},
        {"chained_0.optimizer.state.param.w", ROLE_OPTIMIZER},
        {"chained_12.optimizer.state.param.w", ROLE_OPTIMIZER},
        {"chained_.optimizer_weight", -1},
        {"optimizer", -1},
        {"optimizers.x", -1},
        {"decoder.optimizer.x", -1},
        {"chained_0.decoder.weight", -1},
        {"chained_", -1},
        {"", -1},
    };
    struct opened o;
    char path[PATH_MAX];

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        if (megatron_role(cases[i].key, strlen(cases[i].key)) != cases[i].role)
            fail_msg("%s: not role %d", cases[i].key, cases[i].role);
    fixture_path(state, "bridge_moe_ep2", path);
    open_checkpoint(path, &o);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 10);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 30);
    assert_int_equal(o.info.by_role[ROLE_OTHER], 20);
    close_checkpoint(&o);
}

/* Ranges of blocks become boxes: more than there are chunks, less than 2 n - 1 each. */
static void test_flattened(void **state)
{
    const struct tensor_info *t;
    struct opened o;
    char path[PATH_MAX];

    fixture_path(state, "mcore012_torch_dist_flat_tp2_dp2", path);
    open_checkpoint(path, &o);
    t = tensor(&o, "optimizer.state.exp_avg.decoder.layers.self_attention."
                   "linear_proj.weight");
    assert_int_equal(t->role, ROLE_OPTIMIZER);
    assert_int_equal(t->shape.nd, 3);
    /*
     * 4 layers in 2 blocks of 10 rows of 3, each cut at element 22: 7 rows and an element,
     * 2 elements and 2 rows.
     */
    assert_int_equal(t->chunks, 4 * 2 * 4);
    t = tensor(&o, "optimizer.state.exp_avg.decoder.final_layernorm.weight");
    assert_int_equal(t->shape.nd, 1);
    close_checkpoint(&o);
}

static int note_hidden(void *user, const char *name, bool part)
{
    assert_false(part);
    return buf_addf(user, " %s ", name);
}

static void hidden_of(void **state, const char *fixture, struct buf *hidden)
{
    struct opened o;
    struct err e = {0};
    char path[PATH_MAX];

    fixture_path(state, fixture, path);
    open_checkpoint(path, &o);
    assert_ok(catalog_hidden(o.w.catalog, o.info.id, note_hidden, hidden, &e), &e);
    close_checkpoint(&o);
}

static void test_hidden(void **state)
{
    CLEANUP(buf_release) struct buf torch = {0}, zarr = {0}, bridge = {0};

    hidden_of(state, "mcore019_fullyparallel_integrity_hint", &torch);
    assert_has(torch.data, " metadata.json ");
    assert_has(torch.data, " .metadata ");
    assert_has(torch.data, " integrity.json ");
    assert_has(torch.data, " decoder__0_2.distcp ");
    hidden_of(state, "mcore012_zarr_tp2_dp2_flat", &zarr);
    assert_has(zarr.data, " common.pt ");
    assert_has(zarr.data, " embedding.word_embeddings.weight ");
    assert_has(zarr.data, " rng_state ");
    assert_has(zarr.data,
               " optimizer.state.exp_avg.decoder.final_layernorm.weight.sync ");
    hidden_of(state, "bridge_release", &bridge);
    assert_has(bridge.data, " train_state.pt ");
    assert_null(strstr(bridge.data, "run_config.yaml"));
    assert_null(strstr(bridge.data, "tokenizer"));
}

static void test_tracker(void **state)
{
    CLEANUP(store_closep) struct store *store = NULL;
    static const struct store_options options;
    struct temp t;
    struct err e = {0};
    char path[PATH_MAX];
    uint64_t step = 0;

    temp_make(&t, "run");
    fixture_path(state, "bridge_moe_ep2", path);
    assert_ok(store_open_local(t.dir, &options, &store, &e), &e);
    assert_false(megatron_tracked_step(store, "", &step));
    put_copy(&t, "train_state.pt", path, NULL, NULL, 0);
    snprintf(path, sizeof path, "%s/latest_train_state.pt", t.dir);
    snprintf(t.dir + strlen(t.dir), 20, "/train_state.pt");
    assert_int_equal(rename(t.dir, path), 0);
    assert_true(megatron_tracked_step(store, "", &step));
    assert_int_equal(step, 10);
    temp_remove(&t);
}

/* ---- metadata.json ---- */

static void bid_for(const char *dir, struct bid *bid)
{
    CLEANUP(store_closep) struct store *store = NULL;
    CLEANUP(listing_freep) struct listing *l = NULL;
    static const struct store_options options;
    struct err e = {0};

    *bid = (struct bid){0};
    assert_ok(store_open_local(dir, &options, &store, &e), &e);
    assert_ok(store->ops->list(store, "", &l, &e), &e);
    format_megatron.bid(l, bid);
}

static void test_metadata(void **state)
{
    static const struct {
        const char *text;
        int score;
        const char *error; /* "" : none */
    } cases[] = {
        {"{\"sharded_backend\": \"zarr\", \"sharded_backend_version\": 1}", 90, ""},
        {"{\"sharded_backend\": \"zarr\", \"sharded_backend_version\": 1, "
         "\"common_backend\": \"torch\", \"common_backend_version\": 1, \"new\": {}}",
         90, ""},
        {"{\"sharded_backend\": \"zarr\", \"sharded_backend_version\": 2}", 90,
         "metadata.json: version 2 of backend zarr is not known (version 1 is "
         "supported)"},
        {"{\"sharded_backend\": \"zarr\"}", 90,
         "metadata.json tells no version of backend zarr"},
        {"{\"sharded_backend\": \"tensorstore\", \"sharded_backend_version\": 1}", 90,
         "metadata.json: sharded backend \"tensorstore\" is not known (torch_dist and "
         "zarr of version 1 are supported)"},
        {"{\"sharded_backend\": \"zarr\", \"sharded_backend_version\": 1, "
         "\"common_backend\": \"json\", \"common_backend_version\": 1}",
         90, "common backend \"json\" of version 1 is not known"},
        {"{\"sharded_backend\": \"zarr\", \"sharded_backend_version\": 1, "
         "\"common_backend\": \"torch\", \"common_backend_version\": 3}",
         90, "common backend \"torch\" of version 3 is not known"},
        {"{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 1}", 90,
         "neither .metadata nor __R.metadata"},
        {"{\"tensors\": {}}", 0, NULL}, /* OLMo-core's */
        {"{\"sharded_backend\": 1}", 0, NULL},
        {"[]", 0, NULL},
        {"{", 0, NULL},
        {"", 0, NULL},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct opened o;
        struct temp t;
        struct bid bid;

        temp_make(&t, "iter_0000007");
        put_text(&t, "metadata.json", cases[i].text);
        bid_for(t.dir, &bid);
        if (bid.score != cases[i].score)
            fail_msg("case %zu: %d, not %d", i, bid.score, cases[i].score);
        if (cases[i].error) {
            open_checkpoint(t.dir, &o);
            if (cases[i].error[0])
                assert_has(o.info.error ? o.info.error : "no error", cases[i].error);
            else
                assert_null(o.info.error);
            assert_int_equal(o.info.step, 7);
            assert_has(o.info.format, "megatron");
            close_checkpoint(&o);
        }
        temp_remove(&t);
    }
}

/* Without metadata.json a save is unfinished, whatever state lies beside the shards. */
static void test_unfinished(void **state)
{
    struct checkpoint_info info;
    struct err e = {0};
    struct world w;
    struct temp t;
    char path[PATH_MAX];

    temp_make(&t, "iter_0000010");
    fixture_path(state, "bridge_moe_ep2", path);
    put_copy(&t, "train_state.pt", path, NULL, NULL, 0);
    put_copy(&t, "__0_0.distcp", path, NULL, NULL, 0);
    fixture_path(state, "mcore018_torch_dist_commonpt", path);
    put_copy(&t, "common.pt", path, NULL, NULL, 0);
    assert_ok(world_open(t.dir, &w, &e), &e);
    assert_int_equal(scanner_get(w.scanner, "", NULL, w.arena, &info, &e), -ENOENT);
    world_close(&w);
    temp_remove(&t);
}

/* ---- others of the family ---- */

/* Bridge's fsdp_dtensor is torch's own format with Bridge's files beside. */
static void test_fsdp(void **state)
{
    CLEANUP(buf_release) struct buf warnings = {0};
    const char *dcp[] = {".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp",
                         "__3_0.distcp"};
    struct opened o;
    struct temp t;
    struct bid bid;
    char path[PATH_MAX];

    temp_make(&t, "iter_0000010");
    fixture_path(state, "../dcp_trainers/megatron_lm_fsdp_4r/iter_0000010", path);
    for (size_t i = 0; i < ARRAY_SIZE(dcp); i++)
        put_copy(&t, dcp[i], path, NULL, NULL, 0);
    fixture_path(state, "bridge_moe_ep2", path);
    put_copy(&t, "run_config.yaml", path, NULL, NULL, 0);
    bid_for(t.dir, &bid);
    assert_int_equal(bid.score, 0);
    put_copy(&t, "train_state.pt", path, NULL, NULL, 0);
    bid_for(t.dir, &bid);
    assert_int_equal(bid.score, 85);
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "megatron-fsdp-dtensor");
    assert_string_equal(o.info.framework, "Megatron Bridge");
    assert_int_equal(o.info.step, 10);
    assert_int_equal(tensor(&o, "train_state.pt:step")->role, ROLE_OTHER);
    assert_int_equal(tensor(&o, "rng_state.(0, 1).0.torch_rng_state")->role,
                     ROLE_OTHER);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 19);
    all_warnings(&o, &warnings);
    /* The run_config.yaml is that of a torch_dist. */
    assert_has(warnings.data, "missing-file: metadata.json is missing");
    close_checkpoint(&o);
    temp_remove(&t);
}

/* A rank's own checkpoint on its node's disk. */
static void test_local(void **state)
{
    struct opened o;
    struct temp t;
    char path[PATH_MAX], from[PATH_MAX];

    temp_make(&t, "3");
    fixture_path(state, "bridge_moe_ep2", path);
    put_copy(&t, "train_state.pt", path, NULL, NULL, 0);
    snprintf(from, sizeof from, "%s/train_state.pt", t.dir);
    snprintf(path, sizeof path, "%s/iter_0000010_3_local.pt", t.dir);
    assert_int_equal(rename(from, path), 0);
    open_checkpoint(t.dir, &o);
    assert_has(o.info.error, "iter_0000010_3_local.pt is one rank's local "
                             "non-persistent checkpoint");
    assert_int_equal(o.count, 0);
    close_checkpoint(&o);
    temp_remove(&t);
}

/* Muon's state is a file a rank: keys that meet have the file before them. */
static void test_layer_wise(void **state)
{
    static const char zarr[] =
        "{\"sharded_backend\": \"zarr\", \"sharded_backend_version\": 1}";
    struct opened o;
    struct temp t;
    char path[PATH_MAX], from[PATH_MAX];

    temp_make(&t, "iter_0000010");
    put_text(&t, "metadata.json", zarr);
    fixture_path(state, "bridge_moe_ep2", path);
    for (int i = 0; i < 2; i++) {
        char to[PATH_MAX];

        put_copy(&t, "train_state.pt", path, NULL, NULL, 0);
        snprintf(from, sizeof from, "%s/train_state.pt", t.dir);
        snprintf(to, sizeof to, "%s/layer_wise_optimizer_%d.pt", t.dir, i);
        assert_int_equal(rename(from, to), 0);
    }
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.count, 16);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 16);
    close_checkpoint(&o);
    temp_remove(&t);
}

/* ---- damaged flattened tensors ---- */

/* (4, 10, 6) as mcore_data has it, and others in its place. */
static void test_bad_reformulation(void **state)
{
    static const char key[] =
        "optimizer.state.exp_avg.decoder.layers.self_attention.linear_proj.weight";
    static const struct {
        const char *was, *is;
    } cases[] = {
        /* Stored is [4, 1, 2, 30]: 240 elements, and 4 layers. */
        {"K\x04K\x0aK\x06\x87\x94s", "K\x04K\x0aK\x08\x87\x94s"},
        {"K\x04K\x0aK\x06\x87\x94s", "K\x03K\x0aK\x06\x87\x94s"},
        {"K\x04K\x0aK\x06\x87\x94s", "N0K\x04K\x0a\x86\x94s"}, /* two dimensions */
        {"K\x04K\x0aK\x06\x87\x94s", "K\x04"
                                     "0K\x0a"
                                     "0N\x94s"}, /* None */
    };
    struct opened o;
    struct temp t;
    char path[PATH_MAX];

    fixture_path(state, "mcore012_torch_dist_flat_tp2_dp2", path);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        static const char *const files[] = {"metadata.json", "common.pt"};

        temp_make(&t, "iter_0000010");
        for (size_t k = 0; k < ARRAY_SIZE(files); k++)
            put_copy(&t, files[k], path, NULL, NULL, 0);
        put_copy(&t, ".metadata", path, cases[i].was, cases[i].is, 8);
        open_checkpoint(t.dir, &o);
        assert_null(o.info.error);
        assert_has(tensor(&o, key)->fault,
                   "no reformulation of the tensor's own shape");
        close_checkpoint(&o);
        temp_remove(&t);
    }
}

/* ---- zarr ---- */

static const char zarr_metadata[] =
    "{\"sharded_backend\": \"zarr\", \"sharded_backend_version\": 1}";

static void put_array(const struct temp *t, const char *key, const char *shape,
                      const char *chunks, const char *dtype, const char *more)
{
    char name[100], text[500];

    snprintf(name, sizeof name, "%s/.zarray", key);
    snprintf(text, sizeof text,
             "{\"zarr_format\": 2, \"shape\": %s, \"chunks\": %s, \"dtype\": \"%s\", "
             "\"order\": \"C\", \"compressor\": null, \"filters\": null, "
             "\"fill_value\": null%s}",
             shape, chunks, dtype, more);
    put_text(t, name, text);
}

static void assert_bytes(struct opened *o, const char *key, const void *want,
                         size_t len)
{
    CLEANUP(buf_release) struct buf got = {0}, naive = {0};
    const struct tensor_info *t = tensor(o, key);
    struct err e = {0};

    if (t->fault)
        fail_msg("%s: %s", key, t->fault);
    assert_ok(read_tensor(&o->w, o->info.id, t, &got, &e), &e);
    assert_int_equal(got.len, len);
    assert_memory_equal(got.data, want, len);
    assert_ok(world_read(&o->w, o->info.id, t, &naive, &e), &e);
    assert_int_equal(naive.len, len);
    assert_memory_equal(naive.data, want, len);
}

/* Chunks at the edge are stored whole; what is beyond the shape is garbage. */
static void test_zarr_arrays(void **state)
{
    struct opened o;
    struct temp t;

    (void)state;
    temp_make(&t, "iter_0000010");
    put_text(&t, "metadata.json", zarr_metadata);
    put_array(&t, "padded", "[3, 5]", "[2, 3]", "|u1", "");
    put(&t, "padded/0.0", "\x00\x01\x02\x10\x11\x12", 6);
    put(&t, "padded/0.1", "\x03\x04\xee\x13\x14\xee", 6);
    put(&t, "padded/1.0", "\x20\x21\x22\xee\xee\xee", 6);
    put(&t, "padded/1.1", "\x23\x24\xee\xee\xee\xee", 6);
    put_array(&t, "swapped", "[3]", "[2]", ">i2", ", \"dimension_separator\": \".\"");
    put(&t, "swapped/0", "\x01\x02\x03\x04", 4);
    put(&t, "swapped/1", "\x05\x06\xee\xee", 4);
    put_array(&t, "scalar", "[]", "[]", "bfloat16", "");
    put(&t, "scalar/0", "\x80\x3f", 2);
    put_array(&t, "void", "[1]", "[1]", "<V2", "");
    put(&t, "void/0", "\x80\x3f", 2);
    put_array(&t, "empty", "[0, 4]", "[1, 4]", "<f4", "");
    put_array(&t, "larger", "[2]", "[4]", "|b1", "");
    put(&t, "larger/0", "\x01\x00\xee\xee", 4);
    put(&t, "other/readme.txt", "x", 1);
    put(&t, "padded.sync/.zarray", "", 0);
    put(&t, "padded.sync/0.0", "", 0);
    put_array(&t, "odd.sync", "[1]", "[1]", "|u1", "");
    put(&t, "odd.sync/0", "\x07", 1);

    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 0);
    assert_int_equal(o.count, 7);
    assert_bytes(&o, "padded",
                 "\x00\x01\x02\x03\x04\x10\x11\x12\x13\x14\x20\x21\x22\x23\x24", 15);
    assert_bytes(&o, "swapped", "\x02\x01\x04\x03\x06\x05", 6);
    assert_bytes(&o, "scalar", "\x80\x3f", 2);
    assert_int_equal(tensor(&o, "scalar")->shape.nd, 0);
    assert_int_equal(tensor(&o, "void")->dtype, DTYPE_BF16);
    assert_bytes(&o, "empty", "", 0);
    assert_bytes(&o, "larger", "\x01\x00", 2);
    assert_bytes(&o, "odd.sync", "\x07", 1);
    close_checkpoint(&o);
    temp_remove(&t);
}

static void test_zarr_faults(void **state)
{
    static const struct {
        const char *shape, *chunks, *dtype,
            *more; /* NULL: `dtype` is all of the text */
        const char *fault;
    } cases[] = {
        {"[2]", "[1]", "|u1", "",
         "chunk 0 is missing: the save was not finished"}, /* see below */
        {"[4]", "[2]", "|u1", "", "chunk 0 has 1 bytes where all have 2"},
        {"[9007199254740991]", "[1]", "|u1", "", "chunk 1 is missing"},
        {"[9007199254740991, 9007199254740991]", "[1, 1]", "|u1", "", ""},
        {"[1]", "[0]", "|u1", "", "a chunk of no elements"},
        {"[1, 1]", "[1]", "|u1", "", "shape has 2 dimensions, chunks have 1"},
        {"[-1]", "[1]", "|u1", "", "shape is no list of numbers"},
        {"[1.5]", "[1]", "|u1", "", "shape is no list of numbers"},
        {"[1]", "[1]", "|O", "", "element type \"|O\" is not supported"},
        {"[1]", "[1]", "<U4", "", "element type \"<U4\" is not supported"},
        {"[1]", "[1]", "|u1", ", \"dimension_separator\": \"-\"",
         "dimension_separator is neither"},
        {NULL, NULL, "{\"zarr_format\": 3}", NULL, "not of zarr_format 2"},
        {NULL, NULL, "", NULL, "its .zarray: "},
        {NULL, NULL,
         "{\"zarr_format\": 2, \"shape\": [1], \"chunks\": [1], \"dtype\": \"|u1\", "
         "\"order\": \"A\", \"compressor\": null}",
         NULL, "neither C nor F"},
        {NULL, NULL,
         "{\"zarr_format\": 2, \"shape\": [1], \"chunks\": [1], \"dtype\": \"|u1\", "
         "\"order\": \"C\", \"compressor\": {\"id\": \"pcodec\"}}",
         NULL, "compressor \"pcodec\" is not supported"},
        {NULL, NULL,
         "{\"zarr_format\": 2, \"shape\": [1], \"chunks\": [1], \"dtype\": \"|u1\", "
         "\"order\": \"C\", \"filters\": [{\"id\": \"categorize\"}]}",
         NULL, "filter \"categorize\" is not supported"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct opened o;
        struct temp t;
        const char *fault;

        temp_make(&t, "iter_0000010");
        put_text(&t, "metadata.json", zarr_metadata);
        put_array(&t, "good", "[1]", "[1]", "|u1", "");
        put(&t, "good/0", "\x09", 1);
        if (cases[i].more)
            put_array(&t, "bad", cases[i].shape, cases[i].chunks, cases[i].dtype,
                      cases[i].more);
        else
            put_text(&t, "bad/.zarray", cases[i].dtype);
        if (i > 0)
            put(&t, "bad/0", "\x01", 1);
        open_checkpoint(t.dir, &o);
        assert_null(o.info.error);
        assert_int_equal(o.count, 2);
        assert_int_equal(o.info.faults, 1);
        fault = tensor(&o, "bad")->fault;
        if (!fault || !strstr(fault, cases[i].fault))
            fail_msg("case %zu: %s", i, fault ? fault : "no fault");
        assert_bytes(&o, "good", "\x09", 1);
        close_checkpoint(&o);
        temp_remove(&t);
    }
}

/* As many files as chunks, but one of another name. */
static void test_zarr_missing_chunk(void **state)
{
    struct opened o;
    struct temp t;

    (void)state;
    temp_make(&t, "iter_0000010");
    put_text(&t, "metadata.json", zarr_metadata);
    put_array(&t, "bad", "[3]", "[1]", "|u1", "");
    put(&t, "bad/0", "\x01", 1);
    put(&t, "bad/2", "\x01", 1);
    put(&t, "bad/.zattrs", "{}", 2);
    open_checkpoint(t.dir, &o);
    assert_has(tensor(&o, "bad")->fault, "chunk 1 is missing");
    close_checkpoint(&o);
    temp_remove(&t);
}

/* ---- names and settings ---- */

static void test_cells(void **state)
{
    static const struct {
        const char *name;
        size_t key, n; /* n 0: no cell */
        uint64_t offset[3], size[3];
    } cases[] = {
        {"rng_state/shard_0.1_2.3", 9, 2, {0, 1}, {2, 3}},
        {"common_state/shard_0_1", 12, 1, {0}, {1}},
        {"a/b/shard_1.2.3_4.5.6", 3, 3, {1, 2, 3}, {4, 5, 6}},
        {"rng_state/shard_1.0_2", 9, 2, {1, 0}, {2, 0}}, /* up to 0.7 */
        {"x/shard_0.1.2_3", 0, 0, {0}, {0}},
        {"x/shard_0_", 0, 0, {0}, {0}},
        {"x/shard_0", 0, 0, {0}, {0}},
        {"x/shard_", 0, 0, {0}, {0}},
        {"x/shard_0_1 ", 0, 0, {0}, {0}},
        {"x/shard_0._1", 0, 0, {0}, {0}},
        {"x/shard_-1_1", 0, 0, {0}, {0}},
        {"/shard_0_1", 0, 0, {0}, {0}},
        {"shard_0_1", 0, 0, {0}, {0}},
        {"x/shard_1234567890123456789_1", 0, 0, {0}, {0}},
        {"x/shard_0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0_1", 0, 0, {0}, {0}},
        {"", 0, 0, {0}, {0}},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct megatron_cell c;
        bool is = megatron_cell(cases[i].name, strlen(cases[i].name), &c);

        if (is != (cases[i].n > 0))
            fail_msg("%s: %d", cases[i].name, is);
        if (!is)
            continue;
        assert_int_equal(c.key, cases[i].key);
        assert_int_equal(c.n, cases[i].n);
        assert_memory_equal(c.offset, cases[i].offset, c.n * sizeof c.offset[0]);
        assert_memory_equal(c.size, cases[i].size, c.n * sizeof c.size[0]);
    }
}

static void test_settings(void **state)
{
    static const char config[] = "checkpoint:\n"
                                 "  tensor_model_parallel_size: 7\n"
                                 "model:\n"
                                 "  _target_: a.b\n"
                                 "  context_parallel_size: 2\n"
                                 "  nested:\n"
                                 "    pipeline_model_parallel_size: 9\n"
                                 "  expert_model_parallel_size: null\n"
                                 "  pipeline_model_parallel_size: 4\n"
                                 "  world_size: 12x\n"
                                 "tokenizer:\n"
                                 "  tensor_model_parallel_size: 8";
    static const char common[] =
        "{\"args\": {\"$type\": \"opaque\", \"class\": \"argparse.Namespace\", "
        "\"state\": {\"tensor_model_parallel_size\": 2, \"world_size\": 16, "
        "\"expert_model_parallel_size\": 1.5}}, \"iteration\": 30, "
        "\"content_metadata\": {\"distrib_optim_sharding_type\": \"a\\\"b\"}}";
    CLEANUP(buf_release) struct buf out = {0};
    struct megatron_facts f = {0};

    (void)state;
    megatron_learn_common(&f, common, sizeof common - 1);
    megatron_learn_config(&f, config, sizeof config - 1);
    megatron_learn_cell(&f, "rng_state/shard_0.0_3.3", 23); /* known by now */
    megatron_topology(&f, &out);
    assert_string_equal(out.data, ", \"world_size\": 16, \"tensor_parallel\": 2, "
                                  "\"pipeline_parallel\": 4, \"context_parallel\": 2, "
                                  "\"data_parallel\": 1, "
                                  "\"optimizer_sharding\": \"a\\\"b\"");
    assert_true(f.has_args && f.has_config && f.has_iteration);
    assert_int_equal(f.iteration, 30);
}

/* Blocks of ranks, flat in the last axis: what is noted of a chunk must be within one. */
static void test_flat_blocks(void **state)
{
    static const struct edited rows[] = {
#define FLAT "mcore012_torch_dist_flat_tp2_dp2", ".metadata"
#define QKV "optimizer.state.fp32_param.decoder.layers.self_attention.linear_qkv.weight"
        {FLAT, EDIT("K\4K\2K\1K<t", "K\4K\2K\1K;t"), QKV,
         "stored with size [4, 2, 1, 59], which is no reformulation of the tensor's own "
         "shape",
         NULL, NULL},
        {FLAT, EDIT("K\4K\2K\1K<t", "K\4K\0K\1K<t"), QKV,
         "stored with size [4, 0, 1, 60], which is no reformulation", NULL, NULL},
        {FLAT, EDIT("(K\1K\1K\1K-t", "(K\1K\2K\1K-t"), QKV,
         "chunk at [0, 0, 0, 0]: it spans several blocks", NULL, NULL},
        {FLAT, EDIT("(K\1K\1K\1K-t", "(K\1K\0K\1K-t"), QKV,
         "hole at [0, 0, 0]: no chunk holds it", NULL, NULL},
        {FLAT, EDIT("(K\0K\0K\0K\0t", "(K\0K\2K\0K\0t"), QKV,
         "chunk at [0, 2, 0, 0]: storage_data has no entry for it", NULL, NULL},
        {FLAT, EDIT("(K\1K\1K\1K-t", "(K\1K\1K\1K=t"), QKV,
         "a chunk that reaches past the end of its block", NULL, NULL},
#undef FLAT
#undef QKV
    };

    check_edited(*state, rows, ARRAY_SIZE(rows));
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "topology", .test_func = test_topology},
        {.name = "terms", .test_func = test_terms},
        {.name = "silent ranks", .test_func = test_silent_ranks},
        {.name = "roles", .test_func = test_roles},
        {.name = "flattened", .test_func = test_flattened},
        {.name = "hidden", .test_func = test_hidden},
        {.name = "tracker", .test_func = test_tracker},
        {.name = "metadata.json", .test_func = test_metadata},
        {.name = "unfinished", .test_func = test_unfinished},
        {.name = "fsdp_dtensor", .test_func = test_fsdp},
        {.name = "local", .test_func = test_local},
        {.name = "layer-wise", .test_func = test_layer_wise},
        {.name = "bad reformulation", .test_func = test_bad_reformulation},
        {.name = "zarr arrays", .test_func = test_zarr_arrays},
        {.name = "zarr faults", .test_func = test_zarr_faults},
        {.name = "zarr missing chunk", .test_func = test_zarr_missing_chunk},
        {.name = "cells", .test_func = test_cells},
        {.name = "settings", .test_func = test_settings},
        cmocka_unit_test(test_flat_blocks),
    };

    return run_with_fixtures("megatron", argc, argv, others, ARRAY_SIZE(others));
}
