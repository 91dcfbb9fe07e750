/* SPDX-License-Identifier: MIT */
/* gpu/element_stats.c - minimum, maximum, mean, deviation, counts and a histogram at once. */
#include "gpu/element_stats.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "gpu/stats_rows.h"

enum {
    GRID_BITS = 11,     /* no bin is narrower than 2^-11 of the largest number */
    LEAST_SCALE = -900, /* so that a bin's width and its inverse are normal doubles */
    F32_EXPONENT = 126, /* the same of floats, either way */
};

void element_stats_init(struct element_stats *s)
{
    memset(s, 0, sizeof *s);
    s->min = INFINITY;
    s->max = -INFINITY;
    s->low = UINT64_MAX;
}

uint64_t element_stats_finite(const struct element_stats *s)
{
    return s->numbers - s->nan - s->inf;
}

/* ---- the grid ---- */

/* The bin of a finite x whose size is at most 2^GRID_BITS bins. */
static int bin_of(double x, int exponent)
{
    int i = (int)floor(ldexp(x, -exponent));

    return i == 0 && x < 0 ? -1 : i; /* too small for the quotient */
}

/* Of the least width for all of [min, max]. */
static int grid_exponent(double min, double max)
{
    int scale, exponent;

    frexp(MAX(fabs(min), fabs(max)), &scale); /* both < 2^scale */
    if ((min == 0 && max == 0) || scale < LEAST_SCALE)
        scale = LEAST_SCALE;
    exponent = scale - GRID_BITS;
    while (bin_of(max, exponent) - bin_of(min, exponent) >= STATS_BINS_MAX)
        exponent++;
    return exponent;
}

static int floor_half(int i, unsigned by)
{
    return by > 30 ? (i < 0 ? -1 : 0) : i >> by; /* towards -infinity */
}

/* Adds the counts of a grid to those of one that covers it and is as wide or wider. */
static void add_bins(struct element_stats *s, const struct element_stats *from)
{
    unsigned by = (unsigned)(s->exponent - from->exponent);

    for (unsigned i = 0; i < from->bins; i++)
        s->bin[floor_half(from->first + (int)i, by) - s->first] += from->bin[i];
}

/* Makes room for the numbers of [min, max]. */
static void cover(struct element_stats *s, double min, double max)
{
    struct element_stats old = *s;

    if (min >= s->min && max <= s->max)
        return;
    s->min = MIN(s->min, min) + 0.0; /* not -0, which zero is met first is chance */
    s->max = MAX(s->max, max) + 0.0;
    s->exponent = grid_exponent(s->min, s->max);
    s->first = bin_of(s->min, s->exponent);
    s->bins = (unsigned)(bin_of(s->max, s->exponent) - s->first) + 1;
    memset(s->bin, 0, sizeof s->bin);
    add_bins(s, &old);
}

/* ---- one block ---- */

static void add_moments(struct element_stats *s, uint64_t before, uint64_t n,
                        double mean, double squares)
{
    double all = (double)before + (double)n, apart = mean - s->mean;

    s->squares += squares + apart * apart * ((double)before * (double)n / all);
    s->mean += apart * ((double)n / all);
}

/* Counts what is not finite and moves the rest together; returns how much that is. */
#define TAKE_OUT(NAME, TYPE)                                                           \
    static size_t NAME(struct element_stats *s, TYPE *v, size_t n)                     \
    {                                                                                  \
        size_t kept = 0;                                                               \
                                                                                       \
        for (size_t i = 0; i < n; i++) {                                               \
            if (isnan(v[i]))                                                           \
                s->nan++;                                                              \
            else if (isinf(v[i]))                                                      \
                s->inf++;                                                              \
            else                                                                       \
                v[kept++] = v[i];                                                      \
        }                                                                              \
        return kept;                                                                   \
    }

TAKE_OUT(take_out_f32, float)
TAKE_OUT(take_out_f64, double)

/* A block of finite numbers whose ends are known; `f32` or `f64` is NULL. */
static void add_finite(struct element_stats *s, const float *f32, const double *f64,
                       size_t n, const struct row_ends *ends)
{
    uint64_t before = element_stats_finite(s) - n;
    double mean = ends->sum / (double)n, squares;
    struct row_grid grid;
    uint8_t bin[STATS_BLOCK];

    cover(s, ends->min, ends->max);
    grid = (struct row_grid){.exponent = s->exponent, .first = s->first};
    squares = f32 ? stats_bins_f32(f32, n, mean, &grid, bin)
                  : stats_bins_f64(f64, n, mean, &grid, bin);
    stats_count(bin, n, s->bins, s->bin);
    s->zero += ends->zero;
    add_moments(s, before, n, mean, squares);
}

static void add_f64(struct element_stats *s, double *v, size_t n)
{
    struct row_ends ends;

    s->numbers += n;
    stats_ends_f64(v, n, &ends);
    if (!isfinite(
            ends.sum)) { /* by what is not, or finite numbers that are too large */
        n = take_out_f64(s, v, n);
        if (n == 0)
            return;
        stats_ends_f64(v, n, &ends);
    }
    add_finite(s, NULL, v, n, &ends);
}

/* `v` is not changed, and may be the window itself. */
static void add_f32(struct element_stats *s, const float *v, size_t n)
{
    double wide[STATS_BLOCK];
    float finite[STATS_BLOCK];
    struct row_ends ends;

    stats_ends_f32(v, n, &ends);
    s->numbers += n;
    if (!isfinite(ends.sum)) {
        memcpy(finite, v, n * sizeof *v);
        n = take_out_f32(s, finite, n);
        if (n == 0)
            return;
        v = finite;
        stats_ends_f32(v, n, &ends);
    }
    cover(s, ends.min, ends.max);
    if (abs(s->exponent) <= F32_EXPONENT) {
        add_finite(s, v, NULL, n, &ends);
        return;
    }
    for (size_t i = 0; i < n; i++)
        wide[i] = v[i];
    add_finite(s, NULL, wide, n, &ends);
}

/* ---- windows ---- */

static uint64_t turned(enum dtype d)
{
    return d == DTYPE_I64 ? (uint64_t)1 << 63 : 0;
}

static void add_wide(struct element_stats *s, enum dtype d, const unsigned char *p,
                     size_t n)
{
    uint64_t turn = turned(d);

    s->wide = true;
    for (size_t i = 0; i < n; i++) {
        uint64_t v;

        memcpy(&v, p + 8 * i, sizeof v);
        s->low = MIN(s->low, v ^ turn);
        s->high = MAX(s->high, v ^ turn);
    }
}

void element_stats_add(struct element_stats *s, const struct element_decoder *d,
                       const void *src, size_t units)
{
    const unsigned char *p = src;
    bool single = element_is_single(d);
    float f32[STATS_BLOCK];
    double f64[STATS_BLOCK];

    if (d->dtype == DTYPE_I64 || d->dtype == DTYPE_U64)
        add_wide(s, d->dtype, p, units);
    while (units > 0) {
        size_t part = MIN(units, (size_t)STATS_BLOCK / d->numbers);

        if (d->dtype == DTYPE_F32 && (uintptr_t)p % _Alignof(float) == 0) {
            add_f32(s, (const float *)(const void *)p, part);
        } else if (single) {
            element_decode_single(d, p, part, f32);
            add_f32(s, f32, part * d->numbers);
        } else {
            element_decode(d, p, part, f64);
            add_f64(s, f64, part * d->numbers);
        }
        p += part * d->unit;
        units -= part;
    }
}

/* As bin_of(), by the inverse of the bins' width. */
static int bin_by(float x, double inverse)
{
    double y = (double)x * inverse;
    int i = (int)y;

    return i - (y < i || (y == 0 && x < 0));
}

void element_stats_add_counted(struct element_stats *s, const struct counted_number *v,
                               size_t n)
{
    double min = INFINITY, max = -INFINITY, sum = 0, squares = 0, mean, inverse;
    uint64_t before = element_stats_finite(s), all = 0;

    if (n == 0)
        return;
    for (size_t i = 0; i < n; i++) {
        min = MIN(min, (double)v[i].value);
        max = MAX(max, (double)v[i].value);
        sum += (double)v[i].value * v[i].count;
        all += v[i].count;
    }
    cover(s, min, max);
    mean = sum / (double)all;
    inverse = ldexp(1, -s->exponent);
    for (size_t i = 0; i < n; i++) {
        double apart = (double)v[i].value - mean;

        squares += apart * apart * v[i].count;
        s->bin[bin_by(v[i].value, inverse) - s->first] += v[i].count;
        s->zero += v[i].value == 0 ? v[i].count : 0;
    }
    s->numbers += all;
    add_moments(s, before, all, mean, squares);
}

void element_stats_merge(struct element_stats *s, const struct element_stats *from)
{
    uint64_t before = element_stats_finite(s), n = element_stats_finite(from);

    if (n > 0) {
        cover(s, from->min, from->max);
        add_bins(s, from);
        add_moments(s, before, n, from->mean, from->squares);
    }
    s->numbers += from->numbers;
    s->nan += from->nan;
    s->inf += from->inf;
    s->zero += from->zero;
    s->wide |= from->wide;
    s->low = MIN(s->low, from->low);
    s->high = MAX(s->high, from->high);
}

/* ---- results ---- */

double element_stats_std(const struct element_stats *s)
{
    uint64_t n = element_stats_finite(s);

    return n ? sqrt(s->squares / (double)n) : 0;
}

void element_stats_histogram(const struct element_stats *s, struct stats_histogram *out)
{
    *out = (struct stats_histogram){.n = s->bins};
    if (s->bins == 0)
        return;
    out->width = ldexp(1, s->exponent);
    out->from = (double)s->first * out->width;
    memcpy(out->count, s->bin, sizeof out->count);
}

const char *element_stats_end(const struct element_stats *s, enum dtype d, bool high,
                              char dst[40])
{
    uint64_t wide = (high ? s->high : s->low) ^ turned(d);

    if (!s->wide)
        snprintf(dst, 40, "%.17g", high ? s->max : s->min);
    else if (d == DTYPE_I64)
        snprintf(dst, 40, "%" PRId64, (int64_t)wide);
    else
        snprintf(dst, 40, "%" PRIu64, wide);
    return dst;
}
