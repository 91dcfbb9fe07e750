/* SPDX-License-Identifier: MIT */
/* cli/nonfinite.h - NaN and Inf in the bytes of a tensor. */
#ifndef UFS_CLI_NONFINITE_H
#define UFS_CLI_NONFINITE_H

#include "base/base.h"
#include "index/dtype.h"

struct nonfinite {
    uint64_t nan, inf;
};

/* Can an element of this type be NaN or Inf? */
bool nonfinite_possible(enum dtype d);

/* Adds those in `len` bytes of whole little-endian elements. */
void nonfinite_count(enum dtype d, const void *data, size_t len, struct nonfinite *n);

#endif
