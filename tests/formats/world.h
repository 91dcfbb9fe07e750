/* SPDX-License-Identifier: MIT */
/* tests/formats/world.h - a source opened with its index in memory, and tensors read. */
#ifndef UFS_TESTS_FORMATS_WORLD_H
#define UFS_TESTS_FORMATS_WORLD_H

#include "base/buf.h"
#include "index/catalog.h"
#include "index/formats/scan.h"

struct decoded_cache;

struct world {
    struct store *store;
    struct catalog *catalog;
    struct scanner *scanner;
    struct decoded_cache *decoded;
    struct arena *arena;
};

int world_open(const char *path, struct world *out, struct err *e);
void world_close(struct world *w);

/*
 * The bytes of one tensor, put together chunk by chunk and element by element: nothing of
 * plans, spans or assemblers is used, so that it is another opinion. -EBADMSG with the
 * tensor's fault, or when the chunks do not cover each element once.
 */
int world_read(struct world *w, int64_t checkpoint, const struct tensor_info *t,
               struct buf *out, struct err *e);

/* All tensors of a checkpoint, in the world's arena. */
int world_tensors(struct world *w, int64_t checkpoint, struct tensor_info **out,
                  size_t *count, struct err *e);

/* The lower-case digits of the SHA-256 of a buffer. */
void sha256_hex(const void *data, size_t len, char out[65]);

#endif
