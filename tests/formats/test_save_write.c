/* SPDX-License-Identifier: MIT */
/* tests/formats/test_save_write.c - save/ against the slow and simple hand; errors, resumption. */
#include "layout_run.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "base/err.h"
#include "base/pool.h"
#include "index/formats/format.h"
#include "save/staging.h"
#include "save/write.h"
#include "tests/unit/unit.h"

enum { MANY = 9000, LARGE = 9 << 20 };

/* Tensors in memory, and a source that can fail. */
struct given {
    struct layout_tensor tensor[MANY];
    struct buf bytes[MANY];
    char key[MANY][32];
    struct layout_input in;
    atomic_size_t reads, fail_after; /* 0: never */
};

static int read_given(void *user, size_t tensor, uint64_t off, size_t len, void *dst,
                      struct err *e)
{
    struct given *g = user;
    size_t n = atomic_fetch_add(&g->reads, 1) + 1;

    if (g->fail_after && n > g->fail_after)
        return err_set(e, EIO, "the disk is gone");
    assert(off + len <= g->bytes[tensor].len);
    memcpy(dst, g->bytes[tensor].data + off, len);
    return 0;
}

static void add(struct given *g, enum dtype d, uint64_t rows, uint64_t columns)
{
    size_t n = g->in.tensors++;
    struct err e = {0};
    uint64_t bytes;

    snprintf(g->key[n], sizeof g->key[n], "layers.%05zu.weight", n);
    g->tensor[n] = (struct layout_tensor){.key = g->key[n],
                                          .key_len = strlen(g->key[n]),
                                          .dtype = d,
                                          .shape = {.nd = 2, .dim = {rows, columns}}};
    assert_ok(shape_bytes(&g->tensor[n].shape, d, &bytes, &e), &e);
    assert_non_null(buf_grow(&g->bytes[n], bytes));
    g->bytes[n].len = bytes;
    for (uint64_t i = 0; i < bytes; i++)
        g->bytes[n].data[i] = (char)(i * 2654435761u >> 13 ^ n);
}

static struct given *given_new(void)
{
    struct given *g = calloc(1, sizeof *g);

    assert_non_null(g);
    g->in.tensor = g->tensor;
    g->in.format = "";
    return g;
}

static void given_free(struct given *g)
{
    for (size_t i = 0; i < g->in.tensors; i++)
        buf_release(&g->bytes[i]);
    free(g);
}

/* ---- a run ---- */

struct run {
    struct layout *l;
    struct save_run r;
    struct staging_claim claim;
    char target[100];
};

static void lay_out(struct run *x, struct given *g, const struct made *m,
                    const char *to, const struct layout_options *o)
{
    struct err e = {0};

    *x = (struct run){0};
    assert_ok(layout_new(&x->l, &e), &e);
    assert_ok(format_writer(to)->layout(&g->in, o, x->l, &e), &e);
    snprintf(x->target, sizeof x->target, "%s/saved", m->dir);
    x->claim = (struct staging_claim){
        .target = x->target, .what = "a test", .part = 1, .parts = 1};
    x->r = (struct save_run){.layout = x->l,
                             .input = &g->in,
                             .source = {read_given, g},
                             .part = 1,
                             .parts = 1,
                             .first_stage = true,
                             .other_stages = true};
}

/* One process's life: opens the staging directory, writes, publishes when all is there. */
static int run_once(struct run *x, struct err *e)
{
    int ret = staging_open(&x->claim, &x->r.staging, e);

    if (ret == 0) {
        x->r.dir = staging_dir(x->r.staging);
        ret = save_write(&x->r, e);
    }
    if (ret == 0 && x->r.other_stages)
        ret = staging_publish(x->r.staging, e);
    staging_close(x->r.staging);
    x->r.staging = NULL;
    return ret;
}

static void check_published(const struct run *x, const struct given *g)
{
    struct layout_file_info f;
    char path[400];

    for (size_t i = 0; i < layout_files(x->l); i++) {
        CLEANUP(buf_release) struct buf want = {0}, got = {0};

        layout_file_info(x->l, i, &f);
        layout_run_file(&f, &g->in, g->bytes, &want);
        snprintf(path, sizeof path, "%s/%s", x->target, f.path);
        read_file(path, &got);
        if (got.len != want.len || memcmp(got.data, want.data, want.len) != 0)
            fail_msg("%s: other bytes", f.path);
    }
}

static const struct way {
    const char *to;
    struct layout_options o;
} ways[] = {
    {"hf", {.max_shard_size = 20 << 20}},
    {"dcp", {.ranks = 3}},
    {"dcp", {.mesh = {2, 3}}},
    {"dcp-hf", {.mesh = {1, 4}}},
    {"pt", {0}},
    {"npz", {0}},
};

/* Tensors of several windows, cut both ways, by one thread and by four. */
static void test_bytes(void **state)
{
    struct given *g = given_new();
    struct pool *pool = NULL;
    struct err e = {0};

    (void)state;
    add(g, DTYPE_F32, 1500, LARGE / 1500 / 4);
    add(g, DTYPE_BF16, 7, LARGE / 7 / 2);
    add(g, DTYPE_U8, LARGE, 1);
    add(g, DTYPE_C128, 3, 5);
    add(g, DTYPE_F64, 0, 5);
    assert_ok(pool_new(4, &pool, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(ways) * 2; i++) {
        struct run x;
        struct made m;

        made_begin(&m, "top");
        lay_out(&x, g, &m, ways[i / 2].to, &ways[i / 2].o);
        x.r.pool = i % 2 ? pool : NULL;
        assert_ok(run_once(&x, &e), &e);
        check_published(&x, g);
        layout_free(x.l);
        made_end(&m);
    }
    pool_free(pool);
    given_free(g);
}

/* An error leaves nothing published; the next run goes on where the journal ends. */
static void test_resumed(void **state)
{
    struct given *g = given_new();
    struct run x;
    struct made m;
    struct err e = {0};

    (void)state;
    for (size_t i = 0; i < MANY; i++)
        add(g, DTYPE_F32, 3, 2);
    made_begin(&m, "top");
    lay_out(&x, g, &m, "dcp", &(struct layout_options){.ranks = 4});
    g->fail_after = 6000;
    assert_int_equal(run_once(&x, &e), -EIO);
    assert_has(e.text, "the disk is gone");
    assert_int_not_equal(access(x.target, F_OK), 0);
    g->fail_after = 0;
    g->reads = 0;
    assert_ok(run_once(&x, &e), &e);
    assert_true(g->reads <
                MANY); /* at least one batch was durable and is not read again */
    assert_true(g->reads >= MANY - 6000);
    check_published(&x, g);
    layout_free(x.l);
    made_end(&m);
    given_free(g);
}

/* Each file of the first stage is one part's; together they are what one run writes. */
static void test_parts(void **state)
{
    enum { PARTS = 5 };
    struct given *g = given_new();
    struct err e = {0};

    (void)state;
    for (size_t i = 0; i < 60; i++)
        add(g, DTYPE_F32, 1 + i * i % 50, 3);
    for (size_t i = 0; i < ARRAY_SIZE(ways); i++) {
        uint64_t bytes = 0;
        struct run x;
        struct made m;

        made_begin(&m, "top");
        lay_out(&x, g, &m, ways[i].to, &ways[i].o);
        x.claim.parts = x.r.parts = PARTS;
        x.r.other_stages = false;
        for (unsigned part = PARTS; part > 0; part--) {
            x.claim.part = x.r.part = part;
            bytes += save_bytes(&x.r);
            assert_ok(run_once(&x, &e), &e);
        }
        x.claim.finish = x.r.other_stages = true;
        x.r.first_stage = false;
        bytes += save_bytes(&x.r);
        assert_ok(run_once(&x, &e), &e);
        check_published(&x, g);
        x.r.parts = 1;
        x.r.first_stage = true;
        assert_int_equal(bytes, save_bytes(&x.r));
        layout_free(x.l);
        made_end(&m);
    }
    given_free(g);
}

/* A file that the journal speaks of is gone: not published. */
static void test_lost_file(void **state)
{
    struct given *g = given_new();
    struct run x;
    struct made m;
    struct err e = {0};
    char path[300];

    (void)state;
    add(g, DTYPE_F32, 30, 3);
    made_begin(&m, "top");
    lay_out(&x, g, &m, "dcp", &(struct layout_options){.ranks = 4});
    x.r.other_stages = false;
    assert_ok(run_once(&x, &e), &e);
    snprintf(path, sizeof path, "%s/.unshard-staging-saved/data/__2_0.distcp", m.dir);
    assert_int_equal(remove(path), 0);
    x.r.other_stages = true;
    assert_int_equal(run_once(&x, &e), -ENOENT);
    assert_has(e.text, "__2_0.distcp");
    assert_int_not_equal(access(x.target, F_OK), 0);
    layout_free(x.l);
    made_end(&m);
    given_free(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_resumed),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_lost_file),
    };

    return cmocka_run_group_tests_name("save_write", tests, NULL, NULL);
}
