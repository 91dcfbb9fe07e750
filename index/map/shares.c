/* SPDX-License-Identifier: MIT */
/* index/map/shares.c - pieces of an axis for parts of groups and for interleaved blocks. */
#include "index/map/shares.h"

#include <errno.h>

#include "base/err.h"
#include "base/vec.h"

enum { PIECES_MAX = 1 << 18 }; /* of real maps: twice as many as heads, or fewer */

void piece_list_release(struct piece_list *l)
{
    free(l->at);
    *l = (struct piece_list){0};
}

static int add(struct piece_list *l, struct axis_piece p, struct err *e)
{
    if (p.count == 0)
        return 0;
    if (l->n == PIECES_MAX)
        return err_set(e, E2BIG, "more than %d pieces of an axis", PIECES_MAX);
    if (!VEC_ROOM(l->at, l->n, l->cap))
        return err_nomem(e);
    l->at[l->n++] = p;
    return 0;
}

int shares_take(const struct share *s, struct piece_list *out, struct err *e)
{
    uint64_t groups = s->rows ? s->groups : 0; /* of nothing there may be any number */
    int ret = 0;

    for (uint64_t g = 0; ret == 0 && g < groups; g++)
        ret = add(out,
                  (struct axis_piece){.from = g * s->group + s->at,
                                      .step = 1,
                                      .count = s->rows,
                                      .to = g * s->rows},
                  e);
    return ret;
}

int shares_put(const struct share *s, struct piece_list *out, struct err *e)
{
    uint64_t groups = s->rows ? s->groups : 0;
    int ret = 0;

    for (uint64_t g = 0; ret == 0 && g < groups; g++)
        ret = add(out,
                  (struct axis_piece){.from = g * s->rows,
                                      .step = 1,
                                      .count = s->rows,
                                      .to = g * s->group + s->at},
                  e);
    return ret;
}

/* Of blocks of one element every second one is a single piece. */
static int take_alternate(uint64_t group, uint64_t half, struct piece_list *out,
                          struct err *e)
{
    int ret = 0;

    for (unsigned h = 0; ret == 0 && h < 2; h++)
        ret = add(
            out,
            (struct axis_piece){
                .from = group + h, .step = 2, .count = half, .to = group + h * half},
            e);
    return ret;
}

/* Block n of a group, in the order in which they lie in the source. */
static int move_block(const struct interleave *i, uint64_t group, uint64_t half,
                      uint64_t n, struct piece_list *out, struct err *e)
{
    uint64_t blocks = half / i->block, apart, mixed;
    struct axis_piece p = {.step = 1, .count = i->block};

    if (i->undo) { /* the source is mixed: n-th block, kind n % 2 */
        mixed = n;
        apart = n % 2 * blocks + n / 2;
    } else {
        apart = n;
        mixed = n % blocks * 2 + n / blocks;
    }
    p.from = group + (i->undo ? mixed : apart) * i->block;
    p.to = group + (i->undo ? apart : mixed) * i->block;
    return add(out, p, e);
}

int shares_interleave(const struct interleave *i, struct piece_list *out, struct err *e)
{
    uint64_t group, half;
    int ret = 0;

    if (i->dim == 0)
        return 0;
    if (i->groups == 0 || i->block == 0 || i->dim % i->groups != 0 ||
        i->block > i->dim || i->dim / i->groups % (2 * i->block) != 0)
        return err_set(e, EINVAL,
                       "%" PRIu64 " elements are not %" PRIu64
                       " groups of pairs of blocks of %" PRIu64,
                       i->dim, i->groups, i->block);
    group = i->dim / i->groups;
    half = group / 2;
    for (uint64_t g = 0; ret == 0 && g < i->groups; g++) {
        if (i->undo && i->block == 1) {
            ret = take_alternate(g * group, half, out, e);
            continue;
        }
        for (uint64_t n = 0; ret == 0 && n < group / i->block; n++)
            ret = move_block(i, g * group, half, n, out, e);
    }
    return ret;
}
