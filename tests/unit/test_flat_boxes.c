/* SPDX-License-Identifier: MIT */
/* tests/unit/test_flat_boxes.c - ranges of flat elements as boxes, against counting. */
#include "tests/unit/unit.h"

#include "index/formats/flat_boxes.h"

enum { MAX_ELEMENTS = 400 };

static uint64_t flat_of(const struct shape *s, const uint64_t *at)
{
    uint64_t flat = 0;

    for (uint32_t k = 0; k < s->nd; k++)
        flat = flat * s->dim[k] + at[k];
    return flat;
}

/* Marks the elements of a box; they must follow one another from `first` on. */
static uint64_t mark(const struct shape *s, const struct flat_box *b, uint64_t begin,
                     unsigned char *seen)
{
    uint64_t at[SHAPE_MAX_DIMS] = {0}, place[SHAPE_MAX_DIMS], n = 0;
    uint32_t k;

    do {
        for (k = 0; k < s->nd; k++) {
            place[k] = b->start[k] + at[k];
            assert_true(place[k] < s->dim[k]);
        }
        assert_int_equal(flat_of(s, place), begin + b->first + n);
        seen[begin + b->first + n]++;
        n++;
        for (k = s->nd; k-- > 0;) {
            if (++at[k] < b->size[k])
                break;
            at[k] = 0;
        }
    } while (k != UINT32_MAX);
    return n;
}

static void check_range(const struct shape *s, uint64_t count, uint64_t begin,
                        uint64_t end)
{
    unsigned char seen[MAX_ELEMENTS] = {0};
    struct flat_boxes f;
    struct flat_box b;
    uint64_t boxes = 0, done = 0;

    assert_true(flat_boxes_begin(&f, s, begin, end));
    while (flat_boxes_next(&f, &b)) {
        assert_int_equal(b.first, done);
        done += mark(s, &b, begin, seen);
        boxes++;
    }
    assert_int_equal(done, end - begin);
    assert_true(boxes <= (s->nd ? 2 * s->nd - 1 : 1));
    for (uint64_t i = 0; i < count; i++)
        assert_int_equal(seen[i], i >= begin && i < end);
}

/* Every range of small blocks. */
static void test_all_ranges(void **state)
{
    static const struct shape shapes[] = {
        {0, {0}},          {1, {7}},          {2, {3, 5}},          {2, {1, 6}},
        {2, {6, 1}},       {3, {2, 3, 4}},    {3, {1, 4, 5}},       {3, {3, 1, 2}},
        {4, {2, 3, 2, 3}}, {4, {2, 1, 3, 1}}, {5, {2, 2, 1, 2, 3}},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(shapes); i++) {
        uint64_t count = 1;

        for (uint32_t k = 0; k < shapes[i].nd; k++)
            count *= shapes[i].dim[k];
        for (uint64_t begin = 0; begin <= count; begin++)
            for (uint64_t end = begin; end <= count; end++)
                check_range(&shapes[i], count, begin, end);
    }
}

static void test_exact(void **state)
{
    const struct shape s = {3, {4, 5, 6}};
    static const struct {
        uint64_t first, start[3], size[3];
    } want[] = {
        {0, {0, 1, 5}, {1, 1, 1}},  {1, {0, 2, 0}, {1, 3, 6}},
        {19, {1, 0, 0}, {2, 5, 6}}, {79, {3, 0, 0}, {1, 2, 6}},
        {91, {3, 2, 0}, {1, 1, 3}},
    };
    struct flat_boxes f;
    struct flat_box b;
    size_t n = 0;

    (void)state;
    assert_true(flat_boxes_begin(&f, &s, 11, 105));
    for (; flat_boxes_next(&f, &b); n++) {
        assert_true(n < ARRAY_SIZE(want));
        assert_int_equal(b.first, want[n].first);
        assert_memory_equal(b.start, want[n].start, sizeof want[n].start);
        assert_memory_equal(b.size, want[n].size, sizeof want[n].size);
    }
    assert_int_equal(n, ARRAY_SIZE(want));
    assert_int_equal(f.stride[0], 30);
    assert_int_equal(f.stride[1], 6);
    assert_int_equal(f.stride[2], 1);
}

static void test_refused(void **state)
{
    const struct shape s = {2, {3, 5}}, empty = {2, {0, 5}},
                       huge = {2, {UINT64_MAX, 2}};
    struct flat_boxes f;
    struct flat_box b;

    (void)state;
    assert_false(flat_boxes_begin(&f, &s, 0, 16));
    assert_false(flat_boxes_begin(&f, &s, 3, 2));
    assert_false(flat_boxes_begin(&f, &s, UINT64_MAX, 1));
    assert_false(flat_boxes_begin(&f, &empty, 0, 1));
    assert_true(flat_boxes_begin(&f, &empty, 0, 0));
    assert_false(flat_boxes_next(&f, &b));
    assert_false(flat_boxes_begin(&f, &huge, 0, 1));
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_ranges),
        cmocka_unit_test(test_exact),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
