/* SPDX-License-Identifier: MIT */
/* fs/asked.c - does the process that made a request still wait for its answer? */
#include "fs/asked.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

/*
 * A program that handles a signal (a timer, a child's end) must not see EINTR from a read
 * that goes as reads do; from one that hangs it must, or ^C in a shell of Python does
 * nothing. Who is killed is let go at once.
 */
static const int64_t patience_ns = 1000000000;

bool asked_is_killed(pid_t tid)
{
    char path[64], line[256];
    unsigned long long pending = 0, bits;
    FILE *f;

    if (tid <= 0)
        return false; /* of another pid namespace: not to be seen */
    snprintf(path, sizeof path, "/proc/%d/status", (int)tid);
    f = fopen(path, "re");
    if (!f)
        return errno == ENOENT;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "SigPnd: %llx", &bits) == 1 ||
            sscanf(line, "ShdPnd: %llx", &bits) == 1)
            pending |= bits;
    fclose(f);
    return pending & 1ull << (SIGKILL - 1);
}

bool asked_was_killed(pid_t tid)
{
    enum { EXIT_CODE = 52, NAME_END = 2 }; /* fields of man 5 proc_pid_stat */
    char path[64], line[1024];
    const char *at;
    FILE *f;

    if (tid <= 0)
        return false;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)tid);
    f = fopen(path, "re");
    at = f && fgets(line, sizeof line, f) ? strrchr(line, ')') : NULL;
    if (f)
        fclose(f);
    for (int field = NAME_END; at && field < EXIT_CODE; field++)
        at = strchr(at + 1, ' ');
    return at && WIFSIGNALED(atoi(at));
}

static bool gave_up(struct interrupt *base)
{
    const struct asked *a = container_of(base, struct asked, base);

    if (!fuse_req_interrupted(a->req))
        return false;
    return now_ns() - a->since_ns > patience_ns ||
           asked_is_killed(fuse_req_ctx(a->req)->pid);
}

void asked_init(struct asked *a, fuse_req_t req)
{
    *a = (struct asked){.base.asked = gave_up, .req = req, .since_ns = now_ns()};
}
