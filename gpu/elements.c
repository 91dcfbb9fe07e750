/* SPDX-License-Identifier: MIT */
/* gpu/elements.c - every element type as doubles, in loops that compilers turn to vectors. */
#include "gpu/elements.h"

#include "base/endian.h"
#include "gpu/vectors.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { BLOCK = 1024 }; /* elements that go through F32 at a time */

/* ---- floats of a byte and less ---- */

enum special {
    IEEE,    /* the largest exponent is infinity and NaN */
    FN,      /* only the largest pattern is NaN; no infinity (OCP's E4M3) */
    FNUZ,    /* only the pattern of -0 is NaN; no infinity */
    NUMBERS, /* all are numbers (OCP's E2M1) */
};

struct small_float {
    int exponent, mantissa, bias;
    enum special special;
};

static bool small_float_of(enum dtype d, struct small_float *out)
{
    switch ((int)d) {
    case DTYPE_F8_E4M3:
        *out = (struct small_float){4, 3, 7, FN};
        return true;
    case DTYPE_F8_E5M2:
        *out = (struct small_float){5, 2, 15, IEEE};
        return true;
    case DTYPE_F8_E4M3FNUZ:
        *out = (struct small_float){4, 3, 8, FNUZ};
        return true;
    case DTYPE_F8_E5M2FNUZ:
        *out = (struct small_float){5, 2, 16, FNUZ};
        return true;
    case DTYPE_F4:
        *out = (struct small_float){2, 1, 1, NUMBERS};
        return true;
    default:
        return false;
    }
}

static double small_value(const struct small_float *f, unsigned v)
{
    unsigned sign_bit = 1u << (f->exponent + f->mantissa);
    unsigned magnitude = v & (sign_bit - 1);
    int top = (1 << f->exponent) - 1, exponent = (int)(magnitude >> f->mantissa);
    int mantissa = (int)(magnitude & ((1u << f->mantissa) - 1));
    double sign = v & sign_bit ? -1.0 : 1.0;

    if (f->special == IEEE && exponent == top)
        return mantissa ? NAN : sign * INFINITY;
    if ((f->special == FN && magnitude == sign_bit - 1) ||
        (f->special == FNUZ && v == sign_bit))
        return NAN;
    if (exponent == 0)
        return sign * ldexp(mantissa, 1 - f->bias - f->mantissa);
    return sign *
           ldexp(mantissa + (1 << f->mantissa), exponent - f->bias - f->mantissa);
}

static double byte_value(enum dtype d, unsigned v)
{
    struct small_float f;

    if (small_float_of(d, &f))
        return small_value(&f, v);
    switch ((int)d) {
    case DTYPE_BOOL:
        return v != 0;
    case DTYPE_I8:
        return (int8_t)v;
    case DTYPE_F8_E8M0: /* a power of two, for scales */
        return v == 0xff ? NAN : ldexp(1, (int)v - 127);
    default:
        return v;
    }
}

bool element_decoder_init(struct element_decoder *d, enum dtype dtype)
{
    bool packed = dtype == DTYPE_F4;

    *d = (struct element_decoder){.dtype = dtype, .unit = dtype_unit(dtype)};
    if (dtype == DTYPE_NONE || dtype >= DTYPE_COUNT || dtype == DTYPE_F6_E2M3 ||
        dtype == DTYPE_F6_E3M2)
        return false;
    d->numbers = dtype_is_complex(dtype) || packed ? 2 : 1;
    for (unsigned v = 0; d->unit == 1 && v < (packed ? 16 : 256); v++)
        d->table[v] = (float)byte_value(dtype, v);
    return true;
}

/* ---- rows ---- */

/* p[i] as TYPE, whatever the address. */
#define DECODE_ROW(NAME, TYPE, OUT)                                                    \
    static void NAME(const unsigned char *p, size_t n, OUT *out)                       \
    {                                                                                  \
        for (size_t i = 0; i < n; i++) {                                               \
            TYPE v;                                                                    \
                                                                                       \
            memcpy(&v, p + i * sizeof v, sizeof v);                                    \
            out[i] = (OUT)v;                                                           \
        }                                                                              \
    }

DECODE_ROW(decode_f64, double, double)
DECODE_ROW(decode_f32, float, double)
DECODE_ROW(decode_u32, uint32_t, double)
DECODE_ROW(decode_i32, int32_t, double)
DECODE_ROW(decode_u64, uint64_t, double)
DECODE_ROW(decode_i64, int64_t, double)
DECODE_ROW(single_u16, uint16_t, float)
DECODE_ROW(single_i16, int16_t, float)

VECTORS static void single_bf16(const unsigned char *p, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t v;
        uint32_t u;

        memcpy(&v, p + 2 * i, sizeof v);
        u = (uint32_t)v << 16;
        memcpy(&out[i], &u, sizeof u);
    }
}

/*
 * The bits moved to where F32 has them are the value times 2^-112, subnormal or not, so
 * that one exact multiplication gives it; the largest exponent has to stay the largest.
 */
VECTORS static void single_f16(const unsigned char *p, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t v;
        uint32_t u, top;
        float f;

        memcpy(&v, p + 2 * i, sizeof v);
        u = (uint32_t)(v & 0x7fff) << 13;
        top = u >= 0x7c00u << 13 ? 0x7f800000u : 0;
        memcpy(&f, &u, sizeof f);
        f *= 0x1p112f;
        memcpy(&u, &f, sizeof u);
        u |= top | (uint32_t)(v & 0x8000) << 16;
        memcpy(&out[i], &u, sizeof u);
    }
}

static void single_bytes(const struct element_decoder *d, const unsigned char *p,
                         size_t n, float *out)
{
    for (size_t i = 0; d->numbers == 1 && i < n; i++)
        out[i] = d->table[p[i]];
    for (size_t i = 0; d->numbers == 2 && i < n; i++) {
        out[2 * i] = d->table[p[i] & 15];
        out[2 * i + 1] = d->table[p[i] >> 4];
    }
}

bool element_is_single(const struct element_decoder *d)
{
    switch ((int)d->dtype) {
    case DTYPE_F32:
    case DTYPE_C64:
    case DTYPE_F16:
    case DTYPE_C32:
    case DTYPE_BF16:
    case DTYPE_U16:
    case DTYPE_I16:
        return true;
    default:
        return d->unit == 1;
    }
}

void element_decode_single(const struct element_decoder *d, const void *src,
                           size_t units, float *out)
{
    switch ((int)d->dtype) {
    case DTYPE_F32:
    case DTYPE_C64:
        memcpy(out, src, units * d->numbers * sizeof *out);
        return;
    case DTYPE_F16:
    case DTYPE_C32:
        return single_f16(src, units * d->numbers, out);
    case DTYPE_BF16:
        return single_bf16(src, units, out);
    case DTYPE_U16:
        return single_u16(src, units, out);
    case DTYPE_I16:
        return single_i16(src, units, out);
    default:
        single_bytes(d, src, units, out);
    }
}

/* By way of F32, which holds them all. */
static void decode_short(const struct element_decoder *d, const unsigned char *p,
                         size_t units, double *out)
{
    float block[BLOCK];

    while (units > 0) {
        size_t part = MIN(units, (size_t)BLOCK / d->numbers);
        size_t n = part * d->numbers;

        element_decode_single(d, p, part, block);
        for (size_t i = 0; i < n; i++)
            out[i] = (double)block[i];
        out += n;
        p += part * d->unit;
        units -= part;
    }
}

void element_decode(const struct element_decoder *d, const void *src, size_t units,
                    double *out)
{
    switch ((int)d->dtype) {
    case DTYPE_F64:
    case DTYPE_C128:
        return decode_f64(src, units * d->numbers, out);
    case DTYPE_F32:
    case DTYPE_C64:
        return decode_f32(src, units * d->numbers, out);
    case DTYPE_U32:
        return decode_u32(src, units, out);
    case DTYPE_I32:
        return decode_i32(src, units, out);
    case DTYPE_U64:
        return decode_u64(src, units, out);
    case DTYPE_I64:
        return decode_i64(src, units, out);
    default:
        decode_short(d, src, units, out);
    }
}

/* ---- single ones ---- */

bool dtype_is_integer(enum dtype d)
{
    return d >= DTYPE_BOOL && d <= DTYPE_I64;
}

__int128 element_integer(enum dtype d, const void *src)
{
    const unsigned char *p = src;

    switch ((int)d) {
    case DTYPE_BOOL:
        return *p != 0;
    case DTYPE_I8:
        return (int8_t)*p;
    case DTYPE_U16:
        return get_le16(p);
    case DTYPE_I16:
        return (int16_t)get_le16(p);
    case DTYPE_U32:
        return get_le32(p);
    case DTYPE_I32:
        return (int32_t)get_le32(p);
    case DTYPE_U64:
        return get_le64(p);
    case DTYPE_I64:
        return (int64_t)get_le64(p);
    default:
        return *p;
    }
}

/* The fewest digits that give the value back: few of a short type's, 17 of a double's. */
static void number_text(double v, bool single, char dst[40])
{
    for (int digits = 1; digits <= 17; digits++) {
        double back;

        snprintf(dst, 40, "%.*g", digits, v);
        back = strtod(dst, NULL);
        if (back == v || isnan(v) || (single && (float)back == (float)v))
            return;
    }
}

const char *element_text(enum dtype d, const void *src, unsigned k, char dst[96])
{
    struct element_decoder dec;
    bool single = d != DTYPE_F64 && d != DTYPE_C128;
    char one[40], two[40];
    double v[2];

    if (dtype_is_integer(d) || !element_decoder_init(&dec, d)) {
        __int128 i = element_integer(d, src);

        if (i < 0)
            snprintf(dst, 96, "%" PRId64, (int64_t)i);
        else
            snprintf(dst, 96, "%" PRIu64, (uint64_t)i);
        return dst;
    }
    element_decode(&dec, src, 1, v);
    number_text(v[dtype_is_complex(d) ? 0 : k], single, one);
    if (!dtype_is_complex(d)) {
        snprintf(dst, 96, "%s", one);
        return dst;
    }
    number_text(v[1], single, two);
    snprintf(dst, 96, "%s%s%sj", one, *two == '-' || *two == '+' ? "" : "+", two);
    return dst;
}
