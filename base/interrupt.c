/* SPDX-License-Identifier: MIT */
/* base/interrupt.c - does whoever asked for this still want it? For long waits. */
#include "base/interrupt.h"

#include <errno.h>
#include <time.h>

#include "base/err.h"

enum { MOMENT_NS = 100000000 };

/* Who asks this thread; set and put back around work for somebody. */
static _Thread_local struct interrupt *current;

struct interrupt *interrupt_set(struct interrupt *i)
{
    struct interrupt *before = current;

    current = i;
    return before;
}

struct interrupt *interrupt_current(void)
{
    return current;
}

bool interrupt_asked(void)
{
    return current && current->asked(current);
}

void interrupt_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t monotonic;

    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

int interrupt_wait(pthread_cond_t *cond, pthread_mutex_t *lock, struct err *e)
{
    struct timespec t;

    if (interrupt_asked())
        return err_set(e, EINTR, "interrupted");
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_nsec += MOMENT_NS;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    pthread_cond_timedwait(cond, lock, &t);
    return 0;
}

bool interrupt_late(void)
{
    struct timespec t;

    if (current && current->stop && *current->stop)
        return true;
    if (!current || !current->until_ns)
        return false;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec > current->until_ns;
}

int interrupt_check_late(struct err *e)
{
    return interrupt_late() ? err_set(e, EINTR, "out of time") : 0;
}
