/* SPDX-License-Identifier: MIT */
/* fs/passthrough.h - files that the kernel reads by itself, behind files of the mount. */
#ifndef UFS_FS_PASSTHROUGH_H
#define UFS_FS_PASSTHROUGH_H

#include "fs/fs.h"

/*
 * Kernels from 6.9 on read, write and map a file of the mount straight from another one that
 * the answer to open(2) names. The server needs CAP_SYS_ADMIN in the initial user namespace.
 */
bool passthrough_wanted(const struct fs *fs);

/* The mount is there: tries it, and notes for the counters what came of it. */
void passthrough_begin(struct fs *fs, bool offered);

/*
 * Registers an open regular file; its number (> 0) until passthrough_close. The kernel
 * holds the file by itself. 0: not this one (it lies on an overlay), or none at all.
 */
int passthrough_open(struct fs *fs, int fd);
void passthrough_close(struct fs *fs, int id);

/* Answers an open request: the kernel shall read the file of this number. */
int passthrough_reply(fuse_req_t req, struct fuse_file_info *fi, int id);

/* Answers a create request; id 0: the server reads and writes the file. */
int passthrough_reply_create(fuse_req_t req, const struct fuse_entry_param *entry,
                             struct fuse_file_info *fi, int id);

#endif
