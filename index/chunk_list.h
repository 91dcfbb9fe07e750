/* SPDX-License-Identifier: MIT */
/* index/chunk_list.h - the chunks of a tensor as they are packed, read one at a time. */
#ifndef UFS_INDEX_CHUNK_LIST_H
#define UFS_INDEX_CHUNK_LIST_H

#include "index/chunk.h"

struct arena;
struct chunk_list;
struct err;

/*
 * Sees chunk i of n, in order; it is valid during the call. Non-zero ends the reading.
 */
typedef int chunk_list_fn(void *user, const struct chunk *c, size_t i, size_t n,
                          struct err *e);

/*
 * Takes a copy of what chunks_pack() made, checks it as chunks_unpack() does, and shows
 * each chunk to fn. Besides the packed bytes it keeps a dozen bytes a chunk, all in
 * `a`. -EBADMSG, or what fn returned.
 */
int chunk_list_new(struct arena *a, const void *data, size_t len, uint32_t nd,
                   chunk_list_fn *fn, void *user, const struct chunk_list **out,
                   struct err *e);

size_t chunk_list_count(const struct chunk_list *l);

/*
 * Chunk i, which is there. It lies in the room, zero at first, until the room is used
 * again. Costs a few chunks' unpacking, or one where the room has the one before it.
 */
const struct chunk *chunk_list_get(const struct chunk_list *l, size_t i,
                                   struct chunk_room *room);

#endif
