/* SPDX-License-Identifier: MIT */
/* base/base.h - attributes and cleanup macros that every room uses. */
#ifndef UFS_BASE_BASE_H
#define UFS_BASE_BASE_H

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#define PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define UNUSED __attribute__((unused))
#define MUST_USE __attribute__((warn_unused_result))
#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#define container_of(ptr, type, member)                                                \
    ((type *)(void *)((char *)(ptr)-offsetof(type, member)))

/* Runs fn(&variable) when the variable goes out of scope. */
#define CLEANUP(fn) __attribute__((cleanup(fn)))
#define CLEANUP_FREE CLEANUP(cleanup_free)
#define CLEANUP_FD CLEANUP(cleanup_fd)

static inline void cleanup_free(void *p)
{
    free(*(void **)p);
}

/* Closes *fd unless it is negative. */
static inline void cleanup_fd(const int *fd)
{
    if (*fd >= 0)
        close(*fd);
}

/* Takes a pointer out of a variable that would free it. */
#define steal(p)                                                                       \
    ({                                                                                 \
        typeof(*(p)) steal_value_ = *(p);                                              \
        *(p) = NULL;                                                                   \
        steal_value_;                                                                  \
    })

static inline int steal_fd(int *fd)
{
    int value = *fd;

    *fd = -1;
    return value;
}

#endif
