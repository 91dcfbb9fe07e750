/* SPDX-License-Identifier: MIT */
/* index/formats/fairscale/fairscale_flat.c - ranges of flat parameters, reported as tensors. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "index/formats/fairscale/fairscale_priv.h"

enum { BOXES_MEMORY = 64 << 10 };

/* ---- where the elements are ---- */

static void PRINTF(2, 3) fail(struct flat_tensor *f, const char *fmt, ...)
{
    va_list ap;

    if (f->why[0])
        return;
    va_start(ap, fmt);
    vsnprintf(f->why, sizeof f->why, fmt, ap);
    va_end(ap);
}

/* Can it be a part of the flat tensor that `like` is one of? */
static bool is_flat(const struct rank_tensor *x, const struct rank_tensor *like)
{
    return x->nd == 1 && (x->dim[0] < 2 || x->stride[0] == 1) &&
           x->dtype == like->dtype && x->dim[0] == like->dim[0] &&
           dtype_bits(x->dtype) % 8 == 0;
}

static const struct rank_tensor *find(const struct model_part *part, uint32_t s,
                                      bool optimizer, const char *key, size_t len)
{
    const struct rank_tensors *t =
        optimizer ? &part->shard[s].optim : &part->file[s].tensors;

    return rank_tensors_find(t, key, len);
}

/* Takes the pieces in order; parts are equally long, the last ones padded. */
static void place(struct model_part *part, size_t p, struct flat_tensor *f)
{
    uint64_t total = part->meta.param[p].total, at = 0, padded = 0;

    for (uint32_t s = 0; s < part->shards && !f->why[0]; s++) {
        struct flat_piece *piece = &part->piece[s];
        const struct rank_tensor *x = piece->x;
        uint64_t padding = part->shard[s].padding ? part->shard[s].padding[p] : 0;

        piece->begin = at;
        if (!x) {
            piece->count = MIN(f->like->dim[0], total - at);
        } else if (x->why) {
            fail(f, "%.80s: %.200s", piece->file->file.path, x->why);
        } else if (!is_flat(x, f->like) || padding > x->dim[0] ||
                   x->dim[0] - padding > total - at) {
            fail(f, "%.200s: its part does not fit to those of the other ranks",
                 piece->file->file.path);
        } else {
            piece->count = x->dim[0] - padding;
            padded += padding;
        }
        at += piece->count;
    }
    f->have = at;
    f->total = total;
    /* Without padding the last ranks are lost, and those before have what they have. */
    if (!f->why[0] && at != total && padded > 0)
        fail(f, "the ranks have %" PRIu64 " of its %" PRIu64 " elements", at, total);
}

void flat_tensor_find(struct model_part *part, size_t p, bool optimizer,
                      const char *key, size_t len, struct flat_tensor *out)
{
    *out = (struct flat_tensor){.piece = part->piece, .pieces = part->shards};
    for (uint32_t s = 0; s < part->shards; s++) {
        const struct rank_tensor *x = find(part, s, optimizer, key, len);

        part->piece[s] = (struct flat_piece){.file = &part->file[s], .x = x};
        if (x && !x->why && !out->like)
            out->like = x;
    }
    if (out->like)
        place(part, p, out);
    else
        fail(out, "no rank's file holds %.200s", key);
}

void flat_tensor_own(struct model_part *part, size_t p, uint32_t shard,
                     struct flat_tensor *out)
{
    const struct flat_param *param = &part->meta.param[p];
    const struct rank_tensor *x = find(part, shard, false, param->key, param->key_len);

    *out = (struct flat_tensor){.piece = part->piece, .pieces = 1};
    part->piece[0] =
        (struct flat_piece){.file = &part->file[shard], .x = x, .count = param->total};
    if (!x || x->why) {
        fail(out, "%s", x ? x->why : "its file does not hold it");
        return;
    }
    out->like = x;
    out->have = out->total = param->total;
    if (!is_flat(x, x) || x->dim[0] < param->total)
        fail(out, "it has fewer elements than shard_metadata tells");
}

/* ---- chunks ---- */

/*
 * The elements of [m->begin, m->begin + m->count) that one piece has, as boxes of the whole.
 */
static int report_piece(struct sink *sink, const struct flat_piece *piece,
                        const struct flat_member *m, const struct rank_boxes *boxes,
                        const struct shape *shape, struct err *e)
{
    uint64_t lo = MAX(piece->begin, m->begin);
    uint64_t hi = MIN(piece->begin + piece->count, m->begin + m->count);
    static const int64_t step[1] = {1};
    struct chunk c;

    if (lo >= hi)
        return 0;
    if (!piece->x)
        return sink_fault(sink, "%s %s", piece->file->file.path,
                          piece->file->err.code == ENOENT ? "is missing"
                          : piece->file->err.code         ? "is damaged"
                                                          : "does not hold it") < 0
                   ? err_nomem(e)
                   : 0;
    rank_tensor_chunk(piece->x, piece->file->file.number, &c);
    c.first += lo - piece->begin;
    c.step = step;
    return rank_boxes_report_flat(sink, boxes, shape, lo - m->begin, hi - lo, &c, e);
}

static int report_pieces(struct sink *sink, const struct flat_tensor *flat,
                         const struct flat_member *m, const struct rank_boxes *boxes,
                         const struct shape *shape, struct err *e)
{
    if (flat->why[0])
        return sink_fault(sink, "%s", flat->why) < 0 ? err_nomem(e) : 0;
    if (m->begin + m->count > flat->have &&
        sink_fault(sink,
                   "the ranks have %" PRIu64 " of the %" PRIu64
                   " elements of its flat parameter: a shard is missing",
                   flat->have, flat->total) < 0)
        return err_nomem(e);
    for (uint32_t i = 0; i < flat->pieces; i++)
        TRY(report_piece(sink, &flat->piece[i], m, boxes, shape, e));
    return 0;
}

static void shape_of(const struct flat_member *m, struct shape *out)
{
    out->nd = m->nd;
    memcpy(out->dim, m->dim, m->nd * sizeof *m->dim);
}

int flat_member_report(struct sink *sink, const struct flat_tensor *flat,
                       const struct flat_member *m, struct sink_tensor *t,
                       struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(BOXES_MEMORY);
    struct rank_boxes boxes;
    struct shape shape;
    int r;

    if (!a)
        return err_nomem(e);
    shape_of(m, &shape);
    t->shape = &shape;
    t->dtype = flat->like ? flat->like->dtype : DTYPE_U8;
    r = rank_boxes_all(a, &shape, &boxes, e);
    if (r == 0)
        r = sink_tensor_begin(sink, t, e);
    t->shape = NULL;
    if (r < 0)
        return r;
    TRY(report_pieces(sink, flat, m, &boxes, &shape, e));
    return sink_tensor_end(sink, e);
}

/* ---- parts of a model ---- */

/* Are they alike but along the cut? Shape becomes the whole's. */
static bool slices_fit(const struct flat_slice *slice, uint32_t n,
                       const struct rank_cut *cut, struct shape *shape)
{
    uint64_t whole = 0;

    for (uint32_t i = 0; i < n; i++) {
        const struct flat_member *m = slice[i].m;

        if (m->nd != shape->nd || m->nd <= cut->axis ||
            m->dim[cut->axis] % cut->blocks != 0 ||
            (slice[i].flat.like && slice[0].flat.like &&
             slice[i].flat.like->dtype != slice[0].flat.like->dtype) ||
            add_overflows(whole, m->dim[cut->axis], &whole))
            return false;
        for (uint32_t k = 0; k < m->nd; k++)
            if (k != cut->axis && m->dim[k] != shape->dim[k])
                return false;
    }
    shape->dim[cut->axis] = whole;
    return true;
}

static int report_slice(struct sink *sink, const struct flat_slice *slice,
                        const struct rank_cut *cut, uint64_t before, uint64_t whole,
                        struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(BOXES_MEMORY);
    struct rank_boxes boxes;
    struct shape shape;

    if (!a)
        return err_nomem(e);
    shape_of(slice->m, &shape);
    TRY(rank_boxes_cut(a, cut, &shape, before, whole, &boxes, e));
    return report_pieces(sink, &slice->flat, slice->m, &boxes, &shape, e);
}

int flat_slices_report(struct sink *sink, enum rank_rule rule,
                       const struct flat_slice *slice, uint32_t n,
                       struct sink_tensor *t, struct err *e)
{
    struct rank_cut cut = rank_rule_cut(rule);
    struct shape shape;
    uint64_t before = 0;
    bool fits;
    int r;

    if (rule == RANK_SAME)
        return flat_member_report(sink, &slice[0].flat, slice[0].m, t, e);
    shape_of(slice[0].m, &shape);
    fits = slices_fit(slice, n, &cut, &shape);
    t->shape = &shape;
    t->dtype = slice[0].flat.like ? slice[0].flat.like->dtype : DTYPE_U8;
    r = sink_tensor_begin(sink, t, e);
    t->shape = NULL;
    if (r < 0)
        return r;
    if (!fits && sink_fault(sink, "the model's parts do not fit together") < 0)
        return err_nomem(e);
    for (uint32_t i = 0; fits && i < n; i++) {
        TRY(report_slice(sink, &slice[i], &cut, before, shape.dim[cut.axis], e));
        before += slice[i].m->dim[cut.axis];
    }
    return sink_tensor_end(sink, e);
}
