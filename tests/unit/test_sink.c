/* SPDX-License-Identifier: MIT */
/* tests/unit/test_sink.c - what a scan reports is what the index says, faults included. */
#include "catalog_fixture.h"
#include "fail_alloc.h"

#include "index/catalog_stage.h"
#include "index/catalog_write.h"
#include "index/sink_priv.h"

/* One scan of a checkpoint "run/step1" with a 4096-byte shard "a.bin". */
struct scan {
    struct tmp *tmp;
    struct fake_store store;
    struct catalog *c;
    struct sink *s;
    uint32_t file;
    int64_t id;
    struct arena *a;
    struct err e;
};

static void begin(struct scan *t)
{
    t->store = fake_new();
    fake_add(&t->store, "run/step1/a.bin", 4096);
    t->c = index_open(t->tmp, "test");
    t->s = scan_begin(t->c, &t->store, "run/step1", NULL);
    t->file = scan_file(t->s, "a.bin");
    t->a = arena_new(64 << 20);
    assert_non_null(t->a);
}

static void commit(struct scan *t)
{
    t->id = scan_commit(t->s);
    t->s = NULL;
}

static void end(struct scan *t)
{
    arena_free(t->a);
    catalog_close(t->c);
}

static struct tensor_info get(struct scan *t, const char *key)
{
    return get_key(t->c, t->id, key, t->a);
}

static struct checkpoint_info get_checkpoint(struct scan *t)
{
    struct checkpoint_info cp;

    assert_ok(catalog_checkpoint(t->c, "run/step1", NULL, t->a, &cp, &t->e), &t->e);
    return cp;
}

/* --- what is reported comes back --- */

static void test_checkpoint_comes_back(void **state)
{
    struct scan t = {.tmp = *state};
    const struct sink_checkpoint about = {.format = "torch-dcp",
                                          .framework = "PyTorch",
                                          .version = "2.9",
                                          .has_step = true,
                                          .step = -7,
                                          .topology = "{\"ranks\": 4}",
                                          .metadata_file = "run/step1/.metadata",
                                          .adapter = true};
    struct checkpoint_info cp, by_id;

    begin(&t);
    fake_add(&t.store, "run/step1/.metadata", 10);
    assert_ok(sink_checkpoint(t.s, &about, &t.e), &t.e);
    scan_plain(t.s, "w", 4, t.file, 0);
    scan_plain(t.s, "optimizer.w", 8, t.file, 16);
    commit(&t);
    cp = get_checkpoint(&t);
    assert_int_equal(cp.id, t.id);
    assert_string_equal(cp.path, "run/step1");
    assert_null(cp.file);
    assert_string_equal(cp.format, "torch-dcp");
    assert_string_equal(cp.framework, "PyTorch");
    assert_string_equal(cp.version, "2.9");
    assert_string_equal(cp.topology, "{\"ranks\": 4}");
    assert_string_equal(cp.metadata_file, "run/step1/.metadata");
    assert_true(cp.has_step && cp.step == -7 && cp.adapter);
    assert_null(cp.error);
    assert_int_equal(cp.tensors, 2);
    assert_int_equal(cp.chunks, 2);
    assert_int_equal(cp.bytes, 48);
    assert_int_equal(cp.faults, 0);
    assert_int_equal(cp.files, 2);
    assert_int_equal(cp.by_role[ROLE_MODEL], 1);
    assert_int_equal(cp.by_role[ROLE_OPTIMIZER], 1);
    assert_int_equal(cp.by_role[ROLE_OTHER], 0);
    assert_int_equal(cp.bytes_by_role[ROLE_OPTIMIZER], 32);
    assert_int_equal(cp.names_hash, 77);
    assert_int_equal(cp.dir_id.ino, 2);
    assert_int_equal(cp.dir_id.ctime_ns, 5);
    assert_int_equal(cp.uid, 1000);
    assert_int_equal(cp.mode, 0644);
    assert_ok(catalog_checkpoint_by_id(t.c, t.id, t.a, &by_id, &t.e), &t.e);
    assert_int_equal(by_id.tensors, 2);
    end(&t);
}

static void test_tensor_comes_back(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape shape = {3, {2, 3, 4}};
    struct sink_tensor in = f32("model.layer.0.w", &shape);
    struct tensor_info out;
    const struct chunk *chunk;
    size_t n;

    begin(&t);
    in.wrapper = 6;
    in.codec_key = "inner";
    in.attributes = "{\"gguf_type\": \"Q4_K\"}";
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 96, &t.e), &t.e);
    commit(&t);
    out = get(&t, "model.layer.0.w");
    assert_int_equal(out.ord, 0);
    assert_int_equal(out.key_len, strlen("model.layer.0.w"));
    assert_string_equal(out.key, "model.layer.0.w");
    assert_string_equal(out.name, "model.layer.0.w");
    assert_string_equal(out.name_npy, "model.layer.0.w.npy");
    assert_null(out.part);
    assert_int_equal(out.wrapper, 6);
    assert_int_equal(out.dtype, DTYPE_F32);
    assert_true(shape_equal(&out.shape, &shape));
    assert_int_equal(out.role, ROLE_MODEL);
    assert_int_equal(out.bytes, 96);
    assert_int_equal(out.chunks, 1);
    assert_null(out.fault);
    assert_string_equal(out.codec_key, "inner");
    assert_int_equal(out.codec_key_len, 5);
    assert_string_equal(out.attributes, "{\"gguf_type\": \"Q4_K\"}");
    assert_int_equal(out.mtime_ns, 1000);
    assert_ok(catalog_chunks(t.c, t.id, &out, t.a, &chunk, &n, &t.e), &t.e);
    assert_int_equal(n, 1);
    assert_int_equal(chunk[0].file, t.file);
    assert_int_equal(chunk[0].offset, 96);
    assert_int_equal(chunk[0].length, 96);
    for (unsigned k = 0; k < 3; k++) {
        assert_int_equal(chunk[0].start[k], 0);
        assert_int_equal(chunk[0].size[k], shape.dim[k]);
    }
    end(&t);
}

/* Reported from the last row to the first, they come back from the first to the last. */
static void test_chunks_come_back_in_order(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape shape = {2, {4, 8}};
    struct sink_tensor in = f32("w", &shape);
    const int64_t step[] = {1, 1}; /* of a 1x8 box: the column is what counts */
    struct tensor_info out;
    const struct chunk *chunk;
    size_t n;

    begin(&t);
    assert_ok(sink_tensor_begin(t.s, &in, &t.e), &t.e);
    for (uint64_t row = 4; row-- > 0;) {
        const uint64_t start[] = {row, 0}, size[] = {1, 8};
        const struct chunk c = {.file = t.file,
                                .flags = row == 2 ? CHUNK_SWAP : 0,
                                .encoding = row == 1 ? CHUNK_TORCH_ZIP : CHUNK_PLAIN,
                                .offset = row * 100,
                                .length = row == 3 ? 64 : 32,
                                .start = start,
                                .size = size,
                                .first = row == 3 ? 5 : 0,
                                .step = row == 3 ? step : NULL};

        assert_ok(sink_chunk(t.s, &c, &t.e), &t.e);
    }
    assert_ok(sink_tensor_end(t.s, &t.e), &t.e);
    commit(&t);
    out = get(&t, "w");
    assert_null(out.fault);
    assert_ok(catalog_chunks(t.c, t.id, &out, t.a, &chunk, &n, &t.e), &t.e);
    assert_int_equal(n, 4);
    for (uint64_t row = 0; row < 4; row++) {
        assert_int_equal(chunk[row].offset, row * 100);
        assert_int_equal(chunk[row].start[0], row);
        assert_int_equal(chunk[row].size[1], 8);
    }
    assert_int_equal(chunk[1].encoding, CHUNK_TORCH_ZIP);
    assert_int_equal(chunk[2].flags, CHUNK_SWAP);
    assert_int_equal(chunk[3].first, 5);
    assert_int_equal(chunk[3].step[1], 1);
    assert_null(chunk[2].step);
    end(&t);
}

/* --- faults --- */

/* A tensor of F32 [4, 2] in up to two chunks, and what is said of it. */
struct fault_case {
    const char *name;
    const char *file; /* of the chunks */
    size_t n;
    struct {
        uint64_t offset, length, start[2], size[2], first;
        int64_t step[2];
        bool strided;
        enum chunk_encoding encoding;
    } chunk[2];
    const char *fault; /* a part of it; NULL: there is none */
};

/* A box of two dimensions and where it is. */
#define AT(off, len) .offset = (off), .length = (len)
#define BOX(row, column, rows, columns) .start = {row, column}, .size = {rows, columns}
#define STEPS(from, row, column) .first = (from), .step = {row, column}, .strided = true

static const struct fault_case fault_cases[] = {
    {"whole", "a.bin", 1, {{AT(0, 32), BOX(0, 0, 4, 2)}}, NULL},
    {"two halves",
     "a.bin",
     2,
     {{AT(0, 16), BOX(0, 0, 2, 2)}, {AT(16, 16), BOX(2, 0, 2, 2)}},
     NULL},
    {"hole", "a.bin", 1, {{AT(0, 16), BOX(0, 0, 2, 2)}}, "[2, 0]"},
    {"no chunk", "a.bin", 0, {{.offset = 0}}, "[0, 0]"},
    {"overlap",
     "a.bin",
     2,
     {{AT(0, 24), BOX(0, 0, 3, 2)}, {AT(24, 16), BOX(2, 0, 2, 2)}},
     "overlap"},
    {"outside", "a.bin", 1, {{AT(0, 40), BOX(0, 0, 5, 2)}}, "outside"},
    {"missing file",
     "gone.bin",
     1,
     {{AT(0, 32), BOX(0, 0, 4, 2)}},
     "shard gone.bin is missing"},
    {"short file",
     "a.bin",
     1,
     {{AT(4080, 32), BOX(0, 0, 4, 2)}},
     "shard a.bin ends at byte 4096, chunk needs bytes 4080 to 4112"},
    {"offset that overflows",
     "a.bin",
     1,
     {{AT(UINT64_MAX, 32), BOX(0, 0, 4, 2)}},
     "shard a.bin ends at byte 4096, chunk needs bytes from 18446744073709551615"},
    {"too long", "a.bin", 1, {{AT(0, 36), BOX(0, 0, 4, 2)}}, "36 bytes, its box of 8"},
    {"too short", "a.bin", 1, {{AT(0, 28), BOX(0, 0, 4, 2)}}, "28 bytes, its box of 8"},
    {"short with a first element",
     "a.bin",
     1,
     {{AT(0, 32), BOX(0, 0, 4, 2), .first = 1}},
     "needs 9 elements of 4"},
    {"long with a first element",
     "a.bin",
     1,
     {{AT(0, 64), BOX(0, 0, 4, 2), .first = 1}},
     NULL},
    {"column-major", "a.bin", 1, {{AT(0, 32), BOX(0, 0, 4, 2), STEPS(0, 1, 4)}}, NULL},
    {"negative steps",
     "a.bin",
     1,
     {{AT(0, 32), BOX(0, 0, 4, 2), STEPS(7, -2, -1)}},
     NULL},
    {"steps before the piece",
     "a.bin",
     1,
     {{AT(0, 32), BOX(0, 0, 4, 2), STEPS(6, -2, -1)}},
     "lead out of its piece"},
    {"steps behind the piece",
     "a.bin",
     1,
     {{AT(0, 32), BOX(0, 0, 4, 2), STEPS(0, 3, 1)}},
     "needs 11 elements of 4"},
    {"steps that overflow",
     "a.bin",
     1,
     {{AT(0, 32), BOX(0, 0, 4, 2), STEPS(0, INT64_MAX, INT64_MAX)}},
     "lead out of its piece"},
    {"empty chunk beside",
     "a.bin",
     2,
     {{AT(0, 32), BOX(0, 0, 4, 2)}, {AT(0, 0), BOX(2, 0, 0, 2)}},
     NULL},
    {"packed piece of another length",
     "a.bin",
     1,
     {{AT(0, 500), BOX(0, 0, 4, 2), .encoding = CHUNK_TORCH_ZIP}},
     NULL},
    {"packed piece behind the end",
     "a.bin",
     1,
     {{AT(0, 5000), BOX(0, 0, 4, 2), .encoding = CHUNK_TORCH_ZIP}},
     "ends at byte 4096"},
};

static void report(struct scan *t, const struct fault_case *f)
{
    const struct shape shape = {2, {4, 2}};
    struct sink_tensor in = f32(f->name, &shape);
    uint32_t file = scan_file(t->s, f->file);

    assert_ok(sink_tensor_begin(t->s, &in, &t->e), &t->e);
    for (size_t i = 0; i < f->n; i++) {
        const struct chunk c = {.file = file,
                                .encoding = (uint8_t)f->chunk[i].encoding,
                                .offset = f->chunk[i].offset,
                                .length = f->chunk[i].length,
                                .start = f->chunk[i].start,
                                .size = f->chunk[i].size,
                                .first = f->chunk[i].first,
                                .step = f->chunk[i].strided ? f->chunk[i].step : NULL};

        assert_ok(sink_chunk(t->s, &c, &t->e), &t->e);
    }
    assert_ok(sink_tensor_end(t->s, &t->e), &t->e);
}

static void test_faults(void **state)
{
    struct scan t = {.tmp = *state};
    unsigned faults = 0;

    begin(&t);
    for (size_t i = 0; i < ARRAY_SIZE(fault_cases); i++)
        report(&t, &fault_cases[i]);
    commit(&t);
    for (size_t i = 0; i < ARRAY_SIZE(fault_cases); i++) {
        const struct fault_case *f = &fault_cases[i];
        struct tensor_info out = get(&t, f->name);
        const struct chunk *chunk;
        size_t n;

        if (!f->fault && out.fault)
            fail_msg("%s: fault \"%s\"", f->name, out.fault);
        if (f->fault && (!out.fault || !strstr(out.fault, f->fault)))
            fail_msg("%s: \"%s\" has no \"%s\"", f->name, out.fault ? out.fault : "",
                     f->fault);
        assert_int_equal(out.bytes, 32);
        assert_int_equal(out.chunks, f->n);
        assert_ok(catalog_chunks(t.c, t.id, &out, t.a, &chunk, &n, &t.e), &t.e);
        faults += f->fault != NULL;
    }
    assert_int_equal(get_checkpoint(&t).faults, faults);
    end(&t);
}

static void test_shapes_that_cannot_be(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape huge = {2, {(uint64_t)1 << 40, (uint64_t)1 << 40}},
                       odd = {1, {3}}, even = {2, {3, 2}}, one = {1, {1}};
    struct sink_tensor in = f32("huge", &huge);
    struct tensor_info out;

    begin(&t);
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 0, &t.e), &t.e);
    in = f32("odd", &odd);
    in.dtype = DTYPE_F4;
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 0, &t.e), &t.e);
    in = f32("even", &even);
    in.dtype = DTYPE_F4;
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 0, &t.e), &t.e);
    in = f32("none", &one);
    in.dtype = DTYPE_NONE;
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 0, &t.e), &t.e);
    in = f32("told", &one);
    in.dtype = DTYPE_NONE;
    assert_ok(sink_tensor_begin(t.s, &in, &t.e), &t.e);
    sink_fault(t.s, "elements of int1");
    sink_fault(t.s, "a second fault");
    assert_ok(sink_tensor_end(t.s, &t.e), &t.e);
    in = f32("wide", &huge);
    assert_ok(sink_tensor_begin(t.s, &in, &t.e), &t.e);
    sink_fault(t.s, "a second fault");
    assert_ok(sink_tensor_end(t.s, &t.e), &t.e);
    commit(&t);
    out = get(&t, "huge");
    assert_int_equal(out.bytes, 0);
    assert_has(out.fault, "more than 2^63");
    assert_int_equal(out.shape.dim[1], (uint64_t)1 << 40);
    assert_has(get(&t, "odd").fault, "whole bytes");
    assert_null(get(&t, "even").fault);
    assert_int_equal(get(&t, "even").bytes, 3);
    assert_has(get(&t, "none").fault, "unknown element type");
    assert_string_equal(get(&t, "told").fault, "elements of int1");
    assert_has(get(&t, "wide").fault, "more than 2^63");
    end(&t);
}

static void test_first_fault_is_kept(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape shape = {1, {4}};
    struct sink_tensor in = f32("w", &shape);

    begin(&t);
    assert_ok(sink_tensor_begin(t.s, &in, &t.e), &t.e);
    assert_int_equal(sink_fault(t.s, "quantised by %s", "hand"), 0);
    assert_int_equal(sink_fault(t.s, "another"), 0);
    assert_ok(sink_tensor_end(t.s, &t.e), &t.e);
    commit(&t);
    assert_string_equal(get(&t, "w").fault, "quantised by hand");
    end(&t);
}

static void test_chunk_of_no_file(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape shape = {1, {4}};
    const uint64_t zero = 0, four = 4;
    struct sink_tensor in = f32("w", &shape);
    const struct chunk c = {.file = 9, .length = 16, .start = &zero, .size = &four};

    begin(&t);
    assert_ok(sink_tensor_begin(t.s, &in, &t.e), &t.e);
    assert_int_equal(sink_chunk(t.s, &c, &t.e), -EINVAL);
    sink_abort(t.s);
    end(&t);
}

/* --- files --- */

static void test_files(void **state)
{
    static const char *const bad[] = {"", "/etc/passwd", "../x", "a/../b", "a//b", "."};
    struct scan t = {.tmp = *state};
    struct file_id id;
    struct catalog_file f;
    uint32_t gone, number;

    begin(&t);
    assert_int_equal(scan_file(t.s, "a.bin"), t.file);
    gone = scan_file(t.s, "sub/gone.bin");
    assert_int_not_equal(gone, t.file);
    assert_true(sink_file_id(t.s, t.file, &id));
    assert_int_equal(id.size, 4096);
    assert_false(sink_file_id(t.s, gone, &id));
    assert_false(sink_file_id(t.s, 99, &id));
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
        if (sink_file(t.s, bad[i], strlen(bad[i]), &number, &t.e) != -EBADMSG)
            fail_msg("\"%s\" was taken", bad[i]);
    assert_int_equal(sink_file(t.s, "a\0b", 3, &number, &t.e), -EBADMSG);
    commit(&t);
    assert_ok(catalog_file(t.c, t.id, t.file, t.a, &f, &t.e), &t.e);
    assert_string_equal(f.path, "run/step1/a.bin");
    assert_true(f.storage);
    assert_int_equal(f.id.size, 4096);
    assert_int_equal(f.mode, 0644);
    assert_ok(catalog_file(t.c, t.id, gone, t.a, &f, &t.e), &t.e);
    assert_string_equal(f.path, "run/step1/sub/gone.bin");
    assert_int_equal(f.id.ino, 0);
    assert_int_equal(catalog_file(t.c, t.id, 7, t.a, &f, &t.e), -ENOENT);
    end(&t);
}

struct names {
    char text[400];
};

static int add_name(void *user, const char *name, bool part)
{
    struct names *n = user;
    size_t len = strlen(n->text);

    snprintf(n->text + len, sizeof n->text - len, "%s%s ", name, part ? "/" : "");
    return 0;
}

static int add_file(void *user, const struct catalog_file *f)
{
    return add_name(user, f->path, !f->storage);
}

static void test_hidden_and_watched(void **state)
{
    struct scan t = {.tmp = *state};
    struct names hidden = {0}, files = {0};

    begin(&t);
    fake_add(&t.store, "run/step1/x.index.json", 10);
    scan_file(t.s, "sub/b.bin");
    assert_ok(sink_hide(t.s, "x.index.json", true, &t.e), &t.e);
    assert_ok(sink_hide(t.s, "stale", false, &t.e), &t.e);
    assert_ok(sink_hide(t.s, "optim", false, &t.e), &t.e);
    assert_ok(sink_part(t.s, "optim", &t.e), &t.e);
    assert_ok(sink_hide(t.s, "optim", false, &t.e), &t.e);
    commit(&t);
    assert_int_equal(catalog_hidden(t.c, t.id, add_name, &hidden, &t.e), 0);
    assert_string_equal(hidden.text, "a.bin optim/ stale x.index.json ");
    assert_int_equal(catalog_files(t.c, t.id, add_file, &files, &t.e), 0);
    assert_string_equal(files.text, "run/step1/a.bin run/step1/sub/b.bin "
                                    "run/step1/x.index.json/ run/step1/optim/ ");
    end(&t);
}

/* --- keys and names --- */

static void test_key_twice(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape shape = {1, {4}};
    struct sink_tensor in = f32("w", &shape);

    begin(&t);
    scan_plain(t.s, "w", 4, t.file, 0);
    assert_int_equal(sink_tensor_plain(t.s, &in, t.file, 16, &t.e), -EEXIST);
    assert_has(t.e.text, "key w is there twice");
    scan_plain(t.s, "v", 4, t.file, 16);
    commit(&t);
    assert_int_equal(get_checkpoint(&t).tensors, 2);
    end(&t);
}

static void scan_part(struct scan *t, const char *part, const char *key,
                      uint64_t offset)
{
    const struct shape shape = {1, {4}};
    struct sink_tensor in = f32(key, &shape);

    in.part = part;
    in.wrapper = strncmp(key, "model.", 6) == 0 ? 6 : 0;
    assert_ok(sink_tensor_plain(t->s, &in, t->file, offset, &t->e), &t->e);
}

static int add_warning(void *user, const char *code, const char *text)
{
    (void)text;
    return add_name(user, code, false);
}

static void test_parts_that_meet(void **state)
{
    struct scan t = {.tmp = *state};
    struct names warnings = {0};
    struct tensor_info out;

    begin(&t);
    scan_part(&t, "optim", "model.w", 0); /* meets the model's */
    scan_part(&t, NULL, "model.w", 16);
    scan_part(&t, "optim", "alone", 32);
    scan_part(&t, "rng", "s", 48); /* two parts, none is the model */
    scan_part(&t, "optim", "s", 64);
    scan_part(&t, NULL, "optim/x", 80); /* has the name that optim's x would get */
    scan_part(&t, NULL, "x", 96);
    scan_part(&t, "optim", "x", 112);
    commit(&t);
    out = get(&t, "model.w");
    assert_null(out.part);
    assert_int_equal(out.wrapper, 6);
    out = get(&t, "optim/model.w");
    assert_string_equal(out.part, "optim");
    assert_string_equal(out.name, "optim%2Fmodel.w");
    assert_string_equal(out.codec_key, "model.w"); /* as its shard has it */
    assert_int_equal(out.wrapper, 0);
    assert_int_equal(out.role, ROLE_OPTIMIZER);
    assert_string_equal(get(&t, "alone").part, "optim");
    assert_string_equal(get(&t, "rng/s").part, "rng");
    assert_string_equal(get(&t, "optim/s").part, "optim");
    assert_null(get(&t, "optim/x").part);
    assert_string_equal(get(&t, "optim/x:2").part, "optim");
    assert_int_equal(get_checkpoint(&t).tensors, 8);
    assert_int_equal(catalog_warnings(t.c, t.id, add_warning, &warnings, &t.e), 0);
    assert_string_equal(warnings.text, "key-renamed ");
    end(&t);
}

/* Keys as hostile files have them. */
struct odd_key {
    const char *key;
    size_t len;
};

static char long_a[5000], long_b[5000], just_253[253];

static const struct odd_key odd_keys[] = {
    {"", 0},        {"a\0b", 3},    {"a", 1},        {"a\nb", 3},  {"\xff\xfe", 2},
    {"../../x", 7}, {".hidden", 7}, {"..", 2},       {"a/b", 3},   {"a%2Fb", 5},
    {long_a, 5000}, {long_b, 5000}, {just_253, 253}, {"a.npy", 5}, {"\xc3\xa4.w", 4},
};

static void check_odd(struct scan *t, const struct odd_key *k)
{
    struct tensor_info by_key, other;

    assert_ok(catalog_tensor_by_key(t->c, t->id, k->key, k->len, t->a, &by_key, &t->e),
              &t->e);
    assert_int_equal(by_key.key_len, k->len);
    assert_memory_equal(by_key.key, k->key, k->len);
    assert_ok(
        catalog_tensor_by_name(t->c, t->id, by_key.name, false, t->a, &other, &t->e),
        &t->e);
    assert_int_equal(other.ord, by_key.ord);
    assert_ok(
        catalog_tensor_by_name(t->c, t->id, by_key.name_npy, true, t->a, &other, &t->e),
        &t->e);
    assert_int_equal(other.ord, by_key.ord);
    assert_ok(catalog_tensor(t->c, t->id, by_key.ord, t->a, &other, &t->e), &t->e);
    assert_string_equal(other.name_npy, by_key.name_npy);
    assert_null(strchr(other.name_npy, '/'));
    assert_true(strlen(other.name_npy) <= 255 && strlen(other.name) <= 255);
}

struct order {
    uint32_t next;
    char last[256];
};

static int check_order(void *user, const struct tensor_info *t)
{
    struct order *o = user;

    assert_int_equal(t->ord, o->next++);
    if (t->ord > 0 && strcmp(o->last, t->name) >= 0)
        fail_msg("%s before %s", o->last, t->name);
    snprintf(o->last, sizeof o->last, "%s", t->name);
    return 0;
}

static void test_odd_keys(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape shape = {1, {1}};
    struct order order = {0};
    struct tensor_info out;

    begin(&t);
    memset(long_a, 'x', sizeof long_a);
    memset(long_b, 'x', sizeof long_b);
    memset(just_253, 'y', sizeof just_253);
    long_b[4999] = 'y';
    for (size_t i = 0; i < ARRAY_SIZE(odd_keys); i++) {
        struct sink_tensor in = f32("", &shape);

        in.key = odd_keys[i].key;
        in.key_len = odd_keys[i].len;
        assert_ok(sink_tensor_plain(t.s, &in, t.file, 4 * i, &t.e), &t.e);
    }
    commit(&t);
    for (size_t i = 0; i < ARRAY_SIZE(odd_keys); i++)
        check_odd(&t, &odd_keys[i]);
    assert_int_equal(catalog_tensors(t.c, t.id, 0, check_order, &order, &t.e), 0);
    assert_int_equal(order.next, ARRAY_SIZE(odd_keys));
    /* 253 bytes fit by themselves; with ".npy" behind they are cut. */
    out = get_key(t.c, t.id, "", t.a);
    assert_string_equal(out.name_npy, "%empty.npy");
    assert_int_equal(catalog_tensor_by_name(t.c, t.id, "a.npy", true, t.a, &out, &t.e),
                     0);
    assert_string_equal(out.key, "a");
    assert_int_equal(catalog_tensor_by_name(t.c, t.id, "a", true, t.a, &out, &t.e),
                     -ENOENT);
    assert_int_equal(catalog_tensor_by_name(t.c, t.id, "b", false, t.a, &out, &t.e),
                     -ENOENT);
    assert_int_equal(catalog_tensor_by_name(t.c, t.id, "", true, t.a, &out, &t.e),
                     -ENOENT);
    assert_int_equal(catalog_tensor(t.c, t.id, 99, t.a, &out, &t.e), -ENOENT);
    end(&t);
}

/* --- tree/ --- */

struct listing_text {
    struct scan *t;
    char text[2000];
};

static int add_entry(void *user, const struct tree_entry *entry)
{
    struct listing_text *l = user;
    size_t len = strlen(l->text);

    snprintf(l->text + len, sizeof l->text - len, "%u:%s%s ", entry->pos, entry->name,
             entry->dir ? "/" : "");
    return 0;
}

static void check_list(struct scan *t, uint32_t dir, uint32_t from, const char *want)
{
    struct listing_text l = {.t = t};

    assert_int_equal(catalog_tree_list(t->c, t->id, dir, from, add_entry, &l, &t->e),
                     0);
    assert_string_equal(l.text, want);
}

static struct tree_entry find(struct scan *t, uint32_t dir, const char *name)
{
    struct tree_entry entry;

    assert_ok(catalog_tree_find(t->c, t->id, dir, name, &entry, &t->e), &t->e);
    return entry;
}

static void test_tree(void **state)
{
    static const char *const keys[] = {"a.b.w", "a.b", "a.b-c.w", "a.b.npy.w", "a.z",
                                       "w",     "w-",  "..",      "m.1",       "m.10"};
    struct scan t = {.tmp = *state};
    struct tree_entry a, ab, e;
    uint32_t parent;

    begin(&t);
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        scan_plain(t.s, keys[i], 1, t.file, 4 * i);
    commit(&t);
    check_list(&t, 0, 0, "0:%empty/ 1:a/ 2:m/ 3:w-.npy 4:w.npy ");
    check_list(&t, 0, 3, "3:w-.npy 4:w.npy ");
    check_list(&t, 0, 5, "");
    a = find(&t, 0, "a");
    assert_int_not_equal(a.dir, 0);
    check_list(&t, a.dir, 0, "0:b/ 1:b-c/ 2:b.npy 3:z.npy ");
    ab = find(&t, a.dir, "b");
    /* The part "npy" is a directory of its own: keys are cut at every dot. */
    check_list(&t, ab.dir, 0, "0:npy/ 1:w.npy ");
    e = find(&t, a.dir, "b.npy");
    assert_int_equal(e.dir, 0);
    assert_int_equal(e.tensor, get(&t, "a.b").ord);
    e = find(&t, ab.dir, "w.npy");
    assert_int_equal(e.tensor, get(&t, "a.b.w").ord);
    assert_ok(catalog_tree_parent(t.c, t.id, ab.dir, &parent, &t.e), &t.e);
    assert_int_equal(parent, a.dir);
    assert_ok(catalog_tree_parent(t.c, t.id, a.dir, &parent, &t.e), &t.e);
    assert_int_equal(parent, 0);
    check_list(&t, find(&t, 0, "m").dir, 0, "0:1.npy 1:10.npy ");
    e = find(&t, find(&t, find(&t, 0, "%empty").dir, "%empty").dir, "%empty.npy");
    assert_int_equal(e.tensor, get(&t, "..").ord);
    assert_int_equal(catalog_tree_find(t.c, t.id, 0, "nope", &e, &t.e), -ENOENT);
    assert_int_equal(catalog_tree_find(t.c, t.id, 999, "a", &e, &t.e), -ENOENT);
    assert_int_equal(catalog_tree_parent(t.c, t.id, 999, &parent, &t.e), -ENOENT);
    end(&t);
}

/* Directories and names take many rows: every one is found, and listed from anywhere. */
enum { WIDE = 700 };

struct wide_list {
    unsigned next; /* the number of the entry that comes now */
};

static int see_wide(void *user, const struct tree_entry *entry)
{
    struct wide_list *l = user;
    char want[40];

    snprintf(want, sizeof want, "w%04u.npy", l->next);
    assert_string_equal(entry->name, want);
    assert_int_equal(entry->pos, l->next);
    assert_int_equal(entry->tensor, l->next);
    l->next++;
    return 0;
}

static void test_wide_tree(void **state)
{
    struct scan t = {.tmp = *state};
    struct tree_entry entry;
    char name[40];

    begin(&t);
    for (unsigned i = 0; i < WIDE; i++) {
        snprintf(name, sizeof name, "w%04u", (i * 311) % WIDE);
        scan_plain(t.s, name, 1, t.file, 0);
    }
    commit(&t);
    for (unsigned i = 0; i < WIDE; i++) {
        struct wide_list l = {.next = i};

        snprintf(name, sizeof name, "w%04u", i);
        assert_int_equal(get(&t, name).ord, i);
        snprintf(name, sizeof name, "w%04u.npy", i);
        entry = find(&t, 0, name);
        assert_int_equal(entry.pos, i);
        assert_int_equal(entry.tensor, i);
        name[6] = '/'; /* before ".npy" of this number, behind that of the last */
        assert_int_equal(catalog_tree_find(t.c, t.id, 0, name, &entry, &t.e), -ENOENT);
        if (i % 23 == 0 || i + 3 > WIDE) {
            assert_int_equal(catalog_tree_list(t.c, t.id, 0, i, see_wide, &l, &t.e), 0);
            assert_int_equal(l.next, WIDE);
        }
    }
    assert_int_equal(catalog_tree_find(t.c, t.id, 0, "a", &entry, &t.e), -ENOENT);
    assert_int_equal(catalog_tree_find(t.c, t.id, 0, "z", &entry, &t.e), -ENOENT);
    end(&t);
}

/* --- many rows: in memory, then in a table --- */

static int note_tensor(void *user, const struct tensor_info *x)
{
    return buf_addf(user, "%u %s %s %s %" PRIx64 " %" PRIu64 " %o\n", x->ord, x->key,
                    x->name, x->name_npy, x->ino, x->bytes, (unsigned)x->mode);
}

static int note_file(void *user, const struct catalog_file *f)
{
    return buf_addf(user, "%u %s %" PRIu64 " %d\n", f->number, f->path, f->id.size,
                    f->storage);
}

static int note_entry(void *user, const struct tree_entry *x)
{
    return buf_addf(user, "%u %s %u\n", x->pos, x->name, x->dir ? 0 : x->tensor);
}

static int note_hidden(void *user, const char *name, bool part)
{
    return buf_addf(user, "%s %d\n", name, part);
}

static int note_object(void *user, const char *key, size_t key_len, const char *json,
                       size_t len)
{
    return buf_addf(user, "%.*s %.*s\n", (int)key_len, key, (int)len, json);
}

static int note_warning(void *user, const char *code, const char *text)
{
    return buf_addf(user, "%s %s\n", code, text);
}

/* Names, keys and texts in no order; of names that come again one is a part then. */
static void report_beside(struct scan *t)
{
    char name[40];
    struct err *e = &t->e;

    for (unsigned i = 0; i < 300; i++) {
        snprintf(name, sizeof name, "beside%u", (i * 37) % 300);
        assert_ok(sink_object(t->s, name, strlen(name), "[]", 2, e), e);
        assert_ok(stage_hidden(t->s->stage, name, strlen(name), i % 5 == 0, e), e);
        assert_ok(stage_hidden(t->s->stage, name, strlen(name), i % 7 == 0, e), e);
        assert_ok(stage_warning(t->s->stage, "odd", name, e), e);
    }
    assert_ok(stage_hidden(t->s->stage, "beside", 6, true, e), e);
    assert_ok(stage_hidden(t->s->stage, "beside7", 7, true, e), e);
}

/* Keys in no order, a file each, and one key in two parts. */
static void report_many(struct scan *t)
{
    const struct shape shape = {1, {2}};
    struct sink_tensor in = f32("part.7", &shape);
    char name[40];

    for (unsigned i = 0; i < 500; i++) {
        snprintf(name, sizeof name, "part%u.%u", i % 7, (i * 37) % 500);
        scan_plain(t->s, name, 2, scan_file(t->s, name), 8);
    }
    in.part = "optim";
    assert_ok(sink_tensor_plain(t->s, &in, t->file, 0, &t->e), &t->e);
    in.part = NULL;
    assert_ok(sink_tensor_plain(t->s, &in, t->file, 8, &t->e), &t->e);
    report_beside(t);
}

static void limit_memory(struct stage *st, size_t most)
{
    struct held *all[] = {&st->files,  &st->rows,   &st->places,
                          &st->hidden, &st->object, &st->warning};

    for (size_t i = 0; i < ARRAY_SIZE(all); i++)
        all[i]->rows.data.max = most;
}

/* All that the index has then; `most` bytes of rows stay in memory. */
static void see_many(struct tmp *tmp, size_t most, struct buf *out)
{
    struct scan t = {.tmp = tmp};
    struct stage *st;

    begin(&t);
    t.store.size_of_all = 64;
    st = t.s->stage;
    if (most > 0)
        limit_memory(st, most);
    report_many(&t);
    assert_int_equal(st->conn != NULL, most > 0); /* what is small needs no database */
    assert_int_equal(st->files.spilled, most > 0);
    assert_int_equal(st->rows.spilled, most > 0);
    assert_int_equal(st->hidden.spilled, most > 0);
    assert_int_equal(st->object.spilled, most > 0 && most < 5000);
    assert_int_equal(st->warning.spilled, most > 0 && most < 5000);
    commit(&t);
    assert_int_equal(catalog_files(t.c, t.id, note_file, out, &t.e), 0);
    assert_int_equal(catalog_hidden(t.c, t.id, note_hidden, out, &t.e), 0);
    assert_int_equal(catalog_objects(t.c, t.id, note_object, out, &t.e), 0);
    assert_int_equal(catalog_warnings(t.c, t.id, note_warning, out, &t.e), 0);
    assert_int_equal(catalog_tensors(t.c, t.id, 0, note_tensor, out, &t.e), 0);
    for (uint32_t dir = 0; dir < 5; dir++)
        assert_int_equal(catalog_tree_list(t.c, t.id, dir, 0, note_entry, out, &t.e),
                         0);
    end(&t);
}

static void test_many_rows(void **state)
{
    static const size_t most[] = {1, 100, 5000}; /* as many as some have */
    CLEANUP(buf_release) struct buf want = {0};

    see_many(*state, 0, &want);
    assert_has(want.data, " optim/part.7 ");
    assert_has(want.data, "\nbeside 1\nbeside0 1\nbeside1 0\n");
    assert_has(want.data, "\nbeside7 1\n");
    for (size_t i = 0; i < ARRAY_SIZE(most); i++) {
        CLEANUP(buf_release) struct buf is = {0};

        see_many(*state, most[i], &is);
        assert_string_equal(is.data, want.data);
    }
}

/* 5000 dots: what lies deeper than 64 directories stays one name. */
static void test_tree_is_not_bottomless(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape shape = {1, {1}};
    struct sink_tensor in = f32("", &shape);
    struct tree_entry e = {0};
    unsigned depth = 0;

    begin(&t);
    memset(long_a, '.', sizeof long_a);
    in.key = long_a;
    in.key_len = sizeof long_a;
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 0, &t.e), &t.e);
    commit(&t);
    for (; e.dir != 0 || depth == 0; depth++) {
        struct listing_text l = {.t = &t};

        assert_int_equal(catalog_tree_list(t.c, t.id, e.dir, 0, add_entry, &l, &t.e),
                         0);
        l.text[strcspn(l.text, "/ ")] = '\0';
        e = find(&t, e.dir, l.text + 2);
    }
    assert_int_equal(depth, 65);
    assert_int_equal(e.tensor, 0);
    end(&t);
}

static void count_places(const struct stage *st, const char *path, size_t len)
{
    unsigned found = 0;

    for (size_t i = 0; i < st->places.rows.count; i++) {
        struct cell cell[2];

        rows_get(&st->places.rows, i, cell, ARRAY_SIZE(cell));
        found += cell[0].len == len && memcmp(cell[0].data, path, len) == 0;
    }
    assert_int_equal(found, 1);
}

/* Names that meet although keys differ: not to be had by keys, but the rule stands. */
static void test_tree_names_that_meet(void **state)
{
    struct stage *st;
    struct err e = {0};
    char wide[300], want[300];

    (void)state;
    memset(wide, 'q', sizeof wide);
    assert_ok(stage_open(true, &st, &e), &e);
    for (uint32_t ord = 0; ord < 3; ord++) {
        assert_ok(stage_tree(st, "a.w", 3, ord, &e), &e);
        assert_ok(stage_tree(st, wide, 251, ord, &e), &e);
    }
    count_places(st, "a\0w.npy", 7);
    count_places(st, "a\0w~2.npy", 9);
    count_places(st, "a\0w~3.npy", 9);
    memset(want, 'q', 251);
    memcpy(want + 249, "~2.npy", 6);
    count_places(st, want, 255);
    stage_close(st);
}

/* --- rights, times, inodes --- */

struct rights_case {
    const char *name, *files[2];
    mode_t mode;
    int64_t mtime_ns;
};

static void test_rights(void **state)
{
    static const struct fake_file files[] = {
        {"run/step1/.metadata", 10, 0644, 1000, 100, 5},
        {"run/step1/open", 64, 0666, 1000, 100, 10},
        {"run/step1/group", 64, 0640, 1000, 100, 20},
        {"run/step1/mine", 64, 0700, 1000, 100, 30},
        {"run/step1/bob", 64, 0644, 1001, 100, 40},
        {"run/step1/staff", 64, 0640, 1000, 50, 50},
        {"run/step1/world", 64, 0644, 1000, 50, 60},
    };
    static const struct rights_case cases[] = {
        {"open", {"open"}, 0666, 10},
        {"group", {"group"}, 0640, 20},
        {"both", {"open", "group"}, 0640, 20},
        {"mine", {"mine"}, 0700, 30},
        {"bob", {"bob"}, 0400, 40},
        {"bob and me", {"open", "bob"}, 0400, 40},
        {"staff", {"staff"}, 0600, 50},
        {"world", {"world"}, 0644, 60},
        {"missing", {"gone"}, 0644, 5},
        {"missing one", {"gone", "group"}, 0640, 20},
        {"none", {NULL}, 0644, 5},
    };
    const struct sink_checkpoint about = {.metadata_file = "run/step1/.metadata"};
    const struct shape shape = {1, {2}};
    struct scan t = {.tmp = *state};

    begin(&t);
    memcpy(t.store.file, files, sizeof files);
    t.store.n = ARRAY_SIZE(files);
    assert_ok(sink_checkpoint(t.s, &about, &t.e), &t.e);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct sink_tensor in = f32(cases[i].name, &shape);

        assert_ok(sink_tensor_begin(t.s, &in, &t.e), &t.e);
        for (uint64_t k = 0; k < 2 && cases[i].files[k]; k++) {
            const uint64_t one = 1;
            const struct chunk c = {.file = scan_file(t.s, cases[i].files[k]),
                                    .length = 4,
                                    .start = &k,
                                    .size = &one};

            assert_ok(sink_chunk(t.s, &c, &t.e), &t.e);
        }
        assert_ok(sink_tensor_end(t.s, &t.e), &t.e);
    }
    commit(&t);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct tensor_info out = get(&t, cases[i].name);

        if (out.mode != cases[i].mode || out.mtime_ns != cases[i].mtime_ns)
            fail_msg("%s: mode %o, not %o; time %" PRId64 ", not %" PRId64,
                     cases[i].name, out.mode, cases[i].mode, out.mtime_ns,
                     cases[i].mtime_ns);
        assert_int_equal(out.uid, 1000);
        assert_int_equal(out.gid, 100);
    }
    assert_int_equal(get_checkpoint(&t).mode, 0400);     /* bob's is among them */
    assert_int_equal(get_checkpoint(&t).mtime_ns, 1000); /* a.bin, of begin() */
    end(&t);
}

/* Scans three tensors in two files, in one order or the other. */
static void scan_three(struct scan *t, bool backward)
{
    static const char *const keys[] = {"a", "b", "c"};
    uint32_t x, y;

    if (t->s == NULL)
        t->s = scan_begin(t->c, &t->store, "run/step1", NULL);
    y = backward ? scan_file(t->s, "y") : 0;
    x = scan_file(t->s, "x");
    y = backward ? y : scan_file(t->s, "y");
    for (unsigned i = 0; i < 3; i++) {
        unsigned k = backward ? 2 - i : i;
        const struct shape shape = {1, {2}};
        struct sink_tensor in = f32(keys[k], &shape);

        assert_ok(sink_tensor_begin(t->s, &in, &t->e), &t->e);
        for (uint64_t j = 0; j < 2; j++) {
            const uint64_t at = backward ? 1 - j : j, one = 1;
            const struct chunk c = {.file = at ? x : y,
                                    .offset = 4 * k,
                                    .length = 4,
                                    .start = &at,
                                    .size = &one};

            assert_ok(sink_chunk(t->s, &c, &t->e), &t->e);
        }
        assert_ok(sink_tensor_end(t->s, &t->e), &t->e);
    }
    commit(t);
}

static void test_inodes(void **state)
{
    struct scan t = {.tmp = *state};
    uint64_t first[3], second[3];

    begin(&t);
    sink_abort(t.s);
    t.s = NULL;
    t.store = fake_new();
    fake_add(&t.store, "run/step1/x", 64);
    fake_add(&t.store, "run/step1/y", 64);
    scan_three(&t, false);
    for (unsigned i = 0; i < 3; i++) {
        first[i] = get(&t, (const char *[]){"a", "b", "c"}[i]).ino;
        assert_true(first[i] >> 32 != 0 && first[i] % 2 == 0);
    }
    assert_true(first[0] != first[1] && first[1] != first[2] && first[0] != first[2]);
    scan_three(&t, true);
    for (unsigned i = 0; i < 3; i++) {
        second[i] = get(&t, (const char *[]){"a", "b", "c"}[i]).ino;
        assert_int_equal(second[i], first[i]);
    }
    t.store.file[0].mtime_ns++;
    scan_three(&t, false);
    for (unsigned i = 0; i < 3; i++)
        assert_true(get(&t, (const char *[]){"a", "b", "c"}[i]).ino != first[i]);
    end(&t);
}

/* --- objects, warnings, failures --- */

static int add_object(void *user, const char *key, size_t key_len, const char *json,
                      size_t len)
{
    struct names *n = user;
    size_t used = strlen(n->text);

    snprintf(n->text + used, sizeof n->text - used, "%.*s=%.*s ", (int)key_len, key,
             (int)len, json);
    return 0;
}

static void test_objects(void **state)
{
    struct scan t = {.tmp = *state};
    struct names objects = {0};

    begin(&t);
    assert_ok(sink_object(t.s, "rng", 3, "[1]", 3, &t.e), &t.e);
    assert_ok(sink_object(t.s, "epoch", 5, "2", 1, &t.e), &t.e);
    assert_ok(sink_object(t.s, "rng", 3, "[3]", 3, &t.e), &t.e);
    assert_ok(sink_object(t.s, "", 0, "4", 1, &t.e), &t.e);
    commit(&t);
    assert_int_equal(catalog_objects(t.c, t.id, add_object, &objects, &t.e), 0);
    assert_string_equal(objects.text, "=4 epoch=2 rng=[1] rng:2=[3] ");
    assert_int_equal(get_checkpoint(&t).objects, 4);
    end(&t);
}

static int count_one(void *user, const char *code, const char *text)
{
    unsigned *n = user;

    if (*n == 1000) {
        assert_string_equal(code, "more-warnings");
        assert_string_equal(text, "234 more warnings are not shown");
    }
    ++*n;
    return 0;
}

static void test_warnings_have_an_end(void **state)
{
    struct scan t = {.tmp = *state};
    unsigned n = 0;

    begin(&t);
    for (unsigned i = 0; i < 1234; i++)
        assert_int_equal(sink_warning(t.s, "stale-file", "file %u", i), 0);
    commit(&t);
    assert_int_equal(catalog_warnings(t.c, t.id, count_one, &n, &t.e), 0);
    assert_int_equal(n, 1001);
    assert_int_equal(get_checkpoint(&t).warnings, 1001);
    end(&t);
}

static void test_failed_scan(void **state)
{
    struct scan t = {.tmp = *state};
    struct err failed = {0};
    struct checkpoint_info cp;
    struct names names = {0};
    struct order order = {0};

    begin(&t);
    scan_plain(t.s, "w", 4, t.file, 0);
    sink_warning(t.s, "odd", "something");
    err_set(&failed, EBADMSG, "metadata: byte 7: no list");
    err_hint(&failed, "copy it again");
    assert_ok(sink_commit(t.s, &failed, &t.id, &t.e), &t.e);
    cp = get_checkpoint(&t);
    assert_string_equal(cp.error, "metadata: byte 7: no list (copy it again)");
    assert_int_equal(cp.tensors, 0);
    assert_int_equal(cp.files, 1);
    assert_int_equal(catalog_tensors(t.c, t.id, 0, check_order, &order, &t.e), 0);
    assert_int_equal(order.next, 0);
    assert_int_equal(catalog_files(t.c, t.id, add_file, &names, &t.e), 0);
    assert_int_equal(catalog_warnings(t.c, t.id, add_warning, &names, &t.e), 0);
    assert_string_equal(names.text, "run/step1/a.bin odd ");
    end(&t);
}

static void test_1500_empty_tensors(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape shape = {2, {0, 7}};
    struct order order = {0};
    char key[32];

    begin(&t);
    for (unsigned i = 0; i < 1500; i++) {
        struct sink_tensor in;

        snprintf(key, sizeof key, "empty.%u", i);
        in = f32(key, &shape);
        assert_ok(sink_tensor_begin(t.s, &in, &t.e), &t.e);
        assert_ok(sink_tensor_end(t.s, &t.e), &t.e);
    }
    commit(&t);
    assert_int_equal(catalog_tensors(t.c, t.id, 0, check_order, &order, &t.e), 0);
    assert_int_equal(order.next, 1500);
    assert_int_equal(get_checkpoint(&t).faults, 0);
    assert_int_equal(get_checkpoint(&t).bytes, 0);
    end(&t);
}

/* 100,000 chunks in 1,000 tensors: seconds only where something is quadratic. */
static void test_many_chunks(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape shape = {2, {100, 8}};
    struct tensor_info out;
    const struct chunk *chunk;
    char key[32];
    size_t n;

    begin(&t);
    t.store.file[0].size = (uint64_t)1 << 40;
    sink_abort(t.s);
    t.s = scan_begin(t.c, &t.store, "run/step1", NULL);
    t.file = scan_file(t.s, "a.bin");
    for (uint64_t i = 0; i < 1000; i++) {
        struct sink_tensor in;

        snprintf(key, sizeof key, "t%" PRIu64, i);
        in = f32(key, &shape);
        assert_ok(sink_tensor_begin(t.s, &in, &t.e), &t.e);
        for (uint64_t row = 0; row < 100; row++) {
            const uint64_t start[] = {row, 0}, size[] = {1, 8};
            const struct chunk c = {.file = t.file,
                                    .offset = (i * 100 + row) * 4096,
                                    .length = 32,
                                    .start = start,
                                    .size = size};

            assert_ok(sink_chunk(t.s, &c, &t.e), &t.e);
        }
        assert_ok(sink_tensor_end(t.s, &t.e), &t.e);
    }
    commit(&t);
    assert_int_equal(get_checkpoint(&t).chunks, 100000);
    assert_int_equal(get_checkpoint(&t).faults, 0);
    out = get(&t, "t777");
    assert_ok(catalog_chunks(t.c, t.id, &out, t.a, &chunk, &n, &t.e), &t.e);
    assert_int_equal(n, 100);
    assert_int_equal(chunk[42].offset, 77742 * 4096);
    end(&t);
}

/* --- out of memory --- */

void *__real_reallocarray(void *old, size_t count, size_t size);
void *__wrap_reallocarray(void *old, size_t count, size_t size);

void *__wrap_reallocarray(void *old, size_t count, size_t size)
{
    return fail_alloc_now() ? NULL : __real_reallocarray(old, count, size);
}

/* Two tensors, of one chunk and of two; and an object. */
static int report_some(struct sink *s, struct err *e)
{
    const struct shape shape = {2, {4, 2}};
    const struct sink_checkpoint about = {.format = "x", .metadata_file = "run/.meta"};
    const uint64_t start[][2] = {{2, 0}, {0, 0}}, size[] = {2, 2};
    struct sink_tensor in = f32("model.a", &shape);
    uint32_t file;
    int rc = sink_checkpoint(s, &about, e);

    in.wrapper = 6;
    if (rc == 0)
        rc = sink_file(s, "a.bin", 5, &file, e);
    if (rc == 0)
        rc = sink_tensor_plain(s, &in, file, 0, e);
    in = f32("model.b", &shape);
    in.part = "optim";
    if (rc == 0)
        rc = sink_tensor_begin(s, &in, e);
    for (unsigned i = 0; rc == 0 && i < 2; i++) {
        const struct chunk c = {.file = file,
                                .offset = 16 * i,
                                .length = 16,
                                .start = start[i],
                                .size = size};

        rc = sink_chunk(s, &c, e);
    }
    if (rc == 0)
        rc = sink_tensor_end(s, e);
    return rc == 0 ? sink_object(s, "o", 1, "1", 1, e) : rc;
}

static int count_tensor(void *user, const struct tensor_info *t)
{
    (void)t;
    ++*(unsigned *)user;
    return 0;
}

static int read_some(struct catalog *c, int64_t id, struct arena *a, struct err *e)
{
    const struct chunk *chunk;
    struct view_member *m = NULL;
    struct tensor_info t;
    struct view_info v;
    unsigned tensors = 0;
    char header[64];
    size_t n;
    int rc = catalog_tensors(c, id, 0, count_tensor, &tensors, e);

    if (rc == 0)
        rc = catalog_tensor_by_key(c, id, "model.b", 7, a, &t, e);
    if (rc == 0)
        rc = catalog_chunks(c, id, &t, a, &chunk, &n, e);
    if (rc == 0)
        rc = view_get(c, id, VIEW_MODEL, PREFIX_KEEP, a, &v, e);
    if (rc == 0)
        rc = view_header(c, &v, 0, sizeof header, header, e);
    if (rc == 0)
        rc = view_members(c, &v, &m, &n, e);
    free(m);
    return rc;
}

static int scan_and_read(struct err *e)
{
    const struct catalog_options options = {.memory = true};
    CLEANUP(catalog_closep) struct catalog *c = NULL;
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct fake_store store = fake_new();
    const struct catalog_place place = {.path = "run", .store = &store.store};
    struct sink *s = NULL;
    int64_t id = 0;
    int rc = a ? catalog_open(&options, "x", &c, e) : -ENOMEM;

    fake_add(&store, "run/a.bin", 4096);
    if (rc == 0)
        rc = sink_begin(c, &place, &s, e);
    if (rc == 0)
        rc = report_some(s, e);
    if (rc == 0)
        rc = sink_commit(steal(&s), NULL, &id, e);
    if (s)
        sink_abort(s);
    return rc == 0 ? read_some(c, id, a, e) : rc;
}

/* 10 million tensors and chunks are too many to write here: the same checks at two. */
static void test_tensors_have_a_limit(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape one = {1, {1}};
    struct sink_tensor in;

    begin(&t);
    assert_int_equal(t.s->max_tensors, 10000000);
    t.s->max_tensors = 2;
    in = f32("a", &one);
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 0, &t.e), &t.e);
    in = f32("b", &one);
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 4, &t.e), &t.e);
    in = f32("c", &one);
    assert_int_equal(sink_tensor_plain(t.s, &in, t.file, 8, &t.e), -EFBIG);
    assert_string_equal(t.e.text, "more than 2 tensors");
    sink_abort(t.s);
    end(&t);
}

/* One long part of a path may be in all keys; a key that was there already counts, too. */
static void test_keys_have_a_limit(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape one = {1, {1}};
    static const char longer[2000] = "a";
    struct sink_tensor in = f32("a", &one);

    begin(&t);
    assert_int_equal(t.s->max_keys, 64 << 20);
    t.s->max_keys = 4000;
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 0, &t.e), &t.e);
    in.key = longer;
    in.key_len = sizeof longer;
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 4, &t.e), &t.e);
    assert_int_equal(sink_tensor_plain(t.s, &in, t.file, 8, &t.e), -EEXIST);
    assert_int_equal(sink_tensor_plain(t.s, &in, t.file, 8, &t.e), -EFBIG);
    assert_string_equal(t.e.text, "keys of tensors that are 6001 bytes together");
    sink_abort(t.s);
    end(&t);
}

static void test_chunks_have_a_limit(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape rows[] = {{1, {2}}, {1, {3}}};
    static const char *const keys[] = {"two", "three"};

    begin(&t);
    assert_int_equal(t.s->max_chunks, 10000000);
    t.s->max_chunks = 2;
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
        struct sink_tensor in = f32(keys[i], &rows[i]);

        assert_ok(sink_tensor_begin(t.s, &in, &t.e), &t.e);
        for (uint64_t row = 0; row < rows[i].dim[0]; row++) {
            const uint64_t start[] = {row}, size[] = {1};
            const struct chunk c = {.file = t.file,
                                    .offset = 4 * row,
                                    .length = 4,
                                    .start = start,
                                    .size = size};

            assert_ok(sink_chunk(t.s, &c, &t.e), &t.e);
        }
        assert_ok(sink_tensor_end(t.s, &t.e), &t.e);
    }
    commit(&t);
    assert_null(get(&t, "two").fault);
    assert_has(get(&t, "three").fault, "more than 2 chunks");
    end(&t);
}

static void test_out_of_memory(void **state)
{
    (void)state;
    for (long n = 1; fail_alloc_next(&n);) {
        struct err e = {0};

        fail_alloc_end(&n, scan_and_read(&e));
    }
}

/* --- a filter that is given up --- */

static int take_none(struct sink_filter *f, const struct sink_taken *t, struct err *e)
{
    (void)f;
    (void)t;
    (void)e;
    return 0;
}

static int give_up(struct sink_filter *f, struct sink *s, struct err *e)
{
    (void)f;
    (void)s;
    return err_set(e, EINTR, "out of time");
}

static int not_for_it(struct sink_filter *f, struct sink *s, struct err *e)
{
    (void)f;
    (void)s;
    return err_set(e, EINVAL, "no such axis");
}

/* That nobody waits any more says nothing about the checkpoint: what is kept stays. */
static void test_filter_that_is_given_up(void **state)
{
    struct catalog *c = index_open(NULL, "s");
    struct fake_store store = fake_new();
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct sink_filter filter = {.take = take_none, .finish = give_up};
    const struct catalog_place place = {.path = "run",
                                        .store = &store.store,
                                        .dir_id = {1, 2, 3, 4, 5},
                                        .names_hash = 77,
                                        .filter = &filter};
    struct checkpoint_info cp;
    struct sink *s;
    struct err e = {0};
    int64_t id, none = 0;

    (void)state;
    fake_add(&store, "run/x", 64);
    s = scan_begin(c, &store, "run", NULL);
    scan_plain(s, "a", 4, scan_file(s, "x"), 0);
    id = scan_commit(s);
    assert_ok(sink_begin(c, &place, &s, &e), &e);
    assert_int_equal(sink_commit(s, NULL, &none, &e), -EINTR);
    e = (struct err){0};
    assert_ok(catalog_checkpoint_by_id(c, id, a, &cp, &e), &e);
    assert_null(cp.error);
    filter.finish = not_for_it;
    assert_ok(sink_begin(c, &place, &s, &e), &e);
    assert_ok(sink_commit(s, NULL, &id, &e), &e);
    assert_ok(catalog_checkpoint_by_id(c, id, a, &cp, &e), &e);
    assert_string_equal(cp.error, "no such axis");
    catalog_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        tmp_test(test_checkpoint_comes_back),
        tmp_test(test_tensor_comes_back),
        tmp_test(test_chunks_come_back_in_order),
        tmp_test(test_faults),
        tmp_test(test_shapes_that_cannot_be),
        tmp_test(test_first_fault_is_kept),
        tmp_test(test_chunk_of_no_file),
        tmp_test(test_files),
        tmp_test(test_hidden_and_watched),
        cmocka_unit_test(test_filter_that_is_given_up),
        tmp_test(test_key_twice),
        tmp_test(test_parts_that_meet),
        tmp_test(test_odd_keys),
        tmp_test(test_tree),
        tmp_test(test_wide_tree),
        tmp_test(test_many_rows),
        tmp_test(test_tree_is_not_bottomless),
        cmocka_unit_test(test_tree_names_that_meet),
        tmp_test(test_rights),
        tmp_test(test_inodes),
        tmp_test(test_objects),
        tmp_test(test_warnings_have_an_end),
        tmp_test(test_failed_scan),
        tmp_test(test_1500_empty_tensors),
        tmp_test(test_many_chunks),
        tmp_test(test_tensors_have_a_limit),
        tmp_test(test_keys_have_a_limit),
        tmp_test(test_chunks_have_a_limit),
        cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
