/* SPDX-License-Identifier: MIT */
/* fs/views.h - one tensor has several names: who changes it by one of them must not undo another. */
#ifndef UFS_FS_VIEWS_H
#define UFS_FS_VIEWS_H

#include "fs/stage.h"

/*
 * With the lock: may `name` in this directory of a stage be changed from the bytes that it has,
 * or (n is NULL, or no file) begins with, those of the checkpoint? -EBUSY with words: a tensor of
 * it has come by another name since, or is just coming, and a close of this one would undo that.
 * Whoever writes all of it anew need not ask: the last close counts.
 */
int views_check(struct fs *fs, const struct staged *dir, const char *name,
                const struct staged *n, struct err *e);

#endif
