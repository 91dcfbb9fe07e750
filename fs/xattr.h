/* SPDX-License-Identifier: MIT */
/* fs/xattr.h - user.unshard.* of tensor files and checkpoints. */
#ifndef UFS_FS_XATTR_H
#define UFS_FS_XATTR_H

#include "fs/request.h"

int getxattr_run(struct request *r, struct err *e);
int listxattr_run(struct request *r, struct err *e);

#endif
