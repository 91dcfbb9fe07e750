/* SPDX-License-Identifier: MIT */
/* tests/unit/test_written.c - the set of files that were written through a mount. */
#include "fs/written.h"

#include <stdlib.h>
#include <sys/stat.h>

#include "base/err.h"
#include "unit.h"

enum { FILES = 700, ROUNDS = 20000 };

static struct stat file(unsigned i)
{
    return (struct stat){.st_dev = 1 + i % 3, .st_ino = 1 + i / 3 * 64};
}

/* Against a table of what is in it; numbers that are alike come and go. */
static void files_come_and_go(void **state)
{
    struct written *w;
    bool in[FILES] = {false};
    struct err e = {0};

    (void)state;
    srand(7);
    assert_ok(written_new(&w, &e), &e);
    for (unsigned round = 0; round < ROUNDS; round++) {
        unsigned i = (unsigned)rand() % FILES;
        struct stat st = file(i);

        in[i] = rand() % 2;
        if (in[i])
            written_add(w, &st);
        else
            written_remove(w, &st);
        if (round % 500)
            continue;
        for (unsigned k = 0; k < FILES; k++) {
            st = file(k);
            if (written_has(w, st.st_dev, st.st_ino) != in[k])
                fail_msg("round %u: file %u", round, k);
        }
    }
    written_free(w);
}

static void none_is_noted_without_a_set(void **state)
{
    struct stat st = file(1);

    (void)state;
    written_add(NULL, &st);
    written_remove(NULL, &st);
    assert_false(written_has(NULL, st.st_dev, st.st_ino));
    written_free(NULL);
}

static void an_empty_one_has_none(void **state)
{
    struct written *w;
    struct stat st = file(1), none = {0};
    struct err e = {0};

    (void)state;
    assert_ok(written_new(&w, &e), &e);
    written_add(w, &none);
    assert_false(written_has(w, 0, 0));
    assert_false(written_has(w, st.st_dev, st.st_ino));
    written_remove(w, &st);
    written_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(files_come_and_go),
        cmocka_unit_test(none_is_noted_without_a_set),
        cmocka_unit_test(an_empty_one_has_none),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
