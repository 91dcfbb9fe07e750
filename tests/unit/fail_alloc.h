/* SPDX-License-Identifier: MIT */
/*
 * tests/unit/fail_alloc.h - lets the n-th allocation fail, ours and cJSON's. Include it in
 * one file of a test that is linked with fail_alloc_dep.
 */
#ifndef UFS_TESTS_UNIT_FAIL_ALLOC_H
#define UFS_TESTS_UNIT_FAIL_ALLOC_H

#include <stdbool.h>
#include <stdlib.h>

#include <cjson/cJSON.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);

/* Allocations until one fails; 0: none will. One thread only. */
static long fail_alloc_in;

static bool fail_alloc_now(void)
{
    return fail_alloc_in > 0 && --fail_alloc_in == 0;
}

void *__wrap_malloc(size_t size)
{
    return fail_alloc_now() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    return fail_alloc_now() ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *old, size_t size)
{
    return fail_alloc_now() ? NULL : __real_realloc(old, size);
}

/* cJSON is a shared library, which --wrap does not reach. */
static inline void fail_alloc_hook_cjson(void)
{
    cJSON_Hooks hooks = {.malloc_fn = __wrap_malloc, .free_fn = free};

    cJSON_InitHooks(&hooks);
}

/*
 * for (long n = 1; fail_alloc_next(&n);) { rc = WORK; fail_alloc_end(&n, rc); } runs WORK
 * with its first, second, ... allocation failing, until none is left to fail. WORK must
 * give -ENOMEM each time and 0 in the last round.
 */
static inline bool fail_alloc_next(const long *n)
{
    fail_alloc_in = *n;
    return *n > 0;
}

static inline void fail_alloc_end(long *n, int rc)
{
    bool failed = fail_alloc_in == 0;

    fail_alloc_in = 0;
    if (rc != (failed ? -ENOMEM : 0))
        fail_msg("allocation %ld %s, but the result is %d", *n,
                 failed ? "failed" : "was not reached", rc);
    *n = failed ? *n + 1 : 0;
}

#endif
