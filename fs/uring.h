/* SPDX-License-Identifier: MIT */
/* fs/uring.h - requests of the kernel by io_uring in place of /dev/fuse (Linux 6.14). */
#ifndef UFS_FS_URING_H
#define UFS_FS_URING_H

#include <sys/uio.h>

#include "fs/fs.h"

struct request;
struct uring;

/*
 * What -o io_uring asks for: a ring and a thread for each processor, made before the server
 * is confined. fs->uring stays NULL where it cannot be had; the counters say why, and the
 * mount goes on by /dev/fuse.
 */
void uring_new(struct fs *fs);

/*
 * Around the answer to the kernel's first request: buffers for `payload` bytes a request
 * (false: the answer must not accept), and, once it is accepted, the rings at work. When
 * this returns the counters say "on" or "off: ...".
 */
bool uring_prepare(struct fs *fs, bool offered, size_t payload);
void uring_begin(struct fs *fs);

/* The answer to a request that came by a ring: true, and what writev(2) would return. */
bool uring_answer(struct fs *fs, const struct iovec *iov, int count, ssize_t *out);

/*
 * Where the answer to this thread's request goes, so that nothing copies it again; NULL: it
 * came by /dev/fuse, or is answered. As many bytes as a request may ask for, and one more.
 */
void *uring_payload(size_t size);

/* Must this thread not wait, since others' requests come through it? */
bool uring_in_haste(void);

/* Runs this thread's request again on one that may wait. False: it came by no ring. */
bool uring_defer(const struct request *r);

/* No request is begun any more, none is under way; those that wait elsewhere are answered. */
void uring_pause(struct uring *u);
/* The rings are gone: answers from now on go nowhere. */
void uring_stop(struct uring *u);
void uring_free(struct uring *u); /* NULL is fine, as above */

#endif
