/* SPDX-License-Identifier: MIT */
/* index/dtype.h - element types: safetensors names, sizes, NumPy descriptions. */
#ifndef UFS_INDEX_DTYPE_H
#define UFS_INDEX_DTYPE_H

#include "base/base.h"

/* Stored in the index: never renumber, add at the end and raise the schema version. */
enum dtype {
    DTYPE_NONE = 0,
    DTYPE_BOOL,
    DTYPE_U8,
    DTYPE_I8,
    DTYPE_U16,
    DTYPE_I16,
    DTYPE_U32,
    DTYPE_I32,
    DTYPE_U64,
    DTYPE_I64,
    DTYPE_F16,
    DTYPE_BF16,
    DTYPE_F32,
    DTYPE_F64,
    DTYPE_C64,
    DTYPE_C128,
    DTYPE_C32, /* torch.complex32: two F16 */
    DTYPE_F8_E4M3,
    DTYPE_F8_E5M2,
    DTYPE_F8_E8M0,
    DTYPE_F8_E4M3FNUZ,
    DTYPE_F8_E5M2FNUZ,
    DTYPE_F4, /* E2M1, two elements a byte */
    DTYPE_F6_E2M3,
    DTYPE_F6_E3M2,
    DTYPE_COUNT
};

/* Bits of one element. */
unsigned dtype_bits(enum dtype d);

/*
 * Bytes of one storage unit: the element for whole-byte types, 1 for sub-byte ones. Plans
 * and chunks count in units (see shape_units).
 */
unsigned dtype_unit(enum dtype d);

/* The component that byte swapping works on: 4 for C64, else as dtype_unit. */
unsigned dtype_component(enum dtype d);
bool dtype_is_complex(enum dtype d);

/* "BF16"; the names of safetensors 0.8, and C128, C32 which it does not have. */
const char *dtype_name(enum dtype d);

/* Exact, case-sensitive; DTYPE_NONE when unknown. */
enum dtype dtype_from_name(const char *name);

/* NumPy's descr: "<f4", "<V2" for BF16, "|V1" for 8-bit floats, "|u1" for packed ones. */
const char *dtype_npy(enum dtype d);

/* Can a safetensors file hold it? */
bool dtype_in_safetensors(enum dtype d);

#endif
