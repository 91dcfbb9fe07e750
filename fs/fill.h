/* SPDX-License-Identifier: MIT */
/* fs/fill.h - writes all that a reader reads into a file. */
#ifndef UFS_FS_FILL_H
#define UFS_FS_FILL_H

#include <stdatomic.h>

#include "base/base.h"

struct err;
struct fs;
struct reader;

struct fill {
    struct fs *fs;
    struct reader *reader;
    int fd;
    uint64_t size;
    uint64_t filled; /* bytes from the start that are there; moves on */
    const atomic_bool *stop;
};

/*
 * Goes on from `filled`, on the threads of the pool. What is in the file then are bytes
 * of shards that did not change around their copying: -ESTALE when one did. -EINTR: it was
 * stopped, or who asked gave up; `filled` counts.
 */
int fill_run(struct fill *f, struct err *e);

#endif
