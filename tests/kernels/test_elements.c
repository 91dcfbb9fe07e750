/* SPDX-License-Identifier: MIT */
/* tests/kernels/test_elements.c - elements as numbers, what they add up to, how they differ. */
#include "gpu/element_counts.h"
#include "gpu/element_diff.h"
#include "gpu/element_stats.h"

#include "gpu/cast.h"
#include "gpu/nonfinite.h"
#include "gpu/stats_rows.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N = 100003 };

/* The numbers that numpy 2.4 and torch 2.15 were given for the constants below. */
static double sequence(uint64_t i)
{
    return (double)(i * 2654435761u & 0xffffffffu) / 4294967296.0 - 0.5;
}

static void *sequence_of(enum dtype d)
{
    double *v = malloc(N * sizeof *v);
    void *out = malloc(N * sizeof *v);

    assert_true(v && out);
    for (size_t i = 0; i < N; i++)
        v[i] = sequence(i);
    if (d == DTYPE_F64) {
        free(out);
        return v;
    }
    if (d == DTYPE_BF16) { /* numpy has none: torch makes it of F32 */
        cast_elements(DTYPE_F64, DTYPE_F32, v, out, N);
        cast_elements(DTYPE_F32, d, out, v, N);
        free(out);
        return v;
    }
    cast_elements(DTYPE_F64, d, v, out, N);
    free(v);
    return out;
}

static bool near(double got, double want, double relative)
{
    return fabs(got - want) <= relative * fabs(want);
}

/* Sums over all patterns, as torch gives them. */
static void test_byte_patterns(void **state)
{
    static const struct {
        enum dtype dtype;
        int nan, inf;
        double most, least, positive, squares;
    } want[] = {
        {DTYPE_F8_E4M3, 2, 0, 448, 0.001953125, 5407.875, 2542933.331604004},
        {DTYPE_F8_E5M2, 6, 2, 57344, 1.52587890625e-05, 360447.9997558594,
         22548578304.0},
        {DTYPE_F8_E4M3FNUZ, 1, 0, 240, 0.0009765625, 2943.9375, 750933.332901001},
        {DTYPE_F8_E5M2FNUZ, 1, 0, 57344, 7.62939453125e-06, 360447.9998779297,
         22548578304.0},
        {DTYPE_F8_E8M0, 1, 0, 0x1p127, 0x1p-127, 3.402823669209385e+38,
         3.8597363079105396e+76},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(want); i++) {
        double most = 0, least = INFINITY, positive = 0, squares = 0, v[256];
        int nan = 0, inf = 0;
        unsigned char pattern[256];
        struct element_decoder d;

        for (int k = 0; k < 256; k++)
            pattern[k] = (unsigned char)k;
        assert_true(element_decoder_init(&d, want[i].dtype));
        element_decode(&d, pattern, 256, v);
        for (int k = 0; k < 256; k++) {
            nan += isnan(v[k]) != 0;
            inf += isinf(v[k]) != 0;
            if (!isfinite(v[k]))
                continue;
            most = MAX(most, v[k]);
            if (v[k] != 0)
                least = MIN(least, fabs(v[k]));
            positive += v[k] > 0 ? v[k] : 0;
            squares += v[k] * v[k];
        }
        assert_int_equal(nan, want[i].nan);
        assert_int_equal(inf, want[i].inf);
        assert_true(most == want[i].most);
        assert_true(least == want[i].least);
        assert_true(near(positive, want[i].positive, 1e-15));
        assert_true(near(squares, want[i].squares, 1e-14));
    }
}

/* The casts, which have a test of their own, say the same of every pattern. */
static void test_short_floats(void **state)
{
    static const enum dtype types[] = {DTYPE_F16, DTYPE_BF16};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
        struct element_decoder d;

        assert_true(element_decoder_init(&d, types[i]));
        for (uint32_t v = 0; v < 65536; v++) {
            uint16_t pattern = (uint16_t)v;
            double want, got;

            cast_elements(types[i], DTYPE_F64, &pattern, &want, 1);
            element_decode(&d, &pattern, 1, &got);
            if (isnan(want) ? !isnan(got)
                            : got != want || signbit(got) != signbit(want))
                fail_msg("%s %#x: %g, want %g", dtype_name(types[i]), v, got, want);
        }
    }
}

static void expect_numbers(enum dtype t, const void *src, unsigned n, double a,
                           double b)
{
    struct element_decoder d;
    double v[2] = {0};

    assert_true(element_decoder_init(&d, t));
    assert_int_equal(d.numbers, n);
    element_decode(&d, src, 1, v);
    if (v[0] != a || v[1] != b)
        fail_msg("%s: %g %g, want %g %g", dtype_name(t), v[0], v[1], a, b);
}

static void test_other_types(void **state)
{
    struct element_decoder d;

    (void)state;
    expect_numbers(DTYPE_BOOL, "\x02", 1, 1, 0);
    expect_numbers(DTYPE_I8, "\xfe", 1, -2, 0);
    expect_numbers(DTYPE_U8, "\xfe", 1, 254, 0);
    expect_numbers(DTYPE_I16, "\xfe\xff", 1, -2, 0);
    expect_numbers(DTYPE_U16, "\xfe\xff", 1, 65534, 0);
    expect_numbers(DTYPE_I32, "\xfe\xff\xff\xff", 1, -2, 0);
    expect_numbers(DTYPE_U32, "\xfe\xff\xff\xff", 1, 4294967294.0, 0);
    expect_numbers(DTYPE_I64, "\xfe\xff\xff\xff\xff\xff\xff\xff", 1, -2, 0);
    expect_numbers(DTYPE_U64, "\0\0\0\0\0\0\0\x80", 1, 0x1p63, 0);
    expect_numbers(DTYPE_C64, "\0\0\x80\x3f\0\0\0\xc0", 2, 1, -2);
    expect_numbers(DTYPE_C32, "\x00\x3c\x00\xc0", 2, 1, -2);
    expect_numbers(DTYPE_F4, "\x97", 2, 6, -0.5); /* low nibble first */
    assert_false(element_decoder_init(&d, DTYPE_F6_E2M3));
    assert_false(element_decoder_init(&d, DTYPE_NONE));
    assert_true(element_integer(DTYPE_I64, "\xff\xff\xff\xff\xff\xff\xff\xff") == -1);
}

static void test_text(void **state)
{
    static const float tenth = 0.1f;
    static const double third = 1.0 / 3;
    char text[96];

    (void)state;
    assert_string_equal(element_text(DTYPE_F32, &tenth, 0, text), "0.1");
    assert_string_equal(element_text(DTYPE_F64, &third, 0, text), "0.3333333333333333");
    assert_string_equal(element_text(DTYPE_C64, "\0\0\x80\x3f\0\0\0\xc0", 0, text),
                        "1-2j");
    assert_string_equal(element_text(DTYPE_F4, "\x97", 1, text), "-0.5");
    assert_string_equal(
        element_text(DTYPE_U64, "\xff\xff\xff\xff\xff\xff\xff\xff", 0, text),
        "18446744073709551615");
    assert_string_equal(element_text(DTYPE_BF16, "\xc0\x7f", 0, text), "nan");
}

/* By patterns what decoding finds one by one, whatever the length. */
static void test_count_nonfinite(void **state)
{
    static unsigned char data[300000];
    uint64_t seed = 3;

    (void)state;
    for (size_t i = 0; i < sizeof data; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        data[i] = (seed >> 33) % 3 ? (unsigned char)(seed >> 56) : 0xff;
    }
    for (int t = DTYPE_NONE + 1; t < DTYPE_COUNT; t++) {
        struct nonfinite got = {0}, want = {0};
        struct element_decoder d;
        size_t units;

        if (!element_decoder_init(&d, (enum dtype)t) || t == DTYPE_F4)
            continue;
        units = sizeof data / d.unit - 7;
        for (size_t i = 0; i < units; i++) {
            double v[2];

            element_decode(&d, data + i * d.unit, 1, v);
            for (unsigned k = 0; k < d.numbers; k++) {
                want.nan += isnan(v[k]) != 0;
                want.inf += isinf(v[k]) != 0;
            }
        }
        nonfinite_count((enum dtype)t, data, units * d.unit, &got);
        if (got.nan != want.nan || got.inf != want.inf)
            fail_msg("%s: %lu NaN, %lu Inf, want %lu, %lu", dtype_name((enum dtype)t),
                     got.nan, got.inf, want.nan, want.inf);
    }
}

/* ---- stats ---- */

static void add_all(struct element_stats *s, enum dtype t, const void *data, size_t n)
{
    struct element_decoder d;

    assert_true(element_decoder_init(&d, t));
    element_stats_init(s);
    element_stats_add(s, &d, data, n);
}

/* numpy: x.astype(float64).min(), max(), mean(), std(). */
static void test_stats(void **state)
{
    static const struct {
        enum dtype dtype;
        double min, max, mean, std;
    } want[] = {
        {DTYPE_F64, -0.5, 0.49999731150455773, -2.9180017086543957e-06,
         0.2886767231093848},
        {DTYPE_F32, -0.5, 0.4999973177909851, -2.9180103021756473e-06,
         0.28867672311643827},
        {DTYPE_F16, -0.5, 0.5, -2.915072011722095e-06, 0.28867673866346333},
        {DTYPE_BF16, -0.5, 0.5, -2.944818605438785e-06, 0.28867737554670114},
    };
    struct element_stats s;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(want); i++) {
        void *data = sequence_of(want[i].dtype);

        add_all(&s, want[i].dtype, data, N);
        assert_int_equal(s.numbers, N);
        assert_int_equal(s.zero + s.nan + s.inf, 0);
        assert_true(s.min == want[i].min && s.max == want[i].max);
        /* the mean is 1e-5 of the numbers: that many digits go in the sum, theirs too */
        assert_true(near(s.mean, want[i].mean, 1e-9));
        assert_true(near(element_stats_std(&s), want[i].std, 1e-14));
        free(data);
    }
}

/* A mean a thousand million times the deviation: 0.28867672310517280884 in 80 bits. */
/* Vectors meet them in another order than a loop does. */
static void test_ends_that_are_zero(void **state)
{
    static const float low[] = {5, 5, -0.0f, 5, 0}, high[] = {-5, -5, -0.0f, -5, 0};
    struct element_stats s;

    (void)state;
    add_all(&s, DTYPE_F32, low, ARRAY_SIZE(low));
    assert_true(s.min == 0 && !signbit(s.min) && s.zero == 2);
    add_all(&s, DTYPE_F32, high, ARRAY_SIZE(high));
    assert_true(s.max == 0 && !signbit(s.max) && s.zero == 2);
}

static void test_large_mean(void **state)
{
    double *v = sequence_of(DTYPE_F64);
    struct element_stats s;

    (void)state;
    for (size_t i = 0; i < N; i++)
        v[i] += 1e9;
    add_all(&s, DTYPE_F64, v, N);
    assert_true(near(s.mean, 999999999.999997082, 1e-15));
    assert_true(near(element_stats_std(&s), 0.28867672310517280884, 1e-9));
    free(v);
}

/* numpy.histogram(x, bins=arange(-0.5, 0.5 + 1/16, 1/16)). */
static void test_histogram(void **state)
{
    static const uint64_t want[] = {6251, 6250, 6251, 6250, 6249, 6251, 6250, 6249,
                                    6250, 6252, 6249, 6251, 6251, 6249, 6249, 6251};
    float *v = sequence_of(DTYPE_F32);
    struct stats_histogram h;
    struct element_stats s;

    (void)state;
    add_all(&s, DTYPE_F32, v, N);
    element_stats_histogram(&s, &h);
    assert_int_equal(h.n, ARRAY_SIZE(want));
    assert_true(h.from == -0.5 && h.width == 0.0625);
    assert_memory_equal(h.count, want, sizeof want);
    free(v);
}

/* However large the numbers grow, each is counted once, at its place. */
static void test_histogram_grows(void **state)
{
    static const double v[] = {-0x1p-1074, 0, 0x1p-300, 1, 1.5, 0x1p1023, -0x1.8p1023};
    struct element_decoder d;
    struct element_stats s;
    struct stats_histogram h;
    uint64_t all = 0;

    (void)state;
    assert_true(element_decoder_init(&d, DTYPE_F64));
    element_stats_init(&s);
    for (size_t i = 0; i < ARRAY_SIZE(v); i++) {
        element_stats_add(&s, &d, &v[i], 1);
        all = 0;
        element_stats_histogram(&s, &h);
        for (unsigned k = 0; k < h.n; k++)
            all += h.count[k];
        assert_int_equal(all, i + 1);
        assert_true(h.from <= s.min && h.from + h.n * h.width > s.max);
    }
    assert_int_equal(s.zero, 1);
    add_all(&s, DTYPE_F64, v, 0);
    element_stats_histogram(&s, &h);
    assert_int_equal(h.n, 0);
    assert_true(element_stats_std(&s) == 0);
}

static void test_nonfinite(void **state)
{
    const float v[] = {NAN, 1, INFINITY, 3, -INFINITY, -NAN, 0, -0.0f};
    struct element_stats s;

    (void)state;
    add_all(&s, DTYPE_F32, v, ARRAY_SIZE(v));
    assert_int_equal(s.nan, 2);
    assert_int_equal(s.inf, 2);
    assert_int_equal(s.zero, 2);
    assert_int_equal(element_stats_finite(&s), 4);
    assert_true(s.min == 0 && s.max == 3 && s.mean == 1);
    assert_true(near(element_stats_std(&s), sqrt(1.5), 1e-15));
}

/* Windows put together give the counts of the whole, and its moments. */
static void test_merge(void **state)
{
    float *v = sequence_of(DTYPE_F32);
    struct element_stats whole, sum, part;
    struct element_decoder d;

    (void)state;
    v[70000] = 1e6f; /* the grid of the later parts is a coarser one */
    add_all(&whole, DTYPE_F32, v, N);
    element_stats_init(&sum);
    assert_true(element_decoder_init(&d, DTYPE_F32));
    for (size_t at = 0; at < N; at += 9001) {
        element_stats_init(&part);
        element_stats_add(&part, &d, v + at, MIN((size_t)9001, N - at));
        element_stats_merge(&sum, &part);
    }
    assert_int_equal(sum.numbers, whole.numbers);
    assert_true(sum.min == whole.min && sum.max == whole.max);
    assert_int_equal(sum.exponent, whole.exponent);
    assert_int_equal(sum.first, whole.first);
    assert_int_equal(sum.bins, whole.bins);
    assert_memory_equal(sum.bin, whole.bin, sizeof sum.bin);
    assert_true(near(sum.mean, whole.mean, 1e-13));
    assert_true(near(sum.squares, whole.squares, 1e-13));
    free(v);
}

/* Numbers of every kind that a row may meet: all exponents, both zeros, the smallest. */
static double odd_number(uint64_t *seed, int kind)
{
    static const int reach[] = {0, 8, 120, 1000};
    double v;

    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    v = (double)(int64_t)(*seed >> 11) / 0x1p52 - 1;
    if (*seed % 17 == 0)
        return *seed % 2 ? 0.0 : -0.0;
    if (*seed % 19 == 0 && kind > 1)
        return *seed % 2 ? 0x1p-149 : -0x1p-149;
    return ldexp(v, (int)(*seed >> 33) % (reach[kind] + 1) - reach[kind] / 2);
}

/* As stats_rows.h describes the order of sums: their bits must not depend on a processor. */
static double sum_in_lanes(const double *v, size_t n, double mean, int power)
{
    double lane[STATS_LANES] = {0}, sum = 0;

    for (size_t i = 0; i < n; i++)
        lane[i % STATS_LANES] += power == 1 ? v[i] : (v[i] - mean) * (v[i] - mean);
    for (int k = 0; k < STATS_LANES; k++)
        sum += lane[k];
    return sum;
}

static void check_ends(const struct row_ends *got, const double *v, size_t n)
{
    struct row_ends want = {v[0], v[0], sum_in_lanes(v, n, 0, 1), 0};

    for (size_t i = 0; i < n; i++) {
        want.min = fmin(want.min, v[i]);
        want.max = fmax(want.max, v[i]);
        want.zero += v[i] == 0;
    }
    assert_true(got->min == want.min && got->max == want.max && got->zero == want.zero);
    assert_memory_equal(&got->sum, &want.sum, sizeof want.sum);
}

static void check_bins(const double *v, size_t n, int exponent, const uint8_t *bin,
                       uint64_t *count)
{
    stats_count(bin, n, 16, count);
    for (size_t i = 0; i < n; i++) {
        if (!(ldexp(bin[i] - 8, exponent) <= v[i] &&
              v[i] < ldexp(bin[i] - 7, exponent)))
            fail_msg("%a is in bin %d of 2^%d", v[i], bin[i] - 8, exponent);
        count[bin[i]]--;
    }
    for (int k = 0; k < STATS_BINS_MAX; k++)
        assert_int_equal(count[k], 0);
}

static void check_rows(const double *v, const float *f, size_t n)
{
    uint64_t count[STATS_BINS_MAX] = {0};
    struct row_grid grid = {.first = -8};
    uint8_t bin[STATS_BLOCK];
    struct row_ends ends;
    double squares, want;
    int scale;

    if (f)
        stats_ends_f32(f, n, &ends);
    else
        stats_ends_f64(v, n, &ends);
    check_ends(&ends, v, n);
    frexp(fmax(fabs(ends.min), fabs(ends.max)), &scale);
    grid.exponent = f ? MIN(MAX(scale - 3, -126), 126) : scale - 3;
    squares = f ? stats_bins_f32(f, n, ends.sum / (double)n, &grid, bin)
                : stats_bins_f64(v, n, ends.sum / (double)n, &grid, bin);
    want = sum_in_lanes(v, n, ends.sum / (double)n, 2);
    assert_memory_equal(&squares, &want, sizeof want);
    check_bins(v, n, grid.exponent, bin, count);
}

static void test_rows(void **state)
{
    static double v[STATS_BLOCK], wide[STATS_BLOCK];
    static float f[STATS_BLOCK];
    uint64_t seed = 7;

    (void)state;
    for (int turn = 0; turn < 400; turn++) {
        size_t n = turn < 100 ? (size_t)turn + 1 : STATS_BLOCK - (size_t)turn % 40;

        for (size_t i = 0; i < n; i++) {
            v[i] = odd_number(&seed, turn % 4);
            f[i] = (float)odd_number(&seed, turn % 3);
            wide[i] = (double)f[i];
        }
        check_rows(v, NULL, n);
        check_rows(wide, f, n);
    }
}

/* Both ways add up to the same, whatever was in the table before. */
static void compare_counted(struct element_counts *counts, enum dtype t,
                            const unsigned char *data, size_t units)
{
    struct element_stats want, got;
    struct element_decoder d;

    assert_true(element_decoder_init(&d, t));
    assert_true(element_is_counted(&d));
    element_stats_init(&want);
    element_stats_init(&got);
    element_stats_add(&want, &d, data, units);
    element_counts_add(counts, &d, data, units / 3);
    element_counts_add(counts, &d, data + units / 3 * d.unit, units - units / 3);
    element_counts_take(counts, &d, &got);
    if (got.numbers != want.numbers || got.nan != want.nan || got.inf != want.inf ||
        got.zero != want.zero || got.min != want.min || got.max != want.max ||
        got.exponent != want.exponent || got.first != want.first ||
        got.bins != want.bins)
        fail_msg("%s, %zu units: %lu numbers, %lu NaN, %g to %g; want %lu, %lu, %g, %g",
                 dtype_name(t), units, got.numbers, got.nan, got.min, got.max,
                 want.numbers, want.nan, want.min, want.max);
    assert_memory_equal(got.bin, want.bin, sizeof got.bin);
    /* the sum of what cancels out is as exact as its largest numbers are */
    assert_true(fabs(got.mean - want.mean) <=
                1e-13 * MAX(fabs(want.min), fabs(want.max)));
    assert_true(near(got.squares, want.squares, 1e-11));
}

static void test_counts(void **state)
{
    static unsigned char data[4 * 70003 + 1];
    struct element_counts *counts = element_counts_new();
    unsigned tested = 0;
    uint64_t seed = 3;

    (void)state;
    assert_non_null(counts);
    for (size_t i = 0; i < sizeof data; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        data[i] = (unsigned char)(seed >> 56);
    }
    memset(data + 20000, 0, 20000); /* the same number again and again */
    for (int t = DTYPE_NONE + 1; t < DTYPE_COUNT; t++) {
        struct element_decoder d;

        if (!element_decoder_init(&d, (enum dtype)t) || !element_is_counted(&d))
            continue;
        for (size_t units = 0; units < 40; units++)
            compare_counted(counts, (enum dtype)t, data + units % 2, units);
        compare_counted(counts, (enum dtype)t, data + 1, 70003);
        tested++;
    }
    assert_int_equal(tested, 14);
    element_counts_free(counts);
}

/* A tiny number below zero is in the bin below zero, however wide the bins are. */
static void test_histogram_below_zero(void **state)
{
    const float v[] = {-0x1p-149f, 0, 0x1p-149f, 0x1p40f, -0x1p40f, 0x1p-126f};
    struct stats_histogram h;
    struct element_stats s;
    uint64_t below = 0, above = 0;

    (void)state;
    add_all(&s, DTYPE_F32, v, ARRAY_SIZE(v));
    element_stats_histogram(&s, &h);
    for (unsigned i = 0; i < h.n; i++)
        *(h.from + i * h.width < 0 ? &below : &above) += h.count[i];
    assert_int_equal(below, 2);
    assert_int_equal(above, 4);
}

static void test_wide_integers(void **state)
{
    static const int64_t v[] = {INT64_MIN + 1, -1, INT64_MAX - 1};
    static const uint64_t u[] = {UINT64_MAX - 1, 9007199254740993u};
    struct element_stats s;
    char text[40];

    (void)state;
    add_all(&s, DTYPE_I64, v, ARRAY_SIZE(v));
    assert_string_equal(element_stats_end(&s, DTYPE_I64, false, text),
                        "-9223372036854775807");
    assert_string_equal(element_stats_end(&s, DTYPE_I64, true, text),
                        "9223372036854775806");
    add_all(&s, DTYPE_U64, u, ARRAY_SIZE(u));
    assert_string_equal(element_stats_end(&s, DTYPE_U64, false, text),
                        "9007199254740993");
    assert_string_equal(element_stats_end(&s, DTYPE_U64, true, text),
                        "18446744073709551614");
}

/* ---- diff ---- */

static struct element_diff compare(const struct element_rule *rule, enum dtype ta,
                                   const void *a, enum dtype tb, const void *b,
                                   size_t n)
{
    struct element_pair p;
    struct element_diff d, part;
    const char *pa = a, *pb = b;

    assert_true(element_pair_init(&p, rule, ta, tb));
    element_diff_init(&d);
    for (size_t at = 0; at < n; at += 3001) { /* as windows do it */
        element_diff_init(&part);
        element_diff_add(&part, &p, pa + at * p.a.unit, pb + at * p.b.unit, at,
                         MIN((size_t)3001, n - at));
        element_diff_merge(&d, &part);
    }
    assert_int_equal(d.elements, n * (ta == DTYPE_F4 ? 2 : 1));
    return d;
}

static const struct element_rule bits = {0}, values = {.values = true};

/* Two elements changed: numpy's abs(a - b).max() and (abs(a - b) / abs(b)).max(). */
static void test_diff(void **state)
{
    float *a = sequence_of(DTYPE_F32), *b = sequence_of(DTYPE_F32);
    struct element_diff d = compare(&bits, DTYPE_F32, a, DTYPE_F32, b, N);
    float first;

    (void)state;
    assert_int_equal(d.differing + d.outside, 0);
    assert_true(d.first == UINT64_MAX && d.max_abs == 0 && d.max_rel == 0);
    b[12345] += 0.25f;
    b[99999] = -b[99999];
    d = compare(&bits, DTYPE_F32, a, DTYPE_F32, b, N);
    assert_int_equal(d.differing, 2);
    assert_int_equal(d.outside, 2);
    assert_int_equal(d.first, 12345);
    assert_true(d.max_abs == 0.5612863302230835 && d.max_rel == 2.0);
    memcpy(&first, d.first_b, sizeof first);
    assert_true(first == b[12345]);
    free(a);
    free(b);
}

/* F32 against its own BF16; numpy.isclose(a, b, rtol=0.003, atol=0). */
static void test_diff_of_types(void **state)
{
    const struct element_rule close = {
        .values = true, .tolerance = true, .rtol = 0.003};
    float *a = sequence_of(DTYPE_F32);
    uint16_t *b = malloc(N * sizeof *b);
    struct element_diff d;

    (void)state;
    assert_non_null(b);
    cast_elements(DTYPE_F32, DTYPE_BF16, a, b, N);
    d = compare(&close, DTYPE_F32, a, DTYPE_BF16, b, N);
    assert_int_equal(d.differing, 100001);
    assert_int_equal(d.outside, 3500);
    assert_int_equal(d.first, 36);
    assert_true(d.max_abs == 0.0009765625 && d.max_rel == 0.00390625);
    d = compare(&values, DTYPE_F32, a, DTYPE_BF16, b, N);
    assert_int_equal(d.outside, 100001);
    assert_int_equal(d.first, 1);
    free(a);
    free(b);
}

/* What has the same value in other bits, and what is no number. */
static void test_diff_of_special_values(void **state)
{
    const struct element_rule loose = {.tolerance = true, .atol = 1e300, .rtol = 1};
    const float a[] = {0.0f, NAN, INFINITY, INFINITY, 1, NAN, -INFINITY};
    const float b[] = {-0.0f, -NAN, INFINITY, -INFINITY, NAN, 1, 2};
    struct element_diff d;

    (void)state;
    d = compare(&bits, DTYPE_F32, a, DTYPE_F32, b, ARRAY_SIZE(a));
    assert_int_equal(d.outside, 6);
    assert_int_equal(d.nonfinite, 4);
    assert_int_equal(d.first, 0);
    assert_true(d.max_abs == 0);
    d = compare(&values, DTYPE_F32, a, DTYPE_F32, b, ARRAY_SIZE(a));
    assert_int_equal(d.outside, 4);
    assert_int_equal(d.first, 3);
    d = compare(&loose, DTYPE_F32, a, DTYPE_F32, b, ARRAY_SIZE(a));
    assert_int_equal(d.differing, 6);
    assert_int_equal(d.outside, 4);
}

static void test_diff_of_integers(void **state)
{
    static const int64_t a[] = {9007199254740993, INT64_MIN, 5};
    static const int64_t b[] = {9007199254740992, INT64_MAX, 5};
    static const int32_t narrow[] = {7, -1, 5};
    struct element_diff d;

    (void)state;
    d = compare(&bits, DTYPE_I64, a, DTYPE_I64, b, 1);
    assert_int_equal(d.outside, 1); /* as doubles they are equal */
    assert_true(d.max_abs == 1);
    d = compare(&bits, DTYPE_I64, a, DTYPE_I64, b, 3);
    assert_int_equal(d.outside, 2);
    assert_true(d.max_abs == 0x1p64);
    d = compare(&values, DTYPE_I64, a, DTYPE_I32, narrow, 3);
    assert_int_equal(d.outside, 2);
}

static void test_diff_of_odd_types(void **state)
{
    static const float a[] = {3, 4, 0, 0}, b[] = {0, 0, 0, 1};
    struct element_pair p;
    struct element_diff d;

    (void)state;
    d = compare(&bits, DTYPE_C64, a, DTYPE_C64, b, 2); /* 3+4j, 0 against 0, 1j */
    assert_int_equal(d.outside, 2);
    assert_true(d.max_abs == 5 && d.max_rel == 1);
    d = compare(&bits, DTYPE_F4, "\x12\x34", DTYPE_F4, "\x12\x54", 2);
    assert_int_equal(d.outside, 1);
    assert_int_equal(d.first, 3);
    assert_true(d.max_abs == 1.5); /* 1.5 and 3 */
    d = compare(&bits, DTYPE_F6_E2M3, "\x12\x34\x56", DTYPE_F6_E2M3, "\x12\x35\x56", 3);
    assert_int_equal(d.outside, 1);
    assert_int_equal(d.first, 1);
    assert_false(element_pair_init(&p, &values, DTYPE_C64, DTYPE_F32));
    assert_false(element_pair_init(&p, &values, DTYPE_F4, DTYPE_F32));
    assert_false(element_pair_init(&p, &values, DTYPE_F6_E2M3, DTYPE_F32));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_byte_patterns),
        cmocka_unit_test(test_short_floats),
        cmocka_unit_test(test_other_types),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_stats),
        cmocka_unit_test(test_ends_that_are_zero),
        cmocka_unit_test(test_large_mean),
        cmocka_unit_test(test_histogram),
        cmocka_unit_test(test_histogram_grows),
        cmocka_unit_test(test_nonfinite),
        cmocka_unit_test(test_merge),
        cmocka_unit_test(test_count_nonfinite),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_histogram_below_zero),
        cmocka_unit_test(test_wide_integers),
        cmocka_unit_test(test_diff),
        cmocka_unit_test(test_diff_of_types),
        cmocka_unit_test(test_diff_of_special_values),
        cmocka_unit_test(test_diff_of_integers),
        cmocka_unit_test(test_diff_of_odd_types),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
