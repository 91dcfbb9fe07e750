/* SPDX-License-Identifier: MIT */
/* fs/inuse.h - which processes keep a mount busy. */
#ifndef UFS_FS_INUSE_H
#define UFS_FS_INUSE_H

#include "base/buf.h"

enum { INUSE_NAMED = 3 };

/*
 * Appends "bash (pid 12), cat (pid 13)": processes that stand at `path` or below it, or have
 * files open or mapped there, as far as we may see that; the file system is not asked. How
 * many there are, of which INUSE_NAMED are named.
 */
size_t inuse_list(const char *path, struct buf *out);

/* Appends "/dev/loop0 (an image at PATH)" for each loop device with a file of it: how many. */
size_t inuse_loops(const char *path, struct buf *out);

#endif
