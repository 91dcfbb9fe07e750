/* SPDX-License-Identifier: MIT */
/* tests/unit/test_deepspeed_cut.c - universal_checkpoint_info: how two ranks' pieces go together. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <stdlib.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/deepspeed/deepspeed_cut.h"
#include "index/formats/pickle/pickle_write.h"
#include "remote/source.h"

enum { RANKS = 2 };

/* ---- notes, written as JSON ---- */

static void put_key(struct pickler *p, const char *key)
{
    if (key[0] >= '0' && key[0] <= '9')
        pickle_int(p, key[0] - '0'); /* a rank */
    else
        pickle_string(p, key);
}

static void put_number(struct pickler *p, const struct json *v)
{
    int64_t i;
    double f = 0;

    if (json_i64(v, &i)) {
        pickle_int(p, i);
        return;
    }
    assert_true(json_double(v, &f));
    pickle_double(p, f);
}

static void put_value(struct pickler *p, const struct json *v)
{
    const char *text;

    switch (json_kind(v)) {
    case JSON_NULL:
    case JSON_BOOL:
        pickle_none(p);
        break;
    case JSON_NUMBER:
        put_number(p, v);
        break;
    case JSON_STRING:
        assert_true(json_string(v, &text));
        pickle_string(p, text);
        break;
    case JSON_ARRAY:
        pickle_list(p);
        pickle_mark(p);
        for (v = json_first(v); v; v = json_next(v))
            put_value(p, v);
        pickle_append(p);
        break;
    case JSON_OBJECT:
        pickle_dict(p);
        pickle_mark(p);
        for (v = json_first(v); v; v = json_next(v)) {
            put_key(p, json_key(v));
            put_value(p, v);
        }
        pickle_set(p);
        break;
    }
}

static struct pickle *load_notes(const char *notes)
{
    CLEANUP(buf_release) struct buf text = {0};
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP(source_putp) struct source *s = NULL;
    struct pickler p = {0};
    struct pickle *out = NULL;
    struct err e = {0};
    uint64_t used;

    buf_addf(&text, "{\"universal_checkpoint_info\": {%s}}", notes);
    if (json_parse(text.data, text.len, NULL, &doc, &e) < 0)
        fail_msg("%s: %s", notes, e.text);
    pickle_begin(&p);
    put_value(&p, doc);
    pickle_end(&p);
    assert_ok(source_from_memory(p.out.data, p.out.len, false, "notes", &s, &e), &e);
    assert_ok(
        pickle_load(s, 0, p.out.len, &(struct pickle_options){0}, &out, &used, &e), &e);
    pickle_release(&p);
    return out;
}

/* ---- what comes of them ---- */

static void put_numbers(struct buf *b, const uint64_t *v, uint32_t nd)
{
    for (uint32_t k = 0; k < nd; k++)
        buf_addf(b, "%s%" PRIu64, k ? "," : "", v[k]);
}

/* "8,4: 0,0>4,0+4,4 | ...": the whole; of each rank, of each box from > to + size. */
static void tell(const struct ds_cut *c, struct buf *b)
{
    buf_adds(b, "");
    if (c->why[0]) {
        buf_adds(b, c->why);
        return;
    }
    buf_adds(b, c->kind == DS_CUT_SAME   ? "same "
                : c->kind == DS_CUT_MEAN ? "mean "
                                         : "");
    put_numbers(b, c->whole.dim, c->whole.nd);
    for (uint32_t r = 0; r < RANKS; r++) {
        const struct rank_boxes *all = &c->boxes[r].all;

        buf_adds(b, r ? " |" : ":");
        for (size_t i = 0; i < all->count; i++) {
            buf_adds(b, " ");
            put_numbers(b, all->box[i].from, all->nd);
            buf_adds(b, ">");
            put_numbers(b, all->box[i].to, all->nd);
            buf_adds(b, "+");
            put_numbers(b, all->box[i].size, all->nd);
        }
    }
}

struct cut_case {
    const char *notes, *name;
    struct shape local[RANKS];
    const char *want; /* why it is refused, or what tell() says */
};

static void check_cut(const struct cut_case *c)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    CLEANUP(pickle_freep) struct pickle *p = load_notes(c->notes);
    CLEANUP(buf_release) struct buf got = {0};
    struct shape local[RANKS] = {c->local[0], c->local[1]};
    struct pv root = pickle_root(p);
    struct ds_notes notes;
    struct ds_cut cut;
    struct err e = {0};

    if (ds_notes_take(a, &root, RANKS, &notes, &e) != 1)
        fail_msg("%s: %s", c->notes, e.text);
    assert_ok(ds_cut_find(&notes, a, c->name, strlen(c->name), local, &cut, &e), &e);
    tell(&cut, &got);
    if (strcmp(got.data, c->want) != 0)
        fail_msg("%s\nof %s gives \"%s\", it should be \"%s\"", c->name, c->notes,
                 got.data, c->want);
}

static void check_cuts(const struct cut_case *c, size_t n)
{
    for (size_t i = 0; i < n; i++)
        check_cut(&c[i]);
}

#define LISTS(more)                                                                    \
    "\"tp_replicated_parameter_patterns\": [\"norm\"], "                               \
    "\"parameter_with_row_parallelism_patterns\": [\"row\"]" more
#define S1(a)                                                                          \
    {                                                                                  \
        .nd = 1, .dim = { a }                                                          \
    }
#define S2(a, b)                                                                       \
    {                                                                                  \
        .nd = 2, .dim = { a, b }                                                       \
    }
#define S3(a, b, c)                                                                    \
    {                                                                                  \
        .nd = 3, .dim = { a, b, c }                                                    \
    }
#define HALF_TOO_MANY UINT64_C(0x8000000000000000)

/* ---- lists of patterns ---- */

static void test_lists(void **state)
{
    static const struct cut_case cases[] = {
        {LISTS(""), "w", {S2(2, 3), S2(4, 3)}, "6,3: 0,0>0,0+2,3 | 0,0>2,0+4,3"},
        {LISTS(""), "row", {S2(2, 3), S2(2, 5)}, "2,8: 0,0>0,0+2,3 | 0,0>0,3+2,5"},
        {LISTS(""), "w", {S1(2), S1(0)}, "2: 0>0+2 |"},
        {LISTS(""), "norm", {S1(3), S1(3)}, "same 3: 0>0+3 | 0>0+3"},
        {LISTS(", \"parameter_to_average_patterns\": [\"mean\"]"),
         "mean",
         {S1(3), S1(3)},
         "mean 3: 0>0+3 | 0>0+3"},
        {LISTS(", \"parameter_with_2_sub_params_cat_dim_0\": [\"gate\"]"),
         "gate",
         {S2(4, 3), S2(2, 3)},
         "6,3: 0,0>0,0+2,3 2,0>3,0+2,3 | 0,0>2,0+1,3 1,0>5,0+1,3"},
        /* padding of the vocabulary */
        {LISTS(", \"vocabulary_parameter_patterns\": [\"emb\"], "
               "\"original_vocab_size\": 5"),
         "emb",
         {S2(3, 2), S2(3, 2)},
         "5,2: 0,0>0,0+3,2 | 0,0>3,0+2,2"},
        {LISTS(", \"vocabulary_parameter_patterns\": [\"emb\"], "
               "\"original_vocab_size\": 3"),
         "emb",
         {S2(3, 2), S2(3, 2)},
         "3,2: 0,0>0,0+3,2 |"},
        {LISTS(", \"vocabulary_parameter_patterns\": [\"emb\"], "
               "\"original_vocab_size\": 6"),
         "emb",
         {S2(3, 2), S2(3, 2)},
         "6,2: 0,0>0,0+3,2 | 0,0>3,0+3,2"},
        {LISTS(", \"vocabulary_parameter_patterns\": [\"emb\"], "
               "\"original_vocab_size\": 5"),
         "emb",
         {S1(3), S1(3)},
         "the size of the vocabulary is not told"},
        /* pieces that do not go together so */
        {LISTS(""),
         "w",
         {S2(2, 3), S2(2, 4)},
         "the ranks' pieces do not fit along dimension 0"},
        {LISTS(""),
         "w",
         {S2(2, 3), S1(6)},
         "the ranks' pieces do not fit along dimension 0"},
        {LISTS(""),
         "row",
         {S2(2, 3), S2(3, 3)},
         "the ranks' pieces do not fit along dimension 1"},
        {LISTS(""),
         "row",
         {S1(3), S1(3)},
         "the ranks' pieces do not fit along dimension 1"},
        {LISTS(""), "w", {{0}, {0}}, "the ranks' pieces do not fit along dimension 0"},
        {LISTS(""), "norm", {S1(3), S1(4)}, "the ranks have it in different shapes"},
        {LISTS(", \"parameter_with_2_sub_params_cat_dim_0\": [\"gate\"]"),
         "gate",
         {S2(4, 3), S2(3, 3)},
         "a rank's piece has 3 rows, which are not two equal parts"},
        {LISTS(""),
         "w",
         {S1(HALF_TOO_MANY), S1(HALF_TOO_MANY)},
         "its pieces are more than 2^64 elements long"},
        {LISTS(""),
         "w",
         {S2(HALF_TOO_MANY / 2, 3), S2(HALF_TOO_MANY / 2, 3)},
         "its shape: shape [9223372036854775808, 3]: more than 2^63 elements"},
        {LISTS(", \"autotp_unsupported_parameter_patterns\": {\"odd\": \"its why\"}"),
         "odd",
         {S1(3), S1(3)},
         "AutoTP noted that it cannot be joined: its why"},
        {LISTS(", \"autotp_unsupported_parameter_patterns\": {\"odd\": 7}"),
         "odd",
         {S1(3), S1(3)},
         "AutoTP noted that it cannot be joined: no reason is noted"},
        {LISTS(""),
         "w\xc3\xa9",
         {S1(3), S1(3)},
         "patterns are not held against names that are not ASCII"},
        {LISTS(", \"parameter_to_average_patterns\": [\"m.*\", \"me.*\"]"),
         "mean",
         {S1(3), S1(3)},
         "two patterns of one kind match it"},
        {LISTS(", \"vocabulary_parameter_patterns\": [\"e.*\", \"em.*\"]"),
         "emb",
         {S1(3), S1(3)},
         "two patterns of one kind match it"},
    };

    (void)state;
    check_cuts(cases, ARRAY_SIZE(cases));
}

/* ---- parameter_with_sub_params ---- */

#define SUBS(view)                                                                     \
    LISTS(", \"parameter_with_sub_params\": [{\"patterns\": [\"qkv\"]" view "}]")
#define VIEW(axis, shape) ", \"partition_dim\": " axis ", \"shape\": " shape
#define WIDTHS(view, widths)                                                                 \
    SUBS(view)                                                                               \
    ", \"universal_checkpoint_version\": 0.4, \"sub_param_shard_widths\": {\"qkv\": " widths \
    "}"

static void test_subs(void **state)
{
    static const struct cut_case cases[] = {
        /* before 0.4: sizes of the parts, or how many equal ones */
        {SUBS(VIEW("0", "[[4, 2], 3]")),
         "qkv",
         {S2(3, 3), S2(3, 3)},
         "6,3: 0,0>0,0+2,3 2,0>4,0+1,3 | 0,0>2,0+2,3 2,0>5,0+1,3"},
        {SUBS(VIEW("0", "[3, -1]")),
         "qkv",
         {S2(3, 2), S2(3, 2)},
         "6,2: 0,0>0,0+1,2 1,0>2,0+1,2 2,0>4,0+1,2 | "
         "0,0>1,0+1,2 1,0>3,0+1,2 2,0>5,0+1,2"},
        {SUBS(VIEW("1", "[-1, [2, 2]]")),
         "qkv",
         {S1(4), S1(4)}, /* flat, as a view of 2x2 */
         "2,4: 0,0>0,0+2,1 0,1>0,2+2,1 | 0,0>0,1+2,1 0,1>0,3+2,1"},
        /* from 0.4 on: what each rank has of each part */
        {WIDTHS(VIEW("0", "[[4, 2], 3]"), "[[3, 1], [2, 0]]"),
         "qkv",
         {S2(5, 3), S2(1, 3)},
         "6,3: 0,0>0,0+3,3 3,0>4,0+2,3 | 0,0>3,0+1,3"},
        {WIDTHS(VIEW("0", "[[4], 3]"), "[[3, 1]]"),
         "qkv",
         {S2(3, 3), S2(1, 3)},
         "4,3: 0,0>0,0+3,3 | 0,0>3,0+1,3"},
        /* a view that is none */
        {SUBS(""),
         "qkv",
         {S1(4), S1(4)},
         "parameter_with_sub_params does not tell its view"},
        {SUBS(VIEW("2", "[2, 3]")),
         "qkv",
         {S1(4), S1(4)},
         "parameter_with_sub_params does not tell its view"},
        {SUBS(VIEW("-1", "[2, 3]")),
         "qkv",
         {S1(4), S1(4)},
         "parameter_with_sub_params does not tell its view"},
        {SUBS(VIEW("0", "6")),
         "qkv",
         {S1(4), S1(4)},
         "parameter_with_sub_params does not tell its view"},
        {SUBS(VIEW("0", "[2, \"x\"]")),
         "qkv",
         {S1(4), S1(4)},
         "parameter_with_sub_params does not tell its view"},
        {SUBS(VIEW("0", "[2, -1, -1]")),
         "qkv",
         {S1(4), S1(4)},
         "parameter_with_sub_params does not tell its view"},
        {SUBS(VIEW("0", "[0, 3]")),
         "qkv",
         {S1(4), S1(4)},
         "parameter_with_sub_params does not tell its view"},
        {SUBS(VIEW("0", "[-2, 3]")),
         "qkv",
         {S1(4), S1(4)},
         "parameter_with_sub_params does not tell its view"},
        /* parts that are none */
        {SUBS(VIEW("0", "[[], 3]")),
         "qkv",
         {S2(3, 3), S2(3, 3)},
         "it is of 0 sub-parameters"},
        {SUBS(VIEW("0", "[65, 3]")),
         "qkv",
         {S2(65, 3), S2(65, 3)},
         "it is of 65 sub-parameters"},
        {SUBS(VIEW("0", "[[4, 3], 3]")),
         "qkv",
         {S2(3, 3), S2(3, 3)},
         "its sub-parameters' widths do not fit"},
        {SUBS(VIEW("0", "[[4, -2], 3]")),
         "qkv",
         {S2(3, 3), S2(3, 3)},
         "its sub-parameters' widths do not fit"},
        {SUBS(VIEW("0", "[4, 3]")),
         "qkv",
         {S2(3, 3), S2(3, 3)},
         "its sub-parameters' widths do not fit"},
        {SUBS(VIEW("0", "[2, 3]")),
         "qkv",
         {S2(3, 3), S2(3, 3)}, /* 6 rows in 2 parts: 3 each, of 2 ranks */
         "its sub-parameters' widths do not fit"},
        {SUBS(VIEW("1", "[3, 2]")),
         "qkv",
         {S1(6), S1(6)},
         "its sub-parameters' widths do not fit"},
        {SUBS(VIEW("0", "[2, 3]")),
         "qkv",
         {S1(HALF_TOO_MANY), S1(HALF_TOO_MANY)},
         "its sub-parameters' widths do not fit"},
        /* widths that are none */
        {SUBS(VIEW("0", "[[4, 2], 3]")) ", \"universal_checkpoint_version\": 0.4",
         "qkv",
         {S2(3, 3), S2(3, 3)},
         "sub_param_shard_widths does not tell its widths"},
        {WIDTHS(VIEW("0", "[[4, 2], 3]"), "7"),
         "qkv",
         {S2(3, 3), S2(3, 3)},
         "sub_param_shard_widths does not tell its widths"},
        {WIDTHS(VIEW("0", "[[4, 2], 3]"), "[[3, 1]]"),
         "qkv",
         {S2(3, 3), S2(3, 3)},
         "it is of 1 sub-parameters"},
        {WIDTHS(VIEW("0", "[[4, 2], 3]"), "[[3, 1], [2]]"),
         "qkv",
         {S2(5, 3), S2(1, 3)},
         "its sub-parameters' widths do not fit"},
        {WIDTHS(VIEW("0", "[[4, 2], 3]"), "[[3, 1], [2, -1]]"),
         "qkv",
         {S2(5, 3), S2(1, 3)},
         "its sub-parameters' widths do not fit"},
        {WIDTHS(VIEW("0", "[[4, 2], 3]"), "[[3, 1], 2]"),
         "qkv",
         {S2(5, 3), S2(1, 3)},
         "its sub-parameters' widths do not fit"},
        {WIDTHS(VIEW("0", "[[4, 2], 3]"), "[[3, 2], [2, 0]]"),
         "qkv",
         {S2(5, 3), S2(2, 3)},
         "its sub-parameters' widths do not fit"},
        /* pieces that have not so many elements */
        {SUBS(VIEW("0", "[[4, 2], 3]")),
         "qkv",
         {S2(4, 3), S2(2, 3)},
         "the ranks' pieces are not of the noted widths"},
        {SUBS(VIEW("0", "[[4, 2], 3]")),
         "qkv",
         {S2(3, 3), S2(3, 4)},
         "the ranks' pieces are not of the noted widths"},
        {SUBS(VIEW("0", "[[4, 2], -1]")),
         "qkv",
         {S2(3, 3), S2(3, 4)},
         "the ranks' pieces are not of the noted widths"},
        {SUBS(VIEW("0", "[[4, 2], 0, -1]")),
         "qkv",
         {S2(3, 3), S2(3, 3)},
         "the ranks' pieces are not of the noted widths"},
        {SUBS(VIEW("0", "[[4, 2], 4294967296, 4294967296]")),
         "qkv",
         {S2(3, 3), S2(3, 3)},
         "the ranks' pieces are not of the noted widths"},
    };

    (void)state;
    check_cuts(cases, ARRAY_SIZE(cases));
}

/* ---- affine maps ---- */

#define AFFINE(map) "\"affine_map\": {\"version\": 1, \"params\": {\"w\": " map "}}"
#define PIECE(shape, source, dest, more)                                               \
    "{\"shape\": " shape ", \"source\": " source ", \"dest\": " dest more "}"
#define RANK(shape, pieces) "{\"shard_shape\": " shape ", \"pieces\": [" pieces "]}"
#define MAP(rank0, rank1)                                                              \
    AFFINE("{\"logical_shape\": [4, 3], \"ranks\": {\"0\": " rank0 ", \"1\": " rank1   \
           "}}")
#define TOP RANK("[2, 3]", PIECE("[2, 3]", "[0, [3, 1]]", "[0, [3, 1]]", ""))
#define LOW(more) RANK("[2, 3]", PIECE("[2, 3]", "[6, [3, 1]]", "[0, [3, 1]]", more))
#define NO_BOX(piece)                                                                  \
    {                                                                                  \
        MAP(TOP, RANK("[2, 3]", piece)), "w", {S2(2, 3), S2(2, 3)},                    \
            "its affine map has a piece that is no box of the tensor"                  \
    }

static void test_affine(void **state)
{
    static const struct cut_case cases[] = {
        {MAP(TOP, LOW("")),
         "w",
         {S2(2, 3), S2(2, 3)},
         "4,3: 0,0>0,0+2,3 | 0,0>2,0+2,3"},
        {MAP(TOP, LOW(", \"scale\": 1")),
         "w",
         {S2(2, 3), S2(2, 3)},
         "4,3: 0,0>0,0+2,3 | 0,0>2,0+2,3"},
        /* columns 1 and 2 of rows 1 to 3; a size of 1 has any stride */
        {MAP(RANK("[6]", ""),
             RANK("[3, 2]", PIECE("[3, 2]", "[4, [3, 1]]", "[0, [2, 1]]", ""))),
         "w",
         {S1(6), S1(6)},
         "4,3: | 0,0>1,1+3,2"},
        {MAP(RANK("[6]", ""),
             RANK("[2, 3]", PIECE("[1, 3]", "[9, [77, 1]]", "[3, [99, 1]]", ""))),
         "w",
         {S1(6), S1(6)},
         "4,3: | 1,0>3,0+1,3"},
        /* what a lower rank has too, and what is empty */
        {MAP(TOP, LOW(", \"locations\": [0, 1]")),
         "w",
         {S2(2, 3), S2(2, 3)},
         "4,3: 0,0>0,0+2,3 |"},
        {MAP(TOP, LOW(", \"locations\": [1]")),
         "w",
         {S2(2, 3), S2(2, 3)},
         "4,3: 0,0>0,0+2,3 | 0,0>2,0+2,3"},
        {MAP(TOP, RANK("[2, 3]", PIECE("[0, 3]", "[99, [3, 1]]", "[0, [3, 1]]", ""))),
         "w",
         {S2(2, 3), S2(2, 3)},
         "4,3: 0,0>0,0+2,3 |"},
        {MAP(TOP, LOW(", \"scale\": 0.5")),
         "w",
         {S2(2, 3), S2(2, 3)},
         "its affine map has scaled pieces, which are not supported"},
        {MAP(TOP, LOW(", \"scale\": 2")),
         "w",
         {S2(2, 3), S2(2, 3)},
         "its affine map has scaled pieces, which are not supported"},
        /* pieces that are none */
        {MAP(TOP, RANK("[2, 3]", "7")),
         "w",
         {S2(2, 3), S2(2, 3)},
         "its affine map has a piece that is none"},
        {MAP(TOP, RANK("[2, 3]", "{\"shape\": [2, 3], \"source\": [6, [3, 1]]}")),
         "w",
         {S2(2, 3), S2(2, 3)},
         "its affine map has a piece that is none"},
        {MAP(TOP, RANK("[2, 3]", PIECE("[2, -3]", "[6, [3, 1]]", "[0, [3, 1]]", ""))),
         "w",
         {S2(2, 3), S2(2, 3)},
         "its affine map has a piece that is none"},
        NO_BOX(PIECE("[2, 3]", "[7, [3, 1]]", "[0, [3, 1]]", "")),
        NO_BOX(PIECE("[2, 3]", "[9, [3, 1]]", "[0, [3, 1]]", "")),
        NO_BOX(PIECE("[2, 3]", "[12, [3, 1]]", "[0, [3, 1]]", "")),
        NO_BOX(PIECE("[2, 3]", "[6, [3, 2]]", "[0, [3, 1]]", "")),
        NO_BOX(PIECE("[2, 3]", "[6, [6, 1]]", "[0, [3, 1]]", "")),
        NO_BOX(PIECE("[2, 3]", "[6, [3, 1]]", "[3, [3, 1]]", "")),
        NO_BOX(PIECE("[3, 3]", "[3, [3, 1]]", "[0, [3, 1]]", "")),
        NO_BOX(PIECE("[6]", "[6, [1]]", "[0, [1]]", "")),
        NO_BOX(PIECE("[2, 3]", "[6, [3]]", "[0, [3, 1]]", "")),
        NO_BOX(PIECE("[2, 3]", "[6]", "[0, [3, 1]]", "")),
        NO_BOX(PIECE("[2, 3]", "6", "[0, [3, 1]]", "")),
        NO_BOX(PIECE("[2, 3]", "[-6, [3, 1]]", "[0, [3, 1]]", "")),
        NO_BOX(PIECE("[2, 3]", "[6, [3, 1]]", "[0, [\"x\", 1]]", "")),
        /* ranks that are not told */
        {MAP(TOP, "7"),
         "w",
         {S2(2, 3), S2(2, 3)},
         "its affine map does not tell of rank 1"},
        {MAP(TOP, "{\"shard_shape\": [2, 3], \"pieces\": 7}"),
         "w",
         {S2(2, 3), S2(2, 3)},
         "its affine map does not tell of rank 1"},
        {AFFINE("{\"logical_shape\": [4, 3], \"ranks\": {\"0\": " TOP
                ", \"2\": " LOW("") "}}"),
         "w",
         {S2(2, 3), S2(2, 3)},
         "its affine map does not tell of rank 1"},
        {AFFINE("{\"logical_shape\": [4, 3], \"ranks\": {\"0\": " TOP "}}"),
         "w",
         {S2(2, 3), S2(2, 3)},
         "its affine map is not of 2 ranks"},
        {AFFINE("{\"logical_shape\": 4, \"ranks\": {\"0\": " TOP
                ", \"1\": " LOW("") "}}"),
         "w",
         {S2(2, 3), S2(2, 3)},
         "its affine map is not of 2 ranks"},
        {AFFINE("{\"logical_shape\": [4294967296, 4294967296], \"ranks\": {\"0\": " TOP
                ", \"1\": " LOW("") "}}"),
         "w",
         {S2(2, 3), S2(2, 3)},
         "its affine map is not of 2 ranks"},
        {MAP(TOP, LOW("")),
         "w",
         {S2(2, 3), S2(2, 4)},
         "rank 1 has another number of elements than its affine map says"},
    };

    (void)state;
    check_cuts(cases, ARRAY_SIZE(cases));
}

/* ---- notes that are none ---- */

static void test_notes(void **state)
{
    static const struct {
        const char *notes;
        int rc;
        const char *why;
    } cases[] = {
        {LISTS(""), 1, NULL},
        {"\"tp_replicated_parameter_patterns\": [\"norm\"]", 0, NULL},
        {"\"tp_replicated_parameter_patterns\": [7]", -EBADMSG,
         "universal_checkpoint_info: tp_replicated_parameter_patterns: a pattern is no "
         "text"},
        {"\"parameter_with_sub_params\": [7]", -EBADMSG,
         "universal_checkpoint_info: parameter_with_sub_params has no patterns"},
        {"\"parameter_with_sub_params\": [{\"patterns\": 7}]", -EBADMSG,
         "universal_checkpoint_info: parameter_with_sub_params has no patterns"},
        {"\"parameter_with_sub_params\": [{\"patterns\": [7]}]", -EBADMSG,
         "universal_checkpoint_info: a pattern is no text"},
        {"\"affine_map\": {\"version\": 2, \"params\": {}}", -ENOTSUP,
         "affine_map is of a version that is not known"},
        {"\"affine_map\": {\"version\": 1}", -EBADMSG, "affine_map has no params"},
        {"\"affine_map\": {\"params\": [7]}", -EBADMSG, "affine_map: it is no dict"},
        {"\"autotp_unsupported_parameter_patterns\": [7]", -EBADMSG,
         "autotp_unsupported_parameter_patterns: it is no dict"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
        CLEANUP(pickle_freep) struct pickle *p = load_notes(cases[i].notes);
        struct pv root = pickle_root(p);
        struct ds_notes notes;
        struct err e = {0};
        int rc = ds_notes_take(a, &root, RANKS, &notes, &e);

        if (rc != cases[i].rc)
            fail_msg("%s: %d, %s", cases[i].notes, rc, e.text);
        if (cases[i].why)
            assert_has(e.text, cases[i].why);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_subs),
        cmocka_unit_test(test_affine),
        cmocka_unit_test(test_notes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
