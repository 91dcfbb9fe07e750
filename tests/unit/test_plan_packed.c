/* SPDX-License-Identifier: MIT */
/* tests/unit/test_plan_packed.c - plans whose chunks stay packed are the plans of the same chunks. */
#include "unit.h"

#include <errno.h>
#include <stdlib.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "index/grid.h"
#include "index/plan.h"

enum { DIMS = 5, BOXES = 4000, ELEMENTS = 200000 };

static uint32_t seed = 1;

static uint32_t below(uint32_t n)
{
    seed = seed * 1664525 + 1013904223;
    return (uint32_t)((uint64_t)(seed >> 4) % n);
}

/* The boxes of a grid in row-major order, with all that a chunk may have. */
struct grid_of {
    struct shape shape;
    size_t n;
    struct chunk chunk[BOXES];
    uint64_t start[BOXES][DIMS], size[BOXES][DIMS], whole[BOXES][DIMS];
    int64_t step[BOXES][DIMS];
};

static void random_cuts(struct grid_of *g, uint32_t k, uint64_t *end, size_t *parts,
                        size_t most)
{
    *parts = 1 + below((uint32_t)most);
    g->shape.dim[k] = 0;
    for (size_t i = 0; i < *parts; i++) {
        g->shape.dim[k] += 1 + below(4);
        end[i] = g->shape.dim[k];
    }
}

static void random_chunk(struct grid_of *g, size_t i)
{
    struct chunk *c = &g->chunk[i];
    bool fill = below(5) == 0;

    *c = (struct chunk){.file = below(3) ? (uint32_t)i / 7 : below(1000000),
                        .encoding = fill ? CHUNK_FILL : (uint8_t)below(4),
                        .flags = (uint8_t)below(8),
                        .offset = below(2) ? i * 100 : (uint64_t)below(1 << 28) << 20,
                        .length = below(3) ? 100 : below(1 << 20),
                        .start = g->start[i],
                        .size = g->size[i]};
    if (below(4) == 0)
        c->first = below(1000);
    if (below(4) == 0) {
        for (uint32_t k = 0; k < g->shape.nd; k++)
            g->step[i][k] = (int64_t)below(2000) - 1000;
        c->step = g->step[i];
    }
    if (fill) {
        c->param = below(2) ? "00000000" : "0000803f";
        c->param_len = 8;
    }
    if (below(3) == 0) {
        c->whole = g->whole[i];
        c->whole_nd = below(DIMS + 1);
        for (uint32_t k = 0; k < c->whole_nd; k++)
            g->whole[i][k] = below(2);
    }
}

static void random_grid(struct grid_of *g)
{
    uint64_t end[DIMS][BOXES], elements;
    size_t parts[DIMS] = {0}, at[DIMS] = {0};

    do {
        elements = g->n = 1;
        g->shape = (struct shape){.nd = 1 + below(DIMS)};
        for (uint32_t k = 0; k < g->shape.nd; k++) {
            random_cuts(g, k, end[k], &parts[k], g->shape.nd == 1 ? 3000 : 60);
            g->n *= parts[k];
            elements *= g->shape.dim[k];
        }
    } while (g->n > BOXES || elements > ELEMENTS);
    for (size_t i = 0; i < g->n; i++) {
        for (uint32_t k = 0; k < g->shape.nd; k++) {
            g->start[i][k] = at[k] ? end[k][at[k] - 1] : 0;
            g->size[i][k] = end[k][at[k]] - g->start[i][k];
        }
        random_chunk(g, i);
        for (uint32_t k = g->shape.nd; k-- > 0;) {
            if (++at[k] < parts[k])
                break;
            at[k] = 0;
        }
    }
}

/* 1: a plan; 0: it is no grid. */
static int pack(struct arena *a, const struct grid_of *g, const struct plan **out,
                const struct chunk_list **list, struct err *e)
{
    CLEANUP(plan_packer_freep) struct plan_packer *k = NULL;
    CLEANUP(buf_release) struct buf b = {.max = 1 << 24};
    int ret = plan_packer_new(a, &g->shape, 2, &k, e);

    assert_ok(chunks_pack(g->chunk, g->n, g->shape.nd, &b, &(struct err){0}), e);
    if (ret == 0)
        ret =
            chunk_list_new(a, b.data, b.len, g->shape.nd, plan_packer_add, k, list, e);
    if (ret == 1)
        return 0;
    return ret == 0 ? plan_packer_finish(k, *list, out, e) : ret;
}

static int list(struct arena *a, const struct grid_of *g, const struct plan **out,
                struct err *e)
{
    struct plan_builder *b;

    assert_ok(plan_begin(a, &g->shape, 2, &b, e), e);
    assert_ok(plan_take(b, g->chunk, g->n, e), e);
    return plan_finish(b, out, e);
}

static void same_numbers(const void *a, const void *b, uint32_t n)
{
    assert_int_equal(a == NULL, b == NULL);
    if (a && n)
        assert_memory_equal(a, b, n * sizeof(uint64_t));
}

static void same_chunk(const struct chunk *a, const struct chunk *b, uint32_t nd)
{
    assert_int_equal(a->file, b->file);
    assert_int_equal(a->encoding, b->encoding);
    assert_int_equal(a->flags, b->flags);
    assert_int_equal(a->offset, b->offset);
    assert_int_equal(a->length, b->length);
    assert_int_equal(a->first, b->first);
    same_numbers(a->start, b->start, nd);
    same_numbers(a->size, b->size, nd);
    same_numbers(a->step, b->step, nd);
    assert_int_equal(a->whole_nd, b->whole_nd);
    same_numbers(a->whole, b->whole, a->whole_nd);
    assert_int_equal(a->param_len, b->param_len);
    assert_int_equal(a->param == NULL, b->param == NULL);
    if (a->param)
        assert_memory_equal(a->param, b->param, a->param_len);
}

static void check_chunks(const struct plan *p, const struct grid_of *g)
{
    struct chunk_room all = {0}, any = {0};

    assert_int_equal(plan_chunks(p), g->n);
    for (size_t i = 0; i < g->n; i++) {
        struct chunk_room one = {0};
        size_t other = below((uint32_t)g->n);

        same_chunk(plan_chunk(p, i, &all), &g->chunk[i], g->shape.nd);
        same_chunk(plan_chunk(p, i, &one), &g->chunk[i], g->shape.nd);
        same_chunk(plan_chunk(p, other, &any), &g->chunk[other], g->shape.nd);
    }
}

/* Which box holds each element, in row-major order. */
static void fill_owners(const struct grid_of *g, uint32_t *owner)
{
    for (size_t i = 0; i < g->n; i++) {
        uint64_t at[DIMS] = {0};
        uint32_t k;

        do {
            uint64_t n = 0;

            for (k = 0; k < g->shape.nd; k++)
                n = n * g->shape.dim[k] + g->start[i][k] + at[k];
            owner[n] = (uint32_t)i;
            for (k = g->shape.nd; k-- > 0;) {
                if (++at[k] < g->size[i][k])
                    break;
                at[k] = 0;
            }
        } while (k != UINT32_MAX);
    }
}

struct found {
    size_t n, chunk[BOXES];
};

static int find(void *user, size_t i)
{
    struct found *f = user;

    f->chunk[f->n++] = i;
    return 0;
}

static void check_windows(const struct plan *p, const struct grid_of *g)
{
    CLEANUP_FREE uint32_t *owner = calloc(ELEMENTS, sizeof *owner);
    CLEANUP_FREE struct found *f = malloc(sizeof *f);
    uint64_t bytes = plan_size(p);

    fill_owners(g, owner);
    for (int round = 0; round < 60; round++) {
        bool touched[BOXES] = {false};
        uint64_t off = below((uint32_t)bytes);
        uint64_t len = 1 + below(round % 3 ? 40 : (uint32_t)bytes);
        size_t want = 0;

        f->n = 0;
        assert_int_equal(plan_touched(p, off, len, find, f), 0);
        for (uint64_t at = off; at < MIN(off + len, bytes); at++)
            touched[owner[at / 2]] = true;
        for (size_t i = 0; i < g->n; i++)
            want += touched[i];
        assert_int_equal(f->n, want);
        for (size_t i = 0; i < f->n; i++) {
            assert_true(touched[f->chunk[i]]);
            assert_true(i == 0 || f->chunk[i] > f->chunk[i - 1]);
        }
    }
}

static void test_grids(void **state)
{
    CLEANUP_FREE struct grid_of *g = malloc(sizeof *g);

    (void)state;
    for (int round = 0; round < 150; round++) {
        CLEANUP(arena_freep) struct arena *a = arena_new(1 << 26);
        const struct chunk_list *l;
        const struct plan *p;
        struct err e = {0};

        random_grid(g);
        assert_int_equal(pack(a, g, &p, &l, &e), 1);
        assert_int_equal(plan_unit(p), 2);
        assert_true(shape_equal(plan_shape(p), &g->shape));
        check_chunks(p, g);
        check_windows(p, g);
    }
}

static void spoil(struct grid_of *g)
{
    size_t i = below((uint32_t)g->n), k = below(g->shape.nd);
    uint64_t by = 1 + below(2);

    switch (below(6)) {
    case 0:
        g->start[i][k] += by;
        break;
    case 1:
        g->size[i][k] += by;
        break;
    case 2:
        g->size[i][k] -= MIN(by, g->size[i][k]);
        break;
    case 3: /* twice */
        memcpy(g->start[i], g->start[below((uint32_t)g->n)], sizeof g->start[i]);
        break;
    case 4: /* one is missing */
        memmove(g->chunk + i, g->chunk + i + 1, (g->n - i - 1) * sizeof *g->chunk);
        g->n--;
        break;
    default: /* another order */
        if (i + 1 < g->n) {
            struct chunk swap = g->chunk[i];

            g->chunk[i] = g->chunk[i + 1];
            g->chunk[i + 1] = swap;
        }
    }
}

/* What is taken for a grid is covered exactly once; nothing else is said here. */
static void test_what_is_no_grid(void **state)
{
    CLEANUP_FREE struct grid_of *g = malloc(sizeof *g);
    unsigned refused = 0, rounds = 400;

    (void)state;
    for (unsigned round = 0; round < rounds; round++) {
        CLEANUP(arena_freep) struct arena *a = arena_new(1 << 26);
        const struct chunk_list *l;
        const struct plan *p, *other;
        struct err e = {0};
        bool inside = true;
        int ret;

        random_grid(g);
        spoil(g);
        if (g->n == 0)
            continue;
        ret = pack(a, g, &p, &l, &e);
        assert_true(ret == 0 || ret == 1);
        refused += ret == 0;
        for (size_t i = 0; i < g->n; i++)
            for (uint32_t k = 0; k < g->shape.nd; k++)
                inside &= g->chunk[i].start[k] + g->chunk[i].size[k] <= g->shape.dim[k];
        if (ret == 1) {
            assert_true(inside);
            assert_ok(list(a, g, &other, &e), &e);
            assert_int_equal(plan_chunks(other), g->n);
            check_windows(p, g);
        }
    }
    assert_true(refused > rounds / 2);
}

static void test_parameters_are_for_others(void **state)
{
    CLEANUP_FREE struct grid_of *g = malloc(sizeof *g);
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 26);
    const struct chunk_list *l;
    const struct plan *p;
    struct err e = {0};

    (void)state;
    random_grid(g);
    g->chunk[g->n - 1].encoding = CHUNK_PLAIN;
    g->chunk[g->n - 1].param = "key";
    g->chunk[g->n - 1].param_len = 3;
    assert_int_equal(pack(a, g, &p, &l, &e), 0);
}

static int ignore(void *user, const struct chunk *c, size_t i, size_t n, struct err *e)
{
    (void)user;
    (void)c;
    (void)i;
    (void)n;
    (void)e;
    return 0;
}

/* Any bytes: both readers say the same. */
static void compare(const char *data, size_t len, uint32_t nd)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 24);
    struct err e = {0}, e2 = {0};
    const struct chunk_list *l;
    const struct chunk *c;
    struct chunk_room room = {0};
    size_t n;
    int ret = chunks_unpack(a, data, len, nd, &c, &n, &e);

    assert_int_equal(chunk_list_new(a, data, len, nd, ignore, NULL, &l, &e2), ret);
    if (ret < 0)
        return;
    assert_int_equal(chunk_list_count(l), n);
    for (size_t i = n; i-- > 0;)
        same_chunk(chunk_list_get(l, i, &room), &c[i], nd);
}

static void test_damaged_lists(void **state)
{
    CLEANUP_FREE struct grid_of *g = malloc(sizeof *g);

    (void)state;
    for (int round = 0; round < 20; round++) {
        CLEANUP(buf_release) struct buf b = {.max = 1 << 24};
        struct err e = {0};

        do
            random_grid(g);
        while (g->n < 9);
        g->n = MIN(g->n, (size_t)40);
        assert_ok(chunks_pack(g->chunk, g->n, g->shape.nd, &b, &e), &e);
        for (size_t cut = 0; cut <= b.len; cut += 1 + cut / 50)
            compare(b.data, cut, g->shape.nd);
        for (size_t at = 0; at < b.len; at++) {
            char kept = b.data[at];

            b.data[at] = (char)(kept ^ 1 << below(8));
            compare(b.data, b.len, g->shape.nd);
            b.data[at] = (char)below(256);
            compare(b.data, b.len, g->shape.nd);
            b.data[at] = kept;
        }
    }
}

static void test_an_arena_that_is_full(void **state)
{
    CLEANUP_FREE struct grid_of *g = malloc(sizeof *g);
    int last = -ENOMEM;

    (void)state;
    do
        random_grid(g);
    while (g->n < 100 || g->n > 200);
    for (size_t ceiling = 0; last != 1; ceiling += 100) {
        CLEANUP(arena_freep) struct arena *a = arena_new(ceiling);
        const struct chunk_list *l;
        const struct plan *p;
        struct err e = {0};

        last = pack(a, g, &p, &l, &e);
        assert_true(last == 1 || last == -ENOMEM);
        assert_true(ceiling < 1 << 20);
    }
}

/* A million tiles: bytes a chunk, and windows that look at few of them. */
static void test_a_million_tiles(void **state)
{
    enum { ROWS = 1000, COLS = 1000, TILE = 4, EACH = 40 };
    const struct shape s = {.nd = 2, .dim = {ROWS * TILE, COLS * TILE}};
    CLEANUP_FREE struct chunk *c = calloc(ROWS * COLS, sizeof *c);
    CLEANUP_FREE uint64_t *start = calloc(2 * ROWS * COLS, sizeof *start);
    static const uint64_t size[] = {TILE, TILE};
    CLEANUP(arena_freep) struct arena *a = arena_new(SIZE_MAX);
    CLEANUP(plan_packer_freep) struct plan_packer *k = NULL;
    CLEANUP(buf_release) struct buf b = {.max = 1 << 28};
    CLEANUP_FREE struct found *f = malloc(sizeof *f);
    const struct chunk_list *l;
    const struct plan *p;
    struct err e = {0};

    (void)state;
    for (size_t i = 0; i < ROWS * COLS; i++) {
        start[2 * i] = i / COLS * TILE;
        start[2 * i + 1] = i % COLS * TILE;
        c[i] = (struct chunk){.file = (uint32_t)(i % 4),
                              .offset = i / 4 * 2000,
                              .length = 1900,
                              .start = start + 2 * i,
                              .size = size};
    }
    assert_ok(chunks_pack(c, ROWS * COLS, 2, &b, &e), &e);
    assert_ok(plan_packer_new(a, &s, 4, &k, &e), &e);
    assert_ok(chunk_list_new(a, b.data, b.len, 2, plan_packer_add, k, &l, &e), &e);
    assert_int_equal(plan_packer_finish(k, l, &p, &e), 1);
    assert_in_range(arena_used(a), 1, EACH * ROWS * COLS);
    for (uint64_t i = 0; i < 10000; i++) {
        uint64_t at = i * 7919 % (ROWS * COLS), row = at / COLS, col = at % COLS;

        f->n = 0;
        plan_touched(p, 4 * ((row * TILE + i % TILE) * COLS * TILE + col * TILE), 16,
                     find, f);
        assert_int_equal(f->n, 1);
        assert_int_equal(f->chunk[0], at);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grids),
        cmocka_unit_test(test_what_is_no_grid),
        cmocka_unit_test(test_parameters_are_for_others),
        cmocka_unit_test(test_damaged_lists),
        cmocka_unit_test(test_an_arena_that_is_full),
        cmocka_unit_test(test_a_million_tiles),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
