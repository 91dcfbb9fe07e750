/* SPDX-License-Identifier: MIT */
/* fs/written.h - the files of the source that programs wrote through this mount. */
#ifndef UFS_FS_WRITTEN_H
#define UFS_FS_WRITTEN_H

#include "base/base.h"

struct err;
struct stat;
struct written;

/*
 * A file that is a checkpoint by itself is shown as a directory, which who has just written it
 * would neither find again nor write over: with keep_files what came through this mount stays
 * a file in it (decision 040). They are known by their inodes, so that new names of them and of directories
 * above need no care. A number that the disk gives to another file, after others have removed
 * this one, shows that as a file too; its bytes are its own in either case.
 */
int written_new(struct written **out, struct err *e);
void written_free(struct written *w); /* NULL is fine */

/* NULL, without keep_files: nothing is noted, none is there. */
void written_add(struct written *w, const struct stat *st);
void written_remove(struct written *w, const struct stat *st);
bool written_has(struct written *w, uint64_t dev, uint64_t ino);

#endif
