/* SPDX-License-Identifier: MIT */
/* index/formats/scan_time.c - how long a scan may take. */
#include "index/formats/scan_time.h"

#include <errno.h>
#include <time.h>

#include "base/env.h"
#include "base/err.h"

static const int64_t second_ns = 1000000000;

static bool asked(struct interrupt *base)
{
    struct scan_time *t = container_of(base, struct scan_time, base);

    return (t->outer && t->outer->asked(t->outer)) || interrupt_late();
}

static void begin(struct scan_time *t, unsigned seconds, const atomic_bool *stop)
{
    struct timespec now;

    *t = (struct scan_time){.base = {.asked = asked, .stop = stop}, .seconds = seconds};
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (seconds)
        t->base.until_ns = (now.tv_sec + seconds) * second_ns + now.tv_nsec;
    t->outer = interrupt_set(&t->base);
}

void scan_time_begin(struct scan_time *t, const atomic_bool *stop)
{
    begin(t, env_seconds("UNSHARD_SCAN_SECONDS", SCAN_SECONDS), stop);
}

void scan_time_begin_long(struct scan_time *t, const atomic_bool *stop)
{
    begin(t, 0, stop);
}

int scan_time_end(struct scan_time *t, int rc, struct err *e)
{
    t->late = interrupt_late();
    interrupt_set(t->outer);
    if (!t->late)
        return rc;
    *e = (struct err){0};
    if (*t->base.stop)
        return err_set(e, ECANCELED, "the scan was given up: the mount ends");
    err_set(e, ETIMEDOUT, "the scan took longer than %u s", t->seconds);
    return err_hint(e, "mount it again, with UNSHARD_SCAN_SECONDS=N for more time");
}
