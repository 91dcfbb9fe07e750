/* SPDX-License-Identifier: MIT */
/* gpu/element_diff.c - compares blocks by their bytes, and where those differ by element. */
#include "gpu/element_diff.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "gpu/vectors.h"

enum {
    BLOCK = 1024,
    LANES = 8, /* counts side by side, which become vectors */
};

bool element_pair_init(struct element_pair *p, const struct element_rule *rule,
                       enum dtype a, enum dtype b)
{
    *p = (struct element_pair){.rule = *rule, .same_type = a == b};
    p->bytes = !element_decoder_init(&p->a, a);
    p->bytes |= !element_decoder_init(&p->b, b);
    p->integers = dtype_is_integer(a) && dtype_is_integer(b);
    if (p->same_type)
        return a != DTYPE_NONE;
    if (p->bytes || a == DTYPE_F4 || b == DTYPE_F4)
        return false;
    return p->a.numbers == p->b.numbers; /* a complex one has no real one to meet */
}

void element_diff_init(struct element_diff *d)
{
    *d = (struct element_diff){.first = UINT64_MAX};
}

/* One element of each side. */
struct couple {
    const unsigned char *a, *b; /* their units */
    const double *va, *vb;      /* their numbers: one, or a complex one's two */
    uint64_t index;
};

static void note_outside(struct element_diff *d, const struct element_pair *p,
                         const struct couple *c)
{
    d->outside++;
    if (d->first != UINT64_MAX)
        return;
    d->first = c->index;
    memcpy(d->first_a, c->a, p->a.unit);
    memcpy(d->first_b, c->b, p->b.unit);
}

/* A distance of finite numbers and the size of the second. */
static void judge(struct element_diff *d, const struct element_pair *p,
                  const struct couple *c, double apart, double size)
{
    d->differing++;
    d->max_abs = MAX(d->max_abs, apart);
    if (size > 0)
        d->max_rel = MAX(d->max_rel, apart / size);
    if (!p->rule.tolerance || !(apart <= p->rule.atol + p->rule.rtol * size))
        note_outside(d, p, c);
}

static void judge_integers(struct element_diff *d, const struct element_pair *p,
                           const struct couple *c)
{
    __int128 a = element_integer(p->a.dtype, c->a);
    __int128 b = element_integer(p->b.dtype, c->b);

    if (a != b || (p->same_type && !p->rule.values && !p->rule.tolerance))
        judge(d, p, c, (double)(a > b ? a - b : b - a), (double)(b < 0 ? -b : b));
}

static bool same_number(double a, double b)
{
    return a == b || (isnan(a) && isnan(b));
}

/* Equal values whose bits are not: a difference only where bits are what is asked for. */
static void judge_equal(struct element_diff *d, const struct element_pair *p,
                        const struct couple *c)
{
    if (!p->same_type || p->rule.values)
        return;
    d->differing++;
    if (!p->rule.tolerance)
        note_outside(d, p, c);
}

static void judge_floats(struct element_diff *d, const struct element_pair *p,
                         const struct couple *c)
{
    bool complex = dtype_is_complex(p->a.dtype);
    double a[2] = {c->va[0], complex ? c->va[1] : 0};
    double b[2] = {c->vb[0], complex ? c->vb[1] : 0};

    if (same_number(a[0], b[0]) && same_number(a[1], b[1])) {
        judge_equal(d, p, c);
        return;
    }
    if (!isfinite(a[0]) || !isfinite(a[1]) || !isfinite(b[0]) || !isfinite(b[1])) {
        d->differing++;
        d->nonfinite++;
        note_outside(d, p, c);
        return;
    }
    if (complex)
        judge(d, p, c, hypot(a[0] - b[0], a[1] - b[1]), hypot(b[0], b[1]));
    else
        judge(d, p, c, fabs(a[0] - b[0]), fabs(b[0]));
}

/* Bytes that are no numbers to us: each is an element. */
static void judge_bytes(struct element_diff *d, const struct element_pair *p,
                        const unsigned char *a, const unsigned char *b, uint64_t at,
                        size_t units)
{
    for (size_t i = 0; i < units; i++) {
        struct couple c = {.a = a + i, .b = b + i, .index = at + i};

        if (a[i] == b[i])
            continue;
        d->differing++;
        note_outside(d, p, &c);
    }
}

/* Elements of a unit of F4; both nibbles may be the same. */
static bool same_bits(const struct element_pair *p, const struct couple *c, unsigned k)
{
    if (!p->same_type)
        return false;
    if (p->a.dtype == DTYPE_F4)
        return (*c->a >> 4 * k & 15) == (*c->b >> 4 * k & 15);
    return memcmp(c->a, c->b, p->a.unit) == 0;
}

/* What a block of real numbers adds up to, when none of them is special. */
struct lanes {
    double differing[LANES], outside[LANES], max_abs[LANES], max_rel[LANES];
    double special[LANES]; /* not finite, or the same in other bits */
};

static inline void judge_lanes(struct lanes *l, const struct element_rule *r,
                               const double *va, const double *vb)
{
    for (int k = 0; k < LANES; k++) {
        double a = va[k], b = vb[k], apart = fabs(a - b), size = fabs(b);
        double rel = apart / (size > 0 ? size : INFINITY);
        double limit = r->tolerance ? r->atol + r->rtol * size : 0;

        l->differing[k] += a != b ? 1.0 : 0.0;
        l->outside[k] += apart > limit ? 1.0 : 0.0;
        l->max_abs[k] = apart > l->max_abs[k] ? apart : l->max_abs[k];
        l->max_rel[k] = rel > l->max_rel[k] ? rel : l->max_rel[k];
        l->special[k] += apart <= DBL_MAX ? 0.0 : 1.0;
        l->special[k] += a == 0 && b == 0 ? 1.0 : 0.0;
    }
}

/*
 * True when the block is done. False, and nothing added, when it has to be looked through
 * element by element: for special numbers, zeros that may have two signs, or the first one
 * outside.
 */
VECTORS static bool judge_quickly(struct element_diff *d, const struct element_rule *r,
                                  const double *va, const double *vb, size_t n)
{
    double differing = 0, outside = 0, special = 0, max_abs = 0, max_rel = 0;
    struct lanes l = {0};

    if (n % LANES != 0)
        return false; /* a tensor's last block */
    for (size_t i = 0; i < n; i += LANES)
        judge_lanes(&l, r, va + i, vb + i);
    for (int k = 0; k < LANES; k++) {
        differing += l.differing[k];
        outside += l.outside[k];
        special += l.special[k];
        max_abs = MAX(max_abs, l.max_abs[k]);
        max_rel = MAX(max_rel, l.max_rel[k]);
    }
    if (special > 0 || (outside > 0 && d->first == UINT64_MAX))
        return false;
    d->differing += (uint64_t)differing;
    d->outside += (uint64_t)outside;
    d->max_abs = MAX(d->max_abs, max_abs);
    d->max_rel = MAX(d->max_rel, max_rel);
    return true;
}

static void judge_block(struct element_diff *d, const struct element_pair *p,
                        const unsigned char *a, const unsigned char *b, uint64_t at,
                        size_t units)
{
    unsigned elements = p->a.dtype == DTYPE_F4 ? 2 : 1; /* of a unit */
    unsigned numbers = p->a.numbers / elements;         /* of an element */
    double va[BLOCK], vb[BLOCK];

    element_decode(&p->a, a, units, va);
    element_decode(&p->b, b, units, vb);
    if (p->a.numbers == 1 && !p->integers && judge_quickly(d, &p->rule, va, vb, units))
        return;
    for (size_t i = 0; i < units * elements; i++) {
        struct couple c = {.a = a + i / elements * p->a.unit,
                           .b = b + i / elements * p->b.unit,
                           .va = va + i * numbers,
                           .vb = vb + i * numbers,
                           .index = at * elements + i};

        if (same_bits(p, &c, (unsigned)(i % elements)))
            continue;
        if (p->integers)
            judge_integers(d, p, &c);
        else
            judge_floats(d, p, &c);
    }
}

void element_diff_add(struct element_diff *d, const struct element_pair *p,
                      const void *a, const void *b, uint64_t at, size_t units)
{
    const unsigned char *pa = a, *pb = b;
    unsigned elements = p->a.dtype == DTYPE_F4 ? 2 : 1;

    d->elements += (uint64_t)units * elements;
    if (p->same_type && memcmp(a, b, units * p->a.unit) == 0)
        return;
    while (units > 0) {
        size_t part = MIN(units, (size_t)BLOCK / 2); /* two numbers a unit */

        if (p->bytes)
            judge_bytes(d, p, pa, pb, at, part);
        else if (!p->same_type || memcmp(pa, pb, part * p->a.unit) != 0)
            judge_block(d, p, pa, pb, at, part);
        pa += part * p->a.unit;
        pb += part * p->b.unit;
        at += part;
        units -= part;
    }
}

void element_diff_merge(struct element_diff *d, const struct element_diff *from)
{
    d->elements += from->elements;
    d->differing += from->differing;
    d->outside += from->outside;
    d->nonfinite += from->nonfinite;
    d->max_abs = MAX(d->max_abs, from->max_abs);
    d->max_rel = MAX(d->max_rel, from->max_rel);
    if (d->first != UINT64_MAX || from->first == UINT64_MAX)
        return;
    d->first = from->first;
    memcpy(d->first_a, from->first_a, sizeof d->first_a);
    memcpy(d->first_b, from->first_b, sizeof d->first_b);
}
