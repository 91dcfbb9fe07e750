/* SPDX-License-Identifier: MIT */
/* fs/watch.h - sees checkpoints change and tells the kernel to forget what it cached. */
#ifndef UFS_FS_WATCH_H
#define UFS_FS_WATCH_H

#include "fs/fs.h"

struct generation;
struct watch;

/* Starts the thread. It alone notifies the kernel, never with a lock held. */
int watch_new(struct fs *fs, struct watch **out, struct err *e);

/* Ends the thread; others may still report changes, which nobody is told. */
void watch_stop(struct watch *w);
void watch_free(struct watch *w); /* NULL is fine, as above */

/* This generation is no longer what its directory shows. Any thread; never blocks. */
void watch_changed(struct fs *fs, struct generation *s);

/* It is, but its directory has other names beside: what was absent may be there. The same. */
void watch_names(struct fs *fs, struct generation *s);

/* One that slept is used: where all slept, the thread looks at once. Any thread; never blocks. */
void watch_soon(struct fs *fs);

#endif
