/* SPDX-License-Identifier: MIT */
/* index/shape.h - dimensions of a tensor and what follows from them. */
#ifndef UFS_INDEX_SHAPE_H
#define UFS_INDEX_SHAPE_H

#include "base/base.h"
#include "base/buf.h"
#include "index/dtype.h"

struct err;

/* More than any framework makes; keeps every loop over dimensions short. */
enum { SHAPE_MAX_DIMS = 64 };

struct shape {
    uint32_t nd;
    uint64_t dim[SHAPE_MAX_DIMS];
};

/* -EOVERFLOW when the product passes 2^63 (multiplied left to right, as safetensors). */
int shape_elements(const struct shape *s, uint64_t *out, struct err *e);

/* Bytes of the full tensor; -EBADMSG when sub-byte elements do not fill whole bytes. */
int shape_bytes(const struct shape *s, enum dtype d, uint64_t *out, struct err *e);

/*
 * The shape in storage units: the same for whole-byte types. For sub-byte types the last
 * dimension counts bytes; where that is no whole number but the total is, one flat
 * dimension of bytes.
 */
int shape_units(const struct shape *s, enum dtype d, struct shape *out, struct err *e);

bool shape_equal(const struct shape *a, const struct shape *b);

/* "[2, 3]", as JSON. */
int shape_format(const struct shape *s, struct buf *out);

#endif
