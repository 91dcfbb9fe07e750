/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_priv.h - what the files of the zarr reader share. */
#ifndef UFS_INDEX_FORMATS_ZARR_PRIV_H
#define UFS_INDEX_FORMATS_ZARR_PRIV_H

#include "base/buf.h"
#include "index/formats/zarr/zarr_array.h"

struct json;

/* Notes why the array cannot be read; the first reason stands. */
void PRINTF(2, 3) zarr_refuse(struct zarr_array *a, const char *fmt, ...);

/* A list of at most SHAPE_MAX_DIMS numbers. */
bool zarr_take_dims(const struct json *v, struct shape *out);

struct zarr_slice {
    const char *text;
    size_t len;
};

/* The text of a member of the JSON object that `text` is; false: it has none. */
bool zarr_member(const char *text, size_t len, const char *name,
                 struct zarr_slice *out);

/*
 * Calls fn for each member of the object: its name (a NUL behind) and the text of its
 * value. Stops at the first non-zero value and returns that. -EBADMSG: it is no object.
 */
typedef int zarr_member_fn(void *user, const char *key, size_t key_len,
                           const char *text, size_t len, struct err *e);
int zarr_each_member(const char *text, size_t len, zarr_member_fn *fn, void *user,
                     struct err *e);

/* ---- names of codecs: zarr_names.c ---- */

/*
 * Appends the codec of this name and configuration, which stands in the order of writing.
 * `what` is the word for messages: "compressor", "filter", "codec".
 */
void zarr_take_codec(struct zarr_array *a, struct zarr_chain *chain, const char *name,
                     const struct json *config, const char *what);

/* The other way round: as it is undone. */
void zarr_chain_reverse(struct zarr_chain *chain);

/*
 * What follows from dtype, shapes and chain when all of them are known: bytes of an inner
 * chunk, and whether chunks have a size at all.
 */
void zarr_settle(struct zarr_array *a);

/* Bytes and kind of a type in zarr v2's spelling; false: not a number of filters. */
bool zarr_number_type(const char *text, unsigned *bytes, char *kind, bool *big_endian);

/*
 * A type of ml_dtypes with an element a byte, by its name in either version: E8M0, or U8
 * with a->numpy_dtype where tensors have no name for it. False: none of these.
 */
bool zarr_take_byte_type(struct zarr_array *a, const char *name);

/* ---- fill values: zarr_fill.c ---- */

/*
 * The value `v`, which is not null, as an element of a->dtype. `text` is the whole
 * document, for the digits that a double has not. `base64`: the dtype is void, as NumPy
 * code writes bfloat16.
 */
void zarr_take_fill(struct zarr_array *a, const struct json *v, const char *text,
                    size_t len, bool base64);

/* ---- what chunks' codecs have to know: zarr_spec.c ---- */

/*
 * As text, "zarr1 BYTES CODEC,CODEC,...", and behind it a line feed and the stored bytes
 * where these are a literal.
 */
struct zarr_spec {
    uint64_t bytes; /* of a decoded chunk */
    struct zarr_chain chain;
    const char *literal; /* into the text, or NULL */
    size_t literal_len;
};

int zarr_spec_write(const struct zarr_array *a, struct buf *out, struct err *e);
int zarr_spec_read(const char *text, size_t len, struct zarr_spec *out, struct err *e);

/* ---- decoding: zarr_decode.c ---- */

struct source;

/*
 * Undoes the chain: all of `in` becomes exactly dst[0..size). -EBADMSG: damaged, or
 * another number of bytes. Memory is that of the stored bytes, and less for a chain of one
 * codec that streams.
 */
int zarr_decode(const struct zarr_chain *chain, struct source *in, unsigned char *dst,
                size_t size, struct err *e);

#endif
