/* SPDX-License-Identifier: MIT */
/* tests/formats/test_pt2.c - weights of programs, and configurations that lie about them. */
#include "edited.h"

#include <stdio.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "read_tensor.h"
#include "tests/unit/unit.h"
#include "tests/unit/zip_build.h"

extern const struct format_driver format_pt2;

static int bid_of(const char *name, const char *head)
{
    struct entry_stat st = {.kind = ENTRY_FILE, .mode = 0644, .id.size = strlen(head)};
    struct listing *l;
    struct err e = {0};
    struct bid b;

    assert_ok(listing_new(NULL, "run", &l, &e), &e);
    assert_ok(listing_add(l, name, &st, head, strlen(head), &e), &e);
    listing_sort(l);
    format_pt2.bid_file(l, name, &b);
    listing_free(l);
    return b.score;
}

static void test_bids(void **state)
{
    (void)state;
    assert_int_equal(bid_of("m.pt2", "PK\3\4"), 52);
    assert_int_equal(bid_of("m.pt2", "PK\5\6"), 0);
    assert_int_equal(bid_of("m.pt2", "PK"), 0);
    assert_int_equal(bid_of("m.pt", "PK\3\4"), 0);
    assert_int_equal(bid_of(".pt2", "PK\3\4"), 0);
}

#define NOW "torch_2.15.0"
#define FILE_NAME "m.pt2"

/* The first tensor of the configuration is t, of weight_0: 3 x 2 by strides 1 and 3. */
static const struct edited rows[] = {
    {NOW, FILE_NAME, EDIT("pt2", "pt2"), EDITED_SOUND, "", NULL, NULL},
    {NOW, FILE_NAME, EDIT("pt2", "pt3"), NULL, "its archive_format is not \"pt2\"",
     NULL, NULL},
    {NOW, FILE_NAME, EDIT("little", "big"), NULL, "its byteorder is not \"little\"",
     NULL, NULL},
    {NOW, FILE_NAME, EDIT("{\"config\"", "{\"confug\""), NULL,
     "m/data/weights/model_weights_config.json", NULL, NULL},
    {NOW, FILE_NAME, EDIT("{\"config\"", "[\"config\""), NULL,
     "m/data/weights/model_weights_config.json", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"weight_0\"", "\"weight_9\""), "t",
     "weight_9 is not in the archive", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"weight_0\"", "\"../../archive_format\""), "t",
     "is not in the archive", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"weight_0\"", "\"weight_3\""), "t",
     "its elements reach past the 16 bytes that were saved", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"path_name\"", "\"path-name\""), "t",
     "its member is not told", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"use_pickle\": false", "\"use_pickle\": true"), "t",
     "it is a subclass of Tensor, pickled", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"dtype\": 7", "\"dtype\": 8"), "t",
     "its elements reach past the 24 bytes that were saved", NULL, NULL},
    /* The second of two that share a member. */
    {NOW, FILE_NAME, EDIT_AT("\"dtype\": 7", "\"dtype\": 6", 4), "b.weight",
     "it is F16, and m/data/weights/weight_2 is of another type", NULL, NULL},
    {NOW, FILE_NAME, EDIT_AT("\"dtype\": 7", "\"dtype\": 8", 6), "keep",
     "the 20 bytes that were saved are no whole F64", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"dtype\": 7", "\"dtype\": 14"), "t",
     "its element type is number 14", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"dtype\": 7", "\"dtype\": 99999"), "t",
     "its element type is number 99999", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"dtype\": 7", "\"dtype\": \"7\""), "t",
     "its type or sizes are not told", NULL, NULL},
    {NOW, FILE_NAME, EDIT("{\"as_int\": 3}", "{\"as_expr\": 3}"), "t",
     "its type or sizes are not told", NULL, NULL},
    {NOW, FILE_NAME, EDIT("{\"as_int\": 3}", "{\"as_int\": 4}"), "t",
     "its elements reach past the 24 bytes that were saved", NULL, NULL},
    {NOW, FILE_NAME, EDIT("{\"as_int\": 3}", "{\"as_int\": 4503599627370496}"), "t",
     "its elements reach past", NULL, NULL},
    {NOW, FILE_NAME,
     EDIT("{\"as_int\": 3}, {\"as_int\": 2}",
          "{\"as_int\": 4503599627370496}, {\"as_int\": 4503599627370496}"),
     "t", "more than 2^63 elements", NULL, NULL},
    {NOW, FILE_NAME, EDIT("{\"as_int\": 1}, {\"as_int\": 3}", "{\"as_int\": 3}"), "t",
     "its strides or its offset are not told", NULL, NULL},
    {NOW, FILE_NAME,
     EDIT("{\"as_int\": 1}, {\"as_int\": 3}", "{\"as_int\": 1}, {\"as_int\": -3}"), "t",
     "its strides or its offset are not told", NULL, NULL},
    {NOW, FILE_NAME,
     EDIT("{\"as_int\": 1}, {\"as_int\": 3}",
          "{\"as_int\": 1}, {\"as_int\": 9007199254740991}"),
     "t", "its elements reach past", NULL, NULL},
    {NOW, FILE_NAME,
     EDIT("\"storage_offset\": {\"as_int\": 0}", "\"storage_offset\": {\"as_int\": 1}"),
     "t", "its elements reach past", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"storage_offset\"", "\"storage-offset\""), "t",
     "its strides or its offset are not told", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"layout\": 7", "\"layout\": 1"), "t",
     "its elements do not lie in strides", NULL, NULL},
    {NOW, FILE_NAME, EDIT("\"tensor_meta\": {", "\"tensor_meta\": 1, \"x\": {"), "t",
     "its type or sizes are not told", NULL, NULL},
    /* All of its storage: that is the same wherever it was. A part of one is not. */
    {NOW, FILE_NAME, EDIT("\"type\": \"cpu\"", "\"type\": \"cuda\""), EDITED_SOUND, "",
     NULL, NULL},
    {NOW, FILE_NAME, EDIT_AT("\"type\": \"cpu\"", "\"type\": \"cuda\"", 1), "off",
     "it was a part of a storage on a device", NULL, NULL},
};

static void test_edited(void **state)
{
    check_edited(*state, rows, ARRAY_SIZE(rows));
}

/* ---- archives of other kinds ---- */

static void refused(const struct made *m, const char *why)
{
    struct opened o;

    open_checkpoint(m->dir, &o);
    assert_non_null(o.info.error);
    assert_has(o.info.error, why);
    assert_int_equal(o.count, 0);
    close_checkpoint(&o);
}

static void put_zip(const struct made *m, const struct zip_member *member, size_t n)
{
    struct zip_builder z = {0};

    for (size_t i = 0; i < n; i++)
        zb_add(&z, &member[i]);
    zb_finish(&z, false, false, "");
    made_file(m, FILE_NAME, z.out.data, z.out.len);
    zb_release(&z);
}

static void test_other_archives(void **state)
{
    static const struct zip_member foreign[] = {
        {.name = "word/document.xml", .data = "<a/>", .len = 4}};
    static const struct zip_member compiled[] = {
        {.name = "m/archive_format", .data = "pt2", .len = 3},
        {.name = "m/data/aotinductor/model/c.so", .data = "ELF", .len = 3}};
    static const struct zip_member bare[] = {
        {.name = "m/archive_format", .data = "pt2", .len = 3},
        {.name = "m/models/model.json", .data = "{}", .len = 2}};
    static const struct zip_member half[] = {
        {.name = "serialized_exported_program.json", .data = "{}", .len = 2},
        {.name = "serialized_constants.pt", .data = "x", .len = 1}};
    struct made m;

    (void)state;
    made_begin(&m, "pt2");
    put_zip(&m, foreign, ARRAY_SIZE(foreign));
    refused(&m, "a zip archive, but none of torch.export.save");
    put_zip(&m, compiled, ARRAY_SIZE(compiled));
    refused(&m, "the archive has no exported program");
    put_zip(&m, bare, ARRAY_SIZE(bare));
    refused(&m, "data/weights/model_weights_config.json is not in the archive");
    put_zip(&m, half, ARRAY_SIZE(half));
    refused(&m, "serialized_exported_program.json without serialized_state_dict.pt");
    made_end(&m);
}

#define TENSOR(path)                                                                   \
    "{\"path_name\":\"" path                                                           \
    "\",\"is_param\":true,\"use_pickle\":false,\"tensor_meta\":"                       \
    "{\"dtype\":1,\"sizes\":[{\"as_int\":2}],\"strides\":[{\"as_int\":1}],"            \
    "\"storage_offset\":{\"as_int\":1},\"layout\":7,\"device\":{\"type\":\"cpu\"}}}"
/* COMPLEXHALF of torch/_export/serde/schema.py (2.15). */
#define HALF_COMPLEX(path)                                                             \
    "{\"path_name\":\"" path                                                           \
    "\",\"is_param\":true,\"use_pickle\":false,\"tensor_meta\":"                       \
    "{\"dtype\":9,\"sizes\":[{\"as_int\":1}],\"strides\":[{\"as_int\":1}],"            \
    "\"storage_offset\":{\"as_int\":0},\"layout\":7,\"device\":{\"type\":\"cpu\"}}}"
#define MEMBER(name_, text)                                                            \
    {                                                                                  \
        .name = (name_), .data = (text), .len = sizeof(text) - 1                       \
    }

static void check_bytes(struct opened *o, const char *key, enum role role,
                        const char *want)
{
    const struct tensor_info *t = tensor(o, key);
    CLEANUP(buf_release) struct buf data = {0};
    struct err e = {0};

    assert_null(t->fault);
    assert_int_equal(t->role, role);
    assert_ok(read_tensor(&o->w, o->info.id, t, &data, &e), &e);
    assert_int_equal(data.len, strlen(want));
    assert_memory_equal(data.data, want, data.len);
}

/* Keys that meet are told apart; what is no tensor is an object. */
static void test_two_programs(void **state)
{
    static const struct zip_member members[] = {
        MEMBER("m/data/weights/weight_0", "-ab"),
        MEMBER("m/data/weights/weight_1", "-cd"),
        MEMBER("m/data/weights/weight_2", "efgh"),
        MEMBER(
            "m/data/weights/one_weights_config.json",
            "{\"config\":{\"w\":" TENSOR("weight_0") ",\"x\":" TENSOR("weight_0") "}}"),
        MEMBER("m/data/weights/two_weights_config.json",
               "{\"config\":{\"w\":" TENSOR("weight_1") ",\"c\":" HALF_COMPLEX(
                   "weight_2") "}}"),
        MEMBER("m/data/constants/one_constants_config.json", "{\"config\":{}}"),
        MEMBER("m/data/constants/two_constants_config.json",
               "{\"config\":{\"o\":{\"path_name\":\"custom_obj_0\",\"is_param\":false,"
               "\"use_pickle\":true,\"tensor_meta\":null}}}"),
        MEMBER("m/models/one.json", "{}"),
        MEMBER("m/models/two.json", "{}"),
        MEMBER("m/archive_format", "pt2"),
    };
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "pt2");
    put_zip(&m, members, ARRAY_SIZE(members));
    open_checkpoint(m.dir, &o);
    assert_null(o.info.error);
    assert_int_equal(o.count, 4);
    assert_int_equal(tensor(&o, "c")->dtype, DTYPE_C32);
    check_bytes(&o, "c", ROLE_MODEL, "efgh");
    check_bytes(&o, "x", ROLE_MODEL, "ab");
    check_bytes(&o, "one/w", ROLE_MODEL, "ab");
    check_bytes(&o, "two/w", ROLE_MODEL, "cd");
    all_objects(&o, &text);
    assert_string_equal(text.data, "o={\"$type\":\"opaque\",\"class\":\"torch."
                                   "ScriptObject\",\"member\":\"custom_obj_0\"}\n");
    close_checkpoint(&o);
    made_end(&m);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bids),
        cmocka_unit_test(test_edited),
        cmocka_unit_test(test_other_archives),
        cmocka_unit_test(test_two_programs),
    };

    return run_with_fixtures("pt2", argc, argv, tests, ARRAY_SIZE(tests));
}
