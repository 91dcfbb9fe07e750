/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_layout.h - which safetensors files of a directory are a model. */
#ifndef UFS_INDEX_FORMATS_SAFETENSORS_LAYOUT_H
#define UFS_INDEX_FORMATS_SAFETENSORS_LAYOUT_H

#include "base/base.h"

struct listing;

enum safetensors_kind {
    SAFETENSORS_NONE,
    SAFETENSORS_SINGLE,   /* one file that is the model */
    SAFETENSORS_INDEXED,  /* an index and the files that it names */
    SAFETENSORS_NUMBERED, /* STEM-0000K-of-0000N.safetensors, without an index */
    SAFETENSORS_ADAPTER,  /* adapter_model.safetensors with its adapter_config.json */
    SAFETENSORS_PIECES,   /* torch's HuggingFaceStorageWriter: pieces of tensors */
};

/* Names are borrowed from the listing. */
struct safetensors_layout {
    enum safetensors_kind kind;
    const char *main; /* the model, the index, or the first file of the set */
    const char *stem; /* of numbered files; not terminated */
    size_t stem_len;
    uint32_t n;       /* of a numbered set: N in its names */
    uint32_t total;   /* the same: how many files it has */
    uint32_t present; /* of a numbered set; beside an index all .safetensors files */
    bool from_zero, has_last; /* the same: files 00000 and 0000N are there */
    const char *adapter;      /* an adapter beside a model, or NULL */
};

/* Decides by names alone. */
void safetensors_layout(const struct listing *l, struct safetensors_layout *out);

/* STEM-0000K-of-0000N.safetensors taken apart; K is 0..N. */
struct safetensors_number {
    size_t stem_len;
    uint32_t k, n;
};
bool safetensors_numbered(const char *name, struct safetensors_number *out);

/* shard-RANK-model-K-of-N.safetensors: pieces of tensors, never whole ones. */
struct safetensors_piece {
    uint32_t rank, k, n;
};
bool safetensors_piece(const char *name, struct safetensors_piece *out);
bool safetensors_is_piece(const char *name);

/* Is `name` a numbered file of this stem? */
bool safetensors_has_stem(const char *name, const char *stem, size_t stem_len,
                          struct safetensors_number *out);

/* Is it a regular file whose name ends in ".safetensors"? */
bool safetensors_is_named(const struct listing *l, const char *name);

#endif
