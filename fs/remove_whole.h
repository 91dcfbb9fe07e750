/* SPDX-License-Identifier: MIT */
/* fs/remove_whole.h - rmdir(2) of a checkpoint: it goes in one step, as a whole or not at all. */
#ifndef UFS_FS_REMOVE_WHOLE_H
#define UFS_FS_REMOVE_WHOLE_H

#include "fs/fs.h"

struct node;
struct stage;

/*
 * With the lock of stages: removes the checkpoint `name` of directory `dir`, which is at `path`
 * in the store and of which all that it shows is hidden by now; checkpoints in it of which the
 * same is true go along. Where the checkpoint whose directory `dir` is is being removed, it
 * goes with that one. -ENOTEMPTY: something is left to be seen, or it may be a part of a
 * checkpoint around it.
 */
int remove_whole(struct fs *fs, struct node *dir, const char *name, const char *path,
                 struct err *e);

/*
 * With the lock of stages: is somebody removing all of the checkpoint, or was, when he ended?
 * stage_is_removal() knows those who take .unshard/ first, as rm -r does. Python's
 * shutil.rmtree takes all files of the directory first and .unshard/ last: also when none of
 * them is left, something is gone from a directory of it, and nothing has come.
 */
bool remove_whole_begun(struct fs *fs, const struct stage *s);

#endif
