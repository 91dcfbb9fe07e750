/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_wraps.c - which tensors may be of a class of their own. */
#include "index/formats/dcp/dcp_scan.h"

#include <stdlib.h>

#include "base/checked.h"
#include "base/vec.h"

/* Bytes of elements in which a class of its own need not be shorter. */
enum { SMALL = 64 << 10 };

/* Bytes of a chunk of plain elements; 0: none, or nothing that can be told. */
static uint64_t plain_bytes(const struct dcp_scan *s, const struct dcp_chunk *c,
                            enum dtype dtype)
{
    uint64_t n = dtype_unit(dtype);
    const int64_t *dim;
    uint32_t nd;

    if (c->size >= DCP_BAD_SHAPE)
        return 0;
    dim = dcp_shape(&s->names, c->size, &nd);
    for (uint32_t k = 0; k < nd; k++)
        if (dim[k] < 0 || mul_overflows(n, (uint64_t)dim[k], &n))
            return 0;
    return n;
}

static const struct dcp_tensor *tensor_of(const struct dcp_scan *s,
                                          const struct dcp_ref *ref)
{
    const struct dcp_entry *entry = dcp_entry_of(s, ref);
    const struct dcp_tensor *t;

    if (entry->tensor == DCP_OBJECT || entry->whole != DCP_NO_SHAPE)
        return NULL;
    t = &dcp_part_of(s, ref)->tensor[entry->tensor];
    return t->bad ? NULL : t;
}

/* The first chunk that has elements: its number in the tensor, or UINT32_MAX. */
static uint32_t first_chunk(const struct dcp_scan *s, const struct dcp_ref *ref,
                            const struct dcp_tensor *t, uint64_t *bytes)
{
    for (uint32_t k = 0; k < t->count; k++) {
        *bytes = plain_bytes(s, &dcp_part_of(s, ref)->chunk[t->first + k], t->dtype);
        if (*bytes > 0)
            return k;
    }
    return UINT32_MAX;
}

/* A zip of torch is always longer than its data. */
static bool is_shorter(const struct dcp_scan *s, const struct dcp_ref *ref,
                       const struct dcp_tensor *t, uint32_t k, uint64_t bytes)
{
    const struct dcp_metadata *m = dcp_part_of(s, ref);
    const struct dcp_stored *stored =
        dcp_stored_find(m, ref->key, m->chunk[t->first + k].start);

    return stored && !stored->bad && !stored->zstd && stored->length < bytes;
}

void dcp_find_wraps(struct dcp_scan *s)
{
    const struct dcp_metadata *m = s->part[0].m;

    for (uint32_t i = 0; i < m->nentries && !s->wraps; i++) {
        struct dcp_ref ref = {.key = m->entry[i].key, .entry = i};
        const struct dcp_tensor *t = tensor_of(s, &ref);
        uint64_t bytes = 0;
        uint32_t k = t ? first_chunk(s, &ref, t, &bytes) : UINT32_MAX;

        s->wraps = k != UINT32_MAX && is_shorter(s, &ref, t, k, bytes);
    }
}

static int add_piece(struct dcp_scan *s, const struct dcp_ref *ref, uint32_t chunk,
                     struct err *e)
{
    if (!VEC_ROOM(s->piece, s->npieces, s->piece_cap))
        return err_nomem(e);
    s->piece[s->npieces] = *ref;
    s->piece[s->npieces++].chunk = chunk + 1;
    return 0;
}

int dcp_look_into(struct dcp_scan *s, const struct dcp_ref *ref, struct err *e)
{
    const struct dcp_tensor *t = s->wraps ? tensor_of(s, ref) : NULL;
    uint64_t bytes = 0;
    uint32_t first = t ? first_chunk(s, ref, t, &bytes) : UINT32_MAX;

    if (first == UINT32_MAX || (bytes > SMALL && !is_shorter(s, ref, t, first, bytes)))
        return 0;
    TRY(add_piece(s, ref, t->first + first, e));
    for (uint32_t k = 0; k < t->count; k++)
        if (k != first)
            TRY(add_piece(s, ref, t->first + k, e));
    return 1;
}
