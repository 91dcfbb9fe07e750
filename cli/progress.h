/* SPDX-License-Identifier: MIT */
/* cli/progress.h - how far long work is, on a terminal only: a line that goes away again. */
#ifndef UFS_CLI_PROGRESS_H
#define UFS_CLI_PROGRESS_H

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "cli/screen.h"

struct cli;

/*
 * Bytes done of all, rate and time left; where nobody knows how much there is (total 0),
 * what came so far and the time that it took. A thread of its own draws it on standard
 * error, so that work that stands still is seen to. All zero before it begins.
 */
struct progress {
    /* Set before it begins where the work is another process's: finds done and total. */
    void (*look)(void *user, struct progress *p);
    void *look_user;
    bool on;
    char what[48]; /* "verify step100" */
    uint64_t total;
    atomic_uint_fast64_t done;
    struct timespec start;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct screen screen; /* guarded by lock, with all that follows */
    double rate;          /* bytes a second, of the last seconds */
    uint64_t seen;        /* bytes at `when` */
    double when;
    unsigned drawings;
    bool drawn, ended;
};

/* `what` is the command, `name` what it works on, or NULL. -q: nothing is shown. */
void progress_begin(struct progress *p, const struct cli *c, const char *what,
                    const char *name, uint64_t total);
/* From any thread. */
void progress_add(struct progress *p, uint64_t bytes);
/* Takes the line away, and keeps it away until progress_show(): others print. */
void progress_hide(struct progress *p);
void progress_show(struct progress *p);
/* May be called again, and of one that never began. */
void progress_end(struct progress *p);

#endif
