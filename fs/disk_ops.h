/* SPDX-License-Identifier: MIT */
/* fs/disk_ops.h - requests of a mount for writing, on names of the source. */
#ifndef UFS_FS_DISK_OPS_H
#define UFS_FS_DISK_OPS_H

#include "fs/caller.h"
#include "fs/disk.h"
#include "fs/request.h"

/*
 * Each function is the same system call on the source, made as the caller. They answer the
 * request and return 0, or answer nothing and return a negative errno.
 */

/* The rights of the process that asks, until as_server(); with CLEANUP. */
struct acting {
    struct caller caller;
    struct caller_saved saved;
};
int as_caller(const struct request *r, struct acting *a, struct err *e);
void as_server(struct acting *a);

/* A pinned node with its descriptor, for the time of a request; with CLEANUP. */
struct disk_ref {
    struct fs *fs;
    struct disk_node *node;
    int fd;
};
int disk_ref(struct fs *fs, fuse_ino_t ino, struct disk_ref *out, struct err *e);
void disk_unref(struct disk_ref *ref);

/* fs/disk_attr.c */
/*
 * Numbers of inodes of two file systems in one source may be the same; those of others
 * than the root's are mixed with their device.
 */
uint64_t disk_number(const struct fs *fs, uint64_t dev, uint64_t inode);
int disk_getattr(struct request *r, struct err *e);
int disk_setattr(struct request *r, const struct stat *attr, int to_set, struct err *e);
int disk_statfs(struct request *r, struct err *e);

/* fs/disk_name.c */
/* An entry for the kernel of what was found; the reference goes with it. */
void disk_entry(const struct fs *fs, const struct disk_node *n, const struct stat *st,
                struct fuse_entry_param *out);
/* Answers with the entry of a name that was made or found. */
int disk_reply(struct request *r, struct disk_node *dir, const char *name,
               struct err *e);
int disk_readlink(struct request *r, struct err *e);
int disk_mkdir(struct request *r, struct err *e);
int disk_mknod(struct request *r, struct err *e);
int disk_symlink(struct request *r, struct err *e); /* r->as: its text */
int disk_link(struct request *r, struct err *e);    /* r->ino at r->to/r->as */
int disk_unlink(struct request *r, struct err *e);
int disk_rmdir(struct request *r, struct err *e);
int disk_rename(struct request *r, struct err *e);

/* fs/disk_file.c */
int disk_open(struct request *r, struct err *e);
int disk_create(struct request *r, struct err *e);
int disk_read(struct request *r, struct err *e);
int disk_write(struct request *r, const char *data, struct err *e);
int disk_flush(struct request *r, struct err *e);
int disk_fsync(struct request *r, bool data, struct err *e);
int disk_fallocate(struct request *r, off_t len, struct err *e);
int disk_lseek(struct request *r, int whence, struct err *e);
int disk_copy(struct request *r, const struct fuse_file_info *to, off_t to_off,
              struct err *e);
/* The descriptor of an open file of the source; -1: the handle is something else. */
int disk_file_fd(const struct fuse_file_info *fi);

/* fs/disk_dir.c */
int disk_opendir(struct request *r, struct err *e);
int disk_readdir(struct request *r, struct err *e);
int disk_fsyncdir(struct request *r, bool data, struct err *e);

#endif
