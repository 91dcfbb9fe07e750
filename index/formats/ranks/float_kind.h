/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/float_kind.h - elements of floating-point types as numbers, and back. */
#ifndef UFS_INDEX_FORMATS_RANKS_FLOAT_KIND_H
#define UFS_INDEX_FORMATS_RANKS_FLOAT_KIND_H

#include "base/base.h"
#include "index/dtype.h"

/* Little-endian elements, at any address, as numbers that hold all of them. */
struct float_kind {
    enum dtype dtype;
    double (*load)(const void *p);
    void (*store)(void *p, double v); /* to nearest, ties to even */
};

/* F16, BF16, F32 and F64; NULL: another type. */
const struct float_kind *float_kind_of(enum dtype d);

#endif
