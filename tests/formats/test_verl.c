/* SPDX-License-Identifier: MIT */
/* tests/formats/test_verl.c - a file a rank, merged; and what is missing, damaged or unknown. */
#include "edited.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/rankfiles/verl_files.h"
#include "index/view.h"
#include "temp_tree.h"
#include "tests/unit/unit.h"

extern const struct format_driver format_verl;

/* ---- names ---- */

static void test_names(void **state)
{
    static const struct {
        const char *name;
        bool is;
        struct verl_name want;
    } cases[] = {
        {"model_world_size_4_rank_0.pt", true, {VERL_MODEL, 4, 0}},
        {"optim_world_size_128_rank_127.pt", true, {VERL_OPTIM, 128, 127}},
        {"extra_state_world_size_1_rank_0.pt", true, {VERL_EXTRA, 1, 0}},
        {"model_world_size_4_rank_4.pt", false, {0}},
        {"model_world_size_0_rank_0.pt", false, {0}},
        {"model_world_size_4_rank_.pt", false, {0}},
        {"model_world_size_4_rank_00.pt", false, {0}},
        {"model_world_size_04_rank_0.pt", false, {0}},
        {"model_world_size_4_rank_0.pt.tmp", false, {0}},
        {"model_world_size_4_rank_-1.pt", false, {0}},
        {"model_world_size_99999999999999999999_rank_0.pt", false, {0}},
        {"xmodel_world_size_4_rank_0.pt", false, {0}},
        {"", false, {0}},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct verl_name got;

        if (verl_name(cases[i].name, &got) != cases[i].is)
            fail_msg("%s", cases[i].name);
        if (!cases[i].is)
            continue;
        assert_int_equal(got.kind, cases[i].want.kind);
        assert_int_equal(got.world, cases[i].want.world);
        assert_int_equal(got.rank, cases[i].want.rank);
    }
}

static void add(struct listing *l, const char *name, const char *head, int64_t mtime)
{
    struct entry_stat st = {.kind = ENTRY_FILE, .mode = 0644};
    struct err e = {0};

    st.id.size = strlen(head);
    st.id.mtime_ns = mtime;
    assert_ok(listing_add(l, name, &st, head, strlen(head), &e), &e);
}

static struct listing *begin(void)
{
    struct listing *l;
    struct err e = {0};

    assert_ok(listing_new(NULL, "run/global_step_7/actor", &l, &e), &e);
    return l;
}

static int bid(struct listing *l, const char *reason)
{
    struct bid b;

    listing_sort(l);
    format_verl.bid(l, &b);
    if (reason)
        assert_has(b.reason, reason);
    listing_free(l);
    return b.score;
}

/* The head of a zip whose first entry is a data.pkl of torch. */
static const char zip[] = "PK\3\4....................\x08.\x01.x/data.pkl";

static void test_bids(void **state)
{
    struct listing *l = begin();

    (void)state;
    add(l, "extra_state_world_size_2_rank_0.pt", zip, 0);
    assert_int_equal(bid(l, NULL), 0);
    l = begin();
    add(l, "model_world_size_2_rank_1.pt", "text", 0);
    assert_int_equal(bid(l, "no torch.save file"), 45);
    l = begin();
    add(l, "README.md", "text", 0);
    assert_int_equal(bid(l, NULL), 0);
}

/* ---- which save ---- */

static uint32_t chosen(struct listing *l, uint64_t told)
{
    struct verl_files f;
    struct err e = {0};
    uint32_t world;

    listing_sort(l);
    assert_ok(verl_files_find(l, told, &f, &e), &e);
    world = f.world;
    assert_int_equal(f.nstale, listing_count(l) - f.count[VERL_MODEL] -
                                   f.count[VERL_OPTIM] - f.count[VERL_EXTRA]);
    for (uint32_t i = 1; i < f.count[VERL_MODEL]; i++)
        assert_true(f.file[VERL_MODEL][i - 1].rank < f.file[VERL_MODEL][i].rank);
    verl_files_release(&f);
    return world;
}

static void test_worlds(void **state)
{
    struct listing *l = begin();
    struct verl_files f;
    struct err e = {0};

    (void)state;
    for (int i = 0; i < 12; i++) {
        char name[64];

        snprintf(name, sizeof name, "model_world_size_12_rank_%d.pt", i);
        add(l, name, zip, 100 + i);
    }
    assert_int_equal(chosen(l, 0), 12);
    assert_int_equal(chosen(l, 7), 12);
    add(l, "model_world_size_4_rank_0.pt", zip, 500);
    add(l, "optim_world_size_4_rank_0.pt", zip, 500);
    assert_int_equal(chosen(l, 0), 4); /* newer */
    assert_int_equal(chosen(l, 12), 12);
    /* An optimizer alone is no newer save of the model. */
    add(l, "optim_world_size_2_rank_0.pt", zip, 900);
    assert_int_equal(chosen(l, 0), 4);
    add(l, "model_world_size_3_rank_0.pt", zip, 500);
    listing_sort(l);
    assert_int_equal(verl_files_find(l, 0, &f, &e), -ENOTSUP);
    assert_has(e.text, "of one time");
    assert_int_equal(chosen(l, 3), 3);
    listing_free(l);
    l = begin();
    assert_int_equal(verl_files_find(l, 0, &f, &e), -ESTALE);
    listing_free(l);
}

/* ---- copies of fixtures ---- */

static void path_of(void **state, const char *fixture, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/%s", (const char *)*state, fixture);
}

/* All model and optimizer files of a fixture of `world` ranks, but for one rank. */
static void copy_ranks(void **state, const struct temp *t, const char *fixture,
                       int world, bool optim, int without)
{
    static const char *const kinds[] = {"model", "optim"};
    char from[PATH_MAX], name[64];

    path_of(state, fixture, from);
    for (int k = 0; k <= optim; k++) {
        for (int r = 0; r < world; r++) {
            snprintf(name, sizeof name, "%s_world_size_%d_rank_%d.pt", kinds[k], world,
                     r);
            if (r != without)
                put_copy(t, name, from, NULL, NULL, 0);
        }
    }
}

static void expect(void **state, const char *fixture, const char *suffix,
                   char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%s/%s%s", (const char *)*state, fixture, suffix);
}

static void fault_of(struct opened *o, const char *key, const char *want)
{
    const struct tensor_info *t = tensor(o, key);

    if (!t->fault)
        fail_msg("%s: no fault, not %s", key, want);
    assert_string_equal(t->fault, want);
}

/* Two groups without names, a partial sum, and a buffer that differs. */
static void test_oddities(void **state)
{
    char path[PATH_MAX];
    struct opened o;

    path_of(state, "made_groups_2", path);
    open_checkpoint(path, &o);
    assert_null(o.info.error);
    expect(state, "made_groups_2", ".json", path);
    check_readable(&o, path);
    assert_int_equal(o.count, 8);
    assert_int_equal(o.info.faults, 1);
    fault_of(&o, "partial", "model_world_size_2_rank_0.pt: its placement is Partial");
    check_warnings(
        &o, "ranks-differ: 1 tensors that are not distributed, as running_mean, differ "
            "between ranks: the first rank's are shown\n"
            "unnamed-optimizer: the optimizer's entries have numbers: its several "
            "groups do not tell which parameters they are of\n");
    close_checkpoint(&o);
}

static void test_missing_rank(void **state)
{
    char path[PATH_MAX];
    struct opened o;
    struct temp t;

    temp_make(&t, "actor");
    copy_ranks(state, &t, "verl_fsdp2_4r_bf16", 4, true, 2);
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    expect(state, "verl_fsdp2_4r_bf16", ".expected.json", path);
    check_readable(&o, path);
    /* All but the buffer, the scale of one element, its moments, and the steps. */
    assert_int_equal(o.count, 77);
    assert_int_equal(o.info.faults, 18 + 36);
    fault_of(&o, "lm_head.weight",
             "parts of it are in 1 of 4 ranks' files that are missing or damaged");
    check_warnings(&o, "missing-file: 1 of 4 ranks' files are missing beside "
                       "model_world_size_4_rank_0.pt\n"
                       "missing-file: 1 of 4 ranks' files are missing beside "
                       "optim_world_size_4_rank_0.pt\n");
    close_checkpoint(&o);
    temp_remove(&t);
}

/* What replicas have is whole without the first rank; what is cut by all axes is not. */
static void test_missing_replica(void **state)
{
    char path[PATH_MAX];
    struct opened o;
    struct temp t;

    temp_make(&t, "actor");
    copy_ranks(state, &t, "made_cube_2x2x2", 8, false, 0);
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    expect(state, "made_cube_2x2x2", ".expected.json", path);
    check_readable(&o, path);
    assert_int_equal(o.count, 8);
    assert_int_equal(o.info.faults, 3);
    assert_non_null(tensor(&o, "all")->fault);
    assert_non_null(tensor(&o, "late")->fault);
    assert_non_null(tensor(&o, "last")->fault);
    close_checkpoint(&o);
    temp_remove(&t);
}

static void test_damaged_rank(void **state)
{
    CLEANUP(buf_release) struct buf text = {0};
    char path[PATH_MAX];
    struct opened o;
    struct temp t;

    temp_make(&t, "actor");
    copy_ranks(state, &t, "verl_fsdp2_4r_bf16", 4, true, 1);
    put_text(&t, "model_world_size_4_rank_1.pt", "PK\3\4 and nothing else");
    put_text(&t, "optim_world_size_4_rank_1.pt", "PK\3\4 and nothing else");
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    expect(state, "verl_fsdp2_4r_bf16", ".expected.json", path);
    check_readable(&o, path);
    assert_int_equal(o.info.faults, 18 + 36);
    assert_has(tensor(&o, "lm_head.weight")->fault,
               "1 of 4 ranks' files that are missing or damaged, as "
               "model_world_size_4_rank_1.pt");
    all_warnings(&o, &text);
    assert_has(text.data, "damaged-file: model_world_size_4_rank_1.pt: ");
    close_checkpoint(&o);
    temp_remove(&t);
}

static void test_all_damaged(void **state)
{
    struct opened o;
    struct temp t;

    (void)state;
    temp_make(&t, "actor");
    put_text(&t, "model_world_size_1_rank_0.pt", "PK\3\4 and nothing else");
    open_checkpoint(t.dir, &o);
    assert_non_null(o.info.error);
    assert_has(o.info.error, "model_world_size_1_rank_0.pt");
    assert_string_equal(o.info.format, "verl-fsdp");
    close_checkpoint(&o);
    temp_remove(&t);
}

/* A few kilobytes that are 400,000 names of one tensor of 64 dimensions. */
static void test_bomb(void **state)
{
    char path[PATH_MAX];
    struct opened o;

    path_of(state, "made_bomb_1", path);
    open_checkpoint(path, &o);
    assert_non_null(o.info.error);
    assert_has(o.info.error, "too many tensors for its size");
    close_checkpoint(&o);
}

/* One rank's file with some bytes changed: what the tensors then say. */
static void check_changed(void **state, const char *was, const char *is, size_t times,
                          const char *key, const char *why)
{
    static const char name[] = "model_world_size_5_rank_1.pt";
    char from[PATH_MAX], path[PATH_MAX];
    struct opened o;
    struct temp t;

    temp_make(&t, "actor");
    copy_ranks(state, &t, "made_row_5", 5, false, 1);
    path_of(state, "made_row_5", from);
    put_copy(&t, name, from, was, is, times);
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    expect(state, "made_row_5", ".expected.json", path);
    check_readable(&o, path);
    check_fault(&o, key, why);
    close_checkpoint(&o);
    temp_remove(&t);
}

/* What is changed is named, and what it does not touch is read as before. */
static void test_tampered(void **state)
{
    check_changed(state, "placement_types\nShard", "placement_types\nShore", 1, "three",
                  "its placement is Shore");
    check_changed(state, "_coordinate_on_dim", "_coordinate_on_dir", 1, "eleven",
                  "a device mesh that does not tell the rank's place");
    check_changed(state, "DTensorSpec", "DTensorSpek", 1, "three",
                  "a DTensor of an unknown kind");
    check_changed(state, "axes", "axis", 1, "three",
                  "a device mesh of an unknown kind");
    check_changed(state, "placements", "placement_", 1, "eleven",
                  "a distributed tensor without placements");
    check_changed(state, "_local_tensor", "_local_tensos", 1, "three",
                  "a distributed tensor without a local part");
    check_changed(state, "_rebuild_wrapper_subclass", "_rebuild_wrapper_subclasz", 1,
                  "three", "a distributed tensor that is rebuilt in an unknown way");
    /* Of the whole tensor 3 x 4, told as 9 x 4 by this rank. */
    check_changed(state, "K\3K\4\x86", "K\x09K\4\x86", 2, "three",
                  "other ranks have another shape or type");
}

/* ---- folders ---- */

static int note_copy(void *user, const struct catalog_file *f)
{
    return f->copy ? buf_addf(user, "%s ", f->path) : 0;
}

static int note_part(void *user, const char *name, bool part)
{
    return buf_addf(user, "%s%s ", name, part ? "/" : "");
}

/* huggingface/ comes to the top, a full copy of the model does not. */
static void test_huggingface(void **state)
{
    CLEANUP(buf_release) struct buf copies = {0}, parts = {0};
    struct opened o;
    struct err e = {0};
    struct made m;
    struct temp t;

    temp_make(&t, "actor");
    snprintf(m.dir, sizeof m.dir, "%s", t.dir);
    copy_ranks(state, &t, "made_one_1", 1, true, -1);
    made_text(&m, "huggingface/config.json", "{}");
    made_safetensors(&m, "huggingface/model.safetensors",
                     "{\"norm\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,"
                     "12]}}",
                     1, 3);
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.by_role[ROLE_MODEL], 3);
    assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 2);
    assert_ok(catalog_files(o.w.catalog, o.info.id, note_copy, &copies, &e), &e);
    assert_string_equal(copies.data, "huggingface/model.safetensors ");
    assert_ok(catalog_hidden(o.w.catalog, o.info.id, note_part, &parts, &e), &e);
    assert_has(parts.data, "huggingface/ ");
    assert_has(parts.data, "huggingface/model.safetensors ");
    assert_null(strstr(parts.data, "config.json"));
    close_checkpoint(&o);
    temp_remove(&t);
}

/*
 * No rank's file of the model, but a full one: of verl that was told to save hf_model in place
 * of model, and of AReaL beside the optimizer's files.
 */
static void test_full_model(void **state)
{
    static const char header[] = "{\"w\":{\"dtype\":\"F32\",\"shape\":[3],"
                                 "\"data_offsets\":[0,12]}}";
    static const char index[] = "{\"weight_map\": {\"w\": \"model-00001-of-00002"
                                ".safetensors\", \"v\": \"model-00002-of-00002"
                                ".safetensors\"}}";
    static const char other[] = "{\"v\":{\"dtype\":\"F32\",\"shape\":[1],"
                                "\"data_offsets\":[0,4]}}";
    static const struct {
        const char *file, *second;
        bool adapter;
    } cases[] = {
        {"huggingface/model.safetensors", NULL, false},
        {"model.safetensors", NULL, false},
        {"adapter_model.safetensors", NULL, true},
        {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", false},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char from[PATH_MAX];
        struct opened o;
        struct made m;
        struct temp t;

        temp_make(&t, "epoch0epochstep4globalstep5");
        snprintf(m.dir, sizeof m.dir, "%s", t.dir);
        path_of(state, "made_one_1", from);
        put_copy(&t, "optim_world_size_1_rank_0.pt", from, NULL, NULL, 0);
        made_safetensors(&m, cases[i].file, header, 1, 3);
        if (cases[i].adapter)
            made_text(&m, "adapter_config.json", "{\"peft_type\": \"LORA\"}");
        if (cases[i].second) {
            made_safetensors(&m, cases[i].second, other, 1, 1);
            made_text(&m, "model.safetensors.index.json", index);
        }
        open_checkpoint(t.dir, &o);
        assert_null(o.info.error);
        assert_int_equal(o.info.by_role[ROLE_MODEL], cases[i].second ? 2 : 1);
        assert_int_equal(o.info.by_role[ROLE_OPTIMIZER], 2);
        assert_int_equal(o.info.adapter, cases[i].adapter);
        assert_int_equal(tensor(&o, "w")->role, ROLE_MODEL);
        assert_true(o.info.has_step);
        assert_int_equal(o.info.step, 5);
        close_checkpoint(&o);
        temp_remove(&t);
    }
}

/* Files of two world sizes: those that fsdp_config.json tells. */
static void test_resumed(void **state)
{
    CLEANUP(buf_release) struct buf hidden = {0};
    char path[PATH_MAX];
    struct opened o;
    struct err e = {0};
    struct temp t;

    temp_make(&t, "actor");
    copy_ranks(state, &t, "made_row_5", 5, true, -1);
    copy_ranks(state, &t, "made_one_1", 1, true, -1);
    put_text(&t, "fsdp_config.json", "{\"FSDP_version\": 2, \"world_size\": 5}");
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.count, 11);
    expect(state, "made_row_5", ".expected.json", path);
    check_readable(&o, path);
    check_warnings(&o, "stale-file: 2 files of another save, of 1 ranks: they are not "
                       "shown\n");
    assert_string_equal(o.info.topology,
                        "{\"ranks\": 5, \"fsdp\": 2, \"mesh\": [[\"fsdp\", 5]]}");
    assert_ok(catalog_hidden(o.w.catalog, o.info.id, note_part, &hidden, &e), &e);
    assert_has(hidden.data, "model_world_size_1_rank_0.pt ");
    close_checkpoint(&o);
    temp_remove(&t);
}

static int note_place(void *user, const char *dir, const char *file,
                      const struct format_driver *d)
{
    return buf_addf(user, "%s%s%s=%s ", dir, file ? ":" : "", file ? file : "",
                    d->name);
}

/* Models of one step are checkpoints of their own; its dataloader is none. */
static void test_run(void **state)
{
    CLEANUP(buf_release) struct buf places = {0};
    char data[PATH_MAX];
    struct checkpoint_info info;
    struct opened o = {0};
    struct err e = {0};
    struct made m;

    made_begin(&m, "run");
    path_of(state, "made_one_1/model_world_size_1_rank_0.pt", data);
    made_copy(&m, "global_step_20/actor/model_world_size_1_rank_0.pt", data);
    made_copy(&m, "global_step_20/critic/model_world_size_1_rank_0.pt", data);
    made_copy(&m, "global_step_20/data.pt", data);
    made_text(&m, "latest_checkpointed_iteration.txt", "20");
    assert_ok(world_open(m.dir, &o.w, &e), &e);
    assert_ok(scanner_walk(o.w.scanner, "", note_place, &places, &e), &e);
    assert_string_equal(places.data,
                        "global_step_20/actor=verl global_step_20/critic=verl ");
    assert_ok(
        scanner_get(o.w.scanner, "global_step_20/critic", NULL, o.w.arena, &info, &e),
        &e);
    assert_true(info.has_step);
    assert_int_equal(info.step, 20);
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- distributed tensors that contradict themselves ---- */

#define SHARDED "verl_fsdp1_3r_shardedtensor", "model_world_size_3_rank_0.pt"
#define DTENSOR "verl_fsdp2_tp_2x2", "model_world_size_4_rank_1.pt"

static const struct edited rows[] = {
    {SHARDED, EDIT("q\6K\1\205", "q\6K\1K\1\206"), "scale",
     "its size is told twice, and not the same", NULL, NULL},
    {SHARDED, EDIT("q\6K\1\205", "q\6J\377\377\377\377\205"), "scale",
     "a distributed tensor of an impossible size", NULL, NULL},
    {SHARDED, EDIT("q\6K\1\205", "q\6\212\10\377\377\377\377\377\377\377\177\205"),
     "scale", "a distributed tensor of more than 2^63 bytes", NULL, NULL},
    {SHARDED, EDIT("torch\nfloat32", "torch\nfloat99"), "scale",
     "a distributed tensor of an unknown element type", NULL, NULL},
    {SHARDED, EDIT("torch\nFloatStorage", "torch\nIntStorage"), "scale",
     "its local part is I32, the whole F32", NULL, NULL},
    {SHARDED, EDIT("shard_offsets", "-hard_offsets"), "scale",
     "a shard without its place", NULL, NULL},
    {SHARDED, EDIT("q&]q'K\0a", "q&]q'(K\0K\0e"), "scale",
     "a shard of 1 dimensions, of 1", NULL, NULL},
    {SHARDED, EDIT("q&]q'K\0a", "q&]q'K\1a"), "scale",
     "a shard that reaches past the tensor", NULL, NULL},
    {SHARDED, EDIT("q(]q)K\1a", "q(]q)K\0a"), "scale",
     "a shard of another size than its place has", NULL, NULL},
    {SHARDED, EDIT("X\4\0\0\0size", "X\4\0\0\0-ize"), "scale",
     "a ShardedTensor without metadata", NULL, NULL},
    {SHARDED, EDIT("torch\nSize\nqFK\1", "torch\nSize\nqFK\2"), "scale",
     "its size is told twice, and not the same", NULL, NULL},
    {DTENSOR, EDIT("q0K\2\205", "q0K\0\205"), "scale",
     "axis 0 of the device mesh has 0 ranks", NULL, NULL},
    {DTENSOR,
     EDIT("torch.distributed.device_mesh\nDeviceMesh",
          "torch.distributed.device_mesh\nDeviceMash"),
     "scale", "a distributed tensor on no device mesh", NULL, NULL},
    {DTENSOR, EDIT("hXK\0\205q]", "hXK\0K\0\206q]"), "scale",
     "a place in the device mesh of another rank", NULL, NULL},
    {DTENSOR, EDIT("hXK\0\205q]", "hXK\5\205q]"), "scale",
     "coordinate 5 on axis 0 of the mesh, which has 2 ranks", NULL, NULL},
    {DTENSOR, EDIT("hXK\0\205q]", "hXK\1\205q]"), "scale",
     "its local part has another size than its placements give", NULL, NULL},
    {DTENSOR, EDIT("X\3\0\0\0dim", "X\3\0\0\0-im"), "scale",
     "a placement without a dimension", NULL, NULL},
    {DTENSOR, EDIT("dimqcK\0", "dimqcK\1"), "scale",
     "an order of shards that is not of its mesh", NULL, NULL},
    {DTENSOR, EDIT("dimqcK\0sb\205", "dimqcK\0sb2\206"), "scale",
     "2 placements on a mesh of 1 axes", NULL, NULL},
    {DTENSOR, EDIT("placement_types\nShard", "placement_types\nShart"), "scale",
     "its placement is Shart", NULL, NULL},
    {DTENSOR, EDIT("placement_types\nShard", "placement_types\nReplicate"), "scale",
     "an order of shards that is not of its mesh", NULL, NULL},
};

static void test_edited(void **state)
{
    check_edited(*state, rows, ARRAY_SIZE(rows));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),        cmocka_unit_test(test_bids),
        cmocka_unit_test(test_worlds),       cmocka_unit_test(test_oddities),
        cmocka_unit_test(test_missing_rank), cmocka_unit_test(test_missing_replica),
        cmocka_unit_test(test_damaged_rank), cmocka_unit_test(test_all_damaged),
        cmocka_unit_test(test_bomb),         cmocka_unit_test(test_tampered),
        cmocka_unit_test(test_huggingface),  cmocka_unit_test(test_full_model),
        cmocka_unit_test(test_resumed),      cmocka_unit_test(test_run),
        cmocka_unit_test(test_edited),
    };

    return run_with_fixtures("verl", argc, argv, tests, ARRAY_SIZE(tests));
}
