/* SPDX-License-Identifier: MIT */
/* tests/unit/test_staging.c - staging directories: resumed, shared, refused, published. */
#include "save/staging.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/err.h"
#include "tests/unit/unit.h"

struct place {
    char top[32], target[64];
};

static int remove_one(const char *path, const struct stat *st, int flag,
                      struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

static int setup(void **state)
{
    struct place *p = calloc(1, sizeof *p);

    assert_non_null(p);
    strcpy(p->top, "/tmp/staging-XXXXXX");
    assert_non_null(mkdtemp(p->top));
    snprintf(p->target, sizeof p->target, "%s/run", p->top);
    *state = p;
    return 0;
}

static int teardown(void **state)
{
    struct place *p = *state;

    nftw(p->top, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(p);
    return 0;
}

static struct staging_claim whole(const struct place *p, const char *what)
{
    return (struct staging_claim){
        .target = p->target, .what = what, .part = 1, .parts = 1};
}

static struct staging *begin(const struct staging_claim *c)
{
    struct staging *s = NULL;
    struct err e = {0};

    assert_ok(staging_open(c, &s, &e), &e);
    return s;
}

static void refused(const struct staging_claim *c, int code, const char *why)
{
    struct staging *s = NULL;
    struct err e = {0};

    assert_int_equal(staging_open(c, &s, &e), code);
    assert_null(s);
    assert_has(e.text, why);
}

static void put(const struct staging *s, const char *name, const char *text)
{
    int fd = openat(staging_dir(s), name, O_WRONLY | O_CREAT | O_TRUNC, 0666);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
}

static bool exists(const struct place *p, const char *name)
{
    char path[200];

    snprintf(path, sizeof path, "%s/%s", p->top, name);
    return access(path, F_OK) == 0;
}

static void write_text(const struct place *p, const char *name, const char *text)
{
    char path[200];
    FILE *f;

    snprintf(path, sizeof path, "%s/%s", p->top, name);
    f = fopen(path, "a");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void test_publish(void **state)
{
    const struct place *p = *state;
    const struct staging_claim c = whole(p, "save one");
    struct staging *s = begin(&c);
    struct err e = {0};

    put(s, "a", "x");
    assert_false(exists(p, "run"));
    assert_ok(staging_publish(s, &e), &e);
    staging_close(s);
    assert_true(exists(p, "run/a"));
    assert_false(exists(p, ".unshard-staging-run"));
    refused(&c, -EEXIST, "is there already");
}

static void test_empty_target(void **state)
{
    const struct place *p = *state;
    const struct staging_claim c = whole(p, "save one");
    struct err e = {0};
    struct staging *s;

    assert_int_equal(mkdir(p->target, 0777), 0);
    s = begin(&c);
    put(s, "a", "x");
    assert_ok(staging_publish(s, &e), &e);
    staging_close(s);
    assert_true(exists(p, "run/a"));
}

/* Another made the target while we wrote: theirs stays. */
static void test_target_came(void **state)
{
    const struct place *p = *state;
    const struct staging_claim c = whole(p, "save one");
    struct staging *s = begin(&c);
    struct err e = {0};

    put(s, "a", "x");
    assert_int_equal(mkdir(p->target, 0777), 0);
    write_text(p, "run/theirs", "y");
    assert_true(staging_publish(s, &e) < 0);
    staging_close(s);
    assert_true(exists(p, "run/theirs"));
    assert_true(exists(p, ".unshard-staging-run/data/a"));
}

static void test_resume(void **state)
{
    const struct place *p = *state;
    const struct staging_claim c = whole(p, "save one");
    struct staging *s = begin(&c);
    struct err e = {0};
    bool done;

    assert_int_equal(staging_progress(s, 0, &done), 0);
    assert_false(done);
    put(s, "a", "x");
    assert_ok(staging_note(s, 0, 512, false, &e), &e);
    assert_ok(staging_note(s, 0, 700, true, &e), &e);
    assert_ok(staging_note(s, 1, 3, false, &e), &e);
    staging_close(s);
    /* a line that a power loss cut is none */
    write_text(p, ".unshard-staging-run/journal.1-of-1", "stage 1 units 99");
    s = begin(&c);
    assert_int_equal(staging_progress(s, 0, &done), 700);
    assert_true(done);
    assert_int_equal(staging_progress(s, 1, &done), 3);
    assert_false(done);
    /* and what is noted behind it counts */
    assert_ok(staging_note(s, 1, 5, true, &e), &e);
    staging_close(s);
    s = begin(&c);
    assert_int_equal(staging_progress(s, 1, &done), 5);
    assert_true(done);
    staging_close(s);
    assert_true(exists(p, ".unshard-staging-run/data/a"));
}

static void test_another_save(void **state)
{
    const struct place *p = *state;
    const struct staging_claim one = whole(p, "save one"), two = whole(p, "save two");
    struct staging *s = begin(&one);

    staging_close(s);
    refused(&two, -EINVAL, "holds another save");
    s = begin(&one);
    staging_close(s);
}

/* A second process is kept out while the first one lives, and only so long. */
static void test_second_process(void **state)
{
    const struct place *p = *state;
    const struct staging_claim c = whole(p, "save one");
    struct staging *s = begin(&c);
    int status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        struct staging *mine = NULL;
        struct err e = {0};

        _exit(staging_open(&c, &mine, &e) == -EBUSY ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    staging_close(s);
    s = begin(&c);
    staging_close(s);
}

static void test_parts(void **state)
{
    const struct place *p = *state;
    struct staging_claim c = whole(p, "save one"), finish = c;
    struct staging *s[3] = {0};
    struct err e = {0};
    bool done;

    finish.finish = true;
    c.parts = 3;
    refused(&finish, -EINVAL, "nothing to finish");
    for (unsigned i = 0; i < 3; i++) {
        c.part = i + 1;
        s[i] = begin(&c);
        put(s[i], i == 0 ? "a" : i == 1 ? "b" : "c", "x");
    }
    for (unsigned i = 0; i < 2; i++)
        assert_ok(staging_note(s[i], 0, 9, true, &e), &e);
    refused(&finish, -EINVAL, "part 3 of 3 is not done");
    assert_ok(staging_note(s[2], 0, 4, true, &e), &e);
    for (unsigned i = 0; i < 3; i++)
        staging_close(s[i]);
    s[0] = begin(&finish);
    staging_progress(s[0], 0, &done);
    assert_true(done);
    assert_ok(staging_publish(s[0], &e), &e);
    staging_close(s[0]);
    assert_true(exists(p, "run/a") && exists(p, "run/b") && exists(p, "run/c"));
}

static void test_part_missing(void **state)
{
    const struct place *p = *state;
    struct staging_claim c = whole(p, "save one"), finish = c, other;
    struct err e = {0};
    struct staging *s;

    finish.finish = true;
    c.parts = 2;
    s = begin(&c);
    assert_ok(staging_note(s, 0, 9, true, &e), &e);
    staging_close(s);
    refused(&finish, -EINVAL, "part 2 of 2 has not begun");
    other = c;
    other.part = 2;
    other.what = "save two";
    s = begin(&other);
    assert_ok(staging_note(s, 0, 9, true, &e), &e);
    staging_close(s);
    refused(&finish, -EINVAL, "holds another save");
}

/*
 * Killed between the rename that publishes and the removal of the journals, and then the
 * target was taken away: the next save of this name must not believe the old journals.
 */
static void test_killed_after_publication(void **state)
{
    const struct place *p = *state;
    const struct staging_claim c = whole(p, "save one");
    struct staging *s = begin(&c);
    struct err e = {0};
    char from[200], to[200];
    bool done;

    put(s, "a", "x");
    assert_ok(staging_note(s, 0, 9, true, &e), &e);
    staging_close(s);
    write_text(p, ".unshard-staging-run/published", "");
    snprintf(from, sizeof from, "%s/.unshard-staging-run/data", p->top);
    snprintf(to, sizeof to, "%s/elsewhere", p->top);
    assert_int_equal(rename(from, to), 0);
    s = begin(&c);
    assert_int_equal(staging_progress(s, 0, &done), 0);
    assert_false(done);
    staging_close(s);
    /* Just before the rename: all of it counts. */
    s = begin(&c);
    put(s, "a", "x");
    assert_ok(staging_note(s, 0, 9, true, &e), &e);
    staging_close(s);
    write_text(p, ".unshard-staging-run/published", "");
    s = begin(&c);
    assert_int_equal(staging_progress(s, 0, &done), 9);
    assert_true(done);
    staging_close(s);
}

static void test_targets(void **state)
{
    const struct place *p = *state;
    struct staging_claim c = whole(p, "save one");
    char name[400];

    c.target = "/";
    refused(&c, -EINVAL, "no name");
    c.target = "..";
    refused(&c, -EINVAL, "no name");
    snprintf(name, sizeof name, "%s/none/run", p->top);
    c.target = name;
    refused(&c, -ENOENT, "none");
    snprintf(name, sizeof name, "%s/%0256d", p->top, 1);
    refused(&c, -ENAMETOOLONG, "too long");
    snprintf(name, sizeof name, "%s/file", p->top);
    write_text(p, "file", "x");
    refused(&c, -EEXIST, "as a file");
}

/* Names as long as a file system takes them, which differ in the last byte only. */
static void test_long_names(void **state)
{
    const struct place *p = *state;
    struct staging_claim c = whole(p, "save one"), d = c;
    char first[400], second[400];
    struct staging *a, *b;
    struct err e = {0};

    snprintf(first, sizeof first, "%s/%0255d", p->top, 1);
    snprintf(second, sizeof second, "%s/%0255d", p->top, 2);
    c.target = first;
    d.target = second;
    a = begin(&c);
    b = begin(&d);
    put(a, "a", "x");
    put(b, "a", "y");
    assert_ok(staging_publish(a, &e), &e);
    assert_ok(staging_publish(b, &e), &e);
    staging_close(a);
    staging_close(b);
    assert_int_equal(access(first, F_OK), 0);
    assert_int_equal(access(second, F_OK), 0);
}

static void test_discard(void **state)
{
    const struct place *p = *state;
    const struct staging_claim c = whole(p, "save one");
    struct staging *s = begin(&c);
    struct err e = {0};

    put(s, "a", "x");
    assert_int_equal(mkdirat(staging_dir(s), "deep", 0777), 0);
    put(s, "deep/b", "y");
    assert_ok(staging_discard(s, &e), &e);
    staging_close(s);
    assert_false(exists(p, ".unshard-staging-run"));
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

/* What a mount has staged for a directory of this name is not a conversion's. */
static void test_transaction_is_left(void **state)
{
    const struct place *p = *state;
    const struct staging_claim c = whole(p, "save one");
    char path[100];

    snprintf(path, sizeof path, "%s/.unshard-staging-run", p->top);
    assert_int_equal(mkdir(path, 0711), 0);
    write_text(p, ".unshard-staging-run/journal", "of a transaction");
    refused(&c, -EBUSY, "a mount has staged files for it");
    assert_true(exists(p, ".unshard-staging-run/journal"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_publish),        TEST(test_transaction_is_left),
        TEST(test_empty_target),   TEST(test_target_came),
        TEST(test_resume),         TEST(test_another_save),
        TEST(test_second_process), TEST(test_parts),
        TEST(test_part_missing),   TEST(test_killed_after_publication),
        TEST(test_targets),        TEST(test_long_names),
        TEST(test_discard),
    };

    return cmocka_run_group_tests_name("staging", tests, NULL, NULL);
}
