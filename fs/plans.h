/* SPDX-License-Identifier: MIT */
/* fs/plans.h - the plan service of a mount: tells programs where a tensor's bytes are. */
#ifndef UFS_FS_PLANS_H
#define UFS_FS_PLANS_H

#include "base/base.h"

struct err;
struct fs;
struct plans;

/*
 * Listens at a socket of this user's (gpu/plan_service.h), one thread. The mount works
 * without as well: files are read then.
 */
int plans_new(struct fs *fs, struct plans **out, struct err *e);
void plans_free(struct plans *p); /* NULL is fine; ends the thread */

/* Where it listens. */
const char *plans_path(const struct plans *p);

#endif
