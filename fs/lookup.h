/* SPDX-License-Identifier: MIT */
/* fs/lookup.h - names to nodes, and the entries that the kernel gets for them. */
#ifndef UFS_FS_LOOKUP_H
#define UFS_FS_LOOKUP_H

#include "fs/attr.h"
#include "fs/request.h"

int lookup_run(struct request *r, struct err *e);

/*
 * The entry of a node inside a checkpoint, whose attributes are in out->attr already.
 * Counts as one lookup of the kernel.
 */
void entry_inside(struct fs *fs, struct generation *gen, enum inside kind,
                  uint32_t index, struct fuse_entry_param *out);

/* The entry of what a directory shows; counts as one lookup. */
int entry_of_snapshot(struct fs *fs, struct node *dir, const struct snapshot *snapshot,
                      const struct snapshot_entry *entry, struct fuse_entry_param *out,
                      struct err *e);

/* Its inode number and type only, for a listing without attributes. */
void entry_brief(struct fs *fs, const struct node *dir, const struct snapshot *snapshot,
                 const struct snapshot_entry *entry, struct stat *st);

/* Takes one lookup back that did not reach the kernel. */
void entry_forget(struct fs *fs, fuse_ino_t ino, uint64_t n);

/* The fixed files of .unshard/ and optimizer/ by position; NULL behind the last. */
struct fixed_file {
    const char *name;
    enum inside kind;
};
const struct fixed_file *fixed_file(const struct generation *gen, enum inside dir,
                                    size_t i);

/* Is this generation still good? 0, -ESTALE, or FS_LATER. */
int generation_ready(const struct request *r, struct generation *gen, struct err *e);

#endif
