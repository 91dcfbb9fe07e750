/* SPDX-License-Identifier: MIT */
/* index/formats/scan_time.h - how long a scan may take. */
#ifndef UFS_INDEX_FORMATS_SCAN_TIME_H
#define UFS_INDEX_FORMATS_SCAN_TIME_H

#include "base/interrupt.h"

struct err;

/*
 * Budgets bound how much a scan reads and keeps, but not how long a disk takes to answer.
 * The largest checkpoint that they allow (10 million tensors) takes some ten minutes from
 * a good one. UNSHARD_SCAN_SECONDS is another limit; 0: none.
 */
enum { SCAN_SECONDS = 1800 };

/* A running scan, as the interrupt of its threads. */
struct scan_time {
    struct interrupt base;
    struct interrupt *outer; /* of who asked, or NULL: waits end for that as well */
    unsigned seconds;
    bool late; /* at its end */
};

/*
 * From here on this thread, and pools for it, are told when time is up, or when `stop`
 * (borrowed) becomes true.
 */
void scan_time_begin(struct scan_time *t, const atomic_bool *stop);

/* The same for work around a scan, which may take any time. */
void scan_time_begin_long(struct scan_time *t, const atomic_bool *stop);

/*
 * As before the begin. Gives rc back, or -ETIMEDOUT or -ECANCELED (stopped) with words: what
 * was read by then may lack anything.
 */
int scan_time_end(struct scan_time *t, int rc, struct err *e);

#endif
