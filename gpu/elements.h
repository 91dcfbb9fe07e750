/* SPDX-License-Identifier: MIT */
/* gpu/elements.h - the elements of a tensor as numbers. */
#ifndef UFS_GPU_ELEMENTS_H
#define UFS_GPU_ELEMENTS_H

#include "base/base.h"
#include "index/dtype.h"

/* Decodes one type; made once, then shared. */
struct element_decoder {
    enum dtype dtype;
    unsigned unit;    /* bytes of a storage unit (dtype_unit) */
    unsigned numbers; /* that one unit decodes to: 2 of complex types and F4, else 1 */
    float table[256]; /* of one-byte types: each pattern's value; of F4 each nibble's */
};

/*
 * False for types whose packing no framework has settled (F6), which are bytes to us, and
 * for DTYPE_NONE.
 */
bool element_decoder_init(struct element_decoder *d, enum dtype dtype);

/*
 * `units` storage units at src, which need no alignment, to units * numbers doubles. Exact,
 * but for I64 and U64 beyond 2^53, which are rounded. Complex: real, imaginary. F4: the
 * low nibble first, as torch.float4_e2m1fn_x2 has it. BOOL: any byte but 0 is 1. NaN stays
 * NaN.
 */
void element_decode(const struct element_decoder *d, const void *src, size_t units,
                    double *out);

/* Does F32 hold every number of the type? Then the same, exact, to floats. */
bool element_is_single(const struct element_decoder *d);
void element_decode_single(const struct element_decoder *d, const void *src,
                           size_t units, float *out);

bool dtype_is_integer(enum dtype d); /* BOOL is one */

/* The integer at src, exactly. */
__int128 element_integer(enum dtype d, const void *src);

/*
 * Number k of the unit at src as text that reads back to the same value ("-3", "0.1",
 * "nan", "1+2j" of complex types). Returns dst.
 */
const char *element_text(enum dtype d, const void *src, unsigned k, char dst[96]);

#endif
