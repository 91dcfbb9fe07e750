/* SPDX-License-Identifier: MIT */
/* index/formats/hf/train_ranks.c - Accelerate's state dicts in a torch.save file a rank. */
#include "index/formats/hf/train_ranks.h"

#include <errno.h>
#include <stdlib.h>

#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/rankfiles/rank_set.h"

struct rank_file {
    uint64_t rank;
    const char *name; /* borrowed from the listing */
};

int train_rank_sets_add(struct train_rank_set *sets, size_t *count,
                        const struct train_part *part)
{
    size_t i = 0;

    while (i < *count && (sets[i].kind != part->kind || sets[i].index != part->index))
        i++;
    if (i == TRAIN_MAX_RANK_SETS)
        return -E2BIG;
    if (i == *count)
        sets[(*count)++] = (struct train_rank_set){part->kind, part->index, 0, 0};
    sets[i].files++;
    sets[i].ranks = MAX(sets[i].ranks, part->rank + 1);
    return 0;
}

static int compare_ranks(const void *a, const void *b)
{
    const struct rank_file *x = a, *y = b;

    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

/* Names are in order of their bytes: rank 10 before rank 2. */
static size_t collect(const struct listing *l, const struct train_rank_set *set,
                      struct rank_file *out)
{
    struct train_part part;
    size_t n = 0;

    for (size_t i = 0; i < listing_count(l) && n < set->files; i++)
        if (train_part_of(listing_at(l, i), &part) && part.kind == set->kind &&
            part.index == set->index)
            out[n++] = (struct rank_file){part.rank, listing_at(l, i)->name};
    qsort(out, n, sizeof *out, compare_ranks);
    return n;
}

int train_ranks_report(const struct scan_context *c, struct sink *sink,
                       const struct train_rank_set *set, const struct rank_set_how *how,
                       struct err *e)
{
    CLEANUP_FREE struct rank_file *file = calloc(set->files + 1, sizeof *file);
    CLEANUP(rank_set_freep) struct rank_set *ranks = NULL;
    size_t n;

    if (!file)
        return err_nomem(e);
    n = collect(c->listing, set, file);
    TRY(rank_set_new(c, sink, how, &ranks, e));
    rank_set_expect(ranks, set->ranks - n);
    for (size_t i = 0; i < n; i++)
        TRY(rank_set_add(ranks, file[i].name, e));
    TRY(rank_set_load(ranks, e));
    return rank_set_report(ranks, e);
}
