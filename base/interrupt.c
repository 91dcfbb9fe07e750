/* SPDX-License-Identifier: MIT */
/* base/interrupt.c - does whoever asked for this still want it? For long waits. */
#include "base/interrupt.h"

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
