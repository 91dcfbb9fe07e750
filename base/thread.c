/* SPDX-License-Identifier: MIT */
/* base/thread.c - starts threads that leave the process's signals to its own. */
#include "base/thread.h"

#include <signal.h>

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
