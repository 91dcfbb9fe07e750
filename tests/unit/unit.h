/* SPDX-License-Identifier: MIT */
/* tests/unit/unit.h - cmocka and what it needs, and checks that print what they saw. */
#ifndef UFS_TESTS_UNIT_UNIT_H
#define UFS_TESTS_UNIT_UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

/* A function that returned 0, or else its error is printed. */
#define assert_ok(rc, e)                                                               \
    do {                                                                               \
        int ok_rc_ = (rc);                                                             \
                                                                                       \
        if (ok_rc_ != 0)                                                               \
            fail_msg("%s: %d, %s", #rc, ok_rc_, (e)->text);                            \
    } while (0)

/* Text that has `part` in it. */
#define assert_has(text, part)                                                         \
    do {                                                                               \
        if (!strstr((text), (part)))                                                   \
            fail_msg("no \"%s\" in \"%s\"", (part), (text));                           \
    } while (0)

/*
 * Ends a test that cannot be made here. cmocka 1.1.7 reports its skip() as "not ok N # SKIP",
 * which is a failure to meson.
 */
#define leave_out(why)                                                                 \
    do {                                                                               \
        print_message("# left out: %s\n", (why));                                      \
        return;                                                                        \
    } while (0)

#endif
