/* SPDX-License-Identifier: MIT */
/* tests/formats/test_save_parts.c - files in parts of any size against the slow and simple hand. */
#include "layout_run.h"

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/err.h"
#include "base/pool.h"
#include "index/formats/format.h"
#include "save/gather.h"
#include "save/parts.h"
#include "tests/unit/unit.h"

enum { TENSORS = 6, THREADS = 3 };

struct given {
    struct layout_tensor tensor[TENSORS];
    struct buf bytes[TENSORS];
    char key[TENSORS][32];
    struct layout_input in;
    atomic_uint_fast64_t read;
};

static int read_given(void *user, size_t tensor, uint64_t off, size_t len, void *dst,
                      struct err *e)
{
    struct given *g = user;

    (void)e;
    assert(off + len <= g->bytes[tensor].len);
    memcpy(dst, g->bytes[tensor].data + off, len);
    atomic_fetch_add(&g->read, len);
    return 0;
}

static void add(struct given *g, enum dtype d, uint64_t rows, uint64_t columns)
{
    size_t n = g->in.tensors++;
    struct err e = {0};
    uint64_t bytes;

    snprintf(g->key[n], sizeof g->key[n], "layers.%zu.weight", n);
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

/* Rows longer and shorter than what is read by itself; elements of all lengths; none. */
static void fill(struct given *g)
{
    *g = (struct given){.in = {.tensor = g->tensor, .format = ""}};
    add(g, DTYPE_F32, 6, 70000);
    add(g, DTYPE_BF16, 900, 331);
    add(g, DTYPE_U8, 100003, 1);
    add(g, DTYPE_C128, 33, 5);
    add(g, DTYPE_F64, 0, 5);
    add(g, DTYPE_F32, 1, 1);
}

static void empty(struct given *g)
{
    for (size_t i = 0; i < g->in.tensors; i++)
        buf_release(&g->bytes[i]);
}

static const struct way {
    const char *to;
    struct layout_options o;
} ways[] = {
    {"hf", {.max_shard_size = 1 << 20}},
    {"dcp", {.ranks = 3}},
    {"dcp", {.mesh = {2, 3}}},
    {"dcp-hf", {.mesh = {1, 4}}},
    {"pt", {0}},
    {"npz", {0}},
};

/* ---- one file ---- */

struct making {
    struct part_sums *sums;
    struct gather gather;
    struct parts parts;
    bool *skipped;
    char *to;
};

static int make_nth(void *user, size_t n, struct err *e)
{
    struct making *m = user;
    CLEANUP_FREE void *part = NULL;
    uint64_t len = part_len(&m->parts, (uint32_t)n);
    int ret;

    if (m->skipped[n])
        return 0;
    part = malloc(len + 1); /* of its own, so that a write outside is seen */
    assert(part);
    ret = part_make(m->sums, &m->gather, (uint32_t)n, part, e);
    memcpy(m->to + part_at(&m->parts, (uint32_t)n), part, len);
    return ret;
}

/* Every `skip`-th part (0: none) is there from an earlier run. */
static void check_file(struct given *g, const struct layout_file_info *f, uint64_t part,
                       struct pool *pool, uint32_t skip)
{
    CLEANUP(buf_release) struct buf want = {0};
    struct making m = {.gather = {&g->in, {read_given, g}}};
    struct part_turn *turn;
    struct err e = {0};

    layout_run_file(f, &g->in, g->bytes, &want);
    m.parts = (struct parts){.size = f->size,
                             .part = part,
                             .count = (uint32_t)((f->size + part - 1) / part)};
    m.to = calloc(1, f->size + 1);
    m.skipped = calloc(m.parts.count + 1, 1);
    assert_true(m.to && m.skipped);
    for (uint32_t n = 0; skip && n < m.parts.count; n += skip) {
        m.skipped[n] = true;
        memcpy(m.to + part_at(&m.parts, n), want.data + part_at(&m.parts, n),
               part_len(&m.parts, n));
    }
    assert_ok(part_turn_new(pool ? pool_threads(pool) + 1 : 1, &turn, &e), &e);
    assert_ok(part_sums_new(turn, f, &m.parts, m.skipped, &m.sums, &e), &e);
    assert_ok(pool_each(pool, m.parts.count, make_nth, &m, &e), &e);
    if (memcmp(m.to, want.data, f->size) != 0)
        fail_msg("%s in parts of %" PRIu64 ": other bytes", f->path, part);
    part_sums_free(m.sums);
    part_turn_free(turn);
    free(m.skipped);
    free(m.to);
}

static void check_way(struct given *g, const struct way *w, struct pool *pool)
{
    static const uint64_t sizes[] = {100000, 65536, 7919, 1013};
    CLEANUP(layout_freep) struct layout *l = NULL;
    struct layout_file_info f;
    struct err e = {0};

    assert_ok(layout_new(&l, &e), &e);
    assert_ok(format_writer(w->to)->layout(&g->in, &w->o, l, &e), &e);
    for (size_t i = 0; i < layout_files(l); i++)
        for (size_t k = 0; k < ARRAY_SIZE(sizes); k++) {
            layout_file_info(l, i, &f);
            check_file(g, &f, sizes[k], pool, 0);
            check_file(g, &f, sizes[k], pool, 3);
        }
}

/* By one thread, and by four that wait for each other's sums. */
static void test_ways(void **state)
{
    struct pool *pool = NULL;
    struct given g;
    struct err e = {0};

    (void)state;
    fill(&g);
    assert_ok(pool_new(THREADS, &pool, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(ways); i++) {
        check_way(&g, &ways[i], NULL);
        check_way(&g, &ways[i], pool);
    }
    pool_free(pool);
    empty(&g);
}

/* Every range, also one byte amid an element. */
static void test_ranges(void **state)
{
    CLEANUP(layout_freep) struct layout *l = NULL;
    CLEANUP(buf_release) struct buf want = {0};
    const struct layout_options o = {.mesh = {2, 3}};
    struct layout_file_info f;
    struct given g;
    struct err e = {0};
    char got[64];

    (void)state;
    fill(&g);
    assert_ok(layout_new(&l, &e), &e);
    assert_ok(format_writer("dcp-hf")->layout(&g.in, &o, l, &e), &e);
    layout_file_info(l, 0, &f);
    layout_run_file(&f, &g.in, g.bytes, &want);
    for (uint64_t len = 1; len < sizeof got; len += 6)
        for (uint64_t at = 0; at + len <= f.size; at += 997) {
            const struct gather from = {&g.in, {read_given, &g}};

            assert_ok(gather_range(&from, &f, at, len, got, &e), &e);
            assert_memory_equal(got, want.data + at, len);
        }
    empty(&g);
}

/*
 * Whole tensors are read once, also where checksums go across parts: there are more threads
 * than parts that wait.
 */
static void test_read_once(void **state)
{
    CLEANUP(layout_freep) struct layout *l = NULL;
    struct layout_file_info f;
    struct pool *pool = NULL;
    uint64_t bytes = 0;
    struct given g;
    struct err e = {0};

    (void)state;
    fill(&g);
    for (size_t i = 0; i < g.in.tensors; i++)
        bytes += g.bytes[i].len;
    assert_ok(layout_new(&l, &e), &e);
    assert_ok(format_writer("npz")->layout(&g.in, &(struct layout_options){0}, l, &e),
              &e);
    layout_file_info(l, 0, &f);
    assert_ok(pool_new(TENSORS + 1, &pool, &e), &e);
    g.read = 0;
    check_file(&g, &f, 250000, pool, 0);
    assert_int_equal(g.read, bytes);
    pool_free(pool);
    empty(&g);
}

/* ---- how many ---- */

static void test_sizes(void **state)
{
    static const struct {
        uint64_t size, part;
        uint32_t count;
    } cases[] = {
        {0, 8 << 20, 1},
        {1, 8 << 20, 1},
        {8 << 20, 8 << 20, 1},
        {(8 << 20) + 1, 8 << 20, 2},
        {(uint64_t)80000 << 20, 8 << 20, 10000},
        {((uint64_t)80000 << 20) + 1, 9 << 20, 8889},
        {(uint64_t)5 << 40, (uint64_t)525 << 20, 9987},
    };
    struct layout_file_info f = {.path = "model.safetensors"};
    struct parts p;
    struct err e = {0};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        f.size = cases[i].size;
        assert_ok(parts_of(&f, &p, &e), &e);
        assert_int_equal(p.part, cases[i].part);
        assert_int_equal(p.count, cases[i].count);
        assert_int_equal(part_at(&p, p.count - 1) + part_len(&p, p.count - 1), f.size);
    }
    f.size = ((uint64_t)5 << 40) + 1;
    assert_int_equal(parts_of(&f, &p, &e), -EFBIG);
    assert_has(e.text, "model.safetensors: 5497558138881 bytes");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ways),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_read_once),
        cmocka_unit_test(test_sizes),
    };

    return cmocka_run_group_tests_name("save_parts", tests, NULL, NULL);
}
