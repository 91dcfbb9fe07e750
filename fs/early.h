/* SPDX-License-Identifier: MIT */
/* fs/early.h - bytes that are gathered before their reader asks for them. */
#ifndef UFS_FS_EARLY_H
#define UFS_FS_EARLY_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/uio.h>

#include "base/base.h"

struct early;
struct pool;
struct reader;

/*
 * Of a mount: memory that open files have for it, and whether a processor has time. Who
 * reads alone waits while its bytes are gathered, and the gatherer waits while the kernel
 * takes them: two processors do both at once. Where as many files are read as there are
 * processors all of them have work (docs/decisions/026).
 */
struct early_room {
    unsigned processors;
    atomic_uint files;          /* of which reads are being answered */
    _Atomic int64_t crowded_ns; /* when they were as many as processors */
    pthread_mutex_t lock;
    void *spare; /* guarded by lock, as is the next */
    unsigned taken;
};

void early_room_init(struct early_room *room, unsigned processors);
void early_room_release(struct early_room *room);

/*
 * A read of `size` bytes of a file begins, and ended; `reads` counts those of that file.
 * Short ones do not count: they take no time worth the counting.
 */
void early_enter(struct early_room *room, atomic_uint *reads, size_t size);
void early_leave(struct early_room *room, atomic_uint *reads, size_t size);

/*
 * Of an open file; any thread. The pool gathers; room, pool and reader outlive it. NULL when
 * there is no memory, or one processor only: nothing is early then.
 */
struct early *early_new(struct early_room *room, struct pool *pool,
                        struct reader *reader);

/* Waits for what is being gathered. NULL is fine. */
void early_free(struct early *y);

/* Pieces of one read, in order, until early_put. */
enum { EARLY_WINDOWS = 3 };
struct early_pieces {
    struct iovec iov[EARLY_WINDOWS];
    int count;
    unsigned held; /* of its windows, a bit each */
};

/*
 * True, and all of [off, off + len), where that was gathered; what is half done is waited
 * for. Whether it is still what a read would give, reader_unchanged tells.
 */
bool early_take(struct early *y, uint64_t off, size_t len, struct early_pieces *out);
void early_put(struct early *y, struct early_pieces *p);

/*
 * [off, off + len) is about to be handed over. With `ask` what its reader comes to next is
 * gathered meanwhile, where it goes on in order, in long reads, and a processor has time.
 */
void early_step(struct early *y, uint64_t off, size_t len, bool ask);

#endif
