/* SPDX-License-Identifier: MIT */
/* tests/unit/test_txn.c - transactions: kept, continued after kills and boots, published, discarded. */
#include "save/txn.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/err.h"
#include "base/fsutil.h"
#include "save/txn_priv.h"
#include "tests/unit/unit.h"

/* The disk refuses bytes while this is set. */
static atomic_bool refuse;
static atomic_uint syncs;

int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);

int __wrap_fdatasync(int fd)
{
    syncs++;
    if (!refuse)
        return __real_fdatasync(fd);
    errno = EIO;
    return -1;
}

static const char staging[] = ".unshard-staging-run";

struct place {
    char top[40];
    int dir, run;
    struct publish_place at;
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
    strcpy(p->top, "/tmp/txn-XXXXXX");
    assert_non_null(mkdtemp(p->top));
    p->dir = open(p->top, O_RDONLY | O_DIRECTORY);
    assert_int_equal(mkdirat(p->dir, "run", 0755), 0);
    p->run = openat(p->dir, "run", O_RDONLY | O_DIRECTORY);
    p->at = (struct publish_place){p->dir, "run", "top/run"};
    refuse = false;
    *state = p;
    return 0;
}

static int teardown(void **state)
{
    struct place *p = *state;

    close(p->run);
    close(p->dir);
    nftw(p->top, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(p);
    return 0;
}

static struct txn *begin(const struct place *p)
{
    struct txn *t = NULL;
    struct err e = {0};

    assert_ok(txn_open(&p->at, TXN_ANY, &t, &e), &e);
    return t;
}

static void end(struct txn *t)
{
    struct err e = {0};

    assert_ok(txn_close(t, &e), &e);
}

static struct txn_file *new_file(struct txn *t, const char *path)
{
    const struct txn_new what = {
        .path = path, .uid = geteuid(), .gid = getegid(), .mode = 0640};
    struct txn_file *f = NULL;
    struct err e = {0};

    assert_ok(txn_new(t, &what, &f, &e), &e);
    return f;
}

static struct txn_file *find(struct txn *t, const char *path)
{
    struct txn_file *f = txn_find(t, path);

    if (!f)
        fail_msg("no %s", path);
    return f;
}

/* As a write of the mount. */
static void write_at(struct txn_file *f, uint64_t off, size_t len)
{
    CLEANUP_FREE char *bytes = malloc(len);
    struct err e = {0};
    int fd = txn_file_fd(f, &e);

    assert_true(fd >= 0);
    for (size_t i = 0; i < len; i++)
        bytes[i] = (char)(off + i);
    assert_ok(txn_writes(f, off, len, &e), &e);
    assert_int_equal(pwrite(fd, bytes, len, (off_t)off), len);
    assert_ok(txn_wrote(f, off, len, &e), &e);
}

/* "0-10 20-30" */
static void missing(struct txn_file *f, uint64_t size, const char *want)
{
    struct ranges r = {0};
    char got[400] = "";

    assert_int_equal(txn_missing(f, size, &r), 0);
    for (size_t i = 0; i < r.count; i++)
        snprintf(got + strlen(got), sizeof got - strlen(got), "%s%" PRIu64 "-%" PRIu64,
                 i ? " " : "", r.range[i].from, r.range[i].to);
    ranges_release(&r);
    assert_string_equal(got, want);
}

static bool exists(const struct place *p, const char *name)
{
    return faccessat(p->dir, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

static void write_text(int dir, const char *path, const char *text)
{
    int fd = openat(dir, path, O_WRONLY | O_CREAT | O_TRUNC, 0644);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
}

static void read_back(int dir, const char *path, const char *text)
{
    char got[100] = "";
    int fd = openat(dir, path, O_RDONLY);

    assert_true(fd >= 0);
    assert_true(read(fd, got, sizeof got - 1) >= 0);
    close(fd);
    assert_string_equal(got, text);
}

/* As if the machine had been booted since: the journal names another boot. */
static void reboot(const struct place *p)
{
    struct txn_journal j = {.next_id = 1};
    struct buf text = {0}, out = {0};
    struct err e = {0};
    size_t whole;
    char path[80];
    int fd, dir = openat(p->dir, staging, O_RDONLY | O_DIRECTORY);

    assert_ok(txn_journal_load(dir, &text, &e), &e);
    assert_ok(txn_journal_read(&j, text.data, text.len, &whole, &e), &e);
    assert_int_equal(whole, text.len);
    strcpy(j.owner.boot, "the-boot-before");
    assert_int_equal(txn_journal_text(&j, &out), 0);
    snprintf(path, sizeof path, "%s/journal", staging);
    fd = openat(p->dir, path, O_WRONLY | O_TRUNC);
    assert_ok(write_all(fd, out.data, out.len, &e), &e);
    close(fd);
    close(dir);
    txn_journal_release(&j);
    buf_release(&text);
    buf_release(&out);
}

/* ---- kept ---- */

static void test_nothing_is_kept(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t = NULL;
    struct txn_file *f;

    assert_int_equal(txn_open(&p->at, TXN_EXISTING, &t, &e), -ENOENT);
    t = begin(p);
    assert_false(txn_was_taken_up(t));
    assert_true(txn_is_empty(t));
    assert_ok(txn_note(t, "save", "dcp", &e), &e);
    f = new_file(t, "tensors/a.npy");
    assert_false(txn_is_empty(t));
    assert_ok(txn_drop(t, f, &e), &e);
    txn_file_put(f);
    end(t);
    assert_false(exists(p, staging));
    end(NULL);
}

static void test_is_continued(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t = begin(p);
    struct txn_file *f = new_file(t, "tensors/a b%\n.npy"), *g;
    const struct file_id id = {1, 2, 3, -4, 5};
    CLEANUP_FREE char *note = NULL;
    CLEANUP_FREE char *dtype = NULL;
    CLEANUP_FREE char *empty = NULL;
    uid_t uid;
    gid_t gid;
    mode_t mode;

    assert_ok(txn_note(t, "save", "dcp:ranks=8", &e), &e);
    assert_ok(txn_note(t, "empty", "", &e), &e);
    assert_ok(txn_note(t, "other", "x", &e), &e);
    assert_ok(txn_note(t, "other", NULL, &e), &e);
    assert_ok(txn_base_add(t, "x/y", &id, &e), &e);
    assert_ok(txn_base_add(t, "x/y", &(struct file_id){0}, &e), &e);
    assert_ok(txn_remove(t, "raw/gone", &e), &e);
    assert_ok(txn_remove(t, "raw/back", &e), &e);
    assert_ok(txn_unremove(t, "raw/back", &e), &e);
    assert_int_equal(txn_unremove(t, "raw/back", &e), -ENOENT);
    write_at(f, 0, 1000);
    write_at(f, 3000, 500);
    assert_ok(txn_expect(f, 5000, &e), &e);
    assert_ok(txn_file_note(f, "dtype", "BF16", &e), &e);
    assert_ok(txn_file_own(f, geteuid(), getegid(), 0604, &e), &e);
    assert_ok(txn_rename(t, f, "tensors/b.npy", &e), &e);
    g = new_file(t, "raw/c");
    assert_ok(txn_rename(t, g, "raw/d", &e), &e);
    txn_file_put(f);
    txn_file_put(g);
    end(t);
    assert_true(exists(p, staging));

    memset(&e, 0, sizeof e);
    assert_ok(txn_open(&p->at, TXN_EXISTING, &t, &e), &e);
    assert_true(txn_was_taken_up(t));
    note = txn_noted(t, "save");
    assert_string_equal(note, "dcp:ranks=8");
    empty = txn_noted(t, "empty");
    assert_string_equal(empty, "");
    assert_null(txn_noted(t, "other"));
    assert_int_equal(txn_base(t, "x/y").ctime_ns, 5);
    assert_int_equal(txn_base(t, "x/y").mtime_ns, -4);
    assert_int_equal(txn_base(t, "z").ino, 0);
    assert_true(txn_is_removed(t, "raw/gone"));
    assert_false(txn_is_removed(t, "raw/back"));
    assert_null(txn_find(t, "raw/c"));
    f = find(t, "tensors/b.npy");
    missing(f, 5000, "1000-3000 3500-5000");
    assert_int_equal(txn_expected(f), 5000);
    assert_true(txn_has(f, 100, 900));
    assert_false(txn_has(f, 100, 901));
    dtype = txn_file_noted(f, "dtype");
    assert_string_equal(dtype, "BF16");
    txn_file_owner(f, &uid, &gid, &mode);
    assert_int_equal(mode, 0604);
    write_at(f, 1000, 2000);
    missing(f, 5000, "3500-5000");
    txn_file_put(f);
    end(t);
    assert_ok(txn_discard_staged(p->dir, staging, &e), &e);
    assert_false(exists(p, staging));
}

static void test_one_process_at_a_time(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t = begin(p), *other = NULL;

    assert_int_equal(txn_open(&p->at, TXN_ANY, &other, &e), -EBUSY);
    assert_has(e.text, "another mount");
    end(t);
    other = begin(p);
    end(other);
}

static void test_refuses(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t = begin(p), *other = NULL;
    struct txn_file *f = new_file(t, "tensors/a.npy"), *g = NULL;
    const struct txn_new bad = {.path = "../a"}, again = {.path = "tensors/a.npy"};

    assert_int_equal(txn_new(t, &bad, &g, &e), -EINVAL);
    assert_int_equal(txn_new(t, &again, &g, &e), -EEXIST);
    assert_int_equal(txn_remove(t, "a//b", &e), -EINVAL);
    assert_int_equal(txn_note(t, "A", "x", &e), -EINVAL);
    assert_int_equal(txn_rename(t, f, "/a", &e), -EINVAL);
    assert_int_equal(txn_expect(f, UINT64_MAX, &e), -EFBIG);
    txn_file_put(f);
    end(t);
    /* Another directory has the name now. */
    assert_int_equal(renameat(p->dir, "run", p->dir, "elsewhere"), 0);
    memset(&e, 0, sizeof e);
    assert_int_equal(txn_open(&p->at, TXN_ANY, &other, &e), -ENOENT);
    assert_int_equal(mkdirat(p->dir, "run", 0755), 0);
    assert_int_equal(txn_open(&p->at, TXN_ANY, &other, &e), -EBUSY);
    assert_has(e.text, "another directory that had this name");
}

/* ---- kills and boots ---- */

static void test_killed(void **state)
{
    const struct place *p = *state;
    struct txn *t;
    struct txn_file *f;
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        t = begin(p);
        f = new_file(t, "tensors/a.npy");
        for (uint64_t i = 0; i < 20; i++)
            write_at(f, i << 20, 1 << 20);
        _exit(0); /* without a word */
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    t = begin(p);
    assert_true(txn_was_taken_up(t));
    f = find(t, "tensors/a.npy");
    missing(f, 20 << 20, "16777216-20971520"); /* what no line speaks of */
    txn_file_put(f);
    end(t);
    reboot(p);
    t = begin(p);
    f = find(t, "tensors/a.npy");
    missing(f, 20 << 20, "16777216-20971520"); /* end() has synced it */
    write_at(f, 16 << 20, 4 << 20);
    txn_file_put(f);
    pid = fork();
    if (pid == 0) {
        struct err e = {0};

        txn_flush(t, &e);
        _exit(0);
    }
    waitpid(pid, &status, 0);
    reboot(p); /* these have arrived, and were not synced */
    {
        struct err e = {0};
        struct txn *again = NULL;

        assert_int_equal(txn_open(&p->at, TXN_ANY, &again, &e), -EBUSY);
    }
    end(t);
}

static void test_boot(void **state)
{
    const struct place *p = *state;
    int status;
    pid_t pid = fork();
    struct txn *t;
    struct txn_file *f;

    if (pid == 0) {
        struct err e = {0};

        t = begin(p);
        f = new_file(t, "tensors/a.npy");
        write_at(f, 0, 1000);
        write_at(f, 128 << 20, 1000);
        if (txn_sync(t, &e) < 0)
            _exit(1);
        write_at(f, 2000, 1000); /* arrived only */
        write_at(f, 500, 10);    /* written again: the block of it does not count */
        if (txn_flush(t, &e) < 0)
            _exit(1);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    reboot(p);
    t = begin(p);
    f = find(t, "tensors/a.npy");
    missing(f, (128 << 20) + 1000, "0-134217728");
    txn_file_put(f);
    end(t);
}

/* After a power loss a file may be shorter than the journal says, or not there. */
static void test_bytes_that_are_not_there(void **state)
{
    const struct place *p = *state;
    char path[80];
    struct txn *t = begin(p);
    struct txn_file *f = new_file(t, "tensors/a.npy"),
                    *g = new_file(t, "tensors/b.npy");

    write_at(f, 0, 1000);
    write_at(g, 0, 1000);
    txn_file_put(f);
    txn_file_put(g);
    end(t);
    snprintf(path, sizeof path, "%s/%s/in/1", p->top, staging);
    assert_int_equal(truncate(path, 300), 0);
    snprintf(path, sizeof path, "%s/%s/in/2", p->top, staging);
    assert_int_equal(unlink(path), 0);
    t = begin(p);
    f = find(t, "tensors/a.npy");
    g = find(t, "tensors/b.npy");
    missing(f, 1000, "300-1000");
    missing(g, 1000, "0-1000");
    write_at(g, 0, 1000);
    missing(g, 1000, "");
    txn_file_put(f);
    txn_file_put(g);
    end(t);
}

/* Whatever is left of the journal, it is refused or taken for less, and never for more. */
static void test_cut_journal(void **state)
{
    const struct place *p = *state;
    struct buf text = {0};
    struct err e = {0};
    unsigned read = 0;
    int dir;
    struct txn *t = begin(p);
    struct txn_file *f = new_file(t, "tensors/a.npy");

    write_at(f, 0, 100);
    assert_ok(txn_file_sync(f, &e), &e);
    write_at(f, 200, 100);
    assert_ok(txn_file_note(f, "dtype", "BF16", &e), &e);
    txn_file_put(f);
    end(t);
    dir = openat(p->dir, staging, O_RDONLY | O_DIRECTORY);
    assert_ok(txn_journal_load(dir, &text, &e), &e);
    close(dir);
    for (size_t len = 0; len <= text.len; len++) {
        struct txn_journal j = {.next_id = 1};
        CLEANUP_FREE char *copy = malloc(len + 1);
        size_t whole = 0;

        memcpy(copy, text.data, len);
        memset(&e, 0, sizeof e);
        if (txn_journal_read(&j, copy, len, &whole, &e) == 0) {
            assert_true(whole <= len && j.files.count <= 1);
            if (j.files.count)
                assert_true(ranges_bytes(&j.by_id[0]->arrived) <= 200);
            read++;
        } else {
            assert_int_equal(e.code, EBADMSG);
        }
        txn_journal_release(&j);
    }
    assert_true(read > 100);
    buf_release(&text);
}

/* ---- ranges ---- */

static void test_holes(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t = begin(p);
    struct txn_file *f = new_file(t, "tensors/a.npy");

    assert_ok(txn_truncates(f, 0, 1000, &e), &e); /* the first thing a writer does */
    missing(f, 1000, "0-1000");
    write_at(f, 100, 100);
    write_at(f, 300, 100);
    missing(f, 1000, "0-100 200-300 400-1000");
    assert_ok(txn_confirm(f, 350, &e), &e); /* fsync of a writer that sees so many */
    missing(f, 1000, "400-1000");
    assert_ok(txn_truncates(f, 1000, 1000, &e),
              &e); /* what was extended is confirmed */
    missing(f, 1000, "");
    assert_ok(txn_truncates(f, 1000, 150, &e), &e);
    missing(f, 1000, "150-1000");
    txn_file_put(f);
    end(t);
    t = begin(p);
    f = find(t, "tensors/a.npy");
    missing(f, 1000, "150-1000");
    assert_ok(txn_truncates(f, 150, 0, &e), &e);
    missing(f, 1000, "0-1000");
    txn_file_put(f);
    end(t);
}

static void test_disk_refuses(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t = begin(p);
    struct txn_file *f = new_file(t, "tensors/a.npy");

    write_at(f, 0, 100);
    assert_ok(txn_file_sync(f, &e), &e);
    write_at(f, 100, 100);
    refuse = true;
    assert_int_equal(txn_file_sync(f, &e), -EIO);
    assert_has(e.text, "the disk refused bytes");
    refuse = false;
    missing(f, 200, "100-200");
    txn_file_put(f);
    end(t);
    t = begin(p);
    f = find(t, "tensors/a.npy");
    missing(f, 200, "100-200");
    write_at(f, 100, 100);
    memset(&e, 0, sizeof e);
    assert_ok(txn_file_sync(f, &e), &e);
    /* Written again while the disk takes the rest. */
    assert_ok(txn_sync_begin(f, &e), &e);
    write_at(f, 20, 10);
    assert_ok(txn_sync_end(f, true, &e), &e);
    assert_false(ranges_meet(&f->synced, 20, 30));
    missing(f, 200, "");
    assert_ok(txn_file_sync(f, &e), &e);
    assert_true(ranges_hold(&f->synced, 0, 200));
    txn_file_put(f);
    end(t);
}

/* Synced bytes that are written again cost a sync of the journal per 64 MiB, not per write. */
static void test_rewriting_is_cheap(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t = begin(p);
    struct txn_file *f = new_file(t, "tensors/a.npy");
    unsigned before;

    for (uint64_t at = 0; at < 128 << 20; at += 1 << 20)
        write_at(f, at, 1 << 20);
    assert_ok(txn_file_sync(f, &e), &e);
    before = syncs;
    for (uint64_t at = 0; at < 128 << 20; at += 1 << 18)
        write_at(f, at, 1 << 10);
    assert_int_equal(syncs - before, 2);
    missing(f, 128 << 20, "");
    txn_file_put(f);
    end(t);
}

/* Many small ranges: the journal is written as a whole now and then, and does not grow. */
static void test_journal_stays_short(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t = begin(p);
    struct txn_file *f = new_file(t, "tensors/a.npy");
    struct stat st;
    char path[80];

    for (unsigned i = 0; i < 200000; i++) {
        const char *word = i % 2 ? "BF16" : "F8_E4M3";

        assert_ok(txn_file_note(f, "dtype", word, &e), &e);
    }
    snprintf(path, sizeof path, "%s/journal", staging);
    assert_int_equal(fstatat(p->dir, path, &st, 0), 0);
    assert_true(st.st_size < 5 << 20);
    write_at(f, 10, 10);
    txn_file_put(f);
    end(t);
    t = begin(p);
    f = find(t, "tensors/a.npy");
    missing(f, 20, "0-10");
    txn_file_put(f);
    end(t);
}

/* ---- files ---- */

static void test_dropped_files_go_on(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t = begin(p);
    struct txn_file *f = new_file(t, "tensors/a.npy"), *g;
    struct txn_file *again;

    write_at(f, 0, 10);
    assert_ok(txn_drop(t, f, &e), &e);
    assert_null(txn_find(t, "tensors/a.npy"));
    write_at(f, 10, 10); /* as of an unlinked file */
    missing(f, 20, "");
    g = new_file(t, "tensors/a.npy");
    again = find(t, "tensors/a.npy");
    assert_ptr_equal(g, again);
    txn_file_put(again);
    assert_int_equal(txn_drop(t, f, &e), -ENOENT);
    memset(&e, 0, sizeof e);
    txn_file_put(f);
    f = new_file(t, "tensors/b.npy");
    write_at(f, 0, 5);
    assert_ok(txn_rename(t, f, "tensors/a.npy", &e), &e); /* over g */
    write_at(g, 0, 7);
    again = find(t, "tensors/a.npy");
    assert_ptr_equal(again, f);
    missing(again, 10, "5-10");
    txn_file_put(again);
    txn_file_put(g);
    end(t);
    assert_int_equal(txn_wrote(f, 0, 1, &e),
                     -ESTALE); /* the transaction is not ours now */
    assert_int_equal(txn_file_fd(f, &e), -ESTALE);
    txn_file_put(f);
}

static int count(void *user, struct txn_file *f)
{
    CLEANUP_FREE char *path = txn_file_path(f);
    unsigned *n = user;

    assert_non_null(path);
    ++*n;
    return 0;
}

/* More files than descriptors. */
static void test_many_files(void **state)
{
    const struct place *p = *state;
    enum { FILES = 500 };
    struct err e = {0};
    const struct rlimit few = {512, 4096};
    unsigned seen = 0, open_fds = 0;
    struct txn *t;
    char name[40];

    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    t = begin(p);

    for (unsigned i = 0; i < FILES; i++) {
        struct txn_file *f;

        snprintf(name, sizeof name, "tensors/%u.npy", i * 7919 % FILES);
        f = new_file(t, name);
        write_at(f, 0, 10 + i);
        txn_file_put(f);
    }
    for (int fd = 0; fd < 512; fd++)
        open_fds += fcntl(fd, F_GETFD) >= 0;
    assert_true(open_fds < 100);
    assert_ok(txn_each(t, count, &seen, &e), &e);
    assert_int_equal(seen, FILES);
    end(t);
    t = begin(p);
    for (unsigned i = 0; i < FILES; i++) {
        struct txn_file *f;

        snprintf(name, sizeof name, "tensors/%u.npy", i * 7919 % FILES);
        f = find(t, name);
        missing(f, 10 + i, "");
        txn_file_put(f);
    }
    end(t);
    assert_ok(txn_discard_staged(p->dir, staging, &e), &e);
}

struct worker {
    struct txn *t;
    struct txn_file *f;
    unsigned number;
};

static void *work(void *arg)
{
    struct worker *w = arg;
    char name[40];
    struct err e = {0};

    for (unsigned i = 0; i < 200; i++) {
        struct txn_file *f;

        write_at(w->f, (uint64_t)(i * 4 + w->number) * 1000, 1000);
        if (i % 20 == 0)
            assert_ok(txn_file_sync(w->f, &e), &e);
        snprintf(name, sizeof name, "raw/%u-%u", w->number, i);
        f = new_file(w->t, name);
        write_at(f, 0, 10);
        if (i % 3 == 0)
            assert_ok(txn_drop(w->t, f, &e), &e);
        txn_file_put(f);
    }
    return NULL;
}

static void test_threads(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t = begin(p);
    struct txn_file *f = new_file(t, "tensors/a.npy");
    struct worker w[4];
    pthread_t thread[4];
    unsigned seen = 0;

    for (unsigned i = 0; i < 4; i++) {
        w[i] = (struct worker){t, f, i};
        assert_int_equal(pthread_create(&thread[i], NULL, work, &w[i]), 0);
    }
    for (unsigned i = 0; i < 20; i++)
        assert_ok(txn_sync(t, &e), &e);
    for (unsigned i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    missing(f, 800000, "");
    txn_file_put(f);
    end(t);
    t = begin(p);
    f = find(t, "tensors/a.npy");
    missing(f, 800000, "");
    txn_file_put(f);
    assert_ok(txn_each(t, count, &seen, &e), &e);
    assert_int_equal(seen, 1 + 4 * 133);
    end(t);
}

/* ---- the target's name ---- */

static void test_moved(void **state)
{
    const struct place *p = *state;
    struct publish_place to = {p->dir, "later", "top/later"};
    struct err e = {0};
    struct txn *t = begin(p);
    struct txn_file *f = new_file(t, "tensors/a.npy");

    write_at(f, 0, 10);
    assert_int_equal(renameat(p->dir, "run", p->dir, "later"), 0);
    assert_ok(txn_moved(t, &to, &e), &e);
    assert_true(exists(p, ".unshard-staging-later"));
    write_at(f, 10, 10);
    txn_file_put(f);
    end(t);
    /* Renamed where nobody saw it: found by the inode. */
    assert_int_equal(renameat(p->dir, "later", p->dir, "run"), 0);
    t = begin(p);
    f = find(t, "tensors/a.npy");
    missing(f, 20, "");
    txn_file_put(f);
    assert_false(exists(p, ".unshard-staging-later"));
    end(t);
    /* Into another directory. */
    t = begin(p);
    assert_int_equal(mkdirat(p->dir, "sub", 0755), 0);
    to.dir = openat(p->dir, "sub", O_RDONLY | O_DIRECTORY);
    to.name = "run";
    assert_int_equal(renameat(p->dir, "run", to.dir, "run"), 0);
    assert_ok(txn_moved(t, &to, &e), &e);
    assert_true(exists(p, "sub/.unshard-staging-run"));
    end(t);
    assert_ok(txn_open(&to, TXN_EXISTING, &t, &e), &e);
    end(t);
    close(to.dir);
}

static void test_root(void **state)
{
    const struct place *p = *state;
    const struct publish_place root = {p->run, ".", "top/run"};
    struct err e = {0};
    struct txn *t = NULL;
    struct publish_file file = {.kind = PUBLISH_PUT,
                                .path = "a",
                                .uid = geteuid(),
                                .gid = getegid(),
                                .mode = 0600};
    struct publish_spec spec = {.uid = geteuid(), .gid = getegid()};

    assert_ok(txn_open(&root, TXN_ANY, &t, &e), &e);
    assert_true(exists(p, "run/.unshard-staging-."));
    write_text(txn_data_dir(t), "a", "new");
    assert_ok(txn_publish(t, &file, 1, &spec, NULL, 0, false, &e), &e);
    read_back(p->run, "a", "new");
    end(t);
    assert_false(exists(p, "run/.unshard-staging-."));
}

/* ---- the step ---- */

static void remember(struct txn *t, const struct place *p, const char *path)
{
    struct file_id id;
    struct err e = {0};

    assert_ok(publish_identity(p->run, path, &id, &e), &e);
    assert_ok(txn_base_add(t, path, &id, &e), &e);
}

static void test_publish(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t;
    struct txn_file *f;
    struct publish_file file[] = {
        {.kind = PUBLISH_PUT, .path = "a", .mode = 0600},
        {.kind = PUBLISH_PUT, .path = "index", .stage = 1, .mode = 0600},
        {.kind = PUBLISH_REMOVE, .path = "b"},
    };
    struct publish_spec spec = {.uid = geteuid(), .gid = getegid()};

    write_text(p->run, "a", "old a");
    write_text(p->run, "b", "old b");
    t = begin(p);
    f = new_file(t, "tensors/a.npy");
    remember(t, p, "a");
    remember(t, p, "b");
    write_text(txn_data_dir(t), "a", "new a");
    write_text(txn_data_dir(t), "index", "index");
    write_text(p->run, "b", "theirs");
    assert_int_equal(txn_publish(t, file, 3, &spec, &f, 1, true, &e), -ESTALE);
    assert_has(e.text, "top/run/b was changed by another writer");
    read_back(p->run, "a", "old a");
    read_back(p->run, "b", "theirs");
    write_at(f, 0, 10); /* it goes on */
    txn_file_put(f);
    end(t);
    t = begin(p);
    f = find(t, "tensors/a.npy");
    missing(f, 10, "");
    for (size_t i = 0; i < 3; i++)
        file[i].seen = (struct file_id){0};
    file[2].seen = (struct file_id){0};
    assert_ok(publish_identity(p->run, "b", &file[2].seen, &e), &e);
    memset(&e, 0, sizeof e);
    assert_ok(txn_publish(t, file, 3, &spec, &f, 1, true, &e), &e);
    read_back(p->run, "a", "new a");
    read_back(p->run, "index", "index");
    assert_false(exists(p, "run/b"));
    assert_int_equal(txn_wrote(f, 0, 1, &e), -ESTALE); /* it is published */
    txn_file_put(f);
    assert_true(txn_is_empty(t));
    end(t);
    assert_false(exists(p, staging));
}

/* One file of two is complete, and one removal is older than the step. */
static void test_some_are_published(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t;
    struct txn_file *f, *g;
    char path[80];
    struct publish_file file = {.kind = PUBLISH_PUT, .path = "a", .mode = 0600};
    struct publish_spec spec = {.uid = geteuid(), .gid = getegid()};

    write_text(p->run, "a", "old a");
    t = begin(p);
    f = new_file(t, "tensors/a\n%.npy");
    g = new_file(t, "tensors/b.npy");
    write_at(f, 0, 10);
    write_at(g, 0, 10);
    assert_ok(txn_remove(t, "raw/x y", &e), &e);
    remember(t, p, "a");
    write_text(txn_data_dir(t), "a", "new a");
    write_text(txn_data_dir(t), "left", "left by an attempt");
    assert_ok(txn_publish(t, &file, 1, &spec, &f, 1, false, &e), &e);
    read_back(p->run, "a", "new a");
    assert_null(txn_find(t, "tensors/a\n%.npy"));
    snprintf(path, sizeof path, "%s/in/1", staging);
    assert_false(exists(p, path));
    snprintf(path, sizeof path, "%s/data/left", staging);
    assert_false(exists(p, path));
    write_at(g, 10, 10);
    assert_true(txn_is_removed(t, "raw/x y"));
    txn_file_put(f);
    txn_file_put(g);
    end(t);
    t = begin(p);
    assert_null(txn_find(t, "tensors/a\n%.npy"));
    g = find(t, "tensors/b.npy");
    missing(g, 20, "");
    assert_true(txn_is_removed(t, "raw/x y"));
    /* What it published itself is no conflict. */
    file.seen = (struct file_id){0};
    write_text(txn_data_dir(t), "a", "newer a");
    assert_ok(txn_publish(t, &file, 1, &spec, &g, 1, true, &e), &e);
    read_back(p->run, "a", "newer a");
    assert_false(txn_is_removed(t, "raw/x y"));
    txn_file_put(g);
    end(t);
    assert_false(exists(p, staging));
}

/* A crash between the end of the step and the journal that says so. */
static void test_ended_is_settled(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t;
    struct txn_file *f, *g;
    char path[80];
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        struct publish_file file = {.kind = PUBLISH_PUT, .path = "a", .mode = 0600};
        struct publish_spec spec = {.uid = geteuid(), .gid = getegid(), .files = 1};

        t = begin(p);
        f = new_file(t, "tensors/a.npy");
        g = new_file(t, "tensors/b.npy");
        write_at(f, 0, 10);
        write_at(g, 0, 10);
        assert_ok(txn_sync(t, &e), &e);
        write_text(txn_data_dir(t), "a", "new a");
        spec.at = p->at;
        spec.file = &file;
        {
            struct buf note = {0};

            txn_line_numbers("file", f->id, NULL, 0, &note);
            spec.note = note.data;
            _exit(publish(&spec, &e) == 0 ? 0 : 1);
        }
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    read_back(p->run, "a", "new a");
    snprintf(path, sizeof path, "%s/ended", staging);
    assert_true(exists(p, path));
    t = begin(p);
    assert_false(exists(p, path));
    assert_null(txn_find(t, "tensors/a.npy"));
    g = find(t, "tensors/b.npy");
    missing(g, 10, "");
    assert_int_not_equal(txn_base(t, "a").ino, 0);
    txn_file_put(g);
    end(t);
    assert_int_equal(txn_recover(p->dir, staging, &e), 0);
}

/* ---- reports ---- */

struct report {
    unsigned seen;
    enum txn_state state;
    char text[400], target[40];
    bool gone;
    size_t files, removals;
};

static int report(void *user, const struct txn_listed *l)
{
    struct report *r = user;
    struct buf text = {0};

    r->seen++;
    r->state = l->state;
    r->gone = l->target_gone;
    r->files = l->files;
    r->removals = l->removals;
    snprintf(r->target, sizeof r->target, "%s", l->target ? l->target : "");
    for (size_t i = 0; i < l->files; i++)
        txn_describe_file(&l->file[i], &text);
    snprintf(r->text, sizeof r->text, "%s", text.data ? text.data : "");
    buf_release(&text);
    return 0;
}

static struct report list(const struct place *p)
{
    struct report r = {0};
    struct err e = {0};

    assert_ok(txn_list(p->dir, report, &r, &e), &e);
    return r;
}

static void test_list(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t;
    struct txn_file *f;
    struct report r = list(p);
    struct buf text = {0};

    assert_int_equal(r.seen, 0);
    t = begin(p);
    f = new_file(t, "tensors/a.npy");
    write_at(f, 0, 100);
    write_at(f, 300, 100);
    assert_ok(txn_remove(t, "raw/b", &e), &e);
    assert_ok(txn_flush(t, &e), &e);
    r = list(p);
    assert_int_equal(r.state, TXN_LIVE);
    assert_string_equal(r.text,
                        "tensors/a.npy: its header has not arrived (200 bytes have)\n");
    assert_ok(txn_expect(f, 500, &e), &e);
    txn_file_put(f);
    assert_int_equal(txn_describe(t, &text), 0);
    assert_string_equal(
        text.data, "tensors/a.npy: bytes 100 to 299, 400 to 499 of 500 are missing\n"
                   "raw/b: removed, which is not published yet\n");
    buf_release(&text);
    assert_int_equal(txn_discard_staged(p->dir, staging, &e), -EBUSY);
    assert_int_equal(txn_recover(p->dir, staging, &e), -EBUSY);
    end(t);
    r = list(p);
    assert_int_equal(r.seen, 1);
    assert_int_equal(r.state, TXN_STAGED);
    assert_string_equal(r.target, "run");
    assert_false(r.gone);
    assert_int_equal(r.files, 1);
    assert_int_equal(r.removals, 1);
    assert_string_equal(
        r.text, "tensors/a.npy: bytes 100 to 299, 400 to 499 of 500 are missing\n");
    assert_int_equal(renameat(p->dir, "run", p->dir, "away"), 0);
    assert_true(list(p).gone);
    assert_int_equal(renameat(p->dir, "away", p->dir, "run"), 0);
    memset(&e, 0, sizeof e);
    assert_int_equal(txn_recover(p->dir, staging, &e), 0);
    assert_ok(txn_discard_staged(p->dir, staging, &e), &e);
    assert_false(exists(p, staging));
}

static void test_foreign(void **state)
{
    const struct place *p = *state;
    struct txn_journal j = {.next_id = 1, .target_ino = 1, .target = strdup("run")};
    struct buf out = {0};
    struct err e = {0};
    struct txn *t = begin(p);
    struct txn_file *f = new_file(t, "tensors/a.npy");
    char path[80];

    txn_file_put(f);
    end(t);
    strcpy(j.owner.host, "a-host-elsewhere");
    strcpy(j.owner.boot, "its-boot");
    assert_int_equal(txn_journal_text(&j, &out), 0);
    snprintf(path, sizeof path, "%s/journal", staging);
    write_text(p->dir, path, out.data);
    buf_release(&out);
    txn_journal_release(&j);
    assert_int_equal(list(p).state, TXN_FOREIGN);
    assert_int_equal(txn_open(&p->at, TXN_ANY, &t, &e), -EBUSY);
    assert_has(e.text, "a-host-elsewhere");
    assert_int_equal(txn_discard_staged(p->dir, staging, &e), -EBUSY);
    assert_true(exists(p, staging));
    write_text(p->dir, path, "what no one has written\n");
    assert_int_equal(list(p).state, TXN_DAMAGED);
    assert_int_equal(txn_open(&p->at, TXN_ANY, &t, &e), -EBADMSG);
    memset(&e, 0, sizeof e);
    assert_ok(txn_discard_staged(p->dir, staging, &e), &e);
}

static void test_conversion(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct txn *t = NULL;
    char path[80];

    assert_int_equal(mkdirat(p->dir, staging, 0755), 0);
    snprintf(path, sizeof path, "%s/journal.1-of-2", staging);
    write_text(p->dir, path, "unshardfs dcp\n");
    assert_int_equal(list(p).state, TXN_CONVERSION);
    assert_int_equal(txn_open(&p->at, TXN_ANY, &t, &e), -EBUSY);
    snprintf(path, sizeof path, "%s/published", staging);
    write_text(p->dir, path, "");
    assert_int_equal(list(p).state, TXN_REST);
    t = begin(p); /* what a finished conversion left is removed */
    end(t);
    assert_false(exists(p, staging));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_nothing_is_kept),
        TEST(test_is_continued),
        TEST(test_one_process_at_a_time),
        TEST(test_refuses),
        TEST(test_killed),
        TEST(test_boot),
        TEST(test_bytes_that_are_not_there),
        TEST(test_cut_journal),
        TEST(test_holes),
        TEST(test_disk_refuses),
        TEST(test_rewriting_is_cheap),
        TEST(test_journal_stays_short),
        TEST(test_dropped_files_go_on),
        TEST(test_many_files),
        TEST(test_threads),
        TEST(test_moved),
        TEST(test_root),
        TEST(test_publish),
        TEST(test_some_are_published),
        TEST(test_ended_is_settled),
        TEST(test_list),
        TEST(test_foreign),
        TEST(test_conversion),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
