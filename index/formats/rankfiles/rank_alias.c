/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/rank_alias.c - the tensors of a set in order, and which are tied. */
#include <errno.h>
#include <string.h>

#include "index/formats/rankfiles/rank_set_priv.h"

/* Does the piece have elements, by which it could be told from another? */
static bool has_elements(const struct rank_piece *p)
{
    for (uint32_t k = 0; k < p->nd; k++)
        if (rank_piece_size(p)[k] == 0)
            return false;
    return p->data_len > 0;
}

static const struct rank_piece *first_piece(const struct rank_entry *t)
{
    const struct rank_piece *p = t->piece;

    while (p && !has_elements(p))
        p = p->next;
    return p;
}

static int compare_places(const struct rank_piece *a, const struct rank_piece *b)
{
    if (a->file != b->file)
        return a->file < b->file ? -1 : 1;
    if (a->data != b->data)
        return a->data < b->data ? -1 : 1;
    return (a->first > b->first) - (a->first < b->first);
}

struct place {
    const struct rank_piece *piece;
    struct rank_entry *t;
    size_t order;
};

static int compare(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    int r = compare_places(x->piece, y->piece);

    return r ? r : (x->order > y->order) - (x->order < y->order);
}

/* The same elements at the same places of all files? */
static bool is_same(const struct rank_entry *a, const struct rank_entry *b)
{
    const struct rank_piece *p = a->piece, *q = b->piece;

    if (a->npieces != b->npieces || a->nd != b->nd || a->dtype != b->dtype ||
        (a->nd > 0 && memcmp(a->dim, b->dim, a->nd * sizeof *a->dim) != 0))
        return false;
    for (; p; p = p->next, q = q->next)
        if (p->nd != q->nd || p->file != q->file ||
            memcmp(p->number, q->number, 3 * (size_t)p->nd * sizeof *p->number) != 0 ||
            (has_elements(p) && compare_places(p, q) != 0))
            return false;
    return true;
}

int rank_set_settle(struct rank_set *s, struct err *e)
{
    CLEANUP_FREE struct place *place = calloc(s->count + 1, sizeof *place);
    size_t n = 0, order = 0;

    if (!place)
        return err_nomem(e);
    s->at = arena_array(s->arena, s->count + 1, sizeof *s->at);
    if (!s->at)
        return err_nomem(e);
    for (struct rank_entry *t = s->entry; t; t = t->next) {
        const struct rank_piece *p = first_piece(t);

        s->at[order] = t;
        if (p && !t->why)
            place[n++] = (struct place){p, t, order};
        order++;
    }
    if (n > 0)
        qsort(place, n, sizeof *place, compare);
    for (size_t i = 1; i < n; i++)
        place[i].t->alias = compare_places(place[i - 1].piece, place[i].piece) == 0 &&
                            is_same(place[i - 1].t, place[i].t);
    return 0;
}

void rank_set_at(const struct rank_set *s, size_t i, struct rank_set_tensor *out)
{
    const struct rank_entry *t = s->at[i];

    *out = (struct rank_set_tensor){.path = t->path,
                                    .len = t->len,
                                    .distributed = t->distributed && !t->plain,
                                    .dtype = t->dtype,
                                    .nd = t->nd,
                                    .dim = t->dim,
                                    .alias = t->alias};
}
