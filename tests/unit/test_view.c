/* SPDX-License-Identifier: MIT */
/* tests/unit/test_view.c - the one safetensors file of a role, .npy headers, JSON reports. */
#include <pthread.h>
#include <sys/mman.h>

#include "catalog_fixture.h"

#include "base/endian.h"
#include "base/json.h"
#include "index/npy.h"
#include "index/sink_priv.h"

struct scan {
    struct tmp *tmp;
    struct fake_store store;
    struct catalog *c;
    struct sink *s;
    uint32_t file;
    uint64_t end; /* of what tensors have taken of the file */
    int64_t id;
    struct arena *a;
    struct err e;
};

static void begin(struct scan *t)
{
    t->store = fake_new();
    fake_add(&t->store, "run/a.bin", 1 << 20);
    t->c = index_open(t->tmp, "test");
    t->s = scan_begin(t->c, &t->store, "run", NULL);
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

/* A tensor of n elements behind the last one. */
static void put(struct scan *t, const char *key, size_t wrapper, enum dtype dtype,
                uint64_t n)
{
    const struct shape shape = {1, {n}};
    struct sink_tensor in = f32(key, &shape);
    uint64_t bytes;

    in.dtype = dtype;
    in.wrapper = wrapper;
    assert_ok(shape_bytes(&shape, dtype, &bytes, &t->e), &t->e);
    assert_ok(sink_tensor_plain(t->s, &in, t->file, t->end, &t->e), &t->e);
    t->end += bytes;
}

static struct view_info view(struct scan *t, enum view_kind kind,
                             enum view_prefix prefix)
{
    struct view_info v;

    assert_ok(view_get(t->c, t->id, kind, prefix, t->a, &v, &t->e), &t->e);
    return v;
}

/* The header's text, without its length; checked to be what view_info says. */
static const char *header(struct scan *t, const struct view_info *v)
{
    char *text = arena_alloc(t->a, v->header + 1);

    assert_non_null(text);
    assert_true(v->header > 8 && v->header % 64 == 0);
    assert_ok(view_header(t->c, v, 0, v->header, text, &t->e), &t->e);
    assert_int_equal(get_le64(text), v->header - 8);
    text += 8;
    for (size_t len = v->header - 8; len > 0 && text[len - 1] == ' '; len--)
        text[len - 1] = '\0';
    return text;
}

struct find_warning {
    const char *code;
    char text[200];
    unsigned n;
};

static int note_warning(void *user, const char *code, const char *text)
{
    struct find_warning *f = user;

    if (strcmp(code, f->code) == 0) {
        f->n++;
        snprintf(f->text, sizeof f->text, "%s", text);
    }
    return 0;
}

static struct find_warning find_warning(struct scan *t, const char *code)
{
    struct find_warning f = {.code = code};

    assert_int_equal(catalog_warnings(t->c, t->id, note_warning, &f, &t->e), 0);
    return f;
}

/* --- the header --- */

static void test_header(void **state)
{
    struct scan t = {.tmp = *state};
    const struct shape matrix = {2, {2, 3}}, scalar = {0, {0}};
    struct sink_tensor in = f32("m\"x", &matrix);
    struct view_info v;

    begin(&t);
    put(&t, "u", 0, DTYPE_U8, 3);
    put(&t, "b", 0, DTYPE_F32, 2);
    put(&t, "f4", 0, DTYPE_F4, 6);
    put(&t, "a.w", 0, DTYPE_F32, 1);
    put(&t, "f6", 0, DTYPE_F6_E2M3, 4);
    put(&t, "empty", 0, DTYPE_BF16, 0);
    put(&t, "d", 0, DTYPE_F64, 1);
    in.dtype = DTYPE_F16;
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 100, &t.e), &t.e);
    in = f32("s", &scalar);
    assert_ok(sink_tensor_plain(t.s, &in, t.file, 200, &t.e), &t.e);
    put(&t, "optimizer.w", 0, DTYPE_F32, 1);
    commit(&t);
    v = view(&t, VIEW_MODEL, PREFIX_AUTO);
    assert_string_equal(v.name, "model.safetensors");
    assert_int_equal(v.kind, VIEW_MODEL);
    assert_int_equal(v.whole_file, -1);
    assert_null(v.fault);
    assert_string_equal(
        header(&t, &v),
        "{\"__metadata__\":{\"format\":\"pt\"}"
        ",\"d\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[0,8]}"
        ",\"a.w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}"
        ",\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[12,20]}"
        ",\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[20,24]}"
        ",\"empty\":{\"dtype\":\"BF16\",\"shape\":[0],\"data_offsets\":[24,24]}"
        ",\"m\\\"x\":{\"dtype\":\"F16\",\"shape\":[2,3],\"data_offsets\":[24,36]}"
        ",\"u\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[36,39]}"
        ",\"f6\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[39,42]}"
        ",\"f4\":{\"dtype\":\"F4\",\"shape\":[6],\"data_offsets\":[42,45]}}");
    assert_int_equal(v.size, v.header + 45);
    v = view(&t, VIEW_OPTIMIZER, PREFIX_AUTO);
    assert_string_equal(v.name, "optimizer.safetensors");
    assert_string_equal(
        header(&t, &v),
        "{\"__metadata__\":{\"format\":\"pt\"},\"optimizer.w\":{\"dtype\":"
        "\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}");
    end(&t);
}

static void test_members(void **state)
{
    struct scan t = {.tmp = *state};
    struct view_member *m;
    struct view_info v;
    size_t n;

    begin(&t);
    put(&t, "z", 0, DTYPE_F32, 2);
    put(&t, "a", 0, DTYPE_U8, 5);
    put(&t, "empty", 0, DTYPE_F64, 0);
    put(&t, "m", 0, DTYPE_F32, 3);
    put(&t, "lr_scheduler.x", 0, DTYPE_F32, 3); /* of another role */
    commit(&t);
    v = view(&t, VIEW_MODEL, PREFIX_AUTO);
    assert_ok(view_members(t.c, &v, &m, &n, &t.e), &t.e);
    assert_int_equal(n, 3);
    assert_int_equal(m[0].at, v.header);
    assert_int_equal(m[0].bytes, 12);
    assert_int_equal(m[0].ord, get_key(t.c, t.id, "m", t.a).ord);
    assert_int_equal(m[1].at, v.header + 12);
    assert_int_equal(m[1].bytes, 8);
    assert_int_equal(m[1].ord, get_key(t.c, t.id, "z", t.a).ord);
    assert_int_equal(m[2].at, v.header + 20);
    assert_int_equal(m[2].bytes, 5);
    assert_int_equal(m[2].ord, get_key(t.c, t.id, "a", t.a).ord);
    free(m);
    end(&t);
}

/* What a reader of safetensors checks: no hole, no overlap, sizes right. */
struct reader {
    uint64_t at;
    unsigned n;
};

static int read_member(void *user, const char *key, size_t key_len,
                       const struct json *value, struct err *e)
{
    struct reader *r = user;
    const struct json *offsets = json_get(value, "data_offsets");
    const struct json *shape = json_get(value, "shape");
    uint64_t from, to, dim;

    (void)key_len;
    if (strcmp(key, "__metadata__") == 0)
        return 0;
    if (!json_u64(json_first(offsets), &from) ||
        !json_u64(json_next(json_first(offsets)), &to) ||
        !json_u64(json_first(shape), &dim) || from != r->at || to - from != 4 * dim)
        return err_set(e, EBADMSG, "%s", key);
    r->at = to;
    r->n++;
    return 0;
}

/* 3,000 tensors: several blocks, read whole and by odd pieces. */
static void test_large_header(void **state)
{
    struct scan t = {.tmp = *state};
    struct reader r = {0};
    struct view_info v;
    struct view_member *m;
    const char *text;
    char key[64], piece[10007];
    size_t n;

    begin(&t);
    for (unsigned i = 0; i < 3000; i++) {
        snprintf(key, sizeof key, "model.layers.%u.self_attn.q_proj.weight",
                 i * 7 % 3000);
        put(&t, key, 0, DTYPE_F32, i % 5);
    }
    commit(&t);
    v = view(&t, VIEW_MODEL, PREFIX_AUTO);
    assert_true(v.header > 4 * 65536);
    text = header(&t, &v);
    assert_ok(json_each_member(text, strlen(text), NULL, read_member, &r, &t.e), &t.e);
    assert_int_equal(r.n, 3000);
    assert_int_equal(v.header + r.at, v.size);
    for (uint64_t at = 8; at + sizeof piece < v.header; at += sizeof piece) {
        assert_ok(view_header(t.c, &v, at, sizeof piece, piece, &t.e), &t.e);
        assert_memory_equal(piece, text + at - 8, MIN(sizeof piece, strlen(text) - at));
    }
    assert_ok(view_header(t.c, &v, v.header, 0, piece, &t.e), &t.e);
    assert_int_equal(view_header(t.c, &v, v.header - 1, 2, piece, &t.e), -EINVAL);
    assert_ok(view_members(t.c, &v, &m, &n, &t.e), &t.e);
    assert_int_equal(n, 2400);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(m[i].at, i ? m[i - 1].at + m[i - 1].bytes : v.header);
    free(m);
    end(&t);
}

/* Readers take 100,000,000 bytes at most: so it is told, and nothing of it is kept. */
static void test_header_that_is_too_long(void **state)
{
    struct scan t = {.tmp = *state};
    enum { KEY = 60000, COUNT = 1700 };
    CLEANUP_FREE char *key = malloc(KEY + 1);
    struct view_info v;

    begin(&t);
    t.s->max_keys = 2 * KEY * COUNT;
    memset(key, 'k', KEY);
    key[KEY] = '\0';
    for (unsigned i = 0; i < COUNT; i++) {
        char number[8];

        memcpy(key, number, (size_t)snprintf(number, sizeof number, "%04u", i));
        put(&t, key, 0, DTYPE_U8, 1);
    }
    commit(&t);
    v = view(&t, VIEW_MODEL, PREFIX_AUTO);
    assert_true(v.header > 100000000 && v.size == v.header + COUNT);
    assert_has(v.fault, "readers take 100000000 at most");
    end(&t);
}

/* --- names --- */

/* The names in a header, in its order. */
struct names {
    char text[500];
};

static int add_member(void *user, const char *key, size_t key_len,
                      const struct json *value, struct err *e)
{
    struct names *n = user;
    size_t len = strlen(n->text);

    (void)key_len;
    (void)value;
    (void)e;
    if (strcmp(key, "__metadata__") != 0)
        snprintf(n->text + len, sizeof n->text - len, "%s ", key);
    return 0;
}

static void check_names(struct scan *t, enum view_kind kind, enum view_prefix prefix,
                        const char *want)
{
    struct view_info v = view(t, kind, prefix);
    const char *text = header(t, &v);
    struct names names = {0};

    assert_ok(json_each_member(text, strlen(text), NULL, add_member, &names, &t->e),
              &t->e);
    assert_string_equal(names.text, want);
}

static void test_wrapper_is_dropped(void **state)
{
    struct scan t = {.tmp = *state};

    begin(&t);
    put(&t, "model.b", 6, DTYPE_F32, 1);
    put(&t, "model.a", 6, DTYPE_F32, 1);
    put(&t, "plain", 0, DTYPE_F32, 1);
    put(&t, "optim.model.a", 6, DTYPE_F32, 1);
    commit(&t);
    check_names(&t, VIEW_MODEL, PREFIX_AUTO, "a b plain ");
    check_names(&t, VIEW_MODEL, PREFIX_KEEP, "model.a model.b plain ");
    check_names(&t, VIEW_MODEL, PREFIX_DROP, "a b plain ");
    check_names(&t, VIEW_OPTIMIZER, PREFIX_AUTO, "optim.model.a ");
    check_names(&t, VIEW_OPTIMIZER, PREFIX_DROP, "optim.model.a ");
    assert_int_equal(find_warning(&t, "prefix-kept").n, 0);
    end(&t);
}

static void test_names_that_meet_keep_their_wrapper(void **state)
{
    struct scan t = {.tmp = *state};

    begin(&t);
    put(&t, "model.w", 6, DTYPE_F32, 1);
    put(&t, "model.v", 6, DTYPE_F32, 1);
    put(&t, "w", 0, DTYPE_U8, 1);
    commit(&t);
    check_names(&t, VIEW_MODEL, PREFIX_AUTO, "model.v model.w w ");
    check_names(&t, VIEW_MODEL, PREFIX_DROP, "model.v model.w w ");
    assert_int_equal(find_warning(&t, "prefix-kept").n, 1); /* told once */
    end(&t);
}

static void test_prefix_drop_without_wrapper(void **state)
{
    static const struct {
        const char *keys[3], *want;
    } cases[] = {
        {{"model.w", "model.v.x", NULL}, "v.x w "},
        {{"module.w", NULL, NULL}, "w "},
        {{"state_dict.w", "state_dict.v", NULL}, "v w "},
        {{"app.w", NULL, NULL}, "w "},
        {{"net.w", NULL, NULL}, "net.w "},
        {{"model.w", "module.v", NULL}, "model.w module.v "},
        {{"model.w", "model", NULL}, "model model.w "},
        {{"model.w", "model.", NULL}, "model. model.w "},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct scan t = {.tmp = *state};

        begin(&t);
        for (unsigned k = 0; k < 3 && cases[i].keys[k]; k++)
            put(&t, cases[i].keys[k], 0, DTYPE_F32, 1);
        commit(&t);
        check_names(&t, VIEW_MODEL, PREFIX_DROP, cases[i].want);
        end(&t);
    }
}

/* A trainer's object round both is a wrapper; the model's entry in it is one more. */
static void test_prefix_drop_behind_a_wrapper(void **state)
{
    static const struct {
        const char *keys[3];
        uint32_t wrapper;
        const char *want;
    } cases[] = {
        {{"app.model.w", "app.model.model.v", NULL}, 4, "model.v w "},
        {{"dcp.model.w", NULL, NULL}, 4, "w "},
        {{"app.model.w", "app.net.v", NULL}, 4, "model.w net.v "},
        {{"app.net.w", NULL, NULL}, 4, "net.w "},
        {{"app.model.", NULL, NULL}, 4, "model. "},
        /* The module's own "model." is none. */
        {{"model.model.w", "model.model.v", NULL}, 6, "model.v model.w "},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct scan t = {.tmp = *state};

        begin(&t);
        for (unsigned k = 0; k < 3 && cases[i].keys[k]; k++)
            put(&t, cases[i].keys[k], cases[i].wrapper, DTYPE_F32, 1);
        commit(&t);
        check_names(&t, VIEW_MODEL, PREFIX_DROP, cases[i].want);
        end(&t);
    }
}

static void test_what_safetensors_cannot_hold(void **state)
{
    struct scan t = {.tmp = *state};
    struct find_warning w;
    struct view_info v;

    begin(&t);
    put(&t, "c", 0, DTYPE_C128, 1);
    put(&t, "half", 0, DTYPE_C32, 1);
    put(&t, "c64", 0, DTYPE_C64, 1);
    put(&t, "bad\xff", 0, DTYPE_F32, 1);
    put(&t, "__metadata__", 0, DTYPE_F32, 1);
    put(&t, "optim.c", 0, DTYPE_C128, 1);
    commit(&t);
    check_names(&t, VIEW_MODEL, PREFIX_AUTO, "c64 ");
    w = find_warning(&t, "not-in-safetensors");
    assert_int_equal(w.n, 2);
    assert_string_equal(w.text,
                        "1 tensors are not in optimizer.safetensors, which cannot"
                        " hold them (the first is optim.c)");
    assert_int_equal(view_get(t.c, t.id, VIEW_OPTIMIZER, PREFIX_AUTO, t.a, &v, &t.e),
                     -ENOENT);
    end(&t);
}

/* --- which file, whose, and when it cannot be read --- */

static void test_broken_tensor_breaks_the_view(void **state)
{
    struct scan t = {.tmp = *state};

    begin(&t);
    put(&t, "good", 0, DTYPE_F32, 1);
    t.end = 1 << 20;
    put(&t, "bad", 0, DTYPE_F32, 1);
    t.end = 0;
    put(&t, "optim.w", 0, DTYPE_F32, 0);
    commit(&t);
    assert_string_equal(
        view(&t, VIEW_MODEL, PREFIX_AUTO).fault,
        "tensor bad: shard a.bin ends at byte 1048576, chunk needs bytes"
        " 1048576 to 1048580");
    assert_null(view(&t, VIEW_OPTIMIZER, PREFIX_AUTO).fault);
    end(&t);
}

static void test_no_view(void **state)
{
    struct scan t = {.tmp = *state};
    struct view_info v;

    begin(&t);
    put(&t, "optim.w", 0, DTYPE_F32, 1);
    commit(&t);
    assert_int_equal(view_get(t.c, t.id, VIEW_MODEL, PREFIX_AUTO, t.a, &v, &t.e),
                     -ENOENT);
    assert_int_equal(view_get(t.c, t.id + 1, VIEW_MODEL, PREFIX_AUTO, t.a, &v, &t.e),
                     -ESTALE);
    end(&t);
}

static void test_view_of_an_old_scan(void **state)
{
    struct scan t = {.tmp = *state};
    struct view_member *m;
    struct view_info v;
    char byte;
    size_t n;

    begin(&t);
    put(&t, "w", 0, DTYPE_F32, 1);
    commit(&t);
    v = view(&t, VIEW_MODEL, PREFIX_AUTO);
    t.s = scan_begin(t.c, &t.store, "run", NULL);
    commit(&t);
    assert_int_equal(view_header(t.c, &v, 0, 1, &byte, &t.e), -ESTALE);
    assert_int_equal(view_members(t.c, &v, &m, &n, &t.e), -ESTALE);
    end(&t);
}

static void test_rights_and_inodes(void **state)
{
    struct scan t = {.tmp = *state};
    struct view_info v, keep, again;
    uint32_t other;
    const struct shape shape = {1, {4}};
    const struct sink_tensor in = f32("model.b", &shape);

    begin(&t);
    t.store.file[0].mode = 0664;
    t.store.file[0].mtime_ns = 50;
    t.store.file[1] = (struct fake_file){"run/b.bin", 64, 0640, 1000, 100, 70};
    t.store.n = 2;
    for (unsigned round = 0; round < 2; round++) {
        sink_abort(t.s);
        t.s = scan_begin(t.c, &t.store, "run", NULL);
        t.file = scan_file(t.s, "a.bin");
        other = scan_file(t.s, "b.bin");
        t.end = 0;
        put(&t, "model.a", 6, DTYPE_F32, 1);
        assert_ok(sink_tensor_plain(t.s, &in, other, 0, &t.e), &t.e);
        commit(&t);
        v = view(&t, VIEW_MODEL, PREFIX_AUTO);
        assert_int_equal(v.mode, 0640);
        assert_int_equal(v.mtime_ns, 70);
        assert_int_equal(v.uid, 1000);
        assert_int_equal(v.gid, 100);
        assert_true(v.ino >> 32 != 0 && v.ino % 2 == 0);
        if (round == 1)
            assert_int_equal(v.ino, again.ino);
        again = v;
        t.s = NULL;
    }
    keep = view(&t, VIEW_MODEL, PREFIX_KEEP);
    assert_true(keep.ino != v.ino); /* other names: other bytes */
    end(&t);
}

static void test_adapter(void **state)
{
    struct scan t = {.tmp = *state};
    const struct sink_checkpoint about = {.format = "peft", .adapter = true};

    begin(&t);
    assert_ok(sink_checkpoint(t.s, &about, &t.e), &t.e);
    put(&t, "w", 0, DTYPE_F32, 1);
    commit(&t);
    assert_string_equal(view(&t, VIEW_MODEL, PREFIX_AUTO).name,
                        "adapter_model.safetensors");
    end(&t);
}

static void test_metadata(void **state)
{
    struct scan t = {.tmp = *state};
    const struct sink_checkpoint about = {.format = "hf",
                                          .header = "{\"format\":\"mlx\"}"};
    struct view_info v;

    begin(&t);
    assert_ok(sink_checkpoint(t.s, &about, &t.e), &t.e);
    put(&t, "w", 0, DTYPE_F32, 1);
    put(&t, "optimizer.w", 0, DTYPE_F32, 1);
    commit(&t);
    v = view(&t, VIEW_MODEL, PREFIX_AUTO);
    assert_has(header(&t, &v), "{\"__metadata__\":{\"format\":\"mlx\"},\"w\":");
    v = view(&t, VIEW_OPTIMIZER, PREFIX_AUTO);
    assert_has(header(&t, &v), "{\"__metadata__\":{\"format\":\"pt\"},\"opt");
    end(&t);
}

/* --- a source file that is the view already --- */

static void test_whole_file(void **state)
{
    struct scan t = {.tmp = *state};
    struct view_member *m;
    struct view_info v;
    size_t n;

    begin(&t);
    assert_ok(sink_whole_file(t.s, t.file, &t.e), &t.e);
    put(&t, "w", 0, DTYPE_F32, 4);
    put(&t, "v", 0, DTYPE_F32, 4);
    commit(&t);
    v = view(&t, VIEW_MODEL, PREFIX_AUTO);
    assert_int_equal(v.whole_file, t.file);
    assert_int_equal(v.size, 1 << 20);
    assert_int_equal(v.header, 0);
    assert_null(v.fault);
    assert_ok(view_members(t.c, &v, &m, &n, &t.e), &t.e);
    assert_int_equal(n, 0);
    free(m);
    assert_int_equal(view(&t, VIEW_MODEL, PREFIX_KEEP).whole_file, t.file);
    end(&t);
}

/* What one thing makes of it. */
enum spoil {
    NOT_DECLARED,
    OTHER_ROLE,
    OTHER_FILE,
    RENAMED,
    WRAPPED,
    SWAPPED,
    TWO_PIECES,
    BROKEN,
    SPOILS
};

static void put_spoiled(struct scan *t, enum spoil spoil)
{
    const struct shape shape = {1, {2}};
    struct sink_tensor in = f32(spoil == OTHER_ROLE ? "optim.x" : "x", &shape);
    const uint64_t starts[] = {0, 1}, sizes[] = {2, 1};
    bool two = spoil == TWO_PIECES;

    in.codec_key = spoil == RENAMED ? "y" : NULL;
    assert_ok(sink_tensor_begin(t->s, &in, &t->e), &t->e);
    for (unsigned i = 0; i < (two ? 2 : 1); i++) {
        const struct chunk c = {
            .file = spoil == OTHER_FILE ? scan_file(t->s, "b.bin") : t->file,
            .flags = spoil == SWAPPED ? CHUNK_SWAP : 0,
            .offset = spoil == BROKEN ? 1 << 20 : 512,
            .length = two ? 4 : 8,
            .start = &starts[i],
            .size = &sizes[two],
        };

        assert_ok(sink_chunk(t->s, &c, &t->e), &t->e);
    }
    assert_ok(sink_tensor_end(t->s, &t->e), &t->e);
}

static void test_not_a_whole_file(void **state)
{
    for (enum spoil spoil = NOT_DECLARED; spoil < SPOILS; spoil++) {
        struct scan t = {.tmp = *state};

        begin(&t);
        fake_add(&t.store, "run/b.bin", 4096);
        if (spoil != NOT_DECLARED)
            assert_ok(sink_whole_file(t.s, t.file, &t.e), &t.e);
        put(&t, "model.w", spoil == WRAPPED ? 6 : 0, DTYPE_F32, 4);
        put_spoiled(&t, spoil);
        commit(&t);
        if (view(&t, VIEW_MODEL, PREFIX_AUTO).whole_file >= 0)
            fail_msg("case %d is served as it is", spoil);
        /* The wrapper is in the file's names: kept, it is the same file. */
        if (spoil == WRAPPED)
            assert_int_equal(view(&t, VIEW_MODEL, PREFIX_KEEP).whole_file, t.file);
        end(&t);
    }
}

/* --- made when asked for, by several at once --- */

struct asker {
    struct scan *t;
    int64_t id;
    int rc;
};

static void *ask(void *user)
{
    struct asker *asker = user;
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct view_info v = {0};
    struct err e = {0};

    asker->rc = view_get(asker->t->c, asker->t->id, VIEW_MODEL, PREFIX_KEEP, a, &v, &e);
    asker->id = v.id;
    return NULL;
}

static void test_asked_for_at_once(void **state)
{
    struct scan t = {.tmp = *state};
    struct asker asker[4];
    pthread_t thread[4];

    begin(&t);
    for (unsigned i = 0; i < 500; i++) {
        char key[32];

        snprintf(key, sizeof key, "model.%u", i);
        put(&t, key, 6, DTYPE_F32, 1);
    }
    commit(&t);
    for (unsigned i = 0; i < 4; i++) {
        asker[i] = (struct asker){.t = &t};
        assert_int_equal(pthread_create(&thread[i], NULL, ask, &asker[i]), 0);
    }
    for (unsigned i = 0; i < 4; i++) {
        pthread_join(thread[i], NULL);
        assert_int_equal(asker[i].rc, 0);
        assert_int_equal(asker[i].id, asker[0].id);
    }
    end(&t);
}

/* --- .npy --- */

static void check_npy(enum dtype dtype, const struct shape *shape, const char *dict)
{
    struct buf b = {0};
    struct err e = {0};

    assert_ok(npy_header(dtype, shape, &b, &e), &e);
    assert_int_equal(b.len % 64, 0);
    assert_memory_equal(b.data, "\x93NUMPY\x01\x00", 8);
    assert_int_equal(get_le16(b.data + 8), b.len - 10);
    assert_int_equal(b.data[b.len - 1], '\n');
    assert_memory_equal(b.data + 10, dict, strlen(dict));
    for (size_t i = 10 + strlen(dict); i + 1 < b.len; i++)
        assert_int_equal(b.data[i], ' ');
    buf_release(&b);
}

static void test_npy(void **state)
{
    const struct shape scalar = {0, {0}}, line = {1, {5}}, matrix = {2, {2, 30}};
    struct shape deep = {64, {0}};
    struct buf b = {0};
    struct err e = {0};

    (void)state;
    check_npy(DTYPE_F32, &matrix,
              "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 30), }");
    check_npy(DTYPE_F32, &line,
              "{'descr': '<f4', 'fortran_order': False, 'shape': (5,), }");
    check_npy(DTYPE_BF16, &scalar,
              "{'descr': '<V2', 'fortran_order': False, 'shape': (), }");
    check_npy(DTYPE_F8_E4M3, &line,
              "{'descr': '|V1', 'fortran_order': False, 'shape': (5,), }");
    check_npy(DTYPE_F4, &matrix,
              "{'descr': '|u1', 'fortran_order': False, 'shape': (2, 15), }");
    check_npy(DTYPE_C128, &line,
              "{'descr': '<c16', 'fortran_order': False, 'shape': (5,), }");
    for (unsigned k = 0; k < 64; k++)
        deep.dim[k] = k == 0 ? 0 : 1234567890123456789;
    assert_ok(npy_header(DTYPE_U8, &deep, &b, &e), &e);
    assert_int_equal(b.len % 64, 0);
    buf_release(&b);
    assert_int_equal(npy_header(DTYPE_F4, &line, &b, &e), -EBADMSG);
    buf_release(&b);
}

/* --- reports --- */

static int memory_file(void)
{
    int fd = memfd_create("report", MFD_CLOEXEC);

    assert_true(fd >= 0);
    return fd;
}

static uint64_t number(const struct json *v, const char *key)
{
    uint64_t out = UINT64_MAX;

    if (!json_u64(json_get(v, key), &out))
        fail_msg("no number %s", key);
    return out;
}

static const char *text_of(const struct json *v, const char *key)
{
    const char *out = NULL;

    if (!json_string(json_get(v, key), &out))
        fail_msg("no text %s", key);
    return out;
}

static void check_lists(const struct json *doc)
{
    const struct json *v = json_first(json_get(doc, "views"));

    assert_int_equal(json_count(json_get(doc, "views")), 2);
    assert_string_equal(text_of(v, "name"), "model.safetensors");
    assert_has(text_of(v, "fault"), "tensor bad");
    assert_int_equal(json_kind(json_get(v, "source_file")), JSON_NULL);
    v = json_next(v);
    assert_string_equal(text_of(v, "name"), "optimizer.safetensors");
    assert_int_equal(json_kind(json_get(v, "fault")), JSON_NULL);
    v = json_first(json_get(doc, "warnings"));
    assert_string_equal(text_of(v, "code"), "stale-file");
    assert_string_equal(text_of(v, "text"), "an \"odd\" one");
    v = json_first(json_get(doc, "files"));
    assert_string_equal(text_of(v, "path"), "run/a.bin");
    assert_int_equal(number(v, "size"), 1 << 20);
    v = json_first(json_get(doc, "tensors"));
    assert_string_equal(text_of(v, "key"), "bad");
    assert_has(text_of(v, "fault"), "shard a.bin ends");
    v = json_next(v);
    assert_string_equal(text_of(v, "key"), "g\n\"\xef\xbf\xbd");
    assert_string_equal(text_of(v, "name"), "g%0A\"%FF");
    assert_string_equal(text_of(v, "dtype"), "F32");
    assert_string_equal(text_of(v, "role"), "model");
    assert_int_equal(number(v, "bytes"), 12);
    assert_int_equal(number(v, "chunks"), 1);
    assert_null(json_get(v, "fault"));
    assert_int_equal(json_count(json_get(v, "shape")), 1);
}

static void test_checkpoint_report(void **state)
{
    struct scan t = {.tmp = *state};
    const struct sink_checkpoint about = {.format = "torch-dcp",
                                          .framework = "PyTorch",
                                          .topology = "{\"ranks\": 4}",
                                          .has_step = true,
                                          .step = 100};
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FD int fd = memory_file();
    CLEANUP_FREE char *text = NULL;
    const struct json *counts;
    size_t len;

    begin(&t);
    assert_ok(sink_checkpoint(t.s, &about, &t.e), &t.e);
    put(&t, "g\n\"\xff", 0, DTYPE_F32, 3);
    put(&t, "optim.w", 0, DTYPE_F32, 3);
    t.end = 1 << 20;
    put(&t, "bad", 0, DTYPE_F32, 1);
    sink_warning(t.s, "stale-file", "an \"odd\" one");
    commit(&t);
    assert_ok(report_checkpoint(t.c, t.id, fd, &t.e), &t.e);
    text = slurp(fd, &len);
    assert_ok(json_parse(text, len, NULL, &doc, &t.e), &t.e);
    assert_int_equal(number(doc, "schema"), 1);
    assert_string_equal(text_of(doc, "path"), "run");
    assert_int_equal(json_kind(json_get(doc, "file")), JSON_NULL);
    assert_string_equal(text_of(doc, "format"), "torch-dcp");
    assert_string_equal(text_of(doc, "framework"), "PyTorch");
    assert_int_equal(json_kind(json_get(doc, "version")), JSON_NULL);
    assert_int_equal(json_kind(json_get(doc, "error")), JSON_NULL);
    assert_int_equal(number(doc, "step"), 100);
    assert_int_equal(number(json_get(doc, "topology"), "ranks"), 4);
    counts = json_get(doc, "counts");
    assert_int_equal(number(counts, "tensors"), 3);
    assert_int_equal(number(counts, "bytes"), 28);
    assert_int_equal(number(counts, "faults"), 1);
    assert_int_equal(number(counts, "files"), 1);
    assert_int_equal(number(counts, "warnings"), 2); /* and the key that is no UTF-8 */
    counts = json_get(json_get(counts, "by_role"), "model");
    assert_int_equal(number(counts, "tensors"), 2);
    assert_int_equal(number(counts, "bytes"), 16);
    check_lists(doc);
    end(&t);
}

static void test_report_of_a_failed_scan(void **state)
{
    struct scan t = {.tmp = *state};
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FD int fd = memory_file();
    CLEANUP_FREE char *text = NULL;
    struct err failed = {0};
    size_t len;

    begin(&t);
    err_set(&failed, EBADMSG, "no magic");
    assert_ok(sink_commit(t.s, &failed, &t.id, &t.e), &t.e);
    assert_ok(report_checkpoint(t.c, t.id, fd, &t.e), &t.e);
    text = slurp(fd, &len);
    assert_ok(json_parse(text, len, NULL, &doc, &t.e), &t.e);
    assert_string_equal(text_of(doc, "error"), "no magic");
    assert_int_equal(json_count(json_get(doc, "tensors")), 0);
    assert_int_equal(json_count(json_get(doc, "views")), 0);
    end(&t);
}

static void test_objects_report(void **state)
{
    struct scan t = {.tmp = *state};
    CLEANUP_FD int fd = memory_file();
    CLEANUP_FREE char *text = NULL;

    begin(&t);
    assert_ok(sink_object(t.s, "b\"", 2, "[1, 2]", 6, &t.e), &t.e);
    assert_ok(sink_object(t.s, "a", 1, "{\"x\": null}", 11, &t.e), &t.e);
    commit(&t);
    assert_ok(report_objects(t.c, t.id, fd, &t.e), &t.e);
    text = slurp(fd, NULL);
    assert_string_equal(text, "{\n\"a\":{\"x\": null},\n\"b\\\"\":[1, 2]}\n");
    end(&t);
}

/* More than the buffer; and a descriptor that takes nothing. */
static void test_report_is_a_stream(void **state)
{
    struct scan t = {.tmp = *state};
    CLEANUP_FD int fd = memory_file();
    CLEANUP_FD int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    CLEANUP(json_freep) struct json *doc = NULL;
    CLEANUP_FREE char *text = NULL;
    char key[64];
    size_t len;

    begin(&t);
    for (unsigned i = 0; i < 2000; i++) {
        snprintf(key, sizeof key, "a.rather.long.key.of.a.tensor.%u", i);
        put(&t, key, 0, DTYPE_F32, 1);
    }
    commit(&t);
    assert_ok(report_checkpoint(t.c, t.id, fd, &t.e), &t.e);
    text = slurp(fd, &len);
    assert_true(len > 3 * 65536);
    assert_ok(json_parse(text, len, NULL, &doc, &t.e), &t.e);
    assert_int_equal(json_count(json_get(doc, "tensors")), 2000);
    assert_int_equal(report_checkpoint(t.c, t.id, full, &t.e), -ENOSPC);
    assert_int_equal(report_objects(t.c, t.id, full, &t.e), -ENOSPC);
    assert_int_equal(report_checkpoint(t.c, t.id + 1, fd, &t.e), -ESTALE);
    end(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        tmp_test(test_header),
        tmp_test(test_members),
        tmp_test(test_large_header),
        tmp_test(test_header_that_is_too_long),
        tmp_test(test_wrapper_is_dropped),
        tmp_test(test_names_that_meet_keep_their_wrapper),
        tmp_test(test_prefix_drop_without_wrapper),
        tmp_test(test_prefix_drop_behind_a_wrapper),
        tmp_test(test_what_safetensors_cannot_hold),
        tmp_test(test_broken_tensor_breaks_the_view),
        tmp_test(test_no_view),
        tmp_test(test_view_of_an_old_scan),
        tmp_test(test_rights_and_inodes),
        tmp_test(test_adapter),
        tmp_test(test_metadata),
        tmp_test(test_whole_file),
        tmp_test(test_not_a_whole_file),
        tmp_test(test_asked_for_at_once),
        cmocka_unit_test(test_npy),
        tmp_test(test_checkpoint_report),
        tmp_test(test_report_of_a_failed_scan),
        tmp_test(test_objects_report),
        tmp_test(test_report_is_a_stream),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
