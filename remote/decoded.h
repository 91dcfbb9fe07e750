/* SPDX-License-Identifier: MIT */
/* remote/decoded.h - compressed pieces of shards, decoded once into a bounded cache. */
#ifndef UFS_REMOTE_DECODED_H
#define UFS_REMOTE_DECODED_H

#include "base/base.h"

struct err;
struct source;
struct decoded_cache;

/*
 * Decoded pieces lie in unnamed files of `dir` (page cache, not our memory; NULL: memory),
 * at most `budget` bytes of them; the least recently used that nobody reads go first.
 */
enum { DECODED_MEMORY_ALONE = 256 << 20 }; /* a budget where no disk is to be used */
int decoded_new(const char *dir, uint64_t budget, struct decoded_cache **out,
                struct err *e);

void decoded_free(struct decoded_cache *c);

uint64_t decoded_budget(const struct decoded_cache *c);

/* Which piece: bytes [off, off + len) of this file, in this encoding. */
struct decoded_key {
    uint64_t dev, ino, off, len;
    int64_t mtime_ns, ctime_ns;
    uint32_t encoding;
    uint64_t variant; /* a hash of all else that decides what comes out, or 0 */
};

/* The piece [off, off + len) of `s`, variant 0. */
struct decoded_key decoded_key_of(const struct source *s, uint64_t off, uint64_t len,
                                  uint32_t encoding);

/*
 * Decodes all of `in` into the file `fd` from its start; sets *size to the bytes written,
 * which must not pass `limit` (-EFBIG: it is called again with a higher one where there is
 * room). Called without any lock held; must not call decoded_get() of the same cache.
 */
typedef int decode_fn(void *user, struct source *in, int fd, uint64_t limit,
                      uint64_t *size, struct err *e);

/*
 * The plain bytes as a source (the caller's reference), decoding them when they are not
 * there. `size`: how many come out, 0: that is not known, and a piece that needs more
 * room than was thought is begun anew. Of a known size room is set aside for all of it.
 * Several threads that want one piece wait for one decoding and share its failure,
 * which is not kept. -ESTALE when `in` changed while it was decoded. -ENOSPC when the
 * piece cannot fit the budget beside the pieces that are being read.
 */
int decoded_get(struct decoded_cache *c, const struct decoded_key *key,
                struct source *in, uint64_t size, decode_fn *fn, void *user,
                struct source **out, struct err *e);

/*
 * The same for a piece of which it is known that `size` bytes come out. The function
 * fills dst[0..size) or fails. Short pieces lie in memory first, DECODED_MEMORY bytes
 * of all together (or the budget, where that is less): who reads a tensor from its
 * start to its end needs each only for a moment. A piece that is wanted again after it
 * had to go is decoded into a file and stays there, within the budget.
 */
enum { DECODED_MEMORY = 128 << 20 };
typedef int decode_block_fn(void *user, struct source *in, void *dst, size_t size,
                            struct err *e);
int decoded_get_block(struct decoded_cache *c, const struct decoded_key *key,
                      struct source *in, size_t size, decode_block_fn *fn, void *user,
                      struct source **out, struct err *e);

#endif
