/* SPDX-License-Identifier: MIT */
/* fs/stage_priv.h - what the parts of stages share. */
#ifndef UFS_FS_STAGE_PRIV_H
#define UFS_FS_STAGE_PRIV_H

#include "fs/stage.h"
#include "save/staging.h"

enum { TURNED_MAX = 64 };

/* A thread of a program that was told ESTALE. */
struct turned {
    pid_t pid;
    int64_t ns;
};

struct stages {
    pthread_rwlock_t place; /* who replaces a checkpoint; all who change plain files */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* guarded by lock */
    struct stage *first;
    struct staged **table; /* by number */
    size_t cap, free;
    uint64_t generation, stages;
    void *covers; /* staged nodes by what they cover */
    struct staging_swept swept;
    void *plain; /* paging of files of the source, by their nodes (fs/around.c) */
    struct turned turned[TURNED_MAX]; /* who may come back by the name, a ring */
    unsigned turns;
    /* of fs/around.c */
    pthread_t dropper;
    pthread_cond_t drop_more;
    struct around *dropping;
    bool drops, drop_stop;
};

/* A directory or file of no stage yet. */
struct staged *staged_make(struct fs *fs, const char *name, enum staged_kind kind,
                           mode_t mode);
/* With the lock: out of its stage with all that is below it; what has it open may go on. */
void staged_end(struct fs *fs, struct staged *n);
/* At the end of the mount, whoever may still know it. */
void staged_free(struct staged *n);

#endif
