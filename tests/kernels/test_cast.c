/* SPDX-License-Identifier: MIT */
/* tests/kernels/test_cast.c - casts are held against arithmetic on the values themselves. */
#include "gpu/cast.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* A short type, as its standard describes it. */
struct kind {
    enum dtype dtype;
    int exponent, mantissa;
    bool infinity;
    double largest;
};

static const struct kind kinds[] = {
    {DTYPE_F16, 5, 10, true, 65504.0},
    {DTYPE_BF16, 8, 7, true, 0x1.fep127},
    {DTYPE_F8_E4M3, 4, 3, false, 448.0},
    {DTYPE_F8_E5M2, 5, 2, true, 57344.0},
};

static uint32_t patterns(const struct kind *k)
{
    return 1u << (1 + k->exponent + k->mantissa);
}

/* What a pattern means, from the definition. */
static double value_of(const struct kind *k, uint32_t v)
{
    int bias = (1 << (k->exponent - 1)) - 1, top = (1 << k->exponent) - 1;
    int exponent = (int)(v >> k->mantissa) & top;
    int mantissa = (int)(v & ((1u << k->mantissa) - 1));
    double sign = v & (patterns(k) >> 1) ? -1 : 1;

    if (k->infinity && exponent == top)
        return mantissa ? NAN : sign * INFINITY;
    if (!k->infinity && exponent == top && mantissa == (1 << k->mantissa) - 1)
        return NAN;
    if (exponent == 0)
        return sign * ldexp(mantissa, 1 - bias - k->mantissa);
    return sign * ldexp(mantissa + (1 << k->mantissa), exponent - bias - k->mantissa);
}

static uint32_t pattern_of(enum dtype from, const void *element, enum dtype to)
{
    unsigned char bytes[8] = {0};
    uint32_t v = 0;

    cast_elements(from, to, element, bytes, 1);
    memcpy(&v, bytes, dtype_unit(to));
    return v;
}

static double to_double(const struct kind *k, uint32_t v)
{
    double d;

    cast_elements(k->dtype, DTYPE_F64, &v, &d, 1);
    return d;
}

/* Every pattern widens to its value, and comes back. */
static void test_all_patterns(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        const struct kind *k = &kinds[i];

        for (uint32_t v = 0; v < patterns(k); v++) {
            double want = value_of(k, v), got = to_double(k, v);
            float f;

            cast_elements(k->dtype, DTYPE_F32, &v, &f, 1);
            if (isnan(want)) {
                assert_true(isnan(got) && isnan(f));
                assert_true(isnan(value_of(k, pattern_of(DTYPE_F64, &got, k->dtype))));
                assert_int_equal(!signbit(got), !(v & patterns(k) >> 1));
                continue;
            }
            if (got != want || (double)f != want || signbit(got) != signbit(want))
                fail_msg("%s %#x: %g, want %g", dtype_name(k->dtype), v, got, want);
            assert_int_equal(v, pattern_of(DTYPE_F64, &got, k->dtype));
            assert_int_equal(v, pattern_of(DTYPE_F32, &f, k->dtype));
        }
    }
}

static void expect(const struct kind *k, double d, uint32_t want)
{
    uint32_t got = pattern_of(DTYPE_F64, &d, k->dtype);
    float f = (float)d;

    if (got != want)
        fail_msg("%a to %s: %#x, want %#x", d, dtype_name(k->dtype), got, want);
    if ((double)f == d)
        assert_int_equal(want, pattern_of(DTYPE_F32, &f, k->dtype));
}

/* Between two neighbours: the nearer one, and half way the even one. F64 rounds once. */
static void test_rounding(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        const struct kind *k = &kinds[i];

        for (uint32_t v = 0; value_of(k, v) < k->largest; v++) {
            double low = value_of(k, v), high = value_of(k, v + 1);
            double half = low + (high - low) / 2;
            uint32_t sign = patterns(k) >> 1;

            expect(k, half, v % 2 ? v + 1 : v);
            expect(k, nextafter(half, INFINITY), v + 1);
            expect(k, nextafter(half, 0), v);
            expect(k, -half, sign | (v % 2 ? v + 1 : v));
            expect(k, -nextafter(half, 0), sign | v);
            expect(k, (double)nextafterf((float)half, INFINITY), v + 1);
        }
    }
}

/* Above the largest: half a step on is what it takes to become infinity (or NaN). */
static void test_overflow(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        const struct kind *k = &kinds[i];
        uint32_t top = 0;
        double step;

        while (value_of(k, top) < k->largest)
            top++;
        step = k->largest - value_of(k, top - 1);
        expect(k, nextafter(k->largest + step / 2, 0), top);
        expect(k, k->largest + step, top + 1);
        expect(k, 1e300, top + 1);
        expect(k, INFINITY, top + 1);
        expect(k, -INFINITY, (patterns(k) >> 1) | (top + 1));
        assert_true(k->infinity ? isinf(value_of(k, top + 1))
                                : isnan(value_of(k, top + 1)));
    }
}

static void test_doubles(void **state)
{
    static const double d[] = {1.5, -0.0, 0x1p-149, 0x1.8p-149, 0x1.000001p0, 1e300};
    float f[ARRAY_SIZE(d)];
    double back[ARRAY_SIZE(d)];

    (void)state;
    cast_elements(DTYPE_F64, DTYPE_F32, d, f, ARRAY_SIZE(d));
    cast_elements(DTYPE_F32, DTYPE_F64, f, back, ARRAY_SIZE(d));
    assert_true(f[0] == 1.5f && signbit(f[1]) && f[2] == 0x1p-149f);
    assert_true(f[3] == 0x1p-148f); /* a tie: to even */
    assert_true(f[4] == 1.0f && isinf(f[5]));
    for (size_t i = 0; i < ARRAY_SIZE(d); i++)
        assert_true(back[i] == (double)f[i]);
}

/* Longer than a block, at odd addresses, element by element. */
static void test_many(void **state)
{
    enum { N = 5000 };
    static unsigned char in[2 * N + 1], out[4 * N + 3];

    (void)state;
    for (size_t i = 0; i < N; i++) {
        uint16_t v = (uint16_t)(i * 7);

        memcpy(in + 1 + 2 * i, &v, 2);
    }
    cast_elements(DTYPE_F16, DTYPE_F32, in + 1, out + 3, N);
    for (size_t i = 0; i < N; i++) {
        float f;

        memcpy(&f, out + 3 + 4 * i, 4);
        if (!isnan(f))
            assert_true((double)f == value_of(&kinds[0], (uint16_t)(i * 7)));
    }
}

/* ---- rows are what cast_one() makes of each element, the statements of a device ---- */

static const enum dtype all_types[] = {DTYPE_F64,  DTYPE_F32,     DTYPE_F16,
                                       DTYPE_BF16, DTYPE_F8_E4M3, DTYPE_F8_E5M2};

/* Casts the n elements at `in` to every type, in rows, and holds each against its own. */
static void expect_rows(enum dtype from, const unsigned char *in, size_t n,
                        const struct cast_scale *scale)
{
    unsigned unit = dtype_unit(from);
    unsigned char *out = malloc(n * 8);

    assert_non_null(out);
    for (size_t t = 0; t < ARRAY_SIZE(all_types); t++) {
        enum dtype to = all_types[t];

        cast_scaled_elements(from, to, in, out, n, scale, 0);
        for (size_t i = 0; i < n; i++) {
            uint64_t v = 0, got = 0, want, count;
            float factor = scale ? cast_scale_at(scale, i, &count) : 1;

            memcpy(&v, in + i * unit, unit);
            memcpy(&got, out + i * dtype_unit(to), dtype_unit(to));
            want = cast_one(v, cast_kind_of(from), cast_kind_of(to), scale != NULL,
                            factor);
            if (got != want)
                fail_msg("%s %#" PRIx64 " to %s%s: %#" PRIx64 ", want %#" PRIx64,
                         dtype_name(from), v, dtype_name(to), scale ? ", scaled" : "",
                         got, want);
        }
    }
    free(out);
}

/* Every 8- and 16-bit float, and those of 32 and 64 bits at and beside each way to round. */
static void test_rows(void **state)
{
    static const uint32_t tails[] = {0,      1,      0x0fff, 0x1000, 0x1001,
                                     0x7fff, 0x8000, 0x8001, 0xffff};
    static const float factors[] = {1.0f, 0.37f, -3e-5f, 0x1p-130f, INFINITY, 0, NAN};
    const struct cast_scale scale = {
        .value = (uintptr_t)factors,
        .terms = 1,
        .term = {{.stride = 3, .dim = 7, .origin = 0, .block = 1, .step = 1}}};
    const size_t n = 65536 * ARRAY_SIZE(tails);
    uint64_t *wide = malloc(n * sizeof *wide);
    uint32_t *single = malloc(n * sizeof *single);
    uint16_t *half = malloc(65536 * sizeof *half);
    unsigned char byte[256];

    (void)state;
    assert_true(wide && single && half);
    for (uint32_t v = 0; v < 65536; v++) {
        half[v] = (uint16_t)v;
        byte[v % 256] = (unsigned char)v;
        for (size_t k = 0; k < ARRAY_SIZE(tails); k++) {
            single[v * ARRAY_SIZE(tails) + k] = v << 16 | tails[k];
            wide[v * ARRAY_SIZE(tails) + k] =
                (uint64_t)v << 48 | (uint64_t)(tails[k] * 0x1111u) << 13 | (k & 1);
        }
    }
    for (int scaled = 0; scaled < 2; scaled++) {
        const struct cast_scale *s = scaled ? &scale : NULL;

        expect_rows(DTYPE_F8_E4M3, byte, 256, s);
        expect_rows(DTYPE_F8_E5M2, byte, 256, s);
        expect_rows(DTYPE_F16, (const unsigned char *)half, 65536, s);
        expect_rows(DTYPE_BF16, (const unsigned char *)half, 65536, s);
        expect_rows(DTYPE_F32, (const unsigned char *)single, n, s);
        expect_rows(DTYPE_F64, (const unsigned char *)wide, n, s);
    }
    free(wide);
    free(single);
    free(half);
}

/* The processor rounds F64 to F32 and widens F32 as we do. */
static void test_against_processor(void **state)
{
    uint64_t u = 88172645463325252u;

    (void)state;
    for (unsigned i = 0; i < 2000000; i++) {
        uint32_t got, want;
        uint64_t back, wide;
        double d;
        float f;

        u ^= u << 13;
        u ^= u >> 7;
        u ^= u << 17;
        /* Half of them in the range of F32, its subnormals and just beyond. */
        wide = i % 2 ? u : (u & ~(0x7ffull << 52)) | (860 + u % 320) << 52;
        memcpy(&d, &wide, sizeof d);
        f = (float)d;
        memcpy(&want, &f, sizeof want);
        got = cast_f64_to_f32(wide);
        if (got != want)
            fail_msg("%a: %#x, want %#x", d, got, want);
        d = (double)f;
        memcpy(&back, &d, sizeof back);
        if (cast_f32_to_f64(got) != back)
            fail_msg("%a as F64: %#" PRIx64, (double)f, cast_f32_to_f64(got));
    }
}

/* NaN stays NaN with its sign, however little of it would be left. */
static void test_nan(void **state)
{
    static const uint64_t payloads[] = {1,          1ull << 28, 1ull << 29,
                                        1ull << 45, 1ull << 51, (1ull << 52) - 1};

    (void)state;
    for (size_t i = 0; i < 2 * ARRAY_SIZE(payloads); i++) {
        uint64_t sign = i % 2, wide = sign << 63 | 0x7ffull << 52 | payloads[i / 2];
        uint32_t high = (uint32_t)(payloads[i / 2] >> 29);
        uint32_t single = (uint32_t)sign << 31 | CAST_F32_INFINITY | (high ? high : 1);

        for (size_t k = 0; k < ARRAY_SIZE(kinds); k++) {
            uint32_t from_wide = pattern_of(DTYPE_F64, &wide, kinds[k].dtype);
            uint32_t from_single = pattern_of(DTYPE_F32, &single, kinds[k].dtype);

            if (!isnan(value_of(&kinds[k], from_wide)) ||
                !isnan(value_of(&kinds[k], from_single)))
                fail_msg("NaN %#" PRIx64 " or %#x to %s: %#x, %#x", wide, single,
                         dtype_name(kinds[k].dtype), from_wide, from_single);
            assert_int_equal(from_wide > patterns(&kinds[k]) >> 1, sign);
            assert_int_equal(from_single > patterns(&kinds[k]) >> 1, sign);
        }
        assert_int_equal(cast_f64_to_f32(wide) >> 31, sign);
        assert_true(isnan(cast_bits_float(cast_f64_to_f32(wide))));
    }
}

static void test_possible(void **state)
{
    (void)state;
    assert_true(cast_possible(DTYPE_F64, DTYPE_F8_E4M3));
    assert_true(cast_possible(DTYPE_BF16, DTYPE_BF16));
    assert_false(cast_possible(DTYPE_I32, DTYPE_F32));
    assert_false(cast_possible(DTYPE_F32, DTYPE_C64));
    assert_false(cast_possible(DTYPE_F8_E8M0, DTYPE_F32));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_patterns), cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_overflow),     cmocka_unit_test(test_doubles),
        cmocka_unit_test(test_many),         cmocka_unit_test(test_possible),
        cmocka_unit_test(test_rows),         cmocka_unit_test(test_against_processor),
        cmocka_unit_test(test_nan),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
