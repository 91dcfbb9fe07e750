/* SPDX-License-Identifier: MIT */
/* gpu/tensor_window.c - windows of a tensor's bytes, copied (and cast) into a buffer. */
#include "gpu/tensor_priv.h"

#include <errno.h>
#include <string.h>

#include "base/err.h"
#include "base/pool.h"
#include "base/vec.h"
#include "gpu/cast.h"
#include "gpu/fetch.h"
#include "remote/decoded.h"
#include "remote/open_files.h"
#include "remote/source.h"

enum {
    /* Longer windows are filled piece by piece, so that memory stays bounded. */
    WINDOW_MAX = 4 << 20,
    /* Files or decoded chunks that are held at once. */
    BATCH_CHUNKS = 256,
    BATCH_MEMORY = DECODED_MEMORY / 4,
    /* Places to note which files were looked at: many chunks lie in few, by turns. */
    CHECKED = 256,
};

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
    const struct resolved *r = atomic_load(&c->t->resolved[c->chunk[c->first + n]]);

    if (c->done && c->src[n] && r && !r->src && op_end(&r->op) <= c->end)
        atomic_store(&c->src[n]->used_up, true);
    source_put(c->src[n]);
}

static void end_batch(struct cut *c)
{
    for (size_t n = 0; c->src && n < c->count; n++)
        put_source(c, n);
    free(steal(&c->src));
    run_list_release(&c->runs);
    c->first += c->count;
    c->count = 0;
    c->flags = false;
    c->done = false;
}

void cut_release(struct cut *c)
{
    end_batch(c);
    free(c->chunk);
}

static int note_chunk(void *user, size_t i)
{
    struct cut *c = user;

    if (!VEC_ROOM(c->chunk, c->n, c->cap))
        return -ENOMEM;
    c->chunk[c->n++] = i;
    return 0;
}

int cut_begin(struct cut *c, uint64_t off, uint64_t len, struct err *e)
{
    c->end = off + len;
    return plan_touched(c->t->plan, off, len, note_chunk, c) < 0 ? err_nomem(e) : 0;
}

static bool decodes_any(const struct cut *c)
{
    for (size_t n = c->first; n < c->n; n++)
        if (tensor_decodes(c->t, c->chunk[n]))
            return true;
    return false;
}

/* How many chunks may be held at once. */
static size_t batch_limit(const struct cut *c)
{
    uint64_t bytes = c->t->info.bytes / MAX(plan_chunks(c->t->plan), (size_t)1);
    bool decodes = decodes_any(c);
    size_t files = MIN(open_files_at_once(c->t->env.files), (size_t)BATCH_CHUNKS);

    if (!decodes && c->t->keeps_shards)
        return SIZE_MAX;
    if (!decodes)
        return files;
    bytes = BATCH_MEMORY / MAX(bytes, (uint64_t)1);
    return (size_t)MAX(MIN(bytes, (uint64_t)files), (uint64_t)1);
}

bool cut_is_small(const struct cut *c)
{
    return c->n <= batch_limit(c);
}

static int resolve_nth(void *user, size_t n, struct err *e)
{
    struct cut *c = user;

    return tensor_resolve(c->t, c->chunk[c->first + n], &c->src[n], e);
}

static bool all_known(const struct cut *c)
{
    for (size_t n = 0; n < c->count; n++) {
        const struct resolved *r = atomic_load_explicit(
            &c->t->resolved[c->chunk[c->first + n]], memory_order_acquire);
        if (!r || !r->src)
            return false;
    }
    return true;
}

int cut_next(struct cut *c, struct err *e)
{
    end_batch(c);
    if (c->first == c->n)
        return 0;
    c->count = MIN(c->n - c->first, batch_limit(c));
    c->src = calloc(c->count, sizeof *c->src);
    if (!c->src)
        return err_nomem(e);
    /* What has to be read or decoded first is so side by side. */
    TRY(pool_each(c->count > 1 && !all_known(c) ? c->t->env.pool : NULL, c->count,
                  resolve_nth, c, e));
    for (size_t n = 0; n < c->count; n++)
        c->flags |= atomic_load(&c->t->resolved[c->chunk[c->first + n]])->op.flags != 0;
    return 1;
}

int cut_runs(struct cut *c, uint64_t off, uint64_t len, struct err *e)
{
    int ret = 0;

    for (size_t n = 0; ret == 0 && n < c->count; n++) {
        const struct resolved *r = atomic_load(&c->t->resolved[c->chunk[c->first + n]]);

        ret = plan_op_cut(&r->op, off, len, (uint32_t)n, &c->runs, e);
    }
    return ret;
}

int cut_check(const struct cut *c, struct err *e)
{
    struct source *checked[CHECKED] = {0};
    int ret = 0;

    for (size_t n = 0; ret == 0 && n < c->count; n++) {
        struct source **last = &checked[(uintptr_t)c->src[n] / 64 % CHECKED];

        if (*last == c->src[n])
            continue;
        *last = c->src[n];
        ret = source_check(c->src[n], e);
    }
    return ret;
}

static int fill_batch(struct cut *c, uint64_t off, size_t len, void *dst, struct err *e)
{
    struct fetch_sources sources = {
        .src = c->src, .count = c->count, .once = c->t->env.once};
    int ret = cut_runs(c, off, len, e), checked;
    struct err stale = {0};

    if (ret < 0)
        return ret;
    ret = fetch_window(&c->runs, &sources, c->t->env.pool, dst, len, e);
    /* Of a shard that is no longer what was scanned that is told, whatever else went wrong. */
    checked = cut_check(c, &stale);
    if (checked < 0) {
        *e = stale;
        ret = checked;
    }
    c->done = ret == 0;
    return ret;
}

/* Fills a window whose edges cut no element. */
static int fill(struct tensor *t, uint64_t off, size_t len, void *dst, struct err *e)
{
    CLEANUP(cut_release) struct cut c = {.t = t};
    int ret = cut_begin(&c, off, len, e);

    for (size_t i = 0; ret == 0 && i < c.n; i++)
        tensor_ask_unplaced(t, c.chunk[i], off, len);
    while (ret == 0 && (ret = cut_next(&c, e)) == 1)
        ret = fill_batch(&c, off, len, dst, e);
    return ret;
}

/* Elements at the edges may need work as a whole: then a wider window is filled. */
static int read_window(struct tensor *t, uint64_t off, size_t len, void *dst,
                       struct err *e)
{
    uint64_t wide_off = off, wide_len = len;
    CLEANUP_FREE unsigned char *wide = NULL;
    int ret;

    plan_widen(t->plan, &wide_off, &wide_len);
    if (wide_off == off && wide_len == len)
        return fill(t, off, len, dst, e);
    wide = malloc((size_t)wide_len);
    if (!wide)
        return err_nomem(e);
    ret = fill(t, wide_off, (size_t)wide_len, wide, e);
    if (ret == 0)
        memcpy(dst, wide + (off - wide_off), len);
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
