/* SPDX-License-Identifier: MIT */
/* fs/over.h - tensors that come to a directory of the source that is there and no checkpoint. */
#ifndef UFS_FS_OVER_H
#define UFS_FS_OVER_H

#include "fs/request.h"
#include "fs/stage.h"

struct node;
struct save_files;

/*
 * A stage of such a directory has the safetensors files and indexes that came, or other bytes of
 * files that are checkpoints by themselves, and nothing else: all other files there are the
 * source's own (fs/plain.h), before and after. It is published as any other, and with tensors
 * the directory is a checkpoint from then on (decision 037). All of these are called with the
 * lock of stages.
 */

/* Does a file of this name come by a stage, if it is made in that directory? */
bool over_takes(struct fs *fs, const struct node *dir, const char *name);

/*
 * And a directory? Of a directory with nothing in it those of views (tensors/, ...) do: it may
 * have been made for a checkpoint, and published before anything came.
 */
bool over_takes_dir(struct fs *fs, struct node *dir, const char *name);

/* The one that is staged over this directory, when nobody publishes it; or NULL. */
struct stage *over_at(struct fs *fs, const char *path);

/*
 * The same, made if need be. -EROFS: nothing of the kind can come here; -EBUSY: somebody else
 * saves there.
 */
int over_begin(struct fs *fs, struct node *dir, struct stage **out, struct err *e);

/*
 * The same for a file there that is a checkpoint by itself and shown as a file (fs/written.h):
 * other bytes of it come by a rename.
 */
int over_begin_file(struct fs *fs, struct node *dir, struct stage **out, struct err *e);

/* A new file of this name, in the place of what the source may have there. */
int over_new_file(struct request *r, struct stage *s, const char *name,
                  struct staged **out, struct err *e);

/*
 * unlink(2) of a name in a directory that something is staged over. STAGED_NONE: the name is
 * the source's own.
 */
int over_unlink(struct fs *fs, struct stage *s, const char *name, struct err *e);

/* rmdir(2), the same. */
int over_rmdir(struct fs *fs, struct stage *s, const char *name);

/*
 * rename(2) of r->name in `from` to r->as in `to`, both no checkpoints: what gets the name of a
 * tensor file comes by a stage, as savers write under another name first. The source has its
 * old name until it is published. STAGED_NONE: the stage has nothing to do with it.
 */
int over_rename(struct request *r, struct node *from, struct node *to, struct err *e);

/* Is a file of it open for writing under the name by which it came? */
bool over_is_written(const struct stage *s);

/* Without the lock: what was made in the staging directory comes to the target. */
int over_put_in_place(struct fs *fs, struct stage *s, const struct save_files *f,
                      struct err *e);

#endif
