/* SPDX-License-Identifier: MIT */
/* fs/request.h - one request of the kernel on its way through our handlers. */
#ifndef UFS_FS_REQUEST_H
#define UFS_FS_REQUEST_H

#include "fs/fs.h"
#include "fs/tree.h"

struct request;

/*
 * Answers the request and returns 0; or returns a negative errno (with words in e where
 * the cause is worth a log line) and has answered nothing; or FS_LATER when it would
 * have to wait for a scan: then it is run again on a thread of the queue, `may_block` set.
 * FS_FILL: of an open that takes a copy first: the same on the queue of fills, `may_fill` set.
 */
typedef int request_fn(struct request *r, struct err *e);

struct request {
    struct fs *fs;
    fuse_req_t req;
    request_fn *fn;
    fuse_ino_t ino;
    const char *name; /* of a lookup or an xattr */
    fuse_ino_t to;    /* of a rename: the other directory, */
    const char *as;   /* and the new name; of a symlink its text */
    unsigned flags;
    mode_t mode;
    size_t size;
    off_t off;
    struct fuse_file_info fi;
    bool has_fi; /* of a setattr: fi is set */
    bool may_block, may_fill, plus;
    bool of_bytes; /* what is missing is a shard, not a name */
    bool on_disk;  /* a system call on the source: its errno is told as it is */
};

/*
 * Is what is opened best written with direct I/O? Then a write is copied once less, and one of
 * 1 MiB stays one request. Only where it is the one of `writers` that are open: the kernel
 * would write whole pages that another has mapped over the bytes of this one. And not where
 * it goes on showing the pages that it has of the file (before 6.6).
 */
bool request_writes_directly(const struct request *r, unsigned writers);

/*
 * Is a write of it to be on the disk before it is answered (O_SYNC, O_DSYNC, RWF_DSYNC)? With
 * direct I/O the kernel sends no FSYNC after it.
 */
bool request_is_synchronous(const struct request *r);

/* Runs it here or, if it asks for that, later. */
void request_run(const struct request *r);

/* Answers with the errno that `code` and `e` give; reports what is worth it. */
void request_fail(const struct request *r, int code, const struct err *e);

#endif
