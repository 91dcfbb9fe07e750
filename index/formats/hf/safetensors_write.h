/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_write.h - safetensors files as parts of a layout. */
#ifndef UFS_INDEX_FORMATS_HF_SAFETENSORS_WRITE_H
#define UFS_INDEX_FORMATS_HF_SAFETENSORS_WRITE_H

#include "index/formats/format.h"
#include "index/layout.h"

/* The largest shard where none was asked for, as save_pretrained's (transformers 4.46: 5GB). */
#define SAFETENSORS_SHARD UINT64_C(5000000000)

/* One tensor, or a box of it, in a file that is to be written. */
struct safetensors_entry {
    size_t tensor; /* of the input */
    const char *name;
    size_t name_len;
    const uint64_t *start, *size; /* of a box, in units; NULL: all of it */
    bool flat;                    /* the header has its elements in one dimension */
};

/*
 * Can a file hold the tensor, under its key without the first `cut` bytes? Names are texts in
 * UTF-8, and none is that of the header's own member.
 */
bool safetensors_takes(const struct layout_tensor *t, size_t cut);

/*
 * Writes a whole safetensors file into `f`: the header with `metadata` (a JSON object's
 * text, or NULL), its data at a multiple of 64 bytes, then the entries by size of element,
 * descending, and name, as the safetensors library orders them (serialize, 0.4). `entry`
 * is sorted in place. -ENOTSUP for a dtype that the format does not have.
 */
int safetensors_write(struct layout_file *f, const struct layout_input *in,
                      struct safetensors_entry *entry, size_t n, const char *metadata,
                      struct err *e);

extern const struct format_writer writer_hf;

#endif
