/* SPDX-License-Identifier: MIT */
/* tests/kernels/random_plan.c - random plans and the bytes that they must give. */
#include "random_plan.h"

#include <string.h>

/* xorshift64*: good enough, and the same everywhere. */
uint64_t random_next(struct random *r)
{
    r->state ^= r->state >> 12;
    r->state ^= r->state << 25;
    r->state ^= r->state >> 27;
    return r->state * 2685821657736338717u;
}

uint64_t random_below(struct random *r, uint64_t n)
{
    return (random_next(r) >> 11) % n;
}

bool random_one_in(struct random *r, uint64_t n)
{
    return random_below(r, n) == 0;
}

static void *must(void *p)
{
    if (!p)
        abort();
    return p;
}

/* Up to 5 dimensions; a few of 1, now and then one of 0. */
static void make_shape(struct random_plan *p, struct random *r, uint64_t most)
{
    static const unsigned units[] = {1, 2, 4, 8, 16};

    p->unit = units[random_below(r, ARRAY_SIZE(units))];
    p->units.nd = (uint32_t)random_below(r, 6);
    p->elements = 1;
    for (uint32_t k = 0; k < p->units.nd; k++) {
        uint64_t room = most / p->elements + 1, dim;

        dim = k + 1 == p->units.nd ? room : MIN(room, 24);
        dim = random_one_in(r, 6) ? 1 : 1 + random_below(r, dim);
        p->units.dim[k] = dim;
        p->elements *= dim;
    }
    if (p->units.nd && random_one_in(r, 50)) {
        p->units.dim[random_below(r, p->units.nd)] = 0;
        p->elements = 0;
    }
    p->bytes = p->elements * p->unit;
}

static struct box *add_box(struct random_plan *p, const struct box *like)
{
    p->box[p->n] = *like;
    return &p->box[p->n++];
}

/* Cuts box i in two. */
static void split(struct random_plan *p, struct random *r, size_t i)
{
    uint32_t d = (uint32_t)random_below(r, p->units.nd);
    uint64_t at;
    struct box *b;

    if (p->box[i].size[d] < 2)
        return;
    at = 1 + random_below(r, p->box[i].size[d] - 1);
    b = add_box(p, &p->box[i]);
    b->start[d] += at;
    b->size[d] -= at;
    p->box[i].size[d] = at;
}

/* Cuts it in many equal slices, the last one shorter: what shards look like. */
static void slice(struct random_plan *p, struct random *r, size_t i)
{
    uint32_t d = (uint32_t)random_below(r, p->units.nd);
    uint64_t size = p->box[i].size[d], each = 1 + random_below(r, size);

    if (size / each > 16)
        return;
    for (uint64_t at = each; at < size; at += each) {
        struct box *b = add_box(p, &p->box[i]);

        b->start[d] += at;
        b->size[d] = MIN(each, size - at);
    }
    p->box[i].size[d] = MIN(each, size);
}

static void set_range(struct box *b, const struct box *in, uint32_t d, uint64_t from,
                      uint64_t to)
{
    b->start[d] = in->start[d] + from;
    b->size[d] = to - from;
}

/* Five boxes round a middle one: no straight cut separates them. */
static void pinwheel(struct random_plan *p, struct random *r, size_t i)
{
    uint32_t x = (uint32_t)random_below(r, p->units.nd),
             y = (uint32_t)random_below(r, p->units.nd);
    const struct box in = p->box[i];
    uint64_t w = in.size[x], h = in.size[y], x1, x2, y1, y2;

    if (x == y || w < 3 || h < 3)
        return;
    x1 = 1 + random_below(r, w - 2);
    x2 = x1 + 1 + random_below(r, w - x1 - 1);
    y1 = 1 + random_below(r, h - 2);
    y2 = y1 + 1 + random_below(r, h - y1 - 1);
    set_range(&p->box[i], &in, x, x1, x2);
    set_range(&p->box[i], &in, y, y1, y2);
    set_range(add_box(p, &in), &in, x, 0, x1);
    set_range(&p->box[p->n - 1], &in, y, 0, y2);
    set_range(add_box(p, &in), &in, x, 0, x2);
    set_range(&p->box[p->n - 1], &in, y, y2, h);
    set_range(add_box(p, &in), &in, x, x2, w);
    set_range(&p->box[p->n - 1], &in, y, y1, h);
    set_range(add_box(p, &in), &in, x, x1, w);
    set_range(&p->box[p->n - 1], &in, y, 0, y1);
}

static void make_boxes(struct random_plan *p, struct random *r)
{
    uint64_t cuts = p->units.nd && p->elements ? random_below(r, 12) : 0;

    p->n = 1;
    p->box[0] = (struct box){.source = 0};
    memcpy(p->box[0].size, p->units.dim, p->units.nd * sizeof(uint64_t));
    for (; cuts && p->n < MAX_BOXES - 40; cuts--) {
        size_t i = random_below(r, p->n);

        if (random_one_in(r, 3))
            pinwheel(p, r, i);
        else if (random_one_in(r, 3))
            slice(p, r, i);
        else
            split(p, r, i);
    }
    for (uint64_t empty = random_below(r, 4); p->units.nd && empty; empty--) {
        struct box *b = add_box(p, &p->box[random_below(r, p->n)]);
        uint32_t d = (uint32_t)random_below(r, p->units.nd);

        b->start[d] += random_below(r, b->size[d] + 1);
        b->size[d] = 0;
    }
    for (size_t i = p->n; i > 1; i--) {
        size_t k = random_below(r, i);
        struct box swap = p->box[k];

        p->box[k] = p->box[i - 1];
        p->box[i - 1] = swap;
    }
}

/* Gives the box a place at the end of a source: order, direction and gaps at random. */
static void place_box(struct random_plan *p, struct random *r, struct box *b)
{
    uint32_t order[SHAPE_MAX_DIMS], nd = p->units.nd;
    uint64_t extent = p->unit, base, low = 0;
    bool plain = !random_one_in(r, 3);

    for (uint32_t k = 0; k < nd; k++) {
        uint32_t at = plain ? k : (uint32_t)random_below(r, k + 1);

        order[k] = order[at];
        order[at] = k;
    }
    for (uint32_t k = nd; k-- > 0;) {
        uint32_t d = order[k];
        uint64_t step = extent;

        if (!plain && random_one_in(r, 4))
            step += random_below(r, 9);
        if (!plain && random_one_in(r, 20))
            step = 0;
        b->place.step[d] = (int64_t)step;
        if (!b->size[d])
            continue;
        if (!plain && random_one_in(r, 4)) {
            b->place.step[d] = -(int64_t)step;
            low += step * (b->size[d] - 1);
        }
        extent = MAX(extent, step * (b->size[d] - 1) + extent);
    }
    b->source = (unsigned)random_below(r, SOURCES);
    base = p->source_size[b->source] + (random_one_in(r, 2) ? random_below(r, 7) : 0);
    b->place.base = base + low;
    p->source_size[b->source] = base + extent;
}

static void make_flags(struct random_plan *p, struct random *r)
{
    unsigned half = p->unit > 1 ? p->unit / 2 : 1;
    bool complex = p->unit == 16 || (p->unit > 1 && random_one_in(r, 2));
    uint8_t flags = random_one_in(r, 2) ? 0 : (uint8_t)random_below(r, 8);

    p->component = complex ? half : p->unit;
    if (!complex)
        flags &= (uint8_t)~CHUNK_CONJ;
    for (size_t i = 0; i < p->n; i++)
        p->box[i].place.flags = random_one_in(r, 8) ? 0 : flags;
}

static void fill_sources(struct random_plan *p, struct random *r)
{
    for (unsigned s = 0; s < SOURCES; s++) {
        p->source[s] = must(malloc(p->source_size[s] + !p->source_size[s]));
        p->used[s] = must(calloc(1, p->source_size[s] + 1));
        for (uint64_t i = 0; i < p->source_size[s]; i++)
            p->source[s][i] = (unsigned char)(random_next(r) >> 32);
    }
}

/* One byte of an element, by the definition of the flags. */
static unsigned char element_byte(const struct random_plan *p, const struct box *b,
                                  const unsigned char *element, unsigned i)
{
    unsigned component = i / p->component, byte = i % p->component;
    unsigned from = b->place.flags & CHUNK_SWAP ? p->component - 1 - byte : byte;
    unsigned char v = element[component * p->component + from];

    if (byte == p->component - 1) {
        if (b->place.flags & CHUNK_CONJ && component % 2)
            v ^= 0x80;
        if (b->place.flags & CHUNK_NEG)
            v ^= 0x80;
    }
    return v;
}

/* The tensor, element by element and byte by byte. */
static void fill_box(struct random_plan *p, size_t which)
{
    const struct box *b = &p->box[which];
    uint64_t volume = 1;

    for (uint32_t k = 0; k < p->units.nd; k++)
        volume *= b->size[k];
    for (uint64_t n = 0; n < volume; n++) {
        uint64_t rest = n, to = 0, stride = 1;
        int64_t from = (int64_t)b->place.base;

        for (uint32_t k = p->units.nd; k-- > 0; stride *= p->units.dim[k]) {
            uint64_t i = rest % b->size[k];

            rest /= b->size[k];
            to += (b->start[k] + i) * stride;
            from += (int64_t)i * b->place.step[k];
        }
        p->owner[to] = which;
        for (unsigned i = 0; i < p->unit; i++) {
            p->tensor[to * p->unit + i] =
                element_byte(p, b, p->source[b->source] + from, i);
            p->used[b->source][from + i] = 1;
        }
    }
}

void random_plan_make(struct random_plan *p, struct random *r, uint64_t most)
{
    memset(p, 0, sizeof *p);
    make_shape(p, r, most);
    make_boxes(p, r);
    for (size_t i = 0; i < p->n; i++)
        place_box(p, r, &p->box[i]);
    make_flags(p, r);
    fill_sources(p, r);
    p->tensor = must(malloc(p->bytes + !p->bytes));
    p->owner = must(calloc(p->elements + 1, sizeof *p->owner));
    for (uint64_t i = 0; i < p->elements; i++)
        p->owner[i] = SIZE_MAX;
    for (size_t i = 0; i < p->n; i++)
        fill_box(p, i);
}

void random_plan_release(struct random_plan *p)
{
    for (unsigned s = 0; s < SOURCES; s++) {
        free(p->source[s]);
        free(p->used[s]);
    }
    free(p->tensor);
    free(p->owner);
}
