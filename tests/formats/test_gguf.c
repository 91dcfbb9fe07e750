/* SPDX-License-Identifier: MIT */
/* tests/formats/test_gguf.c - GGUF: fixtures, attributes of blocks, sets of files, damage. */
#include "made.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/endian.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "tests/unit/unit.h"

extern const struct format_driver format_gguf;

static void open_fixture(void **state, const char *name, struct opened *o)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/%s", (const char *)*state, name);
    open_checkpoint(path, o);
}

static void test_about(void **state)
{
    struct opened o;

    open_fixture(state, "gguf_plain", &o);
    assert_string_equal(tensor(&o, "q8_0")->attributes,
                        "{\"gguf_type\": \"Q8_0\", \"gguf_block_elements\": 32, "
                        "\"gguf_block_bytes\": 34, \"gguf_shape\": \"[5, 64]\"}");
    assert_null(tensor(&o, "one")->attributes);
    assert_string_equal(o.info.topology,
                        "{\"files\": 1, \"gguf_version\": 3, \"architecture\": "
                        "\"llama\", \"quantised_tensors\": 2}");
    close_checkpoint(&o);
    open_fixture(state, "gguf_big_endian", &o);
    assert_has(tensor(&o, "q")->attributes, "\"gguf_big_endian\": true");
    assert_has(o.info.topology, "\"byte_order\": \"big\"");
    close_checkpoint(&o);
    open_fixture(state, "gguf_split", &o);
    assert_string_equal(
        o.info.topology,
        "{\"files\": 3, \"gguf_version\": 3, \"architecture\": \"llama\"}");
    close_checkpoint(&o);
}

static void copy_split(void **state, const struct made *m, int k, const char *name)
{
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/gguf_split/m-%05d-of-00003.gguf",
             (const char *)*state, k);
    made_copy(m, name, path);
}

static void test_sets(void **state)
{
    struct made m;
    struct opened o;

    made_begin(&m, "lost");
    copy_split(state, &m, 1, "m-00001-of-00003.gguf");
    copy_split(state, &m, 3, "m-00003-of-00003.gguf");
    made_open(&m, &o);
    assert_int_equal(o.count, 2);
    assert_int_equal(o.info.faults, 0);
    check_warnings(&o, "missing-file: 1 of the 3 files that m-00001-of-00003.gguf "
                       "counts are missing\nmissing-tensors: m-00001-of-00003.gguf "
                       "says that the model has 4 tensors, the files that are there "
                       "have 2\n");
    close_checkpoint(&o);
    made_end(&m);

    made_begin(&m, "mixed");
    copy_split(state, &m, 1, "m-00001-of-00003.gguf");
    copy_split(state, &m, 2, "m-00003-of-00003.gguf");
    made_open(&m, &o);
    assert_non_null(o.info.error);
    assert_has(o.info.error,
               "m-00003-of-00003.gguf says that it is file 2 of 3 of a model");
    close_checkpoint(&o);
    made_end(&m);

    made_begin(&m, "alone"); /* a name that does not tell of the others */
    copy_split(state, &m, 2, "part.gguf");
    made_open(&m, &o);
    assert_int_equal(o.count, 2);
    check_warnings(&o,
                   "missing-file: part.gguf says that it is file 2 of 3 of a model, "
                   "by a name that does not tell the others\n");
    close_checkpoint(&o);
    made_end(&m);
}

static void copy_aligned(void **state, const struct made *m, int k)
{
    char path[PATH_MAX], name[32];

    snprintf(name, sizeof name, "m-%05d-of-00003.gguf", k);
    snprintf(path, sizeof path, "%s/gguf_split_aligned/%s", (const char *)*state, name);
    made_copy(m, name, path);
}

/* A part that leaves its alignment to the first file: without that, or cut, nobody knows. */
static void test_alignment_untold(void **state)
{
    struct made m;
    struct opened o;
    char path[PATH_MAX];

    made_begin(&m, "lost");
    copy_aligned(state, &m, 2);
    copy_aligned(state, &m, 3);
    made_open(&m, &o);
    assert_has(o.info.error, "m-00002-of-00003.gguf does not tell its alignment");
    assert_has(o.info.error, "the first file of the set, which tells it, is missing");
    close_checkpoint(&o);
    copy_aligned(state, &m, 1);
    made_open(&m, &o);
    assert_null(o.info.error);
    close_checkpoint(&o);
    snprintf(path, sizeof path, "%s/m-00003-of-00003.gguf", m.dir);
    assert_int_equal(truncate(path, 1000), 0);
    made_open(&m, &o);
    assert_has(o.info.error, "m-00003-of-00003.gguf does not tell its alignment");
    assert_has(o.info.error, "nor as the first file of the set says");
    close_checkpoint(&o);
    made_end(&m);
}

/* A set beside another model: each by its first file; others are no checkpoints. */
static void test_several(void **state)
{
    struct made m;
    struct world w;
    struct listing *l;
    struct place p;
    struct err e = {0};

    made_begin(&m, "several");
    for (int k = 1; k <= 3; k++) {
        char name[64];

        snprintf(name, sizeof name, "m-%05d-of-00003.gguf", k);
        copy_split(state, &m, k, name);
    }
    copy_split(state, &m, 1, "mmproj.gguf");
    assert_ok(world_open(m.dir, &w, &e), &e);
    assert_ok(w.store->ops->list(w.store, "", &l, &e), &e);
    assert_ok(place_of(l, NULL, &p, &e), &e);
    assert_int_equal(p.kind, PLACE_FILES);
    assert_int_equal(p.nfiles, 2);
    assert_string_equal(p.files[0].name, "m-00001-of-00003.gguf");
    assert_string_equal(p.files[1].name, "mmproj.gguf");
    place_release(&p);
    listing_free(l);
    world_close(&w);
    made_end(&m);
}

static void put_text(struct buf *b, const char *text)
{
    unsigned char len[8];

    put_le64(len, strlen(text));
    buf_add(b, len, sizeof len);
    buf_adds(b, text);
}

static void put_number(struct buf *b, size_t size, uint64_t v)
{
    unsigned char bytes[8];

    put_le64(bytes, v);
    buf_add(b, bytes, size);
}

/* A vector of `n` elements. */
static void put_vector(struct buf *b, const char *name, uint64_t n, uint64_t type,
                       uint64_t offset)
{
    put_text(b, name);
    put_number(b, 4, 1);
    put_number(b, 8, n);
    put_number(b, 4, type);
    put_number(b, 8, offset);
}

/* Tensors that share bytes; one that ends past the end; types that are gone. */
static void test_faults(void **state)
{
    CLEANUP(buf_release) struct buf b = {0};
    static const float want[] = {0, 0, 0, 0};
    struct made m;
    struct opened o;

    (void)state;
    buf_adds(&b, "GGUF");
    put_number(&b, 4, 3);
    put_number(&b, 8, 6);
    put_number(&b, 8, 0);
    put_vector(&b, "alone", 4, 0, 0);
    put_vector(&b, "first", 16, 0, 32);
    put_vector(&b, "second", 4, 0, 64);
    put_vector(&b, "past", 1 << 20, 0, 96);
    put_vector(&b, "gone", 32, 4, 128);
    put_vector(&b, "wide", 8, 0, UINT64_MAX);
    while (b.len % 32)
        buf_addc(&b, '\0');
    for (int i = 0; i < 256; i++)
        buf_addc(&b, '\0');
    made_begin(&m, "x");
    made_file(&m, "a.gguf", b.data, b.len);
    made_open(&m, &o);
    if (o.info.error)
        fail_msg("%s", o.info.error);
    assert_int_equal(o.count, 6);
    check_floats(&o, "alone", want, 4);
    check_fault(&o, "first", "its bytes are also those of second");
    check_fault(&o, "second", "its bytes are also those of first");
    check_fault(&o, "past", "ends at byte");
    check_fault(&o, "gone", "Q4_2");
    check_fault(&o, "wide", "past byte 2^64: offset 18446744073709551615");
    close_checkpoint(&o);
    made_end(&m);
}

/* Q2_0 has two sizes: it is no tensor, and takes none of the bytes of the next one. */
static void test_two_sizes(void **state)
{
    CLEANUP(buf_release) struct buf b = {0};
    const struct tensor_info *t;
    struct made m;
    struct opened o;

    (void)state;
    buf_adds(&b, "GGUF");
    put_number(&b, 4, 3);
    put_number(&b, 8, 2);
    put_number(&b, 8, 0);
    put_vector(&b, "w", 2048, 42, 0);
    put_vector(&b, "next", 4, 0, 544); /* 16 blocks of 34 bytes */
    while (b.len % 32)
        buf_addc(&b, '\0');
    for (int i = 0; i < 560; i++)
        buf_addc(&b, (char)i);
    made_begin(&m, "x");
    made_file(&m, "a.gguf", b.data, b.len);
    made_open(&m, &o);
    t = tensor(&o, "w");
    assert_has(t->fault, "34 for 128");
    assert_null(tensor(&o, "next")->fault);
    close_checkpoint(&o);
    made_end(&m);
}

/* One name must not stand for the bytes of two tensors. */
static void test_doubled_name(void **state)
{
    CLEANUP(buf_release) struct buf b = {0};
    struct made m;
    struct opened o;

    (void)state;
    buf_adds(&b, "GGUF");
    put_number(&b, 4, 3);
    put_number(&b, 8, 2);
    put_number(&b, 8, 0);
    put_vector(&b, "w", 4, 0, 0);
    put_vector(&b, "w", 4, 0, 32);
    while (b.len % 32)
        buf_addc(&b, '\0');
    for (int i = 0; i < 64; i++)
        buf_addc(&b, (char)i);
    made_begin(&m, "x");
    made_file(&m, "a.gguf", b.data, b.len);
    made_open(&m, &o);
    assert_non_null(o.info.error);
    assert_has(o.info.error, "tensor w is there twice");
    assert_int_equal(o.count, 0);
    close_checkpoint(&o);
    made_end(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        cmocka_unit_test(test_about),
        cmocka_unit_test(test_sets),
        cmocka_unit_test(test_alignment_untold),
        cmocka_unit_test(test_several),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_two_sizes),
        cmocka_unit_test(test_doubled_name),
    };

    return run_with_fixtures("gguf", argc, argv, others, ARRAY_SIZE(others));
}
