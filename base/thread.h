/* SPDX-License-Identifier: MIT */
/* base/thread.h - starts threads that leave the process's signals to its own; their processors. */
#ifndef UFS_BASE_THREAD_H
#define UFS_BASE_THREAD_H

#include <pthread.h>

#include "base/base.h"

/*
 * pthread_create() with signals blocked in the new thread: those belong to the main thread,
 * or to the program that we are a library of. But not what a thread's own access raises:
 * while that is blocked the kernel ends the process, and base/guard.h would guard nothing.
 */
MUST_USE int thread_start(pthread_t *out, void *(*fn)(void *user), void *user);

/* The processors that this process may use, 1 at least. */
unsigned thread_processors(void);

#endif
