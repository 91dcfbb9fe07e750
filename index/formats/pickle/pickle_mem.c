/* SPDX-License-Identifier: MIT */
/* index/formats/pickle/pickle_mem.c - memory of an unpickler: many small nodes under one limit. */
#include "index/formats/pickle/pickle_priv.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"

enum {
    FIRST_SLAB = 4096, /* the pickle of one tensor chunk fits */
    LARGEST_SLAB = 1 << 20
};

struct pmem_slab {
    struct pmem_slab *next;
    size_t size;
    _Alignas(PMEM_GRAIN) char bytes[];
};

struct pmem_large {
    struct pmem_large *next, *prev;
    _Alignas(PMEM_GRAIN) char bytes[];
};

static int over_limit(const struct pmem *m, struct err *e)
{
    return err_set(e, EBADMSG, "the object graph needs more than %" PRIu64 " bytes",
                   m->limit);
}

static bool passes_limit(const struct pmem *m, size_t size)
{
    return m->used > m->limit || size > m->limit - m->used;
}

static int slab_add(struct pmem *m, struct err *e)
{
    size_t size = m->slabs ? MIN(m->slabs->size * 2, (size_t)LARGEST_SLAB) : FIRST_SLAB;
    struct pmem_slab *slab;

    if (passes_limit(m, size))
        return over_limit(m, e);
    slab = malloc(sizeof *slab + size);
    if (!slab)
        return err_nomem(e);
    slab->next = m->slabs;
    slab->size = size;
    m->slabs = slab;
    m->used += size;
    m->at = slab->bytes;
    m->room = size;
    return 0;
}

static void large_link(struct pmem *m, struct pmem_large *l)
{
    l->prev = NULL;
    l->next = m->large;
    if (m->large)
        m->large->prev = l;
    m->large = l;
}

static void large_unlink(struct pmem *m, struct pmem_large *l)
{
    if (l->next)
        l->next->prev = l->prev;
    if (l->prev)
        l->prev->next = l->next;
    else
        m->large = l->next;
}

static void *large_alloc(struct pmem *m, size_t size, struct err *e)
{
    struct pmem_large *l;

    if (size > SIZE_MAX / 2 || passes_limit(m, size)) {
        over_limit(m, e);
        return NULL;
    }
    l = malloc(sizeof *l + size);
    if (!l) {
        err_nomem(e);
        return NULL;
    }
    large_link(m, l);
    m->used += size;
    return l->bytes;
}

void *pmem_alloc(struct pmem *m, size_t size, struct err *e)
{
    size_t class = (MAX(size, (size_t)1) + PMEM_GRAIN - 1) / PMEM_GRAIN;
    void *p;

    if (size > PMEM_SMALL)
        return large_alloc(m, size, e);
    p = m->free[class];
    if (p) {
        memcpy(&m->free[class], p, sizeof(void *));
        return p;
    }
    if (m->room < class * PMEM_GRAIN && slab_add(m, e) < 0)
        return NULL;
    p = m->at;
    m->at += class * PMEM_GRAIN;
    m->room -= class * PMEM_GRAIN;
    return p;
}

void pmem_free(struct pmem *m, void *p, size_t size)
{
    size_t class = (MAX(size, (size_t)1) + PMEM_GRAIN - 1) / PMEM_GRAIN;

    if (!p)
        return;
    if (size > PMEM_SMALL) {
        struct pmem_large *l = container_of(p, struct pmem_large, bytes);

        large_unlink(m, l);
        m->used -= size;
        free(l);
        return;
    }
    memcpy(p, &m->free[class], sizeof(void *));
    m->free[class] = p;
}

/* Both sizes large: realloc, which moves pages and does not copy them. */
static void *large_resize(struct pmem *m, void *p, size_t old_size, size_t size,
                          struct err *e)
{
    struct pmem_large *l = container_of(p, struct pmem_large, bytes), *bigger;

    if (size > SIZE_MAX / 2 || (size > old_size && passes_limit(m, size - old_size))) {
        over_limit(m, e);
        return NULL;
    }
    large_unlink(m, l);
    bigger = realloc(l, sizeof *l + size);
    large_link(m, bigger ? bigger : l);
    if (!bigger) {
        err_nomem(e);
        return NULL;
    }
    m->used += size - old_size; /* wraps back when it shrinks */
    return bigger->bytes;
}

void *pmem_resize(struct pmem *m, void *p, size_t old_size, size_t size, struct err *e)
{
    void *fresh;

    if (old_size > PMEM_SMALL && size > PMEM_SMALL)
        return large_resize(m, p, old_size, size, e);
    fresh = pmem_alloc(m, size, e);
    if (!fresh)
        return NULL;
    if (p)
        memcpy(fresh, p, MIN(old_size, size));
    pmem_free(m, p, old_size);
    return fresh;
}

void pmem_release(struct pmem *m)
{
    struct pmem_slab *slab = m->slabs, *next_slab;
    struct pmem_large *large = m->large, *next_large;

    for (; slab; slab = next_slab) {
        next_slab = slab->next;
        free(slab);
    }
    for (; large; large = next_large) {
        next_large = large->next;
        free(large);
    }
    *m = (struct pmem){.limit = m->limit};
}
