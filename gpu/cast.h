/* SPDX-License-Identifier: MIT */
/* gpu/cast.h - elements of one floating-point type as another. */
#ifndef UFS_GPU_CAST_H
#define UFS_GPU_CAST_H

#include "base/base.h"
#include "gpu/cast_core.h"
#include "index/dtype.h"

/* CAST_NONE for what is no float that can be cast. */
enum cast_kind cast_kind_of(enum dtype d);

/* Between F64, F32, F16, BF16, F8_E4M3 and F8_E5M2; a type to itself as well. */
bool cast_possible(enum dtype from, enum dtype to);

/*
 * Casts n elements, each by itself; src and dst do not overlap and need no alignment.
 * Rounds to nearest, ties to even, once: F64 to a short type is not rounded to F32 first.
 * What is too large becomes infinity, or NaN in F8_E4M3, which has no infinity (as
 * ml_dtypes does it; torch 2.15 makes 448 of it, of infinity too). NaN stays NaN, with
 * its sign. The bits are those of cast_one() of each.
 */
void cast_elements(enum dtype from, enum dtype to, const void *src, void *dst,
                   size_t n);

/* The same of elements [at, at + n) of a result whose blocks have factors (NULL: none). */
void cast_scaled_elements(enum dtype from, enum dtype to, const void *src, void *dst,
                          size_t n, const struct cast_scale *scale, uint64_t at);

#endif
