/* SPDX-License-Identifier: MIT */
/* tests/unit/test_mesh_cut.c - boxes that placements on a device mesh give its ranks. */
#include "unit.h"

#include <errno.h>

#include "base/err.h"
#include "index/formats/rankfiles/mesh_cut.h"

#define R MESH_REPLICATE
#define S MESH_SHARD
#define T MESH_STRIDED

static void box(const struct shape *whole, const struct mesh_axis *axis, uint32_t n,
                uint64_t *start, uint64_t *size)
{
    uint32_t order[MESH_MAX_AXES], cuts = 0;
    struct err e = {0};

    assert_ok(mesh_cut_order(axis, n, order, &cuts, &e), &e);
    assert_ok(mesh_cut_box(whole, axis, order, cuts, start, size, &e), &e);
}

/* Rows of one dimension on ranks of one axis: start and size of each. */
static void test_rows(void **state)
{
    static const struct {
        uint64_t rows, ranks, start[5], size[5];
    } cases[] = {
        {37, 4, {0, 10, 20, 30}, {10, 10, 10, 7}},
        {5, 4, {0, 2, 4, 5}, {2, 2, 1, 0}},
        {1, 4, {0, 1, 1, 1}, {1, 0, 0, 0}},
        {3, 5, {0, 1, 2, 3, 3}, {1, 1, 1, 0, 0}},
        {6, 5, {0, 2, 4, 6, 6}, {2, 2, 2, 0, 0}},
        {0, 2, {0, 0}, {0, 0}},
        {7, 1, {0}, {7}},
    };

    (void)state;
    for (size_t c = 0; c < ARRAY_SIZE(cases); c++) {
        const struct shape whole = {.nd = 1, .dim = {cases[c].rows}};

        for (uint64_t at = 0; at < cases[c].ranks; at++) {
            const struct mesh_axis axis = {.size = cases[c].ranks, .at = at, .cut = S};
            uint64_t start[1], size[1];

            box(&whole, &axis, 1, start, size);
            assert_int_equal(start[0], cases[c].start[at]);
            assert_int_equal(size[0], cases[c].size[at]);
        }
    }
}

/* 13 rows on 3 x 2 ranks: the left axis first, or, strided, the right one. */
static void test_orders(void **state)
{
    static const uint64_t left[3][2][2] = {
        {{0, 3}, {3, 2}}, {{5, 3}, {8, 2}}, {{10, 2}, {12, 1}}};
    static const uint64_t right[3][2][2] = {
        {{0, 3}, {7, 2}}, {{3, 3}, {9, 2}}, {{6, 1}, {11, 2}}};
    const struct shape whole = {.nd = 2, .dim = {13, 4}};

    (void)state;
    for (uint64_t i = 0; i < 6; i++) {
        struct mesh_axis axis[2] = {{.size = 3, .at = i / 2, .cut = S},
                                    {.size = 2, .at = i % 2, .cut = S}};
        uint64_t start[2], size[2];

        box(&whole, axis, 2, start, size);
        assert_int_equal(start[0], left[i / 2][i % 2][0]);
        assert_int_equal(size[0], left[i / 2][i % 2][1]);
        axis[0].cut = T;
        axis[0].split = 2;
        box(&whole, axis, 2, start, size);
        assert_int_equal(start[0], right[i / 2][i % 2][0]);
        assert_int_equal(size[0], right[i / 2][i % 2][1]);
        assert_int_equal(start[1], 0);
        assert_int_equal(size[1], 4);
    }
}

/* The example of torch's own DTensorSpec, and others: which axis cuts when. */
static void test_order_of_axes(void **state)
{
    static const struct {
        struct mesh_axis axis[3];
        uint32_t n, order[3];
    } cases[] = {
        {{{4, 0, T, 0, 2}, {3, 0, T, 0, 2}, {2, 0, S, 0, 0}}, 3, {2, 0, 1}},
        {{{4, 0, T, 0, 6}, {3, 0, T, 0, 2}, {2, 0, S, 0, 0}}, 3, {2, 1, 0}},
        {{{4, 0, T, 0, 3}, {3, 0, S, 0, 0}, {2, 0, S, 0, 0}}, 3, {1, 0, 2}},
        {{{4, 0, S, 0, 0}, {3, 0, S, 0, 0}, {2, 0, S, 0, 0}}, 3, {0, 1, 2}},
        {{{4, 0, R, 0, 0}, {3, 0, T, 1, 2}, {2, 0, S, 1, 0}}, 2, {2, 1}},
        {{{4, 0, R, 0, 0}, {3, 0, R, 0, 0}, {2, 0, S, 0, 0}}, 1, {2}},
    };

    (void)state;
    for (size_t c = 0; c < ARRAY_SIZE(cases); c++) {
        uint32_t order[MESH_MAX_AXES], n = 0;
        struct err e = {0};

        assert_ok(mesh_cut_order(cases[c].axis, 3, order, &n, &e), &e);
        assert_int_equal(n, cases[c].n);
        for (uint32_t i = 0; i < n; i++)
            assert_int_equal(order[i], cases[c].order[i]);
    }
}

/* Every element of a tensor of any size is in exactly one rank's box. */
static void test_complete(void **state)
{
    (void)state;
    for (uint64_t rows = 0; rows < 40; rows++) {
        unsigned seen[40] = {0};
        const struct shape whole = {.nd = 1, .dim = {rows}};

        for (uint64_t i = 0; i < 24; i++) {
            const struct mesh_axis axis[3] = {
                {4, i / 6, T, 0, 2}, {3, i / 2 % 3, T, 0, 2}, {2, i % 2, S, 0, 0}};
            uint64_t start[1], size[1];

            box(&whole, axis, 3, start, size);
            for (uint64_t k = 0; k < size[0]; k++)
                seen[start[0] + k]++;
        }
        for (uint64_t k = 0; k < rows; k++)
            assert_int_equal(seen[k], 1);
    }
}

static void test_refused(void **state)
{
    const struct mesh_axis strided[2] = {{.size = 3, .cut = T, .split = 2},
                                         {.size = 4, .cut = S}},
                           alone = {.size = 2, .cut = T, .split = 2},
                           outside = {.size = 2, .at = 2, .cut = S},
                           dimension = {.size = 2, .cut = S, .dim = 1};
    const struct shape whole = {.nd = 1, .dim = {8}};
    uint32_t order[MESH_MAX_AXES], n = 0;
    uint64_t start[1], size[1];
    struct err e = {0};

    (void)state;
    assert_int_equal(mesh_cut_order(strided, 2, order, &n, &e), -ENOTSUP);
    assert_has(e.text, "split factor 2 on axis 0");
    assert_int_equal(mesh_cut_order(&alone, 1, order, &n, &e), -ENOTSUP);
    assert_int_equal(mesh_cut_order(&alone, MESH_MAX_AXES + 1, order, &n, &e),
                     -ENOTSUP);
    order[0] = 0;
    assert_int_equal(mesh_cut_box(&whole, &outside, order, 1, start, size, &e),
                     -EBADMSG);
    assert_has(e.text, "coordinate 2 on axis 0 of the mesh, which has 2 ranks");
    assert_int_equal(mesh_cut_box(&whole, &dimension, order, 1, start, size, &e),
                     -EBADMSG);
    assert_has(e.text, "dimension 1 of 1");
}

/* Products and sums stay within 64 bits. */
static void test_huge(void **state)
{
    const struct shape whole = {.nd = 1, .dim = {UINT64_MAX}};
    const struct mesh_axis axis = {.size = UINT32_MAX, .at = UINT32_MAX - 1, .cut = S};
    uint64_t start[1], size[1];

    (void)state;
    box(&whole, &axis, 1, start, size);
    assert_true(start[0] <= UINT64_MAX - size[0]);
    assert_int_equal(start[0] + size[0], UINT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),     cmocka_unit_test(test_orders),
        cmocka_unit_test(test_complete), cmocka_unit_test(test_order_of_axes),
        cmocka_unit_test(test_refused),  cmocka_unit_test(test_huge),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
