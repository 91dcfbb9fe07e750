/* SPDX-License-Identifier: MIT */
/* gpu/cast.h - elements of one floating-point type as another. */
#ifndef UFS_GPU_CAST_H
#define UFS_GPU_CAST_H

#include "base/base.h"
#include "index/dtype.h"

/* Between F64, F32, F16, BF16, F8_E4M3 and F8_E5M2; a type to itself as well. */
bool cast_possible(enum dtype from, enum dtype to);

/*
 * Casts n elements, each by itself; src and dst do not overlap and need no alignment.
 * Rounds to nearest, ties to even, once: F64 to a short type is not rounded to F32 first.
 * What is too large becomes infinity, or NaN in F8_E4M3, which has no infinity (as
 * torch.Tensor.to and ml_dtypes do). NaN stays NaN, with its sign.
 */
void cast_elements(enum dtype from, enum dtype to, const void *src, void *dst,
                   size_t n);

#endif
