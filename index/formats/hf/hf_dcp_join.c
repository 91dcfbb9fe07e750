/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_dcp_join.c - pieces of many shards put together to full tensors. */
#include "index/formats/hf/hf_dcp_priv.h"

#include <errno.h>
#include <string.h>

/* ---- one tensor ---- */

bool hf_piece_units(const struct safetensors_tensor *t, struct shape *out)
{
    struct shape shape;
    struct err ignored = {0};

    safetensors_shape(t, &shape);
    return shape_units(&shape, t->dtype, out, &ignored) == 0 && out->nd == t->nd;
}

/* Why a piece cannot be put into the tensor, or NULL. */
static const char *piece_fault(const struct hf_scan *s, const struct hf_tensor *t,
                               const struct hf_piece *p)
{
    struct shape units;

    if (s->shard[p->file].fault)
        return s->shard[p->file].fault;
    if (!p->start)
        return "DCP_SHARDING_INFO has no saved_offsets of it that fit its shape";
    if (p->t->dtype != t->dtype)
        return "its pieces are of different element types";
    if (p->t->nd != t->units.nd)
        return "its pieces have different numbers of dimensions";
    if (dtype_bits(t->dtype) < 8 && t->dtype != DTYPE_F4)
        return "torch has no such element type, so its offsets tell nothing";
    if (!hf_piece_units(p->t, &units))
        return "its pieces do not fill whole bytes";
    return NULL;
}

/* The extent of the pieces; 2^53 + 2^53 at most. */
static void extend(struct hf_tensor *t, const struct hf_piece *p)
{
    struct shape units;

    hf_piece_units(p->t, &units);
    for (uint32_t d = 0; d < units.nd; d++)
        t->units.dim[d] = MAX(t->units.dim[d], p->start[d] + units.dim[d]);
}

/* Along which axes do the pieces differ, or not start at 0? A bit each. */
static uint64_t cut_axes(const struct hf_scan *s, const struct hf_tensor *t)
{
    const struct hf_piece *p = s->piece + t->first;
    uint64_t axes = 0;

    for (size_t i = 0; i < t->count; i++)
        for (uint32_t d = 0; d < t->units.nd; d++)
            if (p[i].start[d] != 0 || p[i].t->dim[d] != p[0].t->dim[d])
                axes |= 1ull << d;
    return axes;
}

static void find_axis(const struct hf_scan *s, struct hf_tensor *t)
{
    uint64_t axes = cut_axes(s, t), size;

    t->axis = t->count == 1 && axes == 0 ? -1 : -2;
    if (axes == 0 || (axes & (axes - 1)) != 0)
        return;
    t->axis = __builtin_ctzll(axes);
    for (size_t i = 0; i < t->count; i++) {
        const struct hf_piece *p = &s->piece[t->first + i];
        uint64_t at = hf_piece_at(t, p, &size);

        if (at + size != t->units.dim[t->axis])
            continue;
        t->ended |= size == 0;
        t->last |= hf_rank_of(s, p) == s->max_rank;
    }
}

/* Is it all there by volume? Overlaps, which could feign it, are the sink's to find. */
static void find_full(const struct hf_scan *s, struct hf_tensor *t)
{
    unsigned __int128 sum = 0;
    uint64_t volume;
    struct shape units;
    struct err why = {0};

    for (size_t i = 0; i < t->count; i++) {
        hf_piece_units(s->piece[t->first + i].t, &units);
        if (shape_elements(&units, &volume, &why) == 0)
            sum += volume;
    }
    if (shape_elements(&t->units, &volume, &why) < 0)
        t->fault = "its pieces lie too far apart for any tensor";
    else
        t->full = sum >= volume;
}

/* The size that others tell counts where it is larger: pieces are missing then. */
static void extend_to(struct hf_tensor *t, const struct shape *told)
{
    if (told->nd != t->units.nd)
        return;
    for (uint32_t d = 0; d < told->nd; d++)
        t->units.dim[d] = MAX(t->units.dim[d], told->dim[d]);
    t->told |= shape_equal(told, &t->units);
}

static void extend_to_told(const struct hf_scan *s, struct hf_tensor *t)
{
    const struct safetensors_tensor *name = hf_name_of(s, t);
    const struct hf_dcp_how *how = s->how;
    struct shape shape, units;
    struct err ignored = {0};

    if (t->copy && hf_piece_units(t->copy, &units))
        extend_to(t, &units);
    if (how->size && how->size(how->user, name->name, name->name_len, &shape) &&
        shape_units(&shape, t->dtype, &units, &ignored) == 0)
        extend_to(t, &units);
}

static void measure(const struct hf_scan *s, struct hf_tensor *t)
{
    const struct hf_piece *p = s->piece + t->first;

    t->dtype = p->t->dtype;
    t->units.nd = p->t->nd;
    t->k = s->shard[p->file].k;
    for (size_t i = 0; i < t->count; i++) {
        t->fault = piece_fault(s, t, &p[i]);
        if (t->fault)
            return;
        extend(t, &p[i]);
        if (s->shard[p[i].file].k != t->k)
            t->k = 0;
    }
    find_axis(s, t);
    extend_to_told(s, t);
    find_full(s, t);
}

/* ---- all of them ---- */

static int compare_pieces(const void *a, const void *b, void *user)
{
    const struct hf_scan *s = user;
    const struct hf_piece *x = a, *y = b;
    uint32_t p = hf_rank_of(s, x), q = hf_rank_of(s, y);
    int order = hf_compare_names(x->t, y->t);

    if (order)
        return order;
    return p != q ? (p < q ? -1 : 1) : (x->file > y->file) - (x->file < y->file);
}

/* What the full files hold, or their index names (dtype DTYPE_NONE). */
static int compare_copies(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    int order = hf_compare_names(x, y);

    return order ? order : (x->dtype == DTYPE_NONE) - (y->dtype == DTYPE_NONE);
}

/* In order of the name, that of a file before that of the index; malloc'd. */
static struct safetensors_tensor *list_copies(const struct hf_scan *s, size_t *count)
{
    struct safetensors_tensor *all;
    size_t n = 0;

    *count = s->index.count;
    for (size_t i = 0; i < s->copy.count; i++)
        *count += s->copy.file[i].h.count;
    all = calloc(*count + 1, sizeof *all);
    for (size_t i = 0; all && i < s->copy.count; i++)
        for (size_t k = 0; k < s->copy.file[i].h.count; k++)
            all[n++] = s->copy.file[i].h.tensor[k];
    for (size_t i = 0; all && i < s->index.count; i++)
        all[n++] = (struct safetensors_tensor){
            .name = s->index.entry[i].key, .name_len = strlen(s->index.entry[i].key)};
    if (all)
        qsort(all, *count, sizeof *all, compare_copies);
    return all;
}

static size_t count_names(const struct hf_scan *s)
{
    size_t n = 0;

    for (size_t i = 0; i < s->npieces; i++)
        n += i == 0 || hf_compare_names(s->piece[i - 1].t, s->piece[i].t) != 0;
    return n;
}

/* Tensors that only the full files have: their shards have been lost. */
static void add_copy(struct hf_scan *s, const struct safetensors_tensor *copy)
{
    struct hf_tensor *t = &s->tensor[s->ntensors];

    if (hf_is_head(copy->name, copy->name_len) && s->config.tied)
        return;
    *t = (struct hf_tensor){.copy = copy, .dtype = copy->dtype, .axis = -2};
    if (copy->dtype == DTYPE_NONE) { /* only the name is known: shown as empty bytes */
        t->dtype = DTYPE_U8;
        t->units.nd = 1;
    } else if (!hf_piece_units(copy, &t->units)) {
        return;
    }
    s->ntensors++;
}

static void add_pieces(struct hf_scan *s, size_t first, size_t count,
                       const struct safetensors_tensor *copy)
{
    struct hf_tensor *t = &s->tensor[s->ntensors++];

    *t = (struct hf_tensor){.first = first, .count = count, .copy = copy};
    measure(s, t);
}

/* Both lists in one pass; of a name that comes twice the first one counts. */
static void join_lists(struct hf_scan *s, const struct safetensors_tensor *copy,
                       size_t ncopies)
{
    size_t c = 0, end;

    for (size_t i = 0; i < s->npieces; i = end) {
        const struct safetensors_tensor *t = s->piece[i].t, *full = NULL;

        for (end = i + 1;
             end < s->npieces && hf_compare_names(s->piece[end].t, t) == 0;)
            end++;
        for (; c < ncopies && hf_compare_names(&copy[c], t) < 0; c++)
            if (c == 0 || hf_compare_names(&copy[c - 1], &copy[c]) != 0)
                add_copy(s, &copy[c]);
        for (; c < ncopies && hf_compare_names(&copy[c], t) == 0; c++)
            full = full || copy[c].dtype == DTYPE_NONE ? full : &copy[c];
        add_pieces(s, i, end - i, full);
    }
    for (; c < ncopies; c++)
        if (c == 0 || hf_compare_names(&copy[c - 1], &copy[c]) != 0)
            add_copy(s, &copy[c]);
}

int hf_join_pieces(struct hf_scan *s, struct err *e)
{
    size_t ncopies = 0;

    s->full_tensor = list_copies(s, &ncopies);
    if (s->npieces > 0)
        qsort_r(s->piece, s->npieces, sizeof *s->piece, compare_pieces, s);
    s->tensor = calloc(count_names(s) + ncopies + 1, sizeof *s->tensor);
    if (!s->full_tensor || !s->tensor)
        return err_nomem(e);
    join_lists(s, s->full_tensor, ncopies);
    return 0;
}

const struct safetensors_tensor *hf_name_of(const struct hf_scan *s,
                                            const struct hf_tensor *t)
{
    return t->count > 0 ? s->piece[t->first].t : t->copy;
}

bool hf_same_as_copy(const struct hf_tensor *t)
{
    struct shape units;

    return t->copy && hf_piece_units(t->copy, &units) && shape_equal(&units, &t->units);
}
