/* SPDX-License-Identifier: MIT */
/* tests/unit/test_remote_blocks.c - pieces of known size, in memory and in files; fill values. */
#include "remote_tmp.h"

#include <pthread.h>
#include <stdatomic.h>

#include "base/err.h"
#include "remote/decoded.h"
#include "remote/source.h"

enum { THREADS = 8, MIB = 1 << 20, PATIENCE_MS = 60000 };

/* Fills a piece with its number; counts. */
struct filler {
    atomic_uint calls, under_way, most;
    unsigned delay_us;
    unsigned together; /* so many must be under way at once before one goes on */
    int fail;
};

static int fill(void *user, struct source *in, void *dst, size_t size, struct err *e)
{
    struct filler *f = user;
    unsigned now = atomic_fetch_add(&f->under_way, 1) + 1, most;
    unsigned char byte;
    int rc;

    for (most = atomic_load(&f->most);
         now > most && !atomic_compare_exchange_weak(&f->most, &most, now);)
        continue;
    atomic_fetch_add(&f->calls, 1);
    for (int ms = 0; ms < PATIENCE_MS && atomic_load(&f->most) < f->together; ms++)
        usleep(1000);
    usleep(f->delay_us);
    rc = source_read(in, 0, 1, &byte, e);
    if (rc == 0 && f->fail)
        rc = err_set(e, -f->fail, "broken on purpose");
    if (rc == 0)
        memset(dst, byte, size);
    atomic_fetch_sub(&f->under_way, 1);
    return rc;
}

static struct decoded_cache *cache_of(const struct tmp *t, uint64_t budget)
{
    struct decoded_cache *c = NULL;
    struct err e = {0};

    assert_ok(decoded_new(tmp_at(t, "cache"), budget, &c, &e), &e);
    return c;
}

static int get_block(struct decoded_cache *c, unsigned char n, size_t size,
                     struct filler *f, struct source **out, struct err *e)
{
    const struct decoded_key key = {.dev = 1, .ino = 2, .off = n, .len = 1};
    CLEANUP(source_putp) struct source *in = NULL;
    unsigned char byte = n;

    assert_ok(source_from_memory(&byte, 1, false, "shard", &in, e), e);
    return decoded_get_block(c, &key, in, size, fill, f, out, e);
}

static void check_block(const struct source *s, unsigned char n, size_t size)
{
    const unsigned char *map = source_map((struct source *)(uintptr_t)s);

    assert_int_equal(s->size, size);
    assert_non_null(map);
    for (size_t i = 0; i < size; i += 997)
        assert_int_equal(map[i], n);
    assert_int_equal(map[size - 1], n);
}

static void use_block(struct decoded_cache *c, unsigned char n, size_t size,
                      struct filler *f)
{
    CLEANUP(source_putp) struct source *s = NULL;
    struct err e = {0};

    assert_ok(get_block(c, n, size, f, &s, &e), &e);
    check_block(s, n, size);
}

/* Short ones need no file. */
static void test_short_pieces_lie_in_memory(void **state)
{
    struct decoded_cache *c = cache_of(*state, 1ull << 30);
    unsigned before = tmp_open_fds();
    struct filler f = {0};

    for (unsigned char n = 1; n <= 3; n++)
        use_block(c, n, 5 * MIB, &f);
    assert_int_equal(tmp_open_fds(), before);
    for (unsigned char n = 1; n <= 3; n++)
        use_block(c, n, 5 * MIB, &f);
    assert_int_equal(f.calls, 3);
    decoded_free(c);
}

static void test_long_pieces_lie_in_files(void **state)
{
    enum { SIZE = DECODED_MEMORY / 4 + 1 };
    struct decoded_cache *c = cache_of(*state, 1ull << 30);
    unsigned before = tmp_open_fds();
    struct filler f = {0};

    use_block(c, 1, SIZE, &f);
    assert_int_equal(tmp_open_fds(), before + 1);
    use_block(c, 1, SIZE, &f);
    assert_int_equal(f.calls, 1);
    decoded_free(c);
    assert_int_equal(tmp_open_fds(), before);
}

/*
 * More than memory holds: the oldest goes. Wanted again it is decoded once more, into a
 * file, where it stays.
 */
static void test_memory_is_bounded(void **state)
{
    enum { SIZE = DECODED_MEMORY / 8 - 4096 };
    struct decoded_cache *c = cache_of(*state, 1ull << 30);
    unsigned before = tmp_open_fds();
    struct filler f = {0};

    for (unsigned char n = 1; n <= 9; n++)
        use_block(c, n, SIZE, &f);
    assert_int_equal(f.calls, 9);
    assert_int_equal(tmp_open_fds(), before);
    use_block(c, 2, SIZE, &f);
    assert_int_equal(f.calls, 9);
    use_block(c, 1, SIZE, &f);
    assert_int_equal(f.calls, 10);
    assert_int_equal(tmp_open_fds(), before + 1);
    for (unsigned char n = 1; n <= 9; n++)
        use_block(c, n, SIZE, &f);
    assert_int_equal(f.calls, 10);
    decoded_free(c);
}

/* What was read to its end goes first, and its memory is the next one's. */
static void test_used_up_pieces_go_first(void **state)
{
    struct decoded_cache *c = cache_of(*state, 1ull << 30);
    CLEANUP(source_putp) struct source *next = NULL;
    struct source *first = NULL;
    struct filler f = {0};
    struct err e = {0};
    const void *memory;

    use_block(c, 1, 4 * MIB, &f);
    assert_ok(get_block(c, 2, 4 * MIB, &f, &first, &e), &e);
    memory = source_map(first);
    atomic_store(&first->used_up, true);
    source_put(first);
    assert_ok(get_block(c, 3, 4 * MIB, &f, &next, &e), &e);
    assert_ptr_equal(source_map(next), memory);
    check_block(next, 3, 4 * MIB);
    use_block(c, 1, 4 * MIB, &f);
    assert_int_equal(f.calls, 3);
    source_put(steal(&next));
    decoded_free(c);
}

/* Tiny ones count for what it costs to know them, and never are files. */
static void test_tiny_pieces(void **state)
{
    struct decoded_cache *c = cache_of(*state, 1 << 20);
    unsigned before = tmp_open_fds();
    struct filler f = {0};

    for (int round = 1; round <= 3; round++) {
        for (unsigned n = 0; n < 250; n++)
            use_block(c, (unsigned char)n, 16, &f);
        assert_int_equal(f.calls, 250);
    }
    for (unsigned n = 0; n < 1000; n++) {
        const struct decoded_key key = {.dev = 9, .ino = n};
        CLEANUP(source_putp) struct source *in = NULL, *out = NULL;
        struct err e = {0};

        assert_ok(source_from_memory("x", 1, false, "shard", &in, &e), &e);
        assert_ok(decoded_get_block(c, &key, in, 16, fill, &f, &out, &e), &e);
    }
    use_block(c, 1, 16, &f);
    assert_int_equal(f.calls, 1251); /* it had to go, and comes back */
    assert_int_equal(tmp_open_fds(), before);
    decoded_free(c);
}

/* A piece that somebody reads keeps its memory whatever comes. */
static void test_what_is_read_stays(void **state)
{
    enum { SIZE = DECODED_MEMORY / 4, HELD = 5 };
    struct decoded_cache *c = cache_of(*state, 1ull << 30);
    struct source *held[HELD] = {0};
    struct filler f = {0};
    struct err e = {0};

    for (unsigned char n = 0; n < HELD; n++) {
        assert_ok(get_block(c, n, SIZE, &f, &held[n], &e), &e);
        atomic_store(&held[n]->used_up, true);
    }
    for (unsigned char n = 0; n < HELD; n++)
        check_block(held[n], n, SIZE);
    for (unsigned n = 0; n < HELD; n++)
        source_put(held[n]);
    decoded_free(c);
}

static void test_the_budget_counts(void **state)
{
    struct decoded_cache *c = cache_of(*state, 3 * MIB);
    CLEANUP(source_putp) struct source *s = NULL;
    struct filler f = {0};
    struct err e = {0};

    for (unsigned char n = 1; n <= 9; n++)
        use_block(c, n, MIB, &f);
    assert_int_equal(get_block(c, 99, 4 * MIB, &f, &s, &e), -ENOSPC);
    assert_has(e.hint, "cache_size");
    decoded_free(c);
}

static void test_a_failure_is_not_kept(void **state)
{
    struct decoded_cache *c = cache_of(*state, 1ull << 30);
    struct source *s = NULL;
    struct filler f = {.fail = -EBADMSG};
    struct err e = {0};

    assert_int_equal(get_block(c, 1, MIB, &f, &s, &e), -EBADMSG);
    assert_int_equal(get_block(c, 2, DECODED_MEMORY, &f, &s, &e), -EBADMSG);
    f.fail = 0;
    use_block(c, 1, MIB, &f);
    use_block(c, 2, DECODED_MEMORY, &f);
    assert_int_equal(f.calls, 4);
    decoded_free(c);
}

struct reader {
    struct decoded_cache *c;
    struct filler *f;
    unsigned char first;
    pthread_barrier_t *start;
};

static void *read_one(void *user)
{
    const struct reader *r = user;

    pthread_barrier_wait(r->start);
    use_block(r->c, r->first, MIB, r->f);
    return NULL;
}

/* `step` 0: all want one piece; 1: each its own. */
static void read_in_threads(struct decoded_cache *c, struct filler *f, unsigned step)
{
    struct reader reader[THREADS];
    pthread_barrier_t start;
    pthread_t thread[THREADS];

    pthread_barrier_init(&start, NULL, THREADS);
    for (unsigned i = 0; i < THREADS; i++) {
        reader[i] = (struct reader){c, f, (unsigned char)(1 + i * step), &start};
        assert_int_equal(pthread_create(&thread[i], NULL, read_one, &reader[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    pthread_barrier_destroy(&start);
}

static void test_many_readers_of_one_piece(void **state)
{
    struct decoded_cache *c = cache_of(*state, 1ull << 30);
    struct filler f = {.delay_us = 20000};

    read_in_threads(c, &f, 0);
    assert_int_equal(f.calls, 1);
    decoded_free(c);
}

static void test_several_pieces_at_once(void **state)
{
    struct decoded_cache *c = cache_of(*state, 1ull << 30);
    struct filler f = {.together = 2};

    read_in_threads(c, &f, 1);
    assert_int_equal(f.calls, THREADS);
    assert_true(f.most > 1);
    decoded_free(c);
}

/* ---- one value over and over ---- */

static void test_fill(void **state)
{
    static const char value[] = "0123456789abcdef"; /* 16 bytes, and a NUL */

    (void)state;
    for (unsigned unit = 1; unit <= 16; unit++) {
        CLEANUP(source_putp) struct source *s = NULL;
        unsigned char got[70];
        struct err e = {0};

        assert_ok(source_from_fill(value, unit, UINT64_C(1) << 60, &s, &e), &e);
        for (uint64_t off = (UINT64_C(1) << 59) - 9; off < (UINT64_C(1) << 59); off++)
            for (size_t len = 0; len <= sizeof got; len += 7) {
                memset(got, 0xee, sizeof got);
                assert_ok(source_read(s, off, len, got, &e), &e);
                for (size_t i = 0; i < sizeof got; i++)
                    assert_int_equal(got[i], i < len ? value[(off + i) % unit] : 0xee);
            }
        assert_int_equal(source_read(s, UINT64_C(1) << 60, 1, got, &e), -EBADMSG);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        tmp_test(test_short_pieces_lie_in_memory),
        tmp_test(test_long_pieces_lie_in_files),
        tmp_test(test_memory_is_bounded),
        tmp_test(test_used_up_pieces_go_first),
        tmp_test(test_tiny_pieces),
        tmp_test(test_what_is_read_stays),
        tmp_test(test_the_budget_counts),
        tmp_test(test_a_failure_is_not_kept),
        tmp_test(test_many_readers_of_one_piece),
        tmp_test(test_several_pieces_at_once),
        cmocka_unit_test(test_fill),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
