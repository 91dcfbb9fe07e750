/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_origin.h - which trainer wrote a torch.save file, and when. */
#ifndef UFS_INDEX_FORMATS_TORCH_ORIGIN_H
#define UFS_INDEX_FORMATS_TORCH_ORIGIN_H

#include "base/base.h"

struct torch_zip;

/* As the entries of its outermost dict tell; all zero where they do not. */
struct torch_origin {
    const char *format;    /* "lightning-ckpt", "composer", "torchtune"; static */
    const char *framework; /* static */
    char version[32];      /* of the framework, or "" */
    bool has_step, has_epoch;
    int64_t step, epoch;
    int64_t ranks; /* 0: unknown */
};

/*
 * Lightning 1.0 to 2.6 ("pytorch-lightning_version"), Composer 0.32 (state.timestamp),
 * torchtune 0.1 to 0.6 (recipe_state.pt); of others the step where scripts write it.
 */
void torch_origin(const struct torch_zip *zip, struct torch_origin *out);

#endif
