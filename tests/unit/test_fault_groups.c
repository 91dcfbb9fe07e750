/* SPDX-License-Identifier: MIT */
/* tests/unit/test_fault_groups.c - many faults of one cause are one line. */
#include "unit.h"

#include <stdio.h>

#include "index/fault_groups.h"

static void add(struct fault_groups *g, const char *key, const char *text)
{
    assert_int_equal(fault_groups_add(g, key, strlen(key), text), 0);
}

static void test_one_line_for_each_cause(void **state)
{
    CLEANUP(fault_groups_release) struct fault_groups g = {0};
    char line[300];

    (void)state;
    add(&g, "a", "shard x_1.bin ends at byte 10, chunk needs bytes 20 to 30");
    add(&g, "b", "shard x_2.bin is missing");
    add(&g, "c", "shard x_1.bin ends at byte 10, chunk needs bytes 4000 to 5000");
    add(&g, "d", "shard x_1.bin ends at byte 10, chunk needs bytes 7 to 8");
    add(&g, "e\nf", "shard x_1.bin ends at byte 10, chunk needs bytes 8 to 9");
    assert_int_equal(g.n, 2);
    assert_string_equal(fault_group_line(&g.at[0], line, sizeof line),
                        "4 tensors: shard x_1.bin ends at byte 10, chunk needs bytes"
                        " 20 to 30 (a, c, d, ...)");
    assert_string_equal(fault_group_line(&g.at[1], line, sizeof line),
                        "b: shard x_2.bin is missing");
    add(&g, "e\nf", "shard x_2.bin is missing");
    assert_string_equal(fault_group_line(&g.at[1], line, sizeof line),
                        "2 tensors: shard x_2.bin is missing (b, e%0Af)");
    assert_int_equal(strlen(fault_group_line(&g.at[0], line, 20)), 19);
}

static void test_causes_have_an_end(void **state)
{
    CLEANUP(fault_groups_release) struct fault_groups g = {0};
    char text[40], line[300];

    (void)state;
    for (int i = 0; i < 3 * FAULT_CAUSES; i++) {
        snprintf(text, sizeof text, "shard s%d is missing", i);
        add(&g, "k", text);
    }
    assert_int_equal(g.n, FAULT_CAUSES);
    fault_group_line(&g.at[g.n - 1], line, sizeof line);
    assert_has(line, "401 tensors: other causes (k, k, k, ...)");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_line_for_each_cause),
        cmocka_unit_test(test_causes_have_an_end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
