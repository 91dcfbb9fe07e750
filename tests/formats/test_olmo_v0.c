/* SPDX-License-Identifier: MIT */
/* tests/formats/test_olmo_v0.c - early OLMo-core: its fixtures, and who wins where. */
#include "tests/unit/unit.h"

#include <limits.h>
#include <stdio.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "made.h"

extern const struct format_driver format_olmo_v0;

/* ---- which file's elements count ---- */

enum { ELEMENTS = 24 }; /* of the tensor w, 4 x 6 */

/* Element i of w in rank_R.safetensors is 100 R + i; without any there is no w. */
static void make_rank(const struct made *m, unsigned rank, unsigned count)
{
    char header[128], path[32];

    snprintf(path, sizeof path, "rank_%u.safetensors", rank);
    if (count == 0) {
        made_safetensors(m, path, "{}      ", 0, 0);
        return;
    }
    snprintf(header, sizeof header,
             "{\"w\":{\"dtype\":\"F32\",\"shape\":[%u],\"data_offsets\":[0,%u]}}",
             count, 4 * count);
    made_safetensors(m, path, header, 100.0f * (float)rank, count);
}

/* "0:12 1:24": rank 0 has 12 elements, rank 1 has 24. */
static void make_ranks(const struct made *m, const char *ranks)
{
    unsigned rank, count;
    int used;

    for (; sscanf(ranks, "%u:%u%n", &rank, &count, &used) == 2; ranks += used)
        make_rank(m, rank, count);
}

/* "0:0-12 1:0-12": from rank 0 its elements 0 to 11, then from rank 1 those. */
static void want_of(const char *text, float want[ELEMENTS])
{
    unsigned rank, begin, end, n = 0;
    int used;

    for (; sscanf(text, "%u:%u-%u%n", &rank, &begin, &end, &used) == 3; text += used)
        for (unsigned i = begin; i < end; i++) {
            assert_true(n < ELEMENTS);
            want[n++] = 100.0f * (float)rank + (float)i;
        }
    assert_int_equal(n, ELEMENTS);
}

#define FLAT(rank, list)                                                               \
    "\"rank_" rank ".safetensors\":{\"flattened_offsets\":" list "}"
#define BOX(rank, size, at)                                                            \
    "\"rank_" rank ".safetensors\":{\"flattened_offsets\":null,\"local_shape\":" size  \
    ",\"global_offset\":" at "}"
#define SPEC(files)                                                                    \
    "\"shape\":[4,6],\"dtype\":\"F32\",\"shard_spec_per_file\":{" files "}"

static const struct {
    const char *name;
    const char *tensor; /* its entry in metadata.json */
    const char *ranks;  /* what lies there */
    const char *want;   /* the tensor, or */
    const char *fault;
} cases[] = {
    {"several intervals, in another order",
     SPEC(FLAT("0", "[[18,24],[0,5]]") "," FLAT("1", "[[5,18]]")), "0:11 1:13",
     "0:6-11 1:0-13 0:0-6", NULL},
    {"of two replicas the later one counts",
     SPEC(FLAT("0", "[[0,12]]") "," FLAT("1", "[[0,12]]") "," FLAT("2", "[[12,24]]")),
     "0:12 1:12 2:12", "1:0-12 2:0-12", NULL},
    {"the later one in the file's order, whatever its name",
     SPEC(FLAT("2", "[[12,24]]") "," FLAT("1", "[[0,12]]") "," FLAT("0", "[[0,12]]")),
     "0:12 1:12 2:12", "0:0-12 2:0-12", NULL},
    {"one file that has all stands alone",
     SPEC(FLAT("0", "[[0,12]]") "," FLAT("1", "[[0,24]]") "," FLAT("2", "[[12,24]]")),
     "0:12 1:24 2:12", "1:0-24", NULL},
    {"the first one of several that have all",
     SPEC(FLAT("0", "[[0,24]]") "," FLAT("1", "[[0,24]]")), "0:24 1:24", "0:0-24",
     NULL},
    {"neighbours in list order are all of it",
     SPEC(FLAT("0", "[[0,6],[6,6],[6,24]]") "," FLAT("1", "[[6,9]]")), "0:24 1:3",
     "0:0-24", NULL},
    {"all of it in another order is not",
     SPEC(FLAT("0", "[[12,24],[0,12]]") "," FLAT("1", "[[0,12]]")), "0:24 1:12",
     "1:0-12 0:0-12", NULL},
    {"a box that is all stands alone",
     SPEC(FLAT("0", "[[0,12]]") "," BOX("1", "[4,6]", "[0,0]")), "0:12 1:24", "1:0-24",
     NULL},
    {"columns", SPEC(BOX("0", "[4,2]", "[0,0]") "," BOX("1", "[4,4]", "[0,2]")),
     "0:8 1:16", "0:0-2 1:0-4 0:2-4 1:4-8 0:4-6 1:8-12 0:6-8 1:12-16", NULL},
    {"a box and an interval may be replicas",
     SPEC(BOX("0", "[2,6]", "[0,0]") "," FLAT("1", "[[0,12]]") "," FLAT("2",
                                                                        "[[12,24]]")),
     "0:12 1:12 2:12", "1:0-12 2:0-12", NULL},
    {"an interval is cut at any element",
     SPEC(FLAT("0", "[[0,7]]") "," FLAT("1", "[[7,8]]") "," FLAT("2", "[[8,24]]")),
     "0:7 1:1 2:16", "0:0-7 1:0-1 2:0-16", NULL},
    {"more is stored than wanted", SPEC(FLAT("0", "[[0,24]]")), "0:30", "0:0-24", NULL},
    {"empty pieces need no tensor",
     SPEC(FLAT("0", "[[0,24]]") "," FLAT("1", "[[12,12]]") "," FLAT("2", "[]") "," BOX(
         "3", "[0,6]", "[4,0]")),
     "0:24 1:0 2:0 3:0", "0:0-24", NULL},
    {"pairs, before 7 May 2024",
     "\"shape\":[4,6],\"is_sharded\":true,\"dtype\":\"F32\",\"flattened_offsets_per_file\":"
     "{\"rank_0.safetensors\":[0,12],\"rank_1.safetensors\":[12,24]}",
     "0:12 1:12", "0:0-12 1:0-12", NULL},
    {"no dtype, before 24 March 2024",
     "\"shape\":[4,6],\"flattened_offsets_per_file\":"
     "{\"rank_0.safetensors\":[0,12],\"rank_1.safetensors\":[12,24]}",
     "0:12 1:12", "0:0-12 1:0-12", NULL},
    {"a part of a replica",
     SPEC(FLAT("0", "[[0,12]]") "," FLAT("1", "[[3,9]]") "," FLAT("2", "[[12,24]]")),
     "0:12 1:6 2:12", NULL, "overlap"},
    {"columns over rows",
     SPEC(BOX("0", "[2,6]", "[0,0]") "," BOX("1", "[2,6]",
                                             "[2,0]") "," BOX("2", "[4,3]", "[0,0]")),
     "0:12 1:12 2:12", NULL, "overlap"},
    {"a hole", SPEC(FLAT("0", "[[0,12]]") "," FLAT("1", "[[13,24]]")), "0:12 1:11",
     NULL, "no chunk"},
    {"none of it", SPEC(FLAT("0", "[]")), "0:24", NULL, "no chunk"},
    {"less is stored", SPEC(FLAT("0", "[[0,24]]")), "0:23", NULL,
     "rank_0.safetensors has 23 elements of it, metadata.json wants 24"},
    {"a file is missing", SPEC(FLAT("0", "[[0,12]]") "," FLAT("1", "[[12,24]]")),
     "0:12", NULL, "rank_1.safetensors is missing"},
    {"another dtype in the file",
     "\"shape\":[4,6],\"dtype\":\"I32\",\"shard_spec_per_file\":{" FLAT("0",
                                                                        "[[0,24]]") "}",
     "0:24", NULL, "it is F32 in rank_0.safetensors, and I32 elsewhere"},
    {"a dtype that is no text",
     "\"shape\":[4,6],\"dtype\":7,\"shard_spec_per_file\":{" FLAT("0", "[[0,24]]") "}",
     "0:24", NULL, "metadata.json gives a dtype that is no text"},
    {"beyond the end", SPEC(FLAT("0", "[[0,25]]")), "0:25", NULL, "count up to 24"},
    {"backwards", SPEC(FLAT("0", "[[24,0]]")), "0:24", NULL, "count up to 24"},
    {"a fraction", SPEC(FLAT("0", "[[0,24.0]]")), "0:24", NULL, "count up to 24"},
    {"three numbers", SPEC(FLAT("0", "[[0,12,24]]")), "0:24", NULL, "count up to 24"},
    {"a box of one dimension", SPEC(BOX("0", "[24]", "[0]")), "0:24", NULL,
     "no lists of 2 numbers"},
    {"a box beyond the end", SPEC(BOX("0", "[4,6]", "[0,1]")), "0:24", NULL,
     "not within the tensor"},
    {"nothing said of a file", SPEC("\"rank_0.safetensors\":{}"), "0:24", NULL,
     "neither flattened_offsets nor local_shape"},
    {"no files", "\"shape\":[4,6],\"dtype\":\"F32\"", "0:24", NULL,
     "which files it is in"},
    {"no shape",
     "\"dtype\":\"F32\",\"shard_spec_per_file\":{" FLAT("0", "[[0,24]]") "}", "0:24",
     NULL, "gives no shape"},
    {"a negative dimension", "\"shape\":[-4,-6],\"dtype\":\"F32\"", "0:24", NULL,
     "gives no shape"},
    {"too many elements",
     "\"shape\":[4294967296,4294967296],\"dtype\":\"F32\",\"shard_spec_per_file\":{}",
     "0:24", NULL, "2^63"},
    {"an unknown dtype", "\"shape\":[4,6],\"dtype\":\"F33\"", "0:24", NULL, "\"F33\""},
    {"a file elsewhere",
     "\"shape\":[4,6],\"dtype\":\"F32\",\"shard_spec_per_file\":"
     "{\"../rank_0.safetensors\":{\"flattened_offsets\":[[0,24]]}}",
     "0:24", NULL, "never opened"},
};

static void test_who_wins(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf text = {0};
        float want[ELEMENTS];
        struct made m;
        struct opened o;

        print_message("# %s\n", cases[i].name);
        made_begin(&m, "case");
        buf_addf(&text, "{\"tensors\": {\"w\": {%s}}}", cases[i].tensor);
        made_text(&m, "metadata.json", text.data);
        make_ranks(&m, cases[i].ranks);
        made_open(&m, &o);
        assert_null(o.info.error);
        assert_int_equal(o.count, 1);
        if (cases[i].want) {
            want_of(cases[i].want, want);
            check_floats(&o, "w", want, ELEMENTS);
            assert_int_equal(o.info.warnings, 0);
        } else {
            check_fault(&o, "w", cases[i].fault);
        }
        close_checkpoint(&o);
        made_end(&m);
    }
}

/* ---- keys, roles and what stands beside ---- */

static void open_fixture(void **state, const char *name, struct opened *o)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", (const char *)*state, name);
    open_checkpoint(path, o);
}

static void test_roles(void **state)
{
    struct opened o;

    open_fixture(state, "v01-olmofsdp-w3", &o);
    assert_int_equal(tensor(&o, "embed.weight")->role, ROLE_MODEL);
    assert_null(tensor(&o, "embed.weight")->part);
    assert_int_equal(tensor(&o, "embed.weight")->wrapper, 0);
    assert_int_equal(tensor(&o, "state.embed.weight.__exp_avg")->role, ROLE_OPTIMIZER);
    assert_string_equal(tensor(&o, "state.embed.weight.__exp_avg")->part, "optim");
    assert_int_equal(tensor(&o, "num_param_groups")->role, ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "param_group0")->role, ROLE_OTHER);
    assert_int_equal(tensor(&o, "param_group1")->role, ROLE_OTHER);
    assert_int_equal(tensor(&o, "state_keys")->role, ROLE_OTHER);
    assert_string_equal(o.info.topology, "{\"ranks\": 3, \"files\": 6}");
    close_checkpoint(&o);
}

/* optim/ alone: its own keys tell what it is. */
static void test_optimizer_alone(void **state)
{
    CLEANUP(buf_release) struct buf objects = {0};
    struct opened o;

    open_fixture(state, "v01-olmofsdp-w3/optim", &o);
    assert_null(tensor(&o, "state_keys")->part);
    assert_int_equal(tensor(&o, "state.embed.weight.__exp_avg")->role, ROLE_OPTIMIZER);
    assert_int_equal(tensor(&o, "param_group0")->role, ROLE_OTHER);
    all_objects(&o, &objects);
    assert_has(objects.data, "state_keys=[\"exp_avg\",\"exp_avg_sq\",\"step\"]\n");
    close_checkpoint(&o);
}

static const char one_rank[] =
    "{\"tensors\": {\"w\": {\"shape\": [2], \"dtype\": \"F32\", \"shard_spec_per_file\": "
    "{\"rank_0.safetensors\": {\"flattened_offsets\": [[0, 2]]}}}}}";
static const char header[] =
    "{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";

static void make_part(const struct made *m, const char *dir, float start)
{
    char path[64];

    snprintf(path, sizeof path, "%s/metadata.json", dir);
    made_text(m, path, one_rank);
    snprintf(path, sizeof path, "%s/rank_0.safetensors", dir);
    made_safetensors(m, path, header, start, 2);
}

/* Both parts hold w: the model's keeps the name. A damaged optimizer hides no model. */
static void test_parts(void **state)
{
    static const float model[] = {1, 2}, optim[] = {5, 6};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "step70");
    make_part(&m, "model", 1);
    make_part(&m, "optim", 5);
    made_open(&m, &o);
    assert_int_equal(o.count, 2);
    check_floats(&o, "w", model, 2);
    check_floats(&o, "optim/w", optim, 2);
    assert_int_equal(tensor(&o, "optim/w")->role, ROLE_OPTIMIZER);
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 70);
    close_checkpoint(&o);

    made_text(&m, "optim/metadata.json", "{\"tensors\": {");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.count, 1);
    check_floats(&o, "w", model, 2);
    check_warnings(&o,
                   "missing-part: no tensors of the optimizer: optim/metadata.json: "
                   "JSON byte 13 (the end): a member's name is missing\n");
    close_checkpoint(&o);

    made_text(&m, "model/metadata.json",
              "{\"tensors\": {\"w\": {\"shard_spec_per_file\"");
    made_open(&m, &o);
    assert_non_null(o.info.error);
    assert_has(o.info.error, "model/metadata.json: JSON byte 40");
    assert_int_equal(o.count, 0);
    close_checkpoint(&o);
    made_end(&m);
}

static void test_stale_files(void **state)
{
    static const float want[] = {1, 2};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "stale");
    made_text(&m, "metadata.json", one_rank);
    made_safetensors(&m, "rank_0.safetensors", header, 1, 2);
    made_safetensors(&m, "rank_1.safetensors", "{}      ", 0, 0);
    made_safetensors(&m, "rank_2.safetensors", header, 7, 2);
    made_open(&m, &o);
    check_floats(&o, "w", want, 2);
    check_warnings(&o, "stale-file: 1 rank files belong to no tensor, the first is "
                       "rank_2.safetensors\n");
    assert_string_equal(o.info.topology, "{\"ranks\": 2, \"files\": 1}");
    close_checkpoint(&o);
    made_end(&m);
}

/* A pickle that cannot be read is told, and its tensor is there all the same. */
static void test_bad_pickle(void **state)
{
    static const char metadata[] =
        "{\"tensors\": {\"num_param_groups\": {\"shape\": [], \"dtype\": \"F32\", "
        "\"shard_spec_per_file\": {\"rank_0.safetensors\": {\"flattened_offsets\": "
        "[[0, 1]]}}}, \"state_keys\": {\"shape\": [4], \"dtype\": \"U8\", "
        "\"shard_spec_per_file\": {\"rank_0.safetensors\": {\"flattened_offsets\": "
        "[[0, 4]]}}}}}";
    static const char names[] =
        "{\"num_param_groups\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"state_keys\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}";
    CLEANUP(buf_release) struct buf objects = {0};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "pickle");
    made_text(&m, "metadata.json", metadata);
    made_safetensors(&m, "rank_0.safetensors", names, 1, 2);
    made_open(&m, &o);
    assert_int_equal(o.count, 2);
    assert_null(tensor(&o, "state_keys")->fault);
    assert_int_equal(tensor(&o, "state_keys")->role, ROLE_OTHER);
    assert_int_equal(o.info.warnings, 1);
    all_objects(&o, &objects);
    assert_has(objects.data,
               "state_keys={\"$type\":\"opaque\",\"class\":\"unreadable\"");
    close_checkpoint(&o);
    made_end(&m);
}

/* One text that is in many places of a pickle is written no more often than its size allows. */
static void test_shared_text(void **state)
{
    enum { TEXT = 2000, TIMES = 300, SIZE = 2 + 5 + TEXT + 2 + 2 * TIMES + 2 };
    CLEANUP(buf_release) struct buf metadata = {0}, file = {0}, objects = {0};
    struct made m;
    struct opened o;

    (void)state;
    buf_addf(
        &metadata,
        "{\"tensors\": {\"num_param_groups\": {\"shape\": [], \"dtype\": \"F32\", "
        "\"shard_spec_per_file\": {\"rank_0.safetensors\": {\"flattened_offsets\": "
        "[[0, 1]]}}}, \"state_keys\": {\"shape\": [%d], \"dtype\": \"U8\", "
        "\"shard_spec_per_file\": {\"rank_0.safetensors\": {\"flattened_offsets\": "
        "[[0, %d]]}}}}}",
        SIZE, SIZE);
    buf_add(&file, "\300\0\0\0\0\0\0\0", 8);
    buf_addf(
        &file,
        "{\"num_param_groups\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"state_keys\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[4,%d]}}",
        SIZE, SIZE + 4);
    while (file.len < 8 + 192)
        buf_addc(&file, ' ');
    buf_add(&file, "\0\0\200?](X\320\7\0\0", 11);
    for (int i = 0; i < TEXT; i++)
        buf_addc(&file, 's');
    buf_add(&file, "q\0", 2);
    for (int i = 0; i < TIMES; i++)
        buf_add(&file, "h\0", 2);
    buf_adds(&file, "e.");
    assert_int_equal(buf_failed(&file), 0);
    made_begin(&m, "shared");
    made_text(&m, "metadata.json", metadata.data);
    made_file(&m, "rank_0.safetensors", file.data, file.len);
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_null(tensor(&o, "state_keys")->fault);
    all_objects(&o, &objects);
    assert_has(objects.data, "the object is too large for objects.json");
    close_checkpoint(&o);
    made_end(&m);
}

/* Classic OLMo's trainer puts its state beside. */
static void test_train(void **state)
{
    CLEANUP(buf_release) struct buf objects = {0};
    char from[PATH_MAX];
    struct made m;
    struct opened o;

    snprintf(from, sizeof from, "%s/../olmo_core/step100/train/rank0.pt",
             (const char *)*state);
    made_begin(&m, "checkpoint");
    make_part(&m, "model", 1);
    made_copy(&m, "train/rank0.pt", from);
    made_text(&m, "train/rank1.pt", "PK\3\4 no zip");
    made_open(&m, &o);
    assert_int_equal(o.count, 2);
    assert_int_equal(tensor(&o, "train/rank0.pt:rng.torch.state")->role, ROLE_OTHER);
    all_objects(&o, &objects);
    assert_has(objects.data, "train/rank0.pt={\"global_step\":100,");
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 100);
    assert_int_equal(o.info.warnings, 2); /* a damaged file; two of three ranks */
    close_checkpoint(&o);
    made_end(&m);
}

/* ---- bids ---- */

static int score_of(const char *dir, const char *metadata, bool rank0)
{
    struct entry_stat file = {.kind = ENTRY_FILE}, sub = {.kind = ENTRY_DIR};
    struct listing *l, *top;
    struct bid b = {0};
    struct err e = {0};

    file.id.size = strlen(metadata);
    assert_ok(listing_new(NULL, dir, &l, &e), &e);
    assert_ok(listing_add(l, "metadata.json", &file, metadata, strlen(metadata), &e),
              &e);
    if (rank0)
        assert_ok(listing_add(l, "rank_0.safetensors", &file, "", 0, &e), &e);
    listing_sort(l);
    top = l;
    if (dir[0]) {
        assert_ok(listing_new(NULL, "", &top, &e), &e);
        assert_ok(listing_add(top, dir, &sub, NULL, 0, &e), &e);
        listing_sort(top);
        assert_ok(listing_add_sub(top, dir, l, &e), &e);
    }
    format_olmo_v0.bid(top, &b);
    listing_free(top);
    return b.score;
}

static void test_bids(void **state)
{
    static const char nothing[] = " {\n \"tensors\" : { } }";

    (void)state;
    assert_int_equal(score_of("", one_rank, false), 88);
    assert_int_equal(score_of("", nothing, true), 70);
    assert_int_equal(score_of("", nothing, false), 0);
    assert_int_equal(score_of("model", one_rank, true), 95);
    assert_int_equal(score_of("model", nothing, false), 0);
    assert_int_equal(score_of("optim", one_rank, true), 0);
    assert_int_equal(score_of("", "{\"sharded_backend\": \"torch_dist\"}", true), 0);
    assert_int_equal(score_of("", "{\"tensors\": []}", true), 0);
    assert_int_equal(score_of("", "{\"x\": {\"tensors\": {", true), 0);
    assert_int_equal(score_of("", "", true), 0);
    /* Damaged where it begins: no other format, and not a folder of rank files. */
    assert_int_equal(score_of("", "\xff\xff\xff\xff\xff\xff\xff\xff", true), 70);
    assert_int_equal(score_of("", "\xff\xff\xff\xff\xff\xff\xff\xff", false), 0);
    assert_int_equal(
        score_of("model", "{\"tens\xff\": {\"w\": {\"shard_spec_per_file\"", true), 95);
}

/* A step whose metadata.json lost its first bytes is refused, with the file's name. */
static void test_damaged_start(void **state)
{
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "step4");
    made_text(&m, "model/metadata.json", "\xff\xff\xff\xff\xffors\": {}}");
    made_safetensors(&m, "model/rank_0.safetensors",
                     "{\"w\": {\"dtype\": \"F32\", \"shape\": [2], \"data_offsets\": "
                     "[0, 8]}}",
                     1, 2);
    made_open(&m, &o);
    assert_has(o.info.error, "model/metadata.json");
    close_checkpoint(&o);
    made_end(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "who wins", .test_func = test_who_wins},
        {.name = "roles", .test_func = test_roles},
        {.name = "an optimizer alone", .test_func = test_optimizer_alone},
        {.name = "parts", .test_func = test_parts},
        {.name = "stale files", .test_func = test_stale_files},
        {.name = "a bad pickle", .test_func = test_bad_pickle},
        {.name = "a shared text", .test_func = test_shared_text},
        {.name = "train/", .test_func = test_train},
        {.name = "bids", .test_func = test_bids},
        {.name = "a damaged start", .test_func = test_damaged_start},
    };

    return run_with_fixtures("olmo_v0", argc, argv, others, ARRAY_SIZE(others));
}
