/* SPDX-License-Identifier: MIT */
/* save/ranges.c - byte ranges in a sorted array. */
#include "save/ranges.h"

#include <errno.h>
#include <string.h>

void ranges_release(struct ranges *r)
{
    free(r->range);
    *r = (struct ranges){0};
}

void ranges_clear(struct ranges *r)
{
    r->count = 0;
}

/* The first range that ends at `at` or behind it. */
static size_t find_end(const struct ranges *r, uint64_t at)
{
    size_t low = 0, high = r->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;

        if (r->range[middle].to < at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int reserve(struct ranges *r, size_t count)
{
    size_t cap = MAX(count, r->cap * 2);
    struct range *grown;

    if (count <= r->cap)
        return 0;
    grown = reallocarray(r->range, cap, sizeof *grown);
    if (!grown)
        return -ENOMEM;
    r->range = grown;
    r->cap = cap;
    return 0;
}

/* Ranges [first, last) make room for `count` of `with`. */
static int splice(struct ranges *r, size_t first, size_t last, const struct range *with,
                  size_t count)
{
    size_t behind = r->count - last;

    if (reserve(r, first + count + behind) < 0)
        return -ENOMEM;
    if (behind)
        memmove(r->range + first + count, r->range + last, behind * sizeof *r->range);
    if (count)
        memcpy(r->range + first, with, count * sizeof *with);
    r->count = first + count + behind;
    return 0;
}

int ranges_add(struct ranges *r, uint64_t from, uint64_t to)
{
    struct range all = {from, to};
    size_t first = find_end(r, from), last = first;

    if (to <= from)
        return 0;
    for (; last < r->count && r->range[last].from <= to; last++) {
        all.from = MIN(all.from, r->range[last].from);
        all.to = MAX(all.to, r->range[last].to);
    }
    return splice(r, first, last, &all, 1);
}

int ranges_remove(struct ranges *r, uint64_t from, uint64_t to)
{
    struct range rest[2];
    size_t first = find_end(r, from), last = first, count = 0;

    if (to <= from)
        return 0;
    if (first < r->count && r->range[first].to == from)
        first = last = first + 1;
    for (; last < r->count && r->range[last].from < to; last++) {
        if (r->range[last].from < from)
            rest[count++] = (struct range){r->range[last].from, from};
        if (r->range[last].to > to)
            rest[count++] = (struct range){to, r->range[last].to};
    }
    return last == first ? 0 : splice(r, first, last, rest, count);
}

int ranges_copy(struct ranges *dst, const struct ranges *src)
{
    if (reserve(dst, src->count) < 0)
        return -ENOMEM;
    if (src->count)
        memcpy(dst->range, src->range, src->count * sizeof *src->range);
    dst->count = src->count;
    return 0;
}

bool ranges_hold(const struct ranges *r, uint64_t from, uint64_t to)
{
    struct range gap;

    return !ranges_next_gap(r, &from, to, &gap);
}

bool ranges_meet(const struct ranges *r, uint64_t from, uint64_t to)
{
    size_t i = find_end(r, from);

    if (i < r->count && r->range[i].to == from)
        i++;
    return from < to && i < r->count && r->range[i].from < to;
}

uint64_t ranges_bytes(const struct ranges *r)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < r->count; i++)
        sum += r->range[i].to - r->range[i].from;
    return sum;
}

bool ranges_next_gap(const struct ranges *r, uint64_t *at, uint64_t end,
                     struct range *gap)
{
    size_t i = find_end(r, *at);

    if (i < r->count && r->range[i].from <= *at) { /* it holds *at, or ends there */
        *at = r->range[i].to;
        i++;
    }
    if (*at >= end)
        return false;
    gap->from = *at;
    gap->to = i < r->count ? MIN(r->range[i].from, end) : end;
    *at = gap->to;
    return true;
}
