/* SPDX-License-Identifier: MIT */
/* tests/unit/test_block_disk.c - blocks on disk: exact bytes, a hard cap, many processes. */
#include "remote_tmp.h"

#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <time.h>

#include "base/err.h"
#include "remote/block_disk.h"

enum { SMALL_LIMIT = 4 << 20, WRITERS = 5, STEPS = 40, PATIENCE_STEPS = 3000 };

/* ---- what blocks have in them ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15;
    return x ^ (x >> 29);
}

static void fill(unsigned char *dst, size_t len, uint64_t block, unsigned first)
{
    for (size_t i = 0; i < len; i++)
        dst[i] = (unsigned char)mix(block << 20 | (first * BLOCK_SECTOR + i));
}

static struct block_name name_of(uint64_t block)
{
    return (struct block_name){
        .tag = mix(block + 1), .seed = mix(~block), .owner = (uint32_t)(block & 1) + 7};
}

static int put(struct block_disk *d, uint64_t block, unsigned first, size_t len)
{
    const struct block_name name = name_of(block);
    unsigned char data[BLOCK_BYTES];

    fill(data, len, block, first);
    return block_disk_put(d, &name, first, data, len);
}

/* Checks what is said to be there; returns the bits. */
static unsigned get(struct block_disk *d, uint64_t block, unsigned first, size_t len)
{
    const struct block_name name = name_of(block);
    unsigned char data[BLOCK_BYTES], want[BLOCK_BYTES];
    unsigned there = block_disk_get(d, &name, first, len, data);

    fill(want, len, block, first);
    for (size_t at = 0, i = 0; at < len; at += BLOCK_SECTOR, i++)
        if (there >> i & 1)
            assert_memory_equal(data + at, want + at,
                                MIN(len - at, (size_t)BLOCK_SECTOR));
    return there;
}

static bool has(struct block_disk *d, uint64_t block)
{
    return get(d, block, 0, BLOCK_BYTES) == 0xffff;
}

static struct block_disk *disk_of(const struct tmp *t, uint64_t limit)
{
    struct block_disk *d = NULL;
    struct err e = {0};

    assert_ok(block_disk_open(t->path, limit, &d, &e), &e);
    return d;
}

/* What the directory takes, as du sees it. */
static uint64_t taken(const struct tmp *t)
{
    DIR *dir = opendir(tmp_at(t, "blocks"));
    uint64_t sum = 0;
    struct stat st;

    assert_non_null(dir);
    for (struct dirent *f; (f = readdir(dir));) {
        if (strcmp(f->d_name, "..") == 0)
            continue;
        assert_int_equal(fstatat(dirfd(dir), f->d_name, &st, AT_SYMLINK_NOFOLLOW), 0);
        sum += (uint64_t)st.st_blocks * 512;
    }
    closedir(dir);
    return sum;
}

/* ---- one process ---- */

static void test_sectors_come_back_as_they_were(void **state)
{
    struct block_disk *d = disk_of(*state, SMALL_LIMIT);

    assert_int_equal(get(d, 1, 0, BLOCK_BYTES), 0);
    assert_int_equal(put(d, 1, 3, 2 * BLOCK_SECTOR), 0);
    assert_int_equal(get(d, 1, 0, BLOCK_BYTES), 3 << 3);
    assert_int_equal(get(d, 1, 4, 2 * BLOCK_SECTOR), 1);
    assert_int_equal(put(d, 1, 8, BLOCK_SECTOR), 0);
    assert_int_equal(get(d, 1, 0, BLOCK_BYTES), 3 << 3 | 1 << 8);
    assert_int_equal(put(d, 1, 0, BLOCK_BYTES), 0);
    assert_int_equal(get(d, 1, 0, BLOCK_BYTES), 0xffff);
    /* An object that ends within a sector. */
    assert_int_equal(put(d, 2, 15, 17), 0);
    assert_int_equal(get(d, 2, 14, BLOCK_SECTOR + 17), 2);
    assert_int_equal(get(d, 2, 15, 17), 1);
    block_disk_close(d);
    d = disk_of(*state, BLOCK_DISK_AS_IS);
    assert_int_equal(get(d, 1, 0, BLOCK_BYTES), 0xffff);
    assert_int_equal(get(d, 2, 15, 17), 1);
    assert_int_equal(block_disk_damaged(d), 0);
    block_disk_close(d);
}

static void test_it_never_takes_more_than_its_limit(void **state)
{
    static const uint64_t limits[] = {SMALL_LIMIT, 9 << 20, 33 << 20};

    for (size_t i = 0; i < ARRAY_SIZE(limits); i++) {
        struct block_disk *d = disk_of(*state, limits[i]);
        struct block_disk_stats stats;
        struct block_owner owner[4];
        struct err e = {0};
        size_t n;

        for (uint64_t b = 0; b < 10 * limits[i] / BLOCK_BYTES; b++) {
            assert_int_equal(put(d, b, 0, BLOCK_BYTES), 0);
            if (b % 16 == 0)
                assert_in_range(taken(*state), 0, limits[i]);
        }
        /* It is no use when it is not full. */
        assert_in_range(taken(*state), limits[i] / 5 * 2, limits[i]);
        assert_ok(block_disk_list(d, &stats, owner, 4, &n, &e), &e);
        assert_int_equal(stats.limit, limits[i]);
        assert_int_equal(stats.valid, stats.blocks * BLOCK_BYTES);
        assert_in_range(stats.valid, limits[i] / 5 * 2, stats.room);
        assert_int_equal(n, 2);
        assert_int_equal(owner[0].bytes + owner[1].bytes, stats.valid);
        block_disk_close(d);
    }
}

static void test_the_least_recently_used_goes(void **state)
{
    const struct timespec moment = {.tv_nsec = 600 * 1000000L};
    struct block_disk *d = disk_of(*state, SMALL_LIMIT); /* one set of 32 */
    unsigned there = 0;

    for (uint64_t b = 0; b < 32; b++)
        assert_int_equal(put(d, b, 0, BLOCK_BYTES), 0);
    for (uint64_t b = 0; b < 32; b++)
        assert_true(has(d, b));
    nanosleep(&moment, NULL);
    for (uint64_t b = 0; b < 16; b++)
        assert_true(has(d, b)); /* used again */
    for (uint64_t b = 100; b < 116; b++)
        assert_int_equal(put(d, b, 0, BLOCK_BYTES), 0);
    for (uint64_t b = 0; b < 16; b++)
        there += has(d, b);
    assert_int_equal(there, 16);
    for (uint64_t b = 16; b < 32; b++)
        assert_false(has(d, b));
    block_disk_close(d);
}

static void flip(const struct tmp *t, const char *file, off_t at)
{
    int fd = open(tmp_at(t, file), O_RDWR | O_CLOEXEC);
    unsigned char byte;

    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void test_a_damaged_sector_is_not_served(void **state)
{
    struct block_disk *d = disk_of(*state, SMALL_LIMIT);

    assert_int_equal(put(d, 5, 0, BLOCK_BYTES), 0);
    flip(*state, "blocks/data", 2 * BLOCK_SECTOR + 77);
    assert_int_equal(get(d, 5, 0, BLOCK_BYTES), 0xffff & ~4);
    assert_int_equal(block_disk_damaged(d), 1);
    assert_int_equal(put(d, 5, 2, BLOCK_SECTOR), 0);
    assert_true(has(d, 5));
    flip(*state, "blocks/table", 4096 + 24 + 8 * 9); /* the check of sector 9 */
    assert_int_equal(get(d, 5, 0, BLOCK_BYTES), 0xffff & ~(1 << 9));
    assert_int_equal(truncate(tmp_at(*state, "blocks/data"), 3 * BLOCK_SECTOR), 0);
    assert_int_equal(get(d, 5, 0, BLOCK_BYTES), 7);
    block_disk_close(d);
}

/* Whatever stands in the table: no byte that is not the block's own. */
static void test_a_table_that_lies(void **state)
{
    struct block_disk *d = disk_of(*state, SMALL_LIMIT);
    uint64_t random = 1;

    for (uint64_t b = 0; b < 32; b++)
        assert_int_equal(put(d, b, 0, BLOCK_BYTES), 0);
    for (int i = 0; i < 2000; i++) {
        random = mix(random + 12345);
        flip(*state, "blocks/table", 4096 + (off_t)(random % (32 * 152)));
        get(d, random >> 20 & 31, 0, BLOCK_BYTES); /* checks them */
    }
    block_disk_close(d);
    /* A header that is not ours: it begins anew. */
    flip(*state, "blocks/table", 9);
    d = disk_of(*state, BLOCK_DISK_AS_IS);
    for (uint64_t b = 0; b < 32; b++)
        assert_int_equal(get(d, b, 0, BLOCK_BYTES), 0);
    assert_int_equal(put(d, 1, 0, BLOCK_BYTES), 0);
    assert_true(has(d, 1));
    block_disk_close(d);
}

static void test_another_limit(void **state)
{
    struct block_disk *d = disk_of(*state, 40 << 20), *other;
    unsigned before = 0, after = 0;

    for (uint64_t b = 0; b < 200; b++)
        assert_int_equal(put(d, b, 0, BLOCK_BYTES), 0);
    for (uint64_t b = 0; b < 200; b++)
        before += has(d, b);
    assert_int_equal(before, 200);
    other = disk_of(*state, 20 << 20);
    assert_in_range(taken(*state), 0, 20 << 20);
    for (uint64_t b = 0; b < 200; b++)
        after += has(other, b);
    assert_in_range(after, 60, 180); /* those in sets that are left */
    /* Who had it open goes by the new limit, at once when it writes. */
    for (uint64_t b = 200; b < 1000; b++) {
        assert_int_equal(put(d, b, 0, BLOCK_BYTES), 0);
        assert_in_range(taken(*state), 0, 20 << 20);
    }
    block_disk_close(other);
    for (uint64_t b = 0; b < 64; b++)
        assert_int_equal(put(d, b, 0, BLOCK_BYTES), 0);
    for (before = 0; before < 64 && has(d, before);)
        before++;
    assert_int_equal(before, 64);
    other = disk_of(*state, 35 << 20);
    for (uint64_t b = 0; b < 64; b++)
        assert_true(has(other, b)); /* found where they were */
    block_disk_close(other);
    block_disk_close(d);
}

static void test_clear_and_names(void **state)
{
    struct block_disk *d = disk_of(*state, SMALL_LIMIT);
    struct block_disk_stats stats;
    struct block_owner owner[4];
    struct err e = {0};
    size_t n;

    block_disk_name_owner(d, 7, "s3://bucket/run");
    block_disk_name_owner(d, 7, "s3://bucket/run");
    for (uint64_t b = 0; b < 10; b++)
        assert_int_equal(put(d, 2 * b, 0, 2 * BLOCK_SECTOR), 0);
    assert_ok(block_disk_list(d, &stats, owner, 4, &n, &e), &e);
    assert_int_equal(n, 1);
    assert_string_equal(owner[0].name, "s3://bucket/run");
    assert_int_equal(owner[0].blocks, 10);
    assert_int_equal(owner[0].bytes, 10 * 2 * BLOCK_SECTOR);
    assert_true(llabs(owner[0].used - time(NULL)) < 100);
    assert_ok(block_disk_clear(d, &e), &e);
    assert_int_equal(get(d, 0, 0, BLOCK_BYTES), 0);
    assert_in_range(taken(*state), 0, 64 << 10);
    assert_ok(block_disk_list(d, &stats, owner, 4, &n, &e), &e);
    assert_int_equal(n, 0);
    assert_int_equal(put(d, 3, 0, BLOCK_BYTES), 0);
    assert_true(has(d, 3));
    block_disk_close(d);
}

static void test_limits_that_cannot_be(void **state)
{
    const struct tmp *t = *state;
    struct block_disk *d = NULL;
    struct err e = {0};

    assert_int_equal(block_disk_open(t->path, 1 << 20, &d, &e), -EINVAL);
    assert_null(d);
    d = disk_of(t, BLOCK_DISK_MIN);
    assert_int_equal(put(d, 3, 0, BLOCK_BYTES), 0);
    assert_true(has(d, 3));
    block_disk_close(d);
}

/* ---- disks that do not do as they are told ---- */

/* Runs it in a process of its own, as it gives away rights. 77: it could not be tried. */
static void in_child(int (*fn)(const struct tmp *t), const struct tmp *t)
{
    pid_t pid = fork();
    int status;

    assert_true(pid >= 0);
    if (pid == 0)
        _exit(fn(t));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        leave_out("nothing can be mounted");
    assert_int_equal(WEXITSTATUS(status), 0);
}

#define CHECK(x)                                                                       \
    do {                                                                               \
        if (!(x)) {                                                                    \
            fprintf(stderr, "# line %d: %s\n", __LINE__, #x);                          \
            return 1;                                                                  \
        }                                                                              \
    } while (0)

static int read_only_child(const struct tmp *t)
{
    struct block_disk *d = NULL;
    struct err e = {0};

    if (geteuid() == 0 &&
        (chown(t->path, 65534, 65534) < 0 || setgid(65534) < 0 || setuid(65534) < 0))
        return 77;
    CHECK(block_disk_open(t->path, SMALL_LIMIT, &d, &e) == 0);
    CHECK(put(d, 1, 0, BLOCK_BYTES) == 0);
    block_disk_close(d);
    CHECK(chmod(tmp_at(t, "blocks/table"), 0400) == 0);
    CHECK(chmod(tmp_at(t, "blocks/data"), 0400) == 0);
    CHECK(block_disk_open(t->path, 64 << 20, &d, &e) == 0);
    CHECK(has(d, 1));
    CHECK(put(d, 2, 0, BLOCK_BYTES) == -EROFS);
    CHECK(block_disk_clear(d, &e) == -EROFS);
    block_disk_close(d);
    CHECK(chmod(tmp_at(t, "blocks/table"), 0600) == 0);
    CHECK(chmod(tmp_at(t, "blocks/data"), 0600) == 0);
    return 0;
}

static void test_a_directory_that_cannot_be_written(void **state)
{
    in_child(read_only_child, *state);
}

static int full_child(const struct tmp *t)
{
    struct block_disk *d = NULL;
    struct err e = {0};
    int failed = 0;

    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("none", t->path, "tmpfs", 0, "size=1m") < 0)
        return 77;
    CHECK(block_disk_open(t->path, 16 << 20, &d, &e) == 0);
    for (uint64_t b = 0; b < 64; b++) {
        int rc = put(d, b, 0, BLOCK_BYTES);

        CHECK(rc == 0 || rc == -ENOSPC);
        failed += rc != 0;
    }
    CHECK(failed > 40 && failed < 64);
    for (uint64_t b = 0; b < 64; b++)
        get(d, b, 0, BLOCK_BYTES); /* what is there is right */
    CHECK(has(d, 0));
    block_disk_close(d);
    return 0;
}

static void test_a_full_disk(void **state)
{
    in_child(full_child, *state);
}

/* ---- many processes ---- */

/* Writes and reads blocks of its own choice until it is killed, or told to end. */
static int hammer(const struct tmp *t, uint64_t random)
{
    struct block_disk *d = NULL;
    struct err e = {0};

    CHECK(block_disk_open(t->path, BLOCK_DISK_AS_IS, &d, &e) == 0);
    while (access(tmp_at(t, "end"), F_OK) < 0) {
        for (int i = 0; i < 50; i++) {
            unsigned first, len;
            uint64_t block;
            int rc;

            random = mix(random + 77);
            block = random >> 8 & 1023;
            first = (unsigned)(random >> 20 & 15);
            len = (unsigned)(random >> 24) % (BLOCK_BYTES - first * BLOCK_SECTOR) + 1;
            len = first + len / BLOCK_SECTOR < 15 ? (len + 4095) / 4096 * 4096
                                                  : BLOCK_BYTES - first * BLOCK_SECTOR;
            get(d, block, 0, BLOCK_BYTES);
            rc = put(d, block, first, len);
            CHECK(rc == 0 || rc == -EAGAIN);
        }
    }
    /* Places where two wrote at once would be torn; the locks keep them apart. */
    CHECK(block_disk_damaged(d) == 0 || access(tmp_at(t, "killed"), F_OK) == 0);
    block_disk_close(d);
    return 0;
}

static pid_t start(const struct tmp *t, uint64_t seed)
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0)
        _exit(hammer(t, seed));
    return pid;
}

/* How many of the blocks that they write are there. */
static unsigned count_there(struct block_disk *d)
{
    unsigned there = 0;

    for (uint64_t b = 0; b < 1024; b++)
        there += get(d, b, 0, BLOCK_BYTES) != 0;
    return there;
}

static void hammer_all(const struct tmp *t, bool kills)
{
    const struct timespec moment = {.tv_nsec = 20 * 1000000L};
    struct block_disk *d = disk_of(t, 12 << 20); /* a fifth of what they write */
    pid_t pid[WRITERS];
    int status;

    if (kills)
        tmp_file(t, "killed", "");
    for (unsigned i = 0; i < WRITERS; i++)
        pid[i] = start(t, i * 1000 + 1);
    for (unsigned step = 0; step < STEPS; step++) {
        nanosleep(&moment, NULL);
        assert_in_range(taken(t), 0, 12 << 20);
        if (kills) {
            unsigned i = step % WRITERS;

            kill(pid[i], SIGKILL);
            assert_int_equal(waitpid(pid[i], &status, 0), pid[i]);
            pid[i] = start(t, step * 7777 + 5);
        }
    }
    /* Machines differ in how much they write in that time. */
    for (unsigned step = 0; step < PATIENCE_STEPS && count_there(d) < 100; step++)
        nanosleep(&moment, NULL);
    tmp_file(t, "end", "");
    for (unsigned i = 0; i < WRITERS; i++) {
        assert_int_equal(waitpid(pid[i], &status, 0), pid[i]);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    assert_in_range(taken(t), 3 << 20, 12 << 20);
    assert_in_range(count_there(d), 100, 192);
    /* Nobody's locks are left: it can be cleared. */
    assert_int_equal(block_disk_clear(d, &(struct err){0}), 0);
    assert_in_range(taken(t), 0, 64 << 10);
    block_disk_close(d);
}

static void test_many_processes(void **state)
{
    hammer_all(*state, false);
}

static void test_processes_that_are_killed(void **state)
{
    hammer_all(*state, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        tmp_test(test_sectors_come_back_as_they_were),
        tmp_test(test_it_never_takes_more_than_its_limit),
        tmp_test(test_the_least_recently_used_goes),
        tmp_test(test_a_damaged_sector_is_not_served),
        tmp_test(test_a_table_that_lies),
        tmp_test(test_another_limit),
        tmp_test(test_clear_and_names),
        tmp_test(test_limits_that_cannot_be),
        tmp_test(test_a_directory_that_cannot_be_written),
        tmp_test(test_a_full_disk),
        tmp_test(test_many_processes),
        tmp_test(test_processes_that_are_killed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
