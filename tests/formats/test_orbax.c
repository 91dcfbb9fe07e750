/* SPDX-License-Identifier: MIT */
/* tests/formats/test_orbax.c - Orbax's trees and steps, OCDBT's stores: whole, damaged, odd. */
#include "made.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "ocdbt_build.h"
#include "tests/unit/unit.h"

#define ZARRAY                                                                         \
    "{\"zarr_format\":2,\"shape\":[6],\"chunks\":[3],\"dtype\":\"<f4\","               \
    "\"compressor\":null,\"fill_value\":null,\"filters\":null,\"order\":\"C\"}"
#define NUMBER(type)                                                                   \
    "{\"zarr_format\":2,\"shape\":[],\"chunks\":[],\"dtype\":\"" type "\","            \
    "\"compressor\":null,\"fill_value\":null,\"filters\":null,\"order\":\"C\"}"

static const float six[6] = {0, 1, 2, 3, 4, 5};
static const struct ob_record node = {.magic = OB_NODE};
static const struct ob_record manifest = {.magic = OB_MANIFEST};

/* A value that stands in the node. */
#define TEXT(name, bytes)                                                              \
    {                                                                                  \
        .key = (name), .text = (bytes)                                                 \
    }
#define HALF(name, i)                                                                  \
    {                                                                                  \
        .key = (name), .text = (const char *)(six + 3 * (i)), .text_len = 12           \
    }

/* ---- stores ---- */

/* The manifest of a store whose root is all of d/x. */
static void put_manifest(const struct made *m, const char *dir, unsigned height,
                         size_t length)
{
    CLEANUP(buf_release) struct buf out = {0};
    const struct ob_manifest x = {
        .generation = 1, .height = height, .file = {"d/x", 0}, .length = length};
    char path[PATH_MAX];

    ob_manifest(&out, &manifest, &x);
    snprintf(path, sizeof path, "%smanifest.ocdbt", dir);
    made_file(m, path, out.data, out.len);
}

/* A store of one leaf, below the directory "" or "NAME/". */
static void put_leaf(const struct made *m, const char *dir, const struct ob_record *r,
                     const struct ob_entry *x, size_t n)
{
    static const struct ob_file files[] = {{"d/values", 0}, {"d/lost", 0}};
    CLEANUP(buf_release) struct buf out = {0};
    char path[PATH_MAX];

    ob_node(&out, r, 0, files, 2, x, n);
    snprintf(path, sizeof path, "%sd/x", dir);
    made_file(m, path, out.data, out.len);
    snprintf(path, sizeof path, "%sd/values", dir);
    made_file(m, path, "##########", 7);
    put_manifest(m, dir, 0, out.len);
}

static void finish(const struct made *m, struct opened *o)
{
    close_checkpoint(o);
    made_end(m);
}

static void no_error(const struct opened *o)
{
    if (o->info.error)
        fail_msg("%s", o->info.error);
}

/* Values in the node, as it is and compressed. */
static void test_inline(void **state)
{
    static const struct ob_entry x[] = {TEXT("w/.zarray", ZARRAY), HALF("w/0", 0),
                                        HALF("w/1", 1)};
    struct made m;
    struct opened o;

    (void)state;
    for (unsigned compression = 0; compression < 2; compression++) {
        const struct ob_record r = {.magic = OB_NODE, .compression = compression};

        made_begin(&m, "store");
        put_leaf(&m, "", &r, x, 3);
        made_open(&m, &o);
        check_floats(&o, "w", six, 6);
        assert_int_equal(o.count, 1);
        assert_string_equal(o.info.format, "ocdbt");
        check_warnings(&o, "");
        finish(&m, &o);
    }
}

/* Values in files, at any offset and in any order; the store of a process below. */
static void test_files(void **state)
{
    static const struct ob_file inside[] = {{"d/v", 0}};
    static const struct ob_file outside[] = {{"ocdbt.process_3/d/n", 16}};
    static const struct ob_entry leaf[] = {
        TEXT("w/.zarray", ZARRAY),
        {.key = "w/0", .offset = 13, .length = 12},
        {.key = "w/1", .offset = 1, .length = 12},
    };
    CLEANUP(buf_release) struct buf low = {0}, top = {0}, values = {0};
    struct ob_entry child = {.key = "w/.zarray"};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "store");
    buf_addc(&values, '#');
    buf_add(&values, six + 3, 12);
    buf_add(&values, six, 12);
    made_file(&m, "ocdbt.process_3/d/v", values.data, values.len);
    buf_adds(&low, "junk before it");
    child.offset = low.len;
    ob_node(&low, &node, 0, inside, 1, leaf, 3);
    child.length = low.len - child.offset;
    made_file(&m, "ocdbt.process_3/d/n", low.data, low.len);
    ob_node(&top, &node, 1, outside, 1, &child, 1);
    made_file(&m, "d/x", top.data, top.len);
    put_manifest(&m, "", 1, top.len);
    made_open(&m, &o);
    check_floats(&o, "w", six, 6);
    assert_int_equal(o.count, 1);
    finish(&m, &o);
}

/* Three levels, with prefixes that children need not repeat. */
static void test_levels(void **state)
{
    static const struct ob_file file[] = {{"d/x", 0}};
    static const struct ob_entry a[] = {TEXT("rray", ""), TEXT("rray/.zarray", ZARRAY),
                                        HALF("rray/0", 0), HALF("rray/1", 1)};
    static const struct ob_entry b[] = {TEXT("/.zarray", ZARRAY), HALF("/0", 1)};
    static const struct ob_entry c[] = {HALF("1", 0)};
    struct ob_entry low[2] = {{.key = "bb", .child_prefix = 2},
                              {.key = "bb/1", .child_prefix = 3}};
    struct ob_entry high[2] = {{.key = "a", .child_prefix = 1}, {.key = "bb"}};
    CLEANUP(buf_release) struct buf out = {0};
    static const float swapped[6] = {3, 4, 5, 0, 1, 2};
    struct ob_entry mid = {.key = "rray", .child_prefix = 0};
    struct made m;
    struct opened o;
    size_t root;

    (void)state;
    made_begin(&m, "store");
    ob_node(&out, &node, 0, file, 1, a, 4);
    mid.length = out.len;
    high[0].offset = out.len;
    ob_node(&out, &node, 1, file, 1, &mid, 1);
    high[0].length = out.len - high[0].offset;
    low[0].offset = out.len;
    ob_node(&out, &node, 0, file, 1, b, 2);
    low[0].length = out.len - low[0].offset;
    low[1].offset = out.len;
    ob_node(&out, &node, 0, file, 1, c, 1);
    low[1].length = out.len - low[1].offset;
    high[1].offset = out.len;
    ob_node(&out, &node, 1, file, 1, low, 2);
    high[1].length = out.len - high[1].offset;
    root = out.len;
    ob_node(&out, &node, 2, file, 1, high, 2);
    made_file(&m, "d/x", out.data + root, out.len - root);
    made_file(&m, "d/all", out.data, out.len);
    {
        CLEANUP(buf_release) struct buf text = {0};
        const struct ob_manifest x = {.generation = 1,
                                      .height = 2,
                                      .file = {"d/x", 0},
                                      .offset = root,
                                      .length = out.len - root};

        ob_manifest(&text, &manifest, &x);
        made_file(&m, "manifest.ocdbt", text.data, text.len);
        made_file(&m, "d/x", out.data, out.len);
    }
    made_open(&m, &o);
    check_floats(&o, "array", six, 6);
    check_floats(&o, "bb", swapped, 6);
    assert_int_equal(o.count, 2);
    finish(&m, &o);
}

/* ---- damage ---- */

static void check_refused(const struct made *m, const char *why)
{
    struct opened o;

    made_open(m, &o);
    if (!o.info.error)
        fail_msg("accepted, it should say %s", why);
    assert_has(o.info.error, why);
    assert_int_equal(o.count, 0);
    finish(m, &o);
}

/* What stands round a node. */
static void test_records(void **state)
{
    static const struct ob_entry x[] = {TEXT("w/.zarray", ZARRAY), HALF("w/0", 0),
                                        HALF("w/1", 1)};
    static const struct {
        struct ob_record r;
        const char *why;
    } cases[] = {
        {{.magic = OB_NODE, .bad_crc = true}, "checksum (CRC-32C) is wrong"},
        {{.magic = OB_NODE, .length_off = 1}, "it is kept as"},
        {{.magic = OB_NODE, .version = 1}, "OCDBT version 1 is not known"},
        {{.magic = OB_NODE, .compression = 2}, "OCDBT compression 2 is not known"},
        {{.magic = OB_MANIFEST}, "it starts with 0cdb3a2a, not 0cdb20de"},
    };
    struct made m;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        made_begin(&m, "store");
        put_leaf(&m, "", &cases[i].r, x, 3);
        check_refused(&m, cases[i].why);
    }
}

/* What stands in it. */
static void test_leaves(void **state)
{
    static const struct {
        struct ob_entry x[3];
        size_t n;
        const char *why;
    } cases[] = {
        {{TEXT("b", "1"), TEXT("a", "2")}, 2, "its keys are out of order"},
        {{TEXT("a", "1"), TEXT("a", "2")}, 2, "its keys are out of order"},
        {{{.key = "a", .file = 2, .length = 1}}, 1, "data file 2 of 2"},
        {{{.key = "a", .offset = UINT64_MAX, .length = 2}}, 1, "of a data file"},
        {{{.key = ""}}, 0, "it has no keys"},
    };
    struct made m;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        made_begin(&m, "store");
        put_leaf(&m, "", &node, cases[i].x, cases[i].n);
        check_refused(&m, cases[i].why);
    }
}

/* A parent and its children must agree, and nothing leads out of the directory. */
static void test_trees(void **state)
{
    static const struct ob_entry leaf[] = {TEXT("a", "1"), TEXT("c", "2")};
    static const struct {
        struct ob_entry child[2];
        size_t n;
        unsigned height;
        const char *file, *why;
    } cases[] = {
        {{{.key = "a"}}, 1, 2, "d/y", "its height is 0, its parent says 1"},
        {{{.key = "b"}}, 1, 1, "d/y", "its first key is before the one of its parent"},
        {{{.key = "a"}, {.key = "b"}}, 2, 1, "d/y", "go past those of its parent"},
        {{{.key = "a", .child_prefix = 2}}, 1, 1, "d/y", "lengths of its keys"},
        {{{.key = "a"}}, 1, 1, "d/lost", "is missing"},
        {{{.key = "a"}}, 1, 1, "../y", "is not safe"},
        {{{.key = "a"}}, 1, 1, "/etc/passwd", "is not safe"},
        {{{.key = "a", .offset = 9}}, 1, 1, "d/y", "d/y"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf low = {0}, top = {0};
        const struct ob_file file = {cases[i].file, 0};
        struct ob_entry child[2] = {cases[i].child[0], cases[i].child[1]};
        struct made m;

        ob_node(&low, &node, 0, &file, 1, leaf, 2);
        child[0].length = child[1].length = low.len;
        made_begin(&m, "store");
        made_file(&m, "d/y", low.data, low.len);
        ob_node(&top, &node, cases[i].height, &file, 1, child, cases[i].n);
        made_file(&m, "d/x", top.data, top.len);
        put_manifest(&m, "", cases[i].height, top.len);
        check_refused(&m, cases[i].why);
    }
}

/* Prefixes make other keys of the same leaf: a few nodes could stand for millions. */
static void test_shared_nodes(void **state)
{
    static const struct ob_file file = {"d/x", 0};
    static const struct ob_entry leaf[] = {TEXT("a", "1")};
    struct ob_entry child[2] = {{.key = "a", .child_prefix = 1},
                                {.key = "b", .child_prefix = 1}};
    CLEANUP(buf_release) struct buf low = {0}, top = {0};
    struct made m;

    (void)state;
    made_begin(&m, "store");
    ob_node(&low, &node, 0, &file, 1, leaf, 1);
    child[0].length = child[1].length = low.len;
    made_file(&m, "d/y", low.data, low.len);
    ob_node(&top, &node, 1, &(struct ob_file){"d/y", 0}, 1, child, 2);
    made_file(&m, "d/x", top.data, top.len);
    put_manifest(&m, "", 1, top.len);
    check_refused(&m, "two places of the tree lead to it");
}

enum { LONG = 60000, MANY = 1000 };

/* Keys of 60,003 bytes, all but three of them shared with the one before. */
static void long_keys(struct ob_entry *x, char *text, size_t n)
{
    memset(text, 'k', LONG);
    for (size_t i = 0; i < n; i++) {
        char *end = text + LONG + 4 * i;

        snprintf(end, 4, "%03zu", i);
        x[i] = (struct ob_entry){.key = end, .text = "", .shared = LONG};
    }
    x[0].key = text;
}

/* Few bytes that would unfold to much memory: in one node, and below a node's prefix. */
static void test_unfolded(void **state)
{
    static struct ob_entry x[MANY];
    static char text[LONG + 4 * MANY + 4];
    CLEANUP(buf_release) struct buf low = {0}, top = {0};
    struct ob_entry child = {.key = text, .child_prefix = LONG};
    struct made m;

    (void)state;
    made_begin(&m, "store");
    long_keys(x, text, MANY);
    put_leaf(&m, "", &node, x, MANY);
    check_refused(&m, "its keys and paths are too long for its size");

    made_begin(&m, "store");
    x[0].key = "000";
    for (size_t i = 0; i < MANY; i++)
        x[i].shared = 0;
    text[LONG] = '\0';
    ob_node(&low, &node, 0, NULL, 0, x, MANY);
    child.length = low.len;
    made_file(&m, "d/y", low.data, low.len);
    ob_node(&top, &node, 1, &(struct ob_file){"d/y", 0}, 1, &child, 1);
    made_file(&m, "d/x", top.data, top.len);
    put_manifest(&m, "", 1, top.len);
    check_refused(&m, "keys are too long for the size of the tree");
}

/* A chunk, or the file that it is in, is not there: its tensor cannot be read. */
static void test_lost_chunks(void **state)
{
    static const struct ob_entry x[] = {
        TEXT("gone/.zarray", ZARRAY),
        HALF("gone/0", 0),
        TEXT("lost/.zarray", ZARRAY),
        HALF("lost/0", 0),
        {.key = "lost/1", .file = 1, .length = 12},
        TEXT("short/.zarray", ZARRAY),
        HALF("short/0", 0),
        {.key = "short/1", .file = 0, .length = 12},
        TEXT("w/.zarray", ZARRAY),
        HALF("w/0", 0),
        HALF("w/1", 1),
    };
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "store");
    put_leaf(&m, "", &node, x, ARRAY_SIZE(x));
    made_open(&m, &o);
    assert_int_equal(o.count, 4);
    check_fault(&o, "gone", "chunk");
    check_fault(&o, "lost", "d/lost is missing");
    check_fault(&o, "short", "d/values ends at byte 7");
    check_floats(&o, "w", six, 6);
    finish(&m, &o);
}

static void put_numbered(const struct made *m, const char *name, unsigned generation,
                         size_t length)
{
    CLEANUP(buf_release) struct buf out = {0};
    const struct ob_manifest x = {
        .generation = generation, .file = {"d/x", 0}, .length = length};

    ob_manifest(&out, &manifest, &x);
    made_file(m, name, out.data, out.len);
}

/* manifest.ocdbt only says that there are others; the newest counts. */
static void test_numbered(void **state)
{
    static const struct ob_entry x[] = {TEXT("w/.zarray", ZARRAY), HALF("w/0", 0),
                                        HALF("w/1", 1)};
    CLEANUP(buf_release) struct buf out = {0}, leaf = {0};
    const struct ob_manifest numbered = {.kind = 1};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "store");
    ob_manifest(&out, &manifest, &numbered);
    made_file(&m, "manifest.ocdbt", out.data, out.len);
    made_open(&m, &o);
    no_error(&o);
    assert_int_equal(o.count, 0);
    close_checkpoint(&o);
    ob_node(&leaf, &node, 0, NULL, 0, x, 3);
    made_file(&m, "d/x", leaf.data, leaf.len);
    put_numbered(&m, "manifest.0000000000000009", 9, leaf.len - 1);
    put_numbered(&m, "manifest.000000000000000a", 10, leaf.len);
    put_numbered(&m, "manifest.000000000000000b.tmp", 11, 1);
    made_open(&m, &o);
    check_floats(&o, "w", six, 6);
    close_checkpoint(&o);
    put_numbered(&m, "manifest.000000000000000c", 11, leaf.len);
    check_refused(&m, "manifest.000000000000000c is of another store");
}

/* A store without keys has no root. */
static void test_empty(void **state)
{
    CLEANUP(buf_release) struct buf out = {0};
    const struct ob_manifest x = {
        .generation = 1, .file = {"", 0}, .offset = UINT64_MAX, .length = UINT64_MAX};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "store");
    ob_manifest(&out, &manifest, &x);
    made_file(&m, "manifest.ocdbt", out.data, out.len);
    made_open(&m, &o);
    no_error(&o);
    assert_int_equal(o.count, 0);
    finish(&m, &o);
}

/* ---- trees ---- */

#define LEAF(path, type) LEAF_MORE(path, type, "false")
#define LEAF_MORE(path, type, skip)                                                    \
    "\"('" path "',)\": {\"key_metadata\": [{\"key\": \"" path                         \
    "\", \"key_type\": 2}], \"value_metadata\": {\"value_type\": \"" type              \
    "\", \"skip_deserialize\": " skip "}}"
#define TREE(leaves, more)                                                             \
    "{\"tree_metadata\": {" leaves "}, \"use_ocdbt\": true" more "}"

static void check_objects(struct opened *o, const char *want)
{
    CLEANUP(buf_release) struct buf text = {0};

    buf_adds(&text, "");
    all_objects(o, &text);
    assert_string_equal(text.data, want);
}

static void test_tree(void **state)
{
    static const struct ob_entry x[] = {
        TEXT("extra/.zarray", ZARRAY),
        HALF("extra/0", 0),
        HALF("extra/1", 1),
        TEXT("flag/.zarray", NUMBER("|b1")),
        {.key = "flag/0", .text = "\1", .text_len = 1},
        TEXT("hurt/.zarray", NUMBER("<f8")),
        {.key = "hurt/0", .text = "1234567", .text_len = 7},
        TEXT("opt_state.mu/.zarray", ZARRAY),
        HALF("opt_state.mu/0", 1),
        HALF("opt_state.mu/1", 0),
        TEXT("step/.zarray", NUMBER(">i4")),
        {.key = "step/0", .text = "\0\0\1\2", .text_len = 4},
        TEXT("w/.zarray", ZARRAY),
        HALF("w/0", 0),
        HALF("w/1", 1),
    };
    static const float swapped[6] = {3, 4, 5, 0, 1, 2};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "30");
    put_leaf(&m, "", &node, x, ARRAY_SIZE(x));
    made_text(
        &m, "_METADATA",
        TREE(
            LEAF("w", "jax.Array") ", " LEAF("opt_state.mu", "np.ndarray") ", " LEAF("lost", "jax.Array") ", " LEAF("step", "scalar") ", " LEAF(
                "hurt",
                "scalar") ", " LEAF("flag",
                                    "scalar") ", " LEAF("name",
                                                        "string") ", " LEAF("none",
                                                                            "None") ", " LEAF("t",
                                                                                              "Tuple") ", " LEAF_MORE("own",
                                                                                                                      "my.Handler",
                                                                                                                      "true"),
            ", \"custom_metadata\": {\"a\": [1, NaN]}"));
    made_text(&m, "_strings.json", "{\"name\": \"x\\\"y\"}");
    made_text(&m, "_sharding",
              "{\"dw==\": \"{\\\"shape\\\": [4, 2], \\\"axis_names\\\": [\\\"x\\\", "
              "\\\"y\\\"]}\"}");
    made_open(&m, &o);
    no_error(&o);
    check_floats(&o, "w", six, 6);
    check_floats(&o, "opt_state.mu", swapped, 6);
    check_floats(&o, "extra", six, 6);
    check_fault(&o, "lost", "_METADATA names it");
    assert_int_equal(o.count, 4);
    assert_int_equal(tensor(&o, "w")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "opt_state.mu")->role, ROLE_OPTIMIZER);
    assert_string_equal(o.info.format, "orbax-ocdbt");
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 30);
    assert_has(o.info.topology, "\"mesh\": {\"x\": 4, \"y\": 2}");
    check_objects(&o, "custom_metadata={\"a\": [1, {\"$type\":\"float\",\"value\":"
                      "\"nan\"}]}\n"
                      "flag=true\n"
                      "hurt={\"$type\":\"opaque\",\"class\":\"unreadable\",\"error\":"
                      "\"7 bytes are stored, the chunk has 8\"}\n"
                      "name=\"x\\\"y\"\nnone=null\nstep=258\n"
                      "t={\"$type\":\"tuple\",\"items\":[]}\n");
    finish(&m, &o);
}

/* With the flag every chunk is stored, so that one that is not there is lost. */
static void test_flag(void **state)
{
#define ZEROS                                                                          \
    "{\"zarr_format\":2,\"shape\":[6],\"chunks\":[3],\"dtype\":\"<f4\","               \
    "\"compressor\":null,\"fill_value\":0,\"filters\":null,\"order\":\"C\"}"
    static const struct ob_entry x[] = {TEXT("w/.zarray", ZEROS), HALF("w/1", 1)};
    static const float filled[6] = {0, 0, 0, 3, 4, 5};
    struct made m;
    struct opened o;

    (void)state;
    for (int flag = 0; flag < 2; flag++) {
        made_begin(&m, "tree");
        put_leaf(&m, "", &node, x, 2);
        made_text(&m, "_METADATA",
                  flag ? TREE(LEAF("w", "jax.Array"),
                              ", \"store_array_data_equal_to_fill_value\": true")
                       : TREE(LEAF("w", "jax.Array"), ""));
        made_open(&m, &o);
        if (flag)
            check_fault(&o, "w", "chunk");
        else
            check_floats(&o, "w", filled, 6);
        finish(&m, &o);
    }
}

/* A damaged _METADATA takes nothing away; but which chunks may be missing nobody knows. */
static void test_damaged_tree(void **state)
{
    static const struct ob_entry x[] = {TEXT("v/.zarray", ZEROS), HALF("v/1", 1),
                                        TEXT("w/.zarray", ZARRAY), HALF("w/0", 0),
                                        HALF("w/1", 1)};
    static const char *const texts[] = {
        "{\"tree_metadata\": {" LEAF("w", "jax.Array") ",",
        "{\"tree_metadata\": {\"('w',)\": {\"value_metadata\": {}}}}",
        "{\"tree_metadata\": [1]}",
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
        CLEANUP(buf_release) struct buf text = {0};
        struct made m;
        struct opened o;

        made_begin(&m, "tree");
        put_leaf(&m, "", &node, x, 5);
        made_text(&m, "_METADATA", texts[i]);
        made_open(&m, &o);
        no_error(&o);
        check_floats(&o, "w", six, 6);
        check_fault(&o, "v", "chunk");
        assert_int_equal(o.count, 2);
        all_warnings(&o, &text);
        assert_has(text.data, "damaged-file: _METADATA: ");
        finish(&m, &o);
    }
}

/* {"params": {"b": array, "w": placeholder}, "step": 7, "w": placeholder} */
static void test_aggregate(void **state)
{
    static const char msgpack[] = "\x83\xa6params\x82\xa1"
                                  "b\xc7\x19\1\x93\x91\3\xa7"
                                  "float32\xc4\x0c\0\0\0\0\0\0\x80\x3f\0\0\0\x40\xa1"
                                  "w\xb6PLACEHOLDER://params.w\xa4step\x07\xa1"
                                  "w\xafPLACEHOLDER://w"; /* lost */
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "checkpoint_7");
    made_file(&m, "checkpoint", msgpack, sizeof msgpack - 1);
    made_text(&m, "params.w/.zarray", ZARRAY);
    made_file(&m, "params.w/0", six, 12);
    made_file(&m, "params.w/1", six + 3, 12);
    made_open(&m, &o);
    no_error(&o);
    check_floats(&o, "params.w", six, 6);
    check_floats(&o, "params.b", six, 3);
    check_fault(&o, "w", "checkpoint names it, but there is no such array");
    assert_int_equal(o.count, 3);
    check_objects(&o, "step=7\n");
    assert_string_equal(o.info.format, "orbax-zarr");
    finish(&m, &o);
}

/* T5X: arrays in the file go by the names that its directories have. */
static void test_t5x(void **state)
{
    static const char msgpack[] =
        "\x82\xa7version\x03\xa9optimizer\x82\xa6target\x82\xa1"
        "w\x81\xa6"
        "driver\xa4zarr\xa1"
        "b\xc7\x19\1\x93\x91\3\xa7"
        "float32\xc4\x0c\0\0\0\0\0\0\x80\x3f\0\0\0\x40\xa5"
        "state\x81\xa4step\x07";
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "checkpoint_7");
    made_file(&m, "checkpoint", msgpack, sizeof msgpack - 1);
    made_text(&m, "target.w/.zarray", ZARRAY);
    made_file(&m, "target.w/0", six, 12);
    made_file(&m, "target.w/1", six + 3, 12);
    made_text(&m, "state.param_states.w.v/.zarray", ZARRAY);
    made_file(&m, "state.param_states.w.v/0", six, 12);
    made_file(&m, "state.param_states.w.v/1", six + 3, 12);
    made_open(&m, &o);
    no_error(&o);
    check_floats(&o, "target.w", six, 6);
    check_floats(&o, "target.b", six, 3);
    check_floats(&o, "state.param_states.w.v", six, 6);
    assert_int_equal(o.count, 3);
    assert_int_equal(tensor(&o, "target.w")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "target.b")->role, ROLE_MODEL);
    assert_int_equal(tensor(&o, "state.param_states.w.v")->role, ROLE_OPTIMIZER);
    check_objects(&o, "optimizer={\"target\":{\"w\":{\"driver\":\"zarr\"},"
                      "\"b\":{\"$type\":\"tensor\",\"key\":\"target.b\"}},"
                      "\"state\":{\"step\":7}}\nversion=3\n");
    finish(&m, &o);
}

/* ---- steps ---- */

static void test_step(void **state)
{
    static const struct ob_entry x[] = {TEXT("w/.zarray", ZARRAY), HALF("w/0", 0),
                                        HALF("w/1", 1)};
    static const struct ob_entry y[] = {TEXT("w/.zarray", ZARRAY), HALF("w/0", 1),
                                        HALF("w/1", 0)};
    static const float swapped[6] = {3, 4, 5, 0, 1, 2};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "step_40");
    put_leaf(&m, "params/", &node, x, 3);
    made_text(&m, "params/_METADATA", TREE(LEAF("w", "jax.Array"), ""));
    put_leaf(&m, "opt_state/", &node, y, 3);
    made_text(&m, "opt_state/_METADATA", TREE(LEAF("w", "jax.Array"), ""));
    made_text(&m, "metrics/metrics", "{\"loss\": 0.5}");
    made_text(&m, "rng/key_metadata/metadata", "{\"typed\": true}");
    made_text(&m, "data/state.bin", "something else");
    made_text(&m, "_CHECKPOINT_METADATA",
              "{\"item_handlers\": {}, \"metrics\": {}, "
              "\"custom_metadata\": {\"k\": 1}}");
    made_open(&m, &o);
    no_error(&o);
    assert_int_equal(o.count, 2);
    check_floats(&o, "w", six, 6);
    check_floats(&o, "opt_state/w", swapped, 6);
    assert_int_equal(tensor(&o, "opt_state/w")->role, ROLE_OPTIMIZER);
    assert_string_equal(o.info.format, "orbax-manager");
    assert_int_equal(o.info.step, 40);
    check_objects(&o, "custom_metadata={\"k\": 1}\nmetrics={\"loss\": 0.5}\n"
                      "rng/key_metadata={\"typed\": true}\n");
    finish(&m, &o);
}

/* What an emergency manager keeps on a process's own disk: one of two shards. */
static void test_local_step(void **state)
{
    static const struct ob_entry half[] = {TEXT("w/.zarray", ZARRAY), HALF("w/0", 0)};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "3");
    put_leaf(&m, "state/", &node, half, 2);
    made_text(&m, "state/_METADATA", TREE(LEAF("w", "jax.Array"), ""));
    made_text(&m, "process_metadata/global_process_metadata.json", "[[0], [1]]");
    made_text(&m, "_CHECKPOINT_METADATA", "{\"item_handlers\": {}}");
    made_open(&m, &o);
    no_error(&o);
    check_fault(&o, "w", "chunk 1 is missing");
    check_warnings(&o, "local-copy: process_metadata: a local step, with the shards of "
                       "one process; the persistent step of the run has all\n");
    finish(&m, &o);
}

/* ArrayCheckpointHandler's items until 0.11, and a manager's prefix before 0.6. */
static void test_array_items(void **state)
{
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "run_00000007");
    made_text(&m, "default/_METADATA", TREE(LEAF("v", "jax.Array"), ""));
    made_text(&m, "default/v/.zarray", ZARRAY);
    made_file(&m, "default/v/0", six, 12);
    made_file(&m, "default/v/1", six + 3, 12);
    made_text(&m, "arr/checkpoint/.zarray", ZARRAY);
    made_file(&m, "arr/checkpoint/0", six, 12);
    made_file(&m, "arr/checkpoint/1", six + 3, 12);
    made_text(&m, "other/x/.zarray", ZARRAY); /* nothing says that it is an item */
    made_file(&m, "other/x/0", six, 12);
    made_file(&m, "other/x/1", six + 3, 12);
    made_open(&m, &o);
    no_error(&o);
    assert_string_equal(o.info.format, "orbax-manager");
    assert_int_equal(o.info.step, 7);
    assert_int_equal(o.count, 2);
    check_floats(&o, "v", six, 6);
    check_floats(&o, "checkpoint", six, 6);
    close_checkpoint(&o);
    made_text(&m, "_CHECKPOINT_METADATA", "{\"item_handlers\": {}}");
    made_open(&m, &o);
    assert_int_equal(o.count, 3);
    check_floats(&o, "x", six, 6);
    finish(&m, &o);
}

static void check_no_checkpoint(const struct made *m)
{
    struct checkpoint_info info;
    struct world w;
    struct err e = {0};

    assert_ok(world_open(m->dir, &w, &e), &e);
    assert_int_equal(scanner_get(w.scanner, "", NULL, w.arena, &info, &e), -ENOENT);
    world_close(&w);
    made_end(m);
}

/* Texts are kept under JSON pointers. */
static void test_strings(void **state)
{
    static const struct ob_entry x[] = {TEXT("w/.zarray", ZARRAY), HALF("w/0", 0),
                                        HALF("w/1", 1)};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "tree");
    put_leaf(&m, "", &node, x, 3);
    made_text(
        &m, "_METADATA",
        TREE(LEAF("w", "jax.Array") ", " LEAF("a.b/c/d", "string") ", " LEAF(
                 "e~1", "string") ", " LEAF("~0~", "string") ", " LEAF("a.b", "string"),
             ""));
    made_text(&m, "_strings.json",
              "{\"a.b\": {\"c\": {\"d\": \"deep\"}}, \"e/\": \"slash\", "
              "\"~~\": \"tilde\"}");
    made_open(&m, &o);
    check_floats(&o, "w", six, 6);
    check_objects(&o, "a.b={\"$type\":\"opaque\",\"class\":\"unreadable\",\"error\":"
                      "\"_strings.json does not hold it\"}\n"
                      "a.b/c/d=\"deep\"\n"
                      "e~1=\"slash\"\n"
                      "~0~=\"tilde\"\n");
    finish(&m, &o);
}

/* A save that runs, or was cut off, shows as the plain directory that it is. */
static void test_unfinished(void **state)
{
    static const struct ob_entry x[] = {TEXT("w/.zarray", ZARRAY), HALF("w/0", 0),
                                        HALF("w/1", 1)};
    struct made m;

    (void)state;
    made_begin(&m, "30.orbax-checkpoint-tmp-5");
    put_leaf(&m, "", &node, x, 3);
    made_text(&m, "_METADATA", TREE(LEAF("w", "jax.Array"), ""));
    check_no_checkpoint(&m);
    made_begin(&m, "40.orbax-checkpoint-tmp");
    made_text(&m, "w/.zarray", ZARRAY);
    made_text(&m, "_CHECKPOINT_METADATA", "{}");
    check_no_checkpoint(&m);
    made_begin(&m, "40.partial_save.pending_17_ab");
    put_leaf(&m, "", &node, x, 3);
    made_text(&m, "_METADATA", TREE(LEAF("w", "jax.Array"), ""));
    check_no_checkpoint(&m);
    made_begin(&m, "tree");
    put_leaf(&m, "ocdbt.process_0/", &node, x, 3);
    made_text(&m, "_METADATA", TREE(LEAF("w", "jax.Array"), ""));
    check_no_checkpoint(&m);
    made_begin(&m, "ocdbt.process_0");
    put_leaf(&m, "", &node, x, 3);
    check_no_checkpoint(&m);
    made_begin(&m, "40");
    put_leaf(&m, "state/", &node, x, 3);
    made_text(&m, "state/_METADATA", TREE(LEAF("w", "jax.Array"), ""));
    put_leaf(&m, "opt/ocdbt.process_0/", &node, x, 3);
    made_text(&m, "_CHECKPOINT_METADATA", "{}");
    check_no_checkpoint(&m);
}

/* {"a": {"b": ...}, "a.b": ...}: Orbax writes one leaf over the other. */
static void test_same_name(void **state)
{
    static const struct ob_entry x[] = {TEXT("a.b/.zarray", ZARRAY),
                                        HALF("a.b/0", 0),
                                        HALF("a.b/1", 1),
                                        TEXT("n.m/.zarray", NUMBER("|b1")),
                                        {.key = "n.m/0", .text = "\1", .text_len = 1}};
    static const char leaf[] = "\"('%s')\": {\"key_metadata\": [%s], "
                               "\"value_metadata\": {\"value_type\": \"%s\"}}%s";
    static const char *const path[][2] = {
        {"a', 'b", "{\"key\": \"a\"}, {\"key\": \"b\"}"},
        {"a.b", "{\"key\": \"a.b\"}"},
        {"n', 'm", "{\"key\": \"n\"}, {\"key\": \"m\"}"},
        {"n.m", "{\"key\": \"n.m\"}"}};
    CLEANUP(buf_release) struct buf text = {0};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "tree");
    put_leaf(&m, "", &node, x, ARRAY_SIZE(x));
    buf_adds(&text, "{\"tree_metadata\": {");
    for (size_t i = 0; i < ARRAY_SIZE(path); i++)
        buf_addf(&text, leaf, path[i][0], path[i][1], i < 2 ? "jax.Array" : "scalar",
                 i < 3 ? ", " : "}}");
    made_text(&m, "_METADATA", text.data);
    made_open(&m, &o);
    no_error(&o);
    check_floats(&o, "a.b", six, 6);
    assert_int_equal(o.count, 1);
    check_objects(&o, "n.m=true\n");
    check_warnings(&o,
                   "duplicate-key: a.b: two leaves were saved under this name, one of "
                   "them is there\n"
                   "duplicate-key: n.m: two leaves were saved under this name, one of "
                   "them is there\n");
    finish(&m, &o);
}

/* Numbers of any type that a save may cast them to. */
static void test_numbers(void **state)
{
#define BYTES(name, bytes)                                                             \
    {                                                                                  \
        .key = (name), .text = (bytes), .text_len = sizeof(bytes) - 1                  \
    }
    static const struct ob_entry x[] = {
        TEXT("b/.zarray", NUMBER("bfloat16")), BYTES("b/0", "\x20\x40"),
        TEXT("c/.zarray", NUMBER("<u2")),      BYTES("c/0", "\xff\xff"),
        TEXT("h/.zarray", NUMBER("<f2")),      BYTES("h/0", "\x01\x80"),
        TEXT("i/.zarray", NUMBER("|i1")),      BYTES("i/0", "\xfe"),
        TEXT("q/.zarray", NUMBER("int4")),     BYTES("q/0", "\x0e"),
        TEXT("s/.zarray", NUMBER(">i2")),      BYTES("s/0", "\xff\xfd"),
    };
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "tree");
    put_leaf(&m, "", &node, x, ARRAY_SIZE(x));
    made_text(
        &m, "_METADATA",
        TREE(LEAF("b", "scalar") ", " LEAF("c", "scalar") ", " LEAF(
                 "h",
                 "scalar") ", " LEAF("i",
                                     "scalar") ", " LEAF("q",
                                                         "scalar") ", " LEAF("s",
                                                                             "scalar"),
             ""));
    made_open(&m, &o);
    no_error(&o);
    assert_int_equal(o.count, 1);
    assert_int_equal(tensor(&o, "q")->dtype, DTYPE_U8);
    check_objects(&o, "b=2.5\nc=65535\nh=-5.9604644775390625e-08\ni=-2\ns=-3\n");
    finish(&m, &o);
}

/* A step of before 0.6 below a manager's own prefix is known by an item's name. */
static void test_prefix(void **state)
{
    static const struct ob_entry x[] = {TEXT("w/.zarray", ZARRAY), HALF("w/0", 0),
                                        HALF("w/1", 1)};
    struct made m;
    struct opened o;

    (void)state;
    made_begin(&m, "run_7");
    put_leaf(&m, "params/", &node, x, 3);
    made_text(&m, "params/_METADATA", TREE(LEAF("w", "jax.Array"), ""));
    made_text(&m, "metrics/metrics", "{\"loss\": 0.5}");
    made_open(&m, &o);
    no_error(&o);
    check_floats(&o, "w", six, 6);
    assert_int_equal(o.info.step, 7);
    check_objects(&o, "metrics={\"loss\": 0.5}\n");
    finish(&m, &o);
}

/* A tree of one array is a checkpoint beside others: what holds them is no group of zarr. */
static void test_one_leaf(void **state)
{
    struct made m;

    (void)state;
    made_begin(&m, "trees");
    made_text(&m, "one/_METADATA", TREE("", ""));
    made_text(&m, "one/.zarray", ZARRAY);
    made_text(&m, "two/_METADATA", TREE(LEAF("w", "jax.Array"), ""));
    made_text(&m, "two/w/.zarray", ZARRAY);
    check_no_checkpoint(&m);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "inline", .test_func = test_inline},
        {.name = "files", .test_func = test_files},
        {.name = "levels", .test_func = test_levels},
        {.name = "records", .test_func = test_records},
        {.name = "leaves", .test_func = test_leaves},
        {.name = "trees", .test_func = test_trees},
        {.name = "shared nodes", .test_func = test_shared_nodes},
        {.name = "unfolded", .test_func = test_unfolded},
        {.name = "lost chunks", .test_func = test_lost_chunks},
        {.name = "numbered", .test_func = test_numbered},
        {.name = "empty", .test_func = test_empty},
        {.name = "tree", .test_func = test_tree},
        {.name = "flag", .test_func = test_flag},
        {.name = "damaged tree", .test_func = test_damaged_tree},
        {.name = "aggregate", .test_func = test_aggregate},
        {.name = "t5x", .test_func = test_t5x},
        {.name = "step", .test_func = test_step},
        {.name = "local step", .test_func = test_local_step},
        {.name = "array items", .test_func = test_array_items},
        {.name = "strings", .test_func = test_strings},
        {.name = "unfinished", .test_func = test_unfinished},
        {.name = "same name", .test_func = test_same_name},
        {.name = "numbers", .test_func = test_numbers},
        {.name = "prefix", .test_func = test_prefix},
        {.name = "one leaf", .test_func = test_one_leaf},
    };

    return run_with_fixtures("orbax", argc, argv, others, ARRAY_SIZE(others));
}
