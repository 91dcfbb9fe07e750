/* SPDX-License-Identifier: MIT */
/* tests/unit/test_plan.c - plans: what is complete, what is refused, windows and spans. */
#include "unit.h"

#include <errno.h>
#include <time.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/plan.h"
#include "index/spans.h"
#include "remote/source.h"

#include "fail_alloc.h"

/* For the allocations that check their product. */
void *__real_reallocarray(void *old, size_t count, size_t size);
void *__wrap_reallocarray(void *old, size_t count, size_t size);
void *__wrap_reallocarray(void *old, size_t count, size_t size)
{
    return fail_alloc_now() ? NULL : __real_reallocarray(old, count, size);
}

enum { DIMS = 3, BOXES = 8 };

struct box {
    uint64_t start[DIMS], size[DIMS];
};

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int build(struct arena *a, const struct shape *s, const struct box *box,
                 size_t n, const struct plan **out, struct err *e)
{
    struct plan_builder *b;
    int ret = plan_begin(a, s, 2, &b, e);

    for (size_t i = 0; ret == 0 && i < n; i++)
        ret = plan_add(b,
                       &(struct chunk){.file = (uint32_t)i,
                                       .start = box[i].start,
                                       .size = box[i].size},
                       e);
    return ret < 0 ? ret : plan_finish(b, out, e);
}

static const struct {
    const char *what;
    struct shape shape;
    struct box box[BOXES];
    size_t n;
    const char *why; /* NULL: complete */
} layouts[] = {
    {"scalar", {.nd = 0}, {{{0}, {0}}}, 1, NULL},
    {"scalar twice", {.nd = 0}, {{{0}, {0}}}, 2, "chunks at []+[] and []+[] overlap"},
    {"no scalar", {.nd = 0}, {{{0}, {0}}}, 0, "hole at []: no chunk holds it"},
    {"empty tensor", {.nd = 2, .dim = {3, 0}}, {{{0}, {0}}}, 0, NULL},
    {"empty tensor, empty chunk",
     {.nd = 2, .dim = {3, 0}},
     {{{3, 0}, {0, 0}}},
     1,
     NULL},
    {"whole", {.nd = 2, .dim = {3, 4}}, {{{0, 0}, {3, 4}}}, 1, NULL},
    {"rows", {.nd = 2, .dim = {4, 3}}, {{{2, 0}, {2, 3}}, {{0, 0}, {2, 3}}}, 2, NULL},
    {"pinwheel",
     {.nd = 2, .dim = {3, 3}},
     {{{0, 0}, {1, 2}},
      {{0, 2}, {2, 1}},
      {{2, 1}, {1, 2}},
      {{1, 0}, {2, 1}},
      {{1, 1}, {1, 1}}},
     5,
     NULL},
    {"pinwheel without its middle",
     {.nd = 2, .dim = {3, 3}},
     {{{0, 0}, {1, 2}}, {{0, 2}, {2, 1}}, {{2, 1}, {1, 2}}, {{1, 0}, {2, 1}}},
     4,
     "hole at [1, 1]: no chunk holds it"},
    {"pinwheel with a sail too long",
     {.nd = 2, .dim = {3, 3}},
     {{{0, 0}, {1, 3}},
      {{0, 2}, {2, 1}},
      {{2, 1}, {1, 2}},
      {{1, 0}, {2, 1}},
      {{1, 1}, {1, 1}}},
     5,
     "chunks at [0, 0]+[1, 3] and [0, 2]+[2, 1] overlap"},
    {"empty chunks",
     {.nd = 1, .dim = {4}},
     {{{4}, {0}}, {{0}, {4}}, {{2}, {0}}, {{2}, {0}}},
     4,
     NULL},
    {"no chunks", {.nd = 2, .dim = {4, 3}}, {{{0}, {0}}}, 0, "hole at [0, 0]"},
    {"last row missing",
     {.nd = 2, .dim = {4, 3}},
     {{{0, 0}, {2, 3}}, {{2, 0}, {1, 3}}},
     2,
     "hole at [3, 0]: no chunk holds it"},
    {"corner missing",
     {.nd = 2, .dim = {4, 3}},
     {{{0, 0}, {3, 3}}, {{3, 0}, {1, 2}}},
     2,
     "hole at [3, 2]: no chunk holds it"},
    {"the first of two holes",
     {.nd = 2, .dim = {4, 4}},
     {{{0, 0}, {4, 1}},
      {{0, 1}, {2, 1}},
      {{3, 1}, {1, 1}},
      {{0, 2}, {1, 2}},
      {{2, 2}, {2, 2}}},
     5,
     "hole at [1, 2]: no chunk holds it"},
    {"rows overlap",
     {.nd = 2, .dim = {3, 3}},
     {{{0, 0}, {2, 3}}, {{1, 0}, {2, 3}}},
     2,
     "chunks at [0, 0]+[2, 3] and [1, 0]+[2, 3] overlap"},
    {"volumes add up, and yet",
     {.nd = 1, .dim = {6}},
     {{{0}, {3}}, {{2}, {3}}},
     2,
     "chunks at [0]+[3] and [2]+[3] overlap"},
    {"replica",
     {.nd = 1, .dim = {6}},
     {{{0}, {3}}, {{3}, {3}}, {{3}, {3}}},
     3,
     "chunks at [3]+[3] and [3]+[3] overlap"},
    {"the first of two overlaps",
     {.nd = 1, .dim = {9}},
     {{{0}, {3}}, {{2}, {2}}, {{4}, {3}}, {{6}, {3}}},
     4,
     "chunks at [0]+[3] and [2]+[2] overlap"},
    {"too long",
     {.nd = 2, .dim = {3, 3}},
     {{{1, 0}, {3, 3}}},
     1,
     "chunk at [1, 0]+[3, 3] lies outside the tensor [3, 3]"},
    {"beyond",
     {.nd = 1, .dim = {3}},
     {{{4}, {0}}},
     1,
     "chunk at [4]+[0] lies outside the tensor [3]"},
    {"wraps",
     {.nd = 1, .dim = {3}},
     {{{UINT64_MAX}, {2}}},
     1,
     "chunk at [18446744073709551615]+[2] lies outside the tensor [3]"},
    {"in an empty tensor",
     {.nd = 2, .dim = {0, 3}},
     {{{0, 0}, {1, 3}}},
     1,
     "chunk at [0, 0]+[1, 3] lies outside the tensor [0, 3]"},
};

static void test_layouts(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(layouts); i++) {
        CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
        const struct plan *p;
        struct err e = {0};
        int ret = build(a, &layouts[i].shape, layouts[i].box, layouts[i].n, &p, &e);

        if (ret != (layouts[i].why ? -EBADMSG : 0))
            fail_msg("%s: %d, %s", layouts[i].what, ret, e.text);
        if (layouts[i].why)
            assert_has(e.text, layouts[i].why);
    }
}

static void test_tensors_too_large_are_refused(void **state)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct shape s = {.nd = 1, .dim = {(uint64_t)1 << 62}};
    struct plan_builder *b;
    struct err e = {0};

    (void)state;
    assert_int_equal(plan_begin(a, &s, 2, &b, &e), -EOVERFLOW);
    assert_ok(plan_begin(a, &s, 1, &b, &e), &e);
    s.dim[0] = (uint64_t)1 << 63;
    assert_int_equal(plan_begin(a, &s, 1, &b, &e), -EOVERFLOW);
}

static void test_chunks_come_in_order_and_without_empty_ones(void **state)
{
    static const struct box box[] = {{{2, 2}, {2, 2}},
                                     {{0, 2}, {2, 2}},
                                     {{1, 1}, {0, 1}},
                                     {{2, 0}, {2, 2}},
                                     {{0, 0}, {2, 2}}};
    static const uint32_t order[] = {4, 1, 3, 0};
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    const struct shape s = {.nd = 2, .dim = {4, 4}};
    const struct plan *p;
    struct err e = {0};

    (void)state;
    assert_ok(build(a, &s, box, ARRAY_SIZE(box), &p, &e), &e);
    assert_int_equal(plan_chunks(p), 4);
    assert_int_equal(plan_size(p), 32);
    assert_int_equal(plan_unit(p), 2);
    assert_true(shape_equal(plan_shape(p), &s));
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(plan_chunk(p, i, NULL)->file, order[i]);
}

/* plan_add copies, plan_take does not. */
static void test_who_owns_a_chunk(void **state)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    const struct shape s = {.nd = 1, .dim = {4}};
    uint64_t start[] = {0}, size[] = {2}, start2[] = {2};
    int64_t step[] = {-2};
    struct chunk c = {.start = start, .size = size, .first = 1, .step = step},
                 kept = {.start = start2, .size = size};
    struct plan_builder *b;
    const struct plan *p;
    struct err e = {0};

    (void)state;
    assert_ok(plan_begin(a, &s, 2, &b, &e), &e);
    assert_ok(plan_add(b, &c, &e), &e);
    assert_ok(plan_take(b, &kept, 1, &e), &e);
    c.first = 9;
    start[0] = 9;
    step[0] = 9;
    assert_ok(plan_finish(b, &p, &e), &e);
    assert_int_equal(plan_chunk(p, 0, NULL)->start[0], 0);
    assert_int_equal(plan_chunk(p, 0, NULL)->size[0], 2);
    assert_int_equal(plan_chunk(p, 0, NULL)->first, 1);
    assert_int_equal(plan_chunk(p, 0, NULL)->step[0], -2);
    assert_ptr_equal(plan_chunk(p, 1, NULL), &kept);
}

/* Boxes in one array, so that large layouts are made without arena_alloc each. */
struct layout {
    struct shape shape;
    uint64_t *number; /* nd starts and nd sizes a box */
    size_t n, cap;
};

static void layout_add(struct layout *l, const uint64_t *start, const uint64_t *size)
{
    uint32_t nd = l->shape.nd;

    if (l->n == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 64;
        l->number = realloc(l->number, l->cap * 2 * nd * sizeof *l->number);
        assert_non_null(l->number);
    }
    memcpy(l->number + l->n * 2 * nd, start, nd * sizeof *start);
    memcpy(l->number + l->n * 2 * nd + nd, size, nd * sizeof *size);
    l->n++;
}

/* Reverses the order of the boxes: nothing is sorted to begin with. */
static int layout_build(const struct layout *l, struct arena *a,
                        const struct plan **out, struct err *e)
{
    struct chunk *c = arena_array(a, l->n, sizeof *c);
    uint32_t nd = l->shape.nd;
    struct plan_builder *b;

    assert_non_null(c);
    for (size_t i = 0; i < l->n; i++) {
        c[i].start = l->number + (l->n - 1 - i) * 2 * nd;
        c[i].size = c[i].start + nd;
    }
    assert_ok(plan_begin(a, &l->shape, 1, &b, e), e);
    assert_ok(plan_take(b, c, l->n, e), e);
    return plan_finish(b, out, e);
}

/*
 * Processor seconds that no layout here may pass: each takes a fraction of one; a check
 * that is quadratic takes hours. Sanitizers and valgrind have room.
 */
static const double patience = 60;

static void check_layout(struct layout *l, const char *why)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(SIZE_MAX);
    const struct plan *p;
    struct err e = {0};
    double start = now();
    int ret = layout_build(l, a, &p, &e);

    if (ret != (why ? -EBADMSG : 0))
        fail_msg("%zu boxes: %d, %s", l->n, ret, e.text);
    if (why)
        assert_has(e.text, why);
    assert_true(now() - start < patience);
    free(l->number);
}

static void test_a_million_ranges(void **state)
{
    struct layout l = {.shape = {.nd = 1}};

    (void)state;
    for (uint64_t i = 0, at = 0; i < 1000000; i++) {
        uint64_t size = 1 + i * 7919 % 1000;

        layout_add(&l, &at, &size);
        at += size;
        l.shape.dim[0] = at;
    }
    check_layout(&l, NULL);
}

static void make_grid(struct layout *l, uint64_t rows, uint64_t cols)
{
    *l = (struct layout){.shape = {.nd = 2, .dim = {rows * 5, cols * 7}}};
    for (uint64_t i = 0; i < rows * cols; i++) {
        uint64_t start[] = {i / cols * 5, i % cols * 7}, size[] = {5, 7};

        layout_add(l, start, size);
    }
}

static void test_a_million_tiles(void **state)
{
    struct layout l;

    (void)state;
    make_grid(&l, 1000, 1000);
    check_layout(&l, NULL);
}

static void test_one_tile_of_a_million_missing(void **state)
{
    struct layout l;

    (void)state;
    make_grid(&l, 1000, 1000);
    memmove(l.number + 4 * 123456, l.number + 4 * (l.n - 1), 4 * sizeof *l.number);
    l.n--;
    check_layout(&l, "hole at [615, 3192]: no chunk holds it");
}

/*
 * Bricks of 1x2 and 2x1 in a herringbone, clipped at the border: no straight cut goes
 * through. Each cell knows its brick by (x - y) mod 4.
 */
static void make_herringbone(struct layout *l, uint64_t side)
{
    *l = (struct layout){.shape = {.nd = 2, .dim = {side, side}}};
    for (uint64_t y = 0; y < side; y++) {
        for (uint64_t x = 0; x < side; x++) {
            uint64_t phase = (x + 4 * side - y) % 4, start[] = {y, x}, size[] = {1, 1};

            if ((phase == 1 && x > 0) || (phase == 2 && y > 0))
                continue; /* the second half of a brick */
            if (phase == 0 && x + 1 < side)
                size[1] = 2;
            if (phase == 3 && y + 1 < side)
                size[0] = 2;
            layout_add(l, start, size);
        }
    }
}

static void test_herringbone(void **state)
{
    struct layout l;

    (void)state;
    make_herringbone(&l, 150);
    check_layout(&l, NULL);
    make_herringbone(&l, 150);
    l.number[4 * 5000 + 2]++; /* one brick grows downwards */
    check_layout(&l, "overlap");
}

/* Rings of four, each round the one before: every cut frees one box only. */
static void test_onion(void **state)
{
    enum { RINGS = 400 };
    struct layout l = {.shape = {.nd = 2, .dim = {2 * RINGS + 1, 2 * RINGS + 1}}};
    uint64_t one[] = {1, 1}, middle[] = {RINGS, RINGS};

    (void)state;
    for (uint64_t i = 0; i < RINGS; i++) {
        uint64_t side = 2 * (RINGS - i) + 1, end = i + side - 1;

        layout_add(&l, (uint64_t[]){i, i}, (uint64_t[]){1, side});
        layout_add(&l, (uint64_t[]){end, i}, (uint64_t[]){1, side});
        layout_add(&l, (uint64_t[]){i + 1, i}, (uint64_t[]){side - 2, 1});
        layout_add(&l, (uint64_t[]){i + 1, end}, (uint64_t[]){side - 2, 1});
    }
    layout_add(&l, middle, one);
    check_layout(&l, NULL);
}

static void test_boxes_that_start_together(void **state)
{
    struct layout l = {.shape = {.nd = 2, .dim = {1000, 1000}}};
    uint64_t start[] = {0, 0};

    (void)state;
    for (uint64_t i = 1; i <= 800; i++)
        layout_add(&l, start, (uint64_t[]){i, 801 - i});
    check_layout(&l, "overlap");
}

static void test_a_million_times_the_same(void **state)
{
    struct layout l = {.shape = {.nd = 2, .dim = {4, 4}}};
    uint64_t start[] = {1, 1}, size[] = {2, 2};

    (void)state;
    for (int i = 0; i < 1000000; i++)
        layout_add(&l, start, size);
    check_layout(&l, "chunks at [1, 1]+[2, 2] and [1, 1]+[2, 2] overlap");
}

/*
 * A pinwheel whose sails are cut into `n` slices along: in either dimension half of them
 * meet each other. A few are compared, many are refused within the budget.
 */
static void make_sails(struct layout *l, uint64_t n)
{
    uint64_t side = 2 * n + 1;

    *l = (struct layout){.shape = {.nd = 2, .dim = {side, side}}};
    for (uint64_t i = 0; i < n; i++) {
        layout_add(l, (uint64_t[]){i, 0}, (uint64_t[]){1, n + 1});
        layout_add(l, (uint64_t[]){0, n + 1 + i}, (uint64_t[]){n + 1, 1});
        layout_add(l, (uint64_t[]){n + 1 + i, n}, (uint64_t[]){1, n + 1});
        layout_add(l, (uint64_t[]){n, i}, (uint64_t[]){n + 1, 1});
    }
    layout_add(l, (uint64_t[]){n, n}, (uint64_t[]){1, 1});
}

static void test_what_is_too_irregular_is_refused(void **state)
{
    struct layout l;

    (void)state;
    make_sails(&l, 1000);
    check_layout(&l, NULL);
    make_sails(&l, 20000);
    check_layout(&l, "too irregularly");
}

struct found {
    size_t chunk[16], n, stop_at;
};

static int find(void *user, size_t i)
{
    struct found *f = user;

    assert_true(f->n < ARRAY_SIZE(f->chunk));
    f->chunk[f->n++] = i;
    return f->n == f->stop_at ? 7 : 0;
}

/* 2 x 3 tiles of 5 x 7 bytes: rows of 21 bytes. */
static void test_chunks_that_a_window_touches(void **state)
{
    static const struct {
        uint64_t off, len;
        size_t n, chunk[6];
    } windows[] = {
        {0, 0, 0, {0}},          {0, 1, 1, {0}},           {6, 1, 1, {0}},
        {6, 2, 2, {0, 1}},       {7, 7, 1, {1}},           {14, 8, 2, {0, 2}},
        {0, 21, 3, {0, 1, 2}},   {21 * 4 + 20, 1, 1, {2}}, {104, 2, 2, {2, 3}},
        {105 + 8, 3, 1, {4}},    {209, 1, 1, {5}},         {209, 50, 1, {5}},
        {210, 1, 0, {0}},        {UINT64_MAX, 1, 0, {0}},  {200, UINT64_MAX, 2, {4, 5}},
        {21 * 3 + 15, 3, 1, {2}}};
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    const struct plan *p;
    struct layout l;
    struct err e = {0};

    (void)state;
    make_grid(&l, 2, 3);
    assert_ok(layout_build(&l, a, &p, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(windows); i++) {
        struct found f = {.n = 0};

        assert_int_equal(plan_touched(p, windows[i].off, windows[i].len, find, &f), 0);
        if (f.n != windows[i].n)
            fail_msg("window %zu: %zu chunks, not %zu", i, f.n, windows[i].n);
        for (size_t k = 0; k < f.n; k++)
            assert_int_equal(f.chunk[k], windows[i].chunk[k]);
    }
    free(l.number);
}

struct marks {
    unsigned char *touched;
    size_t last;
};

static int mark(void *user, size_t i)
{
    struct marks *m = user;

    assert_true(m->last == SIZE_MAX || i > m->last);
    m->last = i;
    m->touched[i] = 1;
    return 0;
}

/* Each byte of the window names its tile of 5 x 7 bytes. */
static void check_window(const struct plan *p, uint64_t columns, uint64_t off,
                         uint64_t len)
{
    unsigned char *want = calloc(plan_chunks(p), 1);
    struct marks got = {calloc(plan_chunks(p), 1), SIZE_MAX};

    assert_true(want && got.touched);
    for (uint64_t at = off; at < off + len; at++)
        want[at / (35 * columns) * columns + at % (7 * columns) / 7] = 1;
    assert_int_equal(plan_touched(p, off, len, mark, &got), 0);
    assert_memory_equal(got.touched, want, plan_chunks(p));
    free(want);
    free(got.touched);
}

static void test_windows_of_grids_of_all_shapes(void **state)
{
    static const uint64_t grids[][2] = {{1, 4100}, {4100, 1}, {2, 300}, {300, 2},
                                        {61, 67},  {1, 17},   {16, 16}, {257, 16}};

    (void)state;
    for (size_t g = 0; g < ARRAY_SIZE(grids); g++) {
        uint64_t rows = grids[g][0], columns = grids[g][1], size = 35 * rows * columns;
        CLEANUP(arena_freep) struct arena *a = arena_new(1 << 24);
        const struct plan *p;
        struct layout l;
        struct err e = {0};

        make_grid(&l, rows, columns);
        assert_ok(layout_build(&l, a, &p, &e), &e);
        for (uint64_t i = 0; i < 500; i++) {
            uint64_t off = i * 104729 % size, len = 1 + i * i * 7919 % (21 * columns);

            check_window(p, columns, off, MIN(len, size - off));
        }
        free(l.number);
    }
}

static void test_touching_stops_when_told(void **state)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    struct found f = {.stop_at = 2};
    const struct plan *p;
    struct layout l;
    struct err e = {0};

    (void)state;
    make_grid(&l, 2, 3);
    assert_ok(layout_build(&l, a, &p, &e), &e);
    assert_int_equal(plan_touched(p, 0, 210, find, &f), 7);
    assert_int_equal(f.n, 2);
    free(l.number);
}

/* Of a million tiles a window finds its own without looking at them all. */
static void test_windows_of_a_million_tiles_are_cheap(void **state)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(SIZE_MAX);
    const struct plan *p;
    struct layout l;
    struct err e = {0};
    double start;

    (void)state;
    make_grid(&l, 1000, 1000);
    assert_ok(layout_build(&l, a, &p, &e), &e);
    start = now();
    for (uint64_t i = 0; i < 10000; i++) {
        uint64_t tile = i * 7919 % 1000000;
        struct found f = {.n = 0};

        plan_touched(p, tile / 1000 * 35000 + tile % 1000 * 7, 14, find, &f);
        assert_int_equal(f.n, 2);
        /* Behind the last tile of a row comes the first one's next line. */
        assert_int_equal(f.chunk[0], tile % 1000 == 999 ? tile - 999 : tile);
        assert_int_equal(f.chunk[1], tile % 1000 == 999 ? tile : tile + 1);
    }
    assert_true(now() - start < patience);
    free(l.number);
}

/* Each chunk is a column: its first and its last byte enclose nearly all the others'. */
static void test_windows_of_a_million_columns_are_cheap(void **state)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(SIZE_MAX);
    const struct plan *p;
    struct layout l;
    struct err e = {0};
    double start;

    (void)state;
    make_grid(&l, 1, 1000000);
    assert_ok(layout_build(&l, a, &p, &e), &e);
    start = now();
    for (uint64_t i = 0; i < 10000; i++) {
        uint64_t tile = i * 7919 % 999999;
        struct found f = {.n = 0};

        plan_touched(p, i % 5 * 7000000 + tile * 7, 14, find, &f);
        assert_int_equal(f.n, 2);
        assert_int_equal(f.chunk[0], tile);
        assert_int_equal(f.chunk[1], tile + 1);
    }
    assert_true(now() - start < patience);
    free(l.number);
}

/* A plan whose chunk 0 is `size` at `start` of a tensor; the rest is filled up. */
struct lowered {
    struct arena *arena;
    const struct plan *plan;
    struct plan_op op;
    struct source source;
    int ret;
    struct err e;
};

static void lower(struct lowered *l, const struct shape *s, unsigned unit,
                  const struct box *box, size_t n, const struct chunk_place *place)
{
    struct chunk_place at = *place;
    struct plan_builder *b;
    size_t i = 0;

    memset(&l->e, 0, sizeof l->e);
    l->arena = arena_new(1 << 20);
    at.src = &l->source;
    assert_ok(plan_begin(l->arena, s, unit, &b, &l->e), &l->e);
    for (size_t k = 0; k < n; k++)
        assert_ok(plan_add(b,
                           &(struct chunk){.file = (uint32_t)k,
                                           .start = box[k].start,
                                           .size = box[k].size},
                           &l->e),
                  &l->e);
    assert_ok(plan_finish(b, &l->plan, &l->e), &l->e);
    while (plan_chunk(l->plan, i, NULL)->file != 0)
        i++;
    l->ret = plan_lower(l->plan, plan_chunk(l->plan, i, NULL), &at, unit, l->arena,
                        &l->op, &l->e);
}

static const struct {
    const char *what;
    struct shape shape;
    unsigned unit;
    struct box box[3];
    size_t n;
    struct chunk_place place;
    struct plan_op op;
    struct plan_loop loop[DIMS];
} lowerings[] = {
    {.what = "scalar",
     .shape = {.nd = 0},
     .unit = 4,
     .n = 1,
     .place = {.base = 8},
     .op = {.src = 8, .dst = 0, .run = 4}},
    {.what = "whole",
     .shape = {.nd = 3, .dim = {2, 3, 4}},
     .unit = 2,
     .box = {{{0}, {2, 3, 4}}},
     .n = 1,
     .place = {.base = 100, .step = {24, 8, 2}},
     .op = {.src = 100, .dst = 0, .run = 48}},
    {.what = "rows",
     .shape = {.nd = 2, .dim = {6, 4}},
     .unit = 2,
     .box = {{{2, 0}, {4, 4}}, {{0, 0}, {2, 4}}},
     .n = 2,
     .place = {.step = {8, 2}},
     .op = {.src = 0, .dst = 16, .run = 32}},
    {.what = "columns",
     .shape = {.nd = 2, .dim = {6, 4}},
     .unit = 2,
     .box = {{{0, 1}, {6, 3}}, {{0, 0}, {6, 1}}},
     .n = 2,
     .place = {.base = 5, .step = {6, 2}},
     .op = {.src = 5, .dst = 2, .run = 6, .nloops = 1},
     .loop = {{6, 6, 8}}},
    {.what = "the outer two merge",
     .shape = {.nd = 3, .dim = {2, 3, 4}},
     .unit = 1,
     .box = {{{0, 0, 0}, {2, 3, 2}}, {{0, 0, 2}, {2, 3, 2}}},
     .n = 2,
     .place = {.step = {6, 2, 1}},
     .op = {.run = 2, .nloops = 1},
     .loop = {{6, 2, 4}}},
    {.what = "the outer two do not",
     .shape = {.nd = 3, .dim = {2, 3, 4}},
     .unit = 1,
     .box = {{{0, 0, 0}, {2, 2, 4}}, {{0, 2, 0}, {2, 1, 4}}},
     .n = 2,
     .place = {.step = {8, 4, 1}},
     .op = {.run = 8, .nloops = 1},
     .loop = {{2, 8, 12}}},
    {.what = "an extent of one is no loop",
     .shape = {.nd = 3, .dim = {2, 3, 4}},
     .unit = 1,
     .box = {{{0, 1, 0}, {2, 1, 4}}, {{0, 0, 0}, {2, 1, 4}}, {{0, 2, 0}, {2, 1, 4}}},
     .n = 3,
     .place = {.step = {4, -999, 1}},
     .op = {.dst = 4, .run = 4, .nloops = 1},
     .loop = {{2, 4, 12}}},
    {.what = "transposed",
     .shape = {.nd = 2, .dim = {3, 5}},
     .unit = 2,
     .box = {{{0}, {3, 5}}},
     .n = 1,
     .place = {.step = {2, 6}},
     .op = {.run = 2, .nloops = 2},
     .loop = {{3, 2, 10}, {5, 6, 2}}},
    {.what = "backwards",
     .shape = {.nd = 1, .dim = {5}},
     .unit = 2,
     .box = {{{0}, {5}}},
     .n = 1,
     .place = {.base = 8, .step = {-2}},
     .op = {.src = 8, .run = 2, .nloops = 1},
     .loop = {{5, -2, 2}}},
    {.what = "backwards in both, merged",
     .shape = {.nd = 2, .dim = {3, 5}},
     .unit = 2,
     .box = {{{0}, {3, 5}}},
     .n = 1,
     .place = {.base = 28, .step = {-10, -2}},
     .op = {.src = 28, .run = 2, .nloops = 1},
     .loop = {{15, -2, 2}}},
    {.what = "one row for all",
     .shape = {.nd = 2, .dim = {3, 5}},
     .unit = 2,
     .box = {{{0}, {3, 5}}},
     .n = 1,
     .place = {.step = {0, 2}},
     .op = {.run = 10, .nloops = 1},
     .loop = {{3, 0, 10}}},
    {.what = "one element for all",
     .shape = {.nd = 2, .dim = {3, 5}},
     .unit = 2,
     .box = {{{0}, {3, 5}}},
     .n = 1,
     .place = {.base = 4, .flags = CHUNK_NEG},
     .op = {.src = 4, .run = 2, .nloops = 1, .flags = CHUNK_NEG},
     .loop = {{15, 0, 2}}},
};

static void test_chunks_are_lowered_to_few_loops(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(lowerings); i++) {
        struct lowered l = {.source = {.size = 1000}};
        const struct plan_op *want = &lowerings[i].op;

        lower(&l, &lowerings[i].shape, lowerings[i].unit, lowerings[i].box,
              lowerings[i].n, &lowerings[i].place);
        if (l.ret != 0 || l.op.src != want->src || l.op.dst != want->dst ||
            l.op.run != want->run || l.op.nloops != want->nloops ||
            l.op.flags != want->flags || l.op.component != lowerings[i].unit)
            fail_msg(
                "%s: %d, src %" PRIu64 ", dst %" PRIu64 ", run %" PRIu64 ", %u loops",
                lowerings[i].what, l.ret, l.op.src, l.op.dst, l.op.run, l.op.nloops);
        for (uint32_t k = 0; k < want->nloops; k++) {
            assert_int_equal(l.op.loop[k].count, lowerings[i].loop[k].count);
            assert_int_equal(l.op.loop[k].src_step, lowerings[i].loop[k].src_step);
            assert_int_equal(l.op.loop[k].dst_step, lowerings[i].loop[k].dst_step);
        }
        arena_free(l.arena);
    }
}

/* A row of 10 and a column of 3 elements of 2 bytes. */
static const struct {
    uint64_t size;
    struct chunk_place place;
    bool fits;
} bounds[] = {
    {60, {.step = {20, 2}}, true},
    {59, {.step = {20, 2}}, false},
    {61, {.base = 1, .step = {20, 2}}, true},
    {60, {.base = 1, .step = {20, 2}}, false},
    {60, {.base = 18, .step = {20, -2}}, true},
    {60, {.base = 17, .step = {20, -2}}, false},
    {60, {.base = 58, .step = {-20, -2}}, true},
    {59, {.base = 58, .step = {-20, -2}}, false},
    {60, {.base = 57, .step = {-20, -2}}, false},
    {2, {.step = {0, 0}}, true},
    {1, {.step = {0, 0}}, false},
    {60, {.base = UINT64_MAX, .step = {0, 0}}, false},
    {UINT64_MAX, {.base = UINT64_MAX - 10, .step = {0, 0}}, false},
    {60, {.step = {INT64_MAX, 0}}, false},
    {60, {.step = {INT64_MIN, 0}}, false},
    {60, {.step = {INT64_MIN, INT64_MAX}}, false},
    {UINT64_MAX, {.step = {INT64_MAX, INT64_MAX}}, false},
    /* A way that wraps round at 2^64 and would end within. */
    {60, {.step = {INT64_MIN, 2}}, false},
};

static void test_chunks_outside_their_file_are_refused(void **state)
{
    const struct shape s = {.nd = 2, .dim = {3, 10}};
    const struct box box = {{0, 0}, {3, 10}};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bounds); i++) {
        struct lowered l = {.source = {.size = bounds[i].size}};

        lower(&l, &s, 2, &box, 1, &bounds[i].place);
        if (l.ret != (bounds[i].fits ? 0 : -EBADMSG))
            fail_msg("place %zu: %d", i, l.ret);
        if (!bounds[i].fits)
            assert_has(l.e.text, "lies outside the file");
        arena_free(l.arena);
    }
}

/* 4 columns of 2 bytes at column 1 of 5, 3 rows: 10 bytes a row, 8 of them ours. */
static const struct plan_loop three_rows[] = {{3, 100, 10}};
static const struct plan_op columns = {
    .src = 1000, .dst = 2, .run = 8, .nloops = 1, .loop = three_rows};

static const struct {
    uint64_t off, len;
    size_t n;
    struct plan_run run[4];
} cuts[] = {
    {0, 0, 0, {{0}}},
    {0, 2, 0, {{0}}},
    {10, 2, 0, {{0}}},
    {30, 100, 0, {{0}}},
    {0, 30, 1, {{1000, 2, 8, 3, 100, 10, 0, 0, 0}}},
    {0, UINT64_MAX, 1, {{1000, 2, 8, 3, 100, 10, 0, 0, 0}}},
    {2, 28, 1, {{1000, 0, 8, 3, 100, 10, 0, 0, 0}}},
    {2, 8, 1, {{1000, 0, 8, 1, 100, 10, 0, 0, 0}}},
    {3, 1, 1, {{1001, 0, 1, 1, 0, 0, 0, 0, 0}}},
    {3, 6, 1, {{1001, 0, 6, 1, 0, 0, 0, 0, 0}}},
    {11, 10, 1, {{1100, 1, 8, 1, 100, 10, 0, 0, 0}}},
    /* The end of row 0, all of row 1, the start of row 2. */
    {5,
     18,
     3,
     {{1100, 7, 8, 1, 100, 10, 0, 0, 0},
      {1003, 0, 5, 1, 0, 0, 0, 0, 0},
      {1200, 17, 1, 1, 0, 0, 0, 0, 0}}},
    {29, 1, 1, {{1207, 0, 1, 1, 0, 0, 0, 0, 0}}},
};

static void test_windows_of_a_loop(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cuts); i++) {
        CLEANUP(run_list_release) struct run_list l = {0};
        struct err e = {0};

        assert_ok(plan_op_cut(&columns, cuts[i].off, cuts[i].len, 0, &l, &e), &e);
        if (l.count != cuts[i].n)
            fail_msg("window %zu: %zu runs, not %zu", i, l.count, cuts[i].n);
        for (size_t k = 0; k < l.count; k++) {
            const struct plan_run *r = &l.run[k], *want = &cuts[i].run[k];

            if (r->src != want->src || r->dst != want->dst || r->len != want->len ||
                r->count != want->count ||
                (r->count > 1 &&
                 (r->src_step != want->src_step || r->dst_step != want->dst_step)))
                fail_msg("window %zu, run %zu: %" PRIu64 " to %" PRIu64 ", %" PRIu64
                         " x %" PRIu64,
                         i, k, r->src, r->dst, r->count, r->len);
        }
    }
}

static void test_runs_carry_tag_and_flags(void **state)
{
    CLEANUP(run_list_release) struct run_list l = {0};
    struct plan_op op = columns;
    struct err e = {0};

    (void)state;
    op.flags = CHUNK_SWAP;
    op.component = 2;
    assert_ok(plan_op_cut(&op, 4, 20, 42, &l, &e), &e);
    assert_int_equal(l.count, 3);
    for (size_t i = 0; i < l.count; i++) {
        assert_int_equal(l.run[i].tag, 42);
        assert_int_equal(l.run[i].flags, CHUNK_SWAP);
        assert_int_equal(l.run[i].component, 2);
    }
}

/* The longest loop becomes the count: 9 runs of 512 rather than 512 runs of 9. */
static void test_runs_are_few(void **state)
{
    static const struct plan_loop loops[] = {{512, 2, 18}, {9, 1024, 2}};
    const struct plan_op op = {.run = 2, .nloops = 2, .loop = loops};
    CLEANUP(run_list_release) struct run_list l = {0};
    uint64_t sum = 0;
    struct err e = {0};

    (void)state;
    assert_ok(plan_op_cut(&op, 0, 512 * 18, 0, &l, &e), &e);
    assert_int_equal(l.count, 9);
    for (size_t i = 0; i < l.count; i++) {
        assert_int_equal(l.run[i].count, 512);
        assert_int_equal(l.run[i].src, i * 1024);
        assert_int_equal(l.run[i].dst, i * 2);
        sum += l.run[i].len * l.run[i].count;
    }
    assert_int_equal(sum, 512 * 18);
}

/* 100 GB in rows of 64 bytes, five loops deep: a window costs what it touches. */
static void test_windows_of_a_large_tensor_are_cheap(void **state)
{
    static const struct plan_loop loops[] = {{10, 16000000000, 10240000000},
                                             {10, 1600000000, 1024000000},
                                             {1000, 1600000, 1024000},
                                             {100, 16000, 10240},
                                             {100, 160, 64}};
    /* The innermost rows touch at the destination but not at the source. */
    const struct plan_op op = {.run = 64, .nloops = 5, .loop = loops};
    struct run_list l = {0};
    double start = now();
    struct err e = {0};

    (void)state;
    for (uint64_t i = 0; i < 20000; i++) {
        uint64_t off = i * 7919000003 % 64000000000, sum = 0, len = 1 << 20;

        l.count = 0;
        assert_ok(plan_op_cut(&op, off, len, 0, &l, &e), &e);
        for (size_t k = 0; k < l.count; k++)
            sum += l.run[k].len * l.run[k].count;
        assert_true(l.count < 300);
        assert_true(sum > 0 && sum <= len);
    }
    assert_true(now() - start < patience);
    run_list_release(&l);
}

/* As many loops as fit into 2^63 bytes, and a window about the middle of all of them. */
static void test_windows_of_62_loops(void **state)
{
    struct plan_loop loops[SHAPE_MAX_DIMS];
    struct plan_op op = {.run = 1, .nloops = 62, .loop = loops};
    CLEANUP(run_list_release) struct run_list l = {0};
    uint64_t sum = 0;
    struct err e = {0};

    (void)state;
    for (unsigned k = 0; k < 62; k++)
        loops[k] =
            (struct plan_loop){2, (int64_t)3 << (61 - k), (uint64_t)1 << (61 - k)};
    assert_ok(plan_op_cut(&op, ((uint64_t)1 << 61) - 5, 11, 0, &l, &e), &e);
    for (size_t i = 0; i < l.count; i++) {
        for (uint64_t k = 0; k < l.run[i].count; k++, sum++) {
            uint64_t dst =
                l.run[i].dst + k * l.run[i].dst_step + ((uint64_t)1 << 61) - 5;

            assert_int_equal(l.run[i].src + k * (uint64_t)l.run[i].src_step, dst * 3);
        }
    }
    assert_int_equal(sum, 11);
}

static void test_windows_widen_to_units(void **state)
{
    static const struct {
        uint64_t off, len, wide_off, wide_len;
    } windows[] = {{0, 24, 0, 24}, {1, 0, 1, 0}, {0, 1, 0, 8},  {7, 1, 0, 8},
                   {7, 2, 0, 16},  {8, 8, 8, 8}, {23, 1, 16, 8}};
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    const struct shape s = {.nd = 1, .dim = {3}};
    const struct box box = {{0}, {3}};
    struct plan_builder *b;
    const struct plan *p;
    struct err e = {0};

    (void)state;
    assert_ok(plan_begin(a, &s, 8, &b, &e), &e);
    assert_ok(plan_add(b, &(struct chunk){.start = box.start, .size = box.size}, &e),
              &e);
    assert_ok(plan_finish(b, &p, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(windows); i++) {
        uint64_t off = windows[i].off, len = windows[i].len;

        plan_widen(p, &off, &len);
        assert_int_equal(off, windows[i].wide_off);
        assert_int_equal(len, windows[i].wide_len);
    }
}

static const struct {
    const char *what;
    struct plan_run run[3];
    size_t n;
    uint64_t gap, max;
    struct span span[4];
    size_t spans;
} covers[] = {
    {"nothing", {{0}}, 0, 0, 0, {{0}}, 0},
    {"no bytes",
     {{.src = 5, .len = 0, .count = 3}, {.len = 5, .count = 0}},
     2,
     0,
     0,
     {{0}},
     0},
    {"one", {{.src = 5, .len = 7, .count = 1}}, 1, 0, 0, {{0, 5, 7}}, 1},
    {"touching, out of order",
     {{.src = 12, .len = 3, .count = 1}, {.src = 5, .len = 7, .count = 1}},
     2,
     0,
     0,
     {{0, 5, 10}},
     1},
    {"a gap just small enough",
     {{.src = 0, .len = 4, .count = 1}, {.src = 8, .len = 4, .count = 1}},
     2,
     4,
     0,
     {{0, 0, 12}},
     1},
    {"a gap too wide",
     {{.src = 0, .len = 4, .count = 1}, {.src = 8, .len = 4, .count = 1}},
     2,
     3,
     0,
     {{0, 0, 4}, {0, 8, 4}},
     2},
    {"one within the other",
     {{.src = 0, .len = 40, .count = 1}, {.src = 8, .len = 4, .count = 1}},
     2,
     0,
     0,
     {{0, 0, 40}},
     1},
    {"sources are apart",
     {{.src = 4, .len = 4, .count = 1, .tag = 1}, {.src = 0, .len = 4, .count = 1}},
     2,
     100,
     0,
     {{0, 0, 4}, {1, 4, 4}},
     2},
    {"up to the limit",
     {{.src = 0, .len = 4, .count = 1},
      {.src = 4, .len = 4, .count = 1},
      {.src = 8, .len = 4, .count = 1}},
     3,
     0,
     8,
     {{0, 0, 8}, {0, 8, 4}},
     2},
    {"one is longer than the limit",
     {{.src = 0, .len = 20, .count = 1}, {.src = 20, .len = 4, .count = 1}},
     2,
     0,
     8,
     {{0, 0, 20}, {0, 20, 4}},
     2},
    {"overlap is not cut",
     {{.src = 0, .len = 8, .count = 1}, {.src = 7, .len = 4, .count = 1}},
     2,
     0,
     8,
     {{0, 0, 11}},
     1},
    {"strided, apart",
     {{.src = 10, .len = 2, .count = 3, .src_step = 10}},
     1,
     7,
     0,
     {{0, 10, 2}, {0, 20, 2}, {0, 30, 2}},
     3},
    {"strided, joined",
     {{.src = 10, .len = 2, .count = 3, .src_step = 10}},
     1,
     8,
     0,
     {{0, 10, 22}},
     1},
    {"strided, joined up to the limit",
     {{.src = 10, .len = 2, .count = 3, .src_step = 10}},
     1,
     8,
     12,
     {{0, 10, 12}, {0, 30, 2}},
     2},
    {"strided, joined within the limit",
     {{.src = 10, .len = 2, .count = 3, .src_step = 10},
      {.src = 33, .len = 2, .count = 1}},
     2,
     8,
     22,
     {{0, 10, 22}, {0, 33, 2}},
     2},
    {"two combs up to the limit",
     {{.src = 0, .len = 2, .count = 3, .src_step = 10},
      {.src = 5, .len = 2, .count = 3, .src_step = 10}},
     2,
     8,
     22,
     {{0, 0, 22}, {0, 25, 2}},
     2},
    {"two combs, one behind the other",
     {{.src = 30, .len = 2, .count = 3, .src_step = 10},
      {.src = 0, .len = 2, .count = 3, .src_step = 10}},
     2,
     8,
     32,
     {{0, 0, 32}, {0, 40, 12}},
     2},
    {"backwards",
     {{.src = 30, .len = 2, .count = 3, .src_step = -10}},
     1,
     0,
     0,
     {{0, 10, 2}, {0, 20, 2}, {0, 30, 2}},
     3},
    {"standing still", {{.src = 30, .len = 2, .count = 9}}, 1, 0, 0, {{0, 30, 2}}, 1},
    {"two combs",
     {{.src = 0, .len = 2, .count = 3, .src_step = 10},
      {.src = 5, .len = 2, .count = 3, .src_step = 10}},
     2,
     3,
     0,
     {{0, 0, 27}},
     1},
    {"two combs, one finer",
     {{.src = 0, .len = 2, .count = 2, .src_step = 20},
      {.src = 1, .len = 2, .count = 3, .src_step = 10}},
     2,
     0,
     0,
     {{0, 0, 3}, {0, 11, 2}, {0, 20, 3}},
     3},
    {"copies that overlap",
     {{.src = 0, .len = 8, .count = 4, .src_step = 2}},
     1,
     0,
     3,
     {{0, 0, 14}},
     1},
};

static void test_spans(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(covers); i++) {
        CLEANUP(span_list_release) struct span_list l = {0};
        struct err e = {0};

        assert_ok(spans_cover(covers[i].run, covers[i].n, covers[i].gap, covers[i].max,
                              &l, &e),
                  &e);
        if (l.count != covers[i].spans)
            fail_msg("%s: %zu spans", covers[i].what, l.count);
        for (size_t k = 0; k < l.count; k++) {
            const struct span *s = &covers[i].span[k];

            if (l.span[k].tag != s->tag || l.span[k].off != s->off ||
                l.span[k].len != s->len)
                fail_msg("%s: span %zu is %u: %" PRIu64 "+%" PRIu64, covers[i].what, k,
                         l.span[k].tag, l.span[k].off, l.span[k].len);
            assert_int_equal(spans_find(&l, s->tag, s->off), k);
            assert_int_equal(spans_find(&l, s->tag, s->off + s->len - 1), k);
        }
    }
}

/* A million copies of a byte, in one run and in a million, last first. */
static void test_spans_of_a_million_copies(void **state)
{
    enum { N = 1000000 };
    CLEANUP_FREE struct plan_run *run = calloc(N, sizeof *run);
    const struct plan_run comb = {
        .src = 4 * (N - 1), .len = 1, .count = N, .src_step = -4};
    double start = now();
    struct err e = {0};

    (void)state;
    for (uint64_t i = 0; i < N; i++)
        run[i] = (struct plan_run){.src = 4 * (N - 1 - i), .len = 1, .count = 1};
    for (int strided = 0; strided < 2; strided++) {
        for (uint64_t gap = 2; gap <= 3; gap++) {
            CLEANUP(span_list_release) struct span_list l = {0};

            assert_ok(
                spans_cover(strided ? &comb : run, strided ? 1 : N, gap, 0, &l, &e),
                &e);
            assert_int_equal(l.count, gap == 2 ? N : 1);
            assert_int_equal(l.span[l.count - 1].off + l.span[l.count - 1].len,
                             4 * (N - 1) + 1);
        }
    }
    assert_true(now() - start < patience);
}

/* Everything that allocates, in a plan that needs both kinds of check and a window. */
static int work_with_memory(struct err *e)
{
    static const struct box box[] = {{{0, 0}, {1, 2}},
                                     {{0, 2}, {2, 1}},
                                     {{2, 1}, {1, 2}},
                                     {{1, 0}, {2, 1}},
                                     {{1, 1}, {1, 1}}};
    const struct shape s = {.nd = 2, .dim = {3, 3}};
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    CLEANUP(run_list_release) struct run_list runs = {0};
    CLEANUP(span_list_release) struct span_list spans = {0};
    struct source source = {.size = 1000};
    const struct chunk_place place = {.src = &source, .step = {6, 2}};
    const struct plan *p;
    struct plan_op op;
    int ret;

    if (!a)
        return -ENOMEM;
    ret = build(a, &s, box, ARRAY_SIZE(box), &p, e);
    if (ret == 0)
        ret = plan_lower(p, plan_chunk(p, 0, NULL), &place, 2, a, &op, e);
    if (ret == 0)
        ret = plan_op_cut(&op, 0, 18, 0, &runs, e);
    return ret < 0 ? ret : spans_cover(runs.run, runs.count, 0, 0, &spans, e);
}

static void test_every_allocation_may_fail(void **state)
{
    struct err e = {0};
    int rc;

    (void)state;
    for (long n = 1; fail_alloc_next(&n);) {
        rc = work_with_memory(&e);
        fail_alloc_end(&n, rc);
    }
}

static void test_an_arena_that_is_full(void **state)
{
    const struct shape s = {.nd = 2, .dim = {3, 1}};
    const struct box box[] = {{{0, 0}, {1, 1}}, {{1, 0}, {1, 1}}, {{2, 0}, {1, 1}}};
    int last = -ENOMEM;

    (void)state;
    for (size_t ceiling = 0; ceiling < 4096; ceiling += 16) {
        CLEANUP(arena_freep) struct arena *a = arena_new(ceiling);
        const struct plan *p;
        struct err e = {0};
        int ret = build(a, &s, box, ARRAY_SIZE(box), &p, &e);

        assert_true(ret == last || (ret == 0 && last == -ENOMEM));
        last = ret;
    }
    assert_int_equal(last, 0);
}

/* ---- where the elements of a chunk lie ---- */

static void test_chunk_steps(void **state)
{
    static const struct {
        uint32_t nd;
        uint64_t size[2];
        bool strided; /* else row-major */
        int64_t step[2];
        uint64_t first, units;
        bool fits;
        int64_t want[2];
    } cases[] = {
        {2, {2, 3}, false, {0}, 0, 6, true, {3, 1}},
        {2, {2, 3}, false, {0}, 0, 5, false, {0}},
        {2, {2, 3}, false, {0}, 1, 7, true, {3, 1}},
        {2, {2, 3}, false, {0}, 1, 6, false, {0}},
        {2, {2, 3}, true, {1, 2}, 0, 6, true, {1, 2}},
        {2, {2, 3}, true, {0, 1}, 0, 3, true, {0, 1}},
        {2, {2, 3}, true, {-3, 1}, 3, 6, true, {-3, 1}},
        {2,
         {2, 3},
         true,
         {-3, 1},
         2,
         6,
         false,
         {0}}, /* only its beginning is outside */
        {2, {2, 3}, true, {-3, 1}, 4, 6, false, {0}}, /* only its end */
        {2, {1, 3}, true, {-3, -1}, 2, 3, true, {-3, -1}},
        {2, {1, 3}, true, {-3, -1}, 1, 3, false, {0}},
        {0, {0}, false, {0}, 0, 1, true, {0}},
        {0, {0}, false, {0}, 1, 1, false, {0}},
        {2, {0, UINT64_MAX}, false, {0}, 9, 0, true, {0, 0}},
        {1, {INT64_MAX}, false, {0}, 0, INT64_MAX, true, {1}},
        {1, {INT64_MAX}, false, {0}, UINT64_MAX, UINT64_MAX, false, {0}},
        {1, {UINT64_C(1) << 63}, false, {0}, 0, UINT64_MAX, false, {0}},
        {2,
         {UINT64_C(1) << 32, UINT64_C(1) << 32},
         false,
         {0},
         0,
         UINT64_MAX,
         false,
         {0}},
        {1, {2}, true, {INT64_MAX}, 0, UINT64_MAX, true, {INT64_MAX}},
        {1, {3}, true, {INT64_MAX}, 0, UINT64_MAX, false, {0}},
        {1, {2}, true, {INT64_MIN}, UINT64_C(1) << 63, UINT64_MAX, true, {INT64_MIN}},
        {1, {3}, true, {INT64_MIN}, UINT64_MAX, UINT64_MAX, false, {0}},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        static const uint64_t start[2];
        const struct chunk c = {.start = start,
                                .size = cases[i].size,
                                .step = cases[i].strided ? cases[i].step : NULL,
                                .first = cases[i].first};
        int64_t step[2] = {7, 7};
        struct err e = {0};
        int rc = chunk_steps(&c, cases[i].nd, cases[i].units, step, &e);

        if (rc != (cases[i].fits ? 0 : -EBADMSG))
            fail_msg("case %zu: %d, %s", i, rc, e.text);
        for (uint32_t k = 0; cases[i].fits && k < cases[i].nd; k++)
            assert_int_equal(step[k], cases[i].want[k]);
        if (!cases[i].fits)
            assert_has(e.text, "a box that reaches past what is stored");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_tensors_too_large_are_refused),
        cmocka_unit_test(test_chunks_come_in_order_and_without_empty_ones),
        cmocka_unit_test(test_who_owns_a_chunk),
        cmocka_unit_test(test_a_million_ranges),
        cmocka_unit_test(test_a_million_tiles),
        cmocka_unit_test(test_one_tile_of_a_million_missing),
        cmocka_unit_test(test_herringbone),
        cmocka_unit_test(test_onion),
        cmocka_unit_test(test_boxes_that_start_together),
        cmocka_unit_test(test_a_million_times_the_same),
        cmocka_unit_test(test_what_is_too_irregular_is_refused),
        cmocka_unit_test(test_chunks_that_a_window_touches),
        cmocka_unit_test(test_windows_of_grids_of_all_shapes),
        cmocka_unit_test(test_touching_stops_when_told),
        cmocka_unit_test(test_windows_of_a_million_tiles_are_cheap),
        cmocka_unit_test(test_windows_of_a_million_columns_are_cheap),
        cmocka_unit_test(test_chunks_are_lowered_to_few_loops),
        cmocka_unit_test(test_chunks_outside_their_file_are_refused),
        cmocka_unit_test(test_windows_of_a_loop),
        cmocka_unit_test(test_runs_carry_tag_and_flags),
        cmocka_unit_test(test_runs_are_few),
        cmocka_unit_test(test_windows_of_a_large_tensor_are_cheap),
        cmocka_unit_test(test_windows_of_62_loops),
        cmocka_unit_test(test_windows_widen_to_units),
        cmocka_unit_test(test_spans),
        cmocka_unit_test(test_chunk_steps),
        cmocka_unit_test(test_spans_of_a_million_copies),
        cmocka_unit_test(test_every_allocation_may_fail),
        cmocka_unit_test(test_an_arena_that_is_full),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
