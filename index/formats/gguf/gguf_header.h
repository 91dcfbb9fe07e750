/* SPDX-License-Identifier: MIT */
/* index/formats/gguf/gguf_header.h - what stands before the data of a GGUF file. */
#ifndef UFS_INDEX_FORMATS_GGUF_HEADER_H
#define UFS_INDEX_FORMATS_GGUF_HEADER_H

#include "base/base.h"

struct arena;
struct err;
struct source;

enum { GGUF_MAX_DIMS = 4, GGUF_HEAD = 24 };

/* One tensor as the header has it: dims innermost first, offset from the data's start. */
struct gguf_tensor {
    const char *name; /* NUL-terminated, holds no NUL */
    size_t name_len;
    uint32_t type, nd;
    uint64_t dim[GGUF_MAX_DIMS];
    uint64_t offset;
};

struct gguf_header {
    uint32_t version; /* 2 or 3 */
    bool big_endian;
    bool has_alignment;       /* told; else the default */
    uint64_t alignment, data; /* data: its first byte in the file */
    uint64_t end;             /* of the header; zeros up to data */
    struct gguf_tensor *tensor;
    size_t count;
    char architecture[64]; /* general.architecture, "" when it is not told */
    bool has_split;        /* split.count and split.no */
    uint64_t split_no, split_count;
    bool has_split_tensors;
    uint64_t split_tensors; /* of all files of the set */
    uint64_t odd_bools;     /* of a value that is neither 0 nor 1 */
    struct arena *arena;    /* holds the tensors */
};

/* One entry of the metadata as objects.json has it; borrowed for the call. */
typedef int gguf_value_fn(void *user, const char *key, size_t len, const char *json,
                          size_t json_len, struct err *e);

/*
 * Reads the header of a whole file; tensor data is not read. `fn` (or NULL) gets each
 * entry of the metadata. -EBADMSG when it is damaged (also a name twice), -ENOTSUP for
 * other versions, -EFBIG over a ceiling.
 */
int gguf_header_read(struct source *src, gguf_value_fn *fn, void *user,
                     struct gguf_header *out, struct err *e);
/* Puts the data where it begins with another alignment, a power of 2. */
void gguf_header_align(struct gguf_header *h, uint64_t alignment);
void gguf_header_release(struct gguf_header *h);

/* Do these first bytes say GGUF? */
bool gguf_sniff(const void *head, size_t len);

#endif
