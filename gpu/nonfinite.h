/* SPDX-License-Identifier: MIT */
/* gpu/nonfinite.h - NaN and Inf in the bytes of a tensor. */
#ifndef UFS_GPU_NONFINITE_H
#define UFS_GPU_NONFINITE_H

#include "base/base.h"
#include "index/dtype.h"

struct nonfinite {
    uint64_t nan, inf;
};

/* Adds those in `len` bytes of whole little-endian elements. */
void nonfinite_count(enum dtype d, const void *data, size_t len, struct nonfinite *n);

#endif
