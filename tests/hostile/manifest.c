/* SPDX-License-Identifier: MIT */
/* tests/hostile/manifest.c - one test a row, and one look at the process behind them. */
#include "tests/hostile/manifest.h"

#include "tests/unit/unit.h"

#include <limits.h>
#include <stdio.h>
#include <time.h>

#include "base/err.h"
#include "base/guard.h"
#include "base/json.h"

enum { MAX_MANIFEST = 1 << 20, MAX_CASES = 256 };

double cpu_seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* The slowest case takes 0.3 s on one machine; what is to be found takes hours on any. */
double cpu_allowed(void)
{
#ifdef __SANITIZE_ADDRESS__
    return 30;
#else
    return getenv("UNSHARD_VALGRIND") ? 60 : 10;
#endif
}

/*
 * KiB that were resident at most. Not by getrusage(2), which counts what the process was
 * before it became this program: a copy of whoever runs the tests.
 */
static long most_resident(void)
{
    char line[256];
    long kib = -1;
    FILE *f = fopen("/proc/self/status", "re");

    assert_non_null(f);
    while (kib < 0 && fgets(line, sizeof line, f))
        if (strncmp(line, "VmHWM:", 6) == 0)
            kib = strtol(line + 6, NULL, 10);
    fclose(f);
    assert_true(kib > 0);
    return kib;
}

static void test_after(void **state)
{
    long kib = most_resident();

    (void)state;
    assert_int_equal(access("PWNED", F_OK), -1);
    print_message("# at most %ld KiB resident\n", kib);
#ifndef __SANITIZE_ADDRESS__
    if (!getenv("UNSHARD_VALGRIND"))
        assert_true(kib < 64 * 1024);
#endif
}

static struct json *manifest_of(const char *data, const char *kind)
{
    char path[PATH_MAX];
    CLEANUP_FREE char *text = malloc(MAX_MANIFEST);
    struct json *doc = NULL;
    struct err e = {0};
    FILE *f;

    snprintf(path, sizeof path, "%s/%s.json", data, kind);
    f = fopen(path, "rb");
    if (!f || !text)
        return NULL;
    json_parse(text, fread(text, 1, MAX_MANIFEST, f), NULL, &doc, &e);
    fclose(f);
    return doc;
}

int manifest_run(int argc, char **argv, const char *kind, void (*test)(void **state))
{
    static struct CMUnitTest tests[MAX_CASES + 1];
    static struct row rows[MAX_CASES];
    struct json *doc;
    size_t count = 0;
    int rc;

    if (argc != 2 || guard_install() < 0 || access("PWNED", F_OK) == 0)
        return 2;
    doc = manifest_of(argv[1], kind);
    if (json_count(doc) == 0 || json_count(doc) > MAX_CASES)
        return 2; /* a test that looked at nothing has not passed */
    for (const struct json *v = json_first(doc); v; v = json_next(v), count++) {
        struct row *row = &rows[count];

        row->data = argv[1];
        if (!json_string(json_get(v, "file"), &row->file) ||
            !json_string(json_get(v, "verdict"), &row->verdict))
            return 2;
        tests[count] = (struct CMUnitTest){
            .name = row->file, .test_func = test, .initial_state = row};
    }
    tests[count++] = (struct CMUnitTest){.name = "after all", .test_func = test_after};
    rc = _cmocka_run_group_tests(kind, tests, count, NULL, NULL);
    json_free(doc);
    return rc;
}
