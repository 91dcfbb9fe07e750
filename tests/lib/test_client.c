/* SPDX-License-Identifier: MIT */
/* tests/lib/test_client.c - libunshard as a C program calls it. */
#include "lib/unshard.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/unit/unit.h"

static struct unshard *open_it(void **state)
{
    const struct unshard_options o = {.size = sizeof o, .index_memory = 1};
    char error[UNSHARD_ERROR] = "";
    struct unshard *u;

    if (unshard_open(*state, &o, &u, error) < 0)
        fail_msg("%s", error);
    return u;
}

static void test_tensors(void **state)
{
    struct unshard *u = open_it(state);
    struct unshard_tensor t, before = {.key = "", .key_len = 0};
    size_t number;

    assert_true(unshard_count(u) > 20);
    for (size_t i = 0; i < unshard_count(u); i++) {
        assert_int_equal(unshard_tensor(u, i, &t), 0);
        assert_true(strcmp(before.key, t.key) < 0);
        assert_int_equal(unshard_find(u, t.key, t.key_len, &number), 0);
        assert_int_equal(number, i);
        before = t;
    }
    assert_int_equal(unshard_tensor(u, unshard_count(u), &t), -ENOENT);
    assert_int_equal(unshard_find(u, "nothing", 7, &number), -ENOENT);
    unshard_close(u);
    unshard_close(NULL);
}

static void test_measure_and_load(void **state)
{
    struct unshard *u = open_it(state);
    const uint64_t start[] = {1, 0}, count[] = {2, 3}, far[] = {1, 1000000};
    struct unshard_part p = {
        .size = sizeof p, .start = start, .count = count, .dtype = "BF16"};
    struct unshard_result r;
    char error[UNSHARD_ERROR] = "";
    uint16_t out[6];

    assert_int_equal(unshard_find(u, "model.emb.weight", 16, &p.tensor), 0);
    assert_int_equal(unshard_measure(u, &p, &r, error), 0);
    assert_int_equal(r.bytes, 12);
    assert_int_equal(r.nd, 2);
    assert_int_equal(r.shape[0], 2);
    assert_int_equal(r.shape[1], 3);
    assert_string_equal(r.dtype, "BF16");
    p.address = (uintptr_t)out;
    p.bytes = 11;
    assert_int_equal(unshard_load(u, &p, 1, UNSHARD_HOST, NULL, NULL, NULL, error),
                     -EINVAL);
    assert_has(error, "the result has 12");
    p.bytes = 12;
    assert_int_equal(unshard_load(u, &p, 1, UNSHARD_HOST, NULL, NULL, NULL, error), 0);
    p.count = far;
    assert_int_equal(unshard_measure(u, &p, &r, error), -EINVAL);
    assert_has(error, "1000000 from 0");
    p.count = NULL;
    assert_int_equal(unshard_measure(u, &p, &r, NULL), -EINVAL);
    p.start = NULL;
    p.dtype = "X9";
    assert_int_equal(unshard_measure(u, &p, &r, error), -EINVAL);
    p.tensor = unshard_count(u);
    assert_int_equal(unshard_measure(u, &p, &r, error), -ENOENT);
    unshard_close(u);
}

/* A program of an older header has shorter structs. */
static void test_shorter_structs(void **state)
{
    const struct unshard_options o = {.size = offsetof(struct unshard_options, map),
                                      .index_memory = 1,
                                      .map = "no such map"};
    struct unshard_part p = {.size = offsetof(struct unshard_part, scale),
                             .scale = (const float *)1};
    struct unshard_result r;
    struct unshard *u;
    char error[UNSHARD_ERROR] = "";

    if (unshard_open(*state, &o, &u, error) < 0)
        fail_msg("%s", error);
    assert_int_equal(unshard_measure(u, &p, &r, error), 0);
    unshard_close(u);
}

static void test_errors(void **state)
{
    struct unshard *u = (struct unshard *)1;
    char error[UNSHARD_ERROR] = "";

    (void)state;
    assert_int_equal(unshard_open("/nowhere/at/all", NULL, &u, error), -ENOENT);
    assert_null(u);
    assert_has(error, "/nowhere/at/all");
    assert_int_equal(unshard_open("/nowhere/at/all", NULL, &u, NULL), -ENOENT);
}

static void test_factors_without_blocks(void **state)
{
    const float one = 1;
    struct unshard_part p = {.size = sizeof p, .scale = &one, .scales = 1};
    struct unshard_result r;
    struct unshard *u = open_it(state);
    char error[UNSHARD_ERROR] = "", memory[1];

    assert_int_equal(unshard_find(u, "model.emb.weight", 16, &p.tensor), 0);
    assert_int_equal(unshard_measure(u, &p, &r, error), -EINVAL);
    assert_has(error, "block");
    p.address = (uintptr_t)memory;
    assert_int_equal(unshard_load(u, &p, 1, UNSHARD_HOST, NULL, NULL, NULL, error),
                     -EINVAL);
    unshard_close(u);
}

static int stop_it(void *user, uint64_t done, uint64_t total)
{
    (void)done;
    (void)total;
    ++*(int *)user;
    return 1;
}

static void test_watch(void **state)
{
    struct unshard *u = open_it(state);
    struct unshard_tensor t;
    struct unshard_part p = {.size = sizeof p};
    char error[UNSHARD_ERROR] = "";
    int told = 0;

    unshard_tensor(u, 0, &t);
    p.bytes = t.bytes;
    p.address = (uintptr_t)malloc(t.bytes + 1);
    assert_int_equal(unshard_load(u, &p, 1, UNSHARD_HOST, stop_it, &told, NULL, error),
                     -ECANCELED);
    assert_int_equal(told, 1);
    free((void *)(uintptr_t)p.address);
    unshard_close(u);
}

struct all {
    struct unshard *u;
    uint64_t sum;
};

/* Every tensor, one after the other. */
static void *load_all(void *user)
{
    struct all *a = user;

    for (size_t i = 0; i < unshard_count(a->u); i++) {
        struct unshard_tensor t;
        struct unshard_part p = {.size = sizeof p, .tensor = i};
        unsigned char *data;

        unshard_tensor(a->u, i, &t);
        data = malloc(t.bytes + 1);
        p.bytes = t.bytes;
        p.address = (uintptr_t)data;
        if (unshard_load(a->u, &p, 1, UNSHARD_HOST, NULL, NULL, NULL, NULL) < 0)
            a->sum += UINT32_MAX;
        for (uint64_t k = 0; k < t.bytes; k++)
            a->sum += data[k] * (k % 251 + 1);
        free(data);
    }
    return NULL;
}

static void test_threads(void **state)
{
    struct unshard *u = open_it(state);
    struct all a[4] = {{u, 0}, {u, 0}, {u, 0}, {u, 0}};
    pthread_t thread[4];

    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, load_all, &a[i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    for (int i = 1; i < 4; i++)
        assert_int_equal(a[i].sum, a[0].sum);
    unshard_close(u);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(test_tensors, argv[1]),
        cmocka_unit_test_prestate(test_measure_and_load, argv[1]),
        cmocka_unit_test_prestate(test_shorter_structs, argv[1]),
        cmocka_unit_test_prestate(test_errors, argv[1]),
        cmocka_unit_test_prestate(test_factors_without_blocks, argv[1]),
        cmocka_unit_test_prestate(test_watch, argv[1]),
        cmocka_unit_test_prestate(test_threads, argv[1]),
    };

    return argc == 2 ? cmocka_run_group_tests(tests, NULL, NULL) : 1;
}
