/* SPDX-License-Identifier: MIT */
/* index/formats/hf_dcp_proof.c - full tensors out of pieces, and what proves their size. */
#include "index/formats/hf_dcp_priv.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "index/key_text.h"

enum { MAX_LOST_RANKS = 8 /* that are tried when sizes do not fit each other */ };

/* ---- one tensor ---- */

bool hf_piece_units(const struct safetensors_tensor *t, struct shape *out)
{
    struct shape shape;
    struct err ignored = {0};

    safetensors_shape(t, &shape);
    return shape_units(&shape, t->dtype, out, &ignored) == 0 && out->nd == t->nd;
}

static uint32_t rank_of(const struct hf_scan *s, const struct hf_piece *p)
{
    return s->shard[p->file].rank;
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

/* A piece along the only axis of a tensor. */
static uint64_t piece_at(const struct hf_tensor *t, const struct hf_piece *p,
                         uint64_t *size)
{
    struct shape units;

    hf_piece_units(p->t, &units);
    *size = units.dim[t->axis];
    return p->start[t->axis];
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
        uint64_t at = piece_at(t, p, &size);

        if (at + size != t->units.dim[t->axis])
            continue;
        t->ended |= size == 0;
        t->last |= rank_of(s, p) == s->max_rank;
    }
}

/* Do the volumes add up? Overlaps, which could feign it, are the sink's to find. */
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
        t->full = sum == volume;
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
    uint32_t p = rank_of(s, x), q = rank_of(s, y);
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

/* ---- what it all proves ---- */

/* Is it whole in one piece, or cut along one axis with offsets that follow the ranks? */
static bool is_row(const struct hf_scan *s, const struct hf_tensor *t)
{
    uint64_t last = 0, size;

    if (t->axis < 0)
        return t->axis == -1;
    for (size_t i = 0; i < t->count; i++) {
        uint64_t at = piece_at(t, &s->piece[t->first + i], &size);

        if (at < last)
            return false;
        last = at;
    }
    return true;
}

/*
 * Torch cuts an axis of n in pieces of c = ceil(n / ranks), of which the last ones are
 * shorter or empty. Is the n-th piece the one of rank n?
 */
static bool is_flat(const struct hf_scan *s, const struct hf_tensor *t)
{
    uint64_t c = 0, size;

    for (size_t i = 0; i < t->count; i++) {
        piece_at(t, &s->piece[t->first + i], &size);
        c = MAX(c, size);
    }
    for (size_t i = 0; i < t->count; i++) {
        const struct hf_piece *p = &s->piece[t->first + i];
        uint64_t at = piece_at(t, p, &size);

        if (size > 0 && (at % c != 0 || at / c + 1 != rank_of(s, p)))
            return false;
    }
    return true;
}

/*
 * With one more rank c would be smaller, unless it is small against the number of ranks:
 * so a last piece s < c in a file of the highest rank speaks for that being the highest.
 * It proves nothing: a mesh of which half is lost can look like this.
 */
static bool tells_ranks(const struct hf_scan *s, const struct hf_tensor *t)
{
    uint64_t c = 0, last = 0, size;

    for (size_t i = 0; i < t->count; i++) {
        const struct hf_piece *p = &s->piece[t->first + i];

        piece_at(t, p, &size);
        c = MAX(c, size);
        if (size > 0 && rank_of(s, p) == s->max_rank)
            last = size;
    }
    return last > 0 && last < c && 2 * c >= s->max_rank + 1 + last;
}

/* In one piece, and not of rank 1? What is cut has its first piece there. */
static bool is_elsewhere(const struct hf_scan *s, const struct hf_tensor *t)
{
    return t->axis == -1 && rank_of(s, &s->piece[t->first]) > 1;
}

/* Is there a rank that could have had a share of it in a file that is not there? */
static bool may_lack(const struct hf_scan *s, const struct hf_tensor *t)
{
    return s->proof.flat && t->count > 0 && t->units.nd > 0 && !t->told && !t->ended &&
           !t->last && !is_elsewhere(s, t) && hf_without(s, t);
}

/* A size that config.json gives: 0 where it does not. */
static uint64_t rows_in_config(const struct hf_scan *s,
                               const struct safetensors_tensor *t)
{
    static const char *const norms[] = {"model.norm.weight", "transformer.ln_f.weight",
                                        "model.language_model.norm.weight"};

    if (hf_is_embedding(t->name, t->name_len) && t->nd == 2)
        return s->config.vocab_size;
    for (size_t i = 0; i < ARRAY_SIZE(norms); i++)
        if (t->nd == 1 && t->name_len == strlen(norms[i]) &&
            memcmp(t->name, norms[i], t->name_len) == 0)
            return s->config.hidden_size;
    return 0;
}

static void PRINTF(3, 4) lose(struct hf_proof *p, uint32_t k, const char *fmt, ...)
{
    va_list args;

    if (p->lost && p->k != k)
        p->k = 0;
    if (p->lost)
        return;
    p->lost = true;
    p->k = k;
    va_start(args, fmt);
    vsnprintf(p->why, sizeof p->why, fmt, args);
    va_end(args);
}

static void weigh_hole(struct hf_scan *s, const struct hf_tensor *t, const char *key)
{
    uint32_t rank = hf_without(s, t);

    if (t->count == 0)
        lose(&s->proof, 0, "%s is among the full files, but in no shard", key);
    else if (rank > 0)
        lose(&s->proof, t->k,
             "pieces of %s are missing, and rank %u has no file of model file %u", key,
             rank, t->k);
    else
        lose(&s->proof, 0, "pieces of %s are missing", key);
}

static void weigh_tensor(struct hf_scan *s, const struct hf_tensor *t)
{
    const struct safetensors_tensor *name = hf_name_of(s, t);
    uint64_t rows = rows_in_config(s, name);
    char key[200];

    if (t->fault)
        return;
    key_text(key, sizeof key, name->name, name->name_len);
    if (!t->full)
        weigh_hole(s, t, key);
    else if (may_lack(s, t))
        lose(
            &s->proof, t->k,
            "rank %u has no file of model file %u, where it may have had a share of %s",
            hf_without(s, t), t->k, key);
    if (s->proof.flat && t->axis >= 0 && tells_ranks(s, t))
        s->proof.ranks = true;
    if (!t->full || rows == 0)
        return;
    if (t->units.dim[0] < rows)
        lose(&s->proof, 0,
             "%s has %" PRIu64 " rows in the shards, and %" PRIu64 " by config.json",
             key, t->units.dim[0], rows);
    else if (t->units.dim[0] == rows && s->proof.row &&
             (t->axis == 0 || s->max_rank == 1))
        s->proof.config = true;
}

/* ---- sizes that do not fit each other ---- */

struct sizes {
    uint64_t *at; /* malloc */
    size_t count;
};

static int compare_sizes(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;

    return *x < *y ? -1 : *x > *y;
}

static bool has_size(const struct sizes *z, uint64_t size)
{
    return bsearch(&size, z->at, z->count, sizeof size, compare_sizes);
}

static void sort_sizes(struct sizes *z)
{
    size_t n = 0;

    qsort(z->at, z->count, sizeof *z->at, compare_sizes);
    for (size_t i = 0; i < z->count; i++)
        if (n == 0 || z->at[n - 1] != z->at[i])
            z->at[n++] = z->at[i];
    z->count = n;
}

/* Sizes along the axis that ranks may share, and along all others. */
static int collect_sizes(const struct hf_scan *s, struct sizes *cut,
                         struct sizes *uncut)
{
    size_t dims = 1;

    for (size_t i = 0; i < s->ntensors; i++)
        dims += s->tensor[i].units.nd;
    cut->at = reallocarray(NULL, dims, sizeof *cut->at);
    uncut->at = reallocarray(NULL, dims, sizeof *uncut->at);
    if (!cut->at || !uncut->at)
        return -ENOMEM;
    for (size_t i = 0; i < s->ntensors; i++) {
        const struct hf_tensor *t = &s->tensor[i];
        int axis = t->axis == -1 && s->max_rank == 1 ? 0 : t->axis;

        if (axis < 0 || t->fault)
            continue;
        for (uint32_t d = 0; d < t->units.nd; d++) {
            struct sizes *z = (int)d == axis ? cut : uncut;

            z->at[z->count++] = t->units.dim[d];
        }
    }
    sort_sizes(cut);
    sort_sizes(uncut);
    return 0;
}

/*
 * What comes out of one layer goes into the next, so that sizes of columns are sizes of
 * rows elsewhere. If none is, but two or more would be if some more ranks had had their
 * share of the rows, the files of those ranks are lost.
 */
static bool would_fit(const struct sizes *cut, const struct sizes *uncut,
                      uint64_t ranks, uint64_t more)
{
    size_t fit = 0;

    for (size_t i = 0; i < uncut->count; i++) {
        uint64_t n = uncut->at[i], c = (n + ranks + more - 1) / (ranks + more);

        if (n > 1 && has_size(cut, n))
            return false;
        fit += n > 2 * (ranks + more) && has_size(cut, c * ranks);
    }
    return fit >= 2;
}

static int weigh_sizes(struct hf_scan *s, struct err *e)
{
    struct sizes cut = {0}, uncut = {0};
    int r = collect_sizes(s, &cut, &uncut);

    for (uint32_t more = 1; r == 0 && more <= MAX_LOST_RANKS; more++)
        if (would_fit(&cut, &uncut, s->max_rank, more))
            lose(&s->proof, 0,
                 "no tensor has as many rows as another has columns, but some would if "
                 "there had been %u ranks: only files of %u are there",
                 s->max_rank + more, s->max_rank);
    free(cut.at);
    free(uncut.at);
    return r < 0 ? err_nomem(e) : 0;
}

/* One that is told by others speaks for the rest, as far as files are concerned. */
static bool any_told(const struct hf_scan *s)
{
    for (size_t i = 0; i < s->ntensors; i++)
        if (s->tensor[i].copy || s->tensor[i].told)
            return true;
    return false;
}

static void find_order(struct hf_scan *s)
{
    bool shared = false;

    s->proof.row = s->proof.flat = true;
    for (size_t i = 0; i < s->ntensors; i++) {
        const struct hf_tensor *t = &s->tensor[i];

        if (t->fault || t->count == 0)
            continue;
        s->proof.row &= is_row(s, t);
        s->proof.flat &= t->axis < 0 || is_flat(s, t);
        shared |= t->axis >= 0 && t->last;
    }
    s->proof.flat &= s->proof.row && shared;
}

int hf_weigh(struct hf_scan *s, struct err *e)
{
    find_order(s);
    for (size_t i = 0; i < s->ntensors; i++)
        weigh_tensor(s, &s->tensor[i]);
    if (!s->proof.row || s->proof.ranks || s->proof.config || s->proof.lost ||
        any_told(s))
        return 0;
    return weigh_sizes(s, e);
}

/* Is its size sure, even if some file has been lost? */
static bool is_sure(const struct hf_scan *s, const struct hf_tensor *t)
{
    if (t->units.nd == 0 || t->told)
        return true;
    if (s->proof.config && !may_lack(s, t))
        return true;
    return s->proof.row && (t->ended || is_elsewhere(s, t));
}

bool hf_trusted(const struct hf_scan *s, const struct hf_tensor *t)
{
    if (!s->proof.lost || (s->proof.k && t->k && t->k != s->proof.k))
        return true;
    return is_sure(s, t) || (s->proof.ranks && !may_lack(s, t));
}

bool hf_all_sure(const struct hf_scan *s)
{
    for (size_t i = 0; i < s->ntensors; i++)
        if (!s->tensor[i].fault && !is_sure(s, &s->tensor[i]))
            return false;
    return true;
}
