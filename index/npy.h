/* SPDX-License-Identifier: MIT */
/* index/npy.h - the header of an .npy file, written and read. */
#ifndef UFS_INDEX_NPY_H
#define UFS_INDEX_NPY_H

#include "base/base.h"
#include "base/buf.h"
#include "index/dtype.h"
#include "index/shape.h"

struct err;

/* The .npy header of a tensor (version 1.0, or 2.0 where needed), 64-byte aligned. */
int npy_header(enum dtype d, const struct shape *s, struct buf *out, struct err *e);

enum {
    NPY_PREFIX = 12, /* bytes that npy_header_size() wants to see */
    /*
     * Headers of tensors are below 2 KiB, NumPy itself refuses more than 10,000 bytes
     * (numpy 2.4, lib/_format_impl.py); the rest is for old ones with much padding.
     */
    NPY_MAX_HEADER = 256 << 10,
};

/* What a header says. The elements follow at byte `header`, without gaps. */
struct npy_layout {
    enum dtype dtype;
    struct shape shape;
    uint64_t header, bytes; /* of the header and of all elements */
    bool fortran;           /* the first dimension runs fastest */
    bool swap;              /* big-endian */
    bool line;              /* a newline ends the header, as numpy.lib.format has it */
};

/*
 * Bytes before the elements, from the first bytes of the file (fewer than NPY_PREFIX only
 * where the file has no more). Versions 1.0, 2.0 and 3.0 (numpy.lib.format). -EBADMSG: no
 * .npy file, -ENOTSUP: a version that is not known, -EFBIG: more than NPY_MAX_HEADER.
 */
int npy_header_size(const void *head, size_t len, uint64_t *size, struct err *e);

/*
 * Reads a whole header, head[0..npy_header_size()). Its text is parsed by a grammar of its
 * own that knows nothing but what numpy.save writes; nothing is evaluated. -EBADMSG:
 * damaged; -ENOTSUP: sound, but of elements that are no tensor's (objects, structures,
 * text, dates) or whose type .npy does not keep (|V1).
 */
int npy_parse(const void *head, size_t len, struct npy_layout *out, struct err *e);

/* The same where elements of |V1 are known to be of a type of one byte. */
int npy_parse_as(const void *head, size_t len, enum dtype one_byte,
                 struct npy_layout *out, struct err *e);

/* Unit strides of the elements: row-major, or column-major where `fortran`. */
void npy_steps(const struct npy_layout *x, int64_t step[SHAPE_MAX_DIMS]);

#endif
