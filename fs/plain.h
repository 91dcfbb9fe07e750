/* SPDX-License-Identifier: MIT */
/* fs/plain.h - files and directories of the source that are no checkpoint's: changed as they are. */
#ifndef UFS_FS_PLAIN_H
#define UFS_FS_PLAIN_H

#include "fs/request.h"

struct node;
struct staged_handle;

/*
 * Trackers, logs, notes: a file there is the source's own file, written in place. All
 * answer the request or return a negative errno; without the lock of stages.
 */
int plain_create(struct request *r, struct node *dir, struct err *e);
/* r->as: its text. -EPERM: it leads to no directory of the source. */
int plain_symlink(struct request *r, struct node *dir, struct err *e);
int plain_open(struct request *r, const struct node *n, struct err *e);
int plain_remove(struct request *r, const struct node *dir, int flags, struct err *e);
int plain_rename(struct request *r, const struct node *from, const struct node *to,
                 struct err *e);

/* After a file was written or cut: attr_written_mode(). -1 with errno. */
int plain_written(const struct request *r, int fd);

/* fd: of an open file of it, or -1. Leaves the answer to the caller. */
int plain_setattr(struct request *r, const struct node *n, int fd,
                  const struct stat *attr, int to_set, struct err *e);

/* Names that came to this directory of the source and went are durable. */
int plain_fsyncdir(struct fs *fs, const struct node *dir, struct err *e);

#endif
