/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_layout.h - which safetensors files of a directory are a model. */
#ifndef UFS_INDEX_FORMATS_SAFETENSORS_LAYOUT_H
#define UFS_INDEX_FORMATS_SAFETENSORS_LAYOUT_H

#include "base/base.h"

struct listing;

/*
 * The order of candidates: that in which transformers looks for them (modeling_utils.py of
 * 4.30 to 5.x), then diffusers, then what neither loads.
 */
enum hf_rank {
    HF_RANK_SAFETENSORS,
    HF_RANK_SAFETENSORS_INDEX,
    HF_RANK_BIN,
    HF_RANK_BIN_INDEX,
    HF_RANK_DIFFUSERS = 10, /* the same four again */
    HF_RANK_OTHER_INDEX = 20,
    HF_RANK_NUMBERED,     /* of a stem that loaders know, without an index */
    HF_RANK_VARIANT_FILE, /* the same: of a variant, in one file */
    HF_RANK_VARIANT,      /* the same, by an index */
    HF_RANK_OTHER_VARIANT,
    HF_RANK_NUMBERED_OTHER,
    HF_RANK_NUMBERED_BIN,
    HF_RANK_VARIANT_FILE_BIN,
    HF_RANK_VARIANT_BIN,
};

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
    uint32_t files;   /* the same: that are there, where numbers come twice as well */
    bool from_zero, has_last; /* the same: files 00000 and 0000N are there */
    const char *adapter;      /* an adapter beside a model, or NULL */
    enum hf_rank rank;        /* of what may be a model */
};

/*
 * All that may be a model by names alone, in the order in which they are taken: none, or up
 * to `max`. Pieces, or an adapter without a model, are the only one.
 */
size_t safetensors_layouts(const struct listing *l, struct safetensors_layout *out,
                           size_t max);

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
