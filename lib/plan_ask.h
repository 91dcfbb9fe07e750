/* SPDX-License-Identifier: MIT */
/* lib/plan_ask.h - asks the server of a mount for the plan of a tensor. */
#ifndef UFS_LIB_PLAN_ASK_H
#define UFS_LIB_PLAN_ASK_H

#include "base/base.h"
#include "gpu/plan_wire.h"

struct arena;
struct err;

/*
 * The plan of the tensor file at `path` in a mount. What a server says is not believed but
 * read with care, and only one of this user (or root) is asked. -ENOTTY: nobody tells, the
 * file has to be read; -ESTALE: the checkpoint is another by now; else what the server
 * says is wrong with the tensor.
 */
int plan_ask(const char *path, struct arena *a, struct plan_wire *out, struct err *e);

#endif
