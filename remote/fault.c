/* SPDX-License-Identifier: MIT */
/* remote/fault.c - a source that delays, fails and goes stale on purpose, for tests. */
#include "remote/source.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"

struct fault_source {
    struct source base;
    struct source *inner;
    struct source_faults faults;
    atomic_ullong reads;
};

static struct fault_source *fault_of(struct source *s)
{
    return container_of(s, struct fault_source, base);
}

static int fault_code(const struct fault_source *f)
{
    return f->faults.code ? f->faults.code : EIO;
}

static int fault_read(struct source *s, uint64_t off, size_t len, void *dst,
                      struct err *e)
{
    struct fault_source *f = fault_of(s);
    uint64_t nth = atomic_fetch_add(&f->reads, 1) + 1;

    if (f->faults.delay_us)
        usleep(f->faults.delay_us);
    if (f->faults.fail_at == nth)
        return err_set(e, fault_code(f), "%s: read %" PRIu64 " fails on purpose: %s",
                       s->name, nth, strerror(fault_code(f)));
    if (f->faults.fail_from && off + len > f->faults.fail_from)
        return err_set(e, fault_code(f),
                       "%s: byte %" PRIu64 " and beyond fail on purpose: %s", s->name,
                       f->faults.fail_from, strerror(fault_code(f)));
    return source_read(f->inner, off, len, dst, e);
}

/* A mapping would lead round the damage: there is one only where reads are sound. */
static const void *fault_map(struct source *s)
{
    const struct source_faults *faults = &fault_of(s)->faults;

    if (faults->fail_at || faults->fail_from || faults->delay_us)
        return NULL;
    return source_map(fault_of(s)->inner);
}

static bool fault_resident(struct source *s, uint64_t off, size_t len)
{
    return source_resident(fault_of(s)->inner, off, len);
}

static void fault_will_need(struct source *s, uint64_t off, uint64_t len)
{
    source_will_need(fault_of(s)->inner, off, len);
}

static int fault_check(struct source *s, struct err *e)
{
    if (fault_of(s)->faults.stale)
        return err_set(e, ESTALE, "%s: stale on purpose", s->name);
    return source_check(fault_of(s)->inner, e);
}

static void fault_close(struct source *s)
{
    source_put(fault_of(s)->inner);
    free(fault_of(s));
}

/* No read_many: the wrapper then reads range by range and each one counts. */
static const struct source_ops fault_ops = {
    .name = "fault",
    .read = fault_read,
    .map = fault_map,
    .resident = fault_resident,
    .will_need = fault_will_need,
    .check = fault_check,
    .close = fault_close,
};

int source_with_faults(struct source *inner, const struct source_faults *faults,
                       struct source **out, struct err *e)
{
    CLEANUP_FREE struct fault_source *f = calloc(1, sizeof *f);

    if (!f)
        return err_nomem(e);
    TRY(source_init(&f->base, &fault_ops, inner->name, inner->size, e));
    f->base.id = inner->id;
    f->base.file_mapped = inner->file_mapped;
    f->inner = source_get(inner);
    f->faults = *faults;
    *out = &steal(&f)->base;
    return 0;
}
