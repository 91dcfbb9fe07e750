/* SPDX-License-Identifier: MIT */
/* fs/way.h - who reads an open inode: the server, or the kernel by itself. */
#ifndef UFS_FS_WAY_H
#define UFS_FS_WAY_H

#include <pthread.h>

#include "base/base.h"

struct fs;

/*
 * The kernel reads an inode in one way while any handle of it is open: an open that
 * differs fails with EIO, and a handle that was opened for the server's way cannot be mapped
 * any more. So the first handle decides for all that are open together with it.
 */
struct way {
    struct way *next;
    uint64_t ino, generation; /* numbers of inodes are used again, with another one */
    unsigned handles;
    int backing; /* the number of the file that the kernel reads; 0: the server reads */
};

enum { WAY_BUCKETS = 1024 };

struct ways {
    pthread_mutex_t lock;
    struct way *bucket[WAY_BUCKETS]; /* guarded by lock */
};

void ways_init(struct ways *w);
void ways_destroy(struct ways *w); /* once no handle is left */

/* Is it open, and read by the server? */
bool way_is_server(struct fs *fs, uint64_t ino, uint64_t generation);

/*
 * One handle more of this inode. When it is the first, the kernel reads the file `fd`
 * if it can; a negative one is the server's to read. NULL: out of memory.
 */
struct way *way_open(struct fs *fs, uint64_t ino, uint64_t generation, int fd);
void way_close(struct fs *fs, struct way *way); /* NULL is fine */

#endif
