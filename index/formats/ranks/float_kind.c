/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/float_kind.c - elements of floating-point types as numbers, and back. */
#include "index/formats/ranks/float_kind.h"

#include <string.h>

#include "base/endian.h"

static float bits_to_float(uint32_t bits)
{
    float f;

    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t float_to_bits(float f)
{
    uint32_t bits;

    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static double load_f16(const void *p)
{
    uint32_t h = get_le16(p), sign = (h & 0x8000) << 16, rest = h & 0x7fff;

    if (rest >= 0x7c00) /* infinities and NaN */
        return (double)bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    /* The exponent's bias is 15, that of a float 127: subnormal numbers come out too. */
    return (double)(bits_to_float(sign | rest << 13) * 0x1p112f);
}

static void store_f16(void *p, double v)
{
    uint32_t bits = float_to_bits((float)v), sign = bits >> 16 & 0x8000;
    float a = bits_to_float(bits & 0x7fffffff);

    if (a != a)
        put_le16(p, (uint16_t)(sign | 0x7e00));
    else if (a >= 65520.0f) /* rounds past the largest one */
        put_le16(p, (uint16_t)(sign | 0x7c00));
    else if (a <
             0x1p-14f) /* subnormal: steps of 2^-24, which 0.5 has as its last bit */
        put_le16(p, (uint16_t)(sign | (float_to_bits(a + 0.5f) - 0x3f000000)));
    else
        put_le16(p, (uint16_t)(sign | ((float_to_bits(a) - 0x38000000 + 0xfff +
                                        (float_to_bits(a) >> 13 & 1)) >>
                                       13)));
}

static double load_bf16(const void *p)
{
    return (double)bits_to_float((uint32_t)get_le16(p) << 16);
}

static void store_bf16(void *p, double v)
{
    uint32_t bits = float_to_bits((float)v);

    if (v != v)
        put_le16(p, 0x7fc0);
    else
        put_le16(p, (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

static double load_f32(const void *p)
{
    return (double)bits_to_float(get_le32(p));
}

static void store_f32(void *p, double v)
{
    put_le32(p, float_to_bits((float)v));
}

static double load_f64(const void *p)
{
    uint64_t bits = get_le64(p);
    double v;

    memcpy(&v, &bits, sizeof v);
    return v;
}

static void store_f64(void *p, double v)
{
    uint64_t bits;

    memcpy(&bits, &v, sizeof bits);
    put_le64(p, bits);
}

static const struct float_kind kinds[] = {
    {DTYPE_F16, load_f16, store_f16},
    {DTYPE_BF16, load_bf16, store_bf16},
    {DTYPE_F32, load_f32, store_f32},
    {DTYPE_F64, load_f64, store_f64},
};

const struct float_kind *float_kind_of(enum dtype d)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        if (kinds[i].dtype == d)
            return &kinds[i];
    return NULL;
}
