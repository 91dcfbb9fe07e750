/* SPDX-License-Identifier: MIT */
/* tests/unit/test_fsutil.c - exact reads, opening below a directory, the cache directory. */
#include "unit.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "base/err.h"
#include "base/fsutil.h"

/* A fresh directory, which setup() makes and the tests leave their files in. */
struct place {
    char path[64];
    int fd;
};

static void put(int dirfd, const char *name, const char *text)
{
    int fd = openat(dirfd, name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    struct err e = {0};

    assert_true(fd >= 0);
    assert_ok(write_all(fd, text, strlen(text), &e), &e);
    close(fd);
}

static int setup(void **state)
{
    struct place *p = calloc(1, sizeof *p);

    snprintf(p->path, sizeof p->path, "/tmp/test_fsutil.XXXXXX");
    if (!mkdtemp(p->path))
        return -1;
    p->fd = open(p->path, O_DIRECTORY | O_CLOEXEC);
    *state = p;
    return p->fd < 0;
}

static int teardown(void **state)
{
    struct place *p = *state;
    char command[128];
    int rc;

    snprintf(command, sizeof command, "rm -rf %s", p->path);
    rc = system(command);
    close(p->fd);
    free(p);
    return rc;
}

static void test_read_exact(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    char got[8] = {0};
    int fd;

    put(p->fd, "ten", "0123456789");
    fd = openat(p->fd, "ten", O_RDONLY);
    assert_ok(read_exact(fd, got, 4, 6, &e), &e);
    assert_string_equal(got, "6789");
    assert_ok(read_exact(fd, got, 0, 10, &e), &e);
    assert_int_equal(read_exact(fd, got, 4, 7, &e), -EBADMSG);
    assert_string_equal(e.text, "file ends at byte 10, 4 bytes wanted at 7");
    assert_int_equal(read_exact(fd, got, 4, UINT64_MAX - 1, &e), -EBADMSG);
    close(fd);
    assert_int_equal(read_exact(fd, got, 4, 0, &e), -EBADF);
}

static void test_write_all_tells_why(void **state)
{
    int fd = open("/dev/full", O_WRONLY);
    struct err e = {0};

    (void)state;
    assert_int_equal(write_all(fd, "abc", 3, &e), -ENOSPC);
    assert_string_equal(e.text, "write of 3 bytes: No space left on device");
    close(fd);
}

static void test_file_id(void **state)
{
    const struct place *p = *state;
    struct file_id before, after;
    struct stat st;

    put(p->fd, "a", "x");
    assert_int_equal(fstatat(p->fd, "a", &st, 0), 0);
    before = file_id_of(&st);
    assert_true(before.size == 1 && before.ino == st.st_ino);
    assert_true(before.mtime_ns ==
                st.st_mtim.tv_sec * INT64_C(1000000000) + st.st_mtim.tv_nsec);
    after = before;
    assert_true(file_id_equal(&before, &after));
    after.ctime_ns++;
    assert_false(file_id_equal(&before, &after));
}

/* The tree that the table below opens. */
static void make_tree(int dirfd)
{
    char deep[3 * 300 + 1] = "", name[16];

    assert_int_equal(mkdirat(dirfd, "root", 0700), 0);
    put(dirfd, "outside", "outside");
    dirfd = openat(dirfd, "root", O_DIRECTORY);
    assert_int_equal(mkdirat(dirfd, "d", 0700), 0);
    assert_int_equal(mkdirat(dirfd, "d/e", 0700), 0);
    put(dirfd, "top", "top");
    put(dirfd, "d/file", "file");
    put(dirfd, "d/e/leaf", "leaf");
    assert_int_equal(symlinkat("d/file", dirfd, "to_file"), 0);
    assert_int_equal(symlinkat("e", dirfd, "d/to_e"), 0);
    assert_int_equal(symlinkat("d/to_e/", dirfd, "to_e_slash"), 0);
    assert_int_equal(symlinkat("../../top", dirfd, "d/e/up"), 0);
    assert_int_equal(symlinkat("../outside", dirfd, "out"), 0);
    assert_int_equal(symlinkat("/etc/passwd", dirfd, "absolute"), 0);
    assert_int_equal(symlinkat("loop", dirfd, "loop"), 0);
    assert_int_equal(symlinkat("nothing", dirfd, "dangling"), 0);
    assert_int_equal(symlinkat("d/file/", dirfd, "file_slash"), 0);
    assert_int_equal(mkfifoat(dirfd, "fifo", 0600), 0);
    for (int i = 0; i < 45; i++) { /* link0 -> link1 -> ... -> link45, a file */
        snprintf(name, sizeof name, "link%d", i);
        snprintf(deep, sizeof deep, "link%d", i + 1);
        assert_int_equal(symlinkat(deep, dirfd, name), 0);
    }
    put(dirfd, "link45", "end");
    close(dirfd);
}

struct open_case {
    const char *path;
    int want; /* or what the file holds: */
    const char *text;
    struct open_rule rule;
};

#define BENEATH                                                                        \
    {                                                                                  \
        .beneath = true                                                                \
    }
#define NO_LINKS                                                                       \
    {                                                                                  \
        .beneath = true, .no_links = true                                              \
    }
#define DIRECTORY                                                                      \
    {                                                                                  \
        .beneath = true, .flags = O_DIRECTORY                                          \
    }

static const struct open_case open_cases[] = {
    {"top", 0, "top", BENEATH},
    {"./d//e/./leaf", 0, "leaf", BENEATH},
    {"d/../top", 0, "top", BENEATH},
    {"d/e/../../d/file", 0, "file", BENEATH},
    {"to_file", 0, "file", BENEATH},
    {"d/to_e/leaf", 0, "leaf", BENEATH},
    {"to_e_slash/leaf", 0, "leaf", BENEATH},
    {"d/to_e/../file", 0, "file", BENEATH},
    {"d/e/up", 0, "top", BENEATH},
    {"link6", 0, "end", BENEATH}, /* 39 links */
    {"link5", 0, "end", BENEATH}, /* 40 */
    {"link4", -ELOOP, NULL, BENEATH},
    {"loop", -ELOOP, NULL, BENEATH},
    {"out", -EXDEV, NULL, BENEATH},
    {"absolute", -EXDEV, NULL, BENEATH},
    {"/etc/passwd", -EXDEV, NULL, BENEATH},
    {"../outside", -EXDEV, NULL, BENEATH},
    {"d/../../outside", -EXDEV, NULL, BENEATH},
    {"..", -EXDEV, NULL, BENEATH},
    {"d/../../root/top", -EXDEV, NULL, BENEATH},
    {"dangling", -ENOENT, NULL, BENEATH},
    {"none", -ENOENT, NULL, BENEATH},
    {"none/top", -ENOENT, NULL, BENEATH},
    {"", -ENOENT, NULL, BENEATH},
    {"top/", -ENOTDIR, NULL, BENEATH},
    {"top/.", -ENOTDIR, NULL, BENEATH},
    {"top/x", -ENOTDIR, NULL, BENEATH},
    {"top/..", -ENOTDIR, NULL, BENEATH},
    {"file_slash", -ENOTDIR, NULL, BENEATH},
    {"to_file/", -ENOTDIR, NULL, BENEATH},
    {"fifo", 0, "", BENEATH}, /* does not block */
    {"to_file", -ELOOP, NULL, NO_LINKS},
    {"d/to_e/leaf", -ELOOP, NULL, NO_LINKS},
    {"d/e/leaf", 0, "leaf", NO_LINKS},
    {"../outside", -EXDEV, NULL, NO_LINKS},
    {"../outside", 0, "outside", {.no_links = true}},
    {"../outside", 0, "outside", {.beneath = false}},
    {"out", 0, "outside", {.beneath = false}},
    {"out", -ELOOP, NULL, {.no_links = true}},
    {"/etc/../dev/null", 0, "", {.no_links = true}},
    {".", 0, NULL, DIRECTORY},
    {"d/..", 0, NULL, DIRECTORY},
    {"d/to_e", 0, NULL, DIRECTORY},
    {"d/", 0, NULL, BENEATH},
    {"top", -ENOTDIR, NULL, DIRECTORY},
    {"to_file", 0, NULL, {.beneath = true, .flags = O_PATH}},
    {"to_file", -ELOOP, NULL, {.beneath = true, .flags = O_NOFOLLOW}},
};

/* How many cases went wrong; both values of those are printed. */
static int count_wrong_opens(int dirfd)
{
    int wrong = 0;

    for (size_t i = 0; i < ARRAY_SIZE(open_cases); i++) {
        const struct open_case *c = &open_cases[i];
        CLEANUP_FD int fd = open_below(dirfd, c->path, &c->rule);
        char text[32] = "";
        bool good = (fd < 0 ? fd : 0) == c->want;

        if (fd >= 0 && c->text)
            good = good && read(fd, text, sizeof text - 1) >= 0 &&
                   strcmp(text, c->text) == 0;
        if (fd >= 0)
            good = good && (fcntl(fd, F_GETFD) & FD_CLOEXEC);
        if (!good)
            fprintf(stderr, "open_below %zu \"%s\": %d \"%s\", not %d \"%s\"\n", i,
                    c->path, fd, text, c->want, c->text ? c->text : "");
        wrong += !good;
    }
    return wrong;
}

/* Makes openat2 fail with `code` for this process, as an old kernel or sandbox does. */
static bool forbid_openat2(int code)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat2, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)code),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = ARRAY_SIZE(filter), .filter = filter};

    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0 &&
           syscall(SYS_openat2, -1, "x", NULL, 0) < 0 && errno == code;
}

static int count_fds(void)
{
    int n = 0;

    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* The same table in a child without openat2. 200: no such filter can be had here. */
static int wrong_opens_without(int dirfd, int code)
{
    pid_t pid = fork();
    int status = 0, fds;

    if (pid == 0) {
        if (!forbid_openat2(code))
            _exit(200);
        fds = count_fds();
        status = count_wrong_opens(dirfd);
        _exit(status + (count_fds() != fds) * 100);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void test_open_below(void **state)
{
    const struct place *p = *state;
    CLEANUP_FD int dirfd = -1;

    make_tree(p->fd);
    dirfd = openat(p->fd, "root", O_PATH | O_DIRECTORY);
    assert_int_equal(count_wrong_opens(dirfd), 0);
}

static void test_open_below_without_openat2(void **state)
{
    static const int codes[] = {ENOSYS, EPERM};
    const struct place *p = *state;
    CLEANUP_FD int dirfd = -1;

    make_tree(p->fd);
    dirfd = openat(p->fd, "root", O_PATH | O_DIRECTORY);
    for (size_t i = 0; i < ARRAY_SIZE(codes); i++) {
        int wrong = wrong_opens_without(dirfd, codes[i]);

        if (wrong == 200)
            leave_out("no filter of system calls is to be had");
        assert_int_equal(wrong, 0);
    }
}

static void test_open_below_refuses_magic_links(void **state)
{
    const struct open_rule rule = {.beneath = true};
    CLEANUP_FD int proc = open("/proc/self", O_PATH | O_DIRECTORY);
    int rc = open_below(proc, "root/etc/passwd", &rule);

    (void)state;
    assert_true(rc == -ELOOP || rc == -EXDEV);
}

static void test_make_dirs(void **state)
{
    const struct place *p = *state;
    struct err e = {0};
    struct stat st;
    char path[128];

    snprintf(path, sizeof path, "%s/a/b//c/", p->path);
    assert_ok(make_dirs(path, 0700, &e), &e);
    assert_ok(make_dirs(path, 0700, &e), &e);
    assert_int_equal(fstatat(p->fd, "a/b/c", &st, 0), 0);
    assert_int_equal(st.st_mode & 07777, 0700);
    put(p->fd, "a/file", "");
    snprintf(path, sizeof path, "%s/a/file", p->path);
    assert_int_equal(make_dirs(path, 0700, &e), -ENOTDIR);
    snprintf(path, sizeof path, "%s/a/file/x", p->path);
    assert_int_equal(make_dirs(path, 0700, &e), -ENOTDIR);
    assert_has(e.text, "a/file/x: Not a directory");
    assert_ok(make_dirs("/", 0700, &e), &e);
}

/* Runs cache_dir() in this environment; `want` is below the place. */
static void check_cache(const struct place *p, const char *override, const char *want)
{
    CLEANUP(buf_release) struct buf out = {0};
    char path[128], tag[128] = "";
    struct err e = {0};
    struct stat st;
    int fd;

    assert_ok(cache_dir(override, &out, &e), &e);
    snprintf(path, sizeof path, "%s/%s", p->path, want);
    assert_string_equal(out.data, path);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0700);
    snprintf(path, sizeof path, "%s/CACHEDIR.TAG", out.data);
    fd = open(path, O_RDONLY);
    assert_true(read(fd, tag, sizeof tag - 1) > 0);
    close(fd);
    assert_int_equal(strncmp(tag, "Signature: 8a477f597d28d172789f06886806bc55\n", 44),
                     0);
}

static void test_cache_dir(void **state)
{
    const struct place *p = *state;
    CLEANUP(buf_release) struct buf out = {0};
    struct err e = {0};
    char xdg[128], own[128];

    snprintf(xdg, sizeof xdg, "%s/xdg", p->path);
    snprintf(own, sizeof own, "%s/own/one", p->path);
    setenv("HOME", p->path, 1);
    setenv("XDG_CACHE_HOME", xdg, 1);
    check_cache(p, NULL, "xdg/unshardfs");
    check_cache(p, "", "xdg/unshardfs");
    check_cache(p, own, "own/one");
    setenv("XDG_CACHE_HOME", "not/absolute", 1);
    check_cache(p, NULL, ".cache/unshardfs");
    unsetenv("XDG_CACHE_HOME");
    check_cache(p, NULL, ".cache/unshardfs");
    unsetenv("HOME");
    assert_int_equal(cache_dir(NULL, &out, &e), -ENOENT);
    assert_has(e.hint, "cache_dir=");
}

static void test_cache_dir_that_others_can_write(void **state)
{
    const struct place *p = *state;
    CLEANUP(buf_release) struct buf out = {0};
    struct err e = {0};
    char path[128];

    assert_int_equal(mkdirat(p->fd, "shared", 0700), 0);
    assert_int_equal(fchmodat(p->fd, "shared", 0770, 0), 0);
    snprintf(path, sizeof path, "%s/shared", p->path);
    assert_int_equal(cache_dir(path, &out, &e), -EPERM);
    assert_has(e.text, "can be written by other users");
}

/* Whoever made a link says where the cache goes: ourselves, root, and nobody else. */
static void test_cache_dir_behind_links(void **state)
{
    static const char *const names[] = {"link", "link/", "link/.", "link/below",
                                        "link//below/"};
    const struct place *p = *state;
    struct err e = {0};
    char path[160];

    assert_int_equal(mkdirat(p->fd, "cache", 0700), 0);
    assert_int_equal(symlinkat("cache", p->fd, "link"), 0);
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        CLEANUP(buf_release) struct buf out = {0};

        snprintf(path, sizeof path, "%s/%s", p->path, names[i]);
        assert_ok(cache_dir(path, &out, &e), &e);
    }
    if (geteuid() != 0)
        leave_out("not root: no link of another user's can be made");
    assert_int_equal(fchownat(p->fd, "link", 61001, 61001, AT_SYMLINK_NOFOLLOW), 0);
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        CLEANUP(buf_release) struct buf out = {0};

        snprintf(path, sizeof path, "%s/%s", p->path, names[i]);
        assert_int_equal(cache_dir(path, &out, &e), -EPERM);
        assert_has(e.text, "user 61001 made this link");
    }
    assert_int_equal(unlinkat(p->fd, "link", 0), 0);
    assert_int_equal(symlinkat("nowhere", p->fd, "link"), 0);
    assert_int_equal(fchownat(p->fd, "link", 61001, 61001, AT_SYMLINK_NOFOLLOW), 0);
    snprintf(path, sizeof path, "%s/link", p->path);
    {
        CLEANUP(buf_release) struct buf out = {0};

        assert_int_equal(cache_dir(path, &out, &e), -EPERM);
    }
    assert_int_equal(faccessat(p->fd, "nowhere", F_OK, 0), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_read_exact, setup, teardown),
        cmocka_unit_test(test_write_all_tells_why),
        cmocka_unit_test_setup_teardown(test_file_id, setup, teardown),
        cmocka_unit_test_setup_teardown(test_open_below, setup, teardown),
        cmocka_unit_test_setup_teardown(test_open_below_without_openat2, setup,
                                        teardown),
        cmocka_unit_test(test_open_below_refuses_magic_links),
        cmocka_unit_test_setup_teardown(test_make_dirs, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cache_dir, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cache_dir_that_others_can_write, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_cache_dir_behind_links, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
