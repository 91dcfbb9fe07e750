/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_dcp_proof.c - are all shards there? What sizes of tensors tell of it. */
#include "index/formats/hf/hf_dcp_priv.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "index/key_text.h"

enum { MAX_LOST_RANKS = 8 /* that are tried when sizes do not fit each other */ };

/* ---- what it all proves ---- */

/* Is it whole in one piece, or cut along one axis with offsets that follow the ranks? */
static bool is_row(const struct hf_scan *s, const struct hf_tensor *t)
{
    uint64_t last = 0, size;

    if (t->axis < 0)
        return t->axis == -1;
    for (size_t i = 0; i < t->count; i++) {
        uint64_t at = hf_piece_at(t, &s->piece[t->first + i], &size);

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
        hf_piece_at(t, &s->piece[t->first + i], &size);
        c = MAX(c, size);
    }
    for (size_t i = 0; i < t->count; i++) {
        const struct hf_piece *p = &s->piece[t->first + i];
        uint64_t at = hf_piece_at(t, p, &size);

        if (size > 0 && (at % c != 0 || at / c + 1 != hf_rank_of(s, p)))
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

        hf_piece_at(t, p, &size);
        c = MAX(c, size);
        if (size > 0 && hf_rank_of(s, p) == s->max_rank)
            last = size;
    }
    return last > 0 && last < c && 2 * c >= s->max_rank + 1 + last;
}

/* With hybrid sharding any replica may have written its first piece. */
static bool starts_elsewhere(const struct hf_scan *s, const struct hf_tensor *t)
{
    uint64_t size;

    for (size_t i = 0; t->axis >= 0 && i < t->count; i++) {
        const struct hf_piece *p = &s->piece[t->first + i];

        if (hf_piece_at(t, p, &size) == 0 && size > 0 && hf_rank_of(s, p) > 1)
            return true;
    }
    return false;
}

/* In one piece, and not of rank 1? What is cut has its first piece there. */
static bool is_elsewhere(const struct hf_scan *s, const struct hf_tensor *t)
{
    return s->proof.first && t->axis == -1 && hf_rank_of(s, &s->piece[t->first]) > 1;
}

/* Is there a rank that could have had a share of it in a file that is not there? */
static bool may_lack(const struct hf_scan *s, const struct hf_tensor *t)
{
    return s->proof.flat && t->count > 0 && t->units.nd > 0 && !t->told && !t->ended &&
           !t->last && !is_elsewhere(s, t) && (hf_without(s, t) || hf_doubtful(s, t));
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

void hf_lose(struct hf_proof *p, uint32_t k, const char *fmt, ...)
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
        hf_lose(&s->proof, 0, "%s is among the full files, but in no shard", key);
    else if (rank > 0)
        hf_lose(&s->proof, t->k,
                "pieces of %s are missing, and rank %u has no file of model file %u",
                key, rank, t->k);
    else
        hf_lose(&s->proof, 0, "pieces of %s are missing", key);
}

/* It was there: what it held is lost, whether a hole tells of it or not. */
static void weigh_damaged(struct hf_scan *s)
{
    for (size_t i = 0; i < s->file.count; i++)
        if (s->shard[i].damaged)
            hf_lose(&s->proof, s->shard[i].k, "%s is damaged", s->file.file[i].name);
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
    else if (may_lack(s, t) && hf_without(s, t))
        hf_lose(
            &s->proof, t->k,
            "rank %u has no file of model file %u, where it may have had a share of %s",
            hf_without(s, t), t->k, key);
    if (s->proof.flat && t->axis >= 0 && tells_ranks(s, t))
        s->proof.ranks = true;
    if (!t->full || rows == 0)
        return;
    if (t->units.dim[0] < rows)
        hf_lose(&s->proof, 0,
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
            hf_lose(
                &s->proof, 0,
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

    s->proof.row = s->proof.flat = s->proof.first = true;
    for (size_t i = 0; i < s->ntensors; i++) {
        const struct hf_tensor *t = &s->tensor[i];

        if (t->fault || t->count == 0)
            continue;
        s->proof.row &= is_row(s, t);
        s->proof.first &= !starts_elsewhere(s, t);
        s->proof.flat &= t->axis < 0 || is_flat(s, t);
        shared |= t->axis >= 0 && t->last;
    }
    s->proof.flat &= s->proof.row && shared;
}

int hf_weigh(struct hf_scan *s, struct err *e)
{
    find_order(s);
    weigh_damaged(s);
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
