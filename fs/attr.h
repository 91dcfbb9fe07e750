/* SPDX-License-Identifier: MIT */
/* fs/attr.h - attributes of nodes as stat(2) shows them. */
#ifndef UFS_FS_ATTR_H
#define UFS_FS_ATTR_H

#include <sys/stat.h>

#include "fs/fs.h"
#include "fs/node.h"
#include "fs/generation.h"
#include "fs/tree.h"

struct attr {
    uint64_t ino, size;
    mode_t type;  /* S_IFREG, S_IFDIR, S_IFLNK */
    mode_t mode;  /* as in the source */
    bool tensors; /* what is read from end to end, and not by seeking */
    nlink_t links;
    uid_t uid;
    gid_t gid;
    int64_t mtime_ns;
    int64_t atime_ns, ctime_ns; /* 0: as mtime_ns */
};

/* No write bits but with rw, umask=, uid= and gid= applied; st_blocks as if stored. */
void attr_fill(const struct fs *fs, const struct attr *a, struct stat *st);

/* A number of 63 bits that depends on the path (and on the file's identity). */
uint64_t attr_path_ino(const char *path, const char *name, uint64_t dev,
                       uint64_t inode);

/* Of a node inside a checkpoint. -ENOENT: there is no such thing (in these views). */
int attr_inside(struct fs *fs, struct generation *gen, enum inside kind, uint32_t index,
                struct stat *st, struct err *e);

/* The same without the size of files that would have to be made to know it. */
void attr_inside_brief(const struct fs *fs, const struct generation *gen,
                       enum inside kind, struct stat *st);

/* The same from a tensor that is at hand. */
int attr_tensor(struct fs *fs, enum inside kind, const struct tensor_info *t,
                struct stat *st, struct err *e);

/* Of a node outside, looked up in the source. -ENOENT: it is not there any more. */
int attr_node(struct fs *fs, const struct node *n, struct stat *st, struct err *e);

/* From what a listing says of it. */
void attr_entry(struct fs *fs, const char *path, enum snapshot_kind kind,
                const struct entry_stat *entry, struct stat *st);

/* Text of the link that a node is. */
int attr_link_text(struct fs *fs, const struct node *n, char *dst, size_t size,
                   struct err *e);

#endif
