/* SPDX-License-Identifier: MIT */
/* save/box.c - boxes cut out of windows, in the order of both. */
#include "save/box.h"

#include <string.h>

/* How many elements of the box stand before element `at` of the tensor. */
static uint64_t rank_of(const struct box *b, uint64_t at)
{
    uint64_t rank = 0, below = 1, inner = 1;

    for (uint32_t k = 0; k < b->units->nd; k++) {
        below *= b->units->dim[k];
        inner *= b->size[k];
    }
    if (b->units->nd == 0)
        return at > 0;
    for (uint32_t k = 0; k < b->units->nd; k++) {
        uint64_t i;

        below /= b->units->dim[k];
        inner /= b->size[k];
        i = at / below;
        at %= below;
        if (i < b->start[k])
            return rank;
        if (i - b->start[k] >= b->size[k])
            return rank + b->size[k] * inner;
        rank += (i - b->start[k]) * inner;
    }
    return rank;
}

static bool is_empty(const struct box *b)
{
    for (uint32_t k = 0; k < b->units->nd; k++)
        if (b->size[k] == 0 || b->units->dim[k] == 0)
            return true;
    return false;
}

void box_overlap(const struct box *b, uint64_t off, uint64_t window_len, uint64_t *at,
                 uint64_t *len)
{
    uint64_t first, last;

    *at = *len = 0;
    if (is_empty(b))
        return;
    first = rank_of(b, off / b->unit);
    last = rank_of(b, (off + window_len) / b->unit);
    *at = first * b->unit;
    *len = (last - first) * b->unit;
}

/*
 * Elements of the box that lie together in the tensor: all axes behind `*axis` are whole,
 * so that a run is a row of this one.
 */
static uint64_t run_of(const struct box *b, uint32_t *axis)
{
    uint32_t k = b->units->nd;
    uint64_t run = 1;

    while (k > 0) {
        k--;
        run *= b->size[k];
        if (b->size[k] != b->units->dim[k])
            break;
    }
    *axis = k;
    return run;
}

/* The place in the tensor of run number n. */
static uint64_t run_place(const struct box *b, uint32_t axis, uint64_t n)
{
    uint64_t place = 0, step = 1;

    for (uint32_t k = b->units->nd; k-- > 0;) {
        uint64_t i = b->start[k];

        if (k < axis) {
            i += n % b->size[k];
            n /= b->size[k];
        }
        place += i * step;
        step *= b->units->dim[k];
    }
    return place;
}

const void *box_take(const struct box *b, uint64_t off, const void *window, uint64_t at,
                     uint64_t len, void *scratch)
{
    const unsigned char *from = window;
    unsigned char *to = scratch;
    uint32_t axis;
    uint64_t run = run_of(b, &axis) * b->unit, done = 0;

    while (done < len) {
        uint64_t n = (at + done) / run, skip = (at + done) % run;
        uint64_t place = run_place(b, axis, n) * b->unit + skip - off;
        uint64_t part = MIN(run - skip, len - done);

        if (part == len)
            return from + place;
        memcpy(to + done, from + place, (size_t)part);
        done += part;
    }
    return scratch;
}

void box_spread(const struct box *b, uint64_t off, void *window, uint64_t at,
                uint64_t len, const void *bytes)
{
    const unsigned char *from = bytes;
    unsigned char *to = window;
    uint32_t axis;
    uint64_t run = run_of(b, &axis) * b->unit, done = 0;

    while (done < len) {
        uint64_t n = (at + done) / run, skip = (at + done) % run;
        uint64_t place = run_place(b, axis, n) * b->unit + skip - off;
        uint64_t part = MIN(run - skip, len - done);

        memcpy(to + place, from + done, (size_t)part);
        done += part;
    }
}

uint64_t box_run(const struct box *b)
{
    uint32_t axis;

    return run_of(b, &axis) * b->unit;
}

uint64_t box_place(const struct box *b, uint64_t at)
{
    uint32_t axis;
    uint64_t run = run_of(b, &axis) * b->unit;

    return run_place(b, axis, at / run) * b->unit + at % run;
}

void box_span(const struct box *b, uint64_t *first, uint64_t *end)
{
    uint64_t step = 1, low = 0, high = 0;

    *first = *end = 0;
    if (is_empty(b))
        return;
    for (uint32_t k = b->units->nd; k-- > 0;) {
        low += b->start[k] * step;
        high += (b->start[k] + b->size[k] - 1) * step;
        step *= b->units->dim[k];
    }
    *first = low * b->unit;
    *end = (high + 1) * b->unit;
}
