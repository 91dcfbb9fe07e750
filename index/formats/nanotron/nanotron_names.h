/* SPDX-License-Identifier: MIT */
/* index/formats/nanotron/nanotron_names.h - what nanotron's file names and headers say. */
#ifndef UFS_INDEX_FORMATS_NANOTRON_NANOTRON_NAMES_H
#define UFS_INDEX_FORMATS_NANOTRON_NANOTRON_NAMES_H

#include "index/formats/ranks/rank_boxes.h"

struct arena;
struct err;

/* A rank along one axis: "0-of-2". */
struct nano_rank {
    bool is; /* it is said */
    uint32_t at, of;
};

struct nano_ranks {
    struct nano_rank pp, dp, tp, ep;
};

/*
 * "model_weight_pp-rank-0-of-2_tp-rank-1-of-2_exp-rank-0-of-2.safetensors": the parameter's
 * last name is `len` bytes from `start` on. Without ranks the file holds all of it. A version
 * of 2024 doubled the name: "model_model_weight.safetensors_pp-rank-...".
 */
struct nano_weight_name {
    size_t start, len;
    struct nano_ranks rank; /* pp, tp, ep */
};
bool nano_weight_name(const char *name, struct nano_weight_name *out);

/* "optimizer_pp-0-of-2_dp-1-of-3_tp-0-of-2_exp-0-of-1.pt"; dp only with ZeRO-1. */
bool nano_optimizer_name(const char *name, struct nano_ranks *out);

/* "1.4": 1004; 0: no version. Those from 1.2 to 1.5 read alike. */
uint32_t nano_version(const char *text);
enum { NANO_OLDEST = 1002, NANO_NEWEST = 1005 };

/*
 * unsharded_shape: "(60, 20)", "(20,)", "(np.int64(60), 20)", "torch.Size([60, 20])". False:
 * not so, or more than SHAPE_MAX_DIMS.
 */
bool nano_shape(const char *text, struct shape *out);

/*
 * local_global_slices_pairs: "LOCAL#GLOBAL;LOCAL#GLOBAL;...", a slice "0,10,None" for each
 * dimension joined by '|'. The boxes of the piece of shape `local` in the whole. -EBADMSG for
 * what does not fit both shapes or takes elements of the piece twice or not at all, -ENOTSUP
 * for steps over 1.
 */
int nano_slices(const char *text, const struct shape *local, const struct shape *whole,
                struct arena *a, struct rank_boxes *out, struct err *e);

#endif
