/* SPDX-License-Identifier: MIT */
/* tests/unit/test_dcp_metadata.c - .metadata pickles, real and odd ones, as tables. */
#include "unit.h"

#include <errno.h>
#include <stdio.h>

#include "base/err.h"
#include "index/formats/dcp/dcp_metadata.h"
#include "remote/source.h"

#define METADATA "torch.distributed.checkpoint.metadata"
#define FILESYSTEM "torch.distributed.checkpoint.filesystem"

/* Pickles are written opcode by opcode, protocol 2, without a memo unless said. */

static void op(struct buf *b, const char *codes)
{
    buf_adds(b, codes);
}

static void text(struct buf *b, const char *s)
{
    unsigned char head[5] = {'X', (unsigned char)strlen(s)};

    buf_add(b, head, sizeof head);
    buf_adds(b, s);
}

static void number(struct buf *b, int64_t v)
{
    unsigned char code[10] = {0x8a, 8};

    memcpy(code + 2, &v, sizeof v); /* little-endian hosts only, as the product */
    buf_add(b, code, sizeof code);
}

static void global(struct buf *b, const char *module, const char *name)
{
    buf_addf(b, "c%s\n%s\n", module, name);
}

/* torch.Size of two dimensions. */
static void size2(struct buf *b, int64_t x, int64_t y)
{
    global(b, "torch", "Size");
    number(b, x);
    number(b, y);
    op(b, "\x86\x85R");
}

/* An object of the class, up to its state's first member; closed by end_object(). */
static void begin_object(struct buf *b, const char *module, const char *name)
{
    global(b, module, name);
    op(b, ")\x81}(");
}

static void end_object(struct buf *b)
{
    op(b, "ub");
}

static void properties(struct buf *b, const char *dtype, const char *layout)
{
    text(b, "properties");
    global(b, METADATA, "TensorProperties");
    op(b, ")\x81(");
    global(b, "torch", dtype);
    global(b, "torch.serialization", "_get_layout");
    text(b, layout);
    op(b, "\x85R\x89N\x89tb");
}

static void chunk(struct buf *b, int64_t row, int64_t rows, int64_t columns)
{
    begin_object(b, METADATA, "ChunkStorageMetadata");
    text(b, "offsets");
    size2(b, row, 0);
    text(b, "sizes");
    size2(b, rows, columns);
    end_object(b);
}

/* A tensor 4x3 in chunks of two rows, without its key. */
static void tensor(struct buf *b, const char *dtype, const char *layout)
{
    begin_object(b, METADATA, "TensorStorageMetadata");
    properties(b, dtype, layout);
    text(b, "size");
    size2(b, 4, 3);
    text(b, "chunks");
    op(b, "](");
    chunk(b, 0, 2, 3);
    chunk(b, 2, 2, 3);
    op(b, "e");
    end_object(b);
}

/* A pair of storage_data. */
static void stored(struct buf *b, const char *key, int64_t row, int64_t offset,
                   const char *descriptor)
{
    begin_object(b, METADATA, "MetadataIndex");
    text(b, "fqn");
    text(b, key);
    text(b, "index");
    op(b, "N");
    if (row >= 0) {
        text(b, "offset");
        size2(b, row, 0);
    }
    end_object(b);
    begin_object(b, FILESYSTEM, "_StorageInfo");
    text(b, "relative_path");
    text(b, "__0_0.distcp");
    text(b, "offset");
    number(b, offset);
    text(b, "length");
    number(b, 100);
    if (descriptor) {
        text(b, "transform_descriptors");
        op(b, "](");
        text(b, descriptor);
        op(b, "e");
    }
    end_object(b);
}

static void begin_metadata(struct buf *b)
{
    op(b, "\x80\x02");
    begin_object(b, METADATA, "Metadata");
    text(b, "state_dict_metadata");
    op(b, "}(");
}

static void then(struct buf *b, const char *member)
{
    op(b, "u");
    text(b, member);
    op(b, "}(");
}

static void end_metadata(struct buf *b)
{
    op(b, "u");
    end_object(b);
    op(b, ".");
}

/* A loaded file with its names. */
struct loaded {
    struct dcp_names names;
    struct dcp_metadata *m;
    struct err e;
};

static void release(struct loaded *l)
{
    dcp_metadata_free(l->m);
    dcp_names_release(&l->names);
    *l = (struct loaded){0};
}

static int load(struct buf *b, struct loaded *l)
{
    struct source *s = NULL;
    int rc;

    *l = (struct loaded){0};
    assert_false(buf_failed(b));
    assert_ok(source_from_memory(b->data, b->len, false, "t", &s, &l->e), &l->e);
    rc = dcp_metadata_load(s, &l->names, &l->m, &l->e);
    source_put(s);
    buf_release(b);
    return rc;
}

static uint32_t key_number(const struct loaded *l, const char *key)
{
    uint32_t n = 0;

    assert_true(intern_find(&l->names.keys, key, strlen(key), &n));
    return n;
}

/* Where the chunk of `key` that starts at row `row` lies, or NULL. */
static const struct dcp_stored *find(const struct loaded *l, const char *key,
                                     int64_t row)
{
    int64_t at[2] = {row, 0};
    uint32_t shape;

    if (row < 0)
        return dcp_stored_find(l->m, key_number(l, key), DCP_NO_SHAPE);
    assert_true(intern_find(&l->names.shapes, at, sizeof at, &shape));
    return dcp_stored_find(l->m, key_number(l, key), shape);
}

static const struct dcp_entry *entry(const struct loaded *l, const char *key)
{
    uint32_t number_of = key_number(l, key);

    for (uint32_t i = 0; i < l->m->nentries; i++)
        if (l->m->entry[i].key == number_of)
            return &l->m->entry[i];
    fail_msg("no entry %s", key);
    return NULL;
}

static const struct dcp_tensor *tensor_of(const struct loaded *l, const char *key)
{
    uint32_t row = entry(l, key)->tensor;

    assert_int_not_equal(row, DCP_OBJECT);
    return &l->m->tensor[row];
}

static void assert_shape(const struct loaded *l, uint32_t shape, int64_t x, int64_t y)
{
    uint32_t nd;
    const int64_t *dim = dcp_shape(&l->names, shape, &nd);

    assert_int_equal(nd, 2);
    assert_int_equal(dim[0], x);
    assert_int_equal(dim[1], y);
}

static void test_tables(void **state)
{
    struct buf b = {0};
    struct loaded l;
    const struct dcp_tensor *t;

    (void)state;
    begin_metadata(&b);
    text(&b, "model.w");
    tensor(&b, "bfloat16", "torch.strided");
    text(&b, "step");
    op(&b, "c" METADATA "\nBytesStorageMetadata\n)\x81");
    then(&b, "planner_data");
    text(&b, "model.w");
    op(&b, "(");
    text(&b, "model");
    text(&b, "w");
    op(&b, "t");
    then(&b, "storage_data");
    stored(&b, "model.w", 0, 7, NULL);
    stored(&b, "model.w", 2, 107, "stream.zstd/1");
    stored(&b, "step", -1, 207, NULL);
    op(&b, "u");
    text(&b, "version");
    text(&b, "1.0.0");
    end_object(&b);
    op(&b, ".");

    assert_ok(load(&b, &l), &l.e);
    assert_int_equal(l.m->nentries, 2);
    assert_string_equal(l.m->version, "1.0.0");
    assert_int_equal(entry(&l, "model.w")->wrapper, 6);
    assert_int_equal(entry(&l, "step")->wrapper, 0);
    assert_int_equal(entry(&l, "step")->tensor, DCP_OBJECT);
    t = tensor_of(&l, "model.w");
    assert_int_equal(t->dtype, DTYPE_BF16);
    assert_int_equal(t->bad, DCP_GOOD);
    assert_int_equal(t->count, 2);
    assert_shape(&l, t->size, 4, 3);
    assert_shape(&l, l.m->chunk[t->first].start, 0, 0);
    assert_shape(&l, l.m->chunk[t->first + 1].start, 2, 0);
    assert_shape(&l, l.m->chunk[t->first + 1].size, 2, 3);
    assert_int_equal(find(&l, "model.w", 0)->offset, 7);
    assert_int_equal(find(&l, "model.w", 0)->length, 100);
    assert_false(find(&l, "model.w", 0)->zstd);
    assert_true(find(&l, "model.w", 2)->zstd);
    assert_int_equal(find(&l, "step", -1)->offset, 207);
    assert_null(find(&l, "model.w", -1));
    assert_null(find(&l, "step", 0));
    assert_int_equal(l.m->skipped, 0);
    release(&l);
}

/* Python's dict keeps the last value of a key; our keys are records, equal or not. */
static void test_last_wins(void **state)
{
    struct buf b = {0};
    struct loaded l;

    (void)state;
    begin_metadata(&b);
    text(&b, "w");
    tensor(&b, "float32", "torch.strided");
    text(&b, "w");
    tensor(&b, "float16", "torch.strided");
    then(&b, "storage_data");
    stored(&b, "w", 0, 1, NULL);
    stored(&b, "w", 2, 2, NULL);
    stored(&b, "w", 0, 3, NULL);
    end_metadata(&b);

    assert_ok(load(&b, &l), &l.e);
    assert_int_equal(l.m->nentries, 1);
    assert_int_equal(tensor_of(&l, "w")->dtype, DTYPE_F16);
    assert_int_equal(find(&l, "w", 0)->offset, 3);
    assert_int_equal(find(&l, "w", 2)->offset, 2);
    release(&l);
}

/* What is wrong with one tensor or blob stands beside it, and others are read. */
static void test_bad_items(void **state)
{
    struct buf b = {0};
    struct loaded l;
    const char *word;
    size_t len;

    (void)state;
    begin_metadata(&b);
    text(&b, "quantised");
    tensor(&b, "quint4x2", "torch.strided");
    text(&b, "sparse");
    tensor(&b, "float32", "torch.sparse_coo");
    text(&b, "odd");
    op(&b, "cmy.own\nThing\n)\x81");
    text(&b, "none");
    op(&b, "N");
    op(&b, "K\x05K\x06"); /* a key that is no string */
    text(&b, "good");
    tensor(&b, "int8", "torch.strided");
    then(&b, "storage_data");
    stored(&b, "good", 0, 1, "rot13/2");
    stored(&b, "good", 2, -1, NULL);
    end_metadata(&b);

    assert_ok(load(&b, &l), &l.e);
    assert_int_equal(l.m->nentries, 5);
    assert_int_equal(l.m->skipped, 1);
    assert_int_equal(tensor_of(&l, "quantised")->bad, DCP_BAD_DTYPE);
    word = intern_get(&l.names.words, tensor_of(&l, "quantised")->word, &len);
    assert_int_equal(len, strlen("torch.quint4x2"));
    assert_memory_equal(word, "torch.quint4x2", len);
    assert_int_equal(tensor_of(&l, "sparse")->bad, DCP_BAD_LAYOUT);
    assert_int_equal(tensor_of(&l, "odd")->bad, DCP_BAD_CLASS);
    word = intern_get(&l.names.words, tensor_of(&l, "odd")->word, &len);
    assert_memory_equal(word, "my.own.Thing", len);
    assert_int_equal(tensor_of(&l, "none")->bad, DCP_BAD_CLASS);
    assert_int_equal(tensor_of(&l, "good")->bad, DCP_GOOD);
    assert_int_equal(find(&l, "good", 0)->bad, DCP_BAD_TRANSFORM);
    word = intern_get(&l.names.words, find(&l, "good", 0)->word, &len);
    assert_int_equal(len, strlen("rot13/2"));
    assert_memory_equal(word, "rot13/2", len);
    assert_int_equal(find(&l, "good", 2)->bad, DCP_BAD_OFFSET);
    release(&l);
}

/*
 * Pairs are taken while the first dict that has such pairs is read. When that was not the
 * dict of the Metadata object, what was taken is forgotten and the right one is walked.
 */
static void test_other_dicts_first(void **state)
{
    struct buf b = {0};
    struct loaded l;

    (void)state;
    op(&b, "\x80\x02");
    begin_object(&b, METADATA, "Metadata");
    text(&b, "all_local_plans");
    op(&b, "](}(");
    text(&b, "model.decoy");
    tensor(&b, "float64", "torch.strided");
    stored(&b, "model.w", 0, 99, NULL);
    text(&b, "model.w");
    op(&b, "(");
    text(&b, "other");
    text(&b, "w");
    op(&b, "tue");
    text(&b, "state_dict_metadata");
    op(&b, "}(");
    text(&b, "model.w");
    tensor(&b, "float32", "torch.strided");
    then(&b, "planner_data");
    text(&b, "model.w");
    op(&b, "(");
    text(&b, "model");
    text(&b, "w");
    op(&b, "t");
    then(&b, "storage_data");
    stored(&b, "model.w", 2, 5, NULL);
    end_metadata(&b);

    assert_ok(load(&b, &l), &l.e);
    assert_int_equal(l.m->nentries, 1);
    assert_int_equal(tensor_of(&l, "model.w")->dtype, DTYPE_F32);
    assert_int_equal(entry(&l, "model.w")->wrapper, 6);
    assert_null(find(&l, "model.w", 0));
    assert_int_equal(find(&l, "model.w", 2)->offset, 5);
    release(&l);
}

/*
 * What was in a dict that nobody kept is not in the next one at its address. So many others
 * are gone after it, which takes the address of each in turn.
 */
static void check_dicts_that_are_gone(int others)
{
    struct buf b = {0};
    struct loaded l;

    op(&b, "\x80\x02");
    for (int i = 0; i < others; i++)
        op(&b, "}");
    op(&b, "}(");
    text(&b, "ghost");
    tensor(&b, "float64", "torch.strided");
    op(&b, "u}(");
    stored(&b, "w", 0, 99, NULL);
    op(&b, "u00");
    for (int i = 0; i < others; i++)
        op(&b, "0");
    begin_object(&b, METADATA, "Metadata");
    text(&b, "state_dict_metadata");
    op(&b, "}(");
    text(&b, "w");
    tensor(&b, "float32", "torch.strided");
    then(&b, "storage_data");
    stored(&b, "w", 2, 5, NULL);
    end_metadata(&b);

    assert_ok(load(&b, &l), &l.e);
    assert_int_equal(l.m->nentries, 1);
    assert_int_equal(tensor_of(&l, "w")->dtype, DTYPE_F32);
    assert_null(find(&l, "w", 0));
    assert_int_equal(find(&l, "w", 2)->offset, 5);
    release(&l);
}

static void test_dicts_that_are_gone(void **state)
{
    (void)state;
    for (int others = 0; others < 8; others++)
        check_dicts_that_are_gone(others);
}

/* A name whose first value gets its state last: which pair came later is not known. */
static void test_a_name_twice(void **state)
{
    struct buf b = {0};
    struct loaded l;

    (void)state;
    op(&b, "\x80\x02");
    begin_object(&b, METADATA, "Metadata");
    text(&b, "state_dict_metadata");
    op(&b, "}(");
    text(&b, "w");
    global(&b, METADATA, "TensorStorageMetadata");
    op(&b, ")\x81q\x01");
    text(&b, "w");
    tensor(&b, "float32", "torch.strided");
    op(&b, "u");
    text(&b, "late");
    op(&b, "h\x01}(");
    properties(&b, "float64", "torch.strided");
    text(&b, "size");
    size2(&b, 4, 3);
    text(&b, "chunks");
    op(&b, "](");
    chunk(&b, 0, 4, 3);
    op(&b, "eub");
    end_object(&b);
    op(&b, ".");

    assert_int_equal(load(&b, &l), -EBADMSG);
    assert_string_equal(l.e.text, "a tensor's name twice");
    release(&l);
}

/* OLMo-core's writer pickles a record of its own module; a stranger's is not trusted. */
static void test_other_writers(void **state)
{
    static const char ours[] = "c" FILESYSTEM "\n_StorageInfo\n";
    static const char *const modules[] = {"olmo_core.distributed.checkpoint.filesystem",
                                          "someone.else"};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(modules); i++) {
        struct buf b = {0}, other = {0};
        struct loaded l;
        char *at;

        begin_metadata(&b);
        text(&b, "w");
        tensor(&b, "float32", "torch.strided");
        then(&b, "storage_data");
        stored(&b, "w", 0, 5, NULL);
        end_metadata(&b);
        at = memmem(b.data, b.len, ours, sizeof ours - 1);
        assert_non_null(at);
        buf_add(&other, b.data, (size_t)(at - b.data));
        buf_addf(&other, "c%s\n_StorageInfo\n", modules[i]);
        at += sizeof ours - 1;
        buf_add(&other, at, (size_t)(b.data + b.len - at));
        buf_release(&b);

        assert_ok(load(&other, &l), &l.e);
        assert_int_equal(find(&l, "w", 0)->bad, i == 0 ? DCP_GOOD : DCP_BAD_INFO);
        assert_int_equal(find(&l, "w", 0)->offset, i == 0 ? 5 : 0);
        release(&l);
    }
}

/* Wrappers only of the known names, only of paths longer than one, only when it fits. */
static void test_wrappers(void **state)
{
    static const struct {
        const char *key, *first, *second;
        uint32_t wrapper;
    } cases[] = {
        {"module.a", "module", "a", 7},  {"state_dict.a", "state_dict", "a", 11},
        {"app.model.a", "app", "a", 4},  {"optim.a", "optim", "a", 0},
        {"model.b", "model", NULL, 0},   {"model", "model", "a", 0},
        {"models.a", "model", "s.a", 0}, {"layers.0", "model", "a", 0},
        {"dcp.model.a", "dcp", "a", 4},
    };
    struct buf b = {0};
    struct loaded l;

    (void)state;
    begin_metadata(&b);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        text(&b, cases[i].key);
        tensor(&b, "float32", "torch.strided");
    }
    then(&b, "planner_data");
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        text(&b, cases[i].key);
        op(&b, "(");
        text(&b, cases[i].first);
        if (cases[i].second)
            text(&b, cases[i].second);
        op(&b, "t");
    }
    then(&b, "storage_data");
    end_metadata(&b);

    assert_ok(load(&b, &l), &l.e);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        if (entry(&l, cases[i].key)->wrapper != cases[i].wrapper)
            fail_msg("%s: %u, not %u", cases[i].key, entry(&l, cases[i].key)->wrapper,
                     cases[i].wrapper);
    release(&l);
}

/* The same chunk list in many tensors: work must not pass the size of the file. */
static void test_multiplied_chunks(void **state)
{
    struct buf b = {0};
    struct loaded l;

    (void)state;
    begin_metadata(&b);
    text(&b, "list");
    op(&b, "](");
    chunk(&b, 0, 2, 3);
    op(&b, "q\x01"); /* BINPUT 1 */
    for (int i = 0; i < 2000; i++)
        op(&b, "h\x01");
    op(&b, "eq\x02");
    for (int i = 0; i < 8; i++) {
        char key[2] = {(char)('a' + i)};

        text(&b, key);
        begin_object(&b, METADATA, "TensorStorageMetadata");
        properties(&b, "float32", "torch.strided");
        text(&b, "size");
        size2(&b, 4, 3);
        text(&b, "chunks");
        op(&b, "h\x02");
        end_object(&b);
    }
    then(&b, "storage_data");
    end_metadata(&b);

    assert_int_equal(load(&b, &l), -EBADMSG);
    assert_has(l.e.text, "chunks");
    release(&l);
}

static void test_refused(void **state)
{
    static const struct {
        const char *pickle;
        size_t len;
        int code;
        const char *words;
    } cases[] = {
#define CASE(pickle, code, words) {pickle, sizeof(pickle) - 1, code, words}
        CASE("", EBADMSG, ""),
        CASE("\x80\x02].", EBADMSG, "not the pickle of a DCP Metadata"),
        CASE("\x80\x02"
             "cos\nsystem\nX\x02\0\0\0ls\x85R.",
             EBADMSG, "os.system"),
        CASE("\x80\x02"
             "cmegatron.core\nMCoreMetadata\n)\x81.",
             ENOTSUP, "megatron.core.MCoreMetadata"),
        CASE("\x80\x02"
             "c" METADATA "\nMetadata\n)\x81.",
             EBADMSG, "without state_dict_metadata"),
        CASE("\x80\x02"
             "c" METADATA "\nMetadata\n)\x81}X\x13\0\0\0state_dict_metadata]sb.",
             EBADMSG, "without state_dict_metadata"),
        CASE("\x80\x02"
             "c" METADATA
             "\nMetadata\n)\x81}X\x13\0\0\0state_dict_metadata}sb.trailing",
             EBADMSG, "8 bytes behind"),
        CASE("\x80\x02"
             "c" METADATA "\nMetadata\n)\x81}X\x13\0\0\0state_dict_meta",
             EBADMSG, ""),
#undef CASE
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct buf b = {0};
        struct loaded l;

        buf_add(&b, cases[i].pickle, cases[i].len);
        if (load(&b, &l) != -cases[i].code)
            fail_msg("case %zu: %d, %s", i, l.e.code, l.e.text);
        assert_has(l.e.text, cases[i].words);
        release(&l);
    }
}

static void test_sniff(void **state)
{
    static const char frame[] = "\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x25" METADATA
                                "\x94\x8c\x08Metadata\x94\x93\x94)\x81";
    static const char old[] = "\x80\x02"
                              "c" METADATA "\nMetadata\nq\0)\x81";
    static const char longer[] = "\x80\x02"
                                 "c" METADATA "\nMetadataIndex\n)\x81";
    static const char late[] = "\x80\x04K\x01\x8c\x25" METADATA "\x8c\x08Metadata\x93";
    char name[80];

    (void)state;
    assert_true(dcp_metadata_sniff(frame, sizeof frame - 1, name, sizeof name));
    assert_true(dcp_metadata_sniff(old, sizeof old - 1, name, sizeof name));
    assert_string_equal(name, METADATA ".Metadata");
    assert_false(dcp_metadata_sniff(longer, sizeof longer - 1, name, sizeof name));
    assert_string_equal(name, METADATA ".MetadataIndex");
    assert_false(dcp_metadata_sniff(late, sizeof late - 1, name, sizeof name));
    assert_string_equal(name, "");
    for (size_t i = 0; i < sizeof frame - 6; i++) /* cut before the global */
        assert_false(dcp_metadata_sniff(frame, i, name, sizeof name));
    assert_false(dcp_metadata_sniff("\x80\x06", 2, name, sizeof name));
}

static void test_intern(void **state)
{
    struct intern t = {0};
    uint32_t first, n;
    size_t len;

    (void)state;
    assert_false(intern_find(&t, "x", 1, &n));
    assert_int_equal(intern_add(&t, "", 0, &first), 0);
    for (int i = 0; i < 5000; i++) {
        char key[16];
        int k = snprintf(key, sizeof key, "%d", i % 2500);

        assert_int_equal(intern_add(&t, key, (size_t)k, &n), 0);
        assert_int_equal(n, first + 1 + (uint32_t)i % 2500);
    }
    assert_int_equal(t.count, 2501);
    assert_memory_equal(intern_get(&t, first + 1 + 1234, &len), "1234", 4);
    assert_int_equal(len, 4);
    intern_get(&t, first, &len);
    assert_int_equal(len, 0);
    assert_true(intern_find(&t, "2499", 4, &n));
    assert_false(intern_find(&t, "2500", 4, &n));
    intern_release(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_last_wins),
        cmocka_unit_test(test_bad_items),
        cmocka_unit_test(test_other_dicts_first),
        cmocka_unit_test(test_dicts_that_are_gone),
        cmocka_unit_test(test_a_name_twice),
        cmocka_unit_test(test_other_writers),
        cmocka_unit_test(test_wrappers),
        cmocka_unit_test(test_multiplied_chunks),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_sniff),
        cmocka_unit_test(test_intern),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
