/* SPDX-License-Identifier: MIT */
/* fs/guard.c - a server that is killed takes its connection to the kernel with it. */
#include "fs/guard.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

enum {
    DIED = SIGUSR1, /* the parent's main thread has ended: others of it may hang */
    LOOKS = 100,
    LOOK_NS = 10000000,
};

/* Has the main thread of the server ended? What cannot be asked now (no memory) has not. */
static bool is_dead(const char *stat_path)
{
    char text[512];
    const char *end;
    ssize_t n;
    int fd = open(stat_path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return errno == ENOENT || errno == ESRCH;
    n = read(fd, text, sizeof text - 1);
    if (n < 0) {
        bool gone = errno == ESRCH;

        close(fd);
        return gone;
    }
    close(fd);
    text[n] = '\0';
    end = strrchr(text, ')');
    return end && end[1] == ' ' && (end[2] == 'Z' || end[2] == 'X');
}

/* Anybody may send the signal. */
static bool has_died(const char *stat_path)
{
    const struct timespec wait = {.tv_nsec = LOOK_NS};

    for (int i = 0; i < LOOKS; i++) {
        if (is_dead(stat_path))
            return true;
        nanosleep(&wait, NULL);
    }
    return false;
}

/* In a process of its own, with all signals blocked: what ends the server does not end it. */
_Noreturn static void watch(int abort_fd, const char *stat_path)
{
    sigset_t died;

    sigemptyset(&died);
    sigaddset(&died, DIED);
    if (prctl(PR_SET_PDEATHSIG, DIED) < 0 || dup2(abort_fd, 0) < 0 ||
        close_range(1, ~0u, 0) < 0 || chdir("/") < 0)
        _exit(1);
    while (!is_dead(stat_path)) {
        sigwaitinfo(&died, NULL);
        if (has_died(stat_path))
            break;
    }
    _exit(write(0, "1", 1) != 1);
}

void guard_begin(struct guard *g, uint64_t device)
{
    char path[64], stat_path[40];
    sigset_t all, old;
    int fd;

    g->pid = 0;
    snprintf(path, sizeof path, "/sys/fs/fuse/connections/%u/abort",
             minor((dev_t)device));
    fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    snprintf(stat_path, sizeof stat_path, "/proc/%d/stat", (int)getpid());
    /* No /proc, or a hidden one: we would be taken for dead, or for alive for ever. */
    if (access(stat_path, R_OK) < 0 || is_dead(stat_path)) {
        close(fd);
        return;
    }
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &old);
    g->pid = fork();
    if (g->pid == 0)
        watch(fd, stat_path);
    sigprocmask(SIG_SETMASK, &old, NULL);
    g->pid = MAX(g->pid, 0);
    close(fd);
}

void guard_end(struct guard *g)
{
    if (g->pid == 0)
        return;
    kill(g->pid, SIGKILL);
    while (waitpid(g->pid, NULL, 0) < 0 && errno == EINTR)
        ;
    g->pid = 0;
}
