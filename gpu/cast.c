/* SPDX-License-Identifier: MIT */
/* gpu/cast.c - casts of floating-point elements, bit by bit: the same on every machine. */
#include "gpu/cast.h"

#include <assert.h>
#include <string.h>

/* The parts of a float shorter than F32: a sign, exponent bits, mantissa bits. */
struct layout {
    unsigned exponent, mantissa;
    bool infinity; /* false: the largest pattern is NaN, all else are numbers */
};

enum {
    F32_MANTISSA = 23,
    F32_BIAS = 127,
    F32_INFINITY = 0x7f800000,
    F32_MAGNITUDE = 0x7fffffff,
    BLOCK = 1024, /* elements that go through a table of F32 at a time */
};

static bool layout_of(enum dtype d, struct layout *out)
{
    static const struct layout layout[DTYPE_COUNT] = {
        [DTYPE_F16] = {5, 10, true},
        [DTYPE_BF16] = {8, 7, true},
        [DTYPE_F8_E4M3] = {4, 3, false},
        [DTYPE_F8_E5M2] = {5, 2, true},
    };

    *out = layout[d];
    return out->exponent != 0;
}

bool cast_possible(enum dtype from, enum dtype to)
{
    struct layout l;

    return (from == DTYPE_F64 || from == DTYPE_F32 || layout_of(from, &l)) &&
           (to == DTYPE_F64 || to == DTYPE_F32 || layout_of(to, &l));
}

/* v / 2^shift, to nearest, ties to even. shift is 1 to 31. */
static uint32_t round_shift(uint32_t v, unsigned shift)
{
    uint32_t half = 1u << (shift - 1), rest = v & ((1u << shift) - 1), q = v >> shift;

    return q + (rest > half || (rest == half && (q & 1)));
}

/* A pattern of F32 as one of the shorter type. */
static uint32_t narrow(uint32_t u, const struct layout *l)
{
    uint32_t sign = u >> 31 << (l->exponent + l->mantissa);
    uint32_t magnitude = u & F32_MAGNITUDE, r;
    uint32_t top = ((1u << l->exponent) - 1) << l->mantissa; /* infinity, where it is */
    uint32_t limit = l->infinity ? top : (1u << (l->exponent + l->mantissa)) - 1;
    int exponent = (int)(magnitude >> F32_MANTISSA) - F32_BIAS +
                   (1 << (l->exponent - 1)) - 1; /* as the shorter type has it */
    uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
    unsigned shift = F32_MANTISSA - l->mantissa;

    if (magnitude > F32_INFINITY) /* NaN, made quiet */
        return l->infinity ? sign | top | 1u << (l->mantissa - 1) |
                                 (magnitude & 0x7fffff) >> shift
                           : sign | limit;
    if (magnitude < 0x800000) { /* F32's own subnormals */
        r = l->exponent == 8 ? round_shift(magnitude, shift) : 0;
    } else if (exponent <= 0) { /* subnormal there; too small for any: 0 */
        shift += (unsigned)(1 - exponent);
        r = shift <= 25 ? round_shift(significand, shift) : 0;
    } else { /* rounding up may carry into the exponent, as it should */
        r = round_shift(significand, shift) + ((uint32_t)(exponent - 1) << l->mantissa);
    }
    return sign | MIN(r, limit);
}

static uint32_t widen(uint32_t v, const struct layout *l)
{
    uint32_t sign = v >> (l->exponent + l->mantissa) << 31;
    uint32_t magnitude = v & ((1u << (l->exponent + l->mantissa)) - 1);
    uint32_t exponent = magnitude >> l->mantissa;
    uint32_t mantissa = magnitude & ((1u << l->mantissa) - 1);
    uint32_t top = (1u << l->exponent) - 1;
    unsigned shift = F32_MANTISSA - l->mantissa;
    int bias = (1 << (l->exponent - 1)) - 1, e = (int)exponent;

    if (l->infinity && exponent == top)
        return sign | F32_INFINITY | mantissa << shift;
    if (!l->infinity && magnitude == ((1u << (l->exponent + l->mantissa)) - 1))
        return sign | F32_INFINITY | 0x400000;
    if (exponent == 0) {
        if (mantissa == 0 || l->exponent == 8) /* F32 has the same subnormals */
            return sign | mantissa << shift;
        for (e = 1; !(mantissa >> l->mantissa); e--)
            mantissa <<= 1;
        mantissa &= (1u << l->mantissa) - 1;
    }
    return sign | (uint32_t)(e + F32_BIAS - bias) << F32_MANTISSA | mantissa << shift;
}

/*
 * F64 as F32 rounded to odd: towards zero, and the last bit set where anything was lost.
 * Rounding that to a type of 22 bits less mantissa gives what rounding once would.
 */
static uint32_t to_odd(uint64_t u)
{
    uint32_t sign = (uint32_t)(u >> 63) << 31;
    uint64_t magnitude = u & INT64_MAX;
    uint64_t significand = (magnitude & ((1ull << 52) - 1)) | 1ull << 52;
    int exponent = (int)(magnitude >> 52) - 1023 + F32_BIAS;
    unsigned shift = 29;
    bool lost;

    if (magnitude >= 0x7ffull << 52) { /* infinity and NaN; no NaN becomes infinity */
        uint32_t rest = (uint32_t)(significand >> shift) & 0x7fffff;

        return sign | F32_INFINITY | (magnitude > 0x7ffull << 52 ? rest | 0x400000 : 0);
    }
    if (exponent >= 255)
        return sign | (F32_INFINITY - 1); /* odd, and above what is finite elsewhere */
    if (exponent <= 0) {
        shift += (unsigned)(1 - exponent);
        if (shift > 60 || magnitude >> 52 == 0)
            return sign | (magnitude != 0);
        exponent = 0;
    }
    lost = (significand & ((1ull << shift) - 1)) != 0;
    significand = significand >> shift & 0x7fffff;
    return sign | (uint32_t)exponent << F32_MANTISSA | (uint32_t)significand | lost;
}

/* ---- rows of elements, through F32 ---- */

static uint32_t load(const unsigned char *p, unsigned unit)
{
    uint16_t two;

    if (unit == 1)
        return *p;
    memcpy(&two, p, sizeof two);
    return two;
}

static void store(unsigned char *p, unsigned unit, uint32_t v)
{
    uint16_t two = (uint16_t)v;

    if (unit == 1)
        *p = (unsigned char)v;
    else
        memcpy(p, &two, sizeof two);
}

/* Towards F32; `odd`: what comes of F64 will be rounded once more. */
static void rows_to_f32(enum dtype from, bool odd, const unsigned char *src,
                        uint32_t *out, size_t n)
{
    struct layout l;

    if (from == DTYPE_F32) {
        memcpy(out, src, n * sizeof *out);
    } else if (from == DTYPE_BF16) {
        for (size_t i = 0; i < n; i++)
            out[i] = load(src + 2 * i, 2) << 16;
    } else if (layout_of(from, &l)) {
        unsigned unit = dtype_unit(from);

        for (size_t i = 0; i < n; i++)
            out[i] = widen(load(src + unit * i, unit), &l);
    } else {
        for (size_t i = 0; i < n; i++) {
            uint64_t u;
            double d;
            float f;

            memcpy(&u, src + 8 * i, sizeof u);
            memcpy(&d, src + 8 * i, sizeof d);
            f = (float)d; /* IEEE: to nearest, ties to even */
            memcpy(&out[i], &f, sizeof f);
            if (odd)
                out[i] = to_odd(u);
        }
    }
}

static void rows_from_f32(enum dtype to, const uint32_t *in, unsigned char *dst,
                          size_t n)
{
    struct layout l;

    if (to == DTYPE_F32) {
        memcpy(dst, in, n * sizeof *in);
    } else if (to == DTYPE_BF16) {
        for (size_t i = 0; i < n; i++) {
            uint32_t u = in[i];
            bool nan = (u & F32_MAGNITUDE) > F32_INFINITY;

            store(dst + 2 * i, 2,
                  nan ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
        }
    } else if (layout_of(to, &l)) {
        unsigned unit = dtype_unit(to);

        for (size_t i = 0; i < n; i++)
            store(dst + unit * i, unit, narrow(in[i], &l));
    } else {
        for (size_t i = 0; i < n; i++) {
            float f;
            double d;

            memcpy(&f, &in[i], sizeof f);
            d = (double)f;
            memcpy(dst + 8 * i, &d, sizeof d);
        }
    }
}

void cast_elements(enum dtype from, enum dtype to, const void *src, void *dst, size_t n)
{
    uint32_t block[BLOCK];
    const unsigned char *in = src;
    unsigned char *out = dst;

    assert(cast_possible(from, to));
    if (from == to) {
        memcpy(dst, src, n * dtype_unit(from));
        return;
    }
    while (n > 0) {
        size_t part = MIN(n, (size_t)BLOCK);

        rows_to_f32(from, to != DTYPE_F32, in, block, part);
        rows_from_f32(to, block, out, part);
        in += part * dtype_unit(from);
        out += part * dtype_unit(to);
        n -= part;
    }
}
