/* SPDX-License-Identifier: MIT */
/* tests/unit/test_remote_listing.c - listings that a test makes up. */
#include "remote_tmp.h"

#include "base/err.h"
#include "remote/listing.h"

#include "fail_alloc.h"

static void add_file(struct listing *l, const char *name, const char *head,
                     uint64_t size)
{
    const struct entry_stat st = {.kind = ENTRY_FILE, .mode = 0644, .id.size = size};
    struct err e = {0};

    assert_ok(listing_add(l, name, &st, head, strlen(head), &e), &e);
}

static struct listing *made_up(const char *path)
{
    struct listing *l = NULL;
    struct err e = {0};

    assert_ok(listing_new(NULL, path, &l, &e), &e);
    return l;
}

static void test_names_are_sorted_by_bytes(void **state)
{
    static const char *const want[] = {"a", "a-", "a.b", "a/", "aa", "b", "\x80"};
    static const size_t order[] = {4, 6, 0, 2, 5, 1, 3};
    CLEANUP(listing_freep) struct listing *l = made_up("run/step1");

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(order); i++) {
        add_file(l, want[order[i]], want[order[i]], 9);
        assert_string_equal(listing_find(l, want[order[i]])->name, want[order[i]]);
    }
    listing_sort(l);
    assert_int_equal(listing_count(l), ARRAY_SIZE(want));
    for (size_t i = 0; i < ARRAY_SIZE(want); i++) {
        char head[8] = "";
        size_t got = 0;

        assert_string_equal(listing_at(l, i)->name, want[i]);
        assert_ptr_equal(listing_find(l, want[i]), listing_at(l, i));
        assert_int_equal(listing_peek(l, want[i], head, 7, &got), 0);
        assert_string_equal(head, want[i]); /* heads move with their names */
    }
    assert_null(listing_find(l, ""));
    assert_null(listing_find(l, "a-b"));
    assert_string_equal(listing_path(l), "run/step1");
    assert_string_equal(listing_name(l), "step1");
}

static void test_a_name_twice_counts_once(void **state)
{
    CLEANUP(listing_freep) struct listing *l = made_up("");

    (void)state;
    add_file(l, "b", "1", 1);
    add_file(l, "a", "1", 1);
    add_file(l, "b", "1", 1);
    listing_sort(l);
    assert_int_equal(listing_count(l), 2);
    assert_string_equal(listing_at(l, 1)->name, "b");
}

static void test_heads_are_what_peek_and_read_give(void **state)
{
    const struct entry_stat other = {.kind = ENTRY_OTHER}, dir = {.kind = ENTRY_DIR};
    const struct entry_stat bare = {.kind = ENTRY_FILE, .id.size = 5};
    CLEANUP(listing_freep) struct listing *l = made_up("");
    CLEANUP_FREE char *data = NULL;
    struct err e = {0};
    char dst[16] = "";
    size_t got = 0, len = 0;

    (void)state;
    add_file(l, "big", "\x93NUMPY", 1 << 30);
    add_file(l, "empty", "", 0);
    assert_ok(listing_add(l, "bare", &bare, NULL, 0, &e), &e);
    assert_ok(listing_add(l, "fifo", &other, NULL, 0, &e), &e);
    assert_ok(listing_add(l, "dir", &dir, NULL, 0, &e), &e);
    listing_sort(l);
    assert_int_equal(listing_peek(l, "big", dst, 3, &got), 0);
    assert_int_equal(got, 3);
    assert_memory_equal(dst, "\x93NU", 3);
    assert_int_equal(listing_peek(l, "big", dst, 16, &got), 0);
    assert_int_equal(got, 6);
    assert_int_equal(listing_find(l, "big")->st.id.size, 1 << 30);
    assert_int_equal(listing_peek(l, "empty", dst, 16, &got), 0);
    assert_int_equal(got, 0);
    assert_int_equal(listing_peek(l, "bare", dst, 1, &got), -EIO);
    assert_int_equal(listing_peek(l, "fifo", dst, 1, &got), -EINVAL);
    assert_int_equal(listing_peek(l, "dir", dst, 1, &got), -EISDIR);
    assert_int_equal(listing_peek(l, "none", dst, 1, &got), -ENOENT);
    assert_int_equal(listing_read(l, "big", 5, &data, &len, &e), -EFBIG);
    assert_string_equal(e.text, "big: 6 bytes, at most 5 are taken");
    assert_ok(listing_read(l, "big", 6, &data, &len, &e), &e);
    assert_int_equal(len, 6);
    assert_memory_equal(data, "\x93NUMPY", 7);
}

static void test_subdirectories_hang_below(void **state)
{
    CLEANUP(listing_freep) struct listing *l = made_up("");
    struct listing *sub = made_up("sub"), *sub2 = made_up("sub2");
    const struct entry_stat dir = {.kind = ENTRY_DIR};
    struct err e = {0};

    (void)state;
    add_file(sub, "x", "1", 1);
    add_file(l, "z", "1", 1);
    assert_ok(listing_add(l, "sub2", &dir, NULL, 0, &e), &e);
    assert_ok(listing_add_sub(l, "sub", sub, &e), &e);
    assert_ok(listing_add_sub(l, "sub2", sub2, &e), &e);
    listing_sort(l);
    assert_int_equal(listing_count(l), 3);
    assert_int_equal(listing_find(l, "sub")->st.kind, ENTRY_DIR);
    assert_ptr_equal(listing_sub(l, "sub"), sub);
    assert_ptr_equal(listing_sub(l, "sub2"), sub2);
    assert_non_null(listing_find(listing_sub(l, "sub"), "x"));
    assert_null(listing_sub(l, "z"));
    assert_null(listing_sub(l, "none"));
}

static int build(struct err *e)
{
    const struct entry_stat st = {.kind = ENTRY_FILE, .id.size = 2};
    CLEANUP(listing_freep) struct listing *l = NULL;
    CLEANUP_FREE char *data = NULL;
    struct listing *sub = NULL;
    size_t len;
    int rc = listing_new(NULL, "", &l, e);

    if (rc == 0)
        rc = listing_add(l, "a", &st, "12", 2, e);
    if (rc == 0)
        rc = listing_read(l, "a", 2, &data, &len, e);
    if (rc == 0)
        rc = listing_new(NULL, "sub", &sub, e);
    if (rc == 0)
        rc = listing_add_sub(l, "sub", sub, e);
    return rc;
}

static void test_no_memory_is_an_error_and_leaks_nothing(void **state)
{
    struct err e = {0};

    (void)state;
    for (long n = 1; fail_alloc_next(&n);)
        fail_alloc_end(&n, build(&e));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names_are_sorted_by_bytes),
        cmocka_unit_test(test_a_name_twice_counts_once),
        cmocka_unit_test(test_heads_are_what_peek_and_read_give),
        cmocka_unit_test(test_subdirectories_hang_below),
        cmocka_unit_test(test_no_memory_is_an_error_and_leaks_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
