/* SPDX-License-Identifier: MIT */
/* fs/stage_room.h - how many bytes of the disk a mount may stage (stage_size=), and are there. */
#ifndef UFS_FS_STAGE_ROOM_H
#define UFS_FS_STAGE_ROOM_H

#include "fs/fs.h"

struct statvfs;
struct staged;

/*
 * What counts is the length of each staged file, holes included, until it is published, or
 * removed and closed. All with the lock of stages but stage_room_left().
 */

/* Before a file gets this long. -EDQUOT: the mount may not stage so much. */
int stage_room_take(struct fs *fs, struct staged *n, uint64_t size, struct err *e);

/* A file is only so long now. */
void stage_room_give(struct fs *fs, struct staged *n, uint64_t size);

/*
 * Room on the disk for these bytes of a file, as fallocate(2) with these flags: 0, or errno. Where
 * there is not so much, none is taken: a disk would be full for all others as long as the
 * file is there. Without the lock.
 */
int stage_room_reserve(int fd, int flags, uint64_t off, uint64_t len);

/* What a program that looks first (df(1)) is told is free: not more than may be staged. */
void stage_room_left(const struct fs *fs, struct statvfs *st);

#endif
