/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_probe.c - whether masters are those of the model's copy. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "base/endian.h"
#include "base/err.h"
#include "remote/source.h"
#include "index/sink.h"

/* ---- one element of each ---- */

static double half_value(uint16_t h)
{
    int exponent = (h >> 10) & 31;
    double m = h & 1023, v;

    if (exponent == 31)
        v = m > 0 ? NAN : INFINITY;
    else
        v = exponent == 0 ? ldexp(m, -24) : ldexp(m + 1024, exponent - 25);
    return h & 0x8000 ? -v : v;
}

static float float_of(uint32_t bits)
{
    float f;

    memcpy(&f, &bits, sizeof f);
    return f;
}

/* The copy is the master, rounded to its type: less than half a step of it away. */
static bool is_rounded(double master, double copy, double step, double least)
{
    if (isnan(master) || isnan(copy))
        return isnan(master) && isnan(copy);
    if (isinf(copy) || isinf(master))
        return (copy > 0) == (master > 0);
    return fabs(master - copy) <= fabs(copy) * step + least;
}

static bool same_element(const unsigned char *master, const unsigned char *copy,
                         enum dtype dtype)
{
    double m = (double)float_of(get_le32(master));

    if (dtype == DTYPE_F32)
        return memcmp(master, copy, 4) == 0;
    if (dtype == DTYPE_BF16)
        return is_rounded(m, (double)float_of((uint32_t)get_le16(copy) << 16),
                          ldexp(1, -8), 0);
    return is_rounded(m, half_value(get_le16(copy)), ldexp(1, -11), ldexp(1, -25));
}

/* ---- a run of them ---- */

static int read_at(struct ds_scan *s, const struct ds_place *x, uint64_t first,
                   size_t n, void *dst, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    unsigned unit = dtype_unit(x->dtype);
    char path[PATH_MAX];
    struct file_id id;

    if (store_join(s->c->dir, x->path, path, sizeof path) < 0)
        return err_set(e, ENAMETOOLONG, "%s: the path is too long", x->path);
    if (s->c->store->ops->open(s->c->store, path, &src, e) < 0)
        return e->code == ENOENT ? err_set(e, ESTALE, "%s is gone", path) : -e->code;
    if (!sink_file_id(s->sink, x->file, &id) || !file_id_equal(&src->id, &id))
        return err_set(e, ESTALE, "%s was changed during the scan", path);
    return source_read(src, x->at + first * unit, n * unit, dst, e);
}

bool ds_probe_can(const struct ds_place *master, const struct ds_place *copy)
{
    return master->path && copy->path && master->dtype == DTYPE_F32 &&
           (copy->dtype == DTYPE_F32 || copy->dtype == DTYPE_BF16 ||
            copy->dtype == DTYPE_F16);
}

int ds_probe(struct ds_scan *s, const struct ds_place *master, uint64_t first,
             const struct ds_place *copy, uint64_t from, size_t n, struct err *e)
{
    unsigned char a[DS_PROBE * 4], b[DS_PROBE * 4];
    unsigned unit = dtype_unit(copy->dtype);

    n = MIN(n, (size_t)DS_PROBE);
    if (read_at(s, master, first, n, a, e) < 0 || read_at(s, copy, from, n, b, e) < 0)
        return -e->code;
    for (size_t i = 0; i < n; i++)
        if (!same_element(a + 4 * i, b + (size_t)unit * i, copy->dtype))
            return 0;
    return 1;
}
