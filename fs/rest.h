/* SPDX-License-Identifier: MIT */
/* fs/rest.h - a mount that has ended and still saves: the next one of its source waits. */
#ifndef UFS_FS_REST_H
#define UFS_FS_REST_H

#include <stdatomic.h>

struct fs;

/*
 * umount(8) comes back before the server knows of it, and that has then to save what is whole.
 * A mount that began meanwhile would not show it yet: an rm -r of it there finds nothing, and
 * then it comes. So the source's directory is locked (flock) by who saves, and who begins waits
 * for that, for a minute at most.
 */
struct rest {
    int fd;            /* of the source, while it saves; else -1 */
    atomic_bool begun; /* by one thread */
};

/* Before the mount is there. A mount for reading waits for nobody. */
void rest_await(const struct fs *fs);

/* The mount is gone; more than once is as good. And: all is saved. */
void rest_begin(struct rest *r, const struct fs *fs);
void rest_end(struct rest *r);

#endif
