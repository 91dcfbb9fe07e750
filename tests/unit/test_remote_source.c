/* SPDX-License-Identifier: MIT */
/* tests/unit/test_remote_source.c - sources: memory, file, window, faults on purpose. */
#include "remote_tmp.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "base/err.h"
#include "base/guard.h"
#include "remote/source.h"

#include "fail_alloc.h"

static struct source *memory(const char *text)
{
    struct source *s = NULL;
    struct err e = {0};

    assert_ok(source_from_memory(text, strlen(text), false, "mem", &s, &e), &e);
    return s;
}

static struct source *file(const struct tmp *t, const char *name)
{
    struct source *s = NULL;
    struct err e = {0};

    assert_ok(source_from_fd(open(tmp_at(t, name), O_RDONLY | O_CLOEXEC), name, &s, &e),
              &e);
    return s;
}

static void test_ranges_are_checked(void **state)
{
    static const struct {
        uint64_t off;
        size_t len;
        int rc;
    } cases[] = {
        {0, 10, 0},
        {9, 1, 0},
        {10, 0, 0},
        {10, 1, -EBADMSG},
        {0, 11, -EBADMSG},
        {11, 0, -EBADMSG},
        {UINT64_MAX, 2, -EBADMSG},
        {5, SIZE_MAX, -EBADMSG},
    };
    struct source *s = memory("0123456789");
    char dst[16];

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct source_range r = {cases[i].off, cases[i].len, dst};
        struct err e = {0};
        int rc = source_read(s, cases[i].off, cases[i].len, dst, &e);
        int many = source_read_many(s, &r, 1, &e);

        if (rc != cases[i].rc || many != cases[i].rc)
            fail_msg("case %zu: %d and %d, not %d", i, rc, many, cases[i].rc);
        if (rc == 0 && memcmp(dst, &"0123456789"[cases[i].off], cases[i].len) != 0)
            fail_msg("case %zu: wrong bytes", i);
    }
    source_put(s);
}

static void test_a_message_names_file_and_bytes(void **state)
{
    struct source *s = memory("0123456789");
    struct err e = {0};
    char dst[16];

    (void)state;
    assert_int_equal(source_read(s, 8, 5, dst, &e), -EBADMSG);
    assert_string_equal(e.text, "mem: bytes 8+5 lie outside its 10 bytes");
    source_put(s);
}

static void test_memory_is_owned_or_borrowed(void **state)
{
    struct err e = {0};
    struct source *s = NULL;
    char *own = strdup("abc"); /* the leak checker sees when it is not freed */

    (void)state;
    assert_ok(source_from_memory(own, 3, true, "m", &s, &e), &e);
    assert_ptr_equal(source_map(s), own);
    assert_true(source_resident(s, 0, 3));
    assert_int_equal(source_check(s, &e), 0);
    source_putp(&s);
    assert_null(s);
    source_putp(&s);
}

static void test_file_reads_maps_and_checks(void **state)
{
    const struct tmp *t = *state;
    struct err e = {0};
    struct source *s;
    const char *map;
    char dst[8] = "";
    struct stat st;

    tmp_file(t, "a", "hello world");
    s = file(t, "a");
    assert_int_equal(stat(tmp_at(t, "a"), &st), 0);
    assert_int_equal(s->size, 11);
    assert_int_equal(s->id.ino, st.st_ino);
    assert_int_equal(s->id.size, 11);
    assert_ok(source_read(s, 6, 5, dst, &e), &e);
    assert_string_equal(dst, "world");
    map = source_map(s);
    assert_non_null(map);
    assert_memory_equal(map, "hello world", 11);
    assert_ptr_equal(source_map(s), map);
    assert_ok(source_check(s, &e), &e);
    source_put(s);
}

static void test_an_empty_file_has_no_mapping(void **state)
{
    const struct tmp *t = *state;
    struct err e = {0};
    struct source *s;
    char dst;

    tmp_file(t, "a", "");
    s = file(t, "a");
    assert_null(source_map(s));
    assert_ok(source_read(s, 0, 0, &dst, &e), &e);
    assert_int_equal(source_read(s, 0, 1, &dst, &e), -EBADMSG);
    source_put(s);
}

static void test_a_cut_file_is_noticed(void **state)
{
    const struct tmp *t = *state;
    struct err e = {0};
    struct source *s;
    char dst[8192] = "", page[8192];

    memset(page, 'x', sizeof page);
    tmp_bytes(t, "a", page, sizeof page);
    s = file(t, "a");
    assert_int_equal(truncate(tmp_at(t, "a"), 4096), 0);
    assert_int_equal(source_check(s, &e), -ESTALE);
    assert_string_equal(e.text, "a: the file changed: size 4096, was 8192");
    assert_int_equal(source_read(s, 0, 8192, dst, &e), -EBADMSG);
    assert_has(e.text, "a: file ends at byte 4096");
    assert_null(source_map(s)); /* a page of it would be missing from the start */
    source_put(s);
}

static const char *guarded_at;

static int touch(void *user)
{
    *(char *)user = guarded_at[4096];
    return 0;
}

static void test_a_cut_mapping_raises_sigbus(void **state)
{
    const struct tmp *t = *state;
    struct source *s;
    char page[8192], byte = 0;

    memset(page, 'x', sizeof page);
    tmp_bytes(t, "a", page, sizeof page);
    s = file(t, "a");
    guarded_at = source_map(s);
    assert_int_equal(guard_install(), 0);
    assert_int_equal(guard_run(touch, &byte), 0);
    assert_int_equal(byte, 'x');
    assert_int_equal(truncate(tmp_at(t, "a"), 100), 0);
    assert_int_equal(guard_run(touch, &byte), -EIO);
    source_put(s);
}

static void test_a_rewrite_in_place_is_noticed(void **state)
{
    const struct tmp *t = *state;
    struct err e = {0};
    struct source *s;

    tmp_file(t, "a", "old bytes");
    s = file(t, "a");
    usleep(20000); /* coarse clocks tick every 4 or 10 ms */
    tmp_file(t, "a", "new bytes");
    assert_int_equal(source_check(s, &e), -ESTALE);
    assert_has(e.text, "a: the file changed: mtime ");
    source_put(s);
}

static void test_a_restored_mtime_is_noticed(void **state)
{
    const struct tmp *t = *state;
    struct err e = {0};
    struct source *s;
    struct stat st;

    tmp_file(t, "a", "old bytes");
    s = file(t, "a");
    assert_int_equal(stat(tmp_at(t, "a"), &st), 0);
    usleep(20000);
    tmp_file(t, "a", "new bytes");
    assert_int_equal(utimensat(AT_FDCWD, tmp_at(t, "a"),
                               (struct timespec[]){st.st_atim, st.st_mtim}, 0),
                     0);
    assert_int_equal(source_check(s, &e), -ESTALE);
    assert_has(e.text, "a: the file changed: ctime ");
    source_put(s);
}

static void test_a_replaced_file_keeps_its_bytes(void **state)
{
    const struct tmp *t = *state;
    struct err e = {0};
    struct source *s;
    char dst[4] = "";

    tmp_file(t, "a", "old");
    s = file(t, "a");
    usleep(20000); /* so that unlinking shows in the ctime */
    tmp_file(t, "b", "new");
    assert_int_equal(rename(tmp_at(t, "b"), tmp_at(t, "a")), 0);
    assert_ok(source_check(s, &e), &e);
    assert_ok(source_read(s, 0, 3, dst, &e), &e);
    assert_string_equal(dst, "old");
    source_put(s);
}

static void test_a_hard_link_changes_no_bytes(void **state)
{
    const struct tmp *t = *state;
    struct err e = {0};
    struct source *s;

    tmp_file(t, "a", "bytes");
    s = file(t, "a");
    usleep(20000);
    assert_int_equal(link(tmp_at(t, "a"), tmp_at(t, "b")), 0);
    assert_ok(source_check(s, &e), &e);
    source_put(s);
}

static void test_only_regular_files(void **state)
{
    const struct tmp *t = *state;
    unsigned before = tmp_open_fds();
    struct source *s = NULL;
    struct err e = {0};
    int pair[2];

    assert_int_equal(source_from_fd(open(t->path, O_RDONLY), "dir", &s, &e), -EINVAL);
    assert_string_equal(e.text, "dir: not a regular file");
    assert_int_equal(pipe2(pair, O_CLOEXEC), 0);
    assert_int_equal(source_from_fd(pair[0], "pipe", &s, &e), -EINVAL);
    close(pair[1]);
    assert_null(s);
    assert_int_equal(tmp_open_fds(), before); /* owned also on failure */
}

/*
 * To ask whether a page is there makes the kernel (6.x) fetch it with all of its read-ahead
 * window, 8 MiB on some machines: for what is read at random it is that page alone.
 */
static void ask_for_single_pages(struct source *s)
{
    assert_int_equal(posix_fadvise(source_fd(s), 0, 0, POSIX_FADV_RANDOM), 0);
}

static void test_residence_follows_the_page_cache(void **state)
{
    const struct tmp *t = *state;
    enum { SIZE = 4 << 20 };
    CLEANUP_FREE char *data = calloc(1, SIZE);
    struct source *s;
    int fd;

    tmp_bytes(t, "a", data, SIZE);
    s = file(t, "a");
    assert_true(source_resident(s, 0, SIZE));
    assert_false(source_resident(s, 0, SIZE + 1));
    ask_for_single_pages(s);
    fd = open(tmp_at(t, "a"), O_RDONLY | O_CLOEXEC);
    assert_int_equal(fsync(fd), 0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(fd);
    if (source_resident(s, 0, 1) || source_resident(s, SIZE - 1, 1)) { /* tmpfs does */
        source_put(s);
        leave_out("this file system keeps its pages");
    }
    source_will_need(s, SIZE / 2, UINT64_MAX);
    for (int i = 0; i < 6000 && !source_resident(s, SIZE / 2, SIZE / 2); i++)
        usleep(10000);
    assert_true(source_resident(s, SIZE / 2, SIZE / 2));
    assert_false(source_resident(s, 0, SIZE));
    source_put(s);
}

enum { SHORT_SIZE = 4 << 20, SHORT_LOOKS = 201 };

static struct source *read_by_short_windows(const struct tmp *t)
{
    struct source *s = file(t, "a");

    for (uint64_t i = 0; i < SHORT_LOOKS; i++)
        assert_true(source_resident(s, i * 4096, 4096));
    return s;
}

/* In memory 201 times: 7 more are taken for it, then one is looked up, and then each. */
static void test_short_windows_are_looked_up_now_and_then(void **state)
{
    const struct tmp *t = *state;
    CLEANUP_FREE char *data = calloc(1, SHORT_SIZE);
    struct source *s, *bytes, *fresh;
    int fd, trusted = 0;
    bool kept;

    tmp_bytes(t, "a", data, SHORT_SIZE);
    s = read_by_short_windows(t);
    bytes = read_by_short_windows(t);
    fresh = file(t, "a");
    ask_for_single_pages(s);
    ask_for_single_pages(bytes);
    ask_for_single_pages(fresh);
    fd = open(tmp_at(t, "a"), O_RDONLY | O_CLOEXEC);
    assert_int_equal(fsync(fd), 0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(fd);
    kept = source_resident(fresh, 3 << 20, 4096); /* tmpfs keeps its pages */
    if (!kept) {
        assert_false(source_resident(bytes, SHORT_SIZE - 1, 1));
        assert_false(source_resident(bytes, (3 << 20) + 8192, 4096));
        while (trusted < 100 && source_resident(s, (uint64_t)trusted * 4096, 4096))
            trusted++;
        assert_int_equal(trusted, 7);
        assert_false(source_resident(s, 1 << 20, 4096));
        assert_false(source_resident(s, 2 << 20, 4096));
    }
    source_put(fresh);
    source_put(bytes);
    source_put(s);
    if (kept)
        leave_out("this file system keeps its pages");
}

static void *map_thread(void *user)
{
    return (void *)(uintptr_t)source_map(user);
}

static void test_threads_get_one_mapping(void **state)
{
    const struct tmp *t = *state;
    pthread_t threads[8];
    struct source *s;
    void *map;

    tmp_file(t, "a", "bytes");
    s = file(t, "a");
    for (int i = 0; i < 8; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, map_thread, s), 0);
    for (int i = 0; i < 8; i++) {
        assert_int_equal(pthread_join(threads[i], &map), 0);
        assert_non_null(map);
        assert_ptr_equal(map, source_map(s));
    }
    source_put(s);
}

static void test_a_window_reads_and_maps_its_part(void **state)
{
    struct source *inner = memory("0123456789"), *w = NULL, *w2 = NULL;
    struct err e = {0};
    char dst[8] = "", b[2] = "", a[2] = "";
    struct source_range ranges[] = {{3, 1, b}, {0, 1, a}};

    (void)state;
    assert_ok(source_window(inner, 2, 6, &w, &e), &e);
    assert_ok(source_window(w, 1, 4, &w2, &e), &e);
    source_put(inner); /* the windows hold it */
    assert_int_equal(w2->size, 4);
    assert_ok(source_read(w2, 0, 4, dst, &e), &e);
    assert_string_equal(dst, "3456");
    assert_ok(source_read_many(w2, ranges, 2, &e), &e);
    assert_string_equal(b, "6");
    assert_string_equal(a, "3");
    assert_memory_equal(source_map(w2), "3456", 4);
    assert_int_equal(source_read(w2, 0, 5, dst, &e), -EBADMSG);
    assert_has(e.text, "mem[2+6][1+4]: bytes 0+5 lie outside its 4 bytes");
    source_put(w);
    source_put(w2);
}

static void test_a_window_must_lie_within(void **state)
{
    struct source *inner = memory("0123456789"), *w = NULL;
    struct err e = {0};

    (void)state;
    assert_int_equal(source_window(inner, 5, 6, &w, &e), -EBADMSG);
    assert_int_equal(source_window(inner, UINT64_MAX, 2, &w, &e), -EBADMSG);
    assert_null(w);
    assert_ok(source_window(inner, 10, 0, &w, &e), &e);
    source_put(w);
    source_put(inner);
}

static void test_a_window_checks_its_file(void **state)
{
    const struct tmp *t = *state;
    struct source *inner, *w = NULL;
    struct err e = {0};

    tmp_file(t, "a", "0123456789");
    inner = file(t, "a");
    assert_ok(source_window(inner, 2, 3, &w, &e), &e);
    assert_true(file_id_equal(&w->id, &inner->id));
    assert_ok(source_check(w, &e), &e);
    assert_int_equal(truncate(tmp_at(t, "a"), 9), 0);
    assert_int_equal(source_check(w, &e), -ESTALE);
    source_put(inner);
    source_put(w);
}

static struct source *faulty(struct source_faults faults)
{
    struct source *inner = memory("0123456789"), *s = NULL;
    struct err e = {0};

    assert_ok(source_with_faults(inner, &faults, &s, &e), &e);
    source_put(inner);
    return s;
}

static void test_the_nth_read_fails(void **state)
{
    struct source *s = faulty((struct source_faults){.fail_at = 2, .code = ETIMEDOUT});
    struct err e = {0};
    char dst[4] = "";

    (void)state;
    assert_null(source_map(s)); /* or readers would go round the damage */
    assert_ok(source_read(s, 0, 1, dst, &e), &e);
    assert_int_equal(source_read(s, 0, 1, dst, &e), -ETIMEDOUT);
    assert_has(e.text, "mem: read 2 fails on purpose");
    assert_ok(source_read(s, 0, 1, dst, &e), &e);
    source_put(s);
}

static void test_each_range_counts_as_a_read(void **state)
{
    struct source *s = faulty((struct source_faults){.fail_at = 2});
    struct err e = {0};
    char a[1], b[1];

    (void)state;
    assert_int_equal(
        source_read_many(s, (struct source_range[]){{0, 1, a}, {1, 1, b}}, 2, &e),
        -EIO);
    assert_int_equal(a[0], '0');
    source_put(s);
}

static void test_reads_beyond_a_byte_fail(void **state)
{
    struct source *s = faulty((struct source_faults){.fail_from = 4});
    struct err e = {0};
    char dst[8];

    (void)state;
    assert_ok(source_read(s, 0, 4, dst, &e), &e);
    assert_int_equal(source_read(s, 3, 2, dst, &e), -EIO);
    assert_int_equal(source_read(s, 9, 1, dst, &e), -EIO);
    source_put(s);
}

static void test_stale_and_slow_on_purpose(void **state)
{
    struct source *stale = faulty((struct source_faults){.stale = true});
    struct source *slow = faulty((struct source_faults){.delay_us = 30000});
    struct timespec from, to;
    struct err e = {0};
    char dst[4];

    (void)state;
    assert_int_equal(source_check(stale, &e), -ESTALE);
    assert_memory_equal(source_map(stale), "0123456789", 10);
    clock_gettime(CLOCK_MONOTONIC, &from);
    assert_ok(source_read(slow, 0, 4, dst, &e), &e);
    clock_gettime(CLOCK_MONOTONIC, &to);
    assert_true((to.tv_sec - from.tv_sec) * 1000000000 + to.tv_nsec - from.tv_nsec >=
                30000000);
    assert_int_equal(source_check(slow, &e), 0);
    source_put(stale);
    source_put(slow);
}

/* A stack of all kinds, in which each allocation fails once. */
static int build_stack(const char *path, struct err *e)
{
    CLEANUP(source_putp) struct source *base = NULL;
    CLEANUP(source_putp) struct source *window = NULL;
    CLEANUP(source_putp) struct source *faults = NULL;
    int rc = source_from_fd(open(path, O_RDONLY | O_CLOEXEC), "a", &base, e);

    if (rc == 0)
        rc = source_window(base, 1, 2, &window, e);
    if (rc == 0)
        rc = source_with_faults(window, &(struct source_faults){0}, &faults, e);
    return rc;
}

static int build_owned(struct err *e)
{
    CLEANUP(source_putp) struct source *s = NULL;
    char *own = malloc(3);

    return own ? source_from_memory(own, 3, true, "m", &s, e) : -ENOMEM;
}

static void test_no_memory_is_an_error_and_leaks_nothing(void **state)
{
    const struct tmp *t = *state;
    unsigned before = tmp_open_fds();
    const char *path = tmp_at(t, "a");
    struct err e = {0};

    tmp_file(t, "a", "bytes");
    for (long n = 1; fail_alloc_next(&n);)
        fail_alloc_end(&n, build_stack(path, &e));
    for (long n = 1; fail_alloc_next(&n);)
        fail_alloc_end(&n, build_owned(&e));
    assert_int_equal(tmp_open_fds(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranges_are_checked),
        cmocka_unit_test(test_a_message_names_file_and_bytes),
        cmocka_unit_test(test_memory_is_owned_or_borrowed),
        tmp_test(test_file_reads_maps_and_checks),
        tmp_test(test_an_empty_file_has_no_mapping),
        tmp_test(test_a_cut_file_is_noticed),
        tmp_test(test_a_cut_mapping_raises_sigbus),
        tmp_test(test_a_rewrite_in_place_is_noticed),
        tmp_test(test_a_restored_mtime_is_noticed),
        tmp_test(test_a_replaced_file_keeps_its_bytes),
        tmp_test(test_a_hard_link_changes_no_bytes),
        tmp_test(test_only_regular_files),
        tmp_test(test_residence_follows_the_page_cache),
        tmp_test(test_short_windows_are_looked_up_now_and_then),
        tmp_test(test_threads_get_one_mapping),
        cmocka_unit_test(test_a_window_reads_and_maps_its_part),
        cmocka_unit_test(test_a_window_must_lie_within),
        tmp_test(test_a_window_checks_its_file),
        cmocka_unit_test(test_the_nth_read_fails),
        cmocka_unit_test(test_each_range_counts_as_a_read),
        cmocka_unit_test(test_reads_beyond_a_byte_fail),
        cmocka_unit_test(test_stale_and_slow_on_purpose),
        tmp_test(test_no_memory_is_an_error_and_leaks_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
