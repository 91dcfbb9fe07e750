/* SPDX-License-Identifier: MIT */
/* base/interrupt.h - does whoever asked for this still want it? For long waits. */
#ifndef UFS_BASE_INTERRUPT_H
#define UFS_BASE_INTERRUPT_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"

struct err;

/* Embedded by who knows. `asked` may be called by any thread that works for it. */
struct interrupt {
    bool (*asked)(struct interrupt *self);
    int64_t
        until_ns; /* monotonic: the work ends then, wanted or not; 0: no such time */
    const atomic_bool *stop; /* the same as soon as this is true; or NULL */
};

/*
 * Sets it for this thread (NULL: none) and returns what was set before, which the caller
 * puts back. Work that a thread hands to a pool and waits for goes by the same (base/pool.h).
 */
struct interrupt *interrupt_set(struct interrupt *i);
struct interrupt *interrupt_current(void);

/* True: waits of this thread shall end, with -EINTR. */
bool interrupt_asked(void);

/*
 * Waits on a condition of the monotonic clock, until it is signalled or for a moment: -EINTR
 * once waits shall end. For loops that wait for somebody else's work.
 */
int interrupt_wait(pthread_cond_t *cond, pthread_mutex_t *lock, struct err *e);
/* Makes such a condition. */
void interrupt_cond_init(pthread_cond_t *cond);

/* True: it is later than until_ns, or stopped; for work that others want too, whoever gave up. */
bool interrupt_late(void);
int interrupt_check_late(struct err *e); /* the same as -EINTR, with words */

#endif
