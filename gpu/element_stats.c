/* SPDX-License-Identifier: MIT */
/* gpu/element_stats.c - minimum, maximum, mean, deviation, counts and a histogram at once. */
#include "gpu/element_stats.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    BLOCK = 1024, /* numbers at a time: they stay in the first cache for all passes */
    LANES = 8,    /* sums side by side, which become vectors */
    HALF = STATS_GRID / 2,
    HALF_BITS = 11,
    NO_SCALE = -2000, /* below any double's: nothing was counted yet */
};
_Static_assert(1 << HALF_BITS == HALF, "bins of one side");

void element_stats_init(struct element_stats *s)
{
    memset(s, 0, sizeof *s);
    s->min = INFINITY;
    s->max = -INFINITY;
    s->low = UINT64_MAX;
    s->scale = NO_SCALE;
}

uint64_t element_stats_finite(const struct element_stats *s)
{
    return s->numbers - s->nan - s->inf;
}

/* ---- one block ---- */

/* Counts what is not finite and moves the rest together; returns how much that is. */
static size_t take_out_nonfinite(struct element_stats *s, double *v, size_t n)
{
    size_t kept = 0;

    for (size_t i = 0; i < n; i++) {
        if (isnan(v[i]))
            s->nan++;
        else if (isinf(v[i]))
            s->inf++;
        else
            v[kept++] = v[i];
    }
    return kept;
}

struct sums {
    double min, max, sum;
    uint64_t zero;
};

static struct sums sum_block(const double *v, size_t n)
{
    double low[LANES], high[LANES], sum[LANES], zero[LANES];
    struct sums out = {.min = v[0], .max = v[0]};
    size_t i = 0;

    for (int k = 0; k < LANES; k++) {
        low[k] = high[k] = v[0];
        sum[k] = zero[k] = 0;
    }
    for (; i + LANES <= n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            double x = v[i + k];

            low[k] = x < low[k] ? x : low[k];
            high[k] = x > high[k] ? x : high[k];
            sum[k] += x;
            zero[k] += x == 0 ? 1.0 : 0.0;
        }
    }
    for (int k = 0; i < n; i++, k++) {
        low[k] = MIN(low[k], v[i]);
        high[k] = MAX(high[k], v[i]);
        sum[k] += v[i];
        zero[k] += v[i] == 0 ? 1.0 : 0.0;
    }
    for (int k = 0; k < LANES; k++) {
        out.min = MIN(out.min, low[k]);
        out.max = MAX(out.max, high[k]);
        out.sum += sum[k];
        out.zero += (uint64_t)zero[k];
    }
    return out;
}

static double square_block(const double *v, size_t n, double mean)
{
    double sum[LANES] = {0}, all = 0;
    size_t i = 0;

    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++)
            sum[k] += (v[i + k] - mean) * (v[i + k] - mean);
    for (int k = 0; i < n; i++, k++)
        sum[k] += (v[i] - mean) * (v[i] - mean);
    for (int k = 0; k < LANES; k++)
        all += sum[k];
    return all;
}

/* ---- the grid ---- */

static int floor_half(int i, unsigned by)
{
    return by > HALF_BITS ? (i < 0 ? -1 : 0) : i >> by; /* towards -infinity */
}

/* Every 2^by bins become one. */
static void coarsen(struct element_stats *s, unsigned by)
{
    uint64_t bin[STATS_GRID] = {0};

    for (int i = -HALF; i < HALF; i++)
        bin[floor_half(i, by) + HALF] += s->bin[i + HALF];
    memcpy(s->bin, bin, sizeof bin);
}

/* Makes room for |x| < 2^scale. */
static void grow(struct element_stats *s, int scale)
{
    if (scale <= s->scale)
        return;
    if (s->scale != NO_SCALE)
        coarsen(s, (unsigned)(scale - s->scale));
    s->scale = scale;
}

static void count_block(struct element_stats *s, const double *v, size_t n, double most)
{
    int index[BLOCK], scale;
    double factor;

    frexp(most, &scale); /* most < 2^scale */
    if (most == 0 || scale < -900)
        scale = -900; /* so that the factor is finite */
    grow(s, scale);
    factor = ldexp(1, HALF_BITS - s->scale);
    for (size_t i = 0; i < n; i++) {
        double x = v[i] * factor;
        int whole = (int)x;

        index[i] = whole - (x < (double)whole); /* floor() */
    }
    for (size_t i = 0; i < n; i++)
        s->bin[index[i] + HALF]++;
}

static void add_moments(struct element_stats *s, uint64_t before, uint64_t n,
                        double mean, double squares)
{
    double all = (double)before + (double)n, apart = mean - s->mean;

    s->squares += squares + apart * apart * ((double)before * (double)n / all);
    s->mean += apart * ((double)n / all);
}

static void add_block(struct element_stats *s, double *v, size_t n)
{
    uint64_t before = element_stats_finite(s);
    struct sums sums;
    double mean;

    s->numbers += n;
    sums = sum_block(v, n);
    if (!isfinite(
            sums.sum)) { /* what is not finite makes the sum so, and too large sums */
        n = take_out_nonfinite(s, v, n);
        if (n == 0)
            return;
        sums = sum_block(v, n);
    }
    mean = sums.sum / (double)n;
    s->min = MIN(s->min, sums.min);
    s->max = MAX(s->max, sums.max);
    s->zero += sums.zero;
    add_moments(s, before, n, mean, square_block(v, n, mean));
    count_block(s, v, n, MAX(fabs(sums.min), fabs(sums.max)));
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
    double block[BLOCK];

    if (d->dtype == DTYPE_I64 || d->dtype == DTYPE_U64)
        add_wide(s, d->dtype, p, units);
    while (units > 0) {
        size_t part = MIN(units, (size_t)BLOCK / d->numbers);

        element_decode(d, p, part, block);
        add_block(s, block, part * d->numbers);
        p += part * d->unit;
        units -= part;
    }
}

void element_stats_merge(struct element_stats *s, const struct element_stats *from)
{
    uint64_t before = element_stats_finite(s), n = element_stats_finite(from);
    unsigned by;

    if (n > 0) {
        add_moments(s, before, n, from->mean, from->squares);
        grow(s, from->scale);
        by = (unsigned)(s->scale - from->scale);
        for (int i = -HALF; i < HALF; i++)
            s->bin[floor_half(i, by) + HALF] += from->bin[i + HALF];
    }
    s->numbers += from->numbers;
    s->nan += from->nan;
    s->inf += from->inf;
    s->zero += from->zero;
    s->min = MIN(s->min, from->min);
    s->max = MAX(s->max, from->max);
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
    int first = HALF, last = -HALF - 1;
    unsigned by = 0;

    *out = (struct stats_histogram){0};
    for (int i = -HALF; i < HALF; i++) {
        if (s->bin[i + HALF] == 0)
            continue;
        first = MIN(first, i);
        last = i;
    }
    if (last < first)
        return;
    while ((last >> by) - (first >> by) >= STATS_BINS_MAX)
        by++;
    out->n = (unsigned)((last >> by) - (first >> by)) + 1;
    out->width = ldexp(1, s->scale - HALF_BITS + (int)by);
    out->from = (double)(first >> by) * out->width;
    for (int i = first; i <= last; i++)
        out->count[(i >> by) - (first >> by)] += s->bin[i + HALF];
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
