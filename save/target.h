/* SPDX-License-Identifier: MIT */
/* save/target.h - where a save goes: a local directory, or a prefix of a bucket. */
#ifndef UFS_SAVE_TARGET_H
#define UFS_SAVE_TARGET_H

#include "base/base.h"
#include "save/staging.h"
#include "save/write.h"

struct err;
struct save_target;
struct source;

/*
 * Nothing of a save is seen as a checkpoint before `publish`. The calls come in this order,
 * from one thread: write, side any number of times, publish.
 */
struct save_target_ops {
    const char *name;

    /*
     * Writes what `run` says (its `dir` and `staging` are the target's to set), or goes on
     * where an earlier process was cut off. What the run points at must last until
     * publish() has returned.
     */
    int (*write)(struct save_target *t, const struct save_run *run, struct err *e);

    /* A file beside the tensors, by its name; what is there of it is written anew. */
    int (*side)(struct save_target *t, const char *name, struct source *src,
                struct err *e);

    /* The checkpoint is there, whole. */
    int (*publish)(struct save_target *t, struct err *e);

    /* Instead of publish(): nobody will go on with it; what can be removed is. */
    void (*abandon)(struct save_target *t);

    /* Leaves what is not published for another try. */
    void (*close)(struct save_target *t);
};

/* Kinds embed this as their first member. */
struct save_target {
    const struct save_target_ops *ops;
};

/*
 * claim->target is a local path, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX. Errors are
 * those of staging_open(); -ENOTSUP: a URL of another scheme. A mount's own staging is
 * staging_open()'s; what it claims here is a URL, where what a mount of this host that died
 * has begun is ended first.
 */
int save_target_open(const struct staging_claim *claim, struct save_target **out,
                     struct err *e);
void save_target_close(struct save_target *t); /* NULL is fine */

/* The two kinds. */
int save_local_open(const struct staging_claim *claim, struct save_target **out,
                    struct err *e);
int save_upload_open(const struct staging_claim *claim, struct save_target **out,
                     struct err *e);

#endif
