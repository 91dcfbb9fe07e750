/* SPDX-License-Identifier: MIT */
/* fs/edit.h - view names of a mount for writing: transactions, as the kernel sees them. */
#ifndef UFS_FS_EDIT_H
#define UFS_FS_EDIT_H

#include "fs/disk_view.h"
#include "fs/request.h"

struct edits;

/*
 * Setting this attribute on the mount's root publishes all that is complete, and fails where
 * something cannot be published: what `unshard umount` does first. Getting it tells why.
 */
#define PUBLISH_ATTRIBUTE "user.unshard.publish"
/* While tensors are written: "DONE TOTAL", in bytes of the checkpoint that is being made. */
#define PUBLISHING_ATTRIBUTE "user.unshard.publishing"

/*
 * What is written to view names of a directory D (CONTRACT.md, "Saving") is kept in a
 * transaction of D (save/txn.h) until it is complete, and published then. A file or
 * directory of a transaction is an edit node; its path is relative to D. All functions
 * may be called from any thread.
 */

/* Numbers of edit nodes, and of the nodes of `.unshard` of plain directories. */
static inline bool ino_is_edit(fuse_ino_t ino)
{
    return ino >> 62 == 1;
}

int edits_new(struct fs *fs, struct edits **out, struct err *e);
/* Starts and ends the thread that publishes what is complete. */
int edits_start(struct fs *fs, struct err *e);
void edits_stop(struct fs *fs);
/* Leaves what is incomplete staged. */
void edits_free(struct fs *fs);

/* The kernel forgets a node. */
void edit_forget(struct fs *fs, fuse_ino_t ino, uint64_t lookups);

/* What a lookup found; or EDIT_NONE: the name is not the edits' business. */
enum { EDIT_NONE = 2, EDIT_ABSENT = 3 };

/*
 * Looks `name` up in a directory of the source (`dir`), or in a directory inside a
 * checkpoint or of a transaction (`r->ino`). 0: *out is an entry, counted as a lookup.
 */
int edit_lookup_disk(struct request *r, struct disk_node *dir,
                     struct fuse_entry_param *out, struct err *e);
/* The same where the source has no such name: views, and what stands in for them. */
int edit_lookup_view(struct request *r, struct disk_node *dir,
                     struct fuse_entry_param *out, struct err *e);
int edit_lookup(struct request *r, struct fuse_entry_param *out, struct err *e);

/* Does save= hold in this directory? */
bool edit_saves(struct fs *fs, struct disk_node *dir);
/* A directory was made by this request, where save= holds. */
void edit_made(struct request *r, struct disk_node *dir);

/* The same requests as on the disk. They answer, or return EDIT_NONE or -errno. */
int edit_create_disk(struct request *r, struct disk_node *dir, struct err *e);
int edit_mkdir_disk(struct request *r, struct disk_node *dir, struct err *e);
int edit_unlink_disk(struct request *r, struct disk_node *dir, struct err *e);
int edit_rmdir_disk(struct request *r, struct disk_node *dir, struct err *e);
int edit_open_disk(struct request *r, struct err *e);

int edit_getattr(struct request *r, struct err *e);
int edit_readlink(struct request *r, struct err *e);
int edit_setattr(struct request *r, const struct stat *attr, int to_set, struct err *e);
int edit_open(struct request *r, struct err *e);
int edit_create(struct request *r, struct err *e);
int edit_mkdir(struct request *r, struct err *e);
int edit_unlink(struct request *r, struct err *e);
int edit_rmdir(struct request *r, struct err *e);
/* One of both ends is a view name. EDIT_NONE: neither is. */
int edit_rename(struct request *r, struct err *e);
int edit_read(struct request *r, struct err *e);
int edit_write(struct request *r, const char *data, struct err *e);
int edit_flush(struct request *r, struct err *e);
int edit_fsync(struct request *r, struct err *e);
int edit_fallocate(struct request *r, off_t len, struct err *e);

/* fsync of a directory: publishes what is complete. -EAGAIN: some is not. */
int edit_fsyncdir(struct request *r, struct err *e);

/* A directory that may be renamed, or removed (`gone`): 0, or why not. */
int edit_before_move(struct request *r, struct disk_node *dir, bool gone,
                     struct err *e);

/* Names that transactions add to a directory of views, and those that they hide. */
struct edit_name {
    char *name;
    uint64_t ino;
    mode_t type; /* 0: the name is hidden */
};
struct edit_names {
    struct edit_name *name; /* sorted */
    size_t count;
};
int edit_list(struct request *r, struct edit_names *out, struct err *e);
void edit_names_release(struct edit_names *l);
const struct edit_name *edit_names_find(const struct edit_names *l, const char *name);
/* A directory of a transaction, or `.unshard` of a plain directory. */
int edit_opendir(struct request *r, struct err *e);
int edit_readdir(struct request *r, struct err *e);

/* user.unshard.save of a directory; user.unshard.dtype of a file. */
int edit_setxattr(struct request *r, const char *value, size_t size, struct err *e);
int edit_getxattr(struct request *r, struct buf *out, struct err *e);

/* Publishes all that is complete. Then 0, or -EAGAIN: something is not (said in e). */
int edit_publish_all(struct fs *fs, struct err *e);
/* Nobody writes this file of the disk any more; see move into a transaction. */
void edit_stored_closed(struct fs *fs, struct disk_node *n);
/* What a reader of this node must see is published first. 0, or -errno. */
int edit_before_read(struct request *r, struct err *e);

#endif
