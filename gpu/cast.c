/* SPDX-License-Identifier: MIT */
/* gpu/cast.c - rows of floating-point elements cast on the CPU, by vectors and tables. */
#include "gpu/cast.h"

#include <assert.h>
#include <string.h>

#include "gpu/vectors.h"

enum {
    BLOCK = 1024, /* elements that go through a table of F32 at a time */
};

enum cast_kind cast_kind_of(enum dtype d)
{
    static const uint8_t kind[DTYPE_COUNT] = {
        [DTYPE_F64] = CAST_F64,         [DTYPE_F32] = CAST_F32,
        [DTYPE_F16] = CAST_F16,         [DTYPE_BF16] = CAST_BF16,
        [DTYPE_F8_E4M3] = CAST_F8_E4M3, [DTYPE_F8_E5M2] = CAST_F8_E5M2,
    };

    return d < DTYPE_COUNT ? kind[d] : CAST_NONE;
}

bool cast_possible(enum dtype from, enum dtype to)
{
    return cast_kind_of(from) != CAST_NONE && cast_kind_of(to) != CAST_NONE;
}

/* What one call works with. */
struct caster {
    enum cast_kind from, to;
    bool scaled;
    const struct cast_scale *scale;
    uint32_t table[256]; /* of 8-bit floats: their F32 */
};

static void caster_init(struct caster *c)
{
    if (c->from != CAST_F8_E4M3 && c->from != CAST_F8_E5M2)
        return;
    for (uint32_t v = 0; v < 256; v++)
        c->table[v] = cast_to_f32(v, c->from);
}

/* ---- to F32 ---- */

/* All of it is arithmetic on normal numbers: free of what a process does to others. */
static inline uint32_t f16_to_f32(uint16_t v)
{
    const uint32_t least = 113u << CAST_F32_MANTISSA; /* 2^-14, the least normal F16 */
    uint32_t a = (v & 0x7fffu) << 13, normal = a + (112u << CAST_F32_MANTISSA);
    uint32_t small =
        cast_float_bits(cast_bits_float(a + least) - cast_bits_float(least));
    uint32_t r = a < 0x00800000u ? small : normal;

    r = a >= 0x0f800000u ? a | CAST_F32_INFINITY : r;
    return (uint32_t)(v & 0x8000u) << 16 | r;
}

VECTORS static void f64_rows(bool odd, const unsigned char *src, uint32_t *out,
                             size_t n)
{
    uint64_t u;

    for (size_t i = 0; i < n; i++) {
        memcpy(&u, src + 8 * i, sizeof u);
        out[i] = odd ? cast_f64_to_odd(u) : cast_f64_to_f32(u);
    }
}

/* `odd`: what comes of F64 will be rounded once more. */
VECTORS static void rows_to_f32(const struct caster *c, const unsigned char *src,
                                uint32_t *out, size_t n)
{
    bool odd = c->to != CAST_F32 && c->to != CAST_F64 && !c->scaled;
    uint16_t v;

    switch (c->from) {
    case CAST_F64:
        f64_rows(odd, src, out, n);
        break;
    case CAST_F32:
        memcpy(out, src, n * sizeof *out);
        break;
    case CAST_F16:
        for (size_t i = 0; i < n; i++) {
            memcpy(&v, src + 2 * i, sizeof v);
            out[i] = f16_to_f32(v);
        }
        break;
    case CAST_BF16:
        for (size_t i = 0; i < n; i++) {
            memcpy(&v, src + 2 * i, sizeof v);
            out[i] = (uint32_t)v << 16;
        }
        break;
    case CAST_F8_E4M3:
    case CAST_F8_E5M2:
        for (size_t i = 0; i < n; i++)
            out[i] = c->table[src[i]];
        break;
    case CAST_NONE:
    case CAST_KINDS:
        break;
    }
}

/* Multiplies a block of elements, which begins at number `at` of the result. */
VECTORS static void scale_rows(const struct cast_scale *s, uint64_t at, uint32_t *v,
                               size_t n)
{
    while (n > 0) {
        uint64_t count;
        float factor = cast_scale_at(s, at, &count);
        size_t part = (size_t)MIN(count, (uint64_t)n);

        for (size_t i = 0; i < part; i++)
            v[i] = cast_scaled(v[i], factor);
        v += part;
        at += part;
        n -= part;
    }
}

/* ---- from F32 ---- */

/*
 * cast_narrow() without a branch. Subnormals of the shorter type: adding the number whose
 * last bit is worth as much as theirs rounds to it, to nearest, ties to even.
 */
static inline uint32_t narrow_flat(uint32_t u, struct cast_layout l)
{
    const unsigned shift = CAST_F32_MANTISSA - l.mantissa;
    const int bias = (1 << (l.exponent - 1)) - 1;
    const uint32_t rebias = (uint32_t)(CAST_F32_BIAS - bias) << CAST_F32_MANTISSA;
    const uint32_t least = rebias + (1u << CAST_F32_MANTISSA);
    const uint32_t magic = rebias + ((shift + 1) << CAST_F32_MANTISSA);
    const uint32_t top = ((1u << l.exponent) - 1) << l.mantissa;
    const uint32_t limit = l.infinity ? top : (1u << (l.exponent + l.mantissa)) - 1;
    uint32_t sign = u >> 31 << (l.exponent + l.mantissa), a = u & CAST_F32_MAGNITUDE;
    uint32_t normal =
        (a - rebias + (1u << (shift - 1)) - 1 + (a >> shift & 1)) >> shift;
    uint32_t small =
        cast_float_bits(cast_bits_float(a) + cast_bits_float(magic)) - magic;
    uint32_t nan =
        l.infinity ? top | 1u << (l.mantissa - 1) | (a & 0x7fffffu) >> shift : limit;
    uint32_t r = a < least ? small : normal;

    r = r < limit ? r : limit;
    r = a > CAST_F32_INFINITY ? nan : r;
    return sign | r;
}

/* `layout` is a constant wherever this is called. */
static inline __attribute__((always_inline)) void
bytes_from_f32(struct cast_layout layout, const uint32_t *in, unsigned char *dst,
               size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = (unsigned char)narrow_flat(in[i], layout);
}

VECTORS static void rows_from_f32(const struct caster *c, const uint32_t *in,
                                  unsigned char *dst, size_t n)
{
    const struct cast_layout f16 = {5, 10, true};
    uint16_t v;
    uint64_t wide;

    switch (c->to) {
    case CAST_F64:
        for (size_t i = 0; i < n; i++) {
            wide = cast_f32_to_f64(in[i]);
            memcpy(dst + 8 * i, &wide, sizeof wide);
        }
        break;
    case CAST_F32:
        memcpy(dst, in, n * sizeof *in);
        break;
    case CAST_F16:
        for (size_t i = 0; i < n; i++) {
            v = (uint16_t)narrow_flat(in[i], f16);
            memcpy(dst + 2 * i, &v, sizeof v);
        }
        break;
    case CAST_BF16:
        for (size_t i = 0; i < n; i++) {
            v = (uint16_t)cast_bf16_of(in[i]);
            memcpy(dst + 2 * i, &v, sizeof v);
        }
        break;
    case CAST_F8_E4M3:
        bytes_from_f32((struct cast_layout){4, 3, false}, in, dst, n);
        break;
    case CAST_F8_E5M2:
        bytes_from_f32((struct cast_layout){5, 2, true}, in, dst, n);
        break;
    case CAST_NONE:
    case CAST_KINDS:
        break;
    }
}

void cast_scaled_elements(enum dtype from, enum dtype to, const void *src, void *dst,
                          size_t n, const struct cast_scale *scale, uint64_t at)
{
    struct caster c = {.from = cast_kind_of(from),
                       .to = cast_kind_of(to),
                       .scaled = scale != NULL,
                       .scale = scale};
    uint32_t block[BLOCK];
    const unsigned char *in = src;
    unsigned char *out = dst;

    assert(cast_possible(from, to));
    if (from == to && !scale) {
        memcpy(dst, src, n * dtype_unit(from));
        return;
    }
    caster_init(&c);
    while (n > 0) {
        size_t part = MIN(n, (size_t)BLOCK);

        rows_to_f32(&c, in, block, part);
        if (scale)
            scale_rows(scale, at, block, part);
        rows_from_f32(&c, block, out, part);
        in += part * dtype_unit(from);
        out += part * dtype_unit(to);
        at += part;
        n -= part;
    }
}

void cast_elements(enum dtype from, enum dtype to, const void *src, void *dst, size_t n)
{
    cast_scaled_elements(from, to, src, dst, n, NULL, 0);
}
