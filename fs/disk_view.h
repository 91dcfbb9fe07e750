/* SPDX-License-Identifier: MIT */
/* fs/disk_view.h - views of a checkpoint in a mount for writing. */
#ifndef UFS_FS_DISK_VIEW_H
#define UFS_FS_DISK_VIEW_H

#include "fs/disk.h"
#include "fs/generation.h"

/*
 * The checkpoint that this directory is, with a reference. It is looked at again after a
 * second, and after every change below the directory through this mount. Returns -ENOENT
 * for a plain directory, for a part of a checkpoint above it, and for a checkpoint whose
 * completing file is missing; FS_LATER where that takes a scan and may_block is false.
 */
int disk_generation(struct fs *fs, struct disk_node *dir, bool may_block,
                    struct generation **out, struct err *e);

/* Do the names in a directory of the store make it a checkpoint? 1, 0 or -errno. */
int view_is_checkpoint(struct fs *fs, const char *path, struct err *e);

/*
 * The checkpoint that such a directory is now, whatever was known of it: `last` where it
 * still is that one. Takes over the reference to `last`, which may be NULL.
 */
int view_look(struct fs *fs, const struct generation_place *place,
              struct generation *last, struct generation **out, struct err *e);

/* A view at the top of a checkpoint's directory. */
struct disk_view {
    const char *name;
    enum inside kind;
    bool is_dir;
};

/* The view that a checkpoint may have under this name, or NULL. */
const struct disk_view *disk_view_named(const char *name);
/* Views by number, in order of names; NULL behind the last. */
const struct disk_view *disk_view_at(size_t i);

/* Does `views=` have it listed? */
bool disk_view_listed(const struct fs *fs, const struct disk_view *view);

/*
 * Does this checkpoint have the view, where its directory stores no such name?
 * 1, 0, or a negative errno.
 */
int disk_has_view(struct fs *fs, const struct generation *gen,
                  const struct disk_view *view, struct err *e);

#endif
