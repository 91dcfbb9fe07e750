/* SPDX-License-Identifier: MIT */
/* tests/formats/test_flax.c - flax's msgpack files: fixtures, damage, shards that are lost. */
#include "made.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "tests/unit/unit.h"

#define FILE_OF(bytes) bytes, sizeof bytes - 1

/* {"w": float32 [2] of 1, 2} as one byte string per part. */
#define KEY_W "\xa1w"
#define TWO_FLOATS                                                                     \
    "\xc7\x15\x01\x93\x91\x02\xa7"                                                     \
    "float32\xc4\x08\x00\x00\x80\x3f\x00\x00\x00\x40"

#define EIGHT "\1\1\1\1\1\1\1\1"
#define SIXTY_FIVE EIGHT EIGHT EIGHT EIGHT EIGHT EIGHT EIGHT EIGHT "\1"

static void test_steps(void **state)
{
    struct opened o;
    char path[PATH_MAX];

    snprintf(path, sizeof path, "%s/flax_kinds", (const char *)*state);
    open_checkpoint(path, &o);
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 12);
    assert_string_equal(tensor(&o, "params.nibbles")->attributes,
                        "{\"numpy_dtype\": \"int4\"}");
    close_checkpoint(&o);
    snprintf(path, sizeof path, "%s/flax_msgpack", (const char *)*state);
    open_checkpoint(path, &o);
    assert_int_equal(o.info.step, 3);
    close_checkpoint(&o);
    snprintf(path, sizeof path, "%s/flax_chunked", (const char *)*state);
    open_checkpoint(path, &o);
    assert_int_equal(tensor(&o, "params.b")->chunks, 1);
    assert_int_equal(tensor(&o, "params.v")->chunks, 2);
    assert_false(o.info.has_step);
    close_checkpoint(&o);
}

/* What the whole file fails with. */
static void check_refused(const void *data, size_t len, const char *why)
{
    struct made m;
    struct opened o;

    made_begin(&m, "x");
    made_file(&m, "a.msgpack", data, len);
    made_open(&m, &o);
    if (!o.info.error)
        fail_msg("read, it should say %s", why);
    assert_has(o.info.error, why);
    assert_int_equal(o.count, 0);
    close_checkpoint(&o);
    made_end(&m);
}

static void test_refused(void **state)
{
    char deep[3 * 101 + 1];

    (void)state;
    check_refused(FILE_OF("\x81" KEY_W), "cut off");
    check_refused(FILE_OF("\x82" KEY_W TWO_FLOATS), "cut off");
    check_refused(FILE_OF("\x8f" KEY_W), "entries");
    check_refused(FILE_OF("\x81" KEY_W TWO_FLOATS "\xc0"), "behind the end");
    check_refused(FILE_OF("\x82" KEY_W TWO_FLOATS KEY_W TWO_FLOATS), "twice");
    check_refused(FILE_OF("\x82\xa1"
                          "a\x01\x05\x06"),
                  "no text");
    check_refused(FILE_OF("\x81\xa1\xff\x01"), "UTF-8");
    check_refused(FILE_OF("\x81\xa1w\xc1"), "no MessagePack");
    check_refused(FILE_OF("\x81\xa1w\xd4\x01\x05"), "[shape, type, bytes]");
    check_refused(FILE_OF("\x81\xa1w\xc7\x04\x01\x93\xc0\xc0\xc0"), "shape");
    check_refused(FILE_OF("\x81\xa1w\xc7\x06\x01\x93\x91\xff\xa1u\xc0"), "dimension");
    check_refused(FILE_OF("\x93\x01\x02\x03"), "no map");
    for (int i = 0; i < 101; i++)
        memcpy(deep + 3 * i, "\x81\xa1k", 3);
    deep[sizeof deep - 1] = 1;
    check_refused(deep, sizeof deep, "100 deep");
}

/* EasyLM's records of names and bytes, where one of them is not what it writes. */
static void test_stream_refused(void **state)
{
    (void)state;
#define RECORD_W "\x92\x91\xa1w\xc4\x01\x05"
    check_refused(FILE_OF(RECORD_W "\x92\x91\xa1"), "0 are left");
    check_refused(FILE_OF(RECORD_W "\x92\x91\xa1v\xc4\x09\x05"), "1 are left");
    check_refused(FILE_OF(RECORD_W "\x92\x91\xa1v"), "cut off");
    check_refused(FILE_OF(RECORD_W RECORD_W), "twice");
    check_refused(FILE_OF(RECORD_W "\x05"), "no pair");
    check_refused(FILE_OF(RECORD_W "\x92\x90\xc4\x01\x05"), "no list of names");
    check_refused(FILE_OF(RECORD_W "\x92\xa1v\xc4\x01\x05"), "no list of names");
    check_refused(FILE_OF(RECORD_W "\x92\x91\x07\xc4\x01\x05"), "no list of names");
    check_refused(FILE_OF(RECORD_W "\x92\x91\xa1\xff\xc4\x01\x05"), "UTF-8");
    check_refused(FILE_OF(RECORD_W "\x92\x91\xa1\0\xc4\x01\x05"), "NUL");
    check_refused(FILE_OF(RECORD_W "\x92\x91\xa1v\x05"), "no bytes");
    check_refused(FILE_OF(RECORD_W "\x92\x91\xa1v\xc4\x02\x05\x06"),
                  "behind the end of a value");
    check_refused(FILE_OF(RECORD_W "\x92\x91\xa1v\xc4\x00"), "cut off");
    check_refused(FILE_OF(RECORD_W "\x92\x91\xa1v\xc4\x02\x91\xc1"), "no MessagePack");
#undef RECORD_W
}

/* Which files are such streams: two lists of names that are one path, and a milestone. */
static void test_stream(void **state)
{
    static const char file[] = "\x92\x92\xa1"
                               "a\xa1"
                               "b\xc4\x18\xc7\x15\x01\x93\x91\x02\xa7"
                               "float32\xc4\x08\x00\x00\x80\x3f\x00\x00\x00\x40"
                               "\x92\x91\xa3"
                               "a.b\xc4\x18\xc7\x15\x01\x93\x91\x02\xa7"
                               "float32\xc4\x08\x00\x00\x80\x3f\x00\x00\x00\x40"
                               "\x92\x92\xa1"
                               "o\xa1"
                               "p\xc4\x07\x82\xa1x\x01\xa1y\xc0";
    static const float want[] = {1, 2};
    CLEANUP(buf_release) struct buf objects = {0};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "x");
    made_file(&m, "streaming_params_7", file, sizeof file - 1);
    made_open(&m, &o);
    if (o.info.error)
        fail_msg("%s", o.info.error);
    assert_string_equal(o.info.format, "easylm-stream");
    assert_int_equal(o.info.step, 7);
    assert_int_equal(o.count, 2);
    check_floats(&o, "a.b", want, 2);
    check_floats(&o, "a.b:2", want, 2);
    all_objects(&o, &objects);
    assert_string_equal(objects.data, "o.p={\"x\":1,\"y\":null}\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* Bytes that are not as many as shape and type need: that tensor's fault. */
static void test_sizes(void **state)
{
    static const char file[] = "\x83\xa1"
                               "a" TWO_FLOATS "\xa1"
                               "b\xc7\x15\x01\x93\x91\x03\xa7"
                               "float32\xc4\x08"
                               "01234567\xa1"
                               "c\xc7\x12\x01\x93\x91\x02\xa4"
                               "str8\xc4\x08"
                               "01234567";
    static const float want[] = {1, 2};
    CLEANUP(buf_release) struct buf objects = {0};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "x");
    made_file(&m, "a.msgpack", file, sizeof file - 1);
    made_open(&m, &o);
    if (o.info.error)
        fail_msg("%s", o.info.error);
    assert_int_equal(o.count, 2);
    check_floats(&o, "a", want, 2);
    check_fault(&o, "b", "as many bytes");
    all_objects(&o, &objects);
    assert_string_equal(objects.data,
                        "c={\"$type\":\"opaque\",\"class\":\"numpy.ndarray\","
                        "\"dtype\":\"str8\",\"shape\":[2]}\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* {"w": array} with these fields of the array, and what is wrong with them. */
static void test_arrays(void **state)
{
#define ARRAY(len, fields) FILE_OF("\x81" KEY_W "\xc8\x00" len "\x01" fields)
    static const struct {
        const char *data;
        size_t len;
        const char *why;
    } cases[] = {
        {ARRAY("\x04", "\x93\xdc\x00\x41"), "an array of 65 entries, 0 bytes are left"},
        {ARRAY("\x45", "\x93\xdc\x00\x41" SIXTY_FIVE),
         "byte 11: an array of more than 64 dimensions"},
        {ARRAY("\x06", "\x93\x91\x02\x05\xc4\x00"),
         "byte 11: the type of an array is no name"},
        {ARRAY("\x06", "\x93\x91\x02\xa0\xc4\x00"),
         "byte 11: the type of an array is no name"},
        {ARRAY("\x08", "\x93\x91\x02\xa2i\0\xc4\x00"),
         "byte 13: the type of an array is no name"},
        {ARRAY("\x2a", "\x93\x91\x02\xd9\x23"
                       "01234567890123456789012345678901234\xc4\x00"),
         "the type of an array is no name"},
        {ARRAY("\x08", "\x93\x91\x02\xa2i4\x05\x05"),
         "byte 14: the bytes of an array are something else"},
        {ARRAY("\x0a", "\x93\x91\x02\xa2i4\xc4\x00\xc4\x00"),
         "byte 15: something is behind the bytes of an array"},
        {ARRAY("\x06", "\x93\x91\xcf\xff\xff\xff"), "cut off"},
        {ARRAY("\x0e", "\x93\x91\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xa1u\xc0"),
         "a dimension of an array is no number"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        check_refused(cases[i].data, cases[i].len, cases[i].why);
#undef ARRAY
}

/* {"w": {mark: true, "shape": {"0": 3}, "chunks": {...}}} with these chunks. */
static void check_chunks(const char *chunks, size_t len, const char *why)
{
    static const char head[] = "\x81\xa1w\x83\xb9__msgpack_chunked_array__\xc3\xa5"
                               "shape\x81\xa1"
                               "0\x03\xa6"
                               "chunks";
    static const float want[] = {1, 2, 1};
    CLEANUP(buf_release) struct buf file = {0};
    struct made m;
    struct opened o;

    buf_add(&file, head, sizeof head - 1);
    buf_add(&file, chunks, len);
    made_begin(&m, "x");
    made_file(&m, "a.msgpack", file.data, file.len);
    made_open(&m, &o);
    if (!why)
        check_floats(&o, "w", want, 3);
    else if (o.info.error)
        assert_has(o.info.error, why);
    else
        check_fault(&o, "w", why);
    close_checkpoint(&o);
    made_end(&m);
}

#define ONE_FLOAT                                                                      \
    "\xc7\x11\x01\x93\x91\x01\xa7"                                                     \
    "float32\xc4\x04\x00\x00\x80\x3f"
#define ONE_INT                                                                        \
    "\xc7\x0f\x01\x93\x91\x01\xa5"                                                     \
    "int32\xc4\x04\x00\x00\x80\x3f"

static void test_chunks(void **state)
{
    (void)state;
    check_chunks(FILE_OF("\x82\xa1"
                         "0" TWO_FLOATS "\xa1"
                         "1" ONE_FLOAT),
                 NULL);
    check_chunks(FILE_OF("\x82\xa1" /* as JAX sorts them from the tenth on */
                         "1" ONE_FLOAT "\xa1"
                         "0" TWO_FLOATS),
                 NULL);
    check_chunks(FILE_OF("\x81\xa1"
                         "0" TWO_FLOATS),
                 "as many bytes");
    check_chunks(FILE_OF("\x82\xa1"
                         "0" TWO_FLOATS "\xa1"
                         "1" ONE_INT),
                 "different types");
    check_chunks(FILE_OF("\x82\xa1"
                         "0" TWO_FLOATS "\xa1"
                         "0" ONE_FLOAT),
                 "twice");
    check_chunks(FILE_OF("\x82\xa1"
                         "0" TWO_FLOATS "\xa1"
                         "2" ONE_FLOAT),
                 "out of place");
    check_chunks(FILE_OF("\x80"), "without chunks");
}

/* {"w": {mark: value, entries}}: maps that only look like flax's chunked arrays. */
static void test_chunked(void **state)
{
#define CHUNKED(n, value, entries)                                                     \
    FILE_OF("\x81" KEY_W n "\xb9__msgpack_chunked_array__" value entries)
#define SHAPE                                                                          \
    "\xa5shape\x81\xa1"                                                                \
    "0\x02"
#define CHUNKS                                                                         \
    "\xa6"                                                                             \
    "chunks\x81\xa1"                                                                   \
    "0" TWO_FLOATS
    static const struct {
        const char *data;
        size_t len;
        const char *why; /* NULL: it is sound */
    } cases[] = {
        {CHUNKED("\x83", "\xc3", SHAPE CHUNKS), NULL},
        {CHUNKED("\x83", "\xc3", CHUNKS SHAPE), NULL},
        {CHUNKED("\x83", "\x01", SHAPE CHUNKS),
         "a chunked array that flax does not write"},
        {CHUNKED("\x82", "\xc3", SHAPE), "a chunked array that flax does not write"},
        {CHUNKED("\x84", "\xc3", SHAPE CHUNKS "\xa1x\x01"),
         "a chunked array that flax does not write"},
        {CHUNKED("\x83", "\xc3", SHAPE SHAPE),
         "a chunked array has an entry that flax does not write"},
        {CHUNKED("\x83", "\xc3", CHUNKS CHUNKS),
         "without chunks, or with two lists of them"},
        {CHUNKED("\x83", "\xc3", SHAPE "\xa1x\x01"),
         "a chunked array has an entry that flax does not write"},
        {CHUNKED("\x83", "\xc3", SHAPE "\x07\x01"),
         "a chunked array has an entry that flax does not write"},
        {CHUNKED("\x83", "\xc3", SHAPE "\xa0\x01"),
         "a chunked array has an entry that flax does not write"},
        {CHUNKED("\x83", "\xc3",
                 SHAPE "\x96"
                       "chunks\x81\xa1"
                       "0" TWO_FLOATS), /* six numbers */
         "a chunked array has an entry that flax does not write"},
        {CHUNKED("\x83", "\xc3",
                 SHAPE "\xa6"
                       "chunks\x91" TWO_FLOATS),
         "no map of positions"},
        {CHUNKED("\x83", "\xc3", "\xa5shape\x91\x02" CHUNKS), "no map of positions"},
        {CHUNKED("\x83", "\xc3",
                 SHAPE "\xa6"
                       "chunks\x81\xa1"
                       "0\xc4\x00"),
         "a chunk of an array is no array"},
        {CHUNKED("\x83", "\xc3",
                 SHAPE "\xa6"
                       "chunks\x81\xa2"
                       "00" TWO_FLOATS),
         "out of place"},
        {CHUNKED("\x83", "\xc3",
                 "\xa5shape\x82\xa1"
                 "0\x02\xa1"
                 "0\x02" CHUNKS),
         "a dimension of a chunked array is missing"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        static const float want[] = {1, 2};
        struct made m;
        struct opened o;

        if (cases[i].why) {
            check_refused(cases[i].data, cases[i].len, cases[i].why);
            continue;
        }
        made_begin(&m, "x");
        made_file(&m, "a.msgpack", cases[i].data, cases[i].len);
        made_open(&m, &o);
        check_floats(&o, "w", want, 2);
        close_checkpoint(&o);
        made_end(&m);
    }
#undef CHUNKED
#undef SHAPE
#undef CHUNKS
}

static void test_lost_shard(void **state)
{
    static const char *const files[] = {"flax_model-00001-of-00002.msgpack",
                                        "flax_model.msgpack.index.json"};
    char path[PATH_MAX];
    struct made m;
    struct opened o;

    made_begin(&m, "x");
    for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
        snprintf(path, sizeof path, "%s/flax_sharded/%s", (const char *)*state,
                 files[i]);
        made_copy(&m, files[i], path);
    }
    made_open(&m, &o);
    assert_int_equal(o.count, 3);
    assert_null(tensor(&o, "model.embed.embedding")->fault);
    check_fault(&o, "model.norm.scale", "flax_model-00002-of-00002.msgpack");
    check_fault(&o, "lm_head.kernel", "flax_model-00002-of-00002.msgpack");
    check_warnings(&o, "damaged-file: flax_model-00002-of-00002.msgpack: "
                       "flax_model-00002-of-00002.msgpack is missing\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* Arrays beside the file: one is lost, one has a path that leads out. */
static void test_elsewhere(void **state)
{
    static const char file[] = "\x84\xa1"
                               "b\xbf//GDAPlaceholder:../../etc/pass\xa1"
                               "k\x82\xb2//GDAPlaceholder:x\x03\xa1"
                               "w\xb4//GDAPlaceholder:p/w\xa1"
                               "p\x82\xa1"
                               "n\x03\xa1"
                               "w\xb4//GDAPlaceholder:p/w\xa1"
                               "q\x81\xa1"
                               "w\xb4//GDAPlaceholder:q/w";
    static const char zarray[] =
        "{\"zarr_format\":2,\"shape\":[2],\"chunks\":[2],\"dtype\":\"<f4\","
        "\"compressor\":null,\"fill_value\":null,\"filters\":null,\"order\":\"C\"}";
    static const float two[2] = {1, 2};
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "x");
    made_file(&m, "checkpoint_5", FILE_OF(file));
    made_text(&m, "checkpoint_5_gda/p/w/.zarray", zarray);
    made_file(&m, "checkpoint_5_gda/p/w/0", two, sizeof two);
    made_open(&m, &o);
    if (o.info.error)
        fail_msg("%s", o.info.error);
    assert_int_equal(o.count, 4);
    check_floats(&o, "p.w", two, 2);
    check_floats(&o, "k.w", two, 2);
    check_fault(&o, "b", "the path of its directory is none: ../../etc");
    check_fault(&o, "q.w", ".zarray");
    check_warnings(&o, "");
    all_objects(&o, &text);
    assert_string_equal(
        text.data,
        "k={\"//GDAPlaceholder:x\":3,\"w\":{\"$type\":\"tensor\",\"key\":\"k.w\"}}\n"
        "p={\"n\":3,\"w\":{\"$type\":\"tensor\",\"key\":\"p.w\"}}\n");
    close_checkpoint(&o);
    made_end(&m);
}

/* A prefix of a trainer's own, a step that is a fraction, and files that only look like it. */
static void test_file_names(void **state)
{
    static const char file[] = "\x81" KEY_W TWO_FLOATS, other[] = "\x81" KEY_W "\xa1x";
    static const float two[2] = {1, 2};
    struct made m;
    struct opened o;

    (void)state;
    for (int i = 0; i < 2; i++) {
        made_begin(&m, "x");
        made_file(&m, i ? "checkpoint_0.5" : "model_20", FILE_OF(file));
        made_text(&m, "vocab_3", "[1]");
        made_file(&m, "cache_4", FILE_OF(other));
        made_open(&m, &o);
        check_floats(&o, "w", two, 2);
        assert_int_equal(o.info.has_step, !i);
        assert_int_equal(o.info.step, i ? 0 : 20);
        close_checkpoint(&o);
        made_end(&m);
    }
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        cmocka_unit_test(test_steps),          cmocka_unit_test(test_refused),
        cmocka_unit_test(test_sizes),          cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_lost_shard),     cmocka_unit_test(test_arrays),
        cmocka_unit_test(test_chunked),        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_stream_refused), cmocka_unit_test(test_elsewhere),
        cmocka_unit_test(test_file_names),
    };

    return run_with_fixtures("flax", argc, argv, others, ARRAY_SIZE(others));
}
