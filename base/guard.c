/* SPDX-License-Identifier: MIT */
/* base/guard.c - SIGBUS while copying becomes an error of that one copy. */
#include "base/guard.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>

/* Where to go on this thread; NULL: no guarded call is under way. */
static _Thread_local sigjmp_buf *volatile guard_target;

static void on_sigbus(int signo)
{
    sigjmp_buf *target = guard_target;

    if (target) {
        guard_target = NULL;
        siglongjmp(*target, 1);
    }
    signal(signo, SIG_DFL); /* not ours: die as without us */
    raise(signo);
}

int guard_install(void)
{
    /* SA_NODEFER: the handler is left by siglongjmp without restoring the mask. */
    struct sigaction act = {.sa_handler = on_sigbus, .sa_flags = SA_NODEFER};

    return sigaction(SIGBUS, &act, NULL) < 0 ? -errno : 0;
}

bool guard_installed(void)
{
    struct sigaction act;

    return sigaction(SIGBUS, NULL, &act) == 0 && !(act.sa_flags & SA_SIGINFO) &&
           act.sa_handler == on_sigbus;
}

int guard_run(int (*fn)(void *user), void *user)
{
    sigjmp_buf here;
    int ret;

    if (sigsetjmp(here, 0))
        return -EIO;
    guard_target = &here;
    ret = fn(user);
    guard_target = NULL;
    return ret;
}
