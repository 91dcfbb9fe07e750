/* SPDX-License-Identifier: MIT */
/* tests/unit/test_confine.c - what a confined process may not do any more, each tried in a child of its own. */
#include "tests/unit/unit.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "base/confine.h"

/* TOP/cache may be written, TOP/outside may not. */
struct place {
    char top[256], cache[288], outside[288], file[320];
};

static int make(void **state)
{
    static struct place p;
    const char *tmp = getenv("TMPDIR");
    FILE *f;

    snprintf(p.top, sizeof p.top, "%.200s/confine-XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(p.top))
        return -1;
    snprintf(p.cache, sizeof p.cache, "%s/cache", p.top);
    snprintf(p.outside, sizeof p.outside, "%s/outside", p.top);
    snprintf(p.file, sizeof p.file, "%s/file", p.outside);
    if (mkdir(p.cache, 0700) < 0 || mkdir(p.outside, 0700) < 0)
        return -1;
    f = fopen(p.file, "w");
    if (!f || fputs("as it was", f) < 0 || fclose(f) != 0)
        return -1;
    *state = &p;
    return 0;
}

static int clean(void **state)
{
    const struct place *p = *state;
    char command[320];

    snprintf(command, sizeof command, "rm -rf '%s'", p->top);
    return system(command);
}

/* ---- things to try: 0, or the errno that they got ---- */

static int told(long rc)
{
    return rc < 0 ? errno : 0;
}

static int run_program(const struct place *p)
{
    char *const args[] = {(char *)(uintptr_t) "true", NULL};

    (void)p;
    return told(execv("/bin/true", args));
}

static int run_in_child(const struct place *p)
{
    pid_t pid = fork();

    (void)p;
    if (pid == 0)
        _exit(0);
    return told(pid);
}

static int run_by_vfork(const struct place *p)
{
    (void)p;
    return told(
        syscall(SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL, NULL, NULL, NULL));
}

static int make_socket(const struct place *p)
{
    (void)p;
    return told(socket(AF_INET, SOCK_STREAM, 0));
}

static int make_socket6(const struct place *p)
{
    (void)p;
    return told(socket(AF_INET6, SOCK_DGRAM, 0));
}

static int make_netlink(const struct place *p)
{
    (void)p;
    return told(socket(AF_NETLINK, SOCK_RAW, 0));
}

/* As a name service would be asked. */
static int connect_local(const struct place *p)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    snprintf(to.sun_path, sizeof to.sun_path, "%.90s/socket", p->cache);
    return fd < 0 ? 0 : told(connect(fd, (const struct sockaddr *)&to, sizeof to));
}

static int trace_other(const struct place *p)
{
    (void)p;
    return told(ptrace(PTRACE_ATTACH, getppid(), NULL, NULL));
}

static int mount_over(const struct place *p)
{
    return told(mount("none", p->cache, "tmpfs", 0, NULL));
}

static int use_uring(const struct place *p)
{
    char params[256] = {0};

    (void)p;
    return told(syscall(SYS_io_uring_setup, 1, params));
}

static int enter_namespace(const struct place *p)
{
    (void)p;
    return told(unshare(CLONE_NEWUSER));
}

static int make_outside(const struct place *p)
{
    char path[400];

    snprintf(path, sizeof path, "%s/new", p->outside);
    return told(open(path, O_WRONLY | O_CREAT, 0600));
}

static int make_above(const struct place *p)
{
    char path[400];

    snprintf(path, sizeof path, "%s/../new", p->cache);
    return told(open(path, O_WRONLY | O_CREAT, 0600));
}

static int write_outside(const struct place *p)
{
    return told(open(p->file, O_WRONLY));
}

static int append_outside(const struct place *p)
{
    return told(open(p->file, O_RDWR | O_APPEND));
}

static int cut_outside(const struct place *p)
{
    return told(truncate(p->file, 0));
}

static int remove_outside(const struct place *p)
{
    return told(unlink(p->file));
}

static int rename_outside(const struct place *p)
{
    char path[400];

    snprintf(path, sizeof path, "%s/taken", p->cache);
    return told(rename(p->file, path));
}

static int link_outside(const struct place *p)
{
    char path[400];

    snprintf(path, sizeof path, "%s/link", p->outside);
    return told(symlink("/etc/passwd", path));
}

static int directory_outside(const struct place *p)
{
    char path[400];

    snprintf(path, sizeof path, "%s/dir", p->outside);
    return told(mkdir(path, 0700));
}

/* Through a link that lies where writing is allowed. */
static int write_through_link(const struct place *p)
{
    char path[400];

    snprintf(path, sizeof path, "%s/way-out", p->cache);
    return symlink(p->file, path) < 0 ? 0 : told(open(path, O_WRONLY));
}

/* ---- things that still work ---- */

static int write_cache(const struct place *p)
{
    char path[400], to[400];
    int fd;

    snprintf(path, sizeof path, "%s/index", p->cache);
    snprintf(to, sizeof to, "%s/index.1", p->cache);
    fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || write(fd, "x", 1) != 1 || ftruncate(fd, 0) < 0)
        return errno;
    return told(rename(path, to)) || told(unlink(to));
}

static int write_unnamed(const struct place *p)
{
    int fd = open(p->cache, O_TMPFILE | O_EXCL | O_RDWR, 0600);

    return fd < 0 || write(fd, "x", 1) != 1 ? errno : 0;
}

static int read_outside(const struct place *p)
{
    char text[16] = "";
    int fd = open(p->file, O_RDONLY);

    return fd < 0 || read(fd, text, 9) != 9 || strcmp(text, "as it was") != 0 ? EIO : 0;
}

static void *in_thread(void *user)
{
    *(int *)user = told(syscall(SYS_execve, "/bin/true", NULL, NULL));
    return NULL;
}

/* A thread can be made, and may do no more than its maker. */
static int start_thread(const struct place *p)
{
    pthread_t thread;
    int got = 0;

    (void)p;
    if (pthread_create(&thread, NULL, in_thread, &got) != 0)
        return EAGAIN;
    pthread_join(thread, NULL);
    return got;
}

static const struct attempt {
    const char *what;
    int (*fn)(const struct place *p);
    unsigned needs; /* of these, all */
    int want, other;
} attempts[] = {
    {"run a program", run_program, CONFINE_CALLS, EPERM, EACCES},
    {"fork", run_in_child, CONFINE_CALLS, EPERM, 0},
    {"vfork", run_by_vfork, CONFINE_CALLS, EPERM, 0},
    {"a socket of the internet", make_socket, CONFINE_CALLS, EPERM, 0},
    {"a socket of IPv6", make_socket6, CONFINE_CALLS, EPERM, 0},
    {"a netlink socket", make_netlink, CONFINE_CALLS, EPERM, 0},
    {"connect to a local socket", connect_local, CONFINE_CALLS, EPERM, 0},
    {"trace the parent", trace_other, CONFINE_CALLS, EPERM, 0},
    {"mount", mount_over, CONFINE_CALLS, EPERM, 0},
    {"io_uring", use_uring, CONFINE_CALLS, EPERM, 0},
    {"a new namespace", enter_namespace, CONFINE_CALLS, EPERM, 0},
    {"make a file outside", make_outside, CONFINE_FILES, EACCES, 0},
    {"make a file above the cache", make_above, CONFINE_FILES, EACCES, 0},
    {"open a file outside to write", write_outside, CONFINE_FILES, EACCES, 0},
    {"open a file outside to append", append_outside, CONFINE_FILES, EACCES, 0},
    {"cut a file outside", cut_outside, CONFINE_FILES, EACCES, 0},
    {"remove a file outside", remove_outside, CONFINE_FILES, EACCES, 0},
    {"move a file into the cache", rename_outside, CONFINE_FILES, EXDEV, EACCES},
    {"make a link outside", link_outside, CONFINE_FILES, EACCES, 0},
    {"make a directory outside", directory_outside, CONFINE_FILES, EACCES, 0},
    {"write through a link", write_through_link, CONFINE_FILES, EACCES, 0},
    {"write to the cache", write_cache, 0, 0, 0},
    {"an unnamed file in the cache", write_unnamed, 0, 0, 0},
    {"read outside", read_outside, 0, 0, 0},
    {"a program from a thread", start_thread, CONFINE_CALLS, EPERM, EACCES},
};

/* ---- each in a child ---- */

/* What the child got; -1: it ended otherwise. Its whole life is the attempt. */
static int try_confined(const struct place *p, const struct attempt *a, bool confined)
{
    const char *const writable[] = {p->cache, "/nowhere/at/all", NULL};
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        unsigned all = CONFINE_CALLS | CONFINE_FILES;

        if (confined && confine(all, writable) != confine_available())
            _exit(255);
        _exit(a->fn(p));
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status))
        return -1;
    return WEXITSTATUS(status);
}

static void test_attempt(void **state)
{
    const struct place *p = *state;
    unsigned has = confine_available();

    if (!has) {
        print_message("# nothing to be had: a sanitizer, or an old kernel\n");
        return;
    }
    for (size_t i = 0; i < ARRAY_SIZE(attempts); i++) {
        const struct attempt *a = &attempts[i];
        int got;

        if ((a->needs & has) != a->needs)
            continue;
        got = try_confined(p, a, true);
        if (got != a->want && !(a->other && got == a->other))
            fail_msg("%s: got errno %d (%s), expected %d", a->what, got, strerror(got),
                     a->want);
    }
    assert_int_equal(read_outside(p), 0);
}

/* The attempts are real ones: without confinement those that change nothing go through. */
static void test_unconfined(void **state)
{
    static int (*const harmless[])(const struct place *p) = {
        run_program,  run_in_child,   make_socket, make_socket6,
        make_netlink, append_outside, make_above};
    const struct place *p = *state;

    for (size_t i = 0; i < ARRAY_SIZE(harmless); i++) {
        const struct attempt a = {.fn = harmless[i]};
        int got = try_confined(p, &a, false);

        if (got != 0 && got != EAFNOSUPPORT)
            fail_msg("attempt %zu without confinement: errno %d", i, got);
    }
}

static void *wait_then_run(void *user)
{
    int *got = user;

    while (__atomic_load_n(got, __ATOMIC_ACQUIRE) < 0)
        ;
    *got = told(socket(AF_INET, SOCK_STREAM, 0));
    return NULL;
}

/* Threads that were there before are held to calls as well. */
static void test_all_threads(void **state)
{
    int status;
    pid_t pid;

    (void)state;
    if (!(confine_available() & CONFINE_CALLS))
        return;
    pid = fork();
    if (pid == 0) {
        pthread_t thread;
        int got = -1;

        if (pthread_create(&thread, NULL, wait_then_run, &got) != 0 ||
            confine(CONFINE_CALLS, NULL) != CONFINE_CALLS)
            _exit(255);
        __atomic_store_n(&got, 0, __ATOMIC_RELEASE);
        pthread_join(thread, NULL);
        _exit(got);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), EPERM);
}

static void test_switched_off(void **state)
{
    const struct place *p = *state;
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        setenv("UNSHARD_CONFINE", "0", 1);
        if (confine_available() || confine(CONFINE_CALLS | CONFINE_FILES, NULL))
            _exit(255);
        _exit(append_outside(p));
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unconfined),
        cmocka_unit_test(test_attempt),
        cmocka_unit_test(test_all_threads),
        cmocka_unit_test(test_switched_off),
    };

    return cmocka_run_group_tests_name("confine", tests, make, clean);
}
