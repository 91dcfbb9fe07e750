/* SPDX-License-Identifier: MIT */
/* cli/nonfinite.c - bit patterns of NaN and Inf, by type. */
#include "cli/nonfinite.h"

#include "base/endian.h"

/* An IEEE-like layout: Inf has all exponent bits set and no mantissa bits. */
struct layout {
    unsigned bytes;
    uint64_t exponent, mantissa;
};

static const struct layout *layout_of(enum dtype d)
{
    static const struct layout f64 = {8, 0x7ff0000000000000u, 0x000fffffffffffffu};
    static const struct layout f32 = {4, 0x7f800000u, 0x007fffffu};
    static const struct layout f16 = {2, 0x7c00u, 0x03ffu};
    static const struct layout bf16 = {2, 0x7f80u, 0x007fu};
    static const struct layout e5m2 = {1, 0x7cu, 0x03u};

    switch ((int)d) {
    case DTYPE_F64:
    case DTYPE_C128:
        return &f64;
    case DTYPE_F32:
    case DTYPE_C64:
        return &f32;
    case DTYPE_F16:
    case DTYPE_C32:
        return &f16;
    case DTYPE_BF16:
        return &bf16;
    case DTYPE_F8_E5M2:
        return &e5m2;
    default:
        return NULL;
    }
}

/* 8-bit floats without Inf: which patterns are NaN. */
static bool is_small_nan(enum dtype d, unsigned char v)
{
    switch ((int)d) {
    case DTYPE_F8_E4M3:
        return (v & 0x7f) == 0x7f;
    case DTYPE_F8_E8M0:
        return v == 0xff;
    case DTYPE_F8_E4M3FNUZ:
    case DTYPE_F8_E5M2FNUZ:
        return v == 0x80;
    default:
        return false;
    }
}

bool nonfinite_possible(enum dtype d)
{
    return layout_of(d) || is_small_nan(d, 0x7f) || is_small_nan(d, 0xff) ||
           is_small_nan(d, 0x80);
}

static uint64_t load(const unsigned char *p, unsigned bytes)
{
    switch (bytes) {
    case 8:
        return get_le64(p);
    case 4:
        return get_le32(p);
    case 2:
        return get_le16(p);
    default:
        return *p;
    }
}

void nonfinite_count(enum dtype d, const void *data, size_t len, struct nonfinite *n)
{
    const unsigned char *p = data;
    const struct layout *l = layout_of(d);

    for (size_t i = 0; !l && i < len; i++)
        n->nan += is_small_nan(d, p[i]);
    for (size_t i = 0; l && i + l->bytes <= len; i += l->bytes) {
        uint64_t v = load(p + i, l->bytes);

        if ((v & l->exponent) != l->exponent)
            continue;
        n->nan += (v & l->mantissa) != 0;
        n->inf += (v & l->mantissa) == 0;
    }
}
