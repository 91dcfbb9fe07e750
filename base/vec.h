/* SPDX-License-Identifier: MIT */
/* base/vec.h - arrays that grow as they are filled. */
#ifndef UFS_BASE_VEC_H
#define UFS_BASE_VEC_H

#include <stdlib.h>

#include "base/base.h"

/*
 * Makes room for one more element behind the `count` that the array has; `cap` is how many
 * it has room for. Both start as 0, the array as NULL, which free(3) takes. False: there is
 * no memory, and nothing has changed.
 */
#define VEC_ROOM(array, count, cap) VEC_ROOM_FOR(array, (size_t)(count) + 1, cap)

/* The same for `n` elements in all. */
#define VEC_ROOM_FOR(array, n, cap)                                                    \
    ({                                                                                 \
        size_t vec_cap = (cap);                                                        \
        void *vec_grown = vec_grow((array), (n), &vec_cap, sizeof *(array));           \
        bool vec_fits = vec_grown && (__typeof__(cap))vec_cap == vec_cap;              \
                                                                                       \
        if (vec_grown)                                                                 \
            (array) = vec_grown;                                                       \
        if (vec_fits)                                                                  \
            (cap) = (__typeof__(cap))vec_cap;                                          \
        vec_fits;                                                                      \
    })

/* Of VEC_ROOM: the array with room for n elements of `size` bytes, or NULL. */
static inline void *vec_grow(const void *array, size_t n, size_t *cap, size_t size)
{
    enum { FIRST = 16 };
    void *old = (void *)(uintptr_t)array, *grown;
    size_t want = MAX(MAX(n, *cap + *cap / 2), (size_t)FIRST);

    if (old && n <= *cap)
        return old;
    grown = reallocarray(old, want, size);
    if (grown)
        *cap = want;
    return grown;
}

#endif
