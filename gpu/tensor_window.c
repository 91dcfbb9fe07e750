/* SPDX-License-Identifier: MIT */
/* gpu/tensor_window.c - windows of a tensor's bytes, copied (and cast) into a buffer. */
#include "gpu/tensor_priv.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "base/pool.h"
#include "gpu/cast.h"
#include "gpu/fetch.h"
#include "remote/source.h"

/* Longer windows are filled piece by piece, so that memory stays bounded. */
enum { WINDOW_MAX = 4 << 20 };

/* The byte of the tensor behind the last one of a chunk. */
static uint64_t op_end(const struct plan_op *op)
{
    uint64_t end = op->dst + op->run;

    for (uint32_t k = 0; k < op->nloops; k++)
        end += (op->loop[k].count - 1) * op->loop[k].dst_step;
    return end;
}

/* Tells of a decoded copy when its reader is through with it. */
static void put_source(const struct cut *c, size_t n)
{
    const struct resolved *r = atomic_load(&c->t->resolved[c->chunk[n]]);

    if (c->done && c->src[n] && r && !r->src && op_end(&r->op) <= c->end)
        atomic_store(&c->src[n]->used_up, true);
    source_put(c->src[n]);
}

void cut_release(struct cut *c)
{
    for (size_t n = 0; c->src && n < c->n; n++)
        put_source(c, n);
    free(c->chunk);
    free(c->src);
    run_list_release(&c->runs);
}

static int note_chunk(void *user, size_t i)
{
    struct cut *c = user;

    if (c->n == c->cap) {
        size_t cap = c->cap ? c->cap * 2 : 16;
        size_t *grown = reallocarray(c->chunk, cap, sizeof *grown);

        if (!grown)
            return -ENOMEM;
        c->chunk = grown;
        c->cap = cap;
    }
    c->chunk[c->n++] = i;
    return 0;
}

static int resolve_nth(void *user, size_t n, struct err *e)
{
    struct cut *c = user;

    return tensor_resolve(c->t, c->chunk[n], &c->src[n], e);
}

static bool all_known(const struct cut *c)
{
    for (size_t n = 0; n < c->n; n++) {
        const struct resolved *r =
            atomic_load_explicit(&c->t->resolved[c->chunk[n]], memory_order_acquire);
        if (!r || !r->src)
            return false;
    }
    return true;
}

int cut_begin(struct cut *c, uint64_t off, uint64_t len, struct err *e)
{
    int ret = plan_touched(c->t->plan, off, len, note_chunk, c);

    c->end = off + len;
    c->src = calloc(c->n + 1, sizeof *c->src);
    if (ret < 0 || !c->src)
        return err_nomem(e);
    /* What has to be read or decoded first is so side by side. */
    ret = pool_each(c->n > 1 && !all_known(c) ? c->t->env.pool : NULL, c->n,
                    resolve_nth, c, e);
    if (ret < 0)
        return ret;
    for (size_t n = 0; n < c->n; n++)
        c->flags |= atomic_load(&c->t->resolved[c->chunk[n]])->op.flags != 0;
    return 0;
}

int cut_runs(struct cut *c, uint64_t off, uint64_t len, struct err *e)
{
    int ret = 0;

    for (size_t n = 0; ret == 0 && n < c->n; n++) {
        const struct resolved *r = atomic_load(&c->t->resolved[c->chunk[n]]);

        ret = plan_op_cut(&r->op, off, len, (uint32_t)n, &c->runs, e);
    }
    return ret;
}

int cut_check(const struct cut *c, struct err *e)
{
    int ret = 0;

    for (size_t n = 0; ret == 0 && n < c->n; n++)
        if (n == 0 || c->src[n] != c->src[n - 1])
            ret = source_check(c->src[n], e);
    return ret;
}

/* Fills a window whose edges cut no element that needs work. */
static int fill(struct cut *c, uint64_t off, size_t len, void *dst, struct err *e)
{
    struct fetch_sources sources = {.src = c->src, .count = c->n};
    int ret = cut_runs(c, off, len, e);

    if (ret == 0)
        ret = cut_check(c, e);
    if (ret == 0)
        ret = fetch_window(&c->runs, &sources, c->t->env.pool, dst, len, e);
    if (ret == 0) /* what was copied is what was scanned only if nothing moved since */
        ret = cut_check(c, e);
    return ret;
}

/* Elements at the edges are needed whole: fills a wider window and copies its middle. */
static int fill_widened(struct cut *c, uint64_t off, size_t len, void *dst,
                        struct err *e)
{
    uint64_t wide_off = off, wide_len = len;
    CLEANUP_FREE unsigned char *wide = NULL;
    int ret;

    plan_widen(c->t->plan, &wide_off, &wide_len);
    if (wide_off == off && wide_len == len)
        return fill(c, off, len, dst, e);
    wide = malloc((size_t)wide_len);
    if (!wide)
        return err_nomem(e);
    ret = fill(c, wide_off, (size_t)wide_len, wide, e);
    if (ret == 0)
        memcpy(dst, wide + (off - wide_off), len);
    return ret;
}

static int read_window(struct tensor *t, uint64_t off, size_t len, void *dst,
                       struct err *e)
{
    CLEANUP(cut_release) struct cut c = {.t = t};
    int ret = cut_begin(&c, off, len, e);

    if (ret < 0)
        return ret;
    ret = c.flags ? fill_widened(&c, off, len, dst, e) : fill(&c, off, len, dst, e);
    c.done = ret == 0;
    return ret;
}

/*
 * Elements [at, at + n) as the type that is shown. Blocks are of stored bytes that stay
 * within a window.
 */
static int cast_window(struct tensor *t, uint64_t at, size_t n, void *dst,
                       struct err *e)
{
    CLEANUP_FREE unsigned char *stored = malloc(n * t->unit + 1);
    int ret =
        stored ? read_window(t, at * t->unit, n * t->unit, stored, e) : err_nomem(e);

    if (ret == 0)
        cast_elements(t->info.stored, t->info.dtype, stored, dst, n);
    return ret;
}

/* Bytes [off, off + len) of the cast tensor; what cuts an element is cast beside. */
static int read_cast(struct tensor *t, uint64_t off, size_t len, void *dst,
                     struct err *e)
{
    unsigned unit = dtype_unit(t->info.dtype), skip = (unsigned)(off % unit);
    uint64_t at = off / unit;
    size_t n = (skip + len + unit - 1) / unit;
    CLEANUP_FREE unsigned char *whole = NULL;
    int ret;

    if (skip == 0 && len == n * unit)
        return cast_window(t, at, n, dst, e);
    whole = malloc(n * unit);
    ret = whole ? cast_window(t, at, n, whole, e) : err_nomem(e);
    if (ret == 0)
        memcpy(dst, whole + skip, len);
    return ret;
}

int tensor_read(struct tensor *t, uint64_t off, size_t len, void *dst, struct err *e)
{
    size_t done = 0;

    while (done < len) {
        size_t part = MIN(len - done, (size_t)WINDOW_MAX);
        char *at = (char *)dst + done;
        int ret = tensor_is_cast(t) ? read_cast(t, off + done, part, at, e)
                                    : read_window(t, off + done, part, at, e);

        if (ret < 0)
            return err_wrap(e, "tensor %s, bytes %" PRIu64 "+%zu", t->info.key,
                            off + done, part);
        done += part;
    }
    return 0;
}
