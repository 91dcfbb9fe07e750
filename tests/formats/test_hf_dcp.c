/* SPDX-License-Identifier: MIT */
/* tests/formats/test_hf_dcp.c - shards of HuggingFaceStorageWriter: joined, lost, odd. */
#include "made.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <unistd.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "tests/unit/unit.h"

extern const struct format_driver format_hf_dcp;

#define UNPROVEN(ranks)                                                                \
    "unproven-size: shards do not tell the full shapes, and nothing here proves that " \
    "there were no ranks above " ranks                                                 \
    ": if their files are lost, tensors look smaller than they were\n"

/* ---- shards that are made up ---- */

/* Rows [at, at + rows) of a matrix of F32 with `cols` columns; 0: a vector. */
struct rows {
    const char *key;
    unsigned at, rows, cols;
};

static void add_tensor(const struct rows *r, size_t begin, struct buf *header,
                       struct buf *info)
{
    size_t n = (size_t)r->rows * (r->cols ? r->cols : 1);

    buf_addf(header, ",\"%s\":{\"dtype\":\"F32\",\"shape\":[%u", r->key, r->rows);
    buf_addf(info, "%s\\\"%s\\\":{\\\"saved_offsets\\\":[%u", info->len ? "," : "",
             r->key, r->at);
    if (r->cols) {
        buf_addf(header, ",%u", r->cols);
        buf_adds(info, ",0");
    }
    buf_addf(header, "],\"data_offsets\":[%zu,%zu]}", begin, begin + n * sizeof(float));
    buf_adds(info, "]}");
}

/* One file with these rows, whose values count up from `start`. */
static void shard(const struct made *m, const char *path, float start,
                  const struct rows *r, size_t count)
{
    CLEANUP(buf_release) struct buf header = {0}, info = {0}, all = {0};
    size_t n = 0;

    for (size_t i = 0; i < count; i++) {
        add_tensor(&r[i], n * sizeof(float), &header, &info);
        n += (size_t)r[i].rows * (r[i].cols ? r[i].cols : 1);
    }
    buf_addf(&all,
             "{\"__metadata__\":{\"format\":\"pt\",\"DCP_VERSION\":\"1.0\","
             "\"DCP_SHARDING_INFO\":\"{%s}\"}%s}",
             info.data ? info.data : "", header.data ? header.data : "");
    made_safetensors(m, path, all.data, start, n);
}

#define ROWS(...)                                                                      \
    (const struct rows[]){__VA_ARGS__}, ARRAY_SIZE(((const struct rows[]){__VA_ARGS__}))

static void check_count(struct opened *o, const char *key, float start, size_t n)
{
    float want[64];

    assert_true(n <= ARRAY_SIZE(want));
    for (size_t i = 0; i < n; i++)
        want[i] = start + (float)i;
    check_floats(o, key, want, n);
}

struct names {
    struct buf all;
};

static int note_name(void *user, const char *name, bool part)
{
    return buf_addf(user, "%s%s\n", name, part ? " (part)" : "");
}

static void check_hidden(struct opened *o, const char *want)
{
    CLEANUP(buf_release) struct buf got = {0};
    struct err e = {0};

    assert_ok(catalog_hidden(o->w.catalog, o->info.id, note_name, &got, &e), &e);
    assert_string_equal(got.data, want);
}

/* ---- where they lie ---- */

static void test_beside(void **state)
{
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "step-7");
    shard(&m, "shard-00001-model-00001-of-00001.safetensors", 0,
          ROWS({"w", 0, 3, 2}, {"v", 0, 4, 0}));
    shard(&m, "shard-00002-model-00001-of-00001.safetensors", 6, ROWS({"w", 3, 2, 2}));
    made_text(&m, "config.json", "{}");
    made_open(&m, &o);
    assert_string_equal(o.info.format, "hf-dcp-sharded");
    assert_string_equal(o.info.topology,
                        "{\"ranks\": 2, \"model_files\": 1, \"files\": 2}");
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 7);
    assert_string_equal(o.info.metadata_file,
                        "shard-00001-model-00001-of-00001.safetensors");
    assert_int_equal(o.count, 2);
    check_count(&o, "w", 0, 10);
    check_count(&o, "v", 6, 4);
    check_warnings(&o, UNPROVEN("2"));
    check_hidden(&o, "shard-00001-model-00001-of-00001.safetensors\n"
                     "shard-00002-model-00001-of-00001.safetensors\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* Full files with other bytes: the shards are shown. */
static void test_shards_win(void **state)
{
    static const char full[] = "{\"w\":{\"dtype\":\"F32\",\"shape\":[5,2],"
                               "\"data_offsets\":[0,40]}}";
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "model");
    shard(&m, "sharded/shard-00001-model-00001-of-00001.safetensors", 0,
          ROWS({"w", 0, 3, 2}));
    shard(&m, "sharded/shard-00002-model-00001-of-00001.safetensors", 6,
          ROWS({"w", 3, 2, 2}));
    made_safetensors(&m, "model-00001-of-00001.safetensors", full, 100, 10);
    made_text(&m, "model.safetensors.index.json",
              "{\"weight_map\":{\"w\":\"model-00001-of-00001.safetensors\"}}");
    made_open(&m, &o);
    assert_string_equal(o.info.format, "hf-dcp-sharded+consolidated");
    assert_int_equal(o.count, 1);
    check_count(&o, "w", 0, 10);
    check_warnings(&o, ""); /* the full file tells the size */
    check_hidden(&o, "model-00001-of-00001.safetensors\n"
                     "model.safetensors.index.json\n"
                     "sharded (part)\n");
    close_checkpoint(&o);
    made_end(&m);
    made_begin(&m, "model");
    shard(&m, "shard-00001-model-00001-of-00001.safetensors", 0, ROWS({"w", 0, 5, 2}));
    made_safetensors(&m, "consolidated/model-00001-of-00001.safetensors", full, 100,
                     10);
    made_text(&m, ".hf_metadata/config.json", "{}");
    made_text(&m, ".hf_metadata/fqn_to_file_index_mapping.json", "{\"w\": 1}");
    made_open(&m, &o);
    assert_int_equal(o.count, 1);
    check_count(&o, "w", 0, 10);
    check_warnings(&o, "");
    check_hidden(&o, ".hf_metadata (part)\n"
                     ".hf_metadata/fqn_to_file_index_mapping.json\n"
                     "consolidated (part)\n"
                     "consolidated/model-00001-of-00001.safetensors\n"
                     "shard-00001-model-00001-of-00001.safetensors\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* A shard that comes into a directory below is seen, though nothing else changes. */
static void test_late_shard(void **state)
{
    struct checkpoint_info info;
    struct made m;
    struct opened o;
    struct err e = {0};

    (void)state;
    made_begin(&m, "model");
    shard(&m, "sharded/shard-00001-model-00001-of-00001.safetensors", 0,
          ROWS({"w", 0, 3, 2}));
    made_open(&m, &o);
    assert_int_equal(tensor(&o, "w")->shape.dim[0], 3);
    shard(&m, "sharded/shard-00002-model-00001-of-00001.safetensors", 6,
          ROWS({"w", 3, 2, 2}));
    scanner_suspect(o.w.scanner, "", NULL);
    assert_ok(scanner_get(o.w.scanner, "", NULL, o.w.arena, &info, &e), &e);
    assert_true(info.id != o.info.id);
    o.info = info;
    assert_ok(world_tensors(&o.w, info.id, &o.t, &o.count, &e), &e);
    check_count(&o, "w", 0, 10);
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- what is lost ---- */

/* All files of a fixture but those whose path holds one of these texts ("^": at its start). */
static void copy_without(const struct made *m, const char *from, const char *below,
                         const char *const *without)
{
    char dir[PATH_MAX], path[PATH_MAX + 256], to[PATH_MAX];
    struct dirent *d;
    DIR *handle;

    snprintf(dir, sizeof dir, "%s/%s", from, below);
    handle = opendir(dir);
    assert_non_null(handle);
    while ((d = readdir(handle))) {
        bool left_out = d->d_name[0] == '.';

        snprintf(to, sizeof to, "%.*s%s%.255s", 512, below, below[0] ? "/" : "",
                 d->d_name);
        for (size_t i = 0; without[i]; i++)
            left_out |= without[i][0] == '^'
                            ? strncmp(to, without[i] + 1, strlen(without[i]) - 1) == 0
                            : strstr(to, without[i]) != NULL;
        if (left_out)
            continue;
        snprintf(path, sizeof path, "%s/%s", dir, d->d_name);
        if (d->d_type == DT_DIR)
            copy_without(m, from, to, without);
        else
            made_copy(m, to, path);
    }
    closedir(handle);
}

/*
 * What a fixture shows without some of its files. Whatever is readable has the right
 * bytes; the others say why.
 */
static void test_lost(void **state)
{
    static const struct {
        const char *fixture;
        const char *without[4];
        size_t tensors, faults;
        const char *warning;
    } cases[] = {
        /* a middle one: replicated tensors of rank 3 and 2 are safe, what rank 2 had is not */
        {"hfdcp_fsdp2_3r",
         {"shard-00002"},
         13,
         12,
         "rank-gap: ranks go up to 3, and rank 2"},
        {"hfdcp_fsdp2_3r",
         {"shard-00001"},
         14,
         13,
         "rank 1 has no file of model file 1"},
        /* the last one, which nothing but the sizes of the others tells */
        {"hfdcp_fsdp2_3r", {"shard-00003"}, 14, 13, "if there had been 3 ranks"},
        /* full files tell */
        {"hfdcp_mesh_2x2_every_rank", {"shard-00004"}, 6, 4, "lost-files: "},
        {"hfdcp_mesh_2x2_every_rank",
         {"shard-00003", "shard-00004"},
         6,
         4,
         "lost-files: "},
        /* and without them the holes of others */
        {"hfdcp_mesh_2x2_every_rank",
         {"shard-00004", "consolidated"},
         6,
         6,
         "lost-files: "},
        {"hfdcp_mesh_2x2_every_rank",
         {"shard-00004-model-00001", "consolidated"},
         6,
         3,
         "rank 4 has no file of model file 1"},
        /* one of several files of the last rank, and no hole at all */
        {"hfdcp_fsdp2_2r_consolidated",
         {"shard-00002-model-00002", "^model"},
         14,
         5,
         "rank 2 has no file of model file 2, where it may have had a share"},
        /* the index alone names what no shard has */
        {"hfdcp_scalar_2r",
         {"shard-00002", "^model-"},
         2,
         2,
         "scale is among the full files, but in no shard"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf warnings = {0};
        char path[PATH_MAX];
        struct made m;
        struct opened o;

        snprintf(path, sizeof path, "%s/%s", (const char *)*state, cases[i].fixture);
        made_begin(&m, "x");
        copy_without(&m, path, "", cases[i].without);
        made_open(&m, &o);
        all_warnings(&o, &warnings);
        if (o.count != cases[i].tensors || o.info.faults != cases[i].faults ||
            !strstr(warnings.data, cases[i].warning))
            fail_msg("case %zu: %zu tensors, %" PRIu64 " faults, %s", i, o.count,
                     o.info.faults, warnings.data);
        snprintf(path + strlen(path), sizeof path - strlen(path), ".expected.json");
        check_readable(&o, path);
        close_checkpoint(&o);
        made_end(&m);
    }
}

/* A file of a fixture whose first byte of a text is another one. */
static void damage(struct made *m, const char *dir, const char *file, const char *from,
                   char to)
{
    CLEANUP(buf_release) struct buf b = {0};
    char path[PATH_MAX + 256], *at;

    snprintf(path, sizeof path, "%s/%.255s", dir, file);
    read_file(path, &b);
    at = memmem(b.data, b.len, from, strlen(from));
    assert_non_null(at);
    *at = to;
    made_file(m, file, b.data, b.len);
}

/*
 * Hybrid sharding, where no order of the ranks tells of a loss: what a damaged shard had
 * made tensors smaller, and no hole was to be seen.
 */
static void test_damaged_shard(void **state)
{
    static const char file[] = "shard-00002-model-00001-of-00003.safetensors";
    static const struct {
        const char *from;
        char to;
    } cases[] = {{"{\"", 'x'}, {"a.weight\":{\"dtype", 'c'}};
    static const char *const none[4] = {NULL};

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf warnings = {0};
        char path[PATH_MAX];
        struct made m;
        struct opened o;

        snprintf(path, sizeof path, "%s/hfdcp_hsdp_4", (const char *)*state);
        made_begin(&m, "x");
        copy_without(&m, path, "", none);
        damage(&m, path, file, cases[i].from, cases[i].to);
        made_open(&m, &o);
        all_warnings(&o, &warnings);
        assert_has(warnings.data, "lost-files: shard-00002-model-00001-of-00003.saf");
        check_fault(&o, "a.weight", "its size is not sure");
        check_fault(&o, "g.w8", "its size is not sure");
        check_fault(&o, "model.emb", "its size is not sure");
        snprintf(path + strlen(path), sizeof path - strlen(path), ".expected.json");
        check_readable(&o, path);
        close_checkpoint(&o);
        made_end(&m);
    }
}

/* The same of the last rank, where what is left of its tensors is in one piece. */
static void test_damaged_last(void **state)
{
    static const char file[] = "shard-00004-model-00001-of-00003.safetensors";
    static const char *const none[4] = {NULL};
    char path[PATH_MAX];
    struct made m;
    struct opened o;

    snprintf(path, sizeof path, "%s/hfdcp_hsdp_4", (const char *)*state);
    made_begin(&m, "x");
    copy_without(&m, path, "", none);
    damage(&m, path, file, "{\"", 'x');
    made_open(&m, &o);
    check_fault(&o, "model.emb", "its size is not sure");
    snprintf(path + strlen(path), sizeof path - strlen(path), ".expected.json");
    check_readable(&o, path);
    close_checkpoint(&o);
    made_end(&m);
}

/* A header of another length in the first shard: the full files are still the copies. */
static void test_damaged_first(void **state)
{
    static const char file[] = "sharded/shard-00001-model-00001-of-00001.safetensors";
    static const char *const none[4] = {NULL};
    CLEANUP(buf_release) struct buf warnings = {0};
    char path[PATH_MAX];
    struct made m;
    struct opened o;

    snprintf(path, sizeof path, "%s/hfdcp_scalar_2r", (const char *)*state);
    made_begin(&m, "x");
    copy_without(&m, path, "", none);
    damage(&m, path, file, "\xa8", (char)0xe8);
    made_open(&m, &o);
    all_warnings(&o, &warnings);
    assert_string_equal(o.info.format, "hf-dcp-sharded+consolidated");
    assert_has(warnings.data, "damaged-file: ");
    assert_int_equal(o.info.faults, 1);
    snprintf(path + strlen(path), sizeof path - strlen(path), ".expected.json");
    check_readable(&o, path);
    close_checkpoint(&o);
    made_end(&m);
}

/* config.json tells the rows of the embedding, which all ranks share. */
static void test_config_tells(void **state)
{
    static const char key[] = "model.embed_tokens.weight";
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "model");
    shard(&m, "shard-00001-model-00001-of-00001.safetensors", 0,
          ROWS({key, 0, 2, 2}, {"w", 0, 1, 2}));
    shard(&m, "shard-00002-model-00001-of-00001.safetensors", 6,
          ROWS({key, 2, 2, 2}, {"w", 1, 1, 2}));
    made_text(&m, "config.json", "{\"vocab_size\": 6, \"hidden_size\": 2}");
    made_open(&m, &o);
    check_warnings(&o,
                   "lost-files: model.embed_tokens.weight has 4 rows in the shards, "
                   "and 6 by config.json\n");
    check_fault(&o, key, "its size is not sure, since files are lost");
    check_fault(&o, "w", "its size is not sure, since files are lost");
    close_checkpoint(&o);
    made_text(&m, "config.json", "{\"vocab_size\": 4, \"tie_word_embeddings\": true}");
    made_open(&m, &o);
    check_warnings(&o, "");
    assert_int_equal(o.info.faults, 0);
    assert_int_equal(o.info.objects, 1); /* lm_head.weight: tied, not stored */
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- what is odd ---- */

static void test_odd_headers(void **state)
{
    static const struct {
        const char *metadata, *second, *fault;
    } cases[] = {
        {"{\"format\":\"pt\"}", NULL, "its header has no DCP_SHARDING_INFO"},
        {"{\"DCP_VERSION\":\"2.0\",\"DCP_SHARDING_INFO\":\"{}\"}", NULL,
         "DCP_VERSION is another one than 1.0"},
        {"{\"DCP_SHARDING_INFO\":\"{\"}", NULL, "no JSON"},
        {"{\"DCP_SHARDING_INFO\":\"{}\"}", NULL, "no saved_offsets"},
        {"{\"DCP_SHARDING_INFO\":\"{\\\"w\\\":{\\\"saved_offsets\\\":[0]}}\"}", NULL,
         "no saved_offsets of it that fit"},
        {"{\"DCP_SHARDING_INFO\":\"{\\\"w\\\":{\\\"saved_offsets\\\":[0,-1]}}\"}", NULL,
         "no saved_offsets of it that fit"},
        {"{\"DCP_SHARDING_INFO\":\"{\\\"w\\\":{\\\"saved_offsets\\\":[0,0.5]}}\"}",
         NULL, "no saved_offsets of it that fit"},
        {"{\"DCP_SHARDING_INFO\":\"{\\\"w\\\":{\\\"saved_offsets\\\":[1,0]}}\"}", NULL,
         "pieces are missing; rank 1 has no file of model file 1"},
        {"{\"DCP_SHARDING_INFO\":\"{\\\"w\\\":{\\\"saved_offsets\\\":"
         "[9007199254740991,9007199254740991]}}\"}",
         NULL, "more than 2^63 elements"},
        /* a second file that does not fit the first */
        {NULL, "{\"w\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]}",
         "overlap"},
        {NULL, "{\"w\":{\"dtype\":\"I32\",\"shape\":[2,1],\"data_offsets\":[0,8]}",
         "different element types"},
        {NULL, "{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}",
         "no saved_offsets of it that fit"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf header = {0};
        const char *metadata = cases[i].metadata;
        struct made m;
        struct opened o;

        made_begin(&m, "model");
        if (metadata)
            buf_addf(&header,
                     "{\"__metadata__\":%s,\"w\":{\"dtype\":\"F32\",\"shape\":[1,2],"
                     "\"data_offsets\":[0,8]}}",
                     metadata);
        else
            buf_addf(&header,
                     "%s,\"__metadata__\":{\"DCP_SHARDING_INFO\":"
                     "\"{\\\"w\\\":{\\\"saved_offsets\\\":[0,1]}}\"}}",
                     cases[i].second);
        if (!metadata)
            shard(&m, "shard-00001-model-00001-of-00001.safetensors", 0,
                  ROWS({"w", 0, 2, 2}));
        made_safetensors(&m, "shard-00002-model-00001-of-00001.safetensors",
                         header.data, 0, 2);
        made_open(&m, &o);
        assert_null(o.info.error);
        check_fault(&o, "w", cases[i].fault);
        close_checkpoint(&o);
        made_end(&m);
    }
}

static void test_odd_files(void **state)
{
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "model");
    shard(&m, "shard-00001-model-00001-of-00002.safetensors", 0, ROWS({"w", 0, 2, 2}));
    shard(&m, "shard-00001-model-00001-of-00003.safetensors", 0, ROWS({"w", 0, 2, 2}));
    made_open(&m, &o);
    check_fault(&o, "w", "overlap");
    check_warnings(
        &o, "mixed-sets: shards of several saves lie together: their names count "
            "different numbers of model files\n"
            "missing-file: no shard of model file 2 of 3 is there\n" UNPROVEN("1"));
    close_checkpoint(&o);
    made_end(&m);
    /* A damaged one beside sound ones, and alone. */
    made_begin(&m, "model");
    made_text(&m, "shard-00001-model-00001-of-00001.safetensors", "damaged, surely");
    made_open(&m, &o);
    assert_non_null(o.info.error);
    close_checkpoint(&o);
    shard(&m, "shard-00002-model-00001-of-00001.safetensors", 4, ROWS({"w", 2, 2, 2}));
    made_open(&m, &o);
    assert_null(o.info.error);
    check_fault(&o, "w", "hole at [0, 0]");
    assert_int_equal(o.info.warnings, 2); /* damaged-file, lost-files */
    close_checkpoint(&o);
    made_end(&m);
}

/* Pairs of 4-bit elements: offsets count pairs, shapes elements. */
static void test_packed(void **state)
{
    static const char header[] =
        "{\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{\\\"w\\\":{\\\"saved_offsets\\\":"
        "[0,%u]}}\"},\"w\":{\"dtype\":\"F4\",\"shape\":[2,4],\"data_offsets\":[0,4]}}";
    CLEANUP(buf_release) struct buf bytes = {0};
    char text[256];
    const struct tensor_info *t;
    struct made m;
    struct opened o;
    struct err e = {0};
    /* 1.0f is 00 00 80 3f, 2.0f 00 00 00 40 */
    static const unsigned char want[8] = {0, 0, 0, 0, 0x80, 0x3f, 0, 0x40};

    (void)state;
    made_begin(&m, "model");
    snprintf(text, sizeof text, header, 0);
    made_safetensors(&m, "shard-00001-model-00001-of-00001.safetensors", text, 1, 1);
    snprintf(text, sizeof text, header, 2);
    made_safetensors(&m, "shard-00002-model-00001-of-00001.safetensors", text, 2, 1);
    made_open(&m, &o);
    t = tensor(&o, "w");
    assert_int_equal(t->shape.dim[0], 2);
    assert_int_equal(t->shape.dim[1], 8);
    assert_ok(read_tensor(&o.w, o.info.id, t, &bytes, &e), &e);
    assert_int_equal(bytes.len, 8);
    assert_memory_equal(bytes.data, want, 8);
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- bids ---- */

static void add_name(struct listing *l, const char *name, const void *head, size_t len)
{
    struct entry_stat st = {.kind = ENTRY_FILE, .id.size = 1000};
    struct err e = {0};

    assert_ok(listing_add(l, name, &st, head, len, &e), &e);
}

static void test_bids(void **state)
{
    static const unsigned char head[16] = {8, 0, 0, 0, 0, 0, 0, 0, '{'};
    static const struct {
        const char *name;
        bool magic;
        int score;
        const char *reason;
    } cases[] = {
        {"shard-00001-model-00001-of-00001.safetensors", true, 85, "and 0 more shards"},
        {"shard-00001-model-00001-of-00001.safetensors", false, 30,
         "no safetensors header"},
        {"shard-00001-model-00002-of-00001.safetensors", true, 0, ""},
        {"shard-1-model-00001-of-00001.safetensors", true, 0, ""},
        {"model-00001-of-00001.safetensors", true, 0, ""},
    };

    (void)state;
    for (size_t i = 0; i < 2 * ARRAY_SIZE(cases); i++) {
        CLEANUP(listing_freep) struct listing *l = NULL;
        struct listing *sub = NULL, *into;
        const size_t n = i / 2;
        struct bid bid = {0};
        struct err e = {0};

        assert_ok(listing_new(NULL, "model", &l, &e), &e);
        if (i % 2)
            assert_ok(listing_new(NULL, "model/sharded", &sub, &e), &e);
        into = sub ? sub : l;
        add_name(into, cases[n].name, head, cases[n].magic ? sizeof head : 8);
        listing_sort(into);
        if (sub) {
            struct entry_stat st = {.kind = ENTRY_DIR};

            assert_ok(listing_add(l, "sharded", &st, NULL, 0, &e), &e);
            listing_sort(l);
            assert_ok(listing_add_sub(l, "sharded", sub, &e), &e);
        }
        format_hf_dcp.bid(l, &bid);
        if (bid.score != cases[n].score || !strstr(bid.reason, cases[n].reason))
            fail_msg("case %zu: %d, %s", i, bid.score, bid.reason);
    }
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "beside", .test_func = test_beside},
        {.name = "shards win", .test_func = test_shards_win},
        {.name = "late shard", .test_func = test_late_shard},
        {.name = "lost", .test_func = test_lost},
        {.name = "damaged shard", .test_func = test_damaged_shard},
        {.name = "damaged last shard", .test_func = test_damaged_last},
        {.name = "damaged first shard", .test_func = test_damaged_first},
        {.name = "config.json tells", .test_func = test_config_tells},
        {.name = "odd headers", .test_func = test_odd_headers},
        {.name = "odd files", .test_func = test_odd_files},
        {.name = "packed", .test_func = test_packed},
        {.name = "bids", .test_func = test_bids},
    };

    return run_with_fixtures("hf_dcp", argc, argv, others, ARRAY_SIZE(others));
}
