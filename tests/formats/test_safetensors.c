/* SPDX-License-Identifier: MIT */
/* tests/formats/test_safetensors.c - fixtures, and folders that none of them has: halves, doubles, leftovers. */
#include "tests/unit/remote_tmp.h"

#include "base/arena.h"
#include "base/endian.h"
#include "base/err.h"

#include "fixture.h"

/* A file of U8 tensors; `tensors` is "key:bytes key:bytes", `metadata` JSON or NULL. */
static void put(const struct tmp *t, const char *name, const char *metadata,
                const char *tensors)
{
    CLEANUP_FREE char *copy = strdup(tensors);
    CLEANUP(buf_release) struct buf b = {0};
    unsigned at = 0;

    buf_add(&b, "\0\0\0\0\0\0\0", 8);
    buf_addc(&b, '{');
    if (metadata)
        buf_addf(&b, "\"__metadata__\":%s%s", metadata, *tensors ? "," : "");
    for (char *save, *key = strtok_r(copy, " ", &save); key;
         key = strtok_r(NULL, " ", &save)) {
        char *colon = strrchr(key, ':');
        unsigned n = (unsigned)atoi(colon + 1);

        *colon = '\0';
        buf_addf(&b,
                 "%s\"%s\":{\"dtype\":\"U8\",\"shape\":[%u],\"data_offsets\":[%u,%u]}",
                 at ? "," : "", key, n, at, at + n);
        at += n;
    }
    buf_addc(&b, '}');
    put_le64(b.data, b.len - 8);
    for (unsigned i = 0; i < at; i++)
        buf_addc(&b, (char)(i + (unsigned char)name[0]));
    tmp_bytes(t, name, b.data, b.len);
}

struct look {
    struct world w;
    struct checkpoint_info info;
    struct tensor_info *t;
    size_t count;
    struct buf warnings, hidden;
};

static int note_warning(void *user, const char *code, const char *text)
{
    struct look *k = user;

    assert_true(text[0]);
    return buf_addf(&k->warnings, "%s ", code);
}

static int note_hidden(void *user, const char *name, bool part)
{
    struct look *k = user;

    assert_false(part);
    return buf_addf(&k->hidden, "%s ", name);
}

static void look_at(struct look *k, const struct tmp *t, const char *path)
{
    struct err e = {0};

    *k = (struct look){0};
    assert_ok(world_open(tmp_at(t, path), &k->w, &e), &e);
    assert_ok(scanner_get(k->w.scanner, "", NULL, k->w.arena, &k->info, &e), &e);
    assert_ok(world_tensors(&k->w, k->info.id, &k->t, &k->count, &e), &e);
    assert_ok(catalog_warnings(k->w.catalog, k->info.id, note_warning, k, &e), &e);
    assert_ok(catalog_hidden(k->w.catalog, k->info.id, note_hidden, k, &e), &e);
    buf_addc(&k->warnings, '.');
    buf_addc(&k->hidden, '.');
}

static void release(struct look *k)
{
    buf_release(&k->warnings);
    buf_release(&k->hidden);
    world_close(&k->w);
}

/* The tensor, whole: its bytes count up from the first letter of its file and `skip`. */
static const struct tensor_info *whole(struct look *k, const char *key, size_t bytes,
                                       unsigned first)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct err e = {0};
    size_t i = 0;

    while (i < k->count && strcmp(k->t[i].key, key) != 0)
        i++;
    if (i == k->count)
        fail_msg("no tensor %s", key);
    if (world_read(&k->w, k->info.id, &k->t[i], &b, &e) < 0)
        fail_msg("%s: %s", key, e.text);
    assert_int_equal(b.len, bytes);
    for (size_t n = 0; n < bytes; n++)
        assert_int_equal((unsigned char)b.data[n], (first + n) & 0xff);
    return &k->t[i];
}

static void faulty(struct look *k, const char *key, const char *why)
{
    for (size_t i = 0; i < k->count; i++) {
        if (strcmp(k->t[i].key, key) != 0)
            continue;
        if (!k->t[i].fault || !strstr(k->t[i].fault, why))
            fail_msg("%s: %s", key, k->t[i].fault ? k->t[i].fault : "no fault");
        return;
    }
    fail_msg("no tensor %s", key);
}

static void test_lone_file(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "embeddings.safetensors", "{\"format\":\"np\"}", "a:3 b:2");
    tmp_file(t, "README.md", "");
    look_at(&k, t, "");
    assert_string_equal(k.info.format, "safetensors");
    assert_string_equal(k.info.framework, "NumPy");
    assert_string_equal(k.info.topology, "{\"files\": 1}");
    assert_string_equal(k.info.metadata_file, "embeddings.safetensors");
    assert_string_equal(k.hidden.data, "embeddings.safetensors .");
    assert_string_equal(k.warnings.data, ".");
    whole(&k, "a", 3, 'e');
    whole(&k, "b", 2, 'e' + 3);
    release(&k);
    tmp_file(t, "config.json", "{}");
    look_at(&k, t, "");
    assert_string_equal(k.info.format, "hf-safetensors");
    release(&k);
}

static void test_single_wins_over_index(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "model.safetensors", NULL, "a:3");
    put(t, "model-00001-of-00002.safetensors", NULL, "x:3");
    put(t, "other-00001-of-00002.safetensors", NULL, "x:3");
    tmp_file(t, "model.safetensors.index.json",
             "{\"weight_map\":{\"x\":\"model-00001-of-00002.safetensors\"}}");
    look_at(&k, t, "");
    assert_null(k.info.error);
    assert_int_equal(k.count, 1);
    whole(&k, "a", 3, 'm');
    assert_string_equal(k.warnings.data, "unlisted-file .");
    assert_has(k.hidden.data, "model-00001-of-00002.safetensors ");
    assert_has(k.hidden.data, "model.safetensors.index.json ");
    assert_null(strstr(k.hidden.data, "other"));
    release(&k);
}

static void test_index_and_its_leftovers(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "model-00001-of-00002.safetensors", "{\"format\":\"pt\"}", "a:3 extra:4");
    put(t, "model-00002-of-00002.safetensors", NULL, "b:5");
    put(t, "model-00001-of-00003.safetensors", NULL, "old:5");
    put(t, "consolidated.safetensors", NULL, "c:5");
    tmp_file(t, "model.safetensors.index.json",
             "{\"weight_map\":{\"a\":\"model-00001-of-00002.safetensors\","
             "\"b\":\"model-00002-of-00002.safetensors\"}}");
    look_at(&k, t, "");
    assert_int_equal(k.count, 3); /* files are read whole, as by all loaders */
    assert_int_equal(k.info.faults, 0);
    whole(&k, "a", 3, 'm');
    whole(&k, "b", 5, 'm');
    whole(&k, "extra", 4, 'm' + 3);
    assert_string_equal(k.info.framework, "PyTorch");
    assert_string_equal(k.info.topology, "{\"files\": 2}");
    assert_string_equal(k.info.metadata_file, "model.safetensors.index.json");
    assert_string_equal(k.warnings.data, "unlisted-tensor unlisted-file .");
    assert_has(k.hidden.data, "model-00001-of-00003.safetensors ");
    assert_null(strstr(k.hidden.data, "consolidated"));
    release(&k);
}

/* save_pretrained(variant="fp16") of transformers 5.23 and diffusers 0.42. */
static void test_index_of_a_variant(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "model.fp16-00001-of-00002.safetensors", NULL, "a:3");
    put(t, "model.fp16-00001-of-00003.safetensors", NULL, "old:5");
    put(t, "other.fp16-00001-of-00001.safetensors", NULL, "x:3");
    tmp_file(t, "model.safetensors.index.fp16.json",
             "{\"weight_map\":{\"a\":\"model.fp16-00001-of-00002.safetensors\","
             "\"b\":\"model.fp16-00002-of-00002.safetensors\"}}");
    tmp_file(t, "other.safetensors.index.fp16.json",
             "{\"weight_map\":{\"x\":\"other.fp16-00001-of-00001.safetensors\"}}");
    look_at(&k, t, "");
    assert_null(k.info.error);
    assert_int_equal(k.count, 2);
    whole(&k, "a", 3, 'm');
    faulty(&k, "b", "model.fp16-00002-of-00002.safetensors is missing");
    assert_string_equal(k.info.metadata_file, "model.safetensors.index.fp16.json");
    assert_has(k.hidden.data, "model.safetensors.index.fp16.json ");
    assert_has(k.hidden.data, "model.fp16-00001-of-00003.safetensors ");
    assert_null(strstr(k.hidden.data, "other"));
    release(&k);
}

/* torch_checkpointing 0.1.1: the file itself does not tell that it has a part. */
static void test_a_rank_of_torch_checkpointing(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "model_0.safetensors", NULL, "a:3");
    tmp_file(t, "metadata.pkl", "other");
    look_at(&k, t, "");
    assert_null(k.info.error);
    release(&k);
    tmp_file(t, "metadata.pkl", "}(metadata}(model}(nested_path_to_metadata}(");
    look_at(&k, t, "");
    assert_has(k.info.error, "model_0.safetensors: one rank's parts, saved by "
                             "torch_checkpointing");
    assert_int_equal(k.count, 0);
    release(&k);
}

/* As diffusers before 0.32 called them. */
static void test_variant_behind_the_number(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "model-00001-of-00002.fp16.safetensors", NULL, "a:3");
    put(t, "model-00002-of-00002.fp16.safetensors", NULL, "b:5");
    tmp_file(t, "model.safetensors.index.fp16.json",
             "{\"weight_map\":{\"a\":\"model-00001-of-00002.fp16.safetensors\","
             "\"b\":\"model-00002-of-00002.fp16.safetensors\"}}");
    look_at(&k, t, "");
    assert_null(k.info.error);
    assert_int_equal(k.count, 2);
    whole(&k, "a", 3, 'm');
    whole(&k, "b", 5, 'm');
    release(&k);
}

static void test_variants_beside_the_model(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "model-00001-of-00001.safetensors", NULL, "a:3");
    put(t, "model.fp16-00001-of-00001.safetensors", NULL, "b:5");
    tmp_file(t, "model.safetensors.index.fp16.json",
             "{\"weight_map\":{\"b\":\"model.fp16-00001-of-00001.safetensors\"}}");
    look_at(&k, t, "");
    assert_int_equal(k.count, 1);
    whole(&k, "a", 3, 'm');
    assert_null(strstr(k.hidden.data, "fp16"));
    release(&k);
}

static void test_index_with_a_damaged_file(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "model-00001-of-00002.safetensors", NULL, "a:3");
    tmp_file(t, "model-00002-of-00002.safetensors", "no header at all");
    tmp_file(t, "model.safetensors.index.json",
             "{\"weight_map\":{\"a\":\"model-00001-of-00002.safetensors\","
             "\"b\":\"model-00002-of-00002.safetensors\","
             "\"c\":\"model-00002-of-00002.safetensors\"}}");
    look_at(&k, t, "");
    assert_null(k.info.error);
    assert_int_equal(k.info.faults, 2);
    whole(&k, "a", 3, 'm');
    faulty(&k, "b", "model-00002-of-00002.safetensors: byte 0: a header of");
    faulty(&k, "c", "model-00002-of-00002.safetensors: byte 0: a header of");
    release(&k);
}

static void test_numbered_set(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "m-00001-of-00002.safetensors", NULL, "a:3");
    put(t, "m-00002-of-00002.safetensors", NULL, "b:5");
    look_at(&k, t, "");
    assert_int_equal(k.count, 2);
    assert_string_equal(k.info.format, "hf-safetensors");
    assert_string_equal(k.info.topology, "{\"files\": 2}");
    assert_string_equal(k.warnings.data, ".");
    whole(&k, "a", 3, 'm');
    whole(&k, "b", 5, 'm');
    release(&k);
}

/* gpt-oss counts from 0 to N; without N nobody knows whether it is missing. */
static void test_numbered_from_zero(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "m-00000-of-00002.safetensors", NULL, "a:3");
    put(t, "m-00001-of-00002.safetensors", NULL, "b:5");
    look_at(&k, t, "");
    assert_int_equal(k.count, 2);
    assert_string_equal(k.warnings.data, "numbered-from-zero .");
    release(&k);
    put(t, "m-00002-of-00002.safetensors", NULL, "c:5");
    look_at(&k, t, "");
    assert_int_equal(k.count, 3);
    assert_string_equal(k.warnings.data, ".");
    whole(&k, "a", 3, 'm');
    whole(&k, "c", 5, 'm');
    release(&k);
}

/* What all files say of themselves holds of the one that they are shown as. */
static void test_metadata_of_several(void **state)
{
    static const char many[] = "{\"format\":\"mlx\",\"a\":\"%s\"}";
    const struct tmp *t = *state;
    CLEANUP_FREE char *text = malloc(5 << 20);
    struct look k;

    put(t, "m-00001-of-00003.safetensors",
        "{\"q\":\"\\\"x\\\"\",\"format\":\"mlx\",\"only\":\"1\",\"k\":\"1\","
        "\"DCP_VERSION\":\"1.0\"}",
        "a:3");
    put(t, "m-00002-of-00003.safetensors",
        "{\"format\":\"mlx\",\"k\":\"2\",\"q\":\"\\\"x\\\"\"}", "b:5");
    put(t, "m-00003-of-00003.safetensors", NULL, "c:5");
    look_at(&k, t, "");
    assert_string_equal(k.info.header, "{\"format\":\"mlx\",\"only\":\"1\","
                                       "\"q\":\"\\\"x\\\"\"}");
    assert_string_equal(k.warnings.data, ".");
    release(&k);
    put(t, "m-00001-of-00003.safetensors", "{\"format\":\"pt\"}", "a:3");
    put(t, "m-00002-of-00003.safetensors", NULL, "b:5");
    look_at(&k, t, "");
    assert_null(k.info.header);
    release(&k);
    memset(text, 'x', 5 << 20);
    snprintf(text, 32, many, "");
    memset(text + strlen(many) - 4, 'x', 5);
    strcpy(text + (5 << 20) - 3, "\"}");
    put(t, "m-00003-of-00003.safetensors", text, "c:5");
    look_at(&k, t, "");
    assert_null(k.info.header); /* two formats, and the rest is too long */
    assert_string_equal(k.warnings.data, "long-metadata .");
    release(&k);
}

static void test_numbered_set_with_holes(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "m-00001-of-00004.safetensors", NULL, "a:3");
    tmp_file(t, "m-00003-of-00004.safetensors", "damaged, surely");
    put(t, "m-00004-of-00004.safetensors", NULL, "b:5");
    look_at(&k, t, "");
    assert_int_equal(k.count, 2);
    assert_int_equal(k.info.faults, 0);
    assert_string_equal(k.warnings.data, "missing-file damaged-file .");
    release(&k);
    put(t, "m-00004-of-00004.safetensors", NULL, "b:5");
    assert_int_equal(unlink(tmp_at(t, "m-00001-of-00004.safetensors")), 0);
    assert_int_equal(unlink(tmp_at(t, "m-00004-of-00004.safetensors")), 0);
    tmp_dir(t, "m-00001-of-00004.safetensors");
    look_at(&k, t, "");
    assert_non_null(k.info.error);
    release(&k);
}

static void test_key_in_two_files(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "m-00001-of-00003.safetensors", NULL, "a:3 both:2");
    put(t, "m-00002-of-00003.safetensors", NULL, "both:7");
    put(t, "m-00003-of-00003.safetensors", NULL, "c:1 both:2");
    look_at(&k, t, "");
    assert_null(k.info.error);
    assert_int_equal(k.count, 3);
    assert_int_equal(k.info.faults, 1);
    whole(&k, "a", 3, 'm');
    whole(&k, "c", 1, 'm');
    faulty(&k, "both",
           "it is in m-00001-of-00003.safetensors and in m-00002-of-00003.safetensors");
    release(&k);
}

static void test_adapter(void **state)
{
    const struct tmp *t = *state;
    struct look k;

    put(t, "adapter_model.safetensors", NULL, "base_model.model.x.lora_A.weight:3");
    tmp_file(t, "adapter_config.json", "{}");
    look_at(&k, t, "");
    assert_true(k.info.adapter);
    assert_string_equal(k.info.format, "hf-peft");
    assert_int_equal(k.t[0].role, ROLE_MODEL);
    assert_string_equal(k.hidden.data, "adapter_model.safetensors .");
    release(&k);
}

static void test_adapter_beside_a_model(void **state)
{
    const struct tmp *t = *state;
    const struct tensor_info *info;
    struct look k;

    put(t, "model.safetensors", NULL, "x:3");
    put(t, "adapter_model.safetensors", NULL, "x:5 y:2");
    tmp_file(t, "adapter_config.json", "{}");
    look_at(&k, t, "");
    assert_false(k.info.adapter);
    assert_int_equal(k.count, 3);
    assert_int_equal(whole(&k, "x", 3, 'm')->role, ROLE_MODEL);
    info = whole(&k, "adapter_model.safetensors/x", 5, 'a');
    assert_int_equal(info->role, ROLE_OTHER);
    assert_string_equal(info->part, "adapter_model.safetensors");
    assert_string_equal(k.hidden.data, "model.safetensors .");
    assert_int_equal(k.info.by_role[ROLE_OTHER], 2);
    release(&k);
    tmp_file(t, "adapter_model.safetensors", "damaged, surely");
    look_at(&k, t, "");
    assert_int_equal(k.count, 1);
    assert_string_equal(k.warnings.data, "damaged-file .");
    release(&k);
}

#define SHARDING(offsets)                                                              \
    "{\"DCP_VERSION\":\"1.0\",\"DCP_SHARDING_INFO\":"                                  \
    "\"{\\\"w\\\":{\\\"saved_offsets\\\":" offsets "}}\"}"

/* Pieces must never be shown as tensors. */
static void test_pieces_are_refused(void **state)
{
    static const struct {
        const char *name, *metadata;
        const char *why; /* NULL: fine */
    } rows[] = {
        {"model-00001-of-00001.safetensors", SHARDING("[3]"), "no model by itself"},
        {"model-00001-of-00001.safetensors", SHARDING("[0]"), NULL},
        {"model-00001-of-00001.safetensors", SHARDING("[0,-1]"), "no model by itself"},
        {"model-00001-of-00001.safetensors", SHARDING("7"), "no saved_offsets"},
        {"model-00001-of-00001.safetensors", "{\"DCP_SHARDING_INFO\":\"{\"}", "JSON"},
        {"piece-00001-of-00001.safetensors", SHARDING("[0]"), "no model by itself"},
        {"model.safetensors", SHARDING("[0]"), "no model by itself"},
        {"piece.safetensors", SHARDING("[0]"), "no model by itself"},
        {"piece.safetensors", "{\"DCP_VERSION\":\"1.0\"}", NULL},
        {"model.safetensors", "null", NULL},
        {"model.safetensors", "[]", "is no object"},
    };
    const struct tmp *t = *state;

    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        struct look k;

        put(t, rows[i].name, rows[i].metadata, "w:4");
        look_at(&k, t, "");
        if (!rows[i].why != !k.info.error ||
            (rows[i].why && !strstr(k.info.error, rows[i].why)))
            fail_msg("%s %s: %s", rows[i].name, rows[i].metadata,
                     k.info.error ? k.info.error : "accepted");
        assert_int_equal(k.count, rows[i].why ? 0 : 1);
        release(&k);
        assert_int_equal(unlink(tmp_at(t, rows[i].name)), 0);
    }
}

/* Nor where an index names them, here or in a directory below. */
static void test_pieces_of_an_index(void **state)
{
    static const char piece[] = "shard-00000-model-00001-of-00001.safetensors";
    const struct tmp *t = *state;

    assert_int_equal(mkdir(tmp_at(t, "below"), 0755), 0);
    for (int below = 0; below < 2; below++) {
        char name[100], text[300];
        struct look k;

        snprintf(name, sizeof name, "%s%s", below ? "below/" : "", piece);
        snprintf(text, sizeof text, "{\"weight_map\": {\"w\": \"%s\"}}", name);
        put(t, name, "null", "w:4");
        tmp_file(t, "model.safetensors.index.json", text);
        look_at(&k, t, "");
        assert_null(k.info.error);
        assert_int_equal(k.count, 1);
        assert_int_equal(k.info.faults, 1);
        release(&k);
        assert_int_equal(unlink(tmp_at(t, name)), 0);
    }
}

static int count_object(void *user, const char *key, size_t key_len, const char *json,
                        size_t len)
{
    assert_int_equal(key_len, strlen("lm_head.weight"));
    assert_memory_equal(key, "lm_head.weight", key_len);
    assert_int_equal(len, strlen("\"tied, not stored\""));
    assert_memory_equal(json, "\"tied, not stored\"", len);
    ++*(unsigned *)user;
    return 0;
}

static void test_tied(void **state)
{
    static const struct {
        const char *config, *tensors;
        unsigned objects;
    } rows[] = {
        {"{\"tie_word_embeddings\":true}", "model.embed_tokens.weight:2", 1},
        {"{\"tie_word_embeddings\":true}", "transformer.wte.weight:2", 1},
        {"{\"tie_word_embeddings\":false}", "model.embed_tokens.weight:2", 0},
        {"{\"tie_word_embeddings\":1}", "model.embed_tokens.weight:2", 0},
        {"{}", "model.embed_tokens.weight:2", 0},
        {"no JSON", "model.embed_tokens.weight:2", 0},
        {"{\"tie_word_embeddings\":true}",
         "model.embed_tokens.weight:2 lm_head.weight:2", 0},
        {"{\"tie_word_embeddings\":true}", "model.norm.weight:2", 0},
    };
    const struct tmp *t = *state;

    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        unsigned objects = 0;
        struct err e = {0};
        struct look k;

        put(t, "model.safetensors", NULL, rows[i].tensors);
        tmp_file(t, "config.json", rows[i].config);
        look_at(&k, t, "");
        assert_ok(catalog_objects(k.w.catalog, k.info.id, count_object, &objects, &e),
                  &e);
        if (objects != rows[i].objects)
            fail_msg("%s, %s: %u objects", rows[i].config, rows[i].tensors, objects);
        assert_int_equal(k.info.error != NULL, false);
        release(&k);
    }
}

/* config.json is read, so that it counts for freshness, and is still a side file. */
static void test_config_is_watched(void **state)
{
    const struct tmp *t = *state;
    struct checkpoint_info second;
    struct err e = {0};
    struct look k;

    put(t, "model.safetensors", NULL, "model.embed_tokens.weight:2");
    tmp_file(t, "config.json", "{\"tie_word_embeddings\":false}");
    look_at(&k, t, "");
    assert_int_equal(k.info.objects, 0);
    assert_string_equal(k.hidden.data, "model.safetensors .");
    tmp_file(t, "config.json", "{\"tie_word_embeddings\":true}");
    scanner_suspect(k.w.scanner, "", NULL);
    assert_ok(scanner_get(k.w.scanner, "", NULL, k.w.arena, &second, &e), &e);
    assert_int_equal(second.objects, 1);
    release(&k);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        tmp_test(test_lone_file),
        tmp_test(test_single_wins_over_index),
        tmp_test(test_index_and_its_leftovers),
        tmp_test(test_index_of_a_variant),
        tmp_test(test_a_rank_of_torch_checkpointing),
        tmp_test(test_variant_behind_the_number),
        tmp_test(test_variants_beside_the_model),
        tmp_test(test_index_with_a_damaged_file),
        tmp_test(test_numbered_set),
        tmp_test(test_numbered_from_zero),
        tmp_test(test_metadata_of_several),
        tmp_test(test_numbered_set_with_holes),
        tmp_test(test_key_in_two_files),
        tmp_test(test_adapter),
        tmp_test(test_adapter_beside_a_model),
        tmp_test(test_pieces_are_refused),
        tmp_test(test_pieces_of_an_index),
        tmp_test(test_tied),
        tmp_test(test_config_is_watched),
    };

    return run_with_fixtures("safetensors", argc, argv, tests, ARRAY_SIZE(tests));
}
