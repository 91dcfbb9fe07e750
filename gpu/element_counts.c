/* SPDX-License-Identifier: MIT */
/* gpu/element_counts.c - tables of counts, side by side where equal elements follow. */
#include "gpu/element_counts.h"

#include <math.h>
#include <string.h>

enum {
    PATTERNS = 1 << 16,
    /*
     * Equal elements in a row wait for each other's count: they go to different tables.
     * Two, as more of them leave the first cache; of bytes, whose tables are small, more.
     */
    TABLES = 2,
    BYTE_TABLES = 4,
    BYTE_PATTERNS = 256,
    BLOCK = 1024, /* patterns that are looked at together */
    STEP = 8,     /* bytes at a time */
};

struct element_counts {
    uint32_t table[TABLES][PATTERNS]; /* of bytes: BYTE_TABLES of 256 in the first */
    struct counted_number number[PATTERNS];
};

bool element_is_counted(const struct element_decoder *d)
{
    return element_is_single(d) && d->unit <= 2 * d->numbers;
}

struct element_counts *element_counts_new(void)
{
    return calloc(1, sizeof(struct element_counts));
}

void element_counts_free(struct element_counts *c)
{
    free(c);
}

static void count_pairs(struct element_counts *c, const unsigned char *p, size_t len)
{
    uint32_t *even = c->table[0], *odd = c->table[1];

    for (; len >= STEP; p += STEP, len -= STEP) {
        uint64_t v;

        memcpy(&v, p, sizeof v);
        even[(uint16_t)v]++;
        odd[(uint16_t)(v >> 16)]++;
        even[(uint16_t)(v >> 32)]++;
        odd[v >> 48]++;
    }
    for (; len > 0; p += 2, len -= 2) {
        uint16_t v;

        memcpy(&v, p, sizeof v);
        even[v]++;
    }
}

static void count_bytes(struct element_counts *c, const unsigned char *p, size_t len)
{
    uint32_t *t = c->table[0];

    for (; len >= STEP; p += STEP, len -= STEP) {
        uint64_t v;

        memcpy(&v, p, sizeof v);
        for (unsigned i = 0; i < STEP; i++)
            t[i % BYTE_TABLES * BYTE_PATTERNS + (uint8_t)(v >> 8 * i)]++;
    }
    for (; len > 0; p++, len--)
        t[*p]++;
}

void element_counts_add(struct element_counts *c, const struct element_decoder *d,
                        const void *src, size_t units)
{
    if (d->unit == 1)
        count_bytes(c, src, units);
    else
        count_pairs(c, src, units * d->unit);
}

/* The counts of patterns [first, first + n) to `out`; they are 0 again. False: all were. */
static bool take_block(struct element_counts *c, bool bytes, size_t first, size_t n,
                       uint32_t *out)
{
    size_t tables = bytes ? BYTE_TABLES : TABLES;
    size_t step = bytes ? BYTE_PATTERNS : PATTERNS;
    uint32_t *table = c->table[0] + first, any = 0;

    memset(out, 0, n * sizeof *out);
    for (size_t k = 0; k < tables; k++)
        for (size_t i = 0; i < n; i++)
            out[i] += table[k * step + i];
    for (size_t i = 0; i < n; i++)
        any |= out[i];
    for (size_t k = 0; any && k < tables; k++)
        memset(table + k * step, 0, n * sizeof *table);
    return any != 0;
}

/* One number that occurs `count` times, among the finite ones when it is one. */
static void take_number(struct element_counts *c, float v, uint32_t count,
                        struct element_stats *s, size_t *n)
{
    if (isnan(v) || isinf(v)) {
        s->numbers += count;
        *(isnan(v) ? &s->nan : &s->inf) += count;
    } else {
        c->number[(*n)++] = (struct counted_number){v, count};
    }
}

/* Patterns from `first` on as numbers: `n` of them, of F4 two each. */
static void decode_patterns(const struct element_decoder *d, size_t first, size_t n,
                            float *out)
{
    unsigned char bytes[BYTE_PATTERNS];
    uint16_t pairs[BLOCK];

    for (size_t i = 0; i < n && d->unit == 1; i++)
        bytes[i] = (unsigned char)(first + i);
    for (size_t i = 0; i < n && d->unit > 1; i++)
        pairs[i] = (uint16_t)(first + i);
    if (d->unit == 1)
        element_decode_single(d, bytes, n, out);
    else
        element_decode_single(d, pairs, n * sizeof *pairs / d->unit, out);
}

void element_counts_take(struct element_counts *c, const struct element_decoder *d,
                         struct element_stats *s)
{
    bool bytes = d->unit == 1;
    unsigned each = bytes ? d->numbers : 1; /* numbers a pattern */
    size_t patterns = bytes ? BYTE_PATTERNS : PATTERNS, found = 0;

    for (size_t first = 0; first < patterns; first += BLOCK) {
        size_t n = MIN(patterns - first, (size_t)BLOCK);
        uint32_t count[BLOCK];
        float v[BLOCK];

        if (!take_block(c, bytes, first, n, count))
            continue;
        decode_patterns(d, first, n, v);
        for (size_t i = 0; i < n * each; i++)
            if (count[i / each])
                take_number(c, v[i], count[i / each], s, &found);
    }
    element_stats_add_counted(s, c->number, found);
}
