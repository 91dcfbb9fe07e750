/* SPDX-License-Identifier: MIT */
/* gpu/gather_tensor.c - an open tensor as a gather: by its pieces, or as it is read. */
#include "gpu/gather.h"

#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/pool.h"
#include "gpu/tensor_priv.h"
#include "remote/source.h"

enum {
    PIECES_MEMORY = 1 << 30, /* as an open tensor */
};

/* ---- the tensor, assembled, as a source ---- */

struct whole {
    struct source base;
    struct tensor *tensor;
};

static int whole_read(struct source *s, uint64_t off, size_t len, void *dst,
                      struct err *e)
{
    return tensor_read(container_of(s, struct whole, base)->tensor, off, len, dst, e);
}

static void whole_close(struct source *s)
{
    struct whole *w = container_of(s, struct whole, base);

    tensor_put(w->tensor);
    free(w);
}

static const struct source_ops whole_ops = {
    .name = "tensor",
    .read = whole_read,
    .close = whole_close,
};

static int source_from_tensor(struct tensor *t, struct source **out, struct err *e)
{
    CLEANUP_FREE struct whole *w = calloc(1, sizeof *w);
    int ret = w ? source_init(&w->base, &whole_ops, t->info.key, tensor_size(t), e)
                : err_nomem(e);

    if (ret < 0)
        return ret;
    w->tensor = tensor_get(t);
    *out = &steal(&w)->base;
    return 0;
}

/* One piece, in the type that is shown. Sources check themselves in each read. */
static int gather_whole(struct tensor *t, const struct gather_part *part,
                        enum dtype dtype, struct gather **out, struct err *e)
{
    CLEANUP(source_putp) struct source *src = NULL;
    uint64_t start[SHAPE_MAX_DIMS] = {0}, stride = dtype_unit(t->info.dtype);
    int64_t step[SHAPE_MAX_DIMS] = {0};
    struct gather_piece piece = {.start = start, .step = step};
    struct shape units;
    int ret = shape_units(&t->info.shape, t->info.dtype, &units, e);

    if (ret == 0)
        ret = source_from_tensor(t, &src, e);
    if (ret < 0)
        return ret;
    for (uint32_t k = units.nd; k-- > 0; stride *= units.dim[k])
        step[k] = (int64_t)stride;
    piece.size = units.dim;
    return gather_new(&(struct gather_request){.shape = &t->info.shape,
                                               .stored = t->info.dtype,
                                               .dtype = dtype,
                                               .piece = &piece,
                                               .pieces = 1,
                                               .source = &src,
                                               .sources = 1,
                                               .start = part->start,
                                               .size = part->size,
                                               .scale = part->scale},
                      out, e);
}

/* ---- by its pieces ---- */

struct pieces {
    struct tensor *t;
    const struct gather_part *part;
    struct gather_piece *piece;
    struct source **source; /* one a piece, owned */
    int64_t *step;
    uint64_t *box; /* start and size of each */
    size_t n;
};

static void pieces_release(struct pieces *p)
{
    for (size_t i = 0; p->source && i < p->n; i++)
        source_put(p->source[i]);
}

/* Has the chunk anything of the part? A part that is no box of the tensor is refused later. */
static bool is_wanted(const struct pieces *p, const struct chunk *c)
{
    const uint64_t *start = p->part->start, *size = p->part->size;

    for (uint32_t k = 0; start && size && k < p->t->units.nd; k++)
        if (c->start[k] + c->size[k] <= start[k] ||
            (c->start[k] >= start[k] && c->start[k] - start[k] >= size[k]))
            return false;
    return true;
}

/* Where the chunk lies; the shard is not touched when nothing of it is wanted. */
static int find_piece(void *user, size_t i, struct err *e)
{
    struct pieces *p = user;
    struct chunk_room room = {0};
    const struct chunk *c = plan_chunk(p->t->plan, i, &room);
    uint32_t nd = p->t->units.nd;
    int64_t *step = p->step + i * nd;
    uint64_t *start = p->box + i * 2 * nd, *size = start + nd;
    struct chunk_place place = {0};
    const char *path;

    TRY(is_wanted(p, c) ? tensor_place(p->t, i, &place, &path, e) : 0);
    p->source[i] = place.src;
    memcpy(step, place.step, nd * sizeof *step);
    memcpy(start, c->start, nd * sizeof *start);
    memcpy(size, c->size, nd * sizeof *size);
    p->piece[i] = (struct gather_piece){.start = start,
                                        .size = size,
                                        .step = step,
                                        .base = place.base,
                                        .source = (uint32_t)i,
                                        .flags = place.flags};
    return 0;
}

static int find_pieces(struct pieces *p, struct arena *a, struct err *e)
{
    p->n = plan_chunks(p->t->plan);
    p->piece = arena_array(a, p->n + 1, sizeof *p->piece);
    p->source = arena_array(a, p->n + 1, sizeof *p->source);
    p->step = arena_array(a, p->n * p->t->units.nd + 1, sizeof *p->step);
    p->box = arena_array(a, p->n * p->t->units.nd + 1, 2 * sizeof *p->box);
    if (!p->piece || !p->source || !p->step || !p->box)
        return err_nomem(e);
    return pool_each(p->n > 1 ? p->t->env.pool : NULL, p->n, find_piece, p, e);
}

static int gather_pieces(struct tensor *t, const struct gather_part *part,
                         enum dtype dtype, struct gather **out, struct err *e)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(PIECES_MEMORY);
    CLEANUP(pieces_release) struct pieces p = {.t = t, .part = part};
    int ret = a ? find_pieces(&p, a, e) : err_nomem(e);

    if (ret < 0)
        return ret;
    ret = gather_new(&(struct gather_request){.shape = &t->info.shape,
                                              .stored = t->info.stored,
                                              .dtype = dtype,
                                              .piece = p.piece,
                                              .pieces = p.n,
                                              .source = p.source,
                                              .sources = p.n,
                                              .start = part->start,
                                              .size = part->size,
                                              .scale = part->scale},
                     out, e);
    return ret;
}

/*
 * May its pieces be read side by side, from sources that stay open? A cast that is shown
 * is a rounding that must have happened before another.
 */
static bool has_pieces(const struct tensor *t, enum dtype dtype, bool scaled)
{
    if (!t->keeps_shards || plan_chunks(t->plan) > UINT32_MAX ||
        (tensor_is_cast(t) && (dtype != t->info.dtype || scaled)))
        return false;
    for (size_t i = 0; i < plan_chunks(t->plan); i++)
        if (tensor_decodes(t, i))
            return false;
    return true;
}

int gather_new_tensor(struct tensor *t, const struct gather_part *part,
                      struct gather **out, struct err *e)
{
    enum dtype dtype = part->dtype == DTYPE_NONE ? t->info.dtype : part->dtype;
    int ret = has_pieces(t, dtype, part->scale != NULL)
                  ? gather_pieces(t, part, dtype, out, e)
                  : gather_whole(t, part, dtype, out, e);

    return ret < 0 ? err_wrap(e, "tensor %s", t->info.key) : 0;
}
