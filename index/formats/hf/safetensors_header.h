/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_header.h - the header of a safetensors file, read strictly. */
#ifndef UFS_INDEX_FORMATS_SAFETENSORS_HEADER_H
#define UFS_INDEX_FORMATS_SAFETENSORS_HEADER_H

#include "base/base.h"
#include "index/chunk.h"
#include "index/dtype.h"
#include "index/shape.h"

struct arena;
struct err;
struct source;

enum {
    SAFETENSORS_PREFIX = 8,             /* the length of the header, little-endian */
    SAFETENSORS_MAX_HEADER = 100000000, /* the reference's own limit */
};

/* One tensor; all is borrowed from the header. */
struct safetensors_tensor {
    const char *name; /* any bytes, NUL too; a NUL stands behind */
    size_t name_len;
    enum dtype dtype;
    uint32_t nd;
    const uint64_t *dim;
    uint64_t begin, end; /* bytes of the data */
};

/* A text of __metadata__, borrowed from the header. */
struct safetensors_note {
    const char *name, *text;
};

struct safetensors_header {
    uint64_t data; /* where the data starts, counted from the image's first byte */
    struct safetensors_tensor *tensor; /* in the order of the data */
    size_t count;
    struct safetensors_note *note; /* __metadata__, without texts that hold NUL */
    size_t notes;
    const char *format;       /* __metadata__["format"]: "pt", or NULL */
    const char *dcp_sharding; /* __metadata__["DCP_SHARDING_INFO"], or NULL */
    const char *dcp_version;  /* __metadata__["DCP_VERSION"], or NULL */
    /* nanotron: "version", "unsharded_shape", "local_global_slices_pairs", or NULL. */
    const char *nanotron_version, *nanotron_shape, *nanotron_slices;
    struct arena *arena;
};

void safetensors_header_release(struct safetensors_header *h);

/* Do its metadata say what transformers wants to see? */
bool safetensors_is_pt(const struct safetensors_header *h);

/* The text of that name in __metadata__, or NULL. */
const char *safetensors_note(const struct safetensors_header *h, const char *name);

/* The shape of a tensor as others want it. */
void safetensors_shape(const struct safetensors_tensor *t, struct shape *out);

/*
 * Reads the header of the image that fills bytes [off, off + size) of `src` and checks it
 * by all rules of the reference (docs/formats/safetensors.md), and that no name comes
 * twice and no tensor has more than SHAPE_MAX_DIMS dimensions. -EBADMSG says which byte or
 * tensor breaks which rule; the caller names the file. `*out` needs to be released only
 * after 0. Work is n log n; memory is the header's text and a small multiple of it.
 */
int safetensors_read(struct source *src, uint64_t off, uint64_t size,
                     struct safetensors_header *out, struct err *e);

/* The same of a header's text, which `data_size` bytes of data follow. */
int safetensors_parse(const char *text, size_t len, uint64_t data_size,
                      struct safetensors_header *out, struct err *e);

/* By name, or NULL. */
const struct safetensors_tensor *safetensors_find(const struct safetensors_header *h,
                                                  const char *name, size_t len);

/*
 * Do these first bytes of a file of `size` bytes look like one? For bids: the length fits
 * and an object starts.
 */
bool safetensors_magic(const unsigned char *head, size_t len, uint64_t size);

/* CHUNK_SAFETENSORS: the chunk is one whole tensor of the image, by the tensor's key. */
extern const struct chunk_codec safetensors_codec;

#endif
