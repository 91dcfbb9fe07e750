/* SPDX-License-Identifier: MIT */
/* tests/unit/test_caller.c - acting as who asks, each caller a real process. As root; else left out. */
#include "fs/caller.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <linux/capability.h>

#define FUSE_USE_VERSION 314
#include <fuse_lowlevel.h>

#include "base/err.h"
#include "unit.h"

enum { USER = 61001, GROUP = 61001, MORE = 61002, OTHER = 61003, MANY = 3000 };

static char
    top[256]; /* and where the tests are: nobody needs to search what is above */

static void make_file(const char *name, uid_t uid, gid_t gid, mode_t mode)
{
    int fd = open(name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

    assert_true(fd >= 0);
    assert_int_equal(fchown(fd, uid, gid), 0);
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

static int make(void **state)
{
    const char *tmp = getenv("TMPDIR");

    (void)state;
    snprintf(top, sizeof top, "%.200s/caller-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(top) || chmod(top, 0755) < 0 || chdir(top) < 0)
        return -1;
    if (geteuid() != 0)
        return 0;
    make_file("of-root", 0, 0, 0600);
    make_file("of-user", USER, 0, 0400);
    make_file("of-group", 0, GROUP, 0040);
    make_file("of-more", 0, MORE, 0040);
    make_file("not-of-more", 0, MORE, 0604);
    return 0;
}

static int clean(void **state)
{
    char command[320];

    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", top);
    return system(command);
}

static int opens(const char *name)
{
    int fd = open(name, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return errno;
    close(fd);
    return 0;
}

/* A process that asks: it waits to be killed. */
static struct fuse_ctx asks(uid_t uid, gid_t gid, const gid_t *groups, size_t n)
{
    int ends[2];
    char c;
    pid_t pid;

    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (setgroups(n, groups) < 0 || setresgid(gid, gid, gid) < 0 ||
            setresuid(uid, uid, uid) < 0 || write(ends[1], "", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    assert_true(pid > 0);
    close(ends[1]);
    assert_int_equal(read(ends[0], &c, 1), 1);
    close(ends[0]);
    return (struct fuse_ctx){.uid = uid, .gid = gid, .pid = pid};
}

static void gone(const struct fuse_ctx *ctx)
{
    kill(ctx->pid, SIGKILL);
    waitpid(ctx->pid, NULL, 0);
}

/* The errno that this caller gets for the file, and that the server is itself again. */
static int opens_as(const struct fuse_ctx *ctx, const char *name)
{
    CLEANUP(caller_release) struct caller c = {0};
    struct caller_saved saved;
    struct err e = {0};
    int got;

    assert_ok(caller_of(ctx, &c, &e), &e);
    assert_ok(caller_enter(&c, &saved, &e), &e);
    got = opens(name);
    caller_leave(&saved);
    assert_int_equal(opens("of-root"), 0);
    return got;
}

static void what_a_user_may_open(void **state)
{
    static const struct {
        const char *name;
        int code;
    } cases[] = {{"of-root", EACCES},
                 {"of-user", 0},
                 {"of-group", 0},
                 {"of-more", 0},
                 {"not-of-more", EACCES}};
    const gid_t more[] = {OTHER, MORE};
    struct fuse_ctx ctx;

    (void)state;
    if (geteuid() != 0)
        leave_out("not root");
    ctx = asks(USER, GROUP, more, 2);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        if (opens_as(&ctx, cases[i].name) != cases[i].code)
            fail_msg("%s: not %d", cases[i].name, cases[i].code);
    gone(&ctx);
    ctx = asks(USER, GROUP, NULL, 0);
    assert_int_equal(opens_as(&ctx, "of-more"), EACCES);
    assert_int_equal(opens_as(&ctx, "not-of-more"), 0);
    gone(&ctx);
}

static void groups_are_those_of_the_process(void **state)
{
    gid_t *many = calloc(MANY, sizeof *many);
    struct caller c;
    struct err e = {0};
    struct fuse_ctx ctx;

    (void)state;
    if (geteuid() != 0) {
        free(many);
        leave_out("not root");
    }
    for (gid_t i = 0; i < MANY; i++)
        many[i] = 70000 + i;
    ctx = asks(USER, GROUP, many, MANY);
    assert_ok(caller_of(&ctx, &c, &e), &e);
    assert_true(c.has_groups);
    assert_int_equal(c.ngroups, MANY);
    assert_memory_equal(c.groups, many, MANY * sizeof *many);
    caller_release(&c);
    gone(&ctx);
    free(many);
}

/* Another user by now, one that is gone, and one that is not to be seen. */
static void whose_groups_are_not_told(void **state)
{
    const gid_t more[] = {MORE};
    struct caller c;
    struct err e = {0};
    struct fuse_ctx ctx, seen;

    (void)state;
    if (geteuid() != 0)
        leave_out("not root");
    ctx = asks(USER, GROUP, more, 1);
    seen = ctx;
    for (unsigned i = 0; i < 4; i++) {
        ctx = seen;
        if (i == 0)
            ctx.uid = OTHER;
        else if (i == 1)
            ctx.gid = OTHER;
        else if (i == 2)
            ctx.pid = 0;
        else
            gone(&seen);
        assert_ok(caller_of(&ctx, &c, &e), &e);
        assert_true(c.is_other);
        assert_false(c.has_groups);
        assert_int_equal(c.ngroups, 0);
        caller_release(&c);
    }
    ctx = (struct fuse_ctx){.uid = (uid_t)-1, .gid = GROUP};
    assert_int_equal(caller_of(&ctx, &c, &e), -EACCES);
}

/* Root in a container keeps its name, and not its rights. */
static void root_without_capabilities(void **state)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {{0}};
    struct fuse_ctx ctx = {.pid = 0};
    int ends[2];
    char c;

    (void)state;
    if (geteuid() != 0)
        leave_out("not root");
    assert_int_equal(opens_as(&ctx, "of-user"), 0); /* nothing is known of it */
    ctx.pid = getpid();
    assert_int_equal(opens_as(&ctx, "of-user"), 0);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    ctx.pid = fork();
    if (ctx.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (syscall(SYS_capset, &head, none) < 0 || write(ends[1], "", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &c, 1), 1);
    close(ends[0]);
    assert_int_equal(opens_as(&ctx, "of-root"), 0);
    assert_int_equal(opens_as(&ctx, "of-user"), EACCES);
    gone(&ctx);
}

static void what_is_made_is_the_callers(void **state)
{
    const gid_t more[] = {MORE};
    CLEANUP(caller_release) struct caller c = {0};
    struct caller_saved saved;
    struct err e = {0};
    const char *path = "drop/made";
    struct fuse_ctx ctx;
    struct stat st;

    (void)state;
    if (geteuid() != 0)
        leave_out("not root");
    assert_int_equal(mkdir("drop", 0700), 0);
    assert_int_equal(chmod("drop", 01777), 0);
    ctx = asks(USER, GROUP, more, 1);
    assert_ok(caller_of(&ctx, &c, &e), &e);
    assert_ok(caller_enter(&c, &saved, &e), &e);
    close(open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(chown(path, USER, MORE), 0);
    assert_int_equal(chown(path, USER, OTHER) < 0 ? errno : 0, EPERM);
    assert_int_equal(chown(path, 0, GROUP) < 0 ? errno : 0, EPERM);
    caller_leave(&saved);
    assert_int_equal(st.st_uid, USER);
    assert_int_equal(st.st_gid, GROUP);
    assert_int_equal(geteuid(), 0);
    assert_int_equal(chown(path, 0, 0), 0);
    gone(&ctx);
}

/* ---- threads ---- */

struct other_thread {
    atomic_bool *end;
    unsigned rounds, wrong;
};

static void *stays_root(void *user)
{
    struct other_thread *t = user;

    while (!*t->end) {
        t->wrong += opens("of-root") != 0;
        t->rounds++;
    }
    return NULL;
}

static void other_threads_stay_what_they_are(void **state)
{
    enum { ROUNDS = 3000 };
    const gid_t more[] = {MORE};
    atomic_bool end = false;
    struct other_thread t = {.end = &end};
    struct fuse_ctx ctx;
    pthread_t thread;

    (void)state;
    if (geteuid() != 0)
        leave_out("not root");
    ctx = asks(USER, GROUP, more, 1);
    assert_int_equal(pthread_create(&thread, NULL, stays_root, &t), 0);
    for (unsigned i = 0; i < ROUNDS; i++) {
        assert_int_equal(opens_as(&ctx, "of-root"), EACCES);
        assert_int_equal(opens_as(&ctx, "of-more"), 0);
    }
    end = true;
    pthread_join(thread, NULL);
    assert_int_equal(t.wrong, 0);
    gone(&ctx);
}

/* A server that is not root acts as itself. */
static void a_user_serves_as_itself(void **state)
{
    int status;
    pid_t pid;

    (void)state;
    pid = fork();
    if (pid == 0) {
        struct fuse_ctx ctx = {.uid = OTHER, .gid = OTHER};
        struct caller_saved saved;
        struct caller c;
        struct err e = {0};

        if (geteuid() == 0 &&
            (setgroups(0, NULL) < 0 || setresuid(USER, USER, USER) < 0))
            _exit(2);
        _exit(caller_of(&ctx, &c, &e) < 0 || !c.is_other || c.acts ||
              caller_enter(&c, &saved, &e) < 0 || saved.entered);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

/* Root that may not change its user serves no other. */
static void it_is_refused_where_it_cannot_be_done(void **state)
{
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct caps[2];
    int status;
    pid_t pid;

    (void)state;
    if (geteuid() != 0)
        leave_out("not root");
    for (int lacks = CAP_SETGID; lacks <= CAP_SETUID; lacks++) {
        pid = fork();
        if (pid == 0) {
            struct fuse_ctx ctx = {.uid = OTHER, .gid = OTHER};
            struct caller_saved saved;
            struct caller c;
            struct err e = {0};

            if (syscall(SYS_capget, &head, caps) < 0)
                _exit(2);
            caps[0].effective &= ~(1u << lacks);
            caps[0].permitted &= ~(1u << lacks);
            if (syscall(SYS_capset, &head, caps) < 0)
                _exit(3);
            _exit(caller_of(&ctx, &c, &e) < 0 || !c.acts ||
                  caller_enter(&c, &saved, &e) != -EPERM || saved.entered ||
                  !e.hint[0] || opens("of-user") != 0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_user_may_open),
        cmocka_unit_test(groups_are_those_of_the_process),
        cmocka_unit_test(whose_groups_are_not_told),
        cmocka_unit_test(root_without_capabilities),
        cmocka_unit_test(what_is_made_is_the_callers),
        cmocka_unit_test(other_threads_stay_what_they_are),
        cmocka_unit_test(a_user_serves_as_itself),
        cmocka_unit_test(it_is_refused_where_it_cannot_be_done),
    };

    return cmocka_run_group_tests(tests, make, clean);
}
