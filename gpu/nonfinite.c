/* SPDX-License-Identifier: MIT */
/* gpu/nonfinite.c - bit patterns of NaN and Inf, by type. */
#include "gpu/nonfinite.h"

#include <string.h>

#include "gpu/vectors.h"

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

/* 8-bit floats without Inf: those are NaN of which these bits are these. */
struct pattern {
    uint8_t bits, nan;
};

static const struct pattern *pattern_of(enum dtype d)
{
    static const struct pattern e4m3 = {0x7f, 0x7f}, e8m0 = {0xff, 0xff};
    static const struct pattern fnuz = {0xff, 0x80};

    switch ((int)d) {
    case DTYPE_F8_E4M3:
        return &e4m3;
    case DTYPE_F8_E8M0:
        return &e8m0;
    case DTYPE_F8_E4M3FNUZ:
    case DTYPE_F8_E5M2FNUZ:
        return &fnuz;
    default:
        return NULL;
    }
}

/*
 * Counts are as wide as the elements, so that they become vectors: of at most 255 bytes,
 * and BLOCK elements of other types, at a time.
 */
enum { BLOCK = 32768, BLOCK_8 = 255 };

#define COUNT_ROW(NAME, TYPE)                                                          \
    VECTORS static void NAME(const unsigned char *p, size_t n, const struct layout *l, \
                             struct nonfinite *out)                                    \
    {                                                                                  \
        const TYPE exponent = (TYPE)l->exponent, mantissa = (TYPE)l->mantissa;         \
        TYPE nan = 0, inf = 0;                                                         \
                                                                                       \
        for (size_t i = 0; i < n; i++) {                                               \
            TYPE v;                                                                    \
                                                                                       \
            memcpy(&v, p + i * sizeof v, sizeof v);                                    \
            v &= (TYPE)(exponent | mantissa);                                          \
            nan = (TYPE)(nan + (v > exponent));                                        \
            inf = (TYPE)(inf + (v == exponent));                                       \
        }                                                                              \
        out->nan += nan;                                                               \
        out->inf += inf;                                                               \
    }

COUNT_ROW(count_64, uint64_t)
COUNT_ROW(count_32, uint32_t)
COUNT_ROW(count_16, uint16_t)
COUNT_ROW(count_8, uint8_t)

VECTORS static uint8_t count_pattern(const unsigned char *p, size_t n,
                                     const struct pattern *k)
{
    uint8_t nan = 0;

    for (size_t i = 0; i < n; i++)
        nan = (uint8_t)(nan + ((p[i] & k->bits) == k->nan));
    return nan;
}

static void count_elements(const unsigned char *p, size_t n, const struct layout *l,
                           struct nonfinite *out)
{
    switch (l->bytes) {
    case 8:
        return count_64(p, n, l, out);
    case 4:
        return count_32(p, n, l, out);
    case 2:
        return count_16(p, n, l, out);
    default:
        count_8(p, n, l, out);
    }
}

void nonfinite_count(enum dtype d, const void *data, size_t len, struct nonfinite *n)
{
    const unsigned char *p = data;
    const struct layout *l = layout_of(d);
    const struct pattern *k = pattern_of(d);
    size_t left = l ? len / l->bytes : k ? len : 0, part;

    for (; left > 0; left -= part) {
        part = MIN(left, (size_t)(l && l->bytes > 1 ? BLOCK : BLOCK_8));
        if (l)
            count_elements(p, part, l, n);
        else
            n->nan += count_pattern(p, part, k);
        p += part * (l ? l->bytes : 1);
    }
}
