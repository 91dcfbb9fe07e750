/* SPDX-License-Identifier: MIT */
/* fs/alias.h - a new directory keeps its number in the kernel when it is published. */
#ifndef UFS_FS_ALIAS_H
#define UFS_FS_ALIAS_H

#include "fs/fs.h"

struct node;
struct staged;

/*
 * A process may stand in a directory that it makes, or have it open: the kernel knows it by
 * the number of its staged node. From publication on that number is another name of the
 * node that the directory has in the source, for as long as the kernel remembers it:
 * requests go to the node, and lookups of it answer the number that the kernel has.
 */

/* The node that this directory has in the source, pinned; NULL: nobody knows it. */
struct node *alias_node(struct fs *fs, const char *path);

/*
 * With the lock of stages: the published directory n is this node, whose pin it takes; so
 * are directories of programs below it. Views (tensors/, ...) are other ones afterwards.
 */
void alias_make(struct fs *fs, struct staged *n, struct node *node);

/* With the lock of stages: n goes. */
void alias_end(struct fs *fs, const struct staged *n);

/* The node that a number of the kernel's means; other numbers mean themselves. */
fuse_ino_t alias_resolve(struct fs *fs, fuse_ino_t ino);

/* The number by which the kernel knows a node. */
fuse_ino_t alias_of(struct fs *fs, fuse_ino_t node);

/*
 * Turns an entry of a node into one of its alias, where it has one: a lookup of the node
 * becomes a lookup of the alias.
 */
void alias_entry(struct fs *fs, struct node *node, struct fuse_entry_param *out);

#endif
