/* SPDX-License-Identifier: MIT */
/* tests/unit/test_map_boxes.c - rearranged boxes, element by element against plain arrays. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/map/boxes.h"
#include "index/map/shares.h"
#include "index/plan.h"

enum {
    ELEMENTS_MAX = 6000,
    BOXES_MOST = 24,
    ROUNDS = 1500,
    STEPS = 7,
    FILE_SHIFT = 32, /* a value is file << 32 | unit of the piece */
};

static uint64_t state_of_random;

/* splitmix64 */
static uint64_t random_bits(void)
{
    uint64_t z = state_of_random += 0x9e3779b97f4a7c15;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static uint64_t below(uint64_t n)
{
    return random_bits() % n;
}

/* ---- the naive side: all values of a tensor, row-major ---- */

struct array {
    struct shape shape;
    uint64_t value[ELEMENTS_MAX];
};

static uint64_t volume(const struct shape *s)
{
    uint64_t n = 1;

    for (uint32_t k = 0; k < s->nd; k++)
        n *= s->dim[k];
    return n;
}

/* The indices of the i-th element. */
static void indices(const struct shape *s, uint64_t i, uint64_t *at)
{
    for (uint32_t k = s->nd; k-- > 0;) {
        at[k] = i % s->dim[k];
        i /= s->dim[k];
    }
}

static uint64_t flat(const struct shape *s, const uint64_t *at)
{
    uint64_t i = 0;

    for (uint32_t k = 0; k < s->nd; k++)
        i = i * s->dim[k] + at[k];
    return i;
}

/* The axis gets n elements: the j-th is the old element from[j]. */
static void array_gather(struct array *a, uint32_t axis, const uint64_t *from,
                         uint64_t n)
{
    static struct array out;
    uint64_t at[SHAPE_MAX_DIMS] = {0};

    out.shape = a->shape;
    out.shape.dim[axis] = n;
    for (uint64_t i = 0; i < volume(&out.shape); i++) {
        indices(&out.shape, i, at);
        at[axis] = from[at[axis]];
        out.value[i] = a->value[flat(&a->shape, at)];
    }
    *a = out;
}

static void array_permute(struct array *a, const uint32_t *order)
{
    static struct array out;
    uint64_t at[SHAPE_MAX_DIMS] = {0}, old[SHAPE_MAX_DIMS] = {0};

    out.shape.nd = a->shape.nd;
    for (uint32_t k = 0; k < a->shape.nd; k++)
        out.shape.dim[k] = a->shape.dim[order[k]];
    for (uint64_t i = 0; i < volume(&out.shape); i++) {
        indices(&out.shape, i, at);
        for (uint32_t k = 0; k < a->shape.nd; k++)
            old[order[k]] = at[k];
        out.value[i] = a->value[flat(&a->shape, old)];
    }
    *a = out;
}

/* ---- a tensor in boxes, and the same as an array ---- */

struct made {
    struct arena *arena;
    struct boxes boxes;
    struct array array;
    uint32_t files;
};

static struct err e;

static const uint64_t *copy_row(struct arena *a, const uint64_t *row, uint32_t nd)
{
    uint64_t *out = arena_array(a, nd + 1, sizeof *out);

    assert_non_null(out);
    memcpy(out, row, nd * sizeof *row);
    return out;
}

/* One chunk: its piece may have the axes in another order, and begin further on. */
static void make_chunk(struct made *m, const uint64_t *start, const uint64_t *size,
                       struct chunk *out)
{
    uint32_t nd = m->array.shape.nd, order[SHAPE_MAX_DIMS];
    int64_t *step = arena_array(m->arena, nd + 1, sizeof *step), unit = 1;
    uint64_t at[SHAPE_MAX_DIMS] = {0}, n = 1;
    bool own = below(2);

    for (uint32_t k = 0; k < nd; k++) {
        order[k] = k;
        n *= size[k];
    }
    for (uint32_t k = nd; own && k-- > 1;) {
        uint32_t other = (uint32_t)below(k + 1), kept = order[k];

        order[k] = order[other];
        order[other] = kept;
    }
    for (uint32_t k = nd; k-- > 0;) {
        step[order[k]] = unit;
        unit *= (int64_t)size[order[k]];
    }
    *out = (struct chunk){.file = m->files++,
                          .start = copy_row(m->arena, start, nd),
                          .size = copy_row(m->arena, size, nd),
                          .first = own ? below(100) : 0,
                          .step = own ? step : NULL,
                          .length = n};
    for (uint64_t i = 0; i < n; i++) {
        struct shape box = {.nd = nd};
        uint64_t where = out->first;

        memcpy(box.dim, size, nd * sizeof *size);
        indices(&box, i, at);
        for (uint32_t k = 0; k < nd; k++) {
            where += at[k] * (uint64_t)step[k];
            at[k] += start[k];
        }
        m->array.value[flat(&m->array.shape, at)] =
            (uint64_t)out->file << FILE_SHIFT | where;
    }
}

/* Cuts the largest piece in two, some times over. */
static size_t cut_up(const struct shape *s, uint64_t start[][SHAPE_MAX_DIMS],
                     uint64_t size[][SHAPE_MAX_DIMS])
{
    size_t n = 1, cuts = below(BOXES_MOST - 1);

    memset(start[0], 0, sizeof start[0]);
    memcpy(size[0], s->dim, sizeof size[0]);
    for (size_t i = 0; s->nd > 0 && i < cuts; i++) {
        size_t which = below(n);
        uint32_t axis = (uint32_t)below(s->nd);
        uint64_t at;

        if (size[which][axis] < 2)
            continue;
        at = 1 + below(size[which][axis] - 1);
        memcpy(start[n], start[which], sizeof start[n]);
        memcpy(size[n], size[which], sizeof size[n]);
        start[n][axis] += at;
        size[n][axis] -= at;
        size[which][axis] = at;
        n++;
    }
    return n;
}

static void make(struct made *m, const struct shape *shape)
{
    static uint64_t start[BOXES_MOST][SHAPE_MAX_DIMS], size[BOXES_MOST][SHAPE_MAX_DIMS];
    CLEANUP(buf_release) struct buf packed = {0};
    struct chunk chunk[BOXES_MOST];
    size_t n = cut_up(shape, start, size);

    m->array.shape = *shape;
    for (size_t i = 0; i < n; i++)
        make_chunk(m, start[i], size[i], &chunk[i]);
    assert_ok(chunks_pack(chunk, n, shape->nd, &packed, &e), &e);
    assert_ok(boxes_load(m->arena, shape, packed.data, packed.len, &m->boxes, &e), &e);
    assert_int_equal(m->boxes.n, n);
}

static void random_shape(struct shape *s)
{
    s->nd = 1 + (uint32_t)below(4);
    for (uint32_t k = 0; k < s->nd; k++)
        s->dim[k] = 1 + below(7);
}

/* ---- comparison ---- */

/* Writes the values of a box to their places; each place has one. */
static void expand(const struct chunk *c, const struct shape *s, uint64_t *value)
{
    struct shape box = {.nd = s->nd};
    uint64_t at[SHAPE_MAX_DIMS] = {0};

    memcpy(box.dim, c->size, s->nd * sizeof *c->size);
    for (uint64_t i = 0; i < volume(&box); i++) {
        uint64_t where = c->first;

        indices(&box, i, at);
        for (uint32_t k = 0; k < s->nd; k++) {
            where += at[k] * (uint64_t)c->step[k];
            at[k] += c->start[k];
            assert_true(at[k] < s->dim[k]);
        }
        assert_true(value[flat(s, at)] == UINT64_MAX);
        value[flat(s, at)] = (uint64_t)c->file << FILE_SHIFT | where;
    }
}

/* The boxes give the array, each element once, and are a plan. */
static void check(const struct made *m, const char *what)
{
    static uint64_t value[ELEMENTS_MAX];
    struct plan_builder *b;
    const struct plan *p;
    uint64_t n = volume(&m->array.shape);

    if (!shape_equal(&m->boxes.shape, &m->array.shape))
        fail_msg("%s: another shape", what);
    memset(value, 0xff, n * sizeof *value);
    for (size_t i = 0; i < m->boxes.n; i++)
        expand(&m->boxes.chunk[i], &m->boxes.shape, value);
    for (uint64_t i = 0; i < n; i++)
        if (value[i] != m->array.value[i])
            fail_msg("%s: element %llu is %llx, not %llx", what, (unsigned long long)i,
                     (unsigned long long)value[i],
                     (unsigned long long)m->array.value[i]);
    assert_ok(plan_begin(m->arena, &m->boxes.shape, 1, &b, &e), &e);
    for (size_t i = 0; i < m->boxes.n; i++)
        assert_ok(plan_add(b, &m->boxes.chunk[i], &e), &e);
    assert_ok(plan_finish(b, &p, &e), &e);
}

/* ---- operations, each on both sides ---- */

static void select_pieces(struct made *m, uint32_t axis, struct piece_list *l,
                          uint64_t dim)
{
    assert_ok(boxes_select(&m->boxes, axis, l->at, l->n, dim, &e), &e);
    piece_list_release(l);
}

static void op_cut(struct made *m)
{
    uint32_t axis = (uint32_t)below(m->array.shape.nd);
    uint64_t dim = m->array.shape.dim[axis], first = below(dim),
             n = 1 + below(dim - first), from[ELEMENTS_MAX];
    const struct axis_piece piece = {.from = first, .step = 1, .count = n};

    for (uint64_t i = 0; i < n; i++)
        from[i] = first + i;
    array_gather(&m->array, axis, from, n);
    assert_ok(boxes_select(&m->boxes, axis, &piece, 1, n, &e), &e);
}

/* One index of an axis, which goes. */
static void op_unstack(struct made *m)
{
    uint32_t axis = (uint32_t)below(m->array.shape.nd);
    uint64_t index = below(m->array.shape.dim[axis]);
    const struct axis_piece piece = {.from = index, .step = 1, .count = 1};

    if (m->array.shape.nd < 2)
        return;
    array_gather(&m->array, axis, &index, 1);
    memmove(&m->array.shape.dim[axis], &m->array.shape.dim[axis + 1],
            (m->array.shape.nd - axis - 1) * sizeof m->array.shape.dim[0]);
    m->array.shape.nd--;
    assert_ok(boxes_select(&m->boxes, axis, &piece, 1, 1, &e), &e);
    boxes_drop_axis(&m->boxes, axis);
}

static void op_insert(struct made *m)
{
    uint32_t axis = (uint32_t)below(m->array.shape.nd + 1);

    memmove(&m->array.shape.dim[axis + 1], &m->array.shape.dim[axis],
            (m->array.shape.nd - axis) * sizeof m->array.shape.dim[0]);
    m->array.shape.dim[axis] = 1;
    m->array.shape.nd++;
    assert_ok(boxes_insert_axis(&m->boxes, axis, &e), &e);
}

static void op_transpose(struct made *m)
{
    uint32_t order[SHAPE_MAX_DIMS], nd = m->array.shape.nd;

    for (uint32_t k = 0; k < nd; k++)
        order[k] = k;
    for (uint32_t k = nd; k-- > 1;) {
        uint32_t other = (uint32_t)below(k + 1), kept = order[k];

        order[k] = order[other];
        order[other] = kept;
    }
    array_permute(&m->array, order);
    boxes_permute(&m->boxes, order);
}

/* A number that divides n. */
static uint64_t divisor(uint64_t n)
{
    uint64_t d = 1 + below(n);

    while (n % d != 0)
        d--;
    return d;
}

/* Some rows of each group, as a split takes them. */
static void op_share(struct made *m)
{
    uint32_t axis = (uint32_t)below(m->array.shape.nd);
    uint64_t dim = m->array.shape.dim[axis], from[ELEMENTS_MAX], n = 0;
    struct share s = {.groups = divisor(dim)};
    struct piece_list l = {0};

    s.group = dim / s.groups;
    s.at = below(s.group);
    s.rows = 1 + below(s.group - s.at);
    for (uint64_t i = 0; i < dim; i++)
        if (i % s.group >= s.at && i % s.group < s.at + s.rows)
            from[n++] = i;
    array_gather(&m->array, axis, from, n);
    assert_ok(shares_take(&s, &l, &e), &e);
    select_pieces(m, axis, &l, s.groups * s.rows);
}

/*
 * By the definition: in each group, of the blocks in their order, all even ones come before
 * all odd ones. Interleaving finds back from there.
 */
static void naive_interleave(const struct interleave *i, uint64_t *from)
{
    uint64_t group = i->dim / i->groups, apart[ELEMENTS_MAX], n = 0;

    for (uint64_t g = 0; g < i->groups; g++)
        for (unsigned odd = 0; odd < 2; odd++)
            for (uint64_t k = 0; k < group; k++)
                if (k / i->block % 2 == odd)
                    apart[n++] = g * group + k;
    for (uint64_t k = 0; k < n; k++)
        from[i->undo ? k : apart[k]] = i->undo ? apart[k] : k;
}

static void op_interleave(struct made *m)
{
    uint32_t axis = (uint32_t)below(m->array.shape.nd);
    uint64_t from[ELEMENTS_MAX];
    struct interleave i = {.dim = m->array.shape.dim[axis], .undo = below(2)};
    struct piece_list l = {0};

    i.groups = divisor(i.dim);
    if (i.dim / i.groups % 2 != 0)
        return;
    i.block = divisor(i.dim / i.groups / 2);
    naive_interleave(&i, from);
    array_gather(&m->array, axis, from, i.dim);
    assert_ok(shares_interleave(&i, &l, &e), &e);
    select_pieces(m, axis, &l, i.dim);
}

/* Part `at`, `rows` of each group, of another tensor come between those of this one. */
static void op_join(struct made *m)
{
    static struct made more;
    static struct array whole;
    uint32_t axis = (uint32_t)below(m->array.shape.nd);
    uint64_t dim = m->array.shape.dim[axis], at[SHAPE_MAX_DIMS];
    struct share a = {.groups = divisor(dim)}, b;
    struct piece_list la = {0}, lb = {0};

    a.rows = dim / a.groups;
    b = (struct share){.groups = a.groups, .rows = 1 + below(3), .at = a.rows};
    a.group = b.group = a.rows + b.rows;
    whole.shape = m->array.shape;
    whole.shape.dim[axis] = b.groups * b.rows;
    if (volume(&whole.shape) + volume(&m->array.shape) > ELEMENTS_MAX)
        return;
    more.arena = m->arena;
    more.files = m->files;
    make(&more, &whole.shape);
    m->files = more.files;
    whole.shape.dim[axis] = a.groups * a.group;
    for (uint64_t i = 0; i < volume(&whole.shape); i++) {
        uint64_t group, row;

        indices(&whole.shape, i, at);
        group = at[axis] / a.group;
        row = at[axis] % a.group;
        at[axis] = row < a.rows ? group * a.rows + row : group * b.rows + row - a.rows;
        whole.value[i] = row < a.rows ? m->array.value[flat(&m->array.shape, at)]
                                      : more.array.value[flat(&more.array.shape, at)];
    }
    m->array = whole;
    assert_ok(shares_put(&a, &la, &e), &e);
    assert_ok(shares_put(&b, &lb, &e), &e);
    select_pieces(m, axis, &la, a.groups * a.group);
    select_pieces(&more, axis, &lb, a.groups * a.group);
    assert_ok(boxes_append(&m->boxes, &more.boxes, &e), &e);
}

/* A stack of two: each gets an axis, which is joined. */
static void op_stack(struct made *m)
{
    static struct made more;
    static struct array whole;
    uint64_t n = volume(&m->array.shape);
    const struct share second = {.groups = 1, .group = 2, .at = 1, .rows = 1};
    const struct share first = {.groups = 1, .group = 2, .at = 0, .rows = 1};
    struct piece_list l1 = {0}, l2 = {0};

    if (2 * n > ELEMENTS_MAX || m->array.shape.nd == SHAPE_MAX_DIMS)
        return;
    more.arena = m->arena;
    more.files = m->files;
    make(&more, &m->array.shape);
    m->files = more.files;
    whole.shape.nd = m->array.shape.nd + 1;
    whole.shape.dim[0] = 2;
    memcpy(&whole.shape.dim[1], m->array.shape.dim,
           m->array.shape.nd * sizeof(uint64_t));
    memcpy(whole.value, m->array.value, n * sizeof *whole.value);
    memcpy(whole.value + n, more.array.value, n * sizeof *whole.value);
    m->array = whole;
    assert_ok(boxes_insert_axis(&m->boxes, 0, &e), &e);
    assert_ok(boxes_insert_axis(&more.boxes, 0, &e), &e);
    assert_ok(shares_put(&first, &l1, &e), &e);
    assert_ok(shares_put(&second, &l2, &e), &e);
    select_pieces(m, 0, &l1, 2);
    select_pieces(&more, 0, &l2, 2);
    assert_ok(boxes_append(&m->boxes, &more.boxes, &e), &e);
}

/* ---- tests ---- */

static void test_random_chains(void **state UNUSED)
{
    static const struct {
        const char *name;
        void (*run)(struct made *m);
    } op[] = {
        {"cut", op_cut},           {"unstack", op_unstack},       {"insert", op_insert},
        {"share", op_share},       {"interleave", op_interleave}, {"join", op_join},
        {"permute", op_transpose}, {"stack", op_stack},
    };
    static struct made m;

    for (unsigned round = 0; round < ROUNDS; round++) {
        char what[200];
        struct shape shape = {0};
        int len = snprintf(what, sizeof what, "round %u:", round);

        state_of_random = round;
        m.arena = arena_new(64 << 20);
        m.files = 0;
        random_shape(&shape);
        make(&m, &shape);
        check(&m, what);
        for (unsigned i = 0; i < STEPS && m.array.shape.nd <= 5; i++) {
            size_t which = below(ARRAY_SIZE(op));

            len +=
                snprintf(what + len, sizeof what - (size_t)len, " %s", op[which].name);
            op[which].run(&m);
            check(&m, what);
        }
        arena_free(m.arena);
    }
}

/* Index tables of Megatron Bridge 0.6.2, its own functions on arange(n). */
static void test_as_bridge(void **state UNUSED)
{
    static const struct {
        uint64_t rows, block, from[24], back[24];
    } t[] = {
        {12,
         2,
         {0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11},
         {0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11}},
        {16,
         4,
         {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15},
         {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15}},
        {24,
         3,
         {0, 1, 2, 6, 7,  8,  12, 13, 14, 18, 19, 20,
          3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23},
         {0, 1, 2, 12, 13, 14, 3, 4,  5,  15, 16, 17,
          6, 7, 8, 18, 19, 20, 9, 10, 11, 21, 22, 23}},
        {8, 1, {0, 2, 4, 6, 1, 3, 5, 7}, {0, 4, 1, 5, 2, 6, 3, 7}},
        {8, 4, {0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 6, 7}},
    };

    for (size_t k = 0; k < 2 * ARRAY_SIZE(t); k++) {
        struct interleave i = {t[k / 2].rows, 1, t[k / 2].block, k % 2 == 0};
        const uint64_t *want = i.undo ? t[k / 2].from : t[k / 2].back;
        struct piece_list l = {0};
        uint64_t from[24], n = 0;

        assert_ok(shares_interleave(&i, &l, &e), &e);
        for (size_t p = 0; p < l.n; p++)
            for (uint64_t j = 0; j < l.at[p].count; j++, n++)
                from[l.at[p].to + j] = l.at[p].from + j * l.at[p].step;
        assert_int_equal(n, i.dim);
        assert_memory_equal(from, want, n * sizeof *from);
        piece_list_release(&l);
    }
}

static void test_interleave_refuses(void **state UNUSED)
{
    static const struct interleave bad[] = {
        {12, 5, 1, true},  {12, 0, 1, true},          {12, 1, 0, false},
        {12, 4, 1, false}, {12, 1, 4, true},          {6, 1, 2, true},
        {8, 1, 9, true},   {8, 1, UINT64_MAX, false},
    };
    struct piece_list l = {0};

    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        assert_int_equal(shares_interleave(&bad[i], &l, &e), -EINVAL);
        assert_has(e.text, "groups of pairs of blocks of");
    }
    assert_ok(shares_interleave(&(struct interleave){0, 1, 1, true}, &l, &e), &e);
    assert_int_equal(l.n, 0); /* nothing to move */
}

/* A cut gives the piece's own shape to the codec; empty boxes are left out. */
static void test_whole(void **state UNUSED)
{
    struct arena *a = arena_new(1 << 20);
    CLEANUP(buf_release) struct buf packed = {0};
    const struct shape shape = {2, {4, 6}};
    const struct axis_piece piece = {.from = 1, .step = 1, .count = 2};
    uint64_t zero[2] = {0}, size[2] = {4, 6}, none[2] = {0, 6};
    struct chunk c[] = {
        {.encoding = CHUNK_TORCH_ZIP, .start = zero, .size = none},
        {.encoding = CHUNK_TORCH_ZIP, .length = 9, .start = zero, .size = size},
    };
    struct boxes b;

    assert_ok(chunks_pack(c, 2, 2, &packed, &e), &e);
    assert_ok(boxes_load(a, &shape, packed.data, packed.len, &b, &e), &e);
    assert_int_equal(b.n, 1);
    assert_ok(boxes_select(&b, 1, &piece, 1, 2, &e), &e);
    boxes_permute(&b, (const uint32_t[]){1, 0});
    assert_int_equal(b.chunk[0].whole_nd, 2);
    assert_memory_equal(b.chunk[0].whole, size, sizeof size);
    assert_int_equal(b.chunk[0].first, 1);
    assert_int_equal(b.chunk[0].step[0], 1);
    assert_int_equal(b.chunk[0].step[1], 6);
    assert_int_equal(b.chunk[0].size[0], 2);
    assert_int_equal(b.chunk[0].size[1], 4);
    arena_free(a);
}

static void test_too_many_axes(void **state UNUSED)
{
    struct arena *a = arena_new(1 << 20);
    struct boxes b = {.arena = a, .shape = {.nd = SHAPE_MAX_DIMS}};

    assert_int_equal(boxes_insert_axis(&b, 0, &e), -E2BIG);
    assert_has(e.text, "dimensions");
    arena_free(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_chains),      cmocka_unit_test(test_as_bridge),
        cmocka_unit_test(test_interleave_refuses), cmocka_unit_test(test_whole),
        cmocka_unit_test(test_too_many_axes),
    };

    return cmocka_run_group_tests_name("map_boxes", tests, NULL, NULL);
}
