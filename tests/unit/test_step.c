/* SPDX-License-Identifier: MIT */
/* tests/unit/test_step.c - steps, by the names of their directories. */
#include "index/formats/step.h"

#include "unit.h"

static void numbers_of_steps(void **state)
{
    static const struct {
        const char *name;
        int64_t step; /* -1: none */
    } names[] = {
        {"iter_0000100", 100},
        {"global_step100", 100},
        {"step-100", 100},
        {"checkpoint-100", 100},
        {"epoch_1_step_100", 100},
        {"Step100", 100},
        {"step", -1},
        {"100", -1},
        {"epoch_100", -1},
        {"footstep100", -1},
        {"epoch0epochstep3globalstep100", 100},
        {"globalstep", -1},
        {"step-100.tmp", -1},
        {"", -1},
        {"step_9223372036854775808", -1},
    };
    int64_t step;

    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        step = -1;
        if (!step_of_name(names[i].name, &step))
            step = -1;
        if (step != names[i].step)
            fail_msg("%s: %ld, want %ld", names[i].name, (long)step,
                     (long)names[i].step);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_of_steps),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
