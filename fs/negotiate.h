/* SPDX-License-Identifier: MIT */
/* fs/negotiate.h - the kernel's first request: what it offers and libfuse does not know. */
#ifndef UFS_FS_NEGOTIATE_H
#define UFS_FS_NEGOTIATE_H

#include <stdatomic.h>
#include <sys/uio.h>

#include "base/base.h"

/* The INIT request until it is answered. Zero is its start. */
struct negotiation {
    atomic_uint_fast64_t unique; /* of the request; 0: it has not come yet */
    bool offers_killpriv;        /* it leaves set-id bits to the server (5.11) */
    bool offers_mmap;            /* files with direct I/O can be mapped shared (6.6) */
    bool offers_passthrough;     /* files of another file system behind ours (6.9) */
};

/* A request as it was read from the kernel: when it is INIT, takes its offers down. */
void negotiate_see(struct negotiation *n, const void *data, size_t len);

/* Is this the answer to INIT, and a good one? */
bool negotiate_is_answer(const struct negotiation *n, const struct iovec *iov);

/* Adds to the answer what the kernel offers; these if they are wanted. */
struct negotiate_wants {
    bool passthrough;
};
void negotiate_accept(const struct negotiation *n, struct iovec *iov, int count,
                      struct negotiate_wants wants);

#endif
