/* SPDX-License-Identifier: MIT */
/* tests/unit/test_publish.c - steps on real files: whole, refused, undone, and gone on with. */
#include "save/publish.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "base/err.h"
#include "save/publish_priv.h"
#include "tests/unit/unit.h"

static const char staging[] = ".unshard-staging-run";

struct place {
    char top[40];
    int dir, run;
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
    strcpy(p->top, "/tmp/publish-XXXXXX");
    assert_non_null(mkdtemp(p->top));
    p->dir = open(p->top, O_RDONLY | O_DIRECTORY);
    assert_int_equal(mkdirat(p->dir, "run", 0755), 0);
    p->run = openat(p->dir, "run", O_RDONLY | O_DIRECTORY);
    assert_int_equal(mkdirat(p->dir, staging, 0711), 0);
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

/* "run/a/b" with these bytes; directories are made. */
static void put(const struct place *p, const char *path, const char *text)
{
    char part[200];
    int fd;

    for (const char *s = strchr(path, '/'); s; s = strchr(s + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", (int)(s - path), path);
        assert_true(mkdirat(p->dir, part, 0755) == 0 || errno == EEXIST);
    }
    fd = openat(p->dir, path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
}

static void stage(const struct place *p, const char *path, const char *text)
{
    char name[200];

    snprintf(name, sizeof name, "%s/data/%s", staging, path);
    put(p, name, text);
}

/* NULL: it must not be there. */
static void has(const struct place *p, const char *path, const char *text)
{
    char got[200] = "";
    int fd = openat(p->dir, path, O_RDONLY | O_NOFOLLOW);

    if (!text) {
        assert_true(fd < 0);
        return;
    }
    if (fd < 0)
        fail_msg("%s is not there", path);
    assert_true(read(fd, got, sizeof got - 1) >= 0);
    close(fd);
    assert_string_equal(got, text);
}

static struct file_id seen(const struct place *p, const char *path)
{
    struct file_id id;
    struct err e = {0};

    assert_ok(publish_identity(p->run, path, &id, &e), &e);
    return id;
}

static struct publish_file file(const struct place *p, enum publish_kind kind,
                                const char *path, unsigned stage_number)
{
    return (struct publish_file){.kind = kind,
                                 .path = path,
                                 .stage = stage_number,
                                 .seen = seen(p, path),
                                 .uid = geteuid(),
                                 .gid = getegid(),
                                 .mode = 0640};
}

static struct publish_spec spec_of(const struct place *p, const struct publish_file *f,
                                   size_t n)
{
    return (struct publish_spec){.at = {p->dir, "run", "run"},
                                 .file = f,
                                 .files = n,
                                 .uid = geteuid(),
                                 .gid = getegid()};
}

static ino_t inode(const struct place *p, const char *path)
{
    struct stat st;

    assert_int_equal(fstatat(p->dir, path, &st, AT_SYMLINK_NOFOLLOW), 0);
    return st.st_ino;
}

static void test_paths(void **state)
{
    char name[NAME_MAX + 2], dst[NAME_MAX + 1], other[NAME_MAX + 1];
    struct err e = {0};

    (void)state;
    assert_true(publish_path_is_safe("a"));
    assert_true(publish_path_is_safe("a/b\\c/..d"));
    assert_false(publish_path_is_safe(""));
    assert_false(publish_path_is_safe("/a"));
    assert_false(publish_path_is_safe("a/"));
    assert_false(publish_path_is_safe("a//b"));
    assert_false(publish_path_is_safe("a/./b"));
    assert_false(publish_path_is_safe(".."));
    assert_false(publish_path_is_safe("a/.unshard-staging-x"));
    memset(name, 'n', sizeof name);
    name[NAME_MAX + 1] = '\0';
    assert_false(publish_path_is_safe(name));
    assert_int_equal(publish_staging_name(name, dst, &e), -ENAMETOOLONG);
    name[NAME_MAX] = '\0';
    assert_ok(publish_staging_name(name, dst, &e), &e);
    name[NAME_MAX - 1] = 'm';
    assert_ok(publish_staging_name(name, other, &e), &e);
    assert_int_equal(strlen(dst), NAME_MAX);
    assert_string_not_equal(dst, other);
    assert_int_equal(publish_staging_name("a/b", dst, &e), -EINVAL);
    assert_int_equal(publish_staging_name("..", dst, &e), -EINVAL);
    assert_ok(publish_staging_name(".", dst, &e), &e);
    assert_true(publish_is_staging(dst));
}

/* Replaced, new, removed and held files; what the step does not name keeps its inode. */
static void test_step(void **state)
{
    struct place *p = *state;
    struct err e = {0};
    ino_t other, held;
    struct stat st;
    int open_old;

    put(p, "run/a", "old a");
    put(p, "run/part/b", "old b");
    put(p, "run/part/c", "old c");
    put(p, "run/gone/d", "old d");
    put(p, "run/other", "other");
    put(p, "run/.metadata", "meta");
    put(p, "run/index", "old index");
    assert_int_equal(fchmodat(p->dir, "run/a", 0604, 0), 0);
    assert_int_equal(mkdirat(p->dir, "run/empty", 0700), 0);
    other = inode(p, "run/other");
    held = inode(p, "run/.metadata");
    open_old = openat(p->dir, "run/a", O_RDWR);
    stage(p, "a", "new a");
    stage(p, "part/b", "new b");
    stage(p, "deep/er/e", "new e");
    stage(p, "index", "new index");
    stage(p, "unnamed", "dropped");

    {
        const struct publish_file f[] = {
            file(p, PUBLISH_PUT, "index", 1),     file(p, PUBLISH_HOLD, ".metadata", 2),
            file(p, PUBLISH_REMOVE, "gone/d", 0), file(p, PUBLISH_PUT, "deep/er/e", 0),
            file(p, PUBLISH_PUT, "part/b", 0),    file(p, PUBLISH_PUT, "a", 0),
        };
        const char *const dirs[] = {"made/dir", "part"};
        struct publish_spec s = spec_of(p, f, ARRAY_SIZE(f));

        s.directory = dirs;
        s.directories = 2;
        assert_ok(publish(&s, &e), &e);
    }
    has(p, "run/a", "new a");
    has(p, "run/part/b", "new b");
    has(p, "run/part/c", "old c");
    has(p, "run/deep/er/e", "new e");
    has(p, "run/index", "new index");
    has(p, "run/.metadata", "meta");
    has(p, "run/other", "other");
    has(p, "run/unnamed", NULL);
    assert_int_equal(inode(p, "run/other"), other);
    assert_int_equal(inode(p, "run/.metadata"), held);
    assert_int_equal(fstatat(p->dir, "run/gone", &st, 0), -1);
    assert_int_equal(fstatat(p->dir, "run/made/dir", &st, 0), 0);
    assert_int_equal(fstatat(p->dir, "run/empty", &st, 0), 0);
    assert_int_equal(fstatat(p->dir, "run/a", &st, 0), 0);
    assert_int_equal(st.st_mode & 07777, 0604); /* of the replaced one */
    assert_int_equal(fstatat(p->dir, "run/deep/er/e", &st, 0), 0);
    assert_int_equal(st.st_mode & 07777, 0640);
    assert_int_equal(st.st_nlink, 1);
    assert_int_equal(fstatat(p->dir, "run/deep", &st, 0), 0);
    assert_int_equal(st.st_mode & 07777, 0755); /* as the target */
    has(p, staging, NULL);
    /* Who has the old file open goes on with it. */
    assert_int_equal(pwrite(open_old, "later", 5, 0), 5);
    close(open_old);
    has(p, "run/a", "new a");
}

static void test_attributes_are_kept(void **state)
{
    struct place *p = *state;
    struct err e = {0};
    char value[8] = "";
    int fd;

    put(p, "run/a", "old");
    fd = openat(p->dir, "run/a", O_RDONLY);
    if (fsetxattr(fd, "user.note", "hello", 5, 0) < 0) {
        close(fd);
        leave_out("no extended attributes here");
    }
    close(fd);
    stage(p, "a", "new");
    {
        const struct publish_file f = file(p, PUBLISH_PUT, "a", 0);
        struct publish_spec s = spec_of(p, &f, 1);

        assert_ok(publish(&s, &e), &e);
    }
    fd = openat(p->dir, "run/a", O_RDONLY);
    assert_int_equal(fgetxattr(fd, "user.note", value, sizeof value), 5);
    close(fd);
    assert_string_equal(value, "hello");
    has(p, "run/a", "new");
}

static void unchanged(const struct place *p)
{
    char data[64];

    has(p, "run/a", "old a");
    has(p, "run/new", NULL);
    snprintf(data, sizeof data, "%s/data/a", staging);
    has(p, data, "new a");
    snprintf(data, sizeof data, "%s/data/new", staging);
    has(p, data, "new");
    assert_false(publish_in_progress(p->dir, "run"));
}

/* Files that others changed since: nothing is touched. */
static void test_stale(void **state)
{
    struct place *p = *state;
    struct err e = {0};
    struct publish_file f[2];
    struct publish_spec s = spec_of(p, f, 2);

    put(p, "run/a", "old a");
    stage(p, "a", "new a");
    stage(p, "new", "new");
    f[0] = file(p, PUBLISH_PUT, "a", 0);
    f[1] = file(p, PUBLISH_PUT, "new", 1);

    put(p, "run/a", "others"); /* the same inode with other bytes */
    assert_int_equal(publish(&s, &e), -ESTALE);
    assert_has(e.text, "run/a was changed by another writer");
    assert_false(s.undone);
    put(p, "run/a", "old a");
    unchanged(p);

    f[0] = file(p, PUBLISH_PUT, "a", 0);
    unlinkat(p->dir, "run/a", 0);
    put(p, "run/a", "old a"); /* another inode with the same bytes */
    assert_int_equal(publish(&s, &e), -ESTALE);
    unchanged(p);

    f[0] = file(p, PUBLISH_PUT, "a", 0);
    put(p, "run/new", "theirs"); /* one that was not there */
    assert_int_equal(publish(&s, &e), -ESTALE);
    assert_has(e.text, "run/new was changed");
    has(p, "run/new", "theirs");
    unlinkat(p->dir, "run/new", 0);
    unchanged(p);

    f[0] = file(p, PUBLISH_PUT, "a", 0);
    unlinkat(p->dir, "run/a", 0); /* one that is gone */
    assert_int_equal(publish(&s, &e), -ESTALE);
    put(p, "run/a", "old a");
    f[0] = file(p, PUBLISH_PUT, "a", 0);
    assert_ok(publish(&s, &e), &e);
    has(p, "run/a", "new a");
    has(p, "run/new", "new");
}

static void test_refused(void **state)
{
    struct place *p = *state;
    struct err e = {0};
    struct publish_file f[2];
    struct publish_spec s = spec_of(p, f, 2);

    put(p, "run/a", "old a");
    put(p, "run/d/x", "x");
    stage(p, "a", "new a");
    stage(p, "new", "new");
    f[0] = file(p, PUBLISH_PUT, "a", 0);
    f[1] = file(p, PUBLISH_PUT, "nowhere", 0); /* not staged */
    assert_int_equal(publish(&s, &e), -ENOENT);
    unchanged(p);
    f[1] = f[0];
    assert_int_equal(publish(&s, &e), -EINVAL);
    unchanged(p);
    f[1] = file(p, PUBLISH_REMOVE, "nowhere", 0);
    assert_int_equal(publish(&s, &e), -EINVAL);
    f[1] = file(p, PUBLISH_REMOVE, "d", 0);
    assert_int_equal(publish(&s, &e), -EISDIR);
    f[1] = file(p, PUBLISH_PUT, "new", 0);
    f[1].path = "../new";
    assert_int_equal(publish(&s, &e), -EINVAL);
    f[1] = file(p, PUBLISH_PUT, "new", 0);
    f[1].path = "a/new"; /* below a file */
    assert_true(publish(&s, &e) < 0);
    unchanged(p);
    /* Links on the way are not followed. */
    assert_int_equal(symlinkat(p->top, p->dir, "run/link"), 0);
    f[1] = (struct publish_file){.kind = PUBLISH_PUT, .path = "link/new", .mode = 0600};
    stage(p, "link/new", "new");
    assert_true(publish(&s, &e) < 0);
    unchanged(p);
    has(p, "new", NULL);
}

/* A link is replaced by itself: what it points to is not touched. */
static void test_link_is_replaced(void **state)
{
    struct place *p = *state;
    struct err e = {0};
    struct stat st;

    put(p, "blob", "blob");
    assert_int_equal(symlinkat("../blob", p->dir, "run/a"), 0);
    stage(p, "a", "new a");
    {
        const struct publish_file f = file(p, PUBLISH_PUT, "a", 0);
        struct publish_spec s = spec_of(p, &f, 1);

        assert_ok(publish(&s, &e), &e);
    }
    has(p, "blob", "blob");
    has(p, "run/a", "new a");
    assert_int_equal(fstatat(p->dir, "run/a", &st, AT_SYMLINK_NOFOLLOW), 0);
    assert_int_equal(st.st_mode & 07777, 0640);
}

/* Copies what is staged, with its journal, as a crash at the very beginning leaves it. */
static void begin_step(const struct place *p, const struct publish_file *f, size_t n)
{
    struct buf text = {0};
    struct err e = {0};
    struct step s;
    struct stat st;
    char path[80];
    int fd;

    step_init(&s);
    assert_int_equal(fstat(p->run, &st), 0);
    s.target_ino = st.st_ino;
    for (size_t i = 0; i < n; i++) {
        struct step_entry entry = {.kind = f[i].kind,
                                   .stage = f[i].stage,
                                   .path = strdup(f[i].path),
                                   .had = f[i].seen.ino != 0,
                                   .old = f[i].seen};

        snprintf(path, sizeof path, "%s/data/%s", staging, f[i].path);
        if (f[i].kind == PUBLISH_PUT) {
            assert_int_equal(fstatat(p->dir, path, &st, 0), 0);
            entry.ino = st.st_ino;
            entry.size = (uint64_t)st.st_size;
        }
        assert_ok(step_add(&s, &entry, &e), &e);
    }
    assert_ok(step_sort(&s, &e), &e);
    assert_ok(step_text(&s, &text, &e), &e);
    snprintf(path, sizeof path, "%s/redo", staging);
    fd = openat(p->dir, path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(write(fd, text.data, text.len), text.len);
    close(fd);
    buf_release(&text);
    step_release(&s);
}

static const struct publish_place *place(const struct place *p)
{
    static struct publish_place at;

    at = (struct publish_place){p->dir, "run", "run"};
    return &at;
}

static void test_recover(void **state)
{
    struct place *p = *state;
    struct err e = {0};
    struct publish_file f[3];

    put(p, "run/a", "old a");
    put(p, "run/z", "old z");
    stage(p, "a", "new a");
    stage(p, "index", "index");
    f[0] = file(p, PUBLISH_PUT, "a", 0);
    f[1] = file(p, PUBLISH_REMOVE, "z", 0);
    f[2] = file(p, PUBLISH_PUT, "index", 1);
    assert_int_equal(publish_recover(place(p), &e), 0);
    begin_step(p, f, 3);
    assert_true(publish_in_progress(p->dir, "run"));
    assert_int_equal(publish_recover(place(p), &e), 1);
    assert_false(publish_in_progress(p->dir, "run"));
    has(p, "run/a", "new a");
    has(p, "run/z", NULL);
    has(p, "run/index", "index");
    has(p, staging, NULL);
    assert_int_equal(publish_recover(place(p), &e), 0);
}

/* Between the crash and the next mount somebody replaced a file: theirs stays, ours is staged. */
static void test_recover_undoes(void **state)
{
    struct place *p = *state;
    struct err e = {0};
    struct publish_file f[3];
    char path[80];

    put(p, "run/a", "old a");
    put(p, "run/b", "old b");
    stage(p, "a", "new a");
    stage(p, "b", "new b");
    stage(p, "index", "index");
    f[0] = file(p, PUBLISH_PUT, "a", 0);
    f[1] = file(p, PUBLISH_PUT, "b", 0);
    f[2] = file(p, PUBLISH_PUT, "index", 1);
    begin_step(p, f, 3);
    unlinkat(p->dir, "run/a", 0);
    put(p, "run/a", "theirs, of another length");
    assert_int_equal(publish_recover(place(p), &e), -ESTALE);
    assert_has(e.text, "run/a was changed by another writer");
    has(p, "run/a", "theirs, of another length");
    has(p, "run/b", "old b");
    has(p, "run/index", NULL);
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/data/%s", staging, f[i].path);
        has(p, path, i == 0 ? "new a" : i == 1 ? "new b" : "index");
    }
    assert_false(publish_in_progress(p->dir, "run"));
}

/* A file of theirs where a new one is to be: the same. */
static void test_recover_meets_a_new_file(void **state)
{
    struct place *p = *state;
    struct err e = {0};
    struct publish_file f[2];

    put(p, "run/a", "old a");
    stage(p, "a", "new a");
    stage(p, "b", "new b");
    f[0] = file(p, PUBLISH_PUT, "a", 0);
    f[1] = file(p, PUBLISH_PUT, "b", 0);
    begin_step(p, f, 2);
    put(p, "run/b", "theirs");
    assert_int_equal(publish_recover(place(p), &e), -ESTALE);
    has(p, "run/a", "old a");
    has(p, "run/b", "theirs");
    unlinkat(p->dir, "run/b", 0);
    f[0] = file(p, PUBLISH_PUT, "a", 0);
    {
        struct publish_spec s = spec_of(p, f, 2);

        assert_ok(publish(&s, &e), &e);
    }
    has(p, "run/a", "new a");
    has(p, "run/b", "new b");
}

static void test_recover_refuses(void **state)
{
    struct place *p = *state;
    struct err e = {0};
    struct publish_file f;
    char path[80];

    put(p, "run/a", "old a");
    stage(p, "a", "new a");
    f = file(p, PUBLISH_PUT, "a", 0);
    begin_step(p, &f, 1);
    /* Another directory has the name now. */
    assert_int_equal(renameat(p->dir, "run", p->dir, "before"), 0);
    assert_int_equal(mkdirat(p->dir, "run", 0755), 0);
    assert_int_equal(publish_recover(place(p), &e), -EBUSY);
    assert_int_equal(unlinkat(p->dir, "run", AT_REMOVEDIR), 0);
    assert_int_equal(renameat(p->dir, "before", p->dir, "run"), 0);
    /* The journal is cut. */
    snprintf(path, sizeof path, "%s/redo", staging);
    {
        int fd = openat(p->dir, path, O_RDWR);
        struct stat st;

        assert_int_equal(fstat(fd, &st), 0);
        assert_int_equal(ftruncate(fd, st.st_size - 5), 0);
        close(fd);
    }
    assert_int_equal(publish_recover(place(p), &e), -EBADMSG);
    has(p, "run/a", "old a");
    begin_step(p, &f, 1);
    stage(p, "a", "something longer than that"); /* not what it speaks of */
    assert_int_equal(publish_recover(place(p), &e), -EBADMSG);
    has(p, "run/a", "old a");
    stage(p, "a", "new a");
    assert_int_equal(publish_recover(place(p), &e), 1);
    has(p, "run/a", "new a");
}

static void test_new(void **state)
{
    struct place *p = *state;
    struct err e = {0};
    char path[80];

    assert_int_equal(unlinkat(p->dir, "run", AT_REMOVEDIR), 0);
    stage(p, "a/b", "new");
    assert_ok(publish_new(place(p), &e), &e);
    has(p, "run/a/b", "new");
    has(p, staging, NULL);
    assert_int_equal(mkdirat(p->dir, staging, 0700), 0);
    stage(p, "c", "again");
    assert_int_equal(publish_new(place(p), &e), -EEXIST);
    has(p, "run/a/b", "new");
    snprintf(path, sizeof path, "%s/data/c", staging);
    has(p, path, "again");
    /* With data/ the mark is no rest. */
    assert_int_equal(publish_recover(place(p), &e), 0);
    has(p, path, "again");
}

/* Which file is exchanged, if any: the one whose arrival makes the new checkpoint. */
static void test_exchange_is_chosen(void **state)
{
    static const struct {
        struct {
            enum publish_kind kind;
            unsigned stage;
            bool had;
        } file[4];
        size_t files;
        int exchanged;
        bool holds;
    } cases[] = {
        {{{PUBLISH_PUT, 0, true}}, 1, 0, false},
        {{{PUBLISH_PUT, 0, false}}, 1, -1, false},
        {{{PUBLISH_REMOVE, 0, true}}, 1, -1, false},
        {{{PUBLISH_PUT, 0, false}, {PUBLISH_PUT, 1, true}}, 2, 1, false},
        {{{PUBLISH_PUT, 0, true}, {PUBLISH_PUT, 1, false}}, 2, -1, true},
        {{{PUBLISH_PUT, 0, false}, {PUBLISH_PUT, 0, true}}, 2, -1, true},
        {{{PUBLISH_PUT, 0, true}, {PUBLISH_PUT, 1, true}}, 2, -1, true},
        {{{PUBLISH_PUT, 0, true}, {PUBLISH_HOLD, 1, true}}, 2, 0, false},
        {{{PUBLISH_PUT, 0, true}, {PUBLISH_PUT, 0, true}, {PUBLISH_HOLD, 1, true}},
         3,
         -1,
         true},
        {{{PUBLISH_PUT, 0, false}, {PUBLISH_PUT, 1, true}, {PUBLISH_HOLD, 2, true}},
         3,
         -1,
         true},
        {{{PUBLISH_REMOVE, 0, true}, {PUBLISH_PUT, 1, true}}, 2, -1, true},
    };
    struct err e = {0};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct step s;
        const struct step_entry *got;

        step_init(&s);
        for (size_t k = 0; k < cases[i].files; k++) {
            char name[8];
            struct step_entry entry = {.kind = cases[i].file[k].kind,
                                       .stage = cases[i].file[k].stage,
                                       .had = cases[i].file[k].had};

            snprintf(name, sizeof name, "f%zu", k);
            entry.path = strdup(name);
            assert_ok(step_add(&s, &entry, &e), &e);
        }
        assert_ok(step_sort(&s, &e), &e);
        got = step_exchanged(&s);
        if (cases[i].exchanged != (got ? got - s.entry : -1) ||
            step_holds(&s) != cases[i].holds)
            fail_msg("case %zu", i);
        step_release(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_exchange_is_chosen),
        cmocka_unit_test_setup_teardown(test_step, setup, teardown),
        cmocka_unit_test_setup_teardown(test_attributes_are_kept, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stale, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_link_is_replaced, setup, teardown),
        cmocka_unit_test_setup_teardown(test_recover, setup, teardown),
        cmocka_unit_test_setup_teardown(test_recover_undoes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_recover_meets_a_new_file, setup, teardown),
        cmocka_unit_test_setup_teardown(test_recover_refuses, setup, teardown),
        cmocka_unit_test_setup_teardown(test_new, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
