/* SPDX-License-Identifier: MIT */
/* fs/habit.h - how programs read a file, for the next one that opens it. */
#ifndef UFS_FS_HABIT_H
#define UFS_FS_HABIT_H

#include <stdatomic.h>

#include "base/base.h"

/* Numbers of nodes; zero is empty. */
enum { HABIT_BITS = 10 };
struct marks {
    atomic_uint_fast64_t ino[1 << HABIT_BITS];
};

/*
 * Of a mount: the nodes that were mapped lately, and those that were read here and there.
 * Each has one place where it may stand: a newer one takes it, which costs speed only.
 * Any thread.
 */
struct habits {
    struct marks mapped, scattered;
};

/* Of an open file. Any thread. */
struct habit {
    enum { HABIT_DIRECT, HABIT_MAPPED, HABIT_SCATTERED } opened_for;
    atomic_uint_fast64_t next; /* where the last read ended */
    atomic_uint_fast64_t hops; /* direct: short reads that began elsewhere */
    atomic_uint_fast64_t run;  /* scattered: bytes that were asked for in a row */
};

/*
 * The node is opened: does the kernel keep pages of it (true), or is each read handed
 * over once (decision 020)? may_scatter: such files have pages too.
 */
bool habit_open(const struct habits *all, uint64_t ino, bool may_scatter,
                struct habit *h);

/*
 * The kernel asks for len bytes at off. owned: for a read(2) that has an owner; it fills
 * pages without one.
 */
void habit_read(struct habits *all, uint64_t ino, struct habit *h, bool owned,
                uint64_t off, size_t len);

#endif
