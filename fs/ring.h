/* SPDX-License-Identifier: MIT */
/* fs/ring.h - one io_uring of the kernel, held to commands of /dev/fuse. */
#ifndef UFS_FS_RING_H
#define UFS_FS_RING_H

#include "base/base.h"

struct err;
struct iovec;

/*
 * A ring of commands with 128 bytes each, used by the one thread that opened it. It takes no
 * other operations than ring_command and ring_read on the two files it was opened with, so
 * that it leads around no seccomp filter.
 */
struct uring_ring {
    int fd;
    void *queues, *sqes; /* what the kernel shares */
    size_t queues_size, sqes_size;
    unsigned *sq_tail, *cq_head, *cq_tail;
    unsigned sq_mask, cq_mask, tail, submitted;
    struct io_uring_cqe *cqes;
};

enum ring_file { RING_FUSE, RING_EVENT, RING_FILES };

/* `entries` commands can be under way. A negative errno, with words in e. */
int ring_open(struct uring_ring *r, unsigned entries, const int fds[RING_FILES],
              struct err *e);
void ring_close(struct uring_ring *r);

/*
 * To be submitted by the next ring_wait: a command of /dev/fuse (enum fuse_uring_cmd of
 * include/uapi/linux/fuse.h, Linux 6.14) for queue `queue`; an 8-byte read of the event
 * file. `tag` comes back with the completion.
 */
void ring_command(struct uring_ring *r, uint32_t command, const struct iovec *iov,
                  uint16_t queue, uint64_t commit, uint64_t tag);
void ring_read(struct uring_ring *r, uint64_t *into, uint64_t tag);

/* Submits what was prepared and waits for at least `wait` completions; a signal may end it. */
int ring_wait(struct uring_ring *r, unsigned wait);

/* The next completion, if there is one. */
bool ring_next(struct uring_ring *r, uint64_t *tag, int32_t *result);

/* 0, or the errno that a ring is refused with here. */
int ring_try(void);

#endif
