/* SPDX-License-Identifier: MIT */
/* tests/formats/read_tensor.h - a tensor's bytes by the way that the mount takes. */
#ifndef UFS_TESTS_FORMATS_READ_TENSOR_H
#define UFS_TESTS_FORMATS_READ_TENSOR_H

#include "world.h"

/*
 * Opens the tensor as a handle of the mount does (index, plan, codecs, assembler) and
 * reads all of it in windows of uneven size. Call guard_install() before.
 */
int read_tensor(struct world *w, int64_t checkpoint, const struct tensor_info *t,
                struct buf *out, struct err *e);

#endif
