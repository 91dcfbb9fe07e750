/* SPDX-License-Identifier: MIT */
/* fs/lane.h - threads for requests that wait for a scan, so that others need not. */
#ifndef UFS_FS_LANE_H
#define UFS_FS_LANE_H

#include "fs/fs.h"

struct lane;
struct request;

/*
 * Requests on one node (a checkpoint's directory, or what is inside one generation) run
 * one after the other on one thread: a hundred readers of a checkpoint that is being
 * scanned take one thread, not all. A request whose process was killed is answered while it
 * waits.
 */
int lane_new(struct fs *fs, struct lane **out, struct err *e);

/* The same for opens that make a copy first, each inode by itself: they take long. */
int lane_new_fills(struct fs *fs, struct lane **out, struct err *e);

/* Ends the threads. Requests that still wait are answered with EINTR. */
void lane_free(struct lane *l); /* NULL is fine */

/* Copies the request; answers it with ENOMEM when it cannot. */
void lane_add(struct lane *l, const struct request *r);

#endif
