/* SPDX-License-Identifier: MIT */
/* index/chunk_priv.h - numbers of packed chunks, as both of their readers take them. */
#ifndef UFS_INDEX_CHUNK_PRIV_H
#define UFS_INDEX_CHUNK_PRIV_H

#include "base/buf.h"
#include "index/chunk.h"

/* The tag of a packed chunk; see index/chunk.c. */
enum {
    CHUNK_FLAG_BITS = CHUNK_SWAP | CHUNK_CONJ | CHUNK_NEG,
    CHUNK_HAS_STEP = 8,
    CHUNK_HAS_FIRST = 16,
    CHUNK_HAS_PARAM = 32,
    CHUNK_HAS_WHOLE = 64,
    CHUNK_ENCODING_SHIFT = 7,
    CHUNK_PARAM_MAX = 64 << 10, /* keys are shorter, see index/names.h */
};

struct unpacker {
    const unsigned char *data;
    size_t len, pos;
    bool bad; /* a number was cut or too long; then all that follow read as 0 */
};

static inline uint64_t unpack_number(struct unpacker *u)
{
    uint64_t v = 0;

    if (!u->bad && !varint_get(u->data, u->len, &u->pos, &v))
        u->bad = true;
    return u->bad ? 0 : v;
}

static inline uint64_t unpack_delta(struct unpacker *u, uint64_t before)
{
    return before + (uint64_t)unzigzag(unpack_number(u));
}

/* Bytes that a packed chunk takes at least: how many there can be. */
static inline uint64_t chunk_packed_min(uint32_t nd)
{
    return 4 + 2 * (uint64_t)nd;
}

#endif
