/* SPDX-License-Identifier: MIT */
/* fs/ahead.h - what to ask for before a reader who goes from start to end comes to it. */
#ifndef UFS_FS_AHEAD_H
#define UFS_FS_AHEAD_H

#include <stdatomic.h>

#include "base/base.h"

/* Of an open file; zero is its start. Any thread. */
struct ahead {
    /* Where the reader began, where its last read ended, how far was asked for. */
    atomic_uint_fast64_t begun, next, asked;
};

/*
 * A read of [off, off + len) comes: how many bytes from *from on to ask for now, or 0.
 * From a server more are on their way at a time; it grows with what was read, since who
 * reads a few pieces only shall not pay for much.
 */
uint64_t ahead_step(struct ahead *a, bool remote, uint64_t off, uint64_t len,
                    uint64_t *from);

#endif
