/* SPDX-License-Identifier: MIT */
/* fs/queue.h - threads for requests that wait for a scan, so that others need not. */
#ifndef UFS_FS_QUEUE_H
#define UFS_FS_QUEUE_H

#include "fs/fs.h"

struct queue;
struct request;

/*
 * Requests on one node (a checkpoint's directory, or what is inside one generation) run
 * one after the other on one thread: a hundred readers of a checkpoint that is being
 * scanned take one thread, not all. A request whose process was killed is answered while it
 * waits.
 */
int queue_new(struct fs *fs, struct queue **out, struct err *e);

/* The same for opens that make a copy first, each inode by itself: they take long. */
int queue_new_fills(struct fs *fs, struct queue **out, struct err *e);

/* Ends the threads. Requests that still wait are answered with EINTR. */
void queue_free(struct queue *l); /* NULL is fine */

/* Copies the request; answers it with ENOMEM when it cannot. */
void queue_add(struct queue *l, const struct request *r);

#endif
