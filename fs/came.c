/* SPDX-License-Identifier: MIT */
/* fs/came.c - which bytes of a file that is written have come, and which were refused. */
#include "fs/came.h"

#include <stdlib.h>

struct came *came_new(void)
{
    struct came *c = calloc(1, sizeof *c);

    if (c)
        c->refs = 1;
    return c;
}

struct came *came_get(struct came *c)
{
    c->refs++;
    return c;
}

void came_put(struct came *c)
{
    if (c && --c->refs == 0)
        free(c);
}

void came_lose(struct came *c, int code, uint64_t from, uint64_t to, uint64_t size)
{
    if (to == UINT64_MAX)
        to = MAX(from, size); /* what comes behind it comes anew */
    c->lost_from = c->lost ? MIN(c->lost_from, from) : from;
    c->lost_to = c->lost ? MAX(c->lost_to, to) : to;
    c->lost = code;
}

void came_wrote(struct came *c, uint64_t from, uint64_t to)
{
    c->copied = false;
    if (c->lost && from <= c->lost_from && to > c->lost_from)
        c->lost_from = to;
    if (c->lost_from >= c->lost_to)
        c->lost = 0;
    if (from <= c->prefix)
        c->prefix = MAX(c->prefix, to);
}

void came_cut(struct came *c, uint64_t size)
{
    c->copied = false;
    if (size <= c->lost_from)
        c->lost = 0;
    c->prefix = MIN(c->prefix, size);
}
