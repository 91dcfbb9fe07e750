/* SPDX-License-Identifier: MIT */
/* base/arena.c - allocate many, free once, never beyond a ceiling. */
#include "base/arena.h"

#include <string.h>

enum {
    ALIGN = sizeof(max_align_t) < 16 ? 16 : _Alignof(max_align_t),
    FIRST_CHUNK = 4096,      /* most scans of one small file fit */
    LARGEST_CHUNK = 1 << 20, /* beyond that, doubling only wastes the last one's tail */
};

struct chunk {
    struct chunk *next;
    size_t size, used; /* of bytes[] */
    _Alignas(16) unsigned char bytes[];
};

struct arena {
    struct chunk *current; /* head of the list of all chunks */
    size_t ceiling, used, next_chunk;
};

struct arena *arena_new(size_t ceiling)
{
    struct arena *a = calloc(1, sizeof *a);

    if (a) {
        a->ceiling = ceiling;
        a->next_chunk = FIRST_CHUNK;
    }
    return a;
}

void arena_free(struct arena *a)
{
    struct chunk *next;

    if (!a)
        return;
    for (struct chunk *c = a->current; c; c = next) {
        next = c->next;
        free(c);
    }
    free(a);
}

void arena_freep(struct arena **a)
{
    arena_free(*a);
    *a = NULL;
}

/* A zeroed chunk; `size` is bounded by the ceiling, but that may be SIZE_MAX. */
static struct chunk *chunk_new(size_t size)
{
    struct chunk *c;
    size_t total;

    if (__builtin_add_overflow(size, sizeof *c, &total))
        return NULL;
    c = calloc(1, total);
    if (c)
        c->size = size;
    return c;
}

/* A chunk with room for `size`: an own one behind the current for what is large. */
static struct chunk *chunk_for(struct arena *a, size_t size)
{
    bool large = size > a->next_chunk / 4;
    struct chunk *c = chunk_new(large ? size : a->next_chunk);

    if (!c)
        return NULL;
    if (large && a->current) {
        c->next = a->current->next;
        a->current->next = c;
        return c;
    }
    c->next = a->current;
    a->current = c;
    if (!large && a->next_chunk < LARGEST_CHUNK)
        a->next_chunk *= 2;
    return c;
}

void *arena_alloc(struct arena *a, size_t size)
{
    struct chunk *c = a->current;
    size_t room;
    void *p;

    if (__builtin_add_overflow(size ? size : 1, (size_t)ALIGN - 1, &room))
        return NULL;
    room &= ~((size_t)ALIGN - 1);
    if (room > a->ceiling - a->used)
        return NULL;
    if (!c || room > c->size - c->used)
        c = chunk_for(a, room);
    if (!c)
        return NULL;
    p = c->bytes + c->used;
    c->used += room;
    a->used += room;
    return p;
}

void *arena_array(struct arena *a, size_t count, size_t size)
{
    size_t total;

    if (__builtin_mul_overflow(count, size, &total))
        return NULL;
    return arena_alloc(a, total);
}

char *arena_memdup(struct arena *a, const void *data, size_t len)
{
    char *p = len < SIZE_MAX ? arena_alloc(a, len + 1) : NULL;

    if (p && len > 0)
        memcpy(p, data, len);
    return p;
}

size_t arena_used(const struct arena *a)
{
    return a->used;
}
