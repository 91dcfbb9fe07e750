/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_probe.c - whether masters are those of the model's copy. */
#include "index/formats/deepspeed/deepspeed_scan.h"

#include <errno.h>
#include <limits.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/ranks/float_kind.h"
#include "index/sink.h"
#include "remote/source.h"

/* The copy of a master (F32) is the master, rounded to its type. */
static bool is_copy(const unsigned char *master, const unsigned char *copy,
                    const struct float_kind *kind)
{
    double v = float_kind_of(DTYPE_F32)->load(master);
    unsigned char want[sizeof v];

    if (v != v)
        return kind->load(copy) != kind->load(copy);
    kind->store(want, v);
    return memcmp(want, copy, dtype_unit(kind->dtype)) == 0;
}

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
    const struct float_kind *kind = float_kind_of(copy->dtype);
    unsigned unit = dtype_unit(copy->dtype);

    n = MIN(n, (size_t)DS_PROBE);
    TRY(read_at(s, master, first, n, a, e));
    TRY(read_at(s, copy, from, n, b, e));
    for (size_t i = 0; i < n; i++)
        if (!is_copy(a + 4 * i, b + (size_t)unit * i, kind))
            return 0;
    return 1;
}

static bool is_near(double a, double b)
{
    double d = a > b ? a - b : b - a, m = MAX(a < 0 ? -a : a, b < 0 ? -b : b);

    return a == b || (a != a && b != b) || d <= m / 64;
}

int ds_probe_alike(struct ds_scan *s, const struct ds_place *a,
                   const struct ds_place *b, size_t n, struct err *e)
{
    unsigned char x[DS_PROBE * 8], y[DS_PROBE * 8];
    const struct float_kind *kind;
    unsigned unit = dtype_unit(a->dtype);
    size_t near = 0;

    if (a->dtype != DTYPE_F32 && a->dtype != DTYPE_BF16 && a->dtype != DTYPE_F16)
        return 1;
    kind = float_kind_of(a->dtype);
    n = MIN(n, (size_t)DS_PROBE);
    TRY(read_at(s, a, 0, n, x, e));
    TRY(read_at(s, b, 0, n, y, e));
    for (size_t i = 0; i < n; i++)
        near += is_near(kind->load(x + i * unit), kind->load(y + i * unit));
    return 2 * near >= n;
}
