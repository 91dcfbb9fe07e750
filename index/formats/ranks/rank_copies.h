/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/rank_copies.h - a tensor that several ranks hold whole, or a summand of. */
#ifndef UFS_INDEX_FORMATS_RANKS_RANK_COPIES_H
#define UFS_INDEX_FORMATS_RANKS_RANK_COPIES_H

#include "base/buf.h"
#include "index/chunk.h"

/*
 * CHUNK_COPIES: the elements themselves, row-major, and the same once more in other places,
 * which `verify --deep` compares. CHUNK_SUM: the tensor is the sum of this and the other
 * places, in their order, each addition rounded to the tensor's own type as torch does
 * it; CHUNK_MEAN divides that by how many there are. The codec_key of the tensor, or of
 * the chunk, lists the places: "FILE OFFSET FILE OFFSET".
 */
extern const struct chunk_codec codec_copies;
extern const struct chunk_codec codec_sum;
extern const struct chunk_codec codec_mean;

/* Appends a place to such a list. */
void rank_copies_add(struct buf *list, uint32_t file, uint64_t offset);

/*
 * Takes the next place off a list, which *p points into: 1; 0: it ended; -EBADMSG: that is none.
 */
int rank_copies_next(const char **p, const char *end, uint32_t *file, uint64_t *offset);

/* Can CHUNK_SUM and CHUNK_MEAN add them? */
bool rank_sum_adds(enum dtype d);

#endif
