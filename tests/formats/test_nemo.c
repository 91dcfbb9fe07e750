/* SPDX-License-Identifier: MIT */
/* tests/formats/test_nemo.c - .nemo archives: fixtures, other checkpoints packed, damage. */
#include "made.h"

#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/json.h"
#include "index/formats/format.h"
#include "index/formats/nemo/nemo_rules.h"
#include "index/formats/scan.h"
#include "temp_tree.h"
#include "tests/unit/tar_build.h"
#include "tests/unit/unit.h"

extern const struct format_driver format_nemo;

static const char nemo2_fixture[] = "real_nemo2_tp2";
static const char ranks_fixture[] = "real_gelu_tp2_pp2";
static const char config[] = "target: tiny\nnemo_version: '1.23.0'  # as NeMo has it\n";

/* ---- archives of what lies in tests/data ---- */

/* nftw has no argument of ours. */
static struct {
    struct buf *tar;
    size_t skip;
    const char *prefix;
} packing;

static int pack_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    char name[PATH_MAX];

    (void)st;
    (void)ftw;
    if (flag != FTW_F)
        return 0;
    snprintf(name, sizeof name, "%s%s", packing.prefix, path + packing.skip);
    if (strlen(name) >= 100) /* folders of zarr arrays have long names */
        tb_add(packing.tar, "././@LongLink", 'L', name, strlen(name) + 1);
    read_file(path, &bytes);
    tb_add(packing.tar, name, '0', bytes.data, bytes.len);
    return 0;
}

/* All files below `from` as members below `prefix`. */
static void pack(const char *from, const char *prefix, struct buf *tar)
{
    packing.tar = tar;
    packing.skip = strlen(from);
    packing.prefix = prefix;
    tb_text(tar, "./model_config.yaml", config);
    assert_int_equal(nftw(from, pack_one, 16, FTW_PHYS), 0);
    tb_end(tar);
}

static void beside(void **state, const char *rest, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/../%s", (const char *)*state, rest);
}

static void check_packed(const struct buf *archive, const char *expected, bool gz)
{
    CLEANUP(json_freep) struct json *want = read_json(expected);
    struct made m;
    struct opened o;

    made_begin(&m, "packed");
    made_file(&m, "x.nemo", archive->data, archive->len);
    made_open(&m, &o);
    if (o.info.error)
        fail_msg("%s", o.info.error);
    assert_string_equal(o.info.format, "nemo-dist");
    assert_string_equal(o.info.version, "1.23.0");
    assert_has(o.info.topology,
               gz ? "{\"archive\": \"tar.gz\"" : "{\"archive\": \"tar\"");
    assert_int_equal(o.info.faults, 0);
    assert_true(json_count(json_get(want, "tensors")) >= 6);
    for (const struct json *v = json_first(json_get(want, "tensors")); v;
         v = json_next(v))
        check_tensor(&o, tensor(&o, json_key(v)), v);
    close_checkpoint(&o);
    made_end(&m);
}

/* Distributed checkpoints of Megatron Core in an archive are read by their own drivers. */
static void test_megatron(void **state)
{
    static const char *const names[] = {"mcore012_zarr_tp2_dp2_flat",
                                        "mcore018_torch_dist_commonpt"};

    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        CLEANUP(buf_release) struct buf tar = {0}, gz = {0};
        char path[PATH_MAX], rest[128];

        snprintf(rest, sizeof rest, "megatron/%s", names[i]);
        beside(state, rest, path);
        pack(path, "./model_weights", &tar);
        tb_gzip(tar.data, tar.len, 6, &gz);
        snprintf(rest, sizeof rest, "megatron/%s.expected.json", names[i]);
        beside(state, rest, path);
        check_packed(&tar, path, false);
        check_packed(&gz, path, true);
    }
}

/* ---- other layouts ---- */

/* The bytes of a member of a fixture's archive. */
static void take_member(void **state, const char *fixture, const char *member,
                        struct buf *out)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(store_closep) struct store *s = NULL;
    char path[PATH_MAX], name[128];
    struct err e = {0};
    void *dst;

    snprintf(path, sizeof path, "%s/%s", (const char *)*state, fixture);
    snprintf(name, sizeof name, "tiny.nemo/%s", member);
    assert_ok(store_open_local(path, NULL, &s, &e), &e);
    assert_ok(s->ops->open(s, name, &src, &e), &e);
    dst = buf_grow(out, (size_t)src->size);
    assert_non_null(dst);
    assert_ok(source_read(src, 0, (size_t)src->size, dst, &e), &e);
}

static void take_weights(void **state, struct buf *out)
{
    take_member(state, "nemo_plain", "model_weights.ckpt", out);
}

/* An archive that was unpacked; the same tensors. */
static void test_unpacked(void **state)
{
    CLEANUP(buf_release) struct buf weights = {0};
    struct made m;
    struct opened o;
    char path[PATH_MAX];

    take_weights(state, &weights);
    made_begin(&m, "unpacked");
    made_text(&m, "model_config.yaml", config);
    made_file(&m, "model_weights.ckpt", weights.data, weights.len);
    made_open(&m, &o);
    assert_string_equal(o.info.format, "nemo");
    assert_string_equal(o.info.topology, "{\"archive\": null}");
    snprintf(path, sizeof path, "%s/nemo_plain.expected.json", (const char *)*state);
    assert_int_equal(o.count, 3);
    check_readable(&o, path);
    close_checkpoint(&o);
    made_end(&m);
}

/* NeMo 2: context/ beside weights/. */
static void test_nemo2(void **state)
{
    struct made m;
    struct opened o;
    char path[PATH_MAX];

    made_begin(&m, "step=10");
    made_text(&m, "context/model.yaml", "x: 1\n");
    for (int i = 0; i < 2; i++) {
        static const char *const names[] = {"model_weights/.metadata",
                                            "model_weights/__0_0.distcp"};
        CLEANUP(buf_release) struct buf bytes = {0};

        take_member(state, "nemo_dist", names[i], &bytes);
        made_file(&m, names[i] + strlen("model_"), bytes.data, bytes.len);
    }
    made_open(&m, &o);
    assert_string_equal(o.info.format, "nemo-dist");
    snprintf(path, sizeof path, "%s/nemo_dist.expected.json", (const char *)*state);
    assert_int_equal(o.count, 2);
    check_readable(&o, path);
    close_checkpoint(&o);
    made_end(&m);
}

/* As NeMo 2.7 saves: Lightning's state is Megatron Core's common state there. */
static void test_nemo2_real(void **state)
{
    char path[PATH_MAX];
    struct opened o;

    snprintf(path, sizeof path, "%s/%s", (const char *)*state, nemo2_fixture);
    open_checkpoint(path, &o);
    if (o.info.error)
        fail_msg("%s", o.info.error);
    assert_string_equal(o.info.format, "nemo-dist");
    assert_int_equal(o.info.step, 7);
    assert_int_equal(tensor(&o, "module.decoder.layers.mlp.linear_fc1.weight")->role,
                     ROLE_MODEL);
    assert_int_equal(tensor(&o, "optimizer.state.exp_avg.module.decoder.layers.mlp."
                                "linear_fc1.weight")
                         ->role,
                     ROLE_OPTIMIZER);
    close_checkpoint(&o);
}

/* The kind of what is at this path of a source. */
static enum place_kind kind_at(const char *dir, const char *path)
{
    const struct store_options options = {0};
    struct place place = {0};
    struct store *store;
    struct listing *l;
    enum place_kind kind;
    struct err e = {0};

    assert_ok(store_open_local(dir, &options, &store, &e), &e);
    assert_ok(store->ops->list(store, path, &l, &e), &e);
    assert_ok(place_of(l, NULL, &place, &e), &e);
    kind = place.kind;
    place_release(&place);
    listing_free(l);
    store_close(store);
    return kind;
}

/* NeMo 2 saves over what is there: what is marked beside may be of two steps. */
static void test_nemo2_unfinished(void **state)
{
    static const struct {
        const char *mark, *text;
        enum place_kind average; /* of NAME-EMA; NAME is the same but for the last */
        bool marks;
    } cases[] = {
        {"model--step=7-unfinished", "", PLACE_PLAIN, true},
        {"model--step=8-unfinished", "", PLACE_CHECKPOINT, false},
        {"model--step=7-unfinished/note", "", PLACE_CHECKPOINT, false},
        {"model--step=7-unfinished", "notes", PLACE_CHECKPOINT, false},
        {"model--step=7-EMA-unfinished", "", PLACE_CHECKPOINT, false},
    };
    static const char *const names[] = {
        "context/model.yaml",   "weights/.metadata",    "weights/__0_0.distcp",
        "weights/__0_1.distcp", "weights/__1_0.distcp", "weights/__1_1.distcp",
        "weights/common.pt",    "weights/metadata.json"};
    static const char *const dirs[] = {"model--step=7", "model--step=7-EMA"};

    for (size_t c = 0; c < ARRAY_SIZE(cases); c++) {
        char from[PATH_MAX], to[PATH_MAX];
        struct temp t;

        temp_make(&t, "run");
        for (size_t i = 0; i < ARRAY_SIZE(names) * 2; i++) {
            CLEANUP(buf_release) struct buf bytes = {0};

            snprintf(from, sizeof from, "%s/%s/%s", (const char *)*state, nemo2_fixture,
                     names[i / 2]);
            snprintf(to, sizeof to, "%s/%s", dirs[i % 2], names[i / 2]);
            read_file(from, &bytes);
            put(&t, to, bytes.data, bytes.len);
        }
        put_text(&t, cases[c].mark, cases[c].text);
        assert_int_equal(kind_at(t.dir, dirs[0]),
                         cases[c].marks ? PLACE_PLAIN : PLACE_CHECKPOINT);
        assert_int_equal(kind_at(t.dir, "model--step=7/weights"),
                         cases[c].marks ? PLACE_PLAIN : PLACE_CHECKPOINT);
        assert_int_equal(kind_at(t.dir, dirs[1]), cases[c].average);
        temp_remove(&t);
    }
}

/* ---- files of ranks ---- */

/* Names and sizes by which nothing but NeMo's modules can tell the cut. */
static void test_rules(void **state)
{
    static const struct nemo_config c = {.tensor = 2,
                                         .model = {.layers = 4,
                                                   .hidden = 8,
                                                   .ffn = 12,
                                                   .heads = 4,
                                                   .groups = 2,
                                                   .channels = 2,
                                                   .activation = true,
                                                   .fast = true,
                                                   .glu = true}};
    struct nemo_config old = c, core = c, plain = c, untold = c;
    const struct {
        const struct nemo_config *config;
        const char *name;
        uint64_t dim[2];
        uint32_t nd;
        enum megatron_rule rule;
    } cases[] = {
        {&c,
         "e.layers.0.self_attention.query_key_value.weight",
         {12, 8},
         2,
         MEGATRON_ROWS},
        {&old,
         "e.layers.0.self_attention.query_key_value.weight",
         {12, 8},
         2,
         MEGATRON_THIRDS},
        {&c,
         "e.layers.0.self_attention.query_key_value.weight",
         {13, 8},
         2,
         MEGATRON_UNLIKE},
        {&c,
         "e.layers.0.self_attention.query_key_value.weight",
         {12, 9},
         2,
         MEGATRON_UNLIKE},
        {&c,
         "e.layers.0.self_attention.query_key_value.weight",
         {0},
         0,
         MEGATRON_UNLIKE},
        {&c, "e.layers.0.inter_attention.key_value.bias", {8}, 1, MEGATRON_ROWS},
        {&old, "e.layers.0.inter_attention.key_value.bias", {8}, 1, MEGATRON_HALVES},
        {&c, "d.layers.0.self_attention.linear_qkv.weight", {8, 8}, 2, MEGATRON_ROWS},
        {&c, "e.layers.0.self_attention.dense.weight", {8, 4}, 2, MEGATRON_COLUMNS},
        {&c, "e.layers.0.self_attention.dense.weight", {4, 8}, 2, MEGATRON_UNLIKE},
        {&c, "e.layers.0.self_attention.dense.bias", {8}, 1, MEGATRON_SAME},
        {&c, "e.layers.0.mlp.dense_h_to_4h.weight", {12, 8}, 2, MEGATRON_HALVES},
        {&plain, "e.layers.0.mlp.dense_h_to_4h.weight", {6, 8}, 2, MEGATRON_ROWS},
        {&plain, "e.layers.0.mlp.dense_h_to_4h.weight", {12, 8}, 2, MEGATRON_UNLIKE},
        {&untold, "e.layers.0.mlp.dense_h_to_4h.weight", {12, 8}, 2, MEGATRON_UNKNOWN},
        {&plain, "e.layers.0.mlp.dense_h_to_4h_2.weight", {6, 8}, 2, MEGATRON_ROWS},
        {&c, "e.layers.0.mlp.linear_fc1.weight", {12, 8}, 2, MEGATRON_HALVES},
        {&c, "e.layers.0.mlp.dense_4h_to_h.weight", {8, 6}, 2, MEGATRON_COLUMNS},
        {&c, "e.layers.0.mlp.normalization.weight", {6}, 1, MEGATRON_UNKNOWN},
        {&c,
         "e.layers.0.self_attention.head_scale_tensor",
         {1, 2},
         2,
         MEGATRON_COLUMNS},
        {&c, "e.layers.0.mlp.router.weight", {3, 4}, 2, MEGATRON_COLUMNS},
        {&c, "e.layers.0.mlp.router.weight", {3, 8}, 2, MEGATRON_UNLIKE},
        {&core, "e.layers.0.mlp.router.weight", {3, 8}, 2, MEGATRON_SAME},
        {&c, "e.layers.0.layernorm_mlp.fc1_weight", {6, 8}, 2, MEGATRON_ROWS},
        {&c, "model.lm_head.bias", {9}, 1, MEGATRON_ROWS},
        {&c, "m.embedding.word_embeddings.weight", {9, 8}, 2, MEGATRON_ROWS},
        {&c, "m.embedding.word_embeddings.weight", {9, 7}, 2, MEGATRON_UNLIKE},
        {&c, "e.layers.0.self_attention.linear_q.weight", {4, 8}, 2, MEGATRON_UNKNOWN},
        {&c, "e.layers.0.lora.weight", {4, 8}, 2, MEGATRON_UNKNOWN},
    };

    (void)state;
    old.old_qkv = true;
    core.megatron_core = true;
    plain.model.fast = false;
    untold.model.activation = false;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct megatron_name n;
        size_t len = strlen(cases[i].name);
        enum megatron_rule rule;

        megatron_name(cases[i].name, len, &n);
        rule = nemo_rule(cases[i].config, cases[i].name, len, cases[i].dim, cases[i].nd,
                         n.rule);
        if (rule != cases[i].rule)
            fail_msg("%zu, %s: rule %d, not %d", i, cases[i].name, rule, cases[i].rule);
    }
}

/* The rank files of a ranks_fixture with a configuration in which `was` is `is`. */
static void put_ranks(void **state, struct made *m, const char *without,
                      const char *was, const char *is)
{
    static const char *const files[] = {
        "tp_rank_00_pp_rank_000", "tp_rank_00_pp_rank_001", "tp_rank_01_pp_rank_000",
        "tp_rank_01_pp_rank_001"};
    CLEANUP(buf_release) struct buf yaml = {0}, changed = {0};
    char path[PATH_MAX], *at;

    snprintf(path, sizeof path, "%s/%s/model_config.yaml", (const char *)*state,
             ranks_fixture);
    read_file(path, &yaml);
    buf_addc(&yaml, '\0');
    at = strstr(yaml.data, was);
    assert_non_null(at);
    buf_add(&changed, yaml.data, (size_t)(at - yaml.data));
    buf_adds(&changed, is);
    buf_adds(&changed, at + strlen(was));
    made_begin(m, "ranks");
    made_file(m, "model_config.yaml", changed.data, changed.len);
    for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
        CLEANUP(buf_release) struct buf bytes = {0};

        if (strcmp(files[i], without) == 0)
            continue;
        snprintf(path, sizeof path, "%s/%s/%s/model_weights.ckpt", (const char *)*state,
                 ranks_fixture, files[i]);
        read_file(path, &bytes);
        snprintf(path, sizeof path, "%s/model_weights.ckpt", files[i]);
        made_file(m, path, bytes.data, bytes.len);
    }
}

/* A configuration that does not fit: nothing of what it decides on is put together. */
static void test_unlike(void **state)
{
    static const struct {
        const char *was, *is, *warning;
        bool merged;
    } cases[] = {
        {"activation: gelu", "activation: fast-swiglu", "unlike-config: 8 tensors",
         true},
        {"activation: gelu", "activation: [x]", "unknown-cut: 8 tensors", true},
        {"ffn_hidden_size: 12", "ffn_hidden_size: 16", "unlike-config: 12 tensors",
         true},
        {"num_attention_heads: 4", "num_attention_heads: 3", "unknown-cut: 12 tensors",
         true},
        {"num_layers: 4", "num_layers: 6", "tells of 6 layers, the files have 4",
         false},
        {"tensor_model_parallel_size: 2", "tensor_model_parallel_size: 1",
         "and there is tp_rank_01_pp_rank_000", false},
        {"pipeline_model_parallel_size: 2", "pipeline_model_parallel_size: 3",
         "pipeline rank 2 is missing", false},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf said = {0};
        struct made m;
        struct opened o;

        put_ranks(state, &m, "", cases[i].was, cases[i].is);
        made_open(&m, &o);
        if (o.info.error)
            fail_msg("%s", o.info.error);
        all_warnings(&o, &said);
        assert_has(said.data, cases[i].warning);
        assert_string_equal(o.info.format, cases[i].merged ? "nemo-ranks" : "nemo");
        assert_int_equal(o.info.faults, 0);
        close_checkpoint(&o);
        made_end(&m);
    }
}

/* What the configuration says decides how the ranks are merged: a change of it is seen. */
static void test_config_changes(void **state)
{
    struct checkpoint_info second;
    struct err e = {0};
    struct made changed, m;
    struct opened o;
    char path[PATH_MAX];

    put_ranks(state, &m, "", "activation: gelu", "activation: gelu");
    put_ranks(state, &changed, "", "activation: gelu", "activation: fast-swiglu");
    made_open(&m, &o);
    assert_int_equal(o.info.warnings, 0);
    snprintf(path, sizeof path, "%s/model_config.yaml", changed.dir);
    made_copy(&m, "model_config.yaml", path);
    scanner_suspect(o.w.scanner, o.info.path, o.info.file);
    assert_ok(
        scanner_get(o.w.scanner, o.info.path, o.info.file, o.w.arena, &second, &e), &e);
    assert_int_equal(second.warnings, 1);
    close_checkpoint(&o);
    made_end(&changed);
    made_end(&m);
}

/* A rank that is missing: what it has a part of cannot be read, or nothing is merged. */
static void test_lost_rank(void **state)
{
    struct made m;
    struct opened o;

    put_ranks(state, &m, "tp_rank_01_pp_rank_001", "precision", "precision");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "nemo-ranks");
    check_fault(&o, "model.language_model.encoder.layers.3.mlp.dense_4h_to_h.weight",
                "tensor rank 1: it is missing");
    assert_null(
        tensor(&o, "model.language_model.encoder.layers.1.mlp.dense_4h_to_h.weight")
            ->fault);
    close_checkpoint(&o);
    made_end(&m);
}

/* A file a rank, as it is where nothing tells how the ranks have cut the model. */
static void check_not_merged(void **state, const char *yaml, size_t ranks,
                             const char *why)
{
    CLEANUP(buf_release) struct buf weights = {0}, tar = {0}, said = {0};
    char name[128];
    struct made m;
    struct opened o;

    take_weights(state, &weights);
    if (yaml)
        tb_text(&tar, "./model_config.yaml", yaml);
    for (size_t i = 0; i < ranks; i++) {
        snprintf(name, sizeof name, "./mp_rank_%02zu/model_weights.ckpt", i);
        tb_add(&tar, name, '0', weights.data, weights.len);
    }
    tb_end(&tar);
    made_begin(&m, "ranks");
    made_file(&m, "x.nemo", tar.data, tar.len);
    made_open(&m, &o);
    if (o.info.error)
        fail_msg("%s", o.info.error);
    assert_int_equal(o.count, 3 * ranks);
    assert_int_equal(tensor(&o, "mp_rank_00/model_weights.ckpt:step")->role,
                     ROLE_OTHER);
    snprintf(name, sizeof name, "not-merged: the files of %zu model parallel ranks are",
             ranks);
    all_warnings(&o, &said);
    assert_has(said.data, name);
    assert_has(said.data, why);
    close_checkpoint(&o);
    made_end(&m);
}

static void test_not_merged(void **state)
{
    static const struct {
        const char *yaml;
        size_t ranks;
        const char *why;
    } cases[] = {
        {NULL, 1, "model_config.yaml"},
        {NULL, 2, "model_config.yaml"},
        {"a: [\n", 2, "model_config.yaml: YAML, line"},
        {"num_layers: 2\n", 2, "does not tell tensor_model_parallel_size"},
        {"tensor_model_parallel_size: '2'\n", 2, "does not tell tensor_model"},
        {"tensor_model_parallel_size: 0\n", 2, "does not tell tensor_model"},
        {"tensor_model_parallel_size: 1\n", 2,
         "tells of 1 tensor and 1 pipeline ranks, and there is mp_rank_01"},
        {"tensor_model_parallel_size: 1000\npipeline_model_parallel_size: 1000\n", 2,
         "more than 4096 ranks"},
        {"tensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\n", 2,
         "pipeline rank 1 is missing"},
        {"tensor_model_parallel_size: 2\nvirtual_pipeline_model_parallel_size: 2\n", 2,
         "virtual pipelines have no places"},
        {"tensor_model_parallel_size: 2\nexpert_model_parallel_size: 2\n", 2,
         "experts are on ranks of their own"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        check_not_merged(state, cases[i].yaml, cases[i].ranks, cases[i].why);
}

static void test_oddities(void **state)
{
    CLEANUP(buf_release) struct buf weights = {0}, tar = {0};
    struct made m;
    struct opened o;

    take_weights(state, &weights);
    tb_text(&tar, "model_weights.ckpt", "not the last one");
    tb_add(&tar, "model_weights.ckpt", '0', weights.data, weights.len);
    made_begin(&m, "odd");
    made_file(&m, "x.nemo", tar.data, tar.len);
    made_open(&m, &o);
    assert_int_equal(o.count, 3);
    check_warnings(&o,
                   "truncated-archive: x.nemo does not end as tar ends archives: what "
                   "came behind may be lost\nduplicate-member: x.nemo has 1 "
                   "members more than once: the last ones are shown\n");
    close_checkpoint(&o);
    made_end(&m);

    buf_clear(&tar);
    tb_text(&tar, "model_weights/x", "y");
    tb_end(&tar);
    made_begin(&m, "unknown");
    made_file(&m, "x.nemo", tar.data, tar.len);
    made_open(&m, &o);
    assert_non_null(o.info.error);
    assert_has(o.info.error, "model_weights/ holds no checkpoint that is known");
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- training checkpoints ---- */

static const char train_fixture[] = "real_train_tp2_pp2";
static const char train_file[] =
    "megatron_gpt--val_loss=1.25-step=10-consumed_samples=80.0.ckpt";
static const char *const train_ranks[] = {
    "tp_rank_00_pp_rank_000", "tp_rank_01_pp_rank_000", "tp_rank_00_pp_rank_001",
    "tp_rank_01_pp_rank_001"};

/* The fixture's file of one rank, under another rank's name. */
static void put_train(void **state, const struct temp *t, size_t rank, const char *dir,
                      const char *was, const char *is)
{
    char from[PATH_MAX], name[PATH_MAX];

    snprintf(from, sizeof from, "%s/%s/%s/%s", (const char *)*state, train_fixture,
             train_ranks[rank], train_file);
    snprintf(name, sizeof name, "%s/%s", dir, train_file);
    put_changed(t, name, from, was, is);
}

static const char train_early[] =
    "model.language_model.encoder.layers.1.mlp.dense_4h_to_h.weight";
static const char train_late[] =
    "model.language_model.encoder.layers.3.mlp.dense_4h_to_h.weight";

/* A rank that is missing or damaged: what it has a part of cannot be read. */
static void test_train_lost(void **state)
{
    for (int damaged = 0; damaged < 2; damaged++) {
        char name[PATH_MAX];
        struct opened o;
        struct temp t;

        temp_make(&t, "checkpoints");
        for (size_t i = 0; i < 3; i++)
            put_train(state, &t, i, train_ranks[i], NULL, NULL);
        snprintf(name, sizeof name, "%s/%s", train_ranks[3], train_file);
        if (damaged)
            put_text(&t, name, "PK\3\4 not");
        open_checkpoint(t.dir, &o);
        if (o.info.error)
            fail_msg("%s", o.info.error);
        assert_string_equal(o.info.format, "nemo-ckpt");
        assert_int_equal(o.info.step, 10);
        assert_has(tensor(&o, train_late)->fault,
                   damaged ? "zip at byte 0" : "tensor rank 1: it is missing");
        assert_null(tensor(&o, train_early)->fault);
        close_checkpoint(&o);
        temp_remove(&t);
    }
}

/* Files that are not of one save, or do not tell how they are cut. */
static void test_train_not_merged(void **state)
{
    static const struct {
        const char *was, *is; /* in the files of ranks from `from` on */
        size_t from;
        const char *dir; /* of the last one, NULL: its own */
        const char *why;
    } cases[] = {
        {"global_stepq\2K\12", "global_stepq\2K\13", 3, NULL,
         "of step 11: they are of two saves"},
        {"hyper_parameters", "hyper_parameterz", 0, NULL,
         "it has no hyper_parameters that are a dict"},
        {"hyper_parameters", "hyper_parameterz", 2, NULL,
         "it has no hyper_parameters that are a dict"},
        {"DictConfig", "DictConfog", 0, NULL,
         "does not tell tensor_model_parallel_size"},
        {"ffn_hidden_size", "ffn_hidden_sizX", 1, NULL,
         "tell of different configurations"},
        {"num_layers", "num_layerX", 0, NULL, "tells of 0 layers, the files have 4"},
        {"state_dict", "state_dicX", 0, NULL, "it holds no state_dict"},
        {".layers.", ".layerX.", 0, NULL, "they have no layers in state_dict"},
        {NULL, NULL, 0, "tp_rank_01_pp_rank_002",
         "2 pipeline ranks, and there is tp_rank_01_pp_rank_002"},
        {NULL, NULL, 0, "tp_rank_1_pp_rank_0", "are of one rank"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf said = {0};
        char key[PATH_MAX];
        struct opened o;
        struct temp t;

        temp_make(&t, "checkpoints");
        for (size_t r = 0; r < ARRAY_SIZE(train_ranks); r++) {
            bool odd = r >= cases[i].from;

            put_train(state, &t, r,
                      r == 3 && cases[i].dir ? cases[i].dir : train_ranks[r],
                      odd ? cases[i].was : NULL, cases[i].is);
        }
        open_checkpoint(t.dir, &o);
        if (o.info.error)
            fail_msg("%s", o.info.error);
        all_warnings(&o, &said);
        assert_has(said.data, "not-merged: the files of 4 model parallel ranks");
        assert_has(said.data, cases[i].why);
        assert_int_equal(o.info.faults, 0);
        snprintf(key, sizeof key, "%s/%s:optimizer_states.0.state.0.exp_avg",
                 train_ranks[0], train_file);
        assert_int_equal(tensor(&o, key)->role, ROLE_OPTIMIZER);
        for (size_t k = 0; k < o.count; k++)
            assert_int_not_equal(o.t[k].role, ROLE_MODEL);
        close_checkpoint(&o);
        temp_remove(&t);
    }
}

/* Directories of ranks with other things in them are what they are. */
static void test_train_odd(void **state)
{
    struct temp t;
    struct listing *l;
    struct store *s;
    struct place p;
    struct err e = {0};

    temp_make(&t, "checkpoints");
    put_train(state, &t, 0, train_ranks[0], NULL, NULL);
    put_text(&t, "tp_rank_00_pp_rank_000/notes.txt", "x");
    assert_ok(store_open_local(t.dir, NULL, &s, &e), &e);
    assert_ok(s->ops->list(s, "", &l, &e), &e);
    assert_ok(place_of(l, NULL, &p, &e), &e);
    assert_int_equal(p.kind, PLACE_PLAIN);
    place_release(&p);
    listing_free(l);
    store_close(s);
    temp_remove(&t);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        cmocka_unit_test(test_megatron),
        cmocka_unit_test(test_unpacked),
        cmocka_unit_test(test_nemo2),
        cmocka_unit_test(test_nemo2_real),
        cmocka_unit_test(test_nemo2_unfinished),
        cmocka_unit_test(test_not_merged),
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_unlike),
        cmocka_unit_test(test_config_changes),
        cmocka_unit_test(test_lost_rank),
        cmocka_unit_test(test_oddities),
        cmocka_unit_test(test_train_lost),
        cmocka_unit_test(test_train_not_merged),
        cmocka_unit_test(test_train_odd),
    };

    return run_with_fixtures("nemo", argc, argv, others, ARRAY_SIZE(others));
}
