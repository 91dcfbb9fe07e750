/* SPDX-License-Identifier: MIT */
/* tests/unit/test_pool.c - every piece once, from many threads, nested, with failures. */
#include "unit.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "base/err.h"
#include "base/guard.h"
#include "base/pool.h"

enum { PIECES = 1000 };

static struct pool *pool_of(unsigned threads)
{
    struct pool *p = NULL;
    struct err e = {0};

    assert_ok(pool_new(threads, &p, &e), &e);
    return p;
}

static int count_piece(void *user, size_t i, struct err *e)
{
    atomic_int *seen = user;

    (void)e;
    atomic_fetch_add(&seen[i], 1);
    return 0;
}

static void check_each_once(struct pool *p, size_t count)
{
    static atomic_int seen[PIECES];
    struct err e = {0};

    memset(seen, 0, sizeof seen);
    assert_ok(pool_each(p, count, count_piece, seen, &e), &e);
    for (size_t i = 0; i < PIECES; i++)
        assert_int_equal(seen[i], i < count ? 1 : 0);
}

static void test_every_piece_once(void **state)
{
    struct pool *p = pool_of(3);

    (void)state;
    assert_int_equal(pool_threads(p), 3);
    for (size_t count = 0; count < 20; count++)
        check_each_once(p, count);
    for (int i = 0; i < 50; i++)
        check_each_once(p, PIECES);
    pool_free(p);
}

static void test_no_pool(void **state)
{
    (void)state;
    assert_int_equal(pool_threads(NULL), 0);
    check_each_once(NULL, PIECES);
    pool_free(NULL);
}

static void test_default_size(void **state)
{
    struct pool *p = pool_of(0);

    (void)state;
    assert_in_range(pool_threads(p), 1, 256);
    check_each_once(p, PIECES);
    pool_free(p);
}

/* Returns only when all threads of a barrier are in it at once. */
static int meet(void *user, size_t i, struct err *e)
{
    (void)i;
    (void)e;
    pthread_barrier_wait(user);
    return 0;
}

static void test_workers_and_caller_run_at_once(void **state)
{
    struct pool *p = pool_of(3);
    pthread_barrier_t barrier;
    struct err e = {0};

    (void)state;
    pthread_barrier_init(&barrier, NULL, 4);
    assert_ok(pool_each(p, 4, meet, &barrier, &e), &e);
    pthread_barrier_destroy(&barrier);
    pool_free(p);
}

/* Three levels of pool_each() within each other. */
struct nest {
    struct pool *pool;
    unsigned level;
    atomic_int *leaves;
};

static int nest_piece(void *user, size_t i, struct err *e)
{
    const struct nest *n = user;
    struct nest inner = {n->pool, n->level + 1, n->leaves};

    (void)i;
    if (n->level == 3) {
        atomic_fetch_add(n->leaves, 1);
        return 0;
    }
    return pool_each(n->pool, 7, nest_piece, &inner, e);
}

static void *nest_thread(void *user)
{
    struct nest *n = user;
    struct err e = {0};

    for (int i = 0; i < 20; i++)
        if (pool_each(n->pool, 7, nest_piece, n, &e) != 0)
            return user;
    return NULL;
}

static void test_nested_from_several_threads(void **state)
{
    (void)state;
    for (unsigned workers = 1; workers <= 4; workers++) {
        struct pool *p = pool_of(workers);
        atomic_int leaves = 0;
        struct nest n = {p, 0, &leaves};
        pthread_t threads[4];
        void *result;

        for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
            assert_int_equal(pthread_create(&threads[i], NULL, nest_thread, &n), 0);
        for (size_t i = 0; i < ARRAY_SIZE(threads); i++) {
            assert_int_equal(pthread_join(threads[i], &result), 0);
            assert_null(result);
        }
        assert_int_equal(leaves, 4 * 20 * 7 * 7 * 7 * 7);
        pool_free(p);
    }
}

/* All workers are stuck in one job; another caller still gets its work done. */
struct stuck {
    pthread_barrier_t in, out;
    struct pool *pool;
};

static int stuck_piece(void *user, size_t i, struct err *e)
{
    struct stuck *s = user;

    (void)i;
    (void)e;
    pthread_barrier_wait(&s->in);
    pthread_barrier_wait(&s->out);
    return 0;
}

static void *stuck_thread(void *user)
{
    struct stuck *s = user;
    struct err e = {0};

    pool_each(s->pool, 3, stuck_piece, s, &e);
    return NULL;
}

static void test_caller_works_when_workers_are_busy(void **state)
{
    struct stuck s = {.pool = pool_of(2)};
    pthread_t thread;

    (void)state;
    pthread_barrier_init(&s.in, NULL, 4);
    pthread_barrier_init(&s.out, NULL, 4);
    assert_int_equal(pthread_create(&thread, NULL, stuck_thread, &s), 0);
    pthread_barrier_wait(&s.in);
    check_each_once(s.pool, PIECES);
    pthread_barrier_wait(&s.out);
    assert_int_equal(pthread_join(thread, NULL), 0);
    pthread_barrier_destroy(&s.in);
    pthread_barrier_destroy(&s.out);
    pool_free(s.pool);
}

/* Pieces 0, 1 and 2 run at once and fail in the order 2, 1, 0. */
struct failing {
    pthread_barrier_t together;
    atomic_int turn, calls;
};

static int fail_backwards(void *user, size_t i, struct err *e)
{
    struct failing *f = user;

    atomic_fetch_add(&f->calls, 1);
    pthread_barrier_wait(&f->together);
    while (atomic_load(&f->turn) != (int)i)
        sched_yield();
    err_set(e, EIO, "piece %zu", i);
    atomic_fetch_sub(&f->turn, 1);
    return -EIO;
}

static void test_lowest_failure_and_no_new_calls(void **state)
{
    struct pool *p = pool_of(2);
    struct failing f = {.turn = 2};
    struct err e = {0};

    (void)state;
    pthread_barrier_init(&f.together, NULL, 3);
    assert_int_equal(pool_each(p, 3, fail_backwards, &f, &e), -EIO);
    assert_string_equal(e.text, "piece 0");
    assert_int_equal(f.calls, 3);
    pthread_barrier_destroy(&f.together);
    pool_free(p);
}

/* Piece 10 fails; how far the others got is counted. */
static int fail_tenth(void *user, size_t i, struct err *e)
{
    atomic_fetch_add((atomic_int *)user, 1);
    return i == 10 ? err_set(e, ESTALE, "piece %zu", i) : 0;
}

static void test_failure_ends_the_rest(void **state)
{
    struct pool *p = pool_of(3);

    (void)state;
    for (int round = 0; round < 200; round++) {
        atomic_int calls = 0;
        struct err e = {0};

        assert_int_equal(
            pool_each(round % 2 ? p : NULL, 1000000, fail_tenth, &calls, &e), -ESTALE);
        assert_string_equal(e.text, "piece 10");
        assert_in_range(calls, 11, round % 2 ? 999999 : 11);
    }
    check_each_once(p, PIECES); /* the pool is as good as new */
    pool_free(p);
}

/* A page behind the end of its file: what is left of a shard that was cut. */
static int touch_page(void *user)
{
    return *(volatile char *)user;
}

static int touch_guarded(void *user, size_t i, struct err *e)
{
    (void)i;
    return guard_run(touch_page, user) == -EIO ? 0 : err_set(e, EFAULT, "not caught");
}

/* More pieces than the caller can take before the workers have had some. */
static void test_a_cut_file_is_caught_on_every_thread(void **state)
{
    struct pool *p = pool_of(3);
    int fd = memfd_create("cut", MFD_CLOEXEC);
    struct err e = {0};
    void *map;

    (void)state;
    assert_int_equal(guard_install(), 0);
    assert_int_equal(ftruncate(fd, 4096), 0);
    map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(map, MAP_FAILED);
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_ok(pool_each(p, 20000, touch_guarded, map, &e), &e);
    munmap(map, 4096);
    close(fd);
    pool_free(p);
}

/* ---- work that nobody waits for ---- */

struct later {
    atomic_uint ran, given_back;
    atomic_bool hold;
};

static void later_piece(void *user, bool run)
{
    struct later *l = user;

    while (run && atomic_load(&l->hold))
        usleep(100);
    atomic_fetch_add(run ? &l->ran : &l->given_back, 1);
}

/* As many as workers are taken; those that have not begun at the end are given back. */
static void test_later(void **state)
{
    struct later l = {.hold = true};
    struct pool *p = NULL;
    struct err e = {0};
    unsigned taken = 0;

    (void)state;
    assert_false(pool_later(NULL, later_piece, &l));
    assert_ok(pool_new(2, &p, &e), &e);
    while (pool_later(p, later_piece, &l))
        taken++;
    assert_int_equal(taken, 2);
    atomic_store(&l.hold, false);
    for (int i = 0; atomic_load(&l.ran) < taken && i < 600000; i++)
        usleep(100);
    assert_int_equal(l.ran, 2);
    for (int i = 0; !pool_later(p, later_piece, &l) && i < 600000; i++)
        usleep(100);
    pool_free(p);
    assert_int_equal(l.ran + l.given_back, 3);
}

/* It keeps no worker from what somebody waits for. */
static void test_later_comes_after(void **state)
{
    enum { COUNT = 1000 };
    atomic_int seen[COUNT] = {0};
    struct later l = {0};
    struct pool *p = NULL;
    struct err e = {0};

    (void)state;
    assert_ok(pool_new(3, &p, &e), &e);
    for (int i = 0; i < 50; i++) {
        (void)pool_later(p, later_piece, &l);
        assert_ok(pool_each(p, COUNT, count_piece, seen, &e), &e);
    }
    pool_free(p);
    for (int i = 0; i < COUNT; i++)
        assert_int_equal(seen[i], 50);
    assert_true(l.ran + l.given_back > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_later),
        cmocka_unit_test(test_later_comes_after),
        cmocka_unit_test(test_every_piece_once),
        cmocka_unit_test(test_no_pool),
        cmocka_unit_test(test_default_size),
        cmocka_unit_test(test_workers_and_caller_run_at_once),
        cmocka_unit_test(test_nested_from_several_threads),
        cmocka_unit_test(test_caller_works_when_workers_are_busy),
        cmocka_unit_test(test_lowest_failure_and_no_new_calls),
        cmocka_unit_test(test_failure_ends_the_rest),
        cmocka_unit_test(test_a_cut_file_is_caught_on_every_thread),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
