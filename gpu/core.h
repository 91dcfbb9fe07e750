/* SPDX-License-Identifier: MIT */
/* gpu/core.h - boxes of strided elements and the kernel's body, for cc and for nvcc. */
#ifndef UFS_GPU_CORE_H
#define UFS_GPU_CORE_H

#include "gpu/cast_core.h"

#define CORE_DIMS 8            /* after dimensions were merged; more are unrolled */
#define CORE_TILE_BYTES 32768u /* of a result: one block's unit of work */
#define CORE_LANES_LOG2 5u     /* at most so many lanes side by side on one row */

/* As index/chunk.h has them. */
#define CORE_SWAP 1u
#define CORE_CONJ 2u
#define CORE_NEG 4u

/*
 * For each index (i0, i1, ...): the element at src + sum(i * src_step) becomes the one at
 * dst + sum(i * dst_step). Addresses are of where it runs. The last dimension is
 * contiguous on both sides; its elements are bytes where nothing is done to them.
 */
struct core_box {
    uint64_t src, dst;
    uint64_t count[CORE_DIMS]; /* outermost first */
    int64_t src_step[CORE_DIMS];
    uint64_t dst_step[CORE_DIMS];
    uint64_t scale;  /* address of a cast_scale, 0: none */
    uint64_t result; /* address of the result's element 0, for the scale */
    uint32_t nd;
    uint8_t from, to; /* enum cast_kind; CAST_NONE: no cast */
    uint8_t flags;    /* CORE_SWAP, ... */
    uint8_t
        component; /* bytes of an element at the source, if anything is done to it */

    /* What box_finish() makes of it. */
    uint8_t src_unit, dst_unit; /* bytes that a lane moves at a time */
    uint8_t bytewise;           /* elements do not lie at multiples of their size */
    uint8_t lanes_log2;         /* lanes on a row */
    uint32_t tiles_per_row, rows_per_tile; /* one of them is 1 */
    uint32_t units_per_tile;               /* of a row that is cut */
    uint64_t rows, run;                    /* run: units of a row */
    uint64_t first_tile;                   /* of all tiles of the boxes before */
};

/* Memory of any type, whatever it is elsewhere. */
typedef uint8_t __attribute__((may_alias)) core_u8;
typedef uint16_t __attribute__((may_alias)) core_u16;
typedef uint32_t __attribute__((may_alias)) core_u32;
typedef uint64_t __attribute__((may_alias)) core_u64;
#ifdef __CUDACC__
typedef uint4 core_u128;
#else
typedef struct __attribute__((may_alias, aligned(16))) {
    uint64_t low, high;
} core_u128;
#endif

/* ---- where things lie ---- */

/* Addresses of row `row`. */
CORE_FN void core_place(const struct core_box *b, uint64_t row, uint64_t *src,
                        uint64_t *dst)
{
    uint64_t from = b->src, to = b->dst;

    for (uint32_t k = b->nd - 1; k-- > 0;) {
        uint64_t left = k ? cast_divide(row, b->count[k]) : 0;
        uint64_t i = row - left * b->count[k];

        from += i * (uint64_t)b->src_step[k];
        to += i * b->dst_step[k];
        row = left;
    }
    *src = from;
    *dst = to;
}

/* The box that a tile is of. */
CORE_FN uint32_t core_find(const struct core_box *box, uint32_t n, uint64_t tile)
{
    uint32_t low = 0, high = n;

    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;

        if (box[middle].first_tile <= tile)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* ---- elements ---- */

CORE_FN uint64_t core_load(uint64_t at, unsigned n, bool bytewise)
{
    uint64_t v = 0;

    if (bytewise) {
        for (unsigned i = 0; i < n; i++)
            v |= (uint64_t)((const core_u8 *)(uintptr_t)at)[i] << 8 * i;
        return v;
    }
    if (n == 1)
        return *(const core_u8 *)(uintptr_t)at;
    if (n == 2)
        return *(const core_u16 *)(uintptr_t)at;
    return n == 4 ? *(const core_u32 *)(uintptr_t)at : *(const core_u64 *)(uintptr_t)at;
}

CORE_FN void core_store(uint64_t at, unsigned n, bool bytewise, uint64_t v)
{
    if (bytewise) {
        for (unsigned i = 0; i < n; i++)
            ((core_u8 *)(uintptr_t)at)[i] = (uint8_t)(v >> 8 * i);
    } else if (n == 1) {
        *(core_u8 *)(uintptr_t)at = (uint8_t)v;
    } else if (n == 2) {
        *(core_u16 *)(uintptr_t)at = (uint16_t)v;
    } else if (n == 4) {
        *(core_u32 *)(uintptr_t)at = (uint32_t)v;
    } else {
        *(core_u64 *)(uintptr_t)at = v;
    }
}

CORE_FN uint64_t core_swapped(uint64_t v, unsigned n)
{
    uint64_t r = 0;

    for (unsigned i = 0; i < n; i++, v >>= 8)
        r = r << 8 | (v & 0xff);
    return r;
}

/* Swapped first, then the sign flipped: of every component, of the odd ones, of both. */
CORE_FN uint64_t core_changed(const struct core_box *b, uint64_t v, uint64_t column)
{
    uint64_t sign = (uint64_t)1 << (8 * b->component - 1);

    if (b->flags & CORE_SWAP)
        v = core_swapped(v, b->component);
    if (b->flags & CORE_NEG)
        v ^= sign;
    if ((b->flags & CORE_CONJ) && (column & 1))
        v ^= sign;
    return v;
}

/* ---- the kernel's body ---- */

/* The part of a row that one lane does: every step-th unit of [first, end). */
struct core_span {
    uint64_t src, dst; /* addresses of unit 0 of the row */
    uint64_t first, end, step;
};

/* Four loads are under way before the first store. */
#define CORE_COPY(type)                                                                \
    do {                                                                               \
        const type *from = (const type *)(uintptr_t)s->src;                            \
        type *to = (type *)(uintptr_t)s->dst;                                          \
        uint64_t i = s->first;                                                         \
                                                                                       \
        for (; i + 3 * s->step < s->end; i += 4 * s->step) {                           \
            type a = from[i], b = from[i + s->step], c = from[i + 2 * s->step],        \
                 d = from[i + 3 * s->step];                                            \
                                                                                       \
            to[i] = a;                                                                 \
            to[i + s->step] = b;                                                       \
            to[i + 2 * s->step] = c;                                                   \
            to[i + 3 * s->step] = d;                                                   \
        }                                                                              \
        for (; i < s->end; i += s->step)                                               \
            to[i] = from[i];                                                           \
    } while (0)

CORE_FN void core_copy(unsigned unit, const struct core_span *s)
{
    if (unit == 16)
        CORE_COPY(core_u128);
    else if (unit == 8)
        CORE_COPY(core_u64);
    else if (unit == 4)
        CORE_COPY(core_u32);
    else if (unit == 2)
        CORE_COPY(core_u16);
    else
        CORE_COPY(core_u8);
}

CORE_FN void core_elements(const struct core_box *b, const struct core_span *s)
{
    const struct cast_scale *scale = (const struct cast_scale *)(uintptr_t)b->scale;
    uint64_t base = scale ? (s->dst - b->result) / b->dst_unit : 0, until = 0, count;
    float factor = 1;

    for (uint64_t i = s->first; i < s->end; i += s->step) {
        uint64_t v = core_load(s->src + i * b->src_unit, b->src_unit, b->bytewise);

        if (b->flags)
            v = core_changed(b, v, i);
        if (scale && i >= until) {
            factor = cast_scale_at(scale, base + i, &count);
            until = count > UINT64_MAX - i ? UINT64_MAX : i + count;
        }
        if (b->from != CAST_NONE)
            v = cast_one(v, b->from, b->to, scale != 0, factor);
        core_store(s->dst + i * b->dst_unit, b->dst_unit, b->bytewise, v);
    }
}

CORE_FN void core_span_run(const struct core_box *b, const struct core_span *s)
{
    if (b->from == CAST_NONE && !b->flags)
        core_copy(b->dst_unit, s);
    else
        core_elements(b, s);
}

/*
 * What lane `lane` of `lanes` (a power of two, 32 or more) does of tile `tile` of the box.
 * Lanes write disjoint bytes and never talk to each other: any order gives the same.
 */
CORE_FN void core_tile(const struct core_box *b, uint64_t tile, uint32_t lane,
                       uint32_t lanes)
{
    uint32_t side = 1u << b->lanes_log2; /* lanes side by side on a row */
    uint64_t row = tile * b->rows_per_tile + lane / side;
    uint64_t end = (tile + 1) * b->rows_per_tile;
    struct core_span s;

    if (b->tiles_per_row > 1) { /* a long row, cut in pieces */
        row = cast_divide(tile, b->tiles_per_row);
        s.first = (tile - row * b->tiles_per_row) * b->units_per_tile;
        s.end = s.first + b->units_per_tile;
        s.end = s.end < b->run ? s.end : b->run;
        s.first += lane;
        s.step = lanes;
        core_place(b, row, &s.src, &s.dst);
        core_span_run(b, &s);
        return;
    }
    end = end < b->rows ? end : b->rows;
    s.first = lane & (side - 1);
    s.end = b->run;
    s.step = side;
    for (; row < end; row += lanes / side) {
        core_place(b, row, &s.src, &s.dst);
        core_span_run(b, &s);
    }
}

#endif
