/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_fill.c - the value of chunks that are not stored, bit by bit. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/endian.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/zarr/zarr_priv.h"

/* ---- integers ---- */

/* Digits with a sign, and ".0" behind: exactly what is meant. */
static bool parse_integer(const struct zarr_slice *s, bool *negative,
                          uint64_t *magnitude)
{
    size_t i = 0, digits = 0;

    *magnitude = 0;
    *negative = s->len > 0 && s->text[0] == '-';
    for (i = *negative; i < s->len && isdigit((unsigned char)s->text[i]); i++, digits++)
        if (__builtin_mul_overflow(*magnitude, 10, magnitude) ||
            __builtin_add_overflow(*magnitude, (uint64_t)(s->text[i] - '0'), magnitude))
            return false;
    if (i < s->len && s->text[i] == '.')
        for (i++; i < s->len && s->text[i] == '0'; i++)
            continue;
    return digits > 0 && i == s->len;
}

static bool is_signed(enum dtype d)
{
    return d == DTYPE_I8 || d == DTYPE_I16 || d == DTYPE_I32 || d == DTYPE_I64;
}

static bool take_integer(enum dtype d, const struct zarr_slice *s, unsigned char *out)
{
    unsigned bits = dtype_bits(d) - is_signed(d);
    uint64_t limit = bits == 64 ? UINT64_MAX : (1ull << bits) - 1, value;
    bool negative;

    if (!parse_integer(s, &negative, &value))
        return false;
    if (negative && value > (is_signed(d) ? limit + 1 : 0))
        return false;
    if (!negative && value > limit)
        return false;
    put_le64(out, negative ? -value : value);
    return true;
}

static bool take_bool(const struct json *v, const struct zarr_slice *s,
                      unsigned char *out)
{
    bool value, negative;
    uint64_t number;

    if (json_bool(v, &value)) {
        out[0] = value;
        return true;
    }
    /* numpy code of version 2 also left 0 and 1 there */
    if (json_kind(v) != JSON_NUMBER || !parse_integer(s, &negative, &number) ||
        negative || number > 1)
        return false;
    out[0] = (unsigned char)number;
    return true;
}

/* ---- floats ---- */

struct float_kind {
    unsigned exponent, mantissa; /* bits */
    int bias;
    uint64_t nan, infinity; /* infinity 0: there is none */
    uint64_t largest;       /* finite one */
    bool no_minus_zero;
};

static const struct float_kind kind_f16 = {5, 10, 15, 0x7e00, 0x7c00, 0x7bff, false};
static const struct float_kind kind_e5m2 = {5, 2, 15, 0x7e, 0x7c, 0x7b, false};
static const struct float_kind kind_e4m3 = {4, 3, 7, 0x7f, 0, 0x7e, false};
static const struct float_kind kind_e5m2fnuz = {5, 2, 16, 0x80, 0, 0x7f, true};
static const struct float_kind kind_e4m3fnuz = {4, 3, 8, 0x80, 0, 0x7f, true};

/* Bits of a finite number without sign, rounded to nearest even. */
static uint64_t round_finite(const struct float_kind *k, double v)
{
    int exponent;
    double scaled;

    frexp(v, &exponent); /* v = f * 2^exponent, f in [0.5, 1) */
    exponent = MAX(exponent - 1, 1 - k->bias);
    /* In units of the last place; what rounds up carries into the exponent. */
    scaled = nearbyint(ldexp(v, (int)k->mantissa - exponent));
    if (scaled > (double)(2ull << k->mantissa))
        return UINT64_MAX;
    if (exponent == 1 - k->bias)
        return (uint64_t)scaled;
    return (uint64_t)scaled + ((uint64_t)(exponent + k->bias - 1) << k->mantissa);
}

static uint64_t small_float(const struct float_kind *k, double v)
{
    uint64_t sign = (uint64_t)(signbit(v) != 0) << (k->exponent + k->mantissa), bits;

    if (isnan(v))
        return k->nan;
    if (isinf(v))
        return k->infinity ? k->infinity | sign
                           : k->nan | (k->no_minus_zero ? 0 : sign);
    v = fabs(v);
    bits = v == 0 ? 0 : v > 1e6 ? UINT64_MAX : round_finite(k, v);
    if (bits > k->largest)
        bits = k->infinity ? k->infinity : k->nan;
    if (k->no_minus_zero && (bits == 0 || bits == k->nan))
        return bits;
    return bits | sign;
}

/* As ml_dtypes and tensorstore make it: through a float. */
static uint16_t bfloat16(double v)
{
    float f = (float)v;
    uint32_t bits;

    memcpy(&bits, &f, sizeof bits);
    if (isnan(v))
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void put_float32(double v, unsigned char *out)
{
    float f = (float)v;
    uint32_t bits = 0x7fc00000;

    if (!isnan(v))
        memcpy(&bits, &f, sizeof bits);
    put_le32(out, bits);
}

static void put_float64(double v, unsigned char *out)
{
    uint64_t bits = 0x7ff8000000000000;

    if (!isnan(v))
        memcpy(&bits, &v, sizeof bits);
    put_le64(out, bits);
}

static void put_float(enum dtype d, double v, unsigned char *out)
{
    if (d == DTYPE_F64 || d == DTYPE_C128)
        put_float64(v, out);
    else if (d == DTYPE_F32 || d == DTYPE_C64)
        put_float32(v, out);
    else if (d == DTYPE_BF16)
        put_le16(out, bfloat16(v));
    else if (d == DTYPE_F16)
        put_le16(out, (uint16_t)small_float(&kind_f16, v));
    else if (d == DTYPE_F8_E4M3)
        out[0] = (unsigned char)small_float(&kind_e4m3, v);
    else if (d == DTYPE_F8_E5M2)
        out[0] = (unsigned char)small_float(&kind_e5m2, v);
    else if (d == DTYPE_F8_E4M3FNUZ)
        out[0] = (unsigned char)small_float(&kind_e4m3fnuz, v);
    else if (d == DTYPE_F8_E5M2FNUZ)
        out[0] = (unsigned char)small_float(&kind_e5m2fnuz, v);
}

/* "0x7fc00001": the bits themselves, as version 3 writes NaNs of other kinds. */
static bool take_hex(const char *text, unsigned component, unsigned char *out)
{
    static const char digits[] = "0123456789abcdef";
    uint64_t bits = 0;

    if (strncmp(text, "0x", 2) != 0 || strlen(text + 2) != 2 * (size_t)component)
        return false;
    for (text += 2; *text; text++) {
        const char *at = strchr(digits, tolower((unsigned char)*text));

        if (!at)
            return false;
        bits = bits << 4 | (uint64_t)(at - digits);
    }
    for (unsigned i = 0; i < component; i++)
        out[i] = (unsigned char)(bits >> 8 * i);
    return true;
}

static bool take_float(const struct zarr_array *a, const struct json *v,
                       unsigned char *out)
{
    const char *text;
    int64_t whole;
    double value;

    if (json_double(v, &value)) {
        /* "-0" is an integer to zarr-python and tensorstore: 0. "-0.0" is not. */
        put_float(a->dtype, json_i64(v, &whole) ? (double)whole : value, out);
        return true;
    }
    if (!json_string(v, &text))
        return false;
    if (strcmp(text, "NaN") == 0)
        value = (double)NAN;
    else if (strcmp(text, "Infinity") == 0)
        value = (double)INFINITY;
    else if (strcmp(text, "-Infinity") == 0)
        value = (double)-INFINITY;
    else
        return a->format == 3 && take_hex(text, dtype_component(a->dtype), out);
    put_float(a->dtype, value, out);
    return true;
}

static bool take_complex(const struct zarr_array *a, const struct json *v,
                         unsigned char *out)
{
    if (json_kind(v) != JSON_ARRAY || json_count(v) != 2)
        return false;
    v = json_first(v);
    return take_float(a, v, out) &&
           take_float(a, json_next(v), out + dtype_component(a->dtype));
}

/* ---- raw bytes of void types ---- */

static int base64_digit(char c)
{
    static const char digits[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *at = c ? strchr(digits, c) : NULL;

    return at ? (int)(at - digits) : -1;
}

/* Two bytes: three digits and "=". */
static bool take_void(const struct json *v, unsigned char *out)
{
    const char *text;
    int d[3];

    if (!json_string(v, &text) || strlen(text) != 4 || text[3] != '=')
        return false;
    for (int i = 0; i < 3; i++) {
        d[i] = base64_digit(text[i]);
        if (d[i] < 0)
            return false;
    }
    out[0] = (unsigned char)(d[0] << 2 | d[1] >> 4);
    out[1] = (unsigned char)(d[1] << 4 | d[2] >> 2);
    return true;
}

/* ---- which of them ---- */

static bool is_integer(enum dtype d)
{
    return is_signed(d) || d == DTYPE_U8 || d == DTYPE_U16 || d == DTYPE_U32 ||
           d == DTYPE_U64;
}

/*
 * Of types that have no arithmetic here: zero, which is a byte of zeros in all that have
 * one, or version 3's bits. Another one nobody knows: what is not stored is a hole.
 */
static bool take_byte(const struct zarr_array *a, const struct json *v,
                      unsigned char *out)
{
    const char *text;
    double value;

    if (json_double(v, &value))
        return a->numpy_dtype && value == 0 && !signbit(value);
    return a->format == 3 && json_string(v, &text) && take_hex(text, 1, out);
}

void zarr_take_fill(struct zarr_array *a, const struct json *v, const char *text,
                    size_t len, bool base64)
{
    struct zarr_slice digits = {0};
    bool ok;

    memset(a->fill, 0, sizeof a->fill);
    if (a->numpy_dtype || a->dtype == DTYPE_F8_E8M0) {
        a->has_fill = take_byte(a, v, a->fill);
        return;
    }
    if (base64)
        ok = take_void(v, a->fill) || take_float(a, v, a->fill);
    else if (dtype_is_complex(a->dtype))
        ok = take_complex(a, v, a->fill);
    else if (!is_integer(a->dtype) && a->dtype != DTYPE_BOOL)
        ok = take_float(a, v, a->fill);
    else if (!zarr_member(text, len, "fill_value", &digits))
        ok = false;
    else if (a->dtype == DTYPE_BOOL)
        ok = take_bool(v, &digits, a->fill);
    else
        ok = json_kind(v) == JSON_NUMBER && take_integer(a->dtype, &digits, a->fill);
    if (!ok)
        zarr_refuse(a, "its fill_value is no %s", dtype_name(a->dtype));
    a->has_fill = ok;
}
