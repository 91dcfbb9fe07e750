/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_decode.h - input and output of one codec. */
#ifndef UFS_INDEX_FORMATS_ZARR_DECODE_H
#define UFS_INDEX_FORMATS_ZARR_DECODE_H

#include "base/base.h"

struct err;
struct source;
struct zarr_codec;

/* Bytes in memory, or of a source that are read when they are needed. */
struct zarr_input {
    struct source *src;        /* borrowed */
    const unsigned char *data; /* NULL: not in memory */
    unsigned char *owned;      /* to free */
    size_t len, at;            /* at: how far a codec that streams has got */
};

void zarr_input_release(struct zarr_input *in);

/* Brings all of it into memory. */
int zarr_input_all(struct zarr_input *in, struct err *e);

/* Bytes that come out: into memory of the caller (fixed), or into a buffer that grows. */
struct zarr_output {
    unsigned char *data;
    size_t len, cap, max; /* max: more is damage */
    bool fixed;
};

void zarr_output_release(struct zarr_output *out);

/* Room for `need` more bytes. -EBADMSG beyond max, -ENOMEM. */
int zarr_output_room(struct zarr_output *out, size_t need, struct err *e);

/* One blosc frame, all of which is in memory. */
int zarr_blosc(const struct zarr_input *in, struct zarr_output *out, struct err *e);

/* One of the filters: delta, shuffle, cast, scale, packbits. zarr_filter.c */
int zarr_filter(const struct zarr_codec *c, struct zarr_input *in,
                struct zarr_output *out, struct err *e);

#endif
