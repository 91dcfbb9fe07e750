/* SPDX-License-Identifier: MIT */
/* gpu/cast_core.h - floating-point elements bit by bit, for the C compiler and for nvcc. */
#ifndef UFS_GPU_CAST_CORE_H
#define UFS_GPU_CAST_CORE_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Plain C11 and C++17, no calls of a library: the statements that a device runs are those
 * that tests run. All but one multiplication is integer work, so that every machine,
 * rounding mode and setting for subnormals gives the same bits.
 */
#ifdef __CUDACC__
#define CORE_FN static __host__ __device__ __forceinline__
#else
#define CORE_FN static inline __attribute__((always_inline, unused))
#endif

enum cast_kind {
    CAST_NONE = 0,
    CAST_F64,
    CAST_F32,
    CAST_F16,
    CAST_BF16,
    CAST_F8_E4M3, /* without infinity: the largest pattern is NaN */
    CAST_F8_E5M2,
    CAST_KINDS
};

/* The parts of a float shorter than F32: exponent bits, mantissa bits. */
struct cast_layout {
    unsigned exponent, mantissa;
    bool infinity; /* false: the largest pattern is NaN, all else are numbers */
};

#define CAST_F32_MANTISSA 23u
#define CAST_F32_BIAS 127
#define CAST_F32_INFINITY 0x7f800000u
#define CAST_F32_MAGNITUDE 0x7fffffffu
#define CAST_F32_QUIET 0x400000u

CORE_FN struct cast_layout cast_layout_of(int kind)
{
    struct cast_layout l = {5, 2, true}; /* F8_E5M2 */

    if (kind == CAST_F16) {
        l.mantissa = 10;
    } else if (kind == CAST_BF16) {
        l.exponent = 8;
        l.mantissa = 7;
    } else if (kind == CAST_F8_E4M3) {
        l.exponent = 4;
        l.mantissa = 3;
        l.infinity = false;
    }
    return l;
}

CORE_FN unsigned cast_size(int kind)
{
    return kind == CAST_F64                        ? 8u
           : kind == CAST_F32                      ? 4u
           : kind == CAST_F16 || kind == CAST_BF16 ? 2u
                                                   : 1u;
}

CORE_FN uint32_t cast_float_bits(float f)
{
    union {
        float f;
        uint32_t u;
    } both;

    both.f = f;
    return both.u;
}

CORE_FN float cast_bits_float(uint32_t u)
{
    union {
        float f;
        uint32_t u;
    } both;

    both.u = u;
    return both.f;
}

/* v / 2^shift, to nearest, ties to even. shift is 1 to 31. */
CORE_FN uint32_t cast_round_shift(uint32_t v, unsigned shift)
{
    uint32_t half = 1u << (shift - 1), rest = v & ((1u << shift) - 1), q = v >> shift;

    return q + (rest > half || (rest == half && (q & 1)) ? 1u : 0u);
}

/* A pattern of F32 as one of the shorter type. */
CORE_FN uint32_t cast_narrow(uint32_t u, struct cast_layout l)
{
    uint32_t sign = u >> 31 << (l.exponent + l.mantissa);
    uint32_t magnitude = u & CAST_F32_MAGNITUDE, r;
    uint32_t top = ((1u << l.exponent) - 1) << l.mantissa; /* infinity, where it is */
    uint32_t limit = l.infinity ? top : (1u << (l.exponent + l.mantissa)) - 1;
    int exponent = (int)(magnitude >> CAST_F32_MANTISSA) - CAST_F32_BIAS +
                   (1 << (l.exponent - 1)) - 1; /* as the shorter type has it */
    uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    unsigned shift = CAST_F32_MANTISSA - l.mantissa;

    if (magnitude > CAST_F32_INFINITY) /* NaN, made quiet */
        return l.infinity ? sign | top | 1u << (l.mantissa - 1) |
                                (magnitude & 0x7fffffu) >> shift
                          : sign | limit;
    if (magnitude < 0x800000u) { /* F32's own subnormals */
        r = l.exponent == 8 ? cast_round_shift(magnitude, shift) : 0;
    } else if (exponent <= 0) { /* subnormal there; too small for any: 0 */
        shift += (unsigned)(1 - exponent);
        r = shift <= 25 ? cast_round_shift(significand, shift) : 0;
    } else { /* rounding up may carry into the exponent, as it should */
        r = cast_round_shift(significand, shift) +
            ((uint32_t)(exponent - 1) << l.mantissa);
    }
    return sign | (r < limit ? r : limit);
}

CORE_FN uint32_t cast_widen(uint32_t v, struct cast_layout l)
{
    uint32_t sign = v >> (l.exponent + l.mantissa) << 31;
    uint32_t magnitude = v & ((1u << (l.exponent + l.mantissa)) - 1);
    uint32_t exponent = magnitude >> l.mantissa;
    uint32_t mantissa = magnitude & ((1u << l.mantissa) - 1);
    uint32_t top = (1u << l.exponent) - 1;
    unsigned shift = CAST_F32_MANTISSA - l.mantissa;
    int bias = (1 << (l.exponent - 1)) - 1, e = (int)exponent;

    if (l.infinity && exponent == top)
        return sign | CAST_F32_INFINITY | mantissa << shift;
    if (!l.infinity && magnitude == ((1u << (l.exponent + l.mantissa)) - 1))
        return sign | CAST_F32_INFINITY | CAST_F32_QUIET;
    if (exponent == 0) {
        if (mantissa == 0 || l.exponent == 8) /* F32 has the same subnormals */
            return sign | mantissa << shift;
        for (e = 1; !(mantissa >> l.mantissa); e--)
            mantissa <<= 1;
        mantissa &= (1u << l.mantissa) - 1;
    }
    return sign | (uint32_t)(e + CAST_F32_BIAS - bias) << CAST_F32_MANTISSA |
           mantissa << shift;
}

/* Infinity and NaN of F64; no NaN becomes infinity. */
CORE_FN uint32_t cast_f64_special(uint64_t u)
{
    uint64_t magnitude = u & (uint64_t)INT64_MAX;
    uint32_t sign = (uint32_t)(u >> 63) << 31;
    uint32_t rest = (uint32_t)(magnitude >> 29) & 0x7fffffu;

    return sign | CAST_F32_INFINITY |
           (magnitude > 0x7ffull << 52 ? rest | CAST_F32_QUIET : 0u);
}

/*
 * F64 as F32 rounded to odd: towards zero, and the last bit set where anything was lost.
 * Rounding that to a type of 22 bits less mantissa gives what rounding once would.
 */
CORE_FN uint32_t cast_f64_to_odd(uint64_t u)
{
    uint32_t sign = (uint32_t)(u >> 63) << 31;
    uint64_t magnitude = u & (uint64_t)INT64_MAX;
    uint64_t significand = (magnitude & ((1ull << 52) - 1)) | 1ull << 52;
    int exponent = (int)(magnitude >> 52) - 1023 + CAST_F32_BIAS;
    unsigned shift = 29;
    bool lost;

    if (magnitude >= 0x7ffull << 52)
        return cast_f64_special(u);
    if (exponent >= 255)
        return sign | (CAST_F32_INFINITY - 1); /* odd, and above what is finite there */
    if (exponent <= 0) {
        shift += (unsigned)(1 - exponent);
        if (shift > 60 || magnitude >> 52 == 0)
            return sign | (magnitude != 0 ? 1u : 0u);
        exponent = 0;
    }
    lost = (significand & ((1ull << shift) - 1)) != 0;
    significand = significand >> shift & 0x7fffffu;
    return sign | (uint32_t)exponent << CAST_F32_MANTISSA | (uint32_t)significand |
           (lost ? 1u : 0u);
}

/* To nearest, ties to even. */
CORE_FN uint32_t cast_f64_to_f32(uint64_t u)
{
    uint32_t sign = (uint32_t)(u >> 63) << 31;
    uint64_t magnitude = u & (uint64_t)INT64_MAX, rest, half, q;
    uint64_t significand = (magnitude & ((1ull << 52) - 1)) | 1ull << 52;
    int exponent = (int)(magnitude >> 52) - 1023 + CAST_F32_BIAS;
    unsigned shift = 29;

    if (magnitude >= 0x7ffull << 52)
        return cast_f64_special(u);
    if (exponent >= 255)
        return sign | CAST_F32_INFINITY;
    if (exponent <= 0) {
        shift += (unsigned)(1 - exponent);
        if (shift > 54)
            return sign;
    }
    half = 1ull << (shift - 1);
    rest = significand & ((1ull << shift) - 1);
    q = significand >> shift;
    q += rest > half || (rest == half && (q & 1)) ? 1u : 0u;
    if (exponent > 0) /* may carry up to infinity, as it should */
        q += (uint64_t)(exponent - 1) << CAST_F32_MANTISSA;
    return sign | (uint32_t)q;
}

CORE_FN uint64_t cast_f32_to_f64(uint32_t u)
{
    uint64_t sign = (uint64_t)(u >> 31) << 63;
    uint32_t magnitude = u & CAST_F32_MAGNITUDE, mantissa = magnitude & 0x7fffffu;
    int exponent = (int)(magnitude >> CAST_F32_MANTISSA);

    if (magnitude > CAST_F32_INFINITY)
        mantissa |= CAST_F32_QUIET;
    if (magnitude >= CAST_F32_INFINITY)
        return sign | 0x7ffull << 52 | (uint64_t)mantissa << 29;
    if (magnitude == 0)
        return sign;
    if (exponent == 0) {
        for (exponent = 1; !(mantissa >> CAST_F32_MANTISSA); exponent--)
            mantissa <<= 1;
        mantissa &= 0x7fffffu;
    }
    return sign | (uint64_t)(exponent + 1023 - CAST_F32_BIAS) << 52 |
           (uint64_t)mantissa << 29;
}

/*
 * The product of two patterns of F32. NaN has one spelling on a device and several on a
 * processor: here the element's own is kept, and what becomes NaN has the plain one.
 */
CORE_FN uint32_t cast_scaled(uint32_t u, float factor)
{
    uint32_t r;

    if ((u & CAST_F32_MAGNITUDE) > CAST_F32_INFINITY)
        return u | CAST_F32_QUIET;
    r = cast_float_bits(cast_bits_float(u) * factor);
    return (r & CAST_F32_MAGNITUDE) > CAST_F32_INFINITY
               ? CAST_F32_INFINITY | CAST_F32_QUIET
               : r;
}

CORE_FN uint32_t cast_to_f32(uint32_t v, int kind)
{
    if (kind == CAST_F32)
        return v;
    if (kind == CAST_BF16)
        return v << 16;
    return cast_widen(v, cast_layout_of(kind));
}

CORE_FN uint32_t cast_bf16_of(uint32_t u)
{
    uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16, quiet = u >> 16 | 0x40u;

    return (u & CAST_F32_MAGNITUDE) > CAST_F32_INFINITY ? quiet : rounded;
}

CORE_FN uint32_t cast_from_f32(uint32_t u, int kind)
{
    if (kind == CAST_F32)
        return u;
    if (kind == CAST_BF16)
        return cast_bf16_of(u);
    return cast_narrow(u, cast_layout_of(kind));
}

/*
 * One element: its pattern in the low bytes, as is the result's. To its own type it is
 * copied, unless there is a factor. Short of F64 it is rounded once, after the factor;
 * F64 with a factor is rounded to F32 before.
 */
CORE_FN uint64_t cast_one(uint64_t v, int from, int to, bool scaled, float factor)
{
    uint32_t u;

    if (from == to && !scaled)
        return v;
    if (from == CAST_F64)
        u = to == CAST_F32 || to == CAST_F64 || scaled ? cast_f64_to_f32(v)
                                                       : cast_f64_to_odd(v);
    else
        u = cast_to_f32((uint32_t)v, from);
    if (scaled)
        u = cast_scaled(u, factor);
    return to == CAST_F64 ? cast_f32_to_f64(u) : cast_from_f32(u, to);
}

/* ---- factors of blocks of elements ---- */

#define CAST_SCALE_TERMS 8

/*
 * A result's element n has index (n / stride) % dim in a dimension, and there it lies in
 * block (index + origin) / block, which is `step` entries apart from its neighbour. Only
 * dimensions of more than one block are told.
 */
struct cast_scale_term {
    uint64_t stride, dim, origin, block, step;
};

struct cast_scale {
    uint64_t value; /* address of the F32 factors, where they are used */
    uint64_t terms;
    struct cast_scale_term term[CAST_SCALE_TERMS];
};

/* Devices divide 32-bit numbers several times faster. */
CORE_FN uint64_t cast_divide(uint64_t a, uint64_t b)
{
    return (a | b) >> 32 ? a / b : (uint64_t)((uint32_t)a / (uint32_t)b);
}

/* The factor of element n; it holds for `count` elements from there on. */
CORE_FN float cast_scale_at(const struct cast_scale *s, uint64_t n, uint64_t *count)
{
    uint64_t at = 0;

    *count = UINT64_MAX;
    for (uint64_t k = 0; k < s->terms; k++) {
        const struct cast_scale_term *t = &s->term[k];
        uint64_t whole = cast_divide(n, t->stride), within = n - whole * t->stride;
        uint64_t i = whole - cast_divide(whole, t->dim) * t->dim;
        uint64_t block = cast_divide(i + t->origin, t->block);
        uint64_t steps = (block + 1) * t->block - (i + t->origin);

        if (steps > t->dim - i)
            steps = t->dim - i;
        at += block * t->step;
        if (steps * t->stride - within < *count)
            *count = steps * t->stride - within;
    }
    return ((const float *)(uintptr_t)s->value)[at];
}

#endif
