/* SPDX-License-Identifier: MIT */
/* gpu/gather.c - checks what is to be gathered, and freezes it as a plan of its own. */
#include "gpu/gather_priv.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "gpu/cast.h"
#include "remote/source.h"

enum {
    GATHER_MEMORY = 1 << 30, /* as an open tensor: 10 M pieces at about 100 bytes */
};

void gather_free(struct gather *g)
{
    if (!g)
        return;
    for (size_t i = 0; i < g->sources; i++)
        source_put(g->source[i]);
    arena_free(g->arena);
    free(g);
}

void gather_freep(struct gather **g)
{
    gather_free(*g);
}

uint64_t gather_size(const struct gather *g)
{
    return plan_size(g->plan) / g->stored_unit * g->unit;
}

int gather_check(const struct gather *g, struct err *e)
{
    int ret = 0;

    for (size_t i = 0; ret == 0 && i < g->sources; i++)
        ret = source_check(g->source[i], e);
    return ret;
}

/* ---- the part that is wanted ---- */

/* What gather_new() works with. */
struct making {
    const struct gather_request *r;
    struct gather *g;
    struct shape units; /* of the whole tensor */
    struct shape part;
    uint64_t start[SHAPE_MAX_DIMS]; /* of the part */
    struct chunk *chunk;            /* offset: the number of its piece */
    size_t chunks;
};

static int check_types(const struct making *m, struct err *e)
{
    const struct gather_request *r = m->r;

    if (r->stored == DTYPE_NONE || r->stored >= DTYPE_COUNT || r->dtype == DTYPE_NONE ||
        r->dtype >= DTYPE_COUNT)
        return err_set(e, EINVAL, "an element type that is not known");
    if ((r->stored != r->dtype || r->scale) && !cast_possible(r->stored, r->dtype))
        return err_set(e, EINVAL,
                       "a cast of %s to %s%s: it takes two of F64, F32, F16, "
                       "BF16, F8_E4M3 and F8_E5M2",
                       dtype_name(r->stored), dtype_name(r->dtype),
                       r->scale ? " with factors" : "");
    return 0;
}

static int choose_part(struct making *m, struct err *e)
{
    const struct gather_request *r = m->r;

    TRY(shape_units(r->shape, r->stored, &m->units, e));
    if (!r->start != !r->size)
        return err_set(e, EINVAL, "a part has a start and a size, or neither");
    m->part = m->units;
    for (uint32_t k = 0; r->start && k < m->units.nd; k++) {
        m->start[k] = r->start[k];
        m->part.dim[k] = r->size[k];
        if (range_outside(r->start[k], r->size[k], m->units.dim[k]))
            return err_set(e, EINVAL,
                           "part %" PRIu64 "+%" PRIu64
                           " of dimension %u, which has %" PRIu64,
                           r->start[k], r->size[k], k, m->units.dim[k]);
    }
    return 0;
}

/* ---- factors ---- */

/* Blocks of dimension k of the whole tensor; the grid has so many entries there. */
static uint64_t scale_blocks(const struct making *m, uint32_t k)
{
    uint64_t dim = m->units.dim[k], block = m->r->scale->block[k];

    return !block || !dim ? 1 : (dim - 1) / block + 1;
}

static int add_term(struct cast_scale *s, const struct cast_scale_term *term,
                    struct err *e)
{
    if (s->terms == CAST_SCALE_TERMS)
        return err_set(e, EINVAL, "factors of blocks along more than %d dimensions",
                       CAST_SCALE_TERMS);
    s->term[s->terms++] = *term;
    return 0;
}

static int copy_factors(struct making *m, struct err *e)
{
    const struct gather_scale *scale = m->r->scale;
    float *value =
        arena_array(m->g->arena, scale->count + !scale->count, sizeof *value);

    if (!value)
        return err_nomem(e);
    memcpy(value, scale->value, scale->count * sizeof *value);
    m->g->scale.value = (uintptr_t)value;
    m->g->factors = scale->count;
    m->g->scaled = true;
    return 0;
}

static int take_scale(struct making *m, struct err *e)
{
    uint64_t stride = 1, step = 1;
    int ret = 0;

    if (!m->r->scale)
        return 0;
    for (uint32_t k = m->units.nd; ret == 0 && k-- > 0; stride *= m->part.dim[k]) {
        uint64_t blocks = scale_blocks(m, k);

        if (blocks > 1 && m->part.dim[k])
            ret = add_term(&m->g->scale,
                           &(struct cast_scale_term){.stride = stride,
                                                     .dim = m->part.dim[k],
                                                     .origin = m->start[k],
                                                     .block = m->r->scale->block[k],
                                                     .step = step},
                           e);
        if (ret == 0 && mul_overflows(step, blocks, &step))
            step = UINT64_MAX; /* more than there can be */
    }
    if (ret == 0 && step != m->r->scale->count)
        ret = err_set(e, EINVAL, "%zu factors for %" PRIu64 " blocks",
                      m->r->scale->count, step);
    return ret < 0 ? ret : copy_factors(m, e);
}

/* ---- pieces ---- */

static int check_piece(const struct making *m, size_t i, struct err *e)
{
    const struct gather_piece *p = &m->r->piece[i];

    if (p->source >= m->r->sources)
        return err_set(e, EBADMSG, "piece %zu is of source %u of %zu", i, p->source,
                       m->r->sources);
    if (p->flags & ~(CHUNK_SWAP | CHUNK_CONJ | CHUNK_NEG) ||
        (p->flags & CHUNK_CONJ && !dtype_is_complex(m->r->stored)))
        return err_set(e, EBADMSG, "piece %zu has flags %#x, of elements of %s", i,
                       p->flags, dtype_name(m->r->stored));
    for (uint32_t k = 0; k < m->units.nd; k++)
        if (range_outside(p->start[k], p->size[k], m->units.dim[k]))
            return err_set(e, EBADMSG,
                           "piece %zu: %" PRIu64 "+%" PRIu64
                           " of dimension %u, which has %" PRIu64,
                           i, p->start[k], p->size[k], k, m->units.dim[k]);
    return 0;
}

/* The part of the piece that is wanted, as the part counts; false: nothing of it. */
static bool clip_piece(const struct making *m, const struct gather_piece *p,
                       uint64_t *start, uint64_t *size)
{
    for (uint32_t k = 0; k < m->units.nd; k++) {
        uint64_t from = MAX(p->start[k], m->start[k]);
        uint64_t to = MIN(p->start[k] + p->size[k], m->start[k] + m->part.dim[k]);

        if (from >= to)
            return false;
        start[k] = from - m->start[k];
        size[k] = to - from;
    }
    return true;
}

static int add_piece(struct making *m, size_t i, struct err *e)
{
    struct chunk *c = &m->chunk[m->chunks];
    uint32_t nd = m->units.nd;
    uint64_t *box = arena_array(m->g->arena, 2 * (size_t)nd + 1, sizeof *box);
    int ret = box ? check_piece(m, i, e) : err_nomem(e);

    if (ret < 0 || !clip_piece(m, &m->r->piece[i], box, box + nd))
        return ret;
    c->start = box;
    c->size = box + nd;
    c->offset = i;
    m->chunks++;
    return 0;
}

/* Where a clipped piece begins and how it goes on. */
static int place_of(const struct making *m, const struct chunk *c,
                    struct chunk_place *out, struct err *e)
{
    const struct gather_piece *p = &m->r->piece[c->offset];
    __int128 base = p->base;

    for (uint32_t k = 0; k < m->units.nd; k++) {
        base += (__int128)(c->start[k] + m->start[k] - p->start[k]) * p->step[k];
        out->step[k] = p->step[k];
    }
    if (base < 0 || base > INT64_MAX)
        return err_set(e, EBADMSG, "piece %" PRIu64 " lies outside its source",
                       c->offset);
    out->base = (uint64_t)base;
    out->src = m->r->source[p->source];
    out->flags = p->flags;
    return 0;
}

static int lower(struct making *m, size_t i, struct err *e)
{
    struct gather *g = m->g;
    const struct chunk *c = plan_chunk(g->plan, i, NULL);
    struct chunk_place place = {0};
    int ret = place_of(m, c, &place, e);

    g->copy[i].source = place.src;
    if (ret == 0 && !place.src)
        return err_set(e, EINVAL, "a source that is wanted is not there");
    if (ret == 0)
        ret = plan_lower(g->plan, c, &place, dtype_component(g->stored), g->arena,
                         &g->copy[i].op, e);
    return ret < 0 && place.src ? err_wrap(e, "%s", place.src->name) : ret;
}

static int make_plan(struct making *m, struct err *e)
{
    struct gather *g = m->g;
    struct plan_builder *b;
    int ret = plan_begin(g->arena, &m->part, g->stored_unit, &b, e);

    if (ret < 0)
        return ret;
    m->chunk = arena_array(g->arena, m->r->pieces + 1, sizeof *m->chunk);
    if (!m->chunk)
        return err_nomem(e);
    for (size_t i = 0; ret == 0 && i < m->r->pieces; i++)
        ret = add_piece(m, i, e);
    if (ret == 0)
        ret = plan_take(b, m->chunk, m->chunks, e);
    if (ret == 0)
        ret = plan_finish(b, &g->plan, e);
    if (ret < 0)
        return ret;
    g->copy = arena_array(g->arena, plan_chunks(g->plan) + 1, sizeof *g->copy);
    if (!g->copy)
        return err_nomem(e);
    for (size_t i = 0; ret == 0 && i < plan_chunks(g->plan); i++)
        ret = lower(m, i, e);
    return ret;
}

static int by_address(const void *a, const void *b)
{
    struct source *const *x = a, *const *y = b;

    return (*x > *y) - (*x < *y);
}

/* A reference of each source that is read. */
static int keep_sources(struct gather *g, struct err *e)
{
    size_t n = plan_chunks(g->plan), kept = 0;

    g->source = arena_array(g->arena, n + 1, sizeof *g->source);
    if (!g->source)
        return err_nomem(e);
    for (size_t i = 0; i < n; i++)
        g->source[i] = g->copy[i].source;
    if (n)
        qsort(g->source, n, sizeof(struct source *), by_address);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || g->source[i] != g->source[kept - 1])
            g->source[kept++] = g->source[i];
    for (size_t i = 0; i < kept; i++)
        source_get(g->source[i]);
    g->sources = kept;
    return 0;
}

static int make(struct making *m, struct err *e)
{
    int ret = check_types(m, e);

    if (ret == 0)
        ret = choose_part(m, e);
    if (ret < 0)
        return ret;
    m->g->stored = m->r->stored;
    m->g->dtype = m->r->dtype;
    m->g->stored_unit = dtype_unit(m->r->stored);
    m->g->unit = dtype_unit(m->r->dtype);
    ret = make_plan(m, e);
    if (ret == 0)
        ret = take_scale(m, e);
    return ret < 0 ? ret : keep_sources(m->g, e);
}

int gather_new(const struct gather_request *r, struct gather **out, struct err *e)
{
    CLEANUP(gather_freep) struct gather *g = calloc(1, sizeof *g);
    struct making m = {.r = r, .g = g};
    int ret;

    if (!g || !(g->arena = arena_new(GATHER_MEMORY)))
        return err_nomem(e);
    ret = make(&m, e);
    if (ret == 0)
        *out = steal(&g);
    return ret;
}
