/* SPDX-License-Identifier: MIT */
/* fs/ops.h - the operation tables, and what they share. */
#ifndef UFS_FS_OPS_H
#define UFS_FS_OPS_H

#include "fs/request.h"

/* Of a mount for reading (fs/ops.c), for writing to a disk (fs/disk_ops.c), to a bucket. */
extern const struct fuse_lowlevel_ops fs_operations, disk_operations, bucket_operations;

void ops_init(void *user, struct fuse_conn_info *conn);

/* Nodes inside a checkpoint. */
int getattr_inside_run(struct request *r, struct err *e);
int readlink_inside_run(struct request *r, struct err *e);

/* A mount for writing: the kernel forgets a node of any kind. */
void disk_ops_forget(struct fs *fs, fuse_ino_t ino, uint64_t n);

#endif
