/* SPDX-License-Identifier: MIT */
/* lib/plan_open.h - from the plan of another process to a gather of this one. */
#ifndef UFS_LIB_PLAN_OPEN_H
#define UFS_LIB_PLAN_OPEN_H

#include "base/base.h"
#include "gpu/gather.h"
#include "gpu/plan_wire.h"

struct err;

/*
 * Opens the plan's files with this process's own rights. -ESTALE: one has not the size and
 * mtime that the plan tells, it was made of another; -ENOENT, -EACCES: a file cannot be
 * opened here; -EBADMSG: the plan is not what it should be.
 */
int plan_gather(const struct plan_wire *p, const struct gather_part *part,
                struct gather **out, struct err *e);

/*
 * The same of a file that ends in the whole tensor, as it is shown (raw/KEY, KEY.npy).
 * -ESTALE: its attributes tell of another type or shape.
 */
int plan_gather_file(const char *path, const struct shape *shape, enum dtype dtype,
                     const struct gather_part *part, struct gather **out,
                     struct err *e);

#endif
