/* SPDX-License-Identifier: MIT */
/* base/arena.h - allocate many, free once, never beyond a ceiling. */
#ifndef UFS_BASE_ARENA_H
#define UFS_BASE_ARENA_H

#include "base/base.h"

struct arena;

/* An empty arena that refuses to hold more than `ceiling` bytes; NULL: out of memory. */
struct arena *arena_new(size_t ceiling);

void arena_free(struct arena *a);

/* For CLEANUP(). */
void arena_freep(struct arena **a);

/* `size` zeroed bytes aligned for any type, or NULL: out of memory or over the ceiling. */
void *arena_alloc(struct arena *a, size_t size);

/* The same for an array; NULL as well when count * size overflows. */
void *arena_array(struct arena *a, size_t count, size_t size);

/* A copy of `len` bytes with a NUL behind. */
char *arena_memdup(struct arena *a, const void *data, size_t len);

/* Bytes handed out so far. */
size_t arena_used(const struct arena *a);

#endif
