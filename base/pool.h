/* SPDX-License-Identifier: MIT */
/* base/pool.h - a fixed set of worker threads for work that splits in pieces. */
#ifndef UFS_BASE_POOL_H
#define UFS_BASE_POOL_H

#include "base/base.h"

struct err;
struct pool;

/*
 * `threads` workers (0: one a core that this process may use). Where they wait for servers
 * more than they work, POOL_REMOTE are a good number.
 */
enum { POOL_REMOTE = 8 };
int pool_new(unsigned threads, struct pool **out, struct err *e);

void pool_free(struct pool *p);

unsigned pool_threads(const struct pool *p);

/*
 * Calls fn(user, i, e) for every i in [0, count), on the workers and on the calling
 * thread, and returns when all calls have ended. After a failure no new call starts; the
 * first failure (lowest i of those that failed) is returned in e. Any thread may call,
 * several at once too; fn may call pool_each of the same pool. A NULL pool runs it all
 * on the calling thread.
 */
typedef int pool_fn(void *user, size_t i, struct err *e);
int pool_each(struct pool *p, size_t count, pool_fn *fn, void *user, struct err *e);

/*
 * Calls fn(user, true) on a worker, when none of them has anything else to do, and does
 * not wait for it: for work ahead of time. pool_free() calls fn(user, false) of what has
 * not begun by then, to give back what `user` holds. fn may call pool_each(). False, and no
 * call, when as many as there are workers wait already, or there is no pool.
 */
typedef void pool_later_fn(void *user, bool run);
bool pool_later(struct pool *p, pool_later_fn *fn, void *user);

#endif
