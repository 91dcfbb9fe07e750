/* SPDX-License-Identifier: MIT */
/* index/dtype.c - the table of element types. */
#include "index/dtype.h"

#include <string.h>

struct dtype_row {
    const char *name;
    const char *npy;
    uint8_t bits;
    uint8_t component; /* bytes; 0: the whole unit */
    bool foreign;      /* not in safetensors */
};

/*
 * NumPy has no bf16, 8-bit floats or half complex: they travel as raw bytes of the right
 * width (the descriptions that ml_dtypes writes), which numpy.view() turns back.
 */
static const struct dtype_row rows[DTYPE_COUNT] = {
    [DTYPE_NONE] = {"NONE", "|V1", 0, 0, true},
    [DTYPE_BOOL] = {"BOOL", "|b1", 8, 0, false},
    [DTYPE_U8] = {"U8", "|u1", 8, 0, false},
    [DTYPE_I8] = {"I8", "|i1", 8, 0, false},
    [DTYPE_U16] = {"U16", "<u2", 16, 0, false},
    [DTYPE_I16] = {"I16", "<i2", 16, 0, false},
    [DTYPE_U32] = {"U32", "<u4", 32, 0, false},
    [DTYPE_I32] = {"I32", "<i4", 32, 0, false},
    [DTYPE_U64] = {"U64", "<u8", 64, 0, false},
    [DTYPE_I64] = {"I64", "<i8", 64, 0, false},
    [DTYPE_F16] = {"F16", "<f2", 16, 0, false},
    [DTYPE_BF16] = {"BF16", "<V2", 16, 0, false},
    [DTYPE_F32] = {"F32", "<f4", 32, 0, false},
    [DTYPE_F64] = {"F64", "<f8", 64, 0, false},
    [DTYPE_C64] = {"C64", "<c8", 64, 4, false},
    [DTYPE_C128] = {"C128", "<c16", 128, 8, true},
    [DTYPE_C32] = {"C32", "<V4", 32, 2, true},
    [DTYPE_F8_E4M3] = {"F8_E4M3", "|V1", 8, 0, false},
    [DTYPE_F8_E5M2] = {"F8_E5M2", "|V1", 8, 0, false},
    [DTYPE_F8_E8M0] = {"F8_E8M0", "|V1", 8, 0, false},
    [DTYPE_F8_E4M3FNUZ] = {"F8_E4M3FNUZ", "|V1", 8, 0, false},
    [DTYPE_F8_E5M2FNUZ] = {"F8_E5M2FNUZ", "|V1", 8, 0, false},
    [DTYPE_F4] = {"F4", "|u1", 4, 0, false},
    [DTYPE_F6_E2M3] = {"F6_E2M3", "|u1", 6, 0, false},
    [DTYPE_F6_E3M2] = {"F6_E3M2", "|u1", 6, 0, false},
};

/* The number may come from the index: what is none of ours counts as DTYPE_NONE. */
static const struct dtype_row *dtype_row(enum dtype d)
{
    return (unsigned)d < DTYPE_COUNT ? &rows[d] : &rows[DTYPE_NONE];
}

unsigned dtype_bits(enum dtype d)
{
    return dtype_row(d)->bits;
}

unsigned dtype_unit(enum dtype d)
{
    unsigned bits = dtype_row(d)->bits;

    return bits < 8 ? 1 : bits / 8;
}

unsigned dtype_component(enum dtype d)
{
    unsigned component = dtype_row(d)->component;

    return component ? component : dtype_unit(d);
}

bool dtype_is_complex(enum dtype d)
{
    return dtype_row(d)->component != 0;
}

const char *dtype_name(enum dtype d)
{
    return dtype_row(d)->name;
}

enum dtype dtype_from_name(const char *name)
{
    for (int d = DTYPE_NONE + 1; d < DTYPE_COUNT; d++) {
        if (!strcmp(rows[d].name, name))
            return (enum dtype)d;
    }
    return DTYPE_NONE;
}

const char *dtype_npy(enum dtype d)
{
    return dtype_row(d)->npy;
}

bool dtype_in_safetensors(enum dtype d)
{
    return !dtype_row(d)->foreign;
}
