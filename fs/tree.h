/* SPDX-License-Identifier: MIT */
/* fs/tree.h - what a directory of the source shows in the mount. */
#ifndef UFS_FS_TREE_H
#define UFS_FS_TREE_H

#include "fs/fs.h"
#include "fs/node.h"
#include "fs/snapshot.h"
#include "fs/generation.h"

/* A handler that must wait for a scan says so; it is run again where it may. */
enum { FS_LATER = 1, FS_FILL = 3 }; /* fs/request.h */

/* What the directory shows now. FS_LATER: it takes a scan and `may_block` is false. */
int tree_snapshot(struct fs *fs, struct node *dir, bool may_block,
                  struct snapshot **out, struct err *e);

/* The path of an entry in the store. */
int snapshot_path(const struct node *dir, const struct snapshot_entry *entry, char *dst,
                  size_t size, struct err *e);

/*
 * The generation of a directory that is a checkpoint, looked at within a second. -ENOENT: the
 * scanner sees no checkpoint there. FS_LATER as above.
 */
int tree_generation(struct fs *fs, struct node *dir, const char *path, const char *file,
                    bool may_block, struct generation **out, struct err *e);

/* The names of ours in a checkpoint's directory, for telling the kernel. */
extern const char *const tree_own_names[];

/*
 * The step that the trackers in the store's directory `path` name, when that is a
 * directory there; malloc'd, or NULL.
 */
char *tracker_target(struct fs *fs, const char *path);

/*
 * The same of a checkpoint's own directory: the tag of a part of it (DeepSpeed's, in a
 * Trainer's checkpoint) is no step.
 */
char *tracker_of_generation(struct fs *fs, const struct generation *gen);

#endif
