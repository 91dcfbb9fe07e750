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

static void steps_that_lie_beside_each_other(void **state)
{
    static const char *const are[] = {
        "checkpoint-500", "checkpoint_3",       "step_20",    "step20",
        "epoch_1",        "epoch_0_step_5",     "iter_0001",  "tmp-checkpoint-500",
        "tmp_step_4",     "checkpoint-500.tmp", "step-1_tmp", "my-checkpoint-7"};
    static const char *const are_none[] = {"global_step500",
                                           "global_step500.tmp",
                                           "optimizer_0",
                                           "pytorch_model_fsdp_0",
                                           "checkpoint",
                                           "checkpoint-best",
                                           "500",
                                           "runs",
                                           "tmp",
                                           ".tmp",
                                           "tmp-",
                                           "tmp-global_step5",
                                           "mp_rank_00",
                                           "1_Pooling",
                                           "",
                                           "-5"};

    (void)state;
    for (size_t i = 0; i < sizeof are / sizeof *are; i++)
        if (!step_is_of_run(are[i]))
            fail_msg("%s is one", are[i]);
    for (size_t i = 0; i < sizeof are_none / sizeof *are_none; i++)
        if (step_is_of_run(are_none[i]))
            fail_msg("%s is none", are_none[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_of_steps),
        cmocka_unit_test(steps_that_lie_beside_each_other),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
