/* SPDX-License-Identifier: MIT */
/* remote/memory.c - a buffer as a source, for tests, fuzzing and small made-up files. */
#include "remote/source.h"

#include <string.h>
#include <sys/mman.h>

#include "base/err.h"

struct memory_source {
    struct source base;
    const char *data;
    void *own; /* data once more when it is ours, else NULL */
};

static struct memory_source *memory_of(struct source *s)
{
    return container_of(s, struct memory_source, base);
}

static int memory_read(struct source *s, uint64_t off, size_t len, void *dst,
                       struct err *e)
{
    (void)e;
    memcpy(dst, memory_of(s)->data + off, len);
    return 0;
}

static const void *memory_map(struct source *s)
{
    return s->size ? memory_of(s)->data : NULL;
}

static void memory_close(struct source *s)
{
    free(memory_of(s)->own);
    free(memory_of(s));
}

static const struct source_ops memory_ops = {
    .name = "memory",
    .read = memory_read,
    .map = memory_map,
    .close = memory_close,
};

int source_from_memory(const void *data, size_t len, bool own, const char *name,
                       struct source **out, struct err *e)
{
    CLEANUP_FREE void *owned = own ? (void *)(uintptr_t)data : NULL;
    CLEANUP_FREE struct memory_source *m = calloc(1, sizeof *m);

    if (!m)
        return err_nomem(e);
    TRY(source_init(&m->base, &memory_ops, name, len, e));
    m->data = data;
    m->own = steal(&owned);
    *out = &steal(&m)->base;
    return 0;
}

/* ---- whole pages ---- */

enum {
    LARGE_PAGE = 2 << 20,
    HEAP_MAX =
        128 << 10, /* less is not worth a mapping, of which there are only so many */
};

struct pages {
    struct source base;
    void *map;
    bool mapped; /* else malloc */
};

static struct pages *pages_of(struct source *s)
{
    return container_of(s, struct pages, base);
}

static int pages_read(struct source *s, uint64_t off, size_t len, void *dst,
                      struct err *e)
{
    (void)e;
    memcpy(dst, (const char *)pages_of(s)->map + off, len);
    return 0;
}

static const void *pages_map(struct source *s)
{
    return pages_of(s)->map;
}

static void pages_free(struct pages *p, size_t len)
{
    if (p->mapped)
        munmap(p->map, len);
    else
        free(p->map);
    free(p);
}

static void pages_close(struct source *s)
{
    pages_free(pages_of(s), s->size);
}

static const struct source_ops pages_ops = {
    .name = "pages",
    .read = pages_read,
    .map = pages_map,
    .close = pages_close,
};

static void *map_pages(size_t size)
{
    void *map =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (map == MAP_FAILED)
        return NULL;
    if (size >= LARGE_PAGE)
        madvise(map, size, MADV_HUGEPAGE);
    return map;
}

int source_from_pages(size_t size, struct source **out, struct err *e)
{
    struct pages *p = calloc(1, sizeof *p);

    if (!p)
        return err_nomem(e);
    p->mapped = size > HEAP_MAX;
    p->map = p->mapped ? map_pages(size) : malloc(size + 1);
    if (!p->map) {
        free(p);
        return err_nomem(e);
    }
    if (source_init(&p->base, &pages_ops, "a decoded piece", size, e) < 0) {
        pages_free(p, size);
        return -e->code;
    }
    *out = &p->base;
    return 0;
}
