/* SPDX-License-Identifier: MIT */
/* cli/doctor.h - the checks of `unshard doctor`. */
#ifndef UFS_CLI_DOCTOR_H
#define UFS_CLI_DOCTOR_H

#include "cli/cli.h"

enum doctor_state { DOCTOR_FINE, DOCTOR_NOTE, DOCTOR_PROBLEM };

struct doctor {
    struct cli *c;
    unsigned told, problems;
};

/* One line; `hint` (or NULL) is what to do. */
void doctor_tell(struct doctor *d, enum doctor_state state, const char *what,
                 const char *hint, const char *fmt, ...) PRINTF(5, 6);

void doctor_fuse(struct doctor *d);    /* can one mount here? */
void doctor_cache(struct doctor *d);   /* the cache directory, and where sockets go */
void doctor_limits(struct doctor *d);  /* open files, memory, processors */
void doctor_confine(struct doctor *d); /* what keeps scans to reading */
void doctor_gpu(struct doctor *d);     /* driver, devices, their links */

/* What is staged in a directory and beside it, and whose it is; --discard removes what is dead. */
void doctor_leftovers(struct doctor *d, const char *dir);

#endif
