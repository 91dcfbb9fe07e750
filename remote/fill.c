/* SPDX-License-Identifier: MIT */
/* remote/fill.c - one value over and over as a source, for what a format does not store. */
#include "remote/source.h"

#include <assert.h>
#include <string.h>

#include "base/err.h"

struct fill_source {
    struct source base;
    unsigned unit;
    unsigned char
        value[2 * SOURCE_FILL_MAX]; /* twice, so that it can start at any byte */
};

/* Copies what is there behind itself, twice as much every time. */
static int fill_read(struct source *s, uint64_t off, size_t len, void *dst,
                     struct err *e)
{
    const struct fill_source *f = container_of(s, struct fill_source, base);
    size_t done = MIN(len, (size_t)f->unit);

    (void)e;
    memcpy(dst, f->value + off % f->unit, done);
    while (done < len) {
        size_t part = MIN(done, len - done);

        memcpy((char *)dst + done, dst, part);
        done += part;
    }
    return 0;
}

static void fill_close(struct source *s)
{
    free(container_of(s, struct fill_source, base));
}

static const struct source_ops fill_ops = {
    .name = "fill",
    .read = fill_read,
    .close = fill_close,
};

int source_from_fill(const void *value, unsigned unit, uint64_t size,
                     struct source **out, struct err *e)
{
    CLEANUP_FREE struct fill_source *f = calloc(1, sizeof *f);

    assert(unit > 0 && unit <= SOURCE_FILL_MAX);
    if (!f)
        return err_nomem(e);
    TRY(source_init(&f->base, &fill_ops, "the fill value", size, e));
    f->unit = unit;
    memcpy(f->value, value, unit);
    memcpy(f->value + unit, value, unit);
    *out = &steal(&f)->base;
    return 0;
}
