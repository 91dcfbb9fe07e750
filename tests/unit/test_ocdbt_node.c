/* SPDX-License-Identifier: MIT */
/* tests/unit/test_ocdbt_node.c - manifests and nodes of OCDBT, field by field, and their refusals. */
#include "tests/unit/unit.h"

#include <errno.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/orbax/ocdbt_node.h"
#include "tests/formats/ocdbt_build.h"

enum { MEMORY = 1 << 20, LARGE = 512 << 20 };

/* A body, whose checksum and length will be right, and what is said of it. */
struct body {
    const char *bytes;
    size_t len;
    int code;
    const char *why;
};

#define BODY(bytes, code, why)                                                         \
    {                                                                                  \
        bytes, sizeof bytes - 1, code, why                                             \
    }

static void seal(struct buf *out, uint32_t magic, const char *bytes, size_t len)
{
    CLEANUP(buf_release) struct buf body = {0};

    buf_add(&body, bytes, len);
    ob_seal(out, &(struct ob_record){.magic = magic}, &body);
}

static int parse_manifest(struct arena *a, const struct body *b,
                          struct ocdbt_manifest *m, struct err *e)
{
    CLEANUP(buf_release) struct buf all = {0};

    seal(&all, OB_MANIFEST, b->bytes, b->len);
    return ocdbt_manifest_parse(a, all.data, all.len, m, e);
}

static int parse_node(struct arena *a, const struct body *b, struct ocdbt_node *n,
                      struct err *e)
{
    static const struct ocdbt_file base = {"p0/d/x", 6, 3};
    CLEANUP(buf_release) struct buf all = {0};

    seal(&all, OB_NODE, b->bytes, b->len);
    return ocdbt_node_parse(a, all.data, all.len, &base, n, e);
}

static void check_refused(const struct body *b, size_t i, int rc, const struct err *e)
{
    if (rc != -b->code)
        fail_msg("case %zu: %d (%s), it should say %s", i, rc, e->text, b->why);
    assert_has(e->text, b->why);
}

/* ---- manifests ---- */

#define UUID "uuid-of-sixteen."
#define SIZES "\x64\x80\x80\x04"      /* of inline values and of nodes */
#define CONFIG UUID "\0" SIZES "\4\0" /* single, arity 2^4, as it is */
#define ONE_FILE "\1\3\1d/x"          /* one path of 3 bytes, 1 of it base */
#define TIME "\1\2\3\4\5\6\7\x8"
#define ONE_VERSION "\1\5\2\0\7\x64\1\1\1" TIME /* generation 5, height 2, d/x, 7+100 */
#define MANIFEST CONFIG ONE_FILE ONE_VERSION
#define FF8 "\xff\xff\xff\xff\xff\xff\xff\xff"

static void test_manifest(void **state)
{
    static const struct body single = BODY(MANIFEST "\0", 0, NULL);
    /* Compression at a level; two files and versions, and a node of older ones. */
    static const struct body many = BODY(
        UUID "\0" SIZES "\4\1\3\0\0\0"
             "\2\2\3\1\1\1d/xy"
             "\2\5\6\2\3\0\1\7\x8\x64\x65\1\1\1\1\1\1" TIME TIME "\1\1\0\0\1\1\0" TIME,
        0, NULL);
    static const struct body numbered = BODY(UUID "\1" SIZES "\4\0", 0, NULL);
    struct arena *a = arena_new(MEMORY);
    struct ocdbt_manifest m;
    struct err e = {0};

    (void)state;
    assert_ok(parse_manifest(a, &single, &m, &e), &e);
    assert_memory_equal(m.uuid, UUID, OCDBT_UUID);
    assert_false(m.numbered || m.empty);
    assert_int_equal(m.generation, 5);
    assert_int_equal(m.height, 2);
    assert_string_equal(m.file.path, "d/x");
    assert_int_equal(m.file.base_len, 1);
    assert_int_equal(m.offset, 7);
    assert_int_equal(m.length, 100);
    assert_ok(parse_manifest(a, &many, &m, &e), &e);
    assert_int_equal(m.generation, 6);
    assert_int_equal(m.height, 3);
    assert_string_equal(m.file.path, "d/y");
    assert_int_equal(m.offset, 8);
    assert_int_equal(m.length, 101);
    assert_ok(parse_manifest(a, &numbered, &m, &e), &e);
    assert_true(m.numbered);
    arena_free(a);
}

static void test_manifests_refused(void **state)
{
    static const struct body cases[] = {
        BODY("uuid-of-sixteen", EBADMSG, "it ends within its fields, at byte 14 of 29"),
        BODY(UUID "\0\x64", EBADMSG, "it ends within its fields"),
        BODY(UUID "\2" SIZES "\4\0", ENOTSUP, "manifest kind 2 is not known"),
        BODY(UUID "\0" SIZES "\0\0", EBADMSG, "a version tree of arity 2^0"),
        BODY(UUID "\0" SIZES "\x11\0", EBADMSG, "a version tree of arity 2^17"),
        BODY(UUID "\0" SIZES "\4\2", ENOTSUP, "OCDBT compression 2 is not known"),
        BODY(UUID "\0" SIZES "\4\1\3\0\0", EBADMSG, "it ends within its fields"),
        BODY(UUID "\1" SIZES "\4\0!", EBADMSG, "1 bytes are left over"),
        /* the list of data files */
        BODY(CONFIG, EBADMSG, "it ends within its fields"),
        BODY(CONFIG "\3\0\0\0\0", EBADMSG, "a list of data files of 3 in 4 bytes"),
        BODY(CONFIG "\x81\x80\x40", EBADMSG,
             "a list of data files of 1048577, at most 1048576 is possible"),
        BODY(CONFIG "\2\x80\x80\x04\1\1\0\0", EBADMSG,
             "path of 65536, at most 65535 is possible"),
        BODY(CONFIG "\1\x80\x80\x04\0d/x", EBADMSG, "path of 65536, at most 65535"),
        BODY(CONFIG "\1\3\x80\x80\x04"
                    "d/x",
             EBADMSG, "path of 65536, at most 65535"),
        BODY(CONFIG "\2\2\3\1\1", EBADMSG, "it ends within its fields"),
        BODY(CONFIG "\1\3\1d/", EBADMSG, "it ends within its fields"),
        BODY(CONFIG "\1\3\4d/x", EBADMSG, "the list of data files is damaged"),
        BODY(CONFIG "\2\4\3\1\1\1d/xy", EBADMSG, "the list of data files is damaged"),
        BODY(CONFIG "\2\3\xfd\xff\x03\1\1\1d/xy", EBADMSG, "it ends within its fields"),
        /* versions */
        BODY(CONFIG ONE_FILE "\0\0", EBADMSG, "it has no version"),
        BODY(CONFIG ONE_FILE "\x11", EBADMSG,
             "a list of versions of 17, at most 16 is possible"),
        BODY(CONFIG ONE_FILE "\1\5\2\0\7\x64\1\1\1\1\2\3\4\5\6\7", EBADMSG,
             "a list of versions of 1 in 15 bytes"),
        BODY(CONFIG ONE_FILE "\1\0\2\0\7\x64\1\1\1" TIME "\0", EBADMSG,
             "its versions are out of order"),
        BODY(CONFIG ONE_FILE "\2\6\6\2\3\0\0\7\x8\x64\x65\1\1\1\1\1\1" TIME TIME "\0",
             EBADMSG, "its versions are out of order"),
        BODY(CONFIG ONE_FILE "\1\5\2\1\7\x64\1\1\1" TIME "\0", EBADMSG,
             "data file 1 of 1"),
        BODY(CONFIG ONE_FILE "\1\5\2\x80\x80\x80\x80\x10\7\x64\1\1\1" TIME "\0",
             EBADMSG, "number of a data file of 4294967296"),
        BODY(CONFIG ONE_FILE "\1\5\2\0\xff" FF8 "\1\1\1\1\1" TIME "\0", EBADMSG,
             "bytes 18446744073709551615+1 of a data file"),
        BODY(CONFIG ONE_FILE "\1\5\2\0\xff" FF8 "\2\1\1\1\1" TIME "\0", EBADMSG,
             "it ends within its fields"),
        /* nodes of older versions */
        BODY(MANIFEST, EBADMSG, "it ends within its fields"),
        BODY(MANIFEST "\1\1\0\0\1\1\0\1\2\3\4\5\6\7", EBADMSG,
             "a list of version nodes of 1 in 13 bytes"),
        BODY(MANIFEST "\x41", EBADMSG, "a list of version nodes of 65, at most 64"),
        BODY(MANIFEST "\1\1\1\0\1\1\0" TIME, EBADMSG, "data file 1 of 1"),
        BODY(MANIFEST "\1\1\0\x80\1\1\0" TIME, EBADMSG, "it ends within its fields"),
        BODY(MANIFEST "\1\1\0\0\1\1\0" TIME "!", EBADMSG, "1 bytes are left over"),
        BODY(MANIFEST "\0!!", EBADMSG, "2 bytes are left over"),
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct arena *a = arena_new(MEMORY);
        struct ocdbt_manifest m;
        struct err e = {0};

        check_refused(&cases[i], i, parse_manifest(a, &cases[i], &m, &e), &e);
        arena_free(a);
    }
}

/* ---- nodes ---- */

#define FILES "\1\3\0d/v"
/* Keys "ab" and "ac"; "xy" in the node, bytes 5+12 of d/v. */
#define KEYS "\2\1\2\1abc"
#define LEAF "\0" FILES KEYS "\2\x0c\0\1\0\5xy"
/* Children "ab" (from byte 5, 12 of them) and "ac", which share "a" with theirs. */
#define INNER "\1" FILES "\2\1\2\1\1\1abc\0\0\5\x12\x0c\x0d\1\1\1\1\1\1"

static void test_leaf(void **state)
{
    static const struct body b = BODY(LEAF, 0, NULL);
    struct arena *a = arena_new(MEMORY);
    struct ocdbt_node n;
    struct err e = {0};

    (void)state;
    assert_ok(parse_node(a, &b, &n, &e), &e);
    assert_int_equal(n.height, 0);
    assert_int_equal(n.files, 1);
    assert_string_equal(n.file[0].path, "p0/d/v");
    assert_int_equal(n.file[0].base_len, 3);
    assert_int_equal(n.entries, 2);
    assert_memory_equal(n.entry[0].key, "ab", 2);
    assert_true(n.entry[0].is_inline);
    assert_int_equal(n.entry[0].place.length, 2);
    assert_int_equal(n.entry[0].place.offset, 14 + b.len - 2); /* "xy", in its bytes */
    assert_memory_equal(n.entry[1].key, "ac", 2);
    assert_int_equal(n.entry[1].key_len, 2);
    assert_false(n.entry[1].is_inline);
    assert_int_equal(n.entry[1].place.file, 0);
    assert_int_equal(n.entry[1].place.offset, 5);
    assert_int_equal(n.entry[1].place.length, 12);
    arena_free(a);
}

static void test_inner(void **state)
{
    static const struct body b = BODY(INNER, 0, NULL);
    struct arena *a = arena_new(MEMORY);
    struct ocdbt_node n;
    struct err e = {0};

    (void)state;
    assert_ok(parse_node(a, &b, &n, &e), &e);
    assert_int_equal(n.height, 1);
    assert_int_equal(n.entries, 2);
    assert_memory_equal(n.entry[1].key, "ac", 2);
    assert_int_equal(n.entry[0].child_prefix, 1);
    assert_int_equal(n.entry[0].place.offset, 5);
    assert_int_equal(n.entry[1].place.offset, 18);
    assert_int_equal(n.entry[1].place.length, 13);
    arena_free(a);
}

#define KEY_65536 "\x80\x80\x04"

static void test_nodes_refused(void **state)
{
    static const struct body cases[] = {
        BODY("", EBADMSG, "it ends within its fields, at byte 14 of 14"),
        BODY("\0", EBADMSG, "it ends within its fields"),
        BODY("\0" FILES, EBADMSG, "it ends within its fields"),
        BODY("\0" FILES "\0", EBADMSG, "it has no keys"),
        BODY("\0" FILES "\x81\x80\x40", EBADMSG, "a list of keys of 1048577, at most"),
        BODY("\0" FILES "\2\1\2\1", EBADMSG, "a list of keys of 2 in 3 bytes"),
        /* keys */
        BODY("\0" FILES "\2" KEY_65536 "\2\1abc", EBADMSG,
             "key of 65536, at most 65535"),
        BODY("\0" FILES "\2\1\2" KEY_65536 "abc", EBADMSG,
             "key of 65536, at most 65535"),
        BODY("\1" FILES "\2\1\2\1\1" KEY_65536 "abc", EBADMSG, "key of 65536, at most"),
        BODY("\0" FILES "\2\3\2\1abc\0\0\0\0", EBADMSG, "the lengths of its keys"),
        BODY("\0" FILES "\2\1\2\xff\xff\x03"
             "abc\0\0\0\0",
             EBADMSG, "the lengths of its keys are damaged"),
        BODY("\1" FILES "\2\1\2\1\3\1abc\0\0", EBADMSG, "the lengths of its keys"),
        BODY("\0" FILES "\2\1\2\4abc", EBADMSG, "it ends within its fields"),
        BODY("\0" FILES "\2\1\2\1aba\0\0\0\0", EBADMSG, "its keys are out of order"),
        BODY("\0" FILES "\2\1\2\1abb\0\0\0\0", EBADMSG, "its keys are out of order"),
        BODY("\0" FILES "\2\1\2\0ab\0\0\0\0", EBADMSG, "its keys are out of order"),
        /* values */
        BODY("\0" FILES KEYS "\2", EBADMSG, "it ends within its fields"),
        BODY("\0" FILES KEYS "\2\x0c\0", EBADMSG, "it ends within its fields"),
        BODY("\0" FILES KEYS "\2\x0c\0\2\0\5xy", EBADMSG, "a value of kind 2"),
        BODY("\0" FILES KEYS "\x81\x80\x40\x0c\0\1\0\5", EBADMSG,
             "a value of 1048577 bytes in the node"),
        BODY("\0" FILES KEYS "\2\x0c\0\1\1\5xy", EBADMSG, "data file 1 of 1"),
        BODY("\0" FILES KEYS "\2\x0c\0\1\0", EBADMSG, "it ends within its fields"),
        BODY("\0" FILES KEYS "\2\x0c\0\1\0\xf4" FF8 "\1xy", EBADMSG,
             "bytes 18446744073709551604+12 of a data file"),
        BODY("\0" FILES KEYS "\2\x0c\0\1\0\5x", EBADMSG, "it ends within its fields"),
        BODY(LEAF "z", EBADMSG, "1 bytes are left over"),
        /* children */
        BODY("\1" FILES "\2\1\2\1\1\1abc\0", EBADMSG, "it ends within its fields"),
        BODY("\1" FILES "\2\1\2\1\1\1abc\0\1\5\x12\x0c\x0d\1\1\1\1\1\1", EBADMSG,
             "data file 1 of 1"),
        BODY("\1" FILES "\2\1\2\1\1\1abc\0\0\5", EBADMSG, "it ends within its fields"),
        BODY("\1" FILES "\2\1\2\1\1\1abc\0\0\5\x12\x0c", EBADMSG, "it ends within"),
        BODY("\1" FILES "\2\1\2\1\1\1abc\0\0\5\xf4" FF8 "\1\x0c\x0c\1\1\1\1\1\1",
             EBADMSG, "bytes 18446744073709551604+12 of a data file"),
        BODY("\1" FILES "\2\1\2\1\1\1abc\0\0\5\x12\x0c\x0d\1\1\1\1\1", EBADMSG,
             "it ends within its fields"),
        BODY(INNER "z", EBADMSG, "1 bytes are left over"),
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct arena *a = arena_new(MEMORY);
        struct ocdbt_node n;
        struct err e = {0};

        check_refused(&cases[i], i, parse_node(a, &cases[i], &n, &e), &e);
        arena_free(a);
    }
}

/* The last byte of a place is one that a number of 64 bits can name, and no further. */
static void test_last_byte(void **state)
{
    static const struct body b =
        BODY("\0" FILES KEYS "\2\x0c\0\1\0\xf3" FF8 "\1xy", 0, NULL);
    struct arena *a = arena_new(MEMORY);
    struct ocdbt_node n;
    struct err e = {0};

    (void)state;
    assert_ok(parse_node(a, &b, &n, &e), &e);
    assert_int_equal(n.entry[1].place.offset, UINT64_MAX - 12);
    arena_free(a);
}

/* ---- what stands round them ---- */

static int parse_bytes(const struct buf *b, struct err *e)
{
    static const struct ocdbt_file base = {.path = ""};
    struct arena *a = arena_new(LARGE);
    struct ocdbt_node n;
    int rc = ocdbt_node_parse(a, b->data, b->len, &base, &n, e);

    arena_free(a);
    return rc;
}

static void test_envelope(void **state)
{
    static const struct {
        struct ob_record r;
        int code;
        const char *why;
    } cases[] = {
        {{.magic = OB_NODE}, 0, NULL},
        {{.magic = OB_NODE, .compression = 1}, 0, NULL},
        {{.magic = OB_MANIFEST}, EBADMSG, "it starts with 0cdb3a2a, not 0cdb20de"},
        {{.magic = OB_NODE, .length_off = 1}, EBADMSG, "it is kept as"},
        {{.magic = OB_NODE, .bad_crc = true}, EBADMSG, "its checksum (CRC-32C)"},
        {{.magic = OB_NODE, .version = 1}, ENOTSUP, "OCDBT version 1 is not known"},
        {{.magic = OB_NODE, .compression = 2}, ENOTSUP, "OCDBT compression 2 is not"},
    };
    CLEANUP(buf_release) struct buf body = {0};

    (void)state;
    buf_add(&body, LEAF, sizeof LEAF - 1);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf all = {0};
        struct err e = {0};

        ob_seal(&all, &cases[i].r, &body);
        assert_int_equal(parse_bytes(&all, &e), -cases[i].code);
        if (cases[i].why)
            assert_has(e.text, cases[i].why);
        all.len = 17; /* no room for a byte of each field */
        assert_int_equal(parse_bytes(&all, &e), -EBADMSG);
        assert_has(e.text, "17 bytes are no record of OCDBT");
    }
}

/* Seals what is behind version and compression as it is; 1 says that it is zstd. */
static void seal_packed(struct buf *out, const struct buf *packed)
{
    CLEANUP(buf_release) struct buf body = {0};

    buf_add(&body, packed->data, packed->len);
    ob_seal(out, &(struct ob_record){.magic = OB_NODE, .compression = 3}, &body);
    out->data[13] = 1;
    put_le32((unsigned char *)out->data + out->len - 4,
             crc32c(0, out->data, out->len - 4));
}

static void pack(struct buf *out, const void *bytes, size_t len)
{
    size_t max = ZSTD_compressBound(len), n;
    CLEANUP_FREE char *packed = malloc(max);

    assert_non_null(packed);
    n = ZSTD_compress(packed, max, bytes, len, 1);
    assert_false(ZSTD_isError(n));
    buf_add(out, packed, n);
}

static void check_packed(const struct buf *packed, const char *why)
{
    CLEANUP(buf_release) struct buf all = {0};
    struct err e = {0};
    int rc;

    seal_packed(&all, packed);
    rc = parse_bytes(&all, &e);
    if (!why) {
        assert_ok(rc, &e);
        return;
    }
    if (rc != -EBADMSG)
        fail_msg("%d (%s), it should say %s", rc, e.text, why);
    assert_has(e.text, why);
}

/* One frame, all of it, and nothing behind; no more comes out than is kept. */
static void test_compressed(void **state)
{
    CLEANUP(buf_release) struct buf whole = {0}, bomb = {0};
    CLEANUP_FREE char *zeros = calloc(1, OCDBT_MAX_PLAIN + 1);

    (void)state;
    assert_non_null(zeros);
    pack(&whole, LEAF, sizeof LEAF - 1);
    check_packed(&whole, NULL);
    buf_addc(&whole, '!');
    check_packed(&whole, "1 bytes behind the zstd frame");
    whole.len -= 2;
    check_packed(&whole, "zstd: the frame is cut");
    whole.data[0] ^= 1;
    check_packed(&whole, "zstd");
    pack(&bomb, zeros, OCDBT_MAX_PLAIN + 1);
    check_packed(&bomb, "more than 67108864 bytes come out of zstd");
    buf_clear(&bomb);
    pack(&bomb, zeros, OCDBT_MAX_PLAIN);
    check_packed(&bomb, "it has no keys"); /* all of it was decoded */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_manifest),      cmocka_unit_test(test_manifests_refused),
        cmocka_unit_test(test_leaf),          cmocka_unit_test(test_inner),
        cmocka_unit_test(test_nodes_refused), cmocka_unit_test(test_last_byte),
        cmocka_unit_test(test_envelope),      cmocka_unit_test(test_compressed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
