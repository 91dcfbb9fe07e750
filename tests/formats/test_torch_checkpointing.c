/* SPDX-License-Identifier: MIT */
/* tests/formats/test_torch_checkpointing.c - items of ranks put together, and metadata that lie. */
#include "edited.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>

#include "base/endian.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/pickle/pickle_write.h"
#include "index/view.h"
#include "temp_tree.h"
#include "tests/unit/unit.h"

extern const struct format_driver format_torch_checkpointing;

/* ---- bids ---- */

static int bid_of(const char *head, size_t len)
{
    struct entry_stat st = {.kind = ENTRY_FILE, .mode = 0644, .id.size = len};
    struct listing *l;
    struct err e = {0};
    struct bid b;

    assert_ok(listing_new(NULL, "run/step_7", &l, &e), &e);
    assert_ok(listing_add(l, "metadata.pkl", &st, head, len, &e), &e);
    listing_sort(l);
    format_torch_checkpointing.bid(l, &b);
    listing_free(l);
    return b.score;
}

#define BID(text) bid_of(text, sizeof(text) - 1)

static void test_bids(void **state)
{
    (void)state;
    assert_int_equal(BID("\x80\4}(\x8c\x08metadata}\x8c\5model}("
                         "\x8c\x17nested_path_to_metadata"),
                     93);
    assert_int_equal(BID("\x80\4}(\x8c\x08metadata}\x8c\nworld_sizeK\1"
                         "\x8c\7version\x8c\3002.0u."),
                     93);
    assert_int_equal(BID("\x80\4}(\x8c\x08metadata}\x8c\3fooK\1u."), 0);
    assert_int_equal(BID("metadata nested_path_to_metadata"), 0);
    assert_int_equal(BID(""), 0);
}

/* ---- one byte wrong, and what is said of it ---- */

#define PKL "metadata.pkl"
#define MESH "made_mesh_2x2"
#define ROW "made_row_3"
#define CUTS "made_cuts_2"
#define STRIDED "made_strided_2x2"

static const struct edited rows[] = {
    {MESH, PKL, EDIT("", ""), EDITED_SOUND, "", NULL, NULL},
    {ROW, PKL, EDIT("", ""), EDITED_SOUND, "", NULL, NULL},
    /* The whole. */
    {ROW, PKL, EDIT("\x8c\0032.0", "\x8c\0033.0"), NULL, "its version is not 2.0", NULL,
     NULL},
    {ROW, PKL, EDIT("world_size", "world-size"), NULL,
     "it is no metadata of torch_checkpointing", NULL, NULL},
    {ROW, PKL, EDIT("world_size\x94K\3", "world_size\x94K\2"), NULL,
     "not each of 2 ranks has a layout", NULL, NULL},
    {ROW, PKL, EDIT("world_size\x94K\3", "world_size\x94K\0"), NULL, "0 ranks", NULL,
     NULL},
    {CUTS, PKL, EDIT("model_1.safe", "model_0.safe"), NULL,
     "two ranks or items have the file model_0.safetensors", NULL, NULL},
    {CUTS, PKL, EDIT("file_path", "file-path"), NULL, "a layout without a file", NULL,
     NULL},
    {CUTS, PKL, EDIT("suK\1}", "suK\2}"), NULL,
     "a layout of a rank that is not below 2", NULL, NULL},
    {CUTS, PKL, EDIT("\x8c\5model", "\x8c\5mo/el"), NULL,
     "an item whose name is no part of a file's", NULL, NULL},
    {CUTS, PKL, EDIT("[\"rows\"]", "{\"rows\"}"), NULL, "is no JSON list", NULL, NULL},
    {CUTS, PKL, EDIT("[\"rows\"]", "[[1,2,3]"), NULL, "is no JSON list", NULL, NULL},
    {CUTS, PKL, EDIT("[\"rows\"]", "[[1234]]"), NULL, "more than keys and positions",
     NULL, NULL},
    {ROW, PKL, EDIT("ranks\x94K\0K\2\x86", "ranks\x94K\2K\2\x86"), NULL,
     "rank 2 is twice", NULL, NULL},
    {ROW, PKL, EDIT("ranks\x94K\0K\2\x86", "ranks\x94]0\x88\x89\x86"), NULL,
     "a list of ranks with something else in it", NULL, NULL},
    {ROW, PKL, EDIT("\x8c\5ranks", "\x8c\5tanks"), NULL, "metadata without its ranks",
     NULL, NULL},
    /* One tensor: the DTensor in the file tells the same, or else. */
    {ROW, PKL, EDIT("K\5K\2e", "K\6K\2e"), "pair",
     "model_0.pt: metadata.pkl tells another shape or type", NULL, NULL},
    {ROW, PKL, EDIT("dim\x94K\0", "dim\x94K\1"), "pair",
     "metadata.pkl tells another part of it for this rank", NULL, NULL},
    {ROW, PKL, EDIT("mesh_data\x94K\0K\2\x86", "mesh_data\x94K\2K\0\x86"), "pair",
     "metadata.pkl tells another part of it for this rank", NULL, NULL},
    {ROW, PKL, EDIT("torch.float32", "torch.int3232"), "pair",
     "metadata.pkl tells of it what cannot be used", NULL, NULL},
    {ROW, PKL, EDIT("[\"pair\"]", "[\"fair\"]"), "fair",
     "no rank's file that can be read has it", NULL, NULL},
    {ROW, PKL, EDIT("[\"buffer\"]", "[\"differ\"]"), "differ",
     "no rank's file that can be read has it", NULL, NULL},
    /* A file of safetensors tells nothing by itself. */
    {MESH, PKL, EDIT("[\"norm\"]", "[\"nurm\"]"), "norm",
     "metadata.pkl does not tell which part of a tensor it is", NULL, NULL},
    {MESH, PKL, EDIT("[\"norm\"]", "[\"nurm\"]"), "nurm",
     "no rank's file that can be read has it", NULL, NULL},
    {MESH, PKL, EDIT("\x8c\x08[\"norm\"]", "\x8c\x09[ \"half\"]"), "half",
     "two paths of metadata.pkl give this name", NULL, NULL},
    {MESH, PKL, EDIT("]\x94K\3a", "]\x94K\7a"), "norm",
     "its part has another size than the metadata tell", NULL, NULL},
    {MESH, PKL, EDIT("torch.float32", "torch.float64"), "norm",
     "its part is of another type than the metadata tell", NULL, NULL},
    {MESH, PKL, EDIT("torch.float32", "torch.float99"), "norm",
     "metadata tell an unknown type", NULL, NULL},
    {MESH, PKL, EDIT("global_shape", "global-shape"), "norm",
     "metadata without the shape of the whole", NULL, NULL},
    {MESH, PKL, EDIT("DTensorSharding", "ETensorSharding"), "norm",
     "metadata of an unknown kind", NULL, NULL},
    {MESH, PKL, EDIT("\x8c\5Shard", "\x8c\5Shart"), "norm",
     "a placement of an unknown type", NULL, NULL},
    {MESH, PKL, EDIT("\x8c\3dim", "\x8c\3rim"), "norm",
     "a placement without a dimension", NULL, NULL},
    {MESH, PKL, EDIT("dim\x94K\0", "dim\x94K\1"), "norm",
     "it is cut along dimension 1 of 1", NULL, NULL},
    {MESH, PKL, EDIT("mesh_shape\x94K\2K\2", "mesh_shape\x94K\2K\3"), "norm",
     "a device mesh that lists other ranks than it has", NULL, NULL},
    {MESH, PKL, EDIT("mesh_data\x94(K\0K\1", "mesh_data\x94(K\0K\7"), "norm",
     "or not rank 1", NULL, NULL},
    {MESH, PKL, EDIT("placements\x94]", "placements\x94}"), NULL, "metadata.pkl", NULL,
     NULL},
    {STRIDED, PKL, EDIT("split_factor\x94K\2", "split_factor\x94K\3"), "strided.1",
     "a strided shard of split factor 3", NULL, NULL},
    {STRIDED, PKL, EDIT("split_factor\x94K\2", "split_factor\x94K\0"), "strided.1",
     "a strided placement without a split factor", NULL, NULL},
    {STRIDED, PKL, EDIT("\x8c\x0cStridedShard", "\x8c\x0cStridedSharp"), "strided.1",
     "a placement of an unknown type", NULL, NULL},
    /* Boxes that lie outside, overlap or leave a hole. */
    {CUTS, PKL, EDIT("K\4K\0ee", "K\7K\0ee"), "fused",
     "a shard that is not within the whole", NULL, NULL},
    {CUTS, PKL, EDIT("K\4K\0ee", "K\5K\0ee"), "fused", "overlap", NULL, NULL},
    {CUTS, PKL, EDIT("K\4K\0ee", "K\0K\0ee"), "fused", "hole at [4, 0]", NULL, NULL},
    {CUTS, PKL, EDIT("K\2K\0ee", "K\3K\0ee"), "fused",
     "its part has another size than the metadata tell", NULL, NULL},
    {CUTS, PKL, EDIT("local_sizes", "local-sizes"), "fused",
     "metadata of shards that are not of one number", NULL, NULL},
    /* Files that are lost or damaged. */
    {MESH, PKL, EDIT("", ""), "both",
     "parts of it are in 1 of 4 ranks' files that are missing or damaged", NULL,
     "model_3.safetensors"},
    {MESH, "model_1.safetensors", EDIT("\"F64\"", "\"F65\""), "both",
     "1 of 4 ranks' files that are missing or damaged, as model_1.safetensors", NULL,
     NULL},
    {MESH, "model_1.safetensors", EDIT("\"embed\"", "\"embad\""), "embad",
     "metadata.pkl does not tell which part", NULL, NULL},
    {ROW, PKL, EDIT("", ""), "ten",
     "parts of it are in 1 of 3 ranks' files that are missing or damaged", NULL,
     "model_1.pt"},
    {MESH, PKL, EDIT("", ""), "state.layers.0.w.exp_avg",
     "parts of it are in 1 of 4 ranks' files that are missing or damaged", NULL,
     "optimizer_2.pt"},
    {STRIDED, PKL, EDIT("", ""), "strided.12",
     "parts of it are in 1 of 4 ranks' files that are missing or damaged", NULL,
     "rank_2/"},
};

static void test_edited(void **state)
{
    check_edited(*state, rows, ARRAY_SIZE(rows));
}

/* ---- folders ---- */

static int note_copy(void *user, const struct catalog_file *f)
{
    return f->copy ? buf_addf(user, "%s ", f->path) : 0;
}

/* Full tensors for Hugging Face beside the ranks' files: a copy, and its index hidden. */
static void test_consolidated(void **state)
{
    static const char *const files[] = {PKL, "model_0.safetensors",
                                        "model_1.safetensors"};
    CLEANUP(buf_release) struct buf copies = {0};
    char path[PATH_MAX];
    struct opened o;
    struct err e = {0};
    struct made m;
    struct temp t;

    temp_make(&t, "step_12");
    snprintf(m.dir, sizeof m.dir, "%s", t.dir);
    snprintf(path, sizeof path, "%s/%s", (const char *)*state, CUTS);
    for (size_t i = 0; i < ARRAY_SIZE(files); i++)
        put_copy(&t, files[i], path, NULL, NULL, 0);
    made_text(&m, "model.safetensors.index.json", "{\"weight_map\":{}}");
    made_safetensors(&m, "model-00001-of-00001.safetensors",
                     "{\"rows\":{\"dtype\":\"I64\",\"shape\":[5],\"data_offsets\":[0,"
                     "40]}}",
                     1, 10);
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.count, 2);
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 12);
    assert_ok(catalog_files(o.w.catalog, o.info.id, note_copy, &copies, &e), &e);
    assert_string_equal(copies.data, "model-00001-of-00001.safetensors ");
    snprintf(path, sizeof path, "%s/%s.expected.json", (const char *)*state, CUTS);
    check_readable(&o, path);
    close_checkpoint(&o);
    temp_remove(&t);
}

/* ---- replicas ---- */

enum { REPLICAS = 64, TENSORS = 10, CUT = 32 };

/* [[from], [from + step], ...], or [[1], [1], ...] */
static void put_boxes(struct pickler *p, const char *key, int from, int step)
{
    pickle_string(p, key);
    pickle_list(p);
    pickle_mark(p);
    for (int i = 0; i < CUT; i++) {
        pickle_list(p);
        pickle_mark(p);
        pickle_int(p, from + i * step);
        pickle_append(p);
    }
    pickle_append(p);
}

/* Each rank has all elements of each tensor, the last one first. */
static void put_path(struct pickler *p, int i)
{
    char path[24];

    snprintf(path, sizeof path, "[\"w%d\"]", i);
    pickle_string(p, path);
    pickle_list(p);
    pickle_mark(p);
    pickle_dict(p);
    pickle_mark(p);
    pickle_string(p, "sharding_metadata");
    pickle_dict(p);
    pickle_mark(p);
    pickle_string(p, "type");
    pickle_string(p, "default_tensor_v1");
    pickle_string(p, "data");
    pickle_dict(p);
    pickle_mark(p);
    pickle_string(p, "global_shape");
    pickle_list(p);
    pickle_mark(p);
    pickle_int(p, CUT);
    pickle_append(p);
    put_boxes(p, "global_offsets", CUT - 1, -1);
    put_boxes(p, "local_offsets", 0, 1);
    put_boxes(p, "local_sizes", 1, 0);
    pickle_string(p, "dtype");
    pickle_string(p, "torch.uint8");
    pickle_set(p);
    pickle_set(p);
    pickle_string(p, "ranks");
    pickle_mark(p);
    for (int r = 0; r < REPLICAS; r++)
        pickle_int(p, r);
    pickle_tuple(p);
    pickle_set(p);
    pickle_append(p);
}

static void put_layout(struct pickler *p, int rank)
{
    char name[40];

    snprintf(name, sizeof name, "model_%d.safetensors", rank);
    pickle_int(p, rank);
    pickle_dict(p);
    pickle_mark(p);
    pickle_string(p, "file_path");
    pickle_string(p, name);
    pickle_string(p, "serialization_format");
    pickle_dict(p);
    pickle_mark(p);
    pickle_string(p, "type");
    pickle_string(p, "SafetensorsSerialization");
    pickle_set(p);
    pickle_set(p);
}

static void put_metadata(const struct temp *t)
{
    struct pickler p = {0};

    pickle_begin(&p);
    pickle_dict(&p);
    pickle_mark(&p);
    pickle_string(&p, "metadata");
    pickle_dict(&p);
    pickle_mark(&p);
    pickle_string(&p, "model");
    pickle_dict(&p);
    pickle_mark(&p);
    pickle_string(&p, "nested_path_to_metadata");
    pickle_dict(&p);
    pickle_mark(&p);
    for (int i = 0; i < TENSORS; i++)
        put_path(&p, i);
    pickle_set(&p);
    pickle_string(&p, "rank_to_layout_info");
    pickle_dict(&p);
    pickle_mark(&p);
    for (int r = 0; r < REPLICAS; r++)
        put_layout(&p, r);
    pickle_set(&p);
    pickle_set(&p);
    pickle_set(&p);
    pickle_string(&p, "version");
    pickle_string(&p, "2.0");
    pickle_string(&p, "world_size");
    pickle_int(&p, REPLICAS);
    pickle_set(&p);
    pickle_end(&p);
    assert_int_equal(buf_failed(&p.out), 0);
    assert_true(p.out.len < (size_t)REPLICAS * TENSORS * CUT); /* what is multiplied */
    put(t, PKL, p.out.data, p.out.len);
    pickle_release(&p);
}

static void put_replica(const struct temp *t, int rank)
{
    CLEANUP(buf_release) struct buf b = {0};
    char name[40];

    buf_adds(&b, "12345678{");
    for (int i = 0; i < TENSORS; i++)
        buf_addf(&b,
                 "%s\"w%d\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]}",
                 i ? "," : "", i, CUT, i * CUT, (i + 1) * CUT);
    buf_addc(&b, '}');
    put_le64(b.data, b.len - 8);
    for (int i = 0; i < TENSORS * CUT; i++)
        buf_addc(&b, (char)(i % CUT));
    assert_int_equal(buf_failed(&b), 0);
    snprintf(name, sizeof name, "model_%d.safetensors", rank);
    put(t, name, b.data, b.len);
}

/* The boxes of replicas stand in the metadata once: that is no file that multiplies them. */
static void test_many_replicas(void **state)
{
    CLEANUP(buf_release) struct buf bytes = {0};
    struct err e = {0};
    struct opened o;
    struct temp t;

    (void)state;
    temp_make(&t, "step_1");
    put_metadata(&t);
    for (int r = 0; r < REPLICAS; r++)
        put_replica(&t, r);
    open_checkpoint(t.dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.info.faults, 0);
    assert_int_equal(o.count, TENSORS);
    assert_ok(read_tensor(&o.w, o.info.id, tensor(&o, "w9"), &bytes, &e), &e);
    assert_int_equal(bytes.len, CUT);
    for (int i = 0; i < CUT; i++)
        assert_int_equal(bytes.data[i], CUT - 1 - i);
    close_checkpoint(&o);
    temp_remove(&t);
}

/* A save that runs, or was cut off, shows as the plain directory that it is. */
static void test_unfinished(void **state)
{
    char path[PATH_MAX];
    struct checkpoint_info info;
    struct world w;
    struct err e = {0};
    struct temp t;

    snprintf(path, sizeof path, "%s/%s", (const char *)*state, CUTS);
    temp_make(&t, "tmp_step_12");
    put_copy(&t, PKL, path, NULL, NULL, 0);
    put_copy(&t, "model_0.safetensors", path, NULL, NULL, 0);
    assert_ok(world_open(t.dir, &w, &e), &e);
    assert_int_equal(scanner_get(w.scanner, "", NULL, w.arena, &info, &e), -ENOENT);
    world_close(&w);
    temp_remove(&t);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bids),         cmocka_unit_test(test_edited),
        cmocka_unit_test(test_consolidated), cmocka_unit_test(test_many_replicas),
        cmocka_unit_test(test_unfinished),
    };

    return run_with_fixtures("torch_checkpointing", argc, argv, tests,
                             ARRAY_SIZE(tests));
}
