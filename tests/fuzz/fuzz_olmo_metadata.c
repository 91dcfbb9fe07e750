/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_olmo_metadata.c - any metadata.json: what is taken from it is in bounds. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/olmo/olmo_metadata.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

static void check_intervals(const struct olmo_tensor *t, const struct olmo_piece *p)
{
    for (uint32_t i = 0; i < p->count; i++) {
        uint64_t begin = p->at[2 * (size_t)i], end = p->at[2 * (size_t)i + 1];

        require(begin < end && end <= t->elements, "an interval");
        require(i == 0 || begin != p->at[2 * (size_t)i - 1], "neighbours not joined");
    }
}

static void check_box(const struct olmo_tensor *t, const struct olmo_piece *p)
{
    for (uint32_t k = 0; k < t->nd; k++)
        require(p->at[t->nd + k] > 0 && p->at[t->nd + k] <= t->dim[k] &&
                    p->at[k] <= t->dim[k] - p->at[t->nd + k],
                "a box");
}

static void check_tensor(const struct olmo_metadata *m, const struct olmo_tensor *t)
{
    struct shape shape;

    require(!t->fault || t->npieces == 0, "pieces of a tensor with a fault");
    require(t->elements > 0 || t->npieces == 0, "pieces of nothing");
    if (!t->dim) {
        require(t->fault != NULL, "neither shape nor fault");
        return;
    }
    olmo_shape(t, &shape);
    require(shape.nd == t->nd && t->nd <= SHAPE_MAX_DIMS, "dimensions");
    for (size_t i = 0; i < t->npieces; i++) {
        const struct olmo_piece *p = &t->piece[i];

        require(p->file < m->nfiles && p->count > 0, "a piece");
        if (p->box)
            check_box(t, p);
        else
            check_intervals(t, p);
        olmo_piece_is_whole(t, p);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE char *text = malloc(size ? size : 1); /* no byte more than there is */
    struct olmo_metadata m;
    struct err e = {0};

    if (!text)
        return 0;
    if (size > 0)
        memcpy(text, data, size);
    olmo_metadata_sniff(text, size);
    if (olmo_metadata_parse(text, size, &m, &e) < 0) {
        require(e.code == EBADMSG && e.text[0], "an error without words");
        return 0;
    }
    for (size_t i = 0; i < m.count; i++)
        check_tensor(&m, &m.tensor[i]);
    olmo_metadata_release(&m);
    return 0;
}
