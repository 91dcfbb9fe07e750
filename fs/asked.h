/* SPDX-License-Identifier: MIT */
/* fs/asked.h - does the process that made a request still wait for its answer? */
#ifndef UFS_FS_ASKED_H
#define UFS_FS_ASKED_H

#include "base/interrupt.h"
#include "fs/fs.h"

/* A request that is being answered, for base/interrupt.h. Until the answer is given. */
struct asked {
    struct interrupt base;
    fuse_req_t req;
    int64_t since_ns;
};

void asked_init(struct asked *a, fuse_req_t req);

/* Is this thread being killed? (SIGKILL, or any fatal signal once the kernel acts on it) */
bool asked_is_killed(pid_t tid);

/*
 * Does this thread close its files because a signal has ended its process? False also where
 * that is not to be seen: of another pid namespace, or of a user whose processes the server
 * may not look at.
 */
bool asked_was_killed(pid_t tid);

#endif
