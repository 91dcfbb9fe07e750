/* SPDX-License-Identifier: MIT */
/* gpu/tensor_map.c - windows of a tensor as pieces of mapped shards: nothing is copied. */
#include "gpu/tensor_priv.h"

#include <string.h>

#include "base/err.h"
#include "gpu/fetch.h"
#include "remote/source.h"

/*
 * Rows below this are copied: the kernel looks up each page of each piece. Measured,
 * server CPU per MiB: rows of 4 KiB 190 us copied, 310 us by pieces; of 16 KiB and more
 * no difference.
 */
enum { PIECE_MIN = 16 << 10 };

static bool hold(struct reader_iov *v, struct source *src)
{
    for (unsigned i = 0; i < v->nheld; i++)
        if (v->held[i] == src)
            return true;
    if (v->nheld == ARRAY_SIZE(v->held))
        return false;
    v->held[v->nheld++] = source_get(src);
    return true;
}

bool iov_add(struct reader_iov *v, const void *p, size_t len, struct source *src)
{
    struct iovec *last = v->count ? &v->iov[v->count - 1] : NULL;

    if (!len)
        return true;
    if (src && !hold(v, src))
        return false;
    if (last && (const char *)last->iov_base + last->iov_len == p) {
        last->iov_len += len;
        return true;
    }
    if (v->count == v->max)
        return false;
    /* writev takes a pointer that is not const, and only reads. */
    v->iov[v->count++] = (struct iovec){(void *)(uintptr_t)p, len};
    return true;
}

/* One copy of a run, in order of where it goes. */
struct piece {
    uint64_t dst, src, len;
    uint32_t tag;
};

static int compare_pieces(const void *a, const void *b)
{
    const struct piece *x = a, *y = b;

    return (x->dst > y->dst) - (x->dst < y->dst);
}

/* How many pieces the window is in, or 0 when they are too many or too short. */
static size_t count_pieces(const struct cut *c, uint64_t piece_min, int room)
{
    uint64_t copies = 0;

    if (c->flags)
        return 0;
    for (size_t i = 0; i < c->runs.count; i++) {
        const struct plan_run *r = &c->runs.run[i];

        /* A short rest at a window's edge is fine, many short rows are not. */
        if ((r->len < piece_min && r->count > 2) || r->count > (uint64_t)room)
            return 0;
        copies += r->count;
        if (copies > (uint64_t)room)
            return 0;
    }
    return (size_t)copies;
}

static void expand(const struct run_list *runs, struct piece *out)
{
    size_t n = 0;

    for (size_t i = 0; i < runs->count; i++) {
        const struct plan_run *r = &runs->run[i];

        for (uint64_t k = 0; k < r->count; k++)
            out[n++] = (struct piece){.dst = r->dst + k * r->dst_step,
                                      .src = r->src + k * (uint64_t)r->src_step,
                                      .len = r->len,
                                      .tag = r->tag};
    }
    qsort(out, n, sizeof *out, compare_pieces);
}

static int add_pieces(const struct cut *c, size_t n, struct reader_iov *v,
                      struct err *e)
{
    CLEANUP_FREE struct piece *piece = reallocarray(NULL, n, sizeof *piece);

    if (!piece)
        return err_nomem(e);
    expand(&c->runs, piece);
    for (size_t i = 0; i < n; i++) {
        struct source *src = c->src[piece[i].tag];
        const char *map = source_map(src);

        if (!iov_add(v, map + piece[i].src, (size_t)piece[i].len, src))
            return 0;
    }
    return 1;
}

int tensor_map(struct tensor *t, uint64_t off, size_t len, struct reader_iov *v,
               struct err *e)
{
    CLEANUP(cut_release) struct cut c = {.t = t};
    struct fetch_sources sources;
    size_t pieces;
    int ret;

    if (!len)
        return 1;
    if (tensor_is_cast(t))
        return 0;
    ret = cut_begin(&c, off, len, e);
    if (ret == 0 && !cut_is_small(&c))
        return 0;
    for (size_t i = 0; ret == 0 && i < c.n; i++)
        tensor_ask_unplaced(t, c.chunk[i], off, len);
    if (ret == 0)
        ret = cut_next(&c, e);
    if (ret == 1)
        ret = c.flags ? 0 : cut_runs(&c, off, len, e);
    pieces = ret == 0 ? count_pieces(&c, PIECE_MIN, v->max - v->count) : 0;
    if (pieces)
        ret = cut_check(&c, e);
    if (ret < 0)
        return err_wrap(e, "tensor %s, bytes %" PRIu64 "+%zu", t->info.key, off, len);
    if (!pieces && !v->ask_warm)
        return 0;
    sources = (struct fetch_sources){.src = c.src, .count = c.count};
    v->warm = !c.flags && fetch_all_mapped(&c.runs, &sources);
    if (!pieces || !v->warm)
        return 0;
    ret = add_pieces(&c, pieces, v, e);
    c.done = ret == 1;
    return ret;
}

/* Stored bytes of what is shown as [off, off + len). */
static void stored_range(const struct tensor *t, uint64_t off, size_t len,
                         uint64_t *from, uint64_t *bytes)
{
    unsigned shown = dtype_unit(t->info.dtype);
    uint64_t first = off / shown, end = (off + len + shown - 1) / shown;

    *from = first * t->unit;
    *bytes = (end - first) * t->unit;
}

bool tensor_vouches(const struct tensor *t)
{
    return !t->decodes && t->keeps_shards;
}

bool tensor_gathers(struct tensor *t, uint64_t off, size_t len)
{
    CLEANUP(cut_release) struct cut c = {.t = t};
    struct err ignored = {0};

    if (!tensor_vouches(t))
        return false;
    if (tensor_is_cast(t))
        return true;
    if (cut_begin(&c, off, len, &ignored) < 0 || cut_next(&c, &ignored) < 0 ||
        (!c.flags && cut_runs(&c, off, len, &ignored) < 0))
        return false;
    return !count_pieces(&c, READER_PIECE_EARLY, READER_PIECES);
}

int tensor_unchanged(struct tensor *t, uint64_t off, size_t len, struct err *e)
{
    CLEANUP(cut_release) struct cut c = {.t = t};
    uint64_t from, bytes;
    int ret;

    stored_range(t, off, len, &from, &bytes);
    ret = cut_begin(&c, from, bytes, e);
    while (ret == 0 && (ret = cut_next(&c, e)) == 1)
        ret = cut_check(&c, e);
    if (ret < 0)
        return err_wrap(e, "tensor %s, bytes %" PRIu64 "+%zu", t->info.key, off, len);
    return 0;
}
