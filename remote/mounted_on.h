/* SPDX-License-Identifier: MIT */
/* remote/mounted_on.h - has the file system that a directory lies on been unmounted? */
#ifndef UFS_REMOTE_MOUNTED_ON_H
#define UFS_REMOTE_MOUNTED_ON_H

#include "base/base.h"

/*
 * Who has a directory open keeps its file system, also when that was taken off its place
 * (umount -l): it would go on reading what is not there any more for anybody else.
 */
struct mounted_on {
    int table; /* the kernel's table of mounts, which tells of changes; or -1 */
    uint64_t id,
        parent; /* of the mount that the directory lies on, and of the one below */
};

/* Where the kernel does not tell, nothing is ever found to be unmounted. */
void mounted_on_init(struct mounted_on *m, int dir);
void mounted_on_release(struct mounted_on *m);

/* Has the table changed since the last call? */
bool mounted_on_changed(const struct mounted_on *m);
/* Is the mount in the table? */
bool mounted_on_lasts(const struct mounted_on *m);

/*
 * Takes another directory up, which lies where the lost one lay. False: on what was below
 * the lost mount: nothing was mounted in its place.
 */
bool mounted_on_move(struct mounted_on *m, int dir);

#endif
