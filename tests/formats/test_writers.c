/* SPDX-License-Identifier: MIT */
/* tests/formats/test_writers.c - what is written is read again: every byte, every format. */
#include "layout_run.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/guard.h"
#include "index/formats/format.h"
#include "index/names.h"
#include "tests/unit/unit.h"

enum { MAX_TENSORS = 512 };

/* A checkpoint to be written: tensors, their bytes, objects. */
struct given {
    struct layout_tensor tensor[MAX_TENSORS];
    struct buf bytes[MAX_TENSORS];
    struct layout_object *object;
    struct layout_input in;
};

static void given_release(struct given *g)
{
    for (size_t i = 0; i < g->in.tensors; i++)
        buf_release(&g->bytes[i]);
    for (size_t i = 0; i < g->in.objects; i++) {
        free((void *)(uintptr_t)g->object[i].key);
        free((void *)(uintptr_t)g->object[i].json);
    }
    free(g->object);
    free(g);
}

/* ---- what was lost, and what must be there ---- */

static bool is_lost(const struct layout *l, enum layout_loss kind, const char *what,
                    size_t len)
{
    for (size_t i = 0; i < layout_losses(l); i++) {
        enum layout_loss k;
        const char *text = layout_loss_at(l, i, &k);

        if (k == kind && strncmp(text, what, len) == 0 &&
            (kind == LOSS_ROLE ? text[len] == ' ' : text[len] == '\0'))
            return true;
    }
    return false;
}

static bool tensor_lost(const struct layout *l, const struct layout_tensor *t)
{
    const char *role = role_name(t->role);

    return is_lost(l, LOSS_TENSOR, t->key, t->key_len) ||
           is_lost(l, LOSS_ROLE, role, strlen(role));
}

/*
 * The text without what tells in which file of a checkpoint an object lies: a tensor in it
 * is called FILE:PATH, and has another name where the object has another file.
 */
static void without_files(const char *text, size_t len, struct buf *out)
{
    buf_clear(out);
    for (size_t i = 0; i < len;) {
        int n = 0;

        if (sscanf(text + i, "__%*u_%*u.distcp:%n", &n), n > 0) {
            i += (size_t)n;
        } else if (len - i > 4 && memcmp(text + i, ".pt:", 4) == 0) {
            buf_addc(out, '.');
            i += 4;
        } else {
            buf_addc(out, text[i++]);
        }
    }
    buf_addc(out, '\0');
}

/* By the model's own name, by that in its object, or by its full key. */
static bool is_same(const struct tensor_info *x, const struct layout_tensor *t)
{
    CLEANUP(buf_release) struct buf a = {0}, b = {0};
    size_t x_cut = t->role == ROLE_MODEL ? x->wrapper : 0;
    size_t t_cut = t->role == ROLE_MODEL ? t->wrapper : 0;

    if (x->key_len == t->key_len && memcmp(x->key, t->key, t->key_len) == 0)
        return true;
    if (t->role != ROLE_OTHER)
        return x->key_len - x_cut == t->key_len - t_cut &&
               memcmp(x->key + x_cut, t->key + t_cut, t->key_len - t_cut) == 0;
    without_files(x->key, x->key_len, &a);
    without_files(t->key, t->key_len, &b);
    return strcmp(a.data, b.data) == 0;
}

static const struct tensor_info *find(const struct opened *o,
                                      const struct layout_tensor *t)
{
    for (size_t i = 0; i < o->count; i++)
        if (is_same(&o->t[i], t))
            return &o->t[i];
    return NULL;
}

static void check_tensor_of(struct opened *o, const struct layout_tensor *t,
                            const struct buf *want)
{
    CLEANUP(buf_release) struct buf bytes = {0}, naive = {0};
    const struct tensor_info *x = find(o, t);
    struct err e = {0};

    if (!x || x->fault) {
        fail_msg("%s: %s", t->key, x ? x->fault : "is not there");
        return;
    }
    if (x->dtype != t->dtype || !shape_equal(&x->shape, &t->shape) ||
        x->role != t->role)
        fail_msg("%s: %s %s, was %s %s, or another shape", t->key, role_name(x->role),
                 dtype_name(x->dtype), role_name(t->role), dtype_name(t->dtype));
    assert_ok(read_tensor(&o->w, o->info.id, x, &bytes, &e), &e);
    assert_ok(world_read(&o->w, o->info.id, x, &naive, &e), &e);
    if (bytes.len != want->len || naive.len != want->len ||
        (want->len && (memcmp(bytes.data, want->data, want->len) != 0 ||
                       memcmp(naive.data, want->data, want->len) != 0)))
        fail_msg("%s: other bytes", t->key);
}

static void check_objects(struct opened *o, const struct layout *l,
                          const struct layout_input *in)
{
    CLEANUP(buf_release) struct buf listed = {0}, all = {0};

    all_objects(o, &listed);
    without_files(listed.data ? listed.data : "", listed.len, &all);
    for (size_t i = 0; i < in->objects; i++) {
        const struct layout_object *x = &in->object[i];
        CLEANUP(buf_release) struct buf text = {0}, line = {0};

        buf_addf(&text, "%s=%s\n", x->key, x->json);
        without_files(text.data, text.len, &line);
        if (is_lost(l, LOSS_OBJECT, x->key, x->key_len))
            continue;
        assert_has(all.data, line.data);
    }
}

static size_t kept_tensors(const struct layout *l, const struct layout_input *in)
{
    size_t n = 0;

    for (size_t i = 0; i < in->tensors; i++)
        n += !tensor_lost(l, &in->tensor[i]);
    return n;
}

/* ---- writing ---- */

struct way {
    const char *to;
    struct layout_options options;
};

static const struct way ways[] = {
    {"hf", {0}},
    {"hf", {.max_shard_size = 5000}},
    {"dcp", {0}},
    {"dcp", {.ranks = 3}},
    {"dcp", {.ranks = 8}},
    {"dcp", {.mesh = {2, 2}}},
    {"dcp", {.mesh = {3, 5}}},
    {"dcp-hf", {0}},
    {"dcp-hf", {.ranks = 3}},
    {"dcp-hf", {.mesh = {2, 2}, .max_shard_size = 5000}},
    {"pt", {0}},
    {"npz", {0}},
    {"olmo-step", {0}},
    {"olmo-step", {.ranks = 3}},
    {"torch_dist", {0}},
    {"torch_dist", {.ranks = 5}},
    {"torch_dist", {.mesh = {2, 2}}},
    {"olmo", {0}},
    {"olmo", {.ranks = 3}},
    {"olmo", {.ranks = 8}},
    {"zarr", {0}},
    {"zarr", {.ranks = 3}},
    {"zarr", {.ranks = 4, .codec = "blosc-lz4"}},
};

static void check_same(const struct layout *a, const struct layout_input *in,
                       const struct format_writer *w, const struct layout_options *o)
{
    CLEANUP(layout_freep) struct layout *b = NULL;
    struct err e = {0};
    uint64_t x[2], y[2];

    assert_ok(layout_new(&b, &e), &e);
    assert_ok(w->layout(in, o, b, &e), &e);
    assert_ok(layout_digest(a, x, &e), &e);
    assert_ok(layout_digest(b, y, &e), &e);
    assert_memory_equal(x, y, sizeof x);
}

/* Writes it, reads it again, and what was not told as lost is there, and nothing else. */
static size_t check_way(const struct given *g, const struct way *way)
{
    const struct format_writer *w = format_writer(way->to);
    CLEANUP(layout_freep) struct layout *l = NULL;
    struct err e = {0};
    struct made m;
    struct opened o;
    size_t kept;

    assert_non_null(w);
    assert_ok(layout_new(&l, &e), &e);
    assert_ok(w->layout(&g->in, &way->options, l, &e), &e);
    check_same(l, &g->in, w, &way->options);
    kept = kept_tensors(l, &g->in);
    if (kept == 0)
        return 0;
    made_begin(&m, "written");
    layout_run(l, &g->in, g->bytes, &m);
    made_open(&m, &o);
    if (o.info.error)
        fail_msg("%s: %s", way->to, o.info.error);
    for (size_t i = 0; i < g->in.tensors; i++)
        if (!tensor_lost(l, &g->in.tensor[i]))
            check_tensor_of(&o, &g->in.tensor[i], &g->bytes[i]);
    check_objects(&o, l, &g->in);
    if (o.count != kept)
        fail_msg("%s: %zu tensors were written, %zu are read", way->to, kept, o.count);
    close_checkpoint(&o);
    made_end(&m);
    return kept;
}

/* ---- fixtures of other formats ---- */

static int take_object(void *user, const char *key, size_t key_len, const char *json,
                       size_t len)
{
    struct given *g = user;

    g->object = reallocarray(g->object, g->in.objects + 1, sizeof *g->object);
    assert_non_null(g->object);
    g->object[g->in.objects++] = (struct layout_object){.key = strndup(key, key_len),
                                                        .key_len = key_len,
                                                        .json = strndup(json, len),
                                                        .json_len = len};
    return 0;
}

static struct given *given_of(struct opened *o)
{
    struct given *g = calloc(1, sizeof *g);
    struct err e = {0};

    assert_non_null(g);
    for (size_t i = 0; i < o->count; i++) {
        const struct tensor_info *t = &o->t[i];
        size_t n = g->in.tensors;

        if (t->fault)
            continue;
        assert_true(n < MAX_TENSORS);
        g->tensor[n] = (struct layout_tensor){.key = t->key,
                                              .key_len = t->key_len,
                                              .wrapper = t->wrapper,
                                              .part = t->part,
                                              .role = t->role,
                                              .dtype = t->dtype,
                                              .shape = t->shape};
        assert_ok(world_read(&o->w, o->info.id, t, &g->bytes[n], &e), &e);
        g->in.tensors++;
    }
    assert_ok(catalog_objects(o->w.catalog, o->info.id, take_object, g, &e), &e);
    g->in.tensor = g->tensor;
    g->in.object = g->object;
    g->in.format = "";
    return g;
}

static void test_round_trip(void **state)
{
    struct opened o;
    struct given *g;
    size_t kept = 0;

    open_checkpoint(*state, &o);
    g = given_of(&o);
    assert_true(g->in.tensors > 0);
    for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
        kept += check_way(g, &ways[i]);
    assert_true(kept > 0);
    given_release(g);
    close_checkpoint(&o);
}

static const char *const fixtures[] = {
    "gguf/gguf_plain",
    "hf_dcp/hfdcp_fsdp2_3r",
    "megatron/mcore018_torch_dist_commonpt",
    "megatron/mcore012_zarr_tp2_dp2_flat",
    "olmo_core/step100",
    "olmo_v0/v01-plain-w4",
    "olmo_v0/v01-torchfsdp-w4",
    "safetensors/hf_gpt2_prefix",
    "safetensors/hf_safetensors_dtypes",
    "safetensors/hf_tied_sharded",
    "torch_dcp/dcp_fsdp2_adamw_3r_bf16",
    "torch_dcp/dcp_fsdp2_adamw_4r_flatopt",
    "torch_dcp/dcp_layouts",
    "torch_dcp/dcp_mesh_2x2",
    "torch_dcp/dcp_plain_dtypes_objects",
    "torch_dcp/dcp_zstd_2r",
    "torch_file/composer_like",
    "torch_file/pt_zip_all",
    "torch_file/wrapper",
};

/* ---- made up: every type, and shapes that are hard to cut ---- */

static void add(struct given *g, const char *key, enum dtype d, uint32_t nd,
                const uint64_t *dim)
{
    struct layout_tensor *t = &g->tensor[g->in.tensors];
    struct buf *b = &g->bytes[g->in.tensors++];
    struct err e = {0};
    uint64_t bytes;

    *t = (struct layout_tensor){.key = key, .key_len = strlen(key), .dtype = d};
    t->role = role_of(NULL, key, t->key_len);
    t->shape.nd = nd;
    for (uint32_t k = 0; k < nd; k++)
        t->shape.dim[k] = dim[k];
    assert_ok(shape_bytes(&t->shape, d, &bytes, &e), &e);
    for (uint64_t i = 0; i < bytes; i++)
        buf_addc(b, d == DTYPE_BOOL ? (char)(i & 1) : (char)(i * 37 + g->in.tensors));
}

static struct given *hard_ones(void)
{
    static char name[DTYPE_COUNT][32];
    struct given *g = calloc(1, sizeof *g);

    assert_non_null(g);
    for (enum dtype d = DTYPE_NONE + 1; d < DTYPE_COUNT; d++) {
        snprintf(name[d], sizeof name[d], "types.%s", dtype_name(d));
        add(g, name[d], d, 2, (const uint64_t[]){7, 12});
    }
    add(g, "a.scalar", DTYPE_F32, 0, NULL);
    add(g, "b.scalar", DTYPE_I64, 0, NULL);
    add(g, "c.empty", DTYPE_F32, 1, (const uint64_t[]){0});
    add(g, "c.empty2", DTYPE_BF16, 3, (const uint64_t[]){4, 0, 3});
    add(g, "d.one", DTYPE_F32, 1, (const uint64_t[]){1});
    add(g, "d.ones", DTYPE_F32, 5, (const uint64_t[]){1, 1, 1, 1, 1});
    add(g, "d.two", DTYPE_F16, 2, (const uint64_t[]){2, 9});
    add(g, "e.wide", DTYPE_U8, 2, (const uint64_t[]){1, 1001});
    add(g, "e.deep", DTYPE_F32, 4, (const uint64_t[]){5, 4, 3, 2});
    add(g, "f.odd4", DTYPE_F4, 2, (const uint64_t[]){2, 3});
    add(g, "f.line4", DTYPE_F4, 1, (const uint64_t[]){26});
    add(g, "g.h\303\251 \"quoted\"\\ %/x", DTYPE_F32, 1, (const uint64_t[]){3});
    add(g, "optim.state.a.scalar.exp_avg", DTYPE_F32, 1, (const uint64_t[]){11});
    add(g, "lr_scheduler.x", DTYPE_F64, 1, (const uint64_t[]){2});
    g->in.tensor = g->tensor;
    g->in.format = "";
    return g;
}

static void test_hard_ones(void **state)
{
    struct given *g = hard_ones();

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
        check_way(g, &ways[i]);
    given_release(g);
}

/* What each format says that it cannot hold, and only that. */
static void test_losses(void **state)
{
    static const struct {
        const char *to, *lost;
    } cases[] = {
        {"hf", "types.C128 types.C32 optimizer (1 tensors) other (1 tensors) "},
        {"dcp", "types.F6_E2M3 types.F6_E3M2 f.odd4 "},
        {"dcp-hf",
         "types.C128 types.C32 types.F8_E8M0 types.F4 types.F6_E2M3 "
         "types.F6_E3M2 f.odd4 f.line4 optimizer (1 tensors) other (1 tensors) "},
        {"pt", "other (1 tensors) types.F6_E2M3 types.F6_E3M2 f.odd4 "},
        {"olmo", "types.U16 types.U32 types.U64 types.C64 types.C128 types.C32 "
                 "types.F8_E8M0 types.F8_E4M3FNUZ types.F8_E5M2FNUZ types.F4 "
                 "types.F6_E2M3 types.F6_E3M2 f.odd4 f.line4 optimizer (1 tensors) "
                 "other (1 tensors) "},
        {"olmo-step", "types.F6_E2M3 types.F6_E3M2 f.odd4 "},
        {"torch_dist", "types.F6_E2M3 types.F6_E3M2 f.odd4 "},
        {"zarr", "types.C32 types.F8_E4M3 types.F8_E5M2 types.F8_E8M0 "
                 "types.F8_E4M3FNUZ types.F8_E5M2FNUZ types.F4 types.F6_E2M3 "
                 "types.F6_E3M2 a.scalar b.scalar f.odd4 f.line4 "
                 "g.h\303\251 \"quoted\"\\ %/x "},
        {"npz", "types.C32 types.F8_E4M3 types.F8_E5M2 types.F8_E8M0 "
                "types.F8_E4M3FNUZ types.F8_E5M2FNUZ types.F4 types.F6_E2M3 "
                "types.F6_E3M2 f.odd4 f.line4 g.h\303\251 \"quoted\"\\ %/x "},
    };
    struct given *g = hard_ones();

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(layout_freep) struct layout *l = NULL;
        CLEANUP(buf_release) struct buf lost = {0};
        const struct layout_options none = {0};
        enum layout_loss kind;
        struct err e = {0};

        assert_ok(layout_new(&l, &e), &e);
        assert_ok(format_writer(cases[i].to)->layout(&g->in, &none, l, &e), &e);
        for (size_t k = 0; k < layout_losses(l); k++)
            buf_addf(&lost, "%s ", layout_loss_at(l, k, &kind));
        assert_string_equal(lost.data, cases[i].lost);
    }
    given_release(g);
}

/* No name of a safetensors file is that of its metadata, or anything but text. */
static void test_names_in_safetensors(void **state)
{
    static const char *const to[] = {"hf", "dcp-hf", "olmo"};
    struct given *g = calloc(1, sizeof *g);

    (void)state;
    assert_non_null(g);
    add(g, "__metadata__", DTYPE_F32, 1, (const uint64_t[]){1});
    add(g, "no\377text", DTYPE_F32, 1, (const uint64_t[]){1});
    add(g, "w", DTYPE_F32, 1, (const uint64_t[]){1});
    g->in.tensor = g->tensor;
    g->in.format = "";
    for (size_t i = 0; i < ARRAY_SIZE(to); i++) {
        CLEANUP(layout_freep) struct layout *l = NULL;
        const struct layout_options none = {0};
        struct err e = {0};

        assert_ok(layout_new(&l, &e), &e);
        assert_ok(format_writer(to[i])->layout(&g->in, &none, l, &e), &e);
        assert_true(tensor_lost(l, &g->tensor[0]));
        assert_true(tensor_lost(l, &g->tensor[1]));
        assert_false(tensor_lost(l, &g->tensor[2]));
    }
    given_release(g);
}

/* A tensor whose key says another role than it has would come back as another's. */
static void test_role_of_key(void **state)
{
    static const char *const formats[] = {"dcp", "npz"};
    struct given *g = calloc(1, sizeof *g);

    (void)state;
    assert_non_null(g);
    add(g, "__0_0.distcp:rng", DTYPE_U8, 1, (const uint64_t[]){5});
    add(g, "weight", DTYPE_U8, 1, (const uint64_t[]){5});
    g->tensor[0].role = ROLE_OTHER;
    g->in.tensor = g->tensor;
    for (size_t i = 0; i < ARRAY_SIZE(formats); i++)
        assert_int_equal(check_way(g, &(struct way){.to = formats[i]}), 1);
    given_release(g);
}

/* Whatever a writer makes of keys: no file and no directory of a save lies outside of it. */
static void test_paths_refused(void **state)
{
    static const char *const paths[] = {"",     "/etc/x", "../x", "a/../x", "a/..",
                                        "a//b", "./a",    "a/",   "."};
    CLEANUP(layout_freep) struct layout *l = NULL;
    struct layout_file *f = NULL;
    struct err e = {0};

    (void)state;
    assert_ok(layout_new(&l, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(paths); i++) {
        if (layout_file_new(l, paths[i], 0, &f, &e) != -EINVAL ||
            layout_directory(l, paths[i], &e) != -EINVAL)
            fail_msg("\"%s\" is taken", paths[i]);
        assert_has(e.text, "is no name for a directory");
    }
    assert_ok(layout_file_new(l, "a/b", 0, &f, &e), &e);
    assert_int_equal(layout_file_new(l, "a/b", 0, &f, &e), -EEXIST);
}

static void test_options_refused(void **state)
{
    static const struct way wrong[] = {
        {"hf", {.ranks = 2}},
        {"hf", {.mesh = {2, 2}}},
        {"dcp", {.max_shard_size = 1}},
        {"dcp", {.ranks = 1u << 20}},
        {"dcp", {.codec = "none"}},
        {"dcp-hf", {.mesh = {1000, 1000}}},
        {"pt", {.ranks = 2}},
        {"pt", {.max_shard_size = 1}},
        {"npz", {.mesh = {1, 1}}},
        {"npz", {.codec = "blosc-lz4"}},
        {"olmo-step", {.codec = "none"}},
        {"torch_dist", {.max_shard_size = 1}},
        {"olmo", {.mesh = {2, 2}}},
        {"zarr", {.mesh = {2, 2}}},
        {"zarr", {.codec = "zstd"}},
    };
    struct given *g = hard_ones();

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        CLEANUP(layout_freep) struct layout *l = NULL;
        struct err e = {0};

        assert_ok(layout_new(&l, &e), &e);
        assert_int_equal(
            format_writer(wrong[i].to)->layout(&g->in, &wrong[i].options, l, &e),
            -EINVAL);
        assert_has(e.text, i == 3 || i == 5 ? "ranks" : wrong[i].to);
    }
    given_release(g);
}

/* ---- objects ---- */

static void test_objects(void **state)
{
    static const struct {
        const char *key, *json;
        bool kept;
    } cases[] = {
        {"none", "null", true},
        {"yes", "true", true},
        {"int", "-9007199254740991", true},
        {"edge", "9007199254740992", false}, /* of integer or float: nobody knows */
        {"big", "{\"$type\":\"int\",\"value\":\"9223372036854775807\"}", true},
        {"huge", "{\"$type\":\"int\",\"value\":\"1208925819614629174706176\"}", true},
        {"low", "{\"$type\":\"int\",\"value\":\"-9223372036854775809\"}", true},
        {"m",
         "{\"$type\":\"int\",\"value\":\"-340282366920938463463374607431768211456\"}",
         true},
        {"float", "0.1", true},
        {"zero", "-0.0", true},
        {"one", "1.0", true},
        {"inf", "{\"$type\":\"float\",\"value\":\"-inf\"}", true},
        {"nan", "{\"$type\":\"float\",\"value\":\"nan\"}", true},
        {"text", "\"h\303\251 \\\"x\\\" \\n\"", true},
        {"bytes", "{\"$type\":\"bytes\",\"value\":\"AAH/gH9hYg==\"}", true},
        {"nobytes", "{\"$type\":\"bytes\",\"value\":\"\"}", true},
        {"list", "[1,[],[2.5,null],{}]", true},
        {"tuple",
         "{\"$type\":\"tuple\",\"items\":[0.9,{\"$type\":\"tuple\",\"items\":[]}]}",
         true},
        {"set", "{\"$type\":\"set\",\"items\":[1,2]}", true},
        {"dict", "{\"a\":{\"$$type\":1,\"$$$type\":2,\"$x\":3},\"b\":[{\"c\":false}]}",
         true},
        {"odd", "{\"$type\":\"dict\",\"items\":[[1,\"one\"],[null,[[2],3]]]}", true},
        {"key",
         "{\"$type\":\"dict\",\"items\":[[{\"$type\":\"tuple\",\"items\":[1,"
         "{\"$type\":\"set\",\"frozen\":true,\"items\":[2]}]},[[3]]]]}",
         true},
        {"list-key", "{\"$type\":\"dict\",\"items\":[[1,2],[[1],2]]}", false},
        {"dict-key", "{\"$type\":\"dict\",\"items\":[[{},2]]}", false},
        {"set-key",
         "[{\"$type\":\"dict\",\"items\":[[{\"$type\":\"set\",\"items\":[]},2]]}]",
         false},
        {"tuple-key",
         "{\"$type\":\"dict\",\"items\":[[{\"$type\":\"tuple\",\"items\":[1,"
         "{\"$type\":\"tuple\",\"items\":[[]]}]},2]]}",
         false},
        {"list-item", "{\"$type\":\"set\",\"items\":[1,[2]]}", false},
        {"dict-item", "{\"$type\":\"set\",\"frozen\":true,\"items\":[{}]}", false},
        {"opaque", "{\"$type\":\"opaque\",\"class\":\"x.Y\"}", false},
        {"within", "[1,{\"a\":{\"$type\":\"opaque\",\"class\":\"x.Y\"}}]", false},
        {"tensor", "{\"$type\":\"tensor\",\"key\":\"a\"}", false},
        {"array",
         "{\"$type\":\"ndarray\",\"dtype\":\"<f4\",\"shape\":[1],\"data\":\"AAAAAA==\"}",
         false},
        {"nul", "\"a\\u0000b\"", false},
        {"weight", "1", false}, /* a tensor has this key */
    };
    struct given *g = calloc(1, sizeof *g);
    CLEANUP(layout_freep) struct layout *l = NULL;
    const struct layout_options none = {0};
    struct err e = {0};

    (void)state;
    assert_non_null(g);
    add(g, "weight", DTYPE_F32, 1, (const uint64_t[]){3});
    g->in.tensor = g->tensor;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        take_object(g, cases[i].key, strlen(cases[i].key), cases[i].json,
                    strlen(cases[i].json));
    g->in.object = g->object;
    assert_ok(layout_new(&l, &e), &e);
    assert_ok(format_writer("dcp")->layout(&g->in, &none, l, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        if (is_lost(l, LOSS_OBJECT, cases[i].key, strlen(cases[i].key)) ==
            cases[i].kept)
            fail_msg("%s: %s", cases[i].key, cases[i].kept ? "lost" : "kept");
    check_way(g, &(struct way){.to = "dcp", .options = {.ranks = 2}});
    given_release(g);
}

#define OPAQUE "{\"$type\":\"opaque\",\"class\":"

/* What Megatron keeps in its state can be rebuilt where an archive is written for it. */
static void test_classes(void **state)
{
    static const struct {
        const char *key, *json;
        bool kept;
    } cases[] = {
        {"a/shard_0_2", "[1,{\"b\":null}]", true},
        {"a/shard_1_2", "{\"$type\":\"tensor\",\"key\":\"x/shard_0_1.pt:rng\"}", true},
        {"a", "1", false}, /* no cell of a sharded object */
        {"b/shard_0_1", "{\"$type\":\"tensor\",\"key\":\"elsewhere\"}", false},
        {"args/shard_0_1",
         OPAQUE "\"argparse.Namespace\",\"state\":{\"lr\":0.5,\"sub\":" OPAQUE
                "\"argparse.Namespace\",\"state\":{}},\"t\":" OPAQUE
                "\"torch.dtype\",\"value\":\"torch.bfloat16\"},\"n\":[1]}}",
         true},
        {"io/shard_0_1",
         OPAQUE "\"_io.BytesIO\",\"state\":{\"$type\":\"tuple\",\"items\":"
                "[{\"$type\":\"bytes\",\"value\":\"AAH/\"},0,null]}}",
         true},
        {"enum/shard_0_1",
         "[" OPAQUE
         "\"megatron.core.transformer.enums.AttnBackend\",\"value\":5}," OPAQUE
         "\"torch.device\",\"value\":\"cuda:0\"}]",
         true},
        {"path/shard_0_1", OPAQUE "\"pathlib.PosixPath\",\"args\":[\"/\",\"a b\"]}",
         true},
        {"array/shard_0_1",
         "[{\"$type\":\"ndarray\",\"dtype\":\"<f4\",\"shape\":[1,1],"
         "\"data\":\"AAAAAA==\"},{\"$type\":\"ndarray\",\"dtype\":\"|b1\",\"shape\":[2],"
         "\"data\":\"AAE=\"}]",
         true},
        {"keys/shard_0_1",
         "{\"$type\":\"dict\",\"items\":[[" OPAQUE
         "\"pathlib.PosixPath\",\"args\":[\"a\"]}," OPAQUE
         "\"argparse.Namespace\",\"state\":{}}]]}",
         true},
        {"unkey/shard_0_1",
         "{\"$type\":\"dict\",\"items\":[[" OPAQUE
         "\"argparse.Namespace\",\"state\":{}},1]]}",
         false},
        {"name/shard_0_1",
         "{\"$type\":\"set\",\"items\":[" OPAQUE
         "\"types.SimpleNamespace\",\"state\":{}}]}",
         false},
        {"numbers/shard_0_1",
         "{\"$type\":\"dict\",\"items\":[[{\"$type\":\"ndarray\",\"dtype\":\"<f4\","
         "\"shape\":[1],\"data\":\"AAAAAA==\"},1]]}",
         false},
        {"call/shard_0_1", OPAQUE "\"megatron.core.utils.run\",\"value\":\"x\"}",
         false},
        {"other/shard_0_1", OPAQUE "\"os.System\",\"value\":\"x\"}", false},
        {"line/shard_0_1", OPAQUE "\"megatron.a\\nos.X\",\"value\":1}", false},
        {"more/shard_0_1", OPAQUE "\"argparse.Namespace\",\"state\":{},\"args\":[1]}",
         false},
        {"object/shard_0_1",
         "{\"$type\":\"ndarray\",\"dtype\":\"|O8\",\"shape\":[],"
         "\"data\":\"\"}",
         false},
    };
    struct given *g = calloc(1, sizeof *g);
    CLEANUP(layout_freep) struct layout *l = NULL;
    const struct layout_options none = {0};
    struct err e = {0};

    (void)state;
    assert_non_null(g);
    add(g, "weight", DTYPE_F32, 1, (const uint64_t[]){3});
    add(g, "a/shard_1_2.pt:", DTYPE_U8, 1, (const uint64_t[]){3});
    g->tensor[1].key = "x/shard_0_1.pt:rng";
    g->tensor[1].key_len = strlen(g->tensor[1].key);
    g->tensor[1].role = ROLE_OTHER;
    g->in.tensor = g->tensor;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        take_object(g, cases[i].key, strlen(cases[i].key), cases[i].json,
                    strlen(cases[i].json));
    g->in.object = g->object;
    assert_ok(layout_new(&l, &e), &e);
    assert_ok(format_writer("torch_dist")->layout(&g->in, &none, l, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        if (is_lost(l, LOSS_OBJECT, cases[i].key, strlen(cases[i].key)) ==
            cases[i].kept)
            fail_msg("%s: %s", cases[i].key, cases[i].kept ? "lost" : "kept");
    assert_false(tensor_lost(l, &g->tensor[1]));
    given_release(g);
}

/* A trainer's state that the source has not: what is known of it, so that the step counts. */
static void test_first_trainer(void **state)
{
    struct given *g = hard_ones();
    CLEANUP(layout_freep) struct layout *l = NULL;
    CLEANUP(buf_release) struct buf all = {0};
    const struct layout_options none = {0};
    struct err e = {0};
    struct made m;
    struct opened o;

    (void)state;
    g->in.has_step = true;
    g->in.step = 1234;
    assert_ok(layout_new(&l, &e), &e);
    assert_ok(format_writer("olmo-step")->layout(&g->in, &none, l, &e), &e);
    made_begin(&m, "written");
    layout_run(l, &g->in, g->bytes, &m);
    made_open(&m, &o);
    assert_string_equal(o.info.format, "olmo-core-step");
    assert_string_equal(o.info.version, "3.0.0");
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 1234);
    all_objects(&o, &all);
    assert_has(all.data, "train/rank0.pt={\"global_step\":1234}");
    close_checkpoint(&o);
    made_end(&m);
    given_release(g);
}

int main(int argc, char **argv)
{
    struct CMUnitTest tests[64] = {
        cmocka_unit_test(test_hard_ones),
        cmocka_unit_test(test_losses),
        cmocka_unit_test(test_names_in_safetensors),
        cmocka_unit_test(test_role_of_key),
        cmocka_unit_test(test_options_refused),
        cmocka_unit_test(test_objects),
        cmocka_unit_test(test_classes),
        cmocka_unit_test(test_first_trainer),
        cmocka_unit_test(test_paths_refused),
    };
    size_t n = 8;
    int ret;

    assert(argc == 2);
    guard_install();
    for (size_t i = 0; i < ARRAY_SIZE(fixtures); i++) {
        char *path = NULL;

        if (asprintf(&path, "%s/%s", argv[1], fixtures[i]) < 0)
            return 1;
        tests[n++] = (struct CMUnitTest){
            .name = fixtures[i], .test_func = test_round_trip, .initial_state = path};
    }
    ret = _cmocka_run_group_tests("writers", tests, n, NULL, NULL);
    while (n-- > 8)
        free(tests[n].initial_state);
    return ret;
}
