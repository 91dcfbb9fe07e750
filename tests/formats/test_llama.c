/* SPDX-License-Identifier: MIT */
/* tests/formats/test_llama.c - Meta's consolidated.NN.pth merged, and damaged ones. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>

#include "base/err.h"
#include "gpu/reader.h"
#include "index/formats/format.h"
#include "index/formats/llama/llama_rules.h"
#include "made.h"
#include "remote/open_files.h"

static void test_kinds(void **state)
{
    static const struct {
        const char *name;
        enum llama_kind kind;
    } cases[] = {
        {"tok_embeddings.weight", LLAMA_EMBEDDING},
        {"layers.31.attention.wq.weight", LLAMA_QUERY},
        {"layers.31.attention.wk.weight", LLAMA_KEY_VALUE},
        {"layers.31.attention.wv.weight", LLAMA_KEY_VALUE},
        {"layers.31.attention.wo.weight", LLAMA_OUT},
        {"layers.31.feed_forward.w1.weight", LLAMA_ROWS},
        {"layers.31.feed_forward.w2.weight", LLAMA_COLUMNS},
        {"layers.31.feed_forward.w3.weight", LLAMA_ROWS},
        {"layers.31.ffn_norm.weight", LLAMA_SAME},
        {"output.weight", LLAMA_ROWS},
        {"norm.weight", LLAMA_SAME},
        {"rope.freqs", LLAMA_SAME},
        {"layers.0.attention.wqkv.weight", LLAMA_UNKNOWN},
        {"layers.0.my_output.weight", LLAMA_UNKNOWN},
        {"layers.0.feed_forward.experts.moe_w_in_eD_F", LLAMA_UNKNOWN},
        {"weight", LLAMA_UNKNOWN},
        {"", LLAMA_UNKNOWN},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        if (llama_kind(cases[i].name, strlen(cases[i].name)) != cases[i].kind)
            fail_msg("%s: not %d", cases[i].name, cases[i].kind);
}

static void test_params(void **state)
{
    static const char text[] =
        "{\"dim\": 30, \"n_heads\": 4, \"n_kv_heads\": 2, \"vocab_size\": -1}";
    static const char own[] = "{\"dim\": 8, \"n_heads\": 2, \"head_dim\": 16}";
    struct llama_params p;
    struct err e = {0};

    (void)state;
    assert_ok(llama_params_parse(text, strlen(text), &p, &e), &e);
    assert_int_equal(p.head_dim, 7);
    assert_int_equal(llama_whole(LLAMA_QUERY, &p), 28);
    assert_int_equal(llama_whole(LLAMA_KEY_VALUE, &p), 14);
    assert_int_equal(llama_whole(LLAMA_ROWS, &p), 0);
    assert_ok(llama_params_parse(own, strlen(own), &p, &e), &e);
    assert_int_equal(llama_whole(LLAMA_OUT, &p), 32);
    assert_int_equal(llama_whole(LLAMA_KEY_VALUE, &p), 32);
    assert_int_equal(llama_params_parse("[1]", 3, &p, &e), -EBADMSG);
    assert_int_equal(llama_params_parse("{", 1, &p, &e), -EBADMSG);
}

/* params.json tells how many there should be, also where the last ones are lost. */
static void test_missing(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "llama");
    made_from(&m, "params.json", state, "llama3_mp4_gqa/params.json");
    made_from(&m, "consolidated.00.pth", state, "llama3_mp4_gqa/consolidated.00.pth");
    made_from(&m, "consolidated.01.pth", state, "llama3_mp4_gqa/consolidated.01.pth");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.count, 21);
    assert_int_equal(o.info.faults, 16);
    check_fault(&o, "output.weight", "consolidated.02.pth: it is missing");
    assert_int_equal(tensor(&o, "output.weight")->shape.dim[0], 52);
    check_warnings(&o, "missing-file: consolidated.02.pth is missing\n"
                       "missing-file: consolidated.03.pth is missing\n");
    check_readable_of(&o, state, "llama3_mp4_gqa");
    close_checkpoint(&o);
    made_end(&m);
}

static void test_damaged(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "llama");
    made_from(&m, "params.json", state, "llama_mp2/params.json");
    made_text(&m, "consolidated.00.pth", "no zip");
    made_from(&m, "consolidated.01.pth", state, "llama_mp2/consolidated.01.pth");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_int_equal(o.count, 22);
    check_fault(&o, "output.weight", "consolidated.00.pth: ");
    check_readable_of(&o, state, "llama_mp2");
    close_checkpoint(&o);
    made_end(&m);
}

/* Ranks of an older model of more: what is cut is shown as the files have it. */
static void test_many(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "llama");
    made_from(&m, "params.json", state, "llama_mp2/params.json");
    made_from(&m, "consolidated.00.pth", state, "llama_mp2/consolidated.00.pth");
    made_from(&m, "consolidated.01.pth", state, "llama_mp2/consolidated.01.pth");
    made_from(&m, "consolidated.02.pth", state, "llama_mp2/consolidated.00.pth");
    made_open(&m, &o);
    assert_null(o.info.error);
    for (size_t i = 0; i < o.count; i++)
        assert_string_not_equal(o.t[i].key, "output.weight");
    assert_null(tensor(&o, "consolidated.01.pth:output.weight")->fault);
    assert_null(tensor(&o, "norm.weight")->fault);
    assert_int_equal(o.info.warnings, 1);
    close_checkpoint(&o);
    made_end(&m);
}

/* Pieces of two models: none is served. */
static void test_mixed(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "llama");
    made_text(&m, "params.json", "{\"dim\": 24, \"n_heads\"");
    made_from(&m, "consolidated.00.pth", state, "llama_mp2/consolidated.00.pth");
    made_from(&m, "consolidated.01.pth", state, "llama3_mp4_gqa/consolidated.01.pth");
    made_open(&m, &o);
    assert_null(o.info.error);
    check_fault(&o, "output.weight", "do not fit together");
    check_fault(&o, "norm.weight", "copies of different types or shapes");
    check_fault(&o, "layers.0.attention.wq.weight", "do not fit together");
    /* What every rank has a copy of is there as long as one has it. */
    assert_null(tensor(&o, "rope.freqs")->fault);
    close_checkpoint(&o);
    made_end(&m);
}

static void test_single(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "llama");
    made_text(&m, "params.json", "{\"dim\": 12, \"n_heads\": 1, \"n_layers\": 2}");
    made_from(&m, "consolidated.00.pth", state, "llama_mp2/consolidated.00.pth");
    made_open(&m, &o);
    assert_null(o.info.error);
    assert_string_equal(o.info.format, "llama-consolidated");
    assert_string_equal(o.info.topology,
                        "{\"files\": 1, \"tensor_parallel\": 1, \"layers\": 2}");
    assert_int_equal(o.count, 22);
    assert_int_equal(o.info.faults, 0);
    assert_int_equal(tensor(&o, "output.weight")->shape.dim[0], 25);
    close_checkpoint(&o);
    made_end(&m);
}

/* What `verify --deep` asks of chunk 0 of a tensor. */
static int compare(struct opened *o, const char *key, struct err *e)
{
    struct reader_env env = {
        .catalog = o->w.catalog, .decoded = o->w.decoded, .codec = format_codec};
    CLEANUP(reader_closep) struct reader *r = NULL;
    int rc = open_files_new(o->w.store, 8, &env.files, e);

    if (rc == 0)
        rc = reader_open_tensor(&env, o->info.id, tensor(o, key)->ord, false, &r, e);
    if (rc == 0)
        rc = reader_compare(r, 0, e);
    reader_close(steal(&r));
    open_files_free(env.files);
    return rc;
}

/* Where the copy of the next rank begins: the list is "FILE OFFSET ...". */
static uint64_t second_copy(const struct opened *o, const char *key)
{
    unsigned file;
    uint64_t offset;

    assert_int_equal(sscanf(tensor(o, key)->codec_key, "%u %" SCNu64, &file, &offset),
                     2);
    return offset;
}

/* A norm that differs in one byte is the first rank's, and told. */
static void test_copies(void **state)
{
    static const char key[] = "layers.0.attention_norm.weight";
    char path[PATH_MAX], name[64], byte = 0x55;
    struct made m;
    struct opened o;
    struct err e = {0};
    FILE *f;

    made_begin(&m, "llama");
    for (unsigned i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "hand_no_params_mp3/consolidated.0%u.pth", i);
        made_from(&m, strchr(name, '/') + 1, state, name);
    }
    made_open(&m, &o);
    assert_int_equal(compare(&o, key, &e), 1);
    assert_int_equal(compare(&o, "norm.weight", &e), 1);
    assert_int_equal(compare(&o, "tok_embeddings.weight", &e), 0);
    snprintf(path, sizeof path, "%s/consolidated.01.pth", m.dir);
    f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)second_copy(&o, key) + 5, SEEK_SET), 0);
    assert_int_equal(fwrite(&byte, 1, 1, f), 1);
    fclose(f);
    close_checkpoint(&o);
    made_open(&m, &o);
    assert_int_equal(compare(&o, key, &e), -EBADMSG);
    assert_string_equal(e.text, "the copies in consolidated.00.pth and "
                                "consolidated.01.pth differ from byte 5 on");
    check_readable_of(&o, state, "hand_no_params_mp3");
    close_checkpoint(&o);
    made_end(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),   cmocka_unit_test(test_params),
        cmocka_unit_test(test_missing), cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_many),    cmocka_unit_test(test_mixed),
        cmocka_unit_test(test_single),  cmocka_unit_test(test_copies),
    };

    return run_with_fixtures("llama", argc, argv, tests, ARRAY_SIZE(tests));
}
