/* SPDX-License-Identifier: MIT */
/* remote/credential_process.c - keys that a command of the user's own writes. */
#include "remote/credential_sources.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/interrupt.h"

extern char **environ;

enum {
    MAX_OUTPUT = 1 << 20,
    MAX_SECONDS = 60, /* it may ask somebody for a second factor */
    LOOK_MS = 100,    /* how often an interrupt is looked for */
};

/* ---- the command's words ---- */

/* Copies one word behind *p to *dst. False at a quote that does not end. */
static bool copy_word(const char **p, char **dst)
{
    char quote = '\0';

    for (; **p && (quote || !strchr(" \t\r\n", **p)); (*p)++) {
        char c = **p;

        if (quote ? c == quote : c == '\'' || c == '"') {
            quote = quote ? '\0' : c;
            continue;
        }
        /* Within "" a backslash is itself before all but these two. */
        if (c == '\\' && quote != '\'' &&
            (!quote || (*p)[1] == '"' || (*p)[1] == '\\')) {
            if ((*p)[1] == '\0')
                return false;
            c = *++*p;
        }
        *(*dst)++ = c;
    }
    *(*dst)++ = '\0';
    return quote == '\0';
}

int command_split(const char *command, char ***words, struct err *e)
{
    size_t len = strlen(command), most = len / 2 + 2, n = 0;
    char **list = malloc(most * sizeof *list + len + 1);
    char *text;

    if (!list)
        return err_nomem(e);
    text = (char *)(list + most);
    for (const char *p = command;;) {
        p += strspn(p, " \t\r\n");
        if (*p == '\0')
            break;
        list[n++] = text;
        if (!copy_word(&p, &text)) {
            n = 0;
            break;
        }
    }
    if (n == 0) {
        free(list);
        return err_set(e, EINVAL, "is no command, or has a quote that does not end");
    }
    list[n] = NULL;
    *words = list;
    return 0;
}

/* ---- running it ---- */

/* In a group of its own, with its signals as at the start and no input. */
static int spawn(char **words, int output, pid_t *pid)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    sigset_t none, all;
    int rc;

    sigemptyset(&none);
    sigfillset(&all);
    rc = posix_spawn_file_actions_init(&actions);
    if (rc)
        return -rc;
    rc = posix_spawnattr_init(&attr);
    if (rc) {
        posix_spawn_file_actions_destroy(&actions);
        return -rc;
    }
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, output, 1);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &all);
    posix_spawnattr_setpgroup(&attr, 0);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF |
                                        POSIX_SPAWN_SETPGROUP);
    rc = posix_spawnp(pid, words[0], &actions, &attr, words, environ);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&actions);
    return -rc;
}

static int64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* What is there: 1, the end: 0, or an error. */
static int read_some(int fd, struct buf *out, struct err *e)
{
    char part[4096];
    ssize_t n = read(fd, part, sizeof part);

    if (n < 0)
        return errno == EINTR ? 1 : err_set(e, errno, "%s", strerror(errno));
    if (n > 0 && buf_add(out, part, (size_t)n) < 0)
        return err_set(e, EFBIG, "wrote more than %d bytes", MAX_OUTPUT);
    explicit_bzero(part, sizeof part);
    return n > 0;
}

static int read_output(int fd, struct buf *out, struct err *e)
{
    int64_t end = now_ms() + MAX_SECONDS * 1000;
    int rc = 1;

    while (rc > 0) {
        struct pollfd p = {.fd = fd, .events = POLLIN};

        if (interrupt_asked())
            return err_set(e, EINTR, "interrupted");
        if (now_ms() > end)
            return err_set(e, ETIMEDOUT, "did not end within %d s", MAX_SECONDS);
        rc = poll(&p, 1, LOOK_MS);
        if (rc > 0)
            rc = read_some(fd, out, e);
        else
            rc = rc == 0 || errno == EINTR
                     ? 1
                     : err_set(e, errno, "poll: %s", strerror(errno));
    }
    return rc;
}

/* It has closed its output, or is to end: waits for it. */
static int reap(pid_t pid, bool end_it, struct err *e)
{
    int status = 0;

    if (end_it)
        kill(-pid, SIGKILL);
    while (waitpid(pid, &status, 0) < 0) {
        if (errno == ECHILD) /* SIGCHLD is ignored here: what it wrote must do */
            return 0;
        if (errno != EINTR)
            return err_set(e, errno, "waitpid: %s", strerror(errno));
    }
    if (end_it)
        return 0;
    if (WIFSIGNALED(status))
        return err_set(e, EACCES, "was ended by signal %d", WTERMSIG(status));
    return WEXITSTATUS(status)
               ? err_set(e, EACCES, "ended with status %d", WEXITSTATUS(status))
               : 0;
}

static int run(char **words, struct buf *out, struct err *e)
{
    CLEANUP_FD int from = -1;
    int ends[2], rc, reaped;
    pid_t pid;

    if (pipe2(ends, O_CLOEXEC) < 0)
        return err_set(e, errno, "pipe: %s", strerror(errno));
    from = ends[0];
    rc = spawn(words, ends[1], &pid);
    close(ends[1]);
    if (rc < 0)
        return err_set(e, -rc, "%s: %s", words[0], strerror(-rc));
    rc = read_output(from, out, e);
    reaped = reap(pid, rc < 0, e);
    return rc < 0 ? rc : reaped;
}

/* The format: "Sourcing credentials with an external process", AWS CLI user guide. */
int keys_from_process(const char *command, struct aws_keys *out, struct err *e)
{
    CLEANUP(buf_release) struct buf text = {.max = MAX_OUTPUT};
    CLEANUP_FREE char **words = NULL;
    int rc = command_split(command, &words, e);

    if (rc == 0)
        rc = run(words, &text, e);
    if (rc == 0)
        rc = keys_from_json(text.data ? text.data : "", text.len, "SessionToken", out,
                            e);
    if (text.data)
        explicit_bzero(text.data, text.len);
    return rc < 0 ? err_wrap(e, "credential_process") : 1;
}
