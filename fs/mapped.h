/* SPDX-License-Identifier: MIT */
/* fs/mapped.h - which files programs map, rather than read. */
#ifndef UFS_FS_MAPPED_H
#define UFS_FS_MAPPED_H

#include <stdatomic.h>

#include "base/base.h"

/*
 * Numbers of nodes that were mapped lately, each in the one place where it may stand: a
 * newer one of the same place takes it, which costs speed only. Zero is empty. Any thread.
 */
enum { MAPPED_BITS = 10 };

struct mapped {
    atomic_uint_fast64_t ino[1 << MAPPED_BITS];
};

static inline unsigned mapped_place(uint64_t ino)
{
    return (unsigned)(ino * 0x9e3779b97f4a7c15u >> (64 - MAPPED_BITS));
}

static inline void mapped_note(struct mapped *m, uint64_t ino)
{
    atomic_store_explicit(&m->ino[mapped_place(ino)], ino, memory_order_relaxed);
}

static inline bool mapped_has(const struct mapped *m, uint64_t ino)
{
    return atomic_load_explicit(&m->ino[mapped_place(ino)], memory_order_relaxed) ==
           ino;
}

#endif
