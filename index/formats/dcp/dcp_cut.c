/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_cut.c - cuts tensors for ranks, and finds a place for what is whole. */
#include "index/formats/dcp/dcp_cut.h"

#include <errno.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/layout.h"

/* Each rank is a file; the largest runs there are have a fifth of this. */
enum {
    MAX_RANKS = 100000,
    MAX_NUMBERS =
        1024, /* files of a rank: one per thread of torch, or file that arrived */
};

/* ---- files of a rank ---- */

static uint32_t number_of(const struct dcp_cut *cut, size_t i, uint64_t share)
{
    if (cut->batch[i])
        return cut->batch[i]->number;
    return cut->own[i] ? cut->own[i]->cut[share].number : 0;
}

static int by_number(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

/* Numbers that are not in the list, of which there were too many, are the first. */
static size_t find_number(const struct dcp_cut *cut, uint32_t number)
{
    const uint32_t *at =
        bsearch(&number, cut->number, cut->numbers, sizeof *at, by_number);

    return at ? (size_t)(at - cut->number) : 0;
}

static void add_number(struct dcp_cut *cut, uint32_t number)
{
    uint32_t at = cut->numbers;

    if (cut->number[find_number(cut, number)] == number || at == MAX_NUMBERS)
        return;
    for (; at > 0 && cut->number[at - 1] > number; at--)
        cut->number[at] = cut->number[at - 1];
    cut->number[at] = number;
    cut->numbers++;
}

static int list_numbers(const struct layout_input *in, struct dcp_cut *cut,
                        struct arena *a, struct err *e)
{
    cut->batch = arena_array(a, cut->count + 1, sizeof *cut->batch);
    cut->number = arena_array(a, MAX_NUMBERS, sizeof *cut->number);
    if (!cut->batch || !cut->number)
        return err_nomem(e);
    cut->numbers = 1;
    for (size_t i = 0; i < cut->count; i++) {
        cut->batch[i] = in->tensor[cut->chosen[i]].batch;
        if (cut->batch[i])
            add_number(cut, cut->batch[i]->number);
        for (size_t k = 0; !cut->batch[i] && cut->own[i] && k < cut->own[i]->count; k++)
            add_number(cut, number_of(cut, i, k));
    }
    return 0;
}

size_t dcp_files(const struct dcp_cut *cut)
{
    return (size_t)cut->numbers * cut->ranks;
}

size_t dcp_file_of(const struct dcp_cut *cut, uint32_t rank, uint32_t number)
{
    return find_number(cut, number) * cut->ranks + rank;
}

/* ---- the grid ---- */

static bool is_whole(const struct shape *units)
{
    for (uint32_t k = 0; k < units->nd; k++)
        if (units->dim[k] == 0)
            return true;
    return units->nd == 0;
}

/* Rows of a piece, and pieces, when `dim` > 0 is cut for `ranks`. */
static uint64_t piece_of(uint64_t dim, uint32_t ranks)
{
    return dim / ranks + (dim % ranks != 0);
}

static uint64_t pieces_of(uint64_t dim, uint32_t ranks)
{
    uint64_t piece = piece_of(dim, ranks);

    return dim / piece + (dim % piece != 0);
}

uint64_t dcp_shares(const struct dcp_cut *cut, size_t i, const struct shape *units)
{
    uint64_t n = 1;

    if (cut->own[i])
        return cut->own[i]->count;
    if (is_whole(units))
        return 1;
    for (uint32_t k = 0; k < MIN(units->nd, 2u); k++)
        n *= pieces_of(units->dim[k], cut->along[k]);
    return n;
}

static void cut_axis(const struct shape *units, uint32_t k, uint32_t ranks, uint64_t n,
                     struct dcp_share *out)
{
    uint64_t piece = piece_of(units->dim[k], ranks);

    out->start[k] = n * piece;
    out->size[k] = MIN(piece, units->dim[k] - n * piece);
}

void dcp_share(const struct dcp_cut *cut, size_t i, const struct shape *units,
               uint64_t n, struct dcp_share *out)
{
    const struct layout_cuts *own = cut->own[i];
    uint64_t columns = 1;

    out->number = cut->number[find_number(cut, number_of(cut, i, n))];
    if (own) {
        memcpy(out->start, own->cut[n].start, units->nd * sizeof *out->start);
        memcpy(out->size, own->cut[n].size, units->nd * sizeof *out->size);
        out->rank = own->cut[n].rank;
        return;
    }
    memset(out->start, 0, units->nd * sizeof *out->start);
    memcpy(out->size, units->dim, units->nd * sizeof *out->size);
    out->rank = cut->home[i];
    if (is_whole(units))
        return;
    if (units->nd > 1) {
        columns = pieces_of(units->dim[1], cut->along[1]);
        cut_axis(units, 1, cut->along[1], n % columns, out);
        out->rank = (uint32_t)(n % columns);
    }
    cut_axis(units, 0, cut->along[0], n / columns, out);
    out->rank += (uint32_t)(n / columns) * cut->along[1];
}

/* ---- what is whole goes where least is ---- */

/* Ranks as a heap: the one with the fewest bytes, of equals the first, is on top. */
struct heap {
    uint64_t *load; /* of each rank */
    uint32_t *rank;
    size_t count;
};

static bool goes_before(const struct heap *h, uint32_t a, uint32_t b)
{
    return h->load[a] != h->load[b] ? h->load[a] < h->load[b] : a < b;
}

static void sift_down(struct heap *h, size_t at)
{
    for (size_t next; (next = 2 * at + 1) < h->count; at = next) {
        uint32_t moved = h->rank[at];

        if (next + 1 < h->count && goes_before(h, h->rank[next + 1], h->rank[next]))
            next++;
        if (!goes_before(h, h->rank[next], moved))
            return;
        h->rank[at] = h->rank[next];
        h->rank[next] = moved;
    }
}

static void heap_make(struct heap *h)
{
    for (size_t i = 0; i < h->count; i++)
        h->rank[i] = (uint32_t)i;
    for (size_t i = h->count / 2; i-- > 0;)
        sift_down(h, i);
}

static uint64_t box_bytes(const struct dcp_share *b, uint32_t nd, unsigned unit)
{
    uint64_t bytes = unit;

    for (uint32_t k = 0; k < nd; k++)
        bytes *= b->size[k];
    return bytes;
}

static void add_load(const struct dcp_cut *cut, size_t i, const struct shape *units,
                     unsigned unit, uint64_t *load)
{
    struct dcp_share box;

    for (uint64_t n = 0; n < dcp_shares(cut, i, units); n++) {
        dcp_share(cut, i, units, n, &box);
        load[box.rank] += box_bytes(&box, units->nd, unit);
    }
}

static uint32_t light_column(const struct dcp_cut *cut, const uint64_t *load)
{
    uint32_t best = 0;

    for (uint32_t c = 1; c < cut->along[1]; c++)
        if (load[c] < load[best])
            best = c;
    return best;
}

static void place_whole(struct heap *h, uint32_t *home, unsigned unit)
{
    *home = h->rank[0];
    h->load[*home] += unit;
    sift_down(h, 0);
}

/* In three rounds: all that is cut in two dimensions or more, in one, and not at all. */
static int place_batch(const struct layout_input *in, struct dcp_cut *cut,
                       struct heap *h, size_t first, size_t end, struct err *e)
{
    memset(h->load, 0, cut->ranks * sizeof *h->load);
    for (int round = 0; round < 3; round++) {
        if (round == 2)
            heap_make(h);
        for (size_t i = first; i < end; i++) {
            const struct layout_tensor *t = &in->tensor[cut->chosen[i]];
            unsigned unit = dtype_unit(t->dtype);
            struct shape units;

            TRY(shape_units(&t->shape, t->dtype, &units, e));
            if (round != (cut->own[i]        ? 0
                          : is_whole(&units) ? 2
                          : units.nd == 1    ? 1
                                             : 0))
                continue;
            if (round == 2) {
                place_whole(h, &cut->home[i], unit);
                continue;
            }
            if (round == 1)
                cut->home[i] = light_column(cut, h->load);
            add_load(cut, i, &units, unit, h->load);
        }
    }
    return 0;
}

static int place_all(const struct layout_input *in, struct dcp_cut *cut, struct heap *h,
                     struct err *e)
{
    int ret = 0;

    for (size_t i = 0, end; ret == 0 && i < cut->count; i = end) {
        for (end = i + 1; end < cut->count && cut->batch[end] == cut->batch[i];)
            end++;
        ret = place_batch(in, cut, h, i, end, e);
    }
    return ret;
}

/* The cuts that tensors bring, and the ranks that these count to. */
static void keep_own(const struct layout_input *in, struct dcp_cut *cut)
{
    for (size_t i = 0; i < cut->count; i++) {
        const struct layout_cuts *own = in->tensor[cut->chosen[i]].cuts;

        cut->own[i] = own;
        for (size_t k = 0; own && k < own->count; k++)
            cut->ranks = MAX(cut->ranks, own->cut[k].rank + 1);
    }
}

int dcp_cut_new(const struct layout_input *in, const struct layout_options *o,
                bool keeps, const size_t *chosen, size_t count, struct arena *a,
                struct dcp_cut *out, struct err *e)
{
    uint64_t ranks;
    struct heap h;

    *out = (struct dcp_cut){.chosen = chosen, .count = count};
    out->along[0] = o->mesh[0] ? o->mesh[0] : o->ranks ? o->ranks : 1;
    out->along[1] = o->mesh[0] && o->mesh[1] ? o->mesh[1] : 1;
    ranks = (uint64_t)out->along[0] * out->along[1];
    if (ranks > MAX_RANKS)
        return err_set(e, EINVAL, "%" PRIu64 " ranks: more than %d are not written",
                       ranks, MAX_RANKS);
    out->ranks = (uint32_t)ranks;
    out->home = arena_array(a, count + 1, sizeof *out->home);
    out->own = arena_array(a, count + 1, sizeof *out->own);
    if (!out->home || !out->own)
        return err_nomem(e);
    if (keeps)
        keep_own(in, out);
    if (list_numbers(in, out, a, e) < 0)
        return -ENOMEM;
    ranks = out->ranks;
    h = (struct heap){.load = arena_array(a, (size_t)ranks, sizeof *h.load),
                      .rank = arena_array(a, (size_t)ranks, sizeof *h.rank),
                      .count = (size_t)ranks};
    if (!h.load || !h.rank)
        return err_nomem(e);
    return place_all(in, out, &h, e);
}
