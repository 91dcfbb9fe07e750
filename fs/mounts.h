/* SPDX-License-Identifier: MIT */
/* fs/mounts.h - what is mounted where, and unmounting it. */
#ifndef UFS_FS_MOUNTS_H
#define UFS_FS_MOUNTS_H

#include <limits.h>

#include "base/base.h"

struct err;

/* The type that our mounts have in the kernel's table. */
#define MOUNT_SUBTYPE "unshardfs"
#define MOUNT_TYPE "fuse." MOUNT_SUBTYPE

/* The absolute path of a mount point without asking what is mounted there. */
int mounts_path(const char *mountpoint, char out[PATH_MAX], struct err *e);

/* Is the topmost mount at this path one of ours? */
bool mounts_ours(const char *path);

/* Detaches it at once, whoever uses it: for servers that end. */
void mounts_detach(const char *path);

/*
 * Everything that can be said against mounting `source` at `mountpoint` before it is
 * tried; fills in the absolute path.
 */
int mounts_check(const char *source, const char *mountpoint, bool allow_other,
                 char out[PATH_MAX], struct err *e);

#endif
