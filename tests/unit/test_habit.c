/* SPDX-License-Identifier: MIT */
/* tests/unit/test_habit.c - for whom the kernel keeps pages of a file. */
#include "fs/habit.h"

#include "unit.h"

enum { INO = 7, PAGE = 4096, MIB = 1 << 20, FEW = 200, MANY = 300 };

/* Opened, read so many times, step apart; and is it kept for the next? */
static bool read_so(struct habits *all, bool owned, unsigned count, uint64_t step,
                    size_t len)
{
    struct habit h = {0}, next = {0};

    habit_open(all, INO, true, &h);
    for (unsigned i = 0; i < count; i++)
        habit_read(all, INO, &h, owned, i * step, len);
    return habit_open(all, INO, true, &next);
}

static void mapped_once_it_stays(void **state)
{
    struct habits all = {0};

    (void)state;
    assert_true(read_so(&all, false, 1, 0, PAGE));
    assert_true(read_so(&all, false, 200, MIB, MIB));
}

static void what_is_no_habit(void **state)
{
    struct habits all = {0};
    struct habit h = {0};

    (void)state;
    assert_false(read_so(&all, true, FEW, 3 * PAGE, PAGE)); /* too few */
    assert_false(read_so(&all, true, 5000, PAGE, PAGE));    /* in a row */
    assert_false(read_so(&all, true, 5000, MIB, MIB / 2));  /* long ones */
    assert_true(read_so(&all, true, MANY, 3 * PAGE, PAGE));
    assert_false(habit_open(&all, INO + 1, true, &h)); /* another file */
    assert_false(habit_open(&all, INO, false, &h));
}

/* In a row, though threads take the requests one before the other. */
static void a_long_run_ends_it(void **state)
{
    struct habits all = {0};
    struct habit h = {0}, next = {0};

    (void)state;
    assert_true(read_so(&all, true, MANY, 3 * PAGE, PAGE));
    assert_true(read_so(&all, false, 63, MIB, MIB));
    assert_true(read_so(&all, false, 5000, 40 * MIB, MIB)); /* here and there */
    assert_true(habit_open(&all, INO, true, &h));
    for (uint64_t i = 0; i < 66; i++)
        habit_read(&all, INO, &h, false, (i ^ 1) * MIB, MIB);
    assert_false(habit_open(&all, INO, true, &next));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mapped_once_it_stays),
        cmocka_unit_test(what_is_no_habit),
        cmocka_unit_test(a_long_run_ends_it),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
