/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_layout.h - which torch.save files of a directory are a model. */
#ifndef UFS_INDEX_FORMATS_TORCH_LAYOUT_H
#define UFS_INDEX_FORMATS_TORCH_LAYOUT_H

#include "base/base.h"
#include "index/formats/hf/safetensors_layout.h"

struct listing;

enum torch_layout_kind {
    TORCH_LAYOUT_NONE,
    TORCH_LAYOUT_SINGLE, /* pytorch_model.bin */
    /* pytorch_model.bin.index.json, or a variant's, and the files that it names */
    TORCH_LAYOUT_INDEXED,
    TORCH_LAYOUT_NUMBERED, /* pytorch_model-0000K-of-0000N.bin, without an index */
    TORCH_LAYOUT_ADAPTER,  /* adapter_model.bin with its adapter_config.json */
};

/* Names are borrowed from the listing. */
struct torch_layout {
    enum torch_layout_kind kind;
    const char *main; /* the model, the index, or the first file of the set */
    size_t stem_len;  /* of numbered files: of `main` */
    uint32_t total;   /* of a numbered set */
    uint32_t present; /* of a numbered set; beside an index all .bin files */
    const char
        *beside; /* an adapter beside the model, or the other way round; or NULL */
    enum hf_rank rank;
};

/*
 * All that may be a model by names alone, in the order in which they are taken: none, or up to
 * `max`. An adapter that stands for a model is the only one.
 */
size_t torch_layouts(const struct listing *l, struct torch_layout *out, size_t max);

/* Is `name` a file of this numbered set? */
bool torch_layout_has(const struct torch_layout *x, const char *name);

#endif
