/* SPDX-License-Identifier: MIT */
/* save/upload.h - what the files of a save to a bucket share. */
#ifndef UFS_SAVE_UPLOAD_H
#define UFS_SAVE_UPLOAD_H

#include <pthread.h>

#include "base/base.h"
#include "base/buf.h"
#include "remote/bucket.h"
#include "save/files.h"
#include "save/parts.h"
#include "save/target.h"
#include "save/upload_journal.h"

/* A file of the layout. */
struct upload_file {
    struct parts parts;
    bool ours;     /* its parts are this process's to make */
    bool in_parts; /* it goes up as a multipart upload, before anything appears */
    bool there;    /* the object is complete, by an earlier process of this save */
    bool *part;    /* which parts the store has; NULL: none */
};

struct upload {
    struct save_target base;
    struct bucket *bucket;
    char *prefix;  /* of the checkpoint's keys, without a slash at its end */
    char *staging; /* of the journals' keys, with one */
    char *where;   /* "s3://bucket/prefix", for messages */
    char tag[33];  /* of the save: what its objects are known by */
    unsigned part, parts;
    bool finish, noted;                    /* noted: our journal is in the store */
    struct upload_journal journal, others; /* ours; when finishing, all parts' */
    struct save_run run;
    struct upload_file *file; /* of each file of the layout */
    size_t files;
    pthread_mutex_t lock; /* of progress */
};

/* "prefix/path". */
int upload_key(const struct upload *u, const char *path, struct buf *key,
               struct err *e);

/* Is the object there, and of this save? 1, 0: none or another's; or an error. */
int upload_is_ours(struct upload *u, const char *path, struct err *e);

/*
 * Of an answer that says that it is too late (-EEXIST, -ENOENT): 0 when it is this save's
 * object that is there, else the error in words.
 */
int upload_settle(struct upload *u, const char *path, int ret, struct err *e);

/* The journal as it is now goes to the store. `first`: only if there is none: -EBUSY. */
int upload_note(struct upload *u, bool first, struct err *e);

/* Begins what is not begun, and makes the parts that the store has not. */
int upload_make_parts(struct upload *u, struct err *e);

/* The files of these stages appear, in order; those before `from` did. */
int upload_show(struct upload *u, unsigned from, unsigned to, struct err *e);

/* Its parts, which are all there, become the object: one that is encoded is of any size. */
int upload_complete(struct upload *u, const char *path, const char *id,
                    const struct parts *parts, bool encoded, struct err *e);

#endif
