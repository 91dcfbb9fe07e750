/* SPDX-License-Identifier: MIT */
/* base/checked.h - arithmetic on numbers from files: every function is true on overflow. */
#ifndef UFS_BASE_CHECKED_H
#define UFS_BASE_CHECKED_H

#include "base/base.h"

static inline MUST_USE bool add_overflows(uint64_t a, uint64_t b, uint64_t *sum)
{
    return __builtin_add_overflow(a, b, sum);
}

static inline MUST_USE bool mul_overflows(uint64_t a, uint64_t b, uint64_t *product)
{
    return __builtin_mul_overflow(a, b, product);
}

/* True unless [off, off + len) lies within [0, size). */
static inline MUST_USE bool range_outside(uint64_t off, uint64_t len, uint64_t size)
{
    return off > size || len > size - off;
}

/* Narrowing to size_t (the same width on every machine that we build for). */
static inline MUST_USE bool size_overflows(uint64_t value, size_t *out)
{
    return __builtin_add_overflow(value, (uint64_t)0, out);
}

#endif
