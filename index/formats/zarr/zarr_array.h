/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_array.h - one zarr array: its metadata, and its chunks on their way to the sink. */
#ifndef UFS_INDEX_FORMATS_ZARR_ARRAY_H
#define UFS_INDEX_FORMATS_ZARR_ARRAY_H

#include "base/base.h"
#include "index/chunk.h"
#include "index/dtype.h"
#include "index/shape.h"

struct err;
struct sink;
struct sink_tensor;
struct zarr_chunks;

/*
 * How an array is reported, wherever its values lie (files of a directory, values of a
 * key-value store):
 *
 *   zarr_parse_v2() or zarr_parse_v3() on the bytes of `.zarray` or `zarr.json`
 *   zarr_chunks_new()
 *   zarr_chunks_add() for each value stored below the array, in any order
 *   zarr_report()        begins the tensor, gives it its chunks, ends it
 *   zarr_chunks_free()
 *
 * Values are pushed and not looked up by key, since a grid of 10^9 chunks may have four
 * that are stored; all others are the fill value.
 */

enum {
    ZARR_MAX_CODECS = 8,      /* of one chain; writers use two or three */
    ZARR_MAX_JSON = 64 << 10, /* of one array's metadata; real ones have 300 to 3000 */
};

enum zarr_codec_kind {
    ZARR_BLOSC = 1, /* a c-blosc 1 frame, whose header decides about the rest */
    ZARR_LZ4,       /* numcodecs: int32 length, one LZ4 block */
    ZARR_ZSTD,
    ZARR_GZIP,
    ZARR_ZLIB,
    ZARR_BZ2,
    ZARR_LZMA,
    ZARR_CRC32C, /* four bytes behind; those before it come as streams, but the first two */
    ZARR_DELTA,    /* from here on filters: zarr_filter() undoes them */
    ZARR_SHUFFLE,  /* bytes of elements, by their place in the element */
    ZARR_CAST,     /* elements of another type */
    ZARR_SCALE,    /* as ZARR_CAST, divided and moved */
    ZARR_PACKBITS, /* booleans, a bit each */
};

/* One step from stored bytes to elements. */
struct zarr_codec {
    uint8_t kind; /* enum zarr_codec_kind */
    /* Types of the elements and of what is stored; ZARR_SHUFFLE: bytes of an element. */
    char arg[2][8];
    double scale, offset; /* ZARR_SCALE: elements are stored / scale + offset */
};

/* In the order in which they are undone: the first one meets the stored bytes. */
struct zarr_chain {
    uint32_t n;
    struct zarr_codec codec[ZARR_MAX_CODECS];
};

struct zarr_array {
    /*
     * Why it cannot be read, or "". The array is listed all the same: zarr_report() makes it
     * the tensor's fault. Shape and dtype are then what could be understood: {0} and U8 at
     * worst.
     */
    char why[240];
    unsigned format; /* 2 or 3 */
    enum dtype dtype;
    const char
        *numpy_dtype; /* of bytes (U8) whose type tensors have no name for, or NULL */
    struct shape shape;
    struct shape
        grid_chunk;     /* elements of a cell of the grid; every stored one is whole */
    struct shape inner; /* of a chunk: as grid_chunk, but inside a shard when sharded */
    bool big_endian;
    uint8_t
        order[SHAPE_MAX_DIMS]; /* order[k]: the dimension that is stored as the k-th */
    uint64_t bytes;            /* of an inner chunk when decoded */
    struct zarr_chain chain;   /* of inner chunks */
    bool sharded;
    uint8_t shard_order[SHAPE_MAX_DIMS]; /* as order, of the chunks in a shard */
    bool index_at_start;
    bool index_big_endian;
    struct zarr_chain index_chain; /* empty, or ZARR_CRC32C */
    bool has_fill;                 /* false: null */
    unsigned char fill[16];        /* one element, little-endian */
    bool key_prefix;               /* keys start with "c" */
    char separator;                /* '.' or '/' */
};

/*
 * The text of `.zarray` (v2) or of an array's `zarr.json` (v3), which is checked in full:
 * what is wrong or not supported becomes out->why. -ENOMEM is the only error.
 * `out` needs no release.
 */
int zarr_parse_v2(const char *text, size_t len, struct zarr_array *out, struct err *e);
int zarr_parse_v3(const char *text, size_t len, struct zarr_array *out, struct err *e);

/* An array of which not even the metadata can be had: one that has `why`. */
void zarr_array_broken(struct zarr_array *out, const char *fmt, ...) PRINTF(2, 3);

enum zarr_value_kind {
    ZARR_STORED, /* bytes [offset, offset + length) of the file */
    ZARR_LITERAL, /* `data`, which stands in the file, though not as such (in a compressed
                     node); the index keeps it: meant for some hundred bytes */
    ZARR_BROKEN, /* something is there that is no value (a directory): `why` */
};

/*
 * Where a chunk's value lies. `file` is a number of sink_file(): of the file that holds
 * it. For ZARR_LITERAL, offset and length tell where in that file the node lies (0, 0
 * will do): the tensor is stale when the file changes.
 */
struct zarr_value {
    enum zarr_value_kind kind;
    uint32_t file;
    uint64_t offset, length;
    const void *data; /* ZARR_LITERAL: `data_len` bytes, copied */
    size_t data_len;
    const char *why; /* ZARR_BROKEN, copied */
};

/* Collects an array's values. `a` is borrowed until zarr_chunks_free(). */
int zarr_chunks_new(const struct zarr_array *a, struct zarr_chunks **out,
                    struct err *e);
void zarr_chunks_free(struct zarr_chunks *c); /* NULL is fine */
void zarr_chunks_freep(struct zarr_chunks **c);

/*
 * The value of `key`, which is relative to the array ("0.1", "c/0/1"). 1: it is a chunk
 * of the grid; 0: it is none (metadata, a stray file) and is left out; -ENOMEM; -EFBIG:
 * more chunks than a tensor may have. A key that comes twice is a fault of the tensor.
 */
int zarr_chunks_add(struct zarr_chunks *c, const char *key, size_t len,
                    const struct zarr_value *v, struct err *e);

/* Is it the key of a chunk of the grid? What zarr_chunks_add() would take. */
bool zarr_chunks_is_key(const struct zarr_chunks *c, const char *key, size_t len);

/*
 * Could a chunk's key start with these bytes, which end in '/'? Tells a walk over
 * directories where to go on.
 */
bool zarr_chunks_wants(const struct zarr_array *a, const char *prefix, size_t len);

/*
 * Fills dst with bytes [off, off + len) of file number `file`, for the index of a shard.
 * What cannot be read is the tensor's fault; -ENOMEM and the like stop the report.
 */
typedef int zarr_read_fn(void *user, uint32_t file, uint64_t off, size_t len, void *dst,
                         struct err *e);

struct zarr_how {
    zarr_read_fn *read; /* needed for sharded arrays with ZARR_STORED values */
    void *user;
    /* Number of the file that the metadata was read from: boxes of the fill value name it. */
    uint32_t file;
    /* A chunk that is not there is a fault even where there is a fill value. */
    bool all_chunks_needed;
};

/*
 * Begins the tensor `about` (dtype, shape and codec_key are filled in here), gives it all
 * chunks and ends it. Errors as sink_tensor_begin() and sink_tensor_end().
 */
int zarr_report(const struct zarr_array *a, struct zarr_chunks *c,
                const struct sink_tensor *about, const struct zarr_how *how,
                struct sink *sink, struct err *e);

/* The codecs of the chunks that zarr_report() makes, for the driver's list. */
extern const struct chunk_codec codec_zarr;
extern const struct chunk_codec codec_zarr_literal;

#endif
