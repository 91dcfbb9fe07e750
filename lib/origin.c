/* SPDX-License-Identifier: MIT */
/* lib/origin.c - the list of tensors that every kind of origin has. */
#include "lib/origin.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/vec.h"

enum { ORIGIN_MEMORY = 1 << 30 }; /* a million tensors with names of 1 KiB */

int origin_open(const char *source, const struct origin_options *options,
                struct origin **out, struct err *e)
{
    int ret = origin_mount(source, options, out, e);

    if (ret != -ENOTTY)
        return ret;
    *e = (struct err){0};
    return origin_local(source, options, out, e);
}

void origin_close(struct origin *o)
{
    if (o)
        o->ops->close(o);
}

int origin_init(struct origin *o, const struct origin_ops *ops, struct err *e)
{
    o->ops = ops;
    o->arena = arena_new(ORIGIN_MEMORY);
    return o->arena ? 0 : err_nomem(e);
}

void origin_release(struct origin *o)
{
    arena_free(o->arena);
    free(o->row);
}

static const char *copy(struct origin *o, const char *text, size_t len, bool *failed)
{
    const char *out = text ? arena_memdup(o->arena, text, len) : NULL;

    *failed |= text && !out;
    return out;
}

int origin_add(struct origin *o, const struct row *row, struct err *e)
{
    struct row *to;
    bool failed = false;

    if (!VEC_ROOM(o->row, o->rows, o->cap))
        return err_nomem(e);
    to = &o->row[o->rows];
    *to = *row;
    to->key = copy(o, row->key, row->key_len, &failed);
    to->fault = copy(o, row->fault, row->fault ? strlen(row->fault) : 0, &failed);
    if (failed)
        return err_nomem(e);
    o->rows++;
    return 0;
}

static int by_key(const void *a, const void *b)
{
    const struct row *x = a, *y = b;
    int order = memcmp(x->key, y->key, MIN(x->key_len, y->key_len));

    return order ? order : (x->key_len > y->key_len) - (x->key_len < y->key_len);
}

void origin_sort(struct origin *o)
{
    if (o->rows)
        qsort(o->row, o->rows, sizeof *o->row, by_key);
}
