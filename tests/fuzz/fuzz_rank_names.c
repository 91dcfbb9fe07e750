/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_rank_names.c - names of ranks' files, nanotron's slices, Llama's params.json. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "base/err.h"
#include "index/formats/fairscale/fairscale_names.h"
#include "index/formats/llama/llama_rules.h"
#include "index/formats/nanotron/nanotron_names.h"
#include "index/formats/neox/neox_rules.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MEMORY = 64 << 20 };

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

static void check_rank(const struct nano_rank *r)
{
    require(!r->is || r->at < r->of, "a rank past the last one");
}

static void try_names(const char *text)
{
    struct nano_weight_name weight;
    struct nano_ranks ranks;
    struct shard_name shard;
    uint32_t layer, rank;
    int digits;

    if (nano_weight_name(text, &weight)) {
        require(weight.len > 0 && weight.start + weight.len < strlen(text), "its name");
        check_rank(&weight.rank.pp);
        check_rank(&weight.rank.tp);
        check_rank(&weight.rank.ep);
    }
    if (nano_optimizer_name(text, &ranks)) {
        check_rank(&ranks.pp);
        check_rank(&ranks.dp);
        check_rank(&ranks.tp);
        check_rank(&ranks.ep);
    }
    if (shard_name(text, &shard))
        require(shard.stem >= 10 && shard.stem < strlen(text), "its stem");
    if (neox_layer_name(text, &layer, &rank, &digits))
        require(digits >= 2 && (size_t)digits < strlen(text), "its digits");
    neox_rank_name(text, &rank);
    neox_dialect(text, strlen(text));
    llama_kind(text, strlen(text));
    metaseq_rule(text, strlen(text));
    nano_version(text);
}

static void try_params(const char *text)
{
    struct llama_params p;
    struct err e = {0};

    if (llama_params_parse(text, strlen(text), &p, &e) == 0)
        llama_whole(LLAMA_KEY_VALUE, &p);
    else
        require(e.code && e.text[0], "an error without words");
}

static void check_boxes(const struct rank_boxes *b, const struct shape *local,
                        const struct shape *whole)
{
    for (size_t i = 0; i < b->count; i++)
        for (uint32_t k = 0; k < b->nd; k++) {
            const struct rank_box *x = &b->box[i];

            require(!range_outside(x->from[k], x->size[k], local->dim[k]),
                    "a box outside of the piece");
            require(!range_outside(x->to[k], x->size[k], whole->dim[k]),
                    "a box outside of the whole");
        }
}

/* "SHAPE\nSHAPE\nSLICES": the piece's, the whole's. */
static void try_slices(char *text)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(MEMORY);
    char *second = strchr(text, '\n'),
         *third = second ? strchr(second + 1, '\n') : NULL;
    struct shape local, whole;
    struct rank_boxes boxes;
    struct err e = {0};

    if (!a || !third)
        return;
    *second = *third = '\0';
    if (!nano_shape(text, &local) || !nano_shape(second + 1, &whole))
        return;
    if (nano_slices(third + 1, &local, &whole, a, &boxes, &e) == 0)
        check_boxes(&boxes, &local, &whole);
    else
        require(e.code == EBADMSG || e.code == ENOTSUP || e.code == ENOMEM, "its code");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE char *text = malloc(size + 1);

    if (!text)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    try_names(text);
    try_params(text);
    try_slices(text);
    return 0;
}
