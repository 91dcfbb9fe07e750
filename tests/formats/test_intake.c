/* SPDX-License-Identifier: MIT */
/* tests/formats/test_intake.c - safetensors files in any order of bytes, as every format stores them. */
#include "save/intake.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/guard.h"
#include "base/pool.h"
#include "index/formats/format.h"
#include "layout_run.h"
#include "read_tensor.h"
#include "remote/open_files.h"
#include "save/merge.h"
#include "save/staged.h"
#include "tests/unit/unit.h"

enum { MAX_TENSORS = 64, MAX_FILES = 6 };

/* ---- incoming files ---- */

static uint64_t seed = 1;

static uint64_t draw(uint64_t below)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (seed >> 33) % below;
}

struct given {
    const char *path;
    size_t tensors;
    char key[MAX_TENSORS][48];
    enum dtype dtype[MAX_TENSORS];
    struct shape shape[MAX_TENSORS];
    uint64_t begin[MAX_TENSORS], end[MAX_TENSORS];
    struct buf image;
    uint64_t data;
};

static void add(struct given *g, const char *key, enum dtype d, uint32_t nd,
                const uint64_t *dim)
{
    size_t n = g->tensors++;
    struct err e = {0};
    uint64_t bytes;

    snprintf(g->key[n], sizeof g->key[n], "%s", key);
    g->dtype[n] = d;
    g->shape[n].nd = nd;
    if (nd)
        memcpy(g->shape[n].dim, dim, nd * sizeof *dim);
    assert_ok(shape_bytes(&g->shape[n], d, &bytes, &e), &e);
    g->begin[n] = n ? g->end[n - 1] : 0;
    g->end[n] = g->begin[n] + bytes;
}

/* The header as it is asked for, and random data. */
static void make(struct given *g, const char *metadata, unsigned padding)
{
    CLEANUP(buf_release) struct buf h = {0};
    unsigned char len[8];
    size_t size;

    buf_addc(&h, '{');
    if (metadata)
        buf_addf(&h, "\"__metadata__\":%s", metadata);
    for (size_t i = 0; i < g->tensors; i++) {
        buf_addf(&h, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":", h.len > 1 ? "," : "",
                 g->key[i], dtype_name(g->dtype[i]));
        shape_format(&g->shape[i], &h);
        buf_addf(&h, ",\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", g->begin[i],
                 g->end[i]);
    }
    buf_addc(&h, '}');
    for (unsigned i = 0; i < padding; i++)
        buf_addc(&h, ' ');
    put_le64(len, h.len);
    buf_clear(&g->image);
    buf_add(&g->image, len, sizeof len);
    buf_add(&g->image, h.data, h.len);
    g->data = g->image.len;
    size = g->tensors ? g->end[g->tensors - 1] : 0;
    assert_int_equal(buf_failed(&g->image), 0);
    for (size_t i = 0; i < size; i++)
        buf_addc(&g->image, (char)draw(256));
}

/* All kinds of shapes: cut by rows, by columns, not at all; bytes that no unit divides. */
static struct given *model(const char *path, const char *prefix, const char *metadata)
{
    static const struct {
        const char *key;
        enum dtype dtype;
        uint32_t nd;
        uint64_t dim[4];
    } t[] = {
        {"nothing", DTYPE_F32, 2, {3, 0}},
        {"embed.weight", DTYPE_BF16, 2, {300, 129}},
        {"norm.bias", DTYPE_F32, 1, {129}},
        {"norm.step", DTYPE_I64, 0, {0}},
        {"layers.10.weight", DTYPE_F32, 2, {33, 65}},
        {"layers.2.weight", DTYPE_F32, 2, {17, 257}},
        {"layers.2.empty", DTYPE_F32, 2, {0, 7}},
        {"layers.2.experts", DTYPE_BF16, 3, {4, 31, 5}},
        {"mask", DTYPE_BOOL, 2, {3, 3}},
        {"big", DTYPE_F32, 2, {700, 600}},
        {"one", DTYPE_U8, 1, {1}},
    };
    struct given *g = calloc(1, sizeof *g);

    assert_non_null(g);
    g->path = path;
    for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
        char key[48];

        snprintf(key, sizeof key, "%s%s", prefix, t[i].key);
        add(g, key, t[i].dtype, t[i].nd, t[i].dim);
    }
    make(g, metadata, 5);
    return g;
}

static struct given *optimizer(const char *path)
{
    static const uint64_t dim[] = {300, 129};
    struct given *g = calloc(1, sizeof *g);

    assert_non_null(g);
    g->path = path;
    add(g, "optimizer.state.embed.weight.exp_avg", DTYPE_F32, 2, dim);
    add(g, "optimizer.state.embed.weight.step", DTYPE_F32, 0, dim);
    make(g, NULL, 0);
    return g;
}

static void given_free(struct given *g)
{
    buf_release(&g->image);
    free(g);
}

/* ---- an intake ---- */

struct world_of {
    struct made m;
    int dir;
    struct intake *k;
    struct intake_spec spec;
    struct pool *pool;
    struct reader_env env; /* of the target, once there is one */
    struct open_files *files;
};

static void begin(struct world_of *w, const char *format,
                  const struct layout_options *o)
{
    struct err e = {0};

    *w = (struct world_of){0};
    made_begin(&w->m, "staging");
    w->dir = open(w->m.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(w->dir >= 0);
    assert_ok(pool_new(2, &w->pool, &e), &e);
    w->spec = (struct intake_spec){.dir = w->dir, .pool = w->pool};
    if (format) {
        w->spec.writer = format_writer(format);
        assert_non_null(w->spec.writer);
    }
    if (o)
        w->spec.options = *o;
    assert_ok(intake_open(&w->spec, &w->k, &e), &e);
}

static void end(struct world_of *w)
{
    intake_free(w->k);
    open_files_free(w->files);
    pool_free(w->pool);
    close(w->dir);
    made_end(&w->m);
}

static struct intake_file *get(struct world_of *w, const char *path)
{
    struct intake_file *f = NULL;
    struct err e = {0};

    assert_ok(intake_get(w->k, path, &f, &e), &e);
    return f;
}

static void put(struct intake_file *f, const struct given *g, uint64_t at, uint64_t len)
{
    struct err e = {0};

    len = MIN(len, g->image.len - at);
    assert_ok(intake_write(f, g->image.data + at, len, at, &e), &e);
}

static void check_read(struct intake_file *f, const struct given *g, uint64_t at,
                       size_t len)
{
    CLEANUP_FREE char *got = malloc(len + 1);
    struct err e = {0};
    size_t want = at < g->image.len ? MIN(len, g->image.len - at) : 0;
    ssize_t n = intake_read(f, got, len, at, &e);

    assert_int_equal(n, (ssize_t)want);
    if (want)
        assert_memory_equal(got, g->image.data + at, want);
}

/* ---- schedules: how the bytes of one file arrive ---- */

struct block {
    uint64_t at, len;
};

static struct block *cut(const struct given *g, size_t *count)
{
    struct block *b = calloc(g->image.len + 1, sizeof *b);
    uint64_t at = 0;
    size_t n = 0;

    assert_non_null(b);
    while (at < g->image.len) {
        b[n] = (struct block){at, 1 + draw(draw(4) ? 5000 : 90000)};
        b[n].len = MIN(b[n].len, g->image.len - at);
        at += b[n++].len;
    }
    *count = n;
    return b;
}

static void in_order(struct intake_file *f, const struct given *g)
{
    for (uint64_t at = 0; at < g->image.len; at += 65536)
        put(f, g, at, 65536);
}

static void at_once(struct intake_file *f, const struct given *g)
{
    put(f, g, 0, g->image.len);
}

static void backwards(struct intake_file *f, const struct given *g)
{
    for (uint64_t at = g->image.len / 7777 * 7777 + 7777; at > 0; at -= 7777)
        if (at - 7777 < g->image.len)
            put(f, g, at - 7777, 7777);
}

static void shuffled(struct intake_file *f, const struct given *g)
{
    size_t n;
    CLEANUP_FREE struct block *b = cut(g, &n);

    while (n > 0) {
        size_t i = draw(n);

        put(f, g, b[i].at, b[i].len);
        b[i] = b[--n];
    }
}

/* Wrong bytes first, here and there, and blocks that overlap. */
static void twice(struct intake_file *f, const struct given *g)
{
    CLEANUP_FREE char *junk = calloc(1, 100000);
    struct err e = {0};

    put(f, g, 0, g->data);
    memset(junk, 0x5a, 100000);
    for (int i = 0; i < 40; i++) {
        uint64_t at = g->data + draw(g->image.len - g->data), len = 1 + draw(60000);

        len = MIN(len, g->image.len - at);
        assert_ok(intake_write(f, junk, len, at, &e), &e);
    }
    for (uint64_t at = 0; at < g->image.len; at += 10000)
        put(f, g, at, 13333);
    check_read(f, g, 0, g->image.len);
}

struct writer {
    struct intake_file *f;
    const struct given *g;
    unsigned n;
};

static void *write_stripes(void *user)
{
    const struct writer *w = user;
    struct err e = {0};

    for (uint64_t at = w->n * 3000u; at < w->g->image.len; at += 4 * 3000)
        if (intake_write(w->f, w->g->image.data + at,
                         MIN((uint64_t)3000, w->g->image.len - at), at, &e) < 0)
            return user;
    return NULL;
}

/* Four writers, each with every fourth block. */
static void together(struct intake_file *f, const struct given *g)
{
    struct writer w[4];
    pthread_t t[4];

    for (unsigned i = 0; i < 4; i++) {
        w[i] = (struct writer){f, g, i};
        assert_int_equal(pthread_create(&t[i], NULL, write_stripes, &w[i]), 0);
    }
    for (unsigned i = 0; i < 4; i++) {
        void *failed;

        pthread_join(t[i], &failed);
        assert_null(failed);
    }
}

/* The file's size and its zeros are told first. */
static void with_holes(struct intake_file *f, const struct given *g)
{
    struct err e = {0};

    assert_ok(intake_truncate(f, g->image.len, &e), &e);
    shuffled(f, g);
}

typedef void schedule_fn(struct intake_file *f, const struct given *g);
static schedule_fn *const schedules[] = {in_order, at_once,  backwards, shuffled,
                                         twice,    together, with_holes};

/* ---- what comes out ---- */

struct expected {
    struct merge_file file[MAX_FILES];
    struct merge_spec spec;
    struct merge *merge;
    struct layout *layout;
    struct buf
        bytes[MAX_FILES * MAX_TENSORS]; /* of each tensor of the input; borrowed */
};

/* In the order of files in the intake, which is that of their paths. */
static void merge_files(struct world_of *w, struct expected *x)
{
    struct err e = {0};

    *x = (struct expected){0};
    for (size_t i = 0; i < intake_count(w->k); i++)
        x->file[i] = (struct merge_file){.path = intake_path(intake_at(w->k, i)),
                                         .intake = intake_at(w->k, i)};
    x->spec = (struct merge_spec){.env = w->spec.env,
                                  .checkpoint = w->spec.checkpoint,
                                  .file = x->file,
                                  .files = intake_count(w->k)};
    memcpy(x->spec.drop_roles, w->spec.drop_roles, sizeof x->spec.drop_roles);
    assert_ok(merge_new(&x->spec, &x->merge, &e), &e);
}

static const struct given *given_of(const struct world_of *w, size_t file,
                                    struct given *const *g, size_t files)
{
    const char *path = intake_path(intake_at(w->k, file));

    for (size_t i = 0; i < files; i++)
        if (strcmp(g[i]->path, path) == 0)
            return g[i];
    fail_msg("%s was not given", path);
    abort();
}

static void lay_out(struct world_of *w, struct expected *x, struct given *const *g,
                    size_t files)
{
    const struct layout_input *in;
    struct err e = {0};

    assert_ok(merge_settle(x->merge, &e), &e);
    in = merge_input(x->merge);
    assert_ok(layout_new(&x->layout, &e), &e);
    assert_ok(w->spec.writer->layout(in, &w->spec.options, x->layout, &e), &e);
    for (size_t i = 0; i < in->tensors; i++) {
        uint64_t at, bytes;
        size_t file;

        assert_true(merge_origin(x->merge, i, &file, &at));
        assert_ok(shape_bytes(&in->tensor[i].shape, in->tensor[i].dtype, &bytes, &e),
                  &e);
        x->bytes[i].data = given_of(w, file, g, files)->image.data + at;
        x->bytes[i].len = bytes;
    }
}

static void expected_free(struct expected *x)
{
    layout_free(x->layout);
    merge_free(x->merge);
}

static bool has_boxes(const struct layout_file_info *f)
{
    for (size_t i = 0; i < f->pieces; i++)
        if (f->piece[i].kind == LAYOUT_BOX)
            return true;
    return false;
}

/* Every file has the bytes that the slow and simple hand gives it. */
static void check_files(struct world_of *w, const struct expected *x,
                        const struct intake_output *out, int kept)
{
    struct layout_file_info f;
    unsigned stage = 0;

    assert_int_equal(out->count, layout_files(x->layout));
    for (size_t i = 0; i < out->count; i++) {
        assert_true(out->file[i].stage >= stage);
        stage = out->file[i].stage;
    }
    for (size_t i = 0; i < layout_files(x->layout); i++) {
        CLEANUP(buf_release) struct buf want = {0}, got = {0};
        char path[400];
        size_t n = 0;

        layout_file_info(x->layout, i, &f);
        while (n < out->count && strcmp(out->file[n].path, f.path) != 0)
            n++;
        assert_true(n < out->count);
        if (kept >= 0 && out->file[n].kept != (kept && has_boxes(&f)))
            fail_msg("%s: kept %d", f.path, out->file[n].kept);
        layout_run_file(&f, merge_input(x->merge), x->bytes, &want);
        snprintf(path, sizeof path, "%s/data/%s", w->m.dir, f.path);
        read_file(path, &got);
        if (got.len != want.len ||
            (want.len && memcmp(got.data, want.data, want.len) != 0))
            fail_msg("%s: other bytes", f.path);
    }
}

/* Our own reader finds every tensor that was given. */
static void check_tensors(struct world_of *w, struct given *const *g, size_t files)
{
    struct opened o;
    char path[100];
    size_t count = 0;

    snprintf(path, sizeof path, "%s/data", w->m.dir);
    open_checkpoint(path, &o);
    for (size_t k = 0; k < files; k++) {
        for (size_t i = 0; i < g[k]->tensors; i++, count++) {
            CLEANUP(buf_release) struct buf bytes = {0};
            const struct tensor_info *t = NULL;
            struct err e = {0};

            for (size_t n = 0; n < o.count; n++)
                if (strcmp(o.t[n].key + o.t[n].wrapper, g[k]->key[i]) == 0 ||
                    strcmp(o.t[n].key, g[k]->key[i]) == 0)
                    t = &o.t[n];
            if (!t || t->fault) {
                fail_msg("%s: %s", g[k]->key[i], t ? t->fault : "is not there");
                return;
            }
            assert_int_equal(t->dtype, g[k]->dtype[i]);
            assert_true(shape_equal(&t->shape, &g[k]->shape[i]));
            assert_ok(read_tensor(&o.w, o.info.id, t, &bytes, &e), &e);
            assert_int_equal(bytes.len, g[k]->end[i] - g[k]->begin[i]);
            if (bytes.len)
                assert_memory_equal(bytes.data,
                                    g[k]->image.data + g[k]->data + g[k]->begin[i],
                                    bytes.len);
        }
    }
    assert_int_equal(o.count, count);
    close_checkpoint(&o);
}

/* `kept`: files with tensors must be those that the bytes arrived in; -1: some are. */
static void finish(struct world_of *w, struct given *const *g, size_t files, int kept)
{
    struct intake_output out;
    struct expected x;
    struct err e = {0};

    for (size_t i = 0; i < files; i++)
        if (!intake_complete(get(w, g[i]->path)))
            fail_msg("%s is not complete", g[i]->path);
    for (size_t i = 0; i < files; i++)
        assert_true(intake_is_placed(get(w, g[i]->path)));
    merge_files(w, &x);
    assert_ok(intake_finish(w->k, x.merge, &out, &e), &e);
    expected_free(&x);
    merge_files(w, &x);
    lay_out(w, &x, g, files);
    check_files(w, &x, &out, kept);
    expected_free(&x);
    check_tensors(w, g, files);
    intake_output_release(&out);
    for (size_t i = 0; i < files; i++) {
        struct intake_file *f = get(w, g[i]->path);

        check_read(f, g[i], 0, g[i]->image.len + 10);
        for (int n = 0; n < 20; n++)
            check_read(f, g[i], draw(g[i]->image.len), draw(200000));
    }
}

/* ---- every format, every schedule ---- */

static const struct way {
    const char *to;
    struct layout_options o;
    bool no_scalars; /* the format has no tensors without an axis */
} ways[] = {
    {"hf", {0}, false},
    {"hf", {.max_shard_size = 100000}, false},
    {"dcp", {0}, false},
    {"dcp", {.ranks = 8}, false},
    {"dcp", {.mesh = {2, 3}}, false},
    {"dcp", {.mesh = {1, 5}}, false},
    {"dcp-hf", {.ranks = 3}, false},
    {"dcp-hf", {.mesh = {2, 2}, .max_shard_size = 100000}, false},
    {"torch_dist", {.ranks = 8}, false},
    {"zarr", {.ranks = 4}, true},
    {"olmo", {.ranks = 3}, false},
    {"olmo-step", {.ranks = 3}, false},
    {"pt", {0}, false},
    {"npz", {0}, false},
};

/* As zarr takes it: every tensor has an axis. */
static void without_scalars(struct given *g)
{
    for (size_t i = 0; i < g->tensors; i++)
        if (g->shape[i].nd == 0)
            g->shape[i] = (struct shape){.nd = 1, .dim = {1}};
    make(g, NULL, 5);
}

static void test_one_file(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
        for (size_t k = 0; k < ARRAY_SIZE(schedules); k++) {
            struct given *g = model("model.safetensors", "", NULL);
            struct world_of w;

            if (ways[i].no_scalars)
                without_scalars(g);
            begin(&w, ways[i].to, &ways[i].o);
            schedules[k](get(&w, g->path), g);
            finish(&w, &g, 1, true);
            end(&w);
            given_free(g);
        }
}

/* The layout is that of a conversion of the same tensors. */
static void test_as_converted(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(ways); i++) {
        struct given *g = model("model.safetensors", "", NULL);
        struct layout_tensor *t;
        struct layout_input in;
        struct layout *plain;
        struct expected x;
        struct world_of w;
        struct err e = {0};
        uint64_t a[2], b[2];

        if (ways[i].no_scalars)
            without_scalars(g);
        begin(&w, ways[i].to, &ways[i].o);
        in_order(get(&w, g->path), g);
        merge_files(&w, &x);
        lay_out(&w, &x, &g, 1);
        in = *merge_input(x.merge);
        t = calloc(in.tensors, sizeof *t);
        assert_non_null(t);
        memcpy(t, in.tensor, in.tensors * sizeof *t);
        for (size_t n = 0; n < in.tensors; n++)
            t[n].batch = NULL;
        in.tensor = t;
        assert_ok(layout_new(&plain, &e), &e);
        assert_ok(w.spec.writer->layout(&in, &w.spec.options, plain, &e), &e);
        assert_ok(layout_digest(x.layout, a, &e), &e);
        assert_ok(layout_digest(plain, b, &e), &e);
        assert_memory_equal(a, b, sizeof a);
        layout_free(plain);
        free(t);
        expected_free(&x);
        end(&w);
        given_free(g);
    }
}

/* ---- sets ---- */

/* Files of a set, in any order, at the same time; `kept`: no byte is written twice. */
static void test_sets(void **state)
{
    static const struct {
        const char *to;
        struct layout_options o;
        bool optimizer;
        int kept;
        bool no_scalars;
    } sets[] = {
        {"hf", {.max_shard_size = 100000}, false, 1, false},
        {"dcp", {.ranks = 4}, true, 1, false},
        {"dcp", {.mesh = {2, 2}}, false, 1, false},
        {"torch_dist", {.ranks = 3}, true, 1, false},
        {"dcp-hf", {.ranks = 2}, false, 1, false},
        {"olmo-step", {.ranks = 2}, false, 1, false},
        {"zarr", {.ranks = 3}, true, 1, true},
        {"olmo", {.ranks = 2}, false, 0, false},
        {"pt", {0}, true, -1, false},
        {"npz", {0}, true, 1, false},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(sets) * 3; i++) {
        struct given *g[4] = {model("model-00001-of-00003.safetensors", "b.", NULL),
                              model("model-00002-of-00003.safetensors", "c.", NULL),
                              model("model-00003-of-00003.safetensors", "a.", NULL),
                              optimizer("optimizer/optimizer.safetensors")};
        size_t n = sets[i / 3].optimizer ? 4 : 3;
        struct world_of w;

        begin(&w, sets[i / 3].to, &sets[i / 3].o);
        for (size_t k = 0; k < n; k++)
            if (sets[i / 3].no_scalars)
                without_scalars(g[k]);
        for (size_t k = 0; k < n; k++)
            schedules[draw(ARRAY_SIZE(schedules))](get(&w, g[(k + i) % n]->path),
                                                   g[(k + i) % n]);
        finish(&w, g, n, sets[i / 3].kept);
        end(&w);
        for (size_t k = 0; k < 4; k++)
            given_free(g[k]);
    }
}

/* ---- what stays as it arrived ---- */

static const char pt[] = "{\"format\":\"pt\"}";

static void check_same(const struct world_of *w, const char *name,
                       const struct given *g)
{
    CLEANUP(buf_release) struct buf got = {0};
    char path[400];

    snprintf(path, sizeof path, "%s/data/%s", w->m.dir, name);
    read_file(path, &got);
    assert_int_equal(got.len, g->image.len);
    assert_memory_equal(got.data, g->image.data, got.len);
}

/* One file, and a set, as transformers wrote them: byte for byte, with an index of ours. */
static void test_verbatim(void **state)
{
    struct given *one = model("model.safetensors", "", pt);
    struct given *g[] = {model("model-00001-of-00002.safetensors", "b.", pt),
                         model("model-00002-of-00002.safetensors", "a.", pt)};
    CLEANUP(buf_release) struct buf index = {0};
    struct world_of w;
    char path[400];

    (void)state;
    begin(&w, "hf", NULL);
    shuffled(get(&w, one->path), one);
    finish(&w, &one, 1, true);
    check_same(&w, one->path, one);
    end(&w);
    begin(&w, "hf", NULL);
    for (size_t i = 0; i < 2; i++)
        twice(get(&w, g[1 - i]->path), g[1 - i]);
    finish(&w, g, 2, true);
    for (size_t i = 0; i < 2; i++)
        check_same(&w, g[i]->path, g[i]);
    snprintf(path, sizeof path, "%s/data/model.safetensors.index.json", w.m.dir);
    read_file(path, &index);
    buf_addc(&index, '\0');
    assert_has(index.data, "\"a.big\": \"model-00002-of-00002.safetensors\"");
    assert_has(index.data, "\"b.one\": \"model-00001-of-00002.safetensors\"");
    end(&w);
    /* Larger than a shard may be: cut, not kept. */
    begin(&w, "hf", &(struct layout_options){.max_shard_size = 1000000});
    in_order(get(&w, one->path), one);
    finish(&w, &one, 1, true);
    end(&w);
    given_free(one);
    given_free(g[0]);
    given_free(g[1]);
}

/* ---- errors ---- */

static void refuse(const char *format, const char *path, const char *header,
                   uint64_t data, const char *why)
{
    CLEANUP(buf_release) struct buf image = {0};
    unsigned char len[8];
    struct err e = {0};
    struct world_of w;
    struct intake_file *f;

    begin(&w, format, NULL);
    f = get(&w, path);
    put_le64(len, strlen(header));
    buf_add(&image, len, sizeof len);
    buf_adds(&image, header);
    for (uint64_t i = 0; i < data; i++)
        buf_addc(&image, 'x');
    /* All but the last byte of the header is taken; the one that completes it is not. */
    assert_ok(intake_write(f, image.data, strlen(header) + 7, 0, &e), &e);
    assert_int_equal(intake_write(f, image.data + strlen(header) + 7, 1 + data,
                                  strlen(header) + 7, &e),
                     -EINVAL);
    assert_has(e.text, why);
    assert_false(intake_complete(f));
    assert_int_equal(intake_size(f), strlen(header) + 7);
    end(&w);
}

static void test_refused(void **state)
{
    static const char model_path[] = "model.safetensors";

    (void)state;
    refuse("hf", model_path, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],}", 0, "");
    refuse("hf", model_path, "{\"a\":1}", 0, "its entry is no object");
    refuse("hf", model_path,
           "{\"a\":{\"dtype\":\"F99\",\"shape\":[1],\"data_offsets\":[0,4]}}", 0,
           "unknown dtype");
    refuse("hf", model_path,
           "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 0,
           "need 8 bytes");
    refuse("hf", model_path,
           "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
           "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3,7]}}",
           0, "overlap");
    refuse("hf", model_path,
           "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
           "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[5,9]}}",
           0, "hole");
    refuse("hf", model_path,
           "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
           "\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
           0, "");
    refuse("hf", model_path,
           "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 5,
           "behind its end");
    refuse("hf", "optimizer/optimizer.safetensors",
           "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4,
           "hf cannot hold role optimizer");
    refuse("npz", model_path,
           "{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4,
           "npz cannot hold tensor a");
    refuse("zarr", model_path,
           "{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4,
           "zarr cannot hold tensor a");
}

static void check_missing(struct intake_file *f, uint64_t bytes, uint64_t total)
{
    CLEANUP(ranges_release) struct ranges gaps = {0};
    struct err e = {0};
    uint64_t said;

    assert_ok(intake_missing(f, &gaps, &said, &e), &e);
    assert_int_equal(said, total);
    assert_int_equal(ranges_bytes(&gaps), bytes);
}

/* No room for the tensors is said at the header, which can be written again. */
static void test_no_room(void **state)
{
    struct given *g = model("model.safetensors", "", NULL);
    struct rlimit was, little;
    struct intake_file *f;
    struct world_of w;
    struct err e = {0};

    (void)state;
    begin(&w, "dcp", &(struct layout_options){.ranks = 2});
    f = get(&w, g->path);
    put(f, g, 0, g->data - 1);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    little = was;
    little.rlim_cur = 100000;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &little), 0);
    assert_int_equal(intake_write(f, g->image.data + g->data - 1, 1, g->data - 1, &e),
                     -EFBIG);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    assert_has(e.text, "reserve");
    check_missing(f, 1, 0);
    put(f, g, g->data - 1, g->image.len);
    finish(&w, &g, 1, true);
    end(&w);
    given_free(g);
}

/* A role that is dropped is received, can be read back, and is left out. */
static void test_dropped(void **state)
{
    struct given *g = model("model.safetensors", "", NULL);
    struct given *o = optimizer("optimizer/optimizer.safetensors");
    struct intake_output out;
    struct expected x;
    struct world_of w;
    struct err e = {0};

    (void)state;
    begin(&w, "hf", NULL);
    intake_free(w.k);
    w.spec.drop_roles[ROLE_OPTIMIZER] = true;
    assert_ok(intake_open(&w.spec, &w.k, &e), &e);
    shuffled(get(&w, o->path), o);
    shuffled(get(&w, g->path), g);
    check_read(get(&w, o->path), o, 0, o->image.len);
    assert_true(intake_complete(get(&w, o->path)));
    merge_files(&w, &x);
    assert_ok(intake_finish(w.k, x.merge, &out, &e), &e);
    expected_free(&x);
    intake_output_release(&out);
    check_tensors(&w, &g, 1);
    end(&w);
    given_free(g);
    given_free(o);
}

/* Bytes behind the end; an intake of names that it does not take. */
static void test_bounds(void **state)
{
    struct given *g = model("model.safetensors", "", NULL);
    struct intake_file *f;
    struct world_of w;
    struct err e = {0};

    (void)state;
    begin(&w, "dcp", NULL);
    f = get(&w, g->path);
    put(f, g, 0, g->data + 100);
    assert_int_equal(intake_write(f, "x", 1, g->image.len, &e), -EINVAL);
    assert_has(e.text, "behind its end");
    assert_int_equal(intake_write(f, "x", 1, UINT64_MAX, &e), -EFBIG);
    assert_int_equal(intake_write(f, "xx", 2, INT64_MAX - 1, &e), -EFBIG);
    put(f, g, 0, g->image.len);
    finish(&w, &g, 1, true);
    assert_int_equal(intake_get(w.k, "other.safetensors", &f, &e), -EINVAL);
    assert_int_equal(intake_get(w.k, "sub/model.safetensors", &f, &e), -EINVAL);
    assert_int_equal(intake_get(w.k, "tensors/a.npy", &f, &e), -EINVAL);
    assert_null(intake_find(w.k, "model-00001-of-00002.safetensors"));
    end(&w);
    given_free(g);
}

/* ---- sizes and holes ---- */

/* What was never written reads as zeros, and is zeros once that is confirmed. */
static void test_holes(void **state)
{
    struct given *g = model("model.safetensors", "", NULL);
    struct intake_file *f;
    struct world_of w;
    struct err e = {0};
    uint64_t hole;

    (void)state;
    begin(&w, "dcp", &(struct layout_options){.mesh = {2, 3}});
    f = get(&w, g->path);
    check_missing(f, 8, 0);
    put(f, g, 0, 9);
    check_missing(f, g->data - 9, 0);
    put(f, g, 0, g->image.len);
    hole = g->data + 100001;
    check_missing(f, 0, g->image.len);
    /* Shorter, then longer: stale bytes are neither read nor confirmed. */
    assert_ok(intake_truncate(f, hole, &e), &e);
    assert_false(intake_complete(f));
    assert_ok(intake_truncate(f, g->image.len, &e), &e);
    check_missing(f, g->image.len - hole, g->image.len);
    memset(g->image.data + hole, 0, g->image.len - hole);
    check_read(f, g, 0, g->image.len);
    assert_false(intake_complete(f));
    put(f, g, hole + 5000, 1000);
    assert_ok(intake_confirm(f, &e), &e);
    assert_true(intake_complete(f));
    finish(&w, &g, 1, true);
    end(&w);
    given_free(g);
}

/* Cut within its header or to nothing, it is another file; no trace of the old one stays. */
static void test_again(void **state)
{
    struct given *g = model("model.safetensors", "", NULL),
                 *other = model("model.safetensors", "other.", pt);
    struct intake_file *f;
    struct world_of w;
    struct err e = {0};

    (void)state;
    for (int cut = 0; cut < 2; cut++) {
        begin(&w, "torch_dist", &(struct layout_options){.ranks = 2});
        f = get(&w, g->path);
        shuffled(f, g);
        assert_ok(intake_truncate(f, cut ? 20 : 0, &e), &e);
        assert_int_equal(intake_size(f), cut ? 20 : 0);
        check_missing(f, cut ? g->data - 20 : 8, 0);
        shuffled(f, other);
        finish(&w, &other, 1, true);
        end(&w);
    }
    /* The same without a truncation: the header is another one. */
    begin(&w, "dcp", &(struct layout_options){.ranks = 2});
    f = get(&w, g->path);
    put(f, g, 0, g->image.len / 2);
    make(g, pt, 0);
    put(f, g, 0, g->data + 1000);
    check_read(f, g, 0, g->data + 1000);
    assert_int_equal(intake_write(f, "99999999", 8, 0, &e), -EINVAL);
    put(f, g, 0, g->image.len);
    assert_ok(intake_truncate(f, g->image.len, &e), &e);
    finish(&w, &g, 1, true);
    end(&w);
    given_free(g);
    given_free(other);
}

/* ---- another process goes on ---- */

static void reopen(struct world_of *w, const char *path, const struct ranges *r,
                   uint64_t size)
{
    struct err e = {0};

    intake_free(w->k);
    w->k = NULL;
    assert_ok(intake_open(&w->spec, &w->k, &e), &e);
    assert_non_null(intake_find(w->k, path));
    assert_ok(intake_restore(intake_find(w->k, path), r, size, &e), &e);
}

static void test_taken_up(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(ways); i++) {
        struct given *g = model("model.safetensors", "", i % 2 ? pt : NULL);
        CLEANUP(ranges_release) struct ranges had = {0};
        struct err e = {0};
        struct world_of w;
        uint64_t size;
        size_t n;
        CLEANUP_FREE struct block *b = NULL;

        if (ways[i].no_scalars)
            without_scalars(g);
        begin(&w, ways[i].to, &ways[i].o);
        b = cut(g, &n);
        while (n > 0) {
            struct intake_file *f = get(&w, g->path);
            size_t k = draw(n);

            put(f, g, b[k].at, b[k].len);
            b[k] = b[--n];
            if (draw(5) == 0) {
                assert_ok(intake_sync(f, &e), &e);
                assert_ok(intake_received(f, &had, &e), &e);
                size = intake_size(f);
                reopen(&w, g->path, &had, size);
            }
        }
        finish(&w, &g, 1, true);
        /* And after it was finished, as after a crash before the step. */
        assert_ok(intake_received(get(&w, g->path), &had, &e), &e);
        reopen(&w, g->path, &had, g->image.len);
        finish(&w, &g, 1, true);
        end(&w);
        given_free(g);
    }
}

/* Bytes that the journal does not know of have not arrived, whatever is on the disk. */
static void test_taken_up_without(void **state)
{
    struct given *g = model("model.safetensors", "", NULL);
    CLEANUP(ranges_release) struct ranges had = {0};
    struct err e = {0};
    struct world_of w;
    uint64_t some = g->data + 300000;

    (void)state;
    begin(&w, "dcp", &(struct layout_options){.ranks = 3});
    put(get(&w, g->path), g, 0, g->image.len);
    assert_int_equal(ranges_add(&had, 0, some), 0);
    reopen(&w, g->path, &had, g->image.len);
    memset(g->image.data + some, 0, g->image.len - some);
    check_read(get(&w, g->path), g, 0, g->image.len);
    check_missing(get(&w, g->path), g->image.len - some, g->image.len);
    assert_ok(intake_confirm(get(&w, g->path), &e), &e);
    finish(&w, &g, 1, true);
    /* Laid out in another way, the places say nothing: only the header is left. */
    intake_free(w.k);
    w.spec.options.ranks = 5;
    assert_ok(intake_open(&w.spec, &w.k, &e), &e);
    assert_ok(intake_restore(intake_find(w.k, g->path), &had, some, &e), &e);
    check_missing(get(&w, g->path), g->image.len - g->data, g->image.len);
    put(get(&w, g->path), g, 0, g->image.len);
    finish(&w, &g, 1, true);
    assert_ok(intake_remove(get(&w, g->path), &e), &e);
    assert_int_equal(intake_count(w.k), 0);
    end(&w);
    given_free(g);
}

/* ---- over a checkpoint that is there ---- */

/* What was made becomes the target, with a scan of it; the intake begins again beside it. */
static void publish(struct world_of *w, struct opened *o)
{
    char from[100], to[100];
    struct err e = {0};

    snprintf(from, sizeof from, "%s/data", w->m.dir);
    snprintf(to, sizeof to, "%s/target", w->m.dir);
    if (o->w.store)
        close_checkpoint(o);
    open_files_free(w->files);
    w->files = NULL;
    while (intake_count(w->k))
        assert_ok(intake_remove(intake_at(w->k, 0), &e), &e);
    intake_free(w->k);
    assert_ok(staged_remove_tree(AT_FDCWD, to, 0, &e), &e);
    assert_int_equal(rename(from, to), 0);
    open_checkpoint(to, o);
    assert_ok(open_files_new(o->w.store, 8, &w->files, &e), &e);
    w->env = (struct reader_env){.catalog = o->w.catalog,
                                 .decoded = o->w.decoded,
                                 .files = w->files,
                                 .codec = format_codec};
    w->spec.env = &w->env;
    w->spec.checkpoint = o->info.id;
    assert_ok(intake_open(&w->spec, &w->k, &e), &e);
}

struct listing_of {
    char name[64][100];
    uint32_t names;
};

static int list_file(void *user, const struct catalog_file *f)
{
    struct listing_of *l = user;

    assert_true(f->number < 64);
    snprintf(l->name[f->number], sizeof l->name[0], "%s", f->path);
    l->names = MAX(l->names, f->number + 1);
    return 0;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* Files, and the boxes of each tensor with the file that has it. */
static void list_boxes(const char *dir, struct buf *out)
{
    struct listing_of l = {0};
    struct err e = {0};
    struct opened o;

    open_checkpoint(dir, &o);
    assert_ok(catalog_files(o.w.catalog, o.info.id, list_file, &l, &e), &e);
    for (size_t i = 0; i < o.count; i++) {
        CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
        const struct chunk *c;
        struct shape units;
        size_t n;

        assert_ok(shape_units(&o.t[i].shape, o.t[i].dtype, &units, &e), &e);
        assert_ok(catalog_chunks(o.w.catalog, o.info.id, &o.t[i], a, &c, &n, &e), &e);
        buf_addf(out, "%s %s", o.t[i].key, dtype_name(o.t[i].dtype));
        for (size_t k = 0; k < n; k++) {
            buf_addf(out, " %s", l.name[c[k].file]);
            for (uint32_t d = 0; d < units.nd; d++)
                buf_addf(out, ",%" PRIu64 "+%" PRIu64, c[k].start[d], c[k].size[d]);
        }
        buf_addc(out, '\n');
    }
    qsort(l.name, l.names, sizeof l.name[0], by_text);
    for (uint32_t i = 0; i < l.names; i++)
        buf_addf(out, "%s\n", l.name[i]);
    buf_addc(out, '\0');
    close_checkpoint(&o);
}

/* Finishes what has arrived; all storage files with boxes of it were written once. */
static void finish_over(struct world_of *w, size_t *kept)
{
    struct intake_output out;
    struct expected x;
    struct err e = {0};

    merge_files(w, &x);
    assert_ok(intake_finish(w->k, x.merge, &out, &e), &e);
    *kept = 0;
    for (size_t i = 0; i < out.count; i++)
        *kept += out.file[i].kept;
    expected_free(&x);
    intake_output_release(&out);
}

/* Model and optimizer published together or one after the other: the same files. */
static void test_schedules(void **state)
{
    static const struct way over[] = {
        {"dcp", {.ranks = 4}, false},
        {"dcp", {.mesh = {2, 2}}, false},
        {"torch_dist", {.ranks = 2}, false},
        {"zarr", {.ranks = 2}, true},
        {"npz", {0}, false},
        {"pt", {0}, false},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(over); i++) {
        struct given *g[2] = {model("model.safetensors", "", NULL),
                              optimizer("optimizer/optimizer.safetensors")};
        CLEANUP(buf_release) struct buf together = {0};

        for (size_t k = 0; over[i].no_scalars && k < 2; k++)
            without_scalars(g[k]);
        for (int how = 0; how < 3; how++) {
            CLEANUP(buf_release) struct buf tree = {0};
            struct opened o = {0};
            struct world_of w;
            char dir[100];
            size_t kept;

            begin(&w, over[i].to, &over[i].o);
            for (size_t k = 0; k < 2; k++) {
                const struct given *next = g[how == 2 ? 1 - k : k];

                shuffled(get(&w, next->path), next);
                if (how == 0 && k == 0)
                    continue;
                finish_over(&w, &kept);
                assert_true(kept > 0);
                if (k == 0)
                    publish(&w, &o);
            }
            check_tensors(&w, g, 2);
            snprintf(dir, sizeof dir, "%s/data", w.m.dir);
            list_boxes(dir, how ? &tree : &together);
            if (how && strcmp(tree.data, together.data) != 0)
                fail_msg("%s, %d:\n%s\nnot\n%s", over[i].to, how, tree.data,
                         together.data);
            /* And once more the model, over both. */
            publish(&w, &o);
            twice(get(&w, g[0]->path), g[0]);
            finish_over(&w, &kept);
            assert_true(kept > 0);
            check_tensors(&w, g, 2);
            end(&w);
            close_checkpoint(&o);
        }
        given_free(g[0]);
        given_free(g[1]);
    }
}

/* A checkpoint of the given tensors with an object, as a framework might have left it. */
static void make_target(struct world_of *w, const struct given *g, struct opened *o)
{
    static const struct layout_object note = {
        .key = "note", .key_len = 4, .json = "{\"a\": 1}", .json_len = 8};
    struct layout_tensor t[MAX_TENSORS] = {0};
    struct buf bytes[MAX_TENSORS] = {0};
    const struct layout_input in = {.tensor = t,
                                    .tensors = g->tensors,
                                    .object = &note,
                                    .objects = 1,
                                    .format = ""};
    struct made data = {0};
    struct layout *l;
    struct err e = {0};

    for (size_t i = 0; i < g->tensors; i++) {
        t[i] = (struct layout_tensor){.key = g->key[i],
                                      .key_len = strlen(g->key[i]),
                                      .dtype = g->dtype[i],
                                      .shape = g->shape[i]};
        bytes[i].data = g->image.data + g->data + g->begin[i];
        bytes[i].len = g->end[i] - g->begin[i];
    }
    assert_ok(layout_new(&l, &e), &e);
    assert_ok(format_writer("dcp")->layout(&in, &(struct layout_options){0}, l, &e),
              &e);
    assert_true((size_t)snprintf(data.dir, sizeof data.dir, "%s/data", w->m.dir) <
                sizeof data.dir);
    assert_int_equal(mkdir(data.dir, 0777), 0);
    layout_run(l, &in, bytes, &data);
    layout_free(l);
    publish(w, o);
}

/*
 * Where the writer would lose what the target has, the file is kept whole if the target can be
 * patched with it, and refused at its header if not.
 */
static void test_patchable(void **state)
{
    struct given *g = model("model.safetensors", "", NULL),
                 *more = model("model.safetensors", "", NULL);
    struct opened o = {0};
    struct intake_file *f;
    struct world_of w;
    struct err e = {0};

    (void)state;
    add(more, "one_more", DTYPE_U8, 1, (const uint64_t[]){3});
    make(more, NULL, 0);
    begin(&w, "pt", NULL);
    make_target(&w, g, &o);
    f = get(&w, g->path);
    shuffled(f, g);
    assert_true(intake_complete(f));
    assert_false(intake_is_placed(f));
    check_read(f, g, 0, g->image.len);
    assert_ok(intake_truncate(f, 0, &e), &e);
    assert_int_equal(intake_write(f, more->image.data, more->image.len, 0, &e),
                     -EINVAL);
    assert_has(e.text, "pt cannot hold object note");
    end(&w);
    close_checkpoint(&o);
    given_free(g);
    given_free(more);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_verbatim),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_dropped),
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_holes),
        cmocka_unit_test(test_again),
        cmocka_unit_test(test_taken_up),
        cmocka_unit_test(test_taken_up_without),
        cmocka_unit_test(test_schedules),
        cmocka_unit_test(test_patchable),
        cmocka_unit_test(test_one_file),
        cmocka_unit_test(test_as_converted),
        cmocka_unit_test(test_sets),
    };

    guard_install();
    return cmocka_run_group_tests_name("intake", tests, NULL, NULL);
}
