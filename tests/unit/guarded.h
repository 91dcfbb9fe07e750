/* SPDX-License-Identifier: MIT */
/* tests/unit/guarded.h - memory whose last byte lies before a page that must not be touched. */
#ifndef UFS_TESTS_UNIT_GUARDED_H
#define UFS_TESTS_UNIT_GUARDED_H

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/base.h"

/* Sanitizers do not see what assembly touches; the kernel does. */
struct guarded {
    char *map;
    size_t mapped;
    unsigned char *data;
};

static inline struct guarded guarded_new(size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t room = (size + page - 1) / page * page;
    struct guarded g = {.mapped = room + page};

    g.map = mmap(NULL, g.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                 -1, 0);
    if (g.map == MAP_FAILED || mprotect(g.map + room, page, PROT_NONE) < 0)
        abort();
    g.data = (unsigned char *)g.map + room - size;
    return g;
}

static inline void guarded_free(struct guarded *g)
{
    munmap(g->map, g->mapped);
}

#endif
