/* SPDX-License-Identifier: MIT */
/* index/chunk.h - one N-d box of one tensor, stored in one place of one shard file. */
#ifndef UFS_INDEX_CHUNK_H
#define UFS_INDEX_CHUNK_H

#include "base/buf.h"
#include "index/dtype.h"
#include "index/shape.h"

struct arena;
struct chunk_list;
struct err;
struct source;

/*
 * How the bytes at [offset, offset + length) of the file are to be understood. All but
 * CHUNK_PLAIN are resolved by their format when a window first needs them (struct
 * chunk_codec). Stored in the index: never renumber.
 */
enum chunk_encoding {
    CHUNK_PLAIN = 0,          /* the elements themselves, little-endian */
    CHUNK_TORCH_ZIP = 1,      /* a whole torch.save zip that holds one tensor */
    CHUNK_TORCH_ZIP_ZSTD = 2, /* the same in one zstd frame (stream.zstd/1) */
    CHUNK_SAFETENSORS = 3,    /* a safetensors image that starts at offset; by name */
    CHUNK_ZIP_DEFLATE = 4,    /* a deflated member of a zip; key: size, crc, skip */
    CHUNK_FILL = 5, /* no bytes anywhere: one value, all over the box (below) */
    CHUNK_ZARR = 6, /* a zarr chunk behind codecs; they stand in the codec_key */
    CHUNK_ZARR_LITERAL = 7, /* the same, whose stored bytes stand there too */
    CHUNK_COPIES =
        16, /* plain, and other ranks have the same; key: where (rank_copies.h) */
    CHUNK_SUM = 17,  /* to be added to what other ranks have; key: the same */
    CHUNK_MEAN = 18, /* the sum, divided by the number of ranks */
};

/* Work on each element on its way. Bits, in plan order: swap first. */
enum chunk_flags {
    CHUNK_SWAP = 1, /* stored big-endian: swap the bytes of each component */
    CHUNK_CONJ = 2, /* complex: negate the imaginary part */
    CHUNK_NEG = 4,  /* negate (all components) */
};

/*
 * `start` and `size` are the box in the tensor, in units (shape_units), nd of each. The
 * element (i0, i1, ...) of the box lies at unit first + sum(i[k] * step[k]) of the piece;
 * step NULL: row-major in `size`. Zero-volume chunks are legal and cover nothing. The box
 * may be a part of the piece (a map has cut it): then it has a step of its own.
 *
 * `whole` then is the shape of the piece as the checkpoint's metadata have it (whole_nd
 * units; NULL: not told), for a codec to hold against what is stored.
 *
 * `param` is what its codec has to know: a key inside the shard, what comes out of a
 * compressed piece. NULL: the tensor's codec key, or its key. It is only given by chunk
 * where one tensor is made of pieces that need different ones.
 *
 * CHUNK_FILL lies nowhere: every element is the same, and `param` its bytes in hexadecimal
 * digits, as it lies in memory. offset, length, first and step mean nothing; the file is
 * the one that tells the value.
 */
struct chunk {
    uint32_t file; /* number given by sink_file(), of this checkpoint */
    uint8_t encoding, flags;
    uint64_t offset, length; /* of the piece in the file, bytes */
    const uint64_t *start, *size;
    uint64_t first;
    const int64_t *step;
    const char *param;
    uint32_t param_len;
    uint32_t whole_nd;
    const uint64_t *whole;
};

/*
 * Where a resolved piece really is: unit strides and first byte in `src`, which is the
 * shard itself or a decoded copy of the piece. The holder puts `src`.
 */
struct chunk_place {
    struct source *src;
    uint64_t base;                /* byte of the box's first element in src */
    int64_t step[SHAPE_MAX_DIMS]; /* bytes, one a dimension of the tensor */
    uint8_t flags;
    /*
     * `src` is a decoded copy, which can be had again: it is kept for one window only, so
     * that the cache of such copies stays within its bounds.
     */
    bool decoded;
};

/* What a resolver may know of the tensor. */
struct chunk_tensor {
    const char *key; /* as stored in the shard (the part's key) */
    size_t key_len;
    enum dtype dtype;
    const struct shape *units;
    /*
     * Opens another file of the checkpoint by its number, the same that was scanned; the
     * reference is the caller's. NULL: that cannot be had.
     */
    int (*open)(void *user, uint32_t file, struct source **out, struct err *e);
    void *user;
};

struct decoded_cache;

/*
 * Who wants to see bytes [off, off + len) of a place's source when they are read for a
 * checksum anyway. They come in order and in whole units of `unit` bytes; `seen` grows by
 * what came, and is `len` when all did.
 */
struct chunk_look {
    uint64_t off, len;
    unsigned unit;
    void (*see)(void *user, const void *data, size_t len);
    void *user;
    uint64_t seen;
};

/*
 * Resolves one chunk of an encoding: opens nothing, reads from `shard` (whole file). It
 * checks that what is stored has the chunk's size and the tensor's dtype: -EBADMSG
 * otherwise. Any thread.
 */
struct chunk_codec {
    enum chunk_encoding encoding;
    const char *name;
    bool decodes; /* places are decoded copies: resolving costs what decoding does */
    int (*resolve)(struct source *shard, const struct chunk *c,
                   const struct chunk_tensor *t, struct decoded_cache *decoded,
                   struct chunk_place *out, struct err *e);
    /*
     * Optional: does the piece hold what its encoding promises (a CRC of its bytes)? 1:
     * yes, 0: it promises nothing, -EBADMSG: no. Reads all of the piece, once, and shows
     * `look` (or NULL) what it reads; what it wants must lie within one checksum's bytes.
     */
    int (*verify)(struct source *shard, const struct chunk *c,
                  struct decoded_cache *decoded, struct chunk_look *look,
                  struct err *e);
    /*
     * Optional: are other files, which should hold the same bytes, equal? 1: yes, -EBADMSG
     * names the first that is not, and from which byte on. Reads all of them.
     */
    int (*compare)(struct source *shard, const struct chunk *c,
                   const struct chunk_tensor *t, struct err *e);
};

/*
 * Unit strides (nd of them) of the box in its piece, which has `units` units: its own, or
 * row-major. -EBADMSG when an element of it would lie outside. Of an empty box nothing is
 * said: steps are 0.
 */
int chunk_steps(const struct chunk *c, uint32_t nd, uint64_t units, int64_t *step,
                struct err *e);

/* Packs n chunks of rank nd as the index stores them (varints, see index/chunk.c). */
int chunks_pack(const struct chunk *c, size_t n, uint32_t nd, struct buf *out,
                struct err *e);

/* What chunks_pack() made. */
struct chunk_blob {
    const unsigned char *data;
    size_t len, n; /* bytes, chunks */
    uint32_t nd;
};

/* Room for one chunk of a blob and its numbers. */
struct chunk_room {
    const struct chunk_list *list; /* whose chunk is in it; NULL: nobody's */
    size_t next, pos;              /* of the chunk behind it: its number, its byte */
    struct chunk chunk;
    uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS], whole[SHAPE_MAX_DIMS];
    int64_t step[SHAPE_MAX_DIMS];
};

/*
 * Reads a blob chunk by chunk: begin, `n` times next, which puts a chunk into the room (its
 * param lies in the blob), end. The bytes come from a file that may lie: every count is
 * checked against what is there, -EBADMSG.
 */
int chunk_blob_begin(const void *data, size_t len, uint32_t nd, struct chunk_blob *out,
                     struct chunk_room *r, struct err *e);
int chunk_blob_next(const struct chunk_blob *b, struct chunk_room *r, struct err *e);
int chunk_blob_end(const struct chunk_blob *b, const struct chunk_room *r,
                   struct err *e);

/* Unpacks all of them into the arena, with all that they point to. -EBADMSG. */
int chunks_unpack(struct arena *a, const void *data, size_t len, uint32_t nd,
                  const struct chunk **out, size_t *n, struct err *e);

#endif
