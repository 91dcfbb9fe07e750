/* SPDX-License-Identifier: MIT */
/* base/thread.c - starts threads that leave the process's signals to its own; their processors. */
#include "base/thread.h"

#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

int thread_start(pthread_t *out, void *(*fn)(void *user), void *user)
{
    static const int own[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP};
    sigset_t all, old;
    int rc;

    sigfillset(&all);
    for (size_t i = 0; i < ARRAY_SIZE(own); i++)
        sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    rc = pthread_create(out, NULL, fn, user);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

unsigned thread_processors(void)
{
    cpu_set_t set;
    long online;

    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return (unsigned)CPU_COUNT(&set);
    online = sysconf(_SC_NPROCESSORS_ONLN); /* more than 1024 of them */
    return online > 0 && online < INT_MAX ? (unsigned)online : 1;
}
