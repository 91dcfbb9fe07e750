/* SPDX-License-Identifier: MIT */
/* tests/kernels/gather_case.c - random gathers, and their results by the simplest loops. */
#include "gather_case.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "gpu/cast.h"
#include "remote/source.h"

static void *must(void *p)
{
    if (!p)
        abort();
    return p;
}

/* A type of these sizes; a float where there is one. DTYPE_NONE: there is none. */
static enum dtype type_of(const struct random_plan *p, struct random *r)
{
    static const enum dtype two[] = {DTYPE_F16, DTYPE_BF16},
                            one[] = {DTYPE_F8_E4M3, DTYPE_F8_E5M2};

    switch (p->unit * 16 + p->component) {
    case 1 * 16 + 1:
        return one[random_below(r, 2)];
    case 2 * 16 + 2:
        return two[random_below(r, 2)];
    case 4 * 16 + 4:
        return DTYPE_F32;
    case 8 * 16 + 8:
        return DTYPE_F64;
    case 4 * 16 + 2:
        return DTYPE_C32;
    case 8 * 16 + 4:
        return DTYPE_C64;
    case 16 * 16 + 8:
        return DTYPE_C128;
    default:
        return DTYPE_NONE;
    }
}

static void make_sources(struct gather_case *c)
{
    static const char *const name[SOURCES] = {"first", "second", "third"};
    struct err e = {0};

    for (unsigned s = 0; s < SOURCES; s++)
        if (source_from_memory(c->plan.source[s], c->plan.source_size[s], false,
                               name[s], &c->source[s], &e) < 0)
            abort();
}

static void make_pieces(struct gather_case *c)
{
    for (size_t i = 0; i < c->plan.n; i++) {
        const struct box *b = &c->plan.box[i];

        c->piece[i] = (struct gather_piece){.start = b->start,
                                            .size = b->size,
                                            .step = b->place.step,
                                            .base = b->place.base,
                                            .source = b->source,
                                            .flags = b->place.flags};
    }
}

static void choose_part(struct gather_case *c, struct random *r)
{
    const struct shape *units = &c->plan.units;
    bool all = random_one_in(r, 2);

    for (uint32_t k = 0; k < units->nd; k++) {
        uint64_t dim = units->dim[k];

        c->size[k] = dim;
        if (all || !dim || random_one_in(r, 3))
            continue;
        c->start[k] = random_below(r, dim);
        c->size[k] = random_below(r, dim - c->start[k] + 1);
    }
    if (all)
        return;
    c->request.start = c->start;
    c->request.size = c->size;
}

static void choose_cast(struct gather_case *c, struct random *r)
{
    static const enum dtype to[] = {DTYPE_F64,  DTYPE_F32,     DTYPE_F16,
                                    DTYPE_BF16, DTYPE_F8_E4M3, DTYPE_F8_E5M2};

    c->request.dtype = c->request.stored;
    if (cast_possible(c->request.stored, DTYPE_F32) && random_one_in(r, 2))
        c->request.dtype = to[random_below(r, ARRAY_SIZE(to))];
}

static void choose_scale(struct gather_case *c, struct random *r)
{
    const struct shape *units = &c->plan.units;
    size_t count = 1;

    if (!cast_possible(c->request.stored, c->request.dtype) || random_one_in(r, 2))
        return;
    for (uint32_t k = 0; k < units->nd; k++) {
        uint64_t dim = units->dim[k];

        c->block[k] = random_one_in(r, 3) ? 0 : 1 + random_below(r, dim + 2);
        if (c->block[k] && dim)
            count *= (dim - 1) / c->block[k] + 1;
    }
    c->factor = must(calloc(count, sizeof *c->factor));
    for (size_t i = 0; i < count; i++)
        c->factor[i] = (float)((double)random_below(r, 1 << 20) / 65536.0 - 4.0);
    c->scale = (struct gather_scale){c->factor, count, c->block};
    c->request.scale = &c->scale;
}

/* The factor of an element of the whole tensor, by its indices. */
static float factor_of(const struct gather_case *c, const uint64_t *index)
{
    size_t at = 0;

    for (uint32_t k = 0; k < c->plan.units.nd; k++) {
        uint64_t dim = c->plan.units.dim[k], block = c->block[k];

        at = block ? at * ((dim - 1) / block + 1) + index[k] / block : at;
    }
    return c->factor[at];
}

/* One element of the result, from the whole tensor. */
static void want_element(struct gather_case *c, uint64_t n, uint64_t from,
                         const uint64_t *index)
{
    unsigned unit = c->plan.unit, size = dtype_unit(c->request.dtype);
    const unsigned char *stored = c->plan.tensor + from * unit;
    uint64_t v = 0;

    if (c->request.dtype == c->request.stored && !c->request.scale) {
        memcpy(c->want + n * unit, stored, unit);
        return;
    }
    memcpy(&v, stored, unit);
    v = cast_one(v, cast_kind_of(c->request.stored), cast_kind_of(c->request.dtype),
                 c->request.scale != NULL, c->request.scale ? factor_of(c, index) : 1);
    memcpy(c->want + n * size, &v, size);
}

static void make_want(struct gather_case *c)
{
    const struct shape *units = &c->plan.units;
    uint64_t elements = 1;

    for (uint32_t k = 0; k < units->nd; k++)
        elements *= c->size[k];
    c->bytes = elements * dtype_unit(c->request.dtype);
    c->want = must(malloc(c->bytes + 1));
    for (uint64_t n = 0; n < elements; n++) {
        uint64_t rest = n, from = 0, stride = 1, index[SHAPE_MAX_DIMS];

        for (uint32_t k = units->nd; k-- > 0; stride *= units->dim[k]) {
            index[k] = c->start[k] + rest % c->size[k];
            rest /= c->size[k];
            from += index[k] * stride;
        }
        want_element(c, n, from, index);
    }
}

void gather_case_make(struct gather_case *c, struct random *r, uint64_t most)
{
    struct err e = {0};

    memset(c, 0, sizeof *c);
    random_plan_make(&c->plan, r, most);
    while ((c->request.stored = type_of(&c->plan, r)) == DTYPE_NONE) {
        random_plan_release(&c->plan);
        random_plan_make(&c->plan, r, most);
    }
    make_sources(c);
    make_pieces(c);
    choose_part(c, r);
    choose_cast(c, r);
    choose_scale(c, r);
    make_want(c);
    c->request.shape = &c->plan.units;
    c->request.piece = c->piece;
    c->request.pieces = c->plan.n;
    c->request.source = c->source;
    c->request.sources = SOURCES;
    if (gather_new(&c->request, &c->gather, &e) < 0) {
        fprintf(stderr, "gather_new: %s\n", e.text);
        abort();
    }
}

void gather_case_release(struct gather_case *c)
{
    gather_free(c->gather);
    for (unsigned s = 0; s < SOURCES; s++)
        source_put(c->source[s]);
    random_plan_release(&c->plan);
    free(c->factor);
    free(c->want);
}

bool gather_case_equal(const struct gather_case *c, const unsigned char *got,
                       const char *who)
{
    for (uint64_t i = 0; i < c->bytes; i++) {
        if (got[i] == c->want[i])
            continue;
        fprintf(stderr,
                "%s: %s to %s%s%s, %zu pieces: byte %" PRIu64 " of %" PRIu64
                " is %#x, must be %#x\n",
                who, dtype_name(c->request.stored), dtype_name(c->request.dtype),
                c->request.scale ? ", scaled" : "", c->request.start ? ", a part" : "",
                c->plan.n, i, c->bytes, got[i], c->want[i]);
        return false;
    }
    return true;
}

struct changing {
    struct source base;
    unsigned char *bytes;
    atomic_bool read;
};

static int changing_read(struct source *s, uint64_t off, size_t len, void *dst,
                         struct err *e)
{
    struct changing *c = container_of(s, struct changing, base);

    (void)e;
    memcpy(dst, c->bytes + off, len);
    atomic_store(&c->read, true);
    return 0;
}

static int changing_check(struct source *s, struct err *e)
{
    return atomic_load(&container_of(s, struct changing, base)->read)
               ? err_set(e, ESTALE, "%s changed", s->name)
               : 0;
}

static void changing_close(struct source *s)
{
    struct changing *c = container_of(s, struct changing, base);

    free(c->bytes);
    free(c);
}

static const struct source_ops changing_ops = {
    .name = "changing",
    .read = changing_read,
    .check = changing_check,
    .close = changing_close,
};

struct source *open_changing(unsigned char *bytes, uint64_t size)
{
    struct changing *c = must(calloc(1, sizeof *c));
    struct err e = {0};

    if (source_init(&c->base, &changing_ops, "shard", size, &e) < 0)
        abort();
    c->bytes = bytes;
    return &c->base;
}
