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

/* The device number of the topmost mount at this path if it is one of ours; else 0. */
uint64_t mounts_ours(const char *path);

/* Detaches that one at once, whoever uses it: for servers that end. */
void mounts_detach(const char *path, uint64_t device);

/*
 * Is something mounted below this mount point? It goes when that is detached, and may have to
 * write into it first (an image in one of its files, by a loop device): who waits for that is
 * not the server. With `told` each is named in the log.
 */
bool mounts_are_below(const char *path, bool told);

/*
 * Unmounts these, while the server serves what they have to write; a process of its own waits
 * for it. False: not within some seconds.
 */
bool mounts_detach_below(const char *path);

/*
 * Has the kernel ask for larger pieces of files that are mapped, where that is ours to say:
 * it takes CAP_SYS_ADMIN and a writable /sys. For a mount that has answered INIT, which
 * can only make them smaller.
 */
void mounts_read_ahead(uint64_t device);

/*
 * Everything that can be said against mounting `source` at `mountpoint` before it is
 * tried; fills in the absolute path.
 */
int mounts_check(const char *source, const char *mountpoint, bool rw, bool allow_other,
                 char out[PATH_MAX], struct err *e);

#endif
