/* SPDX-License-Identifier: MIT */
/* save/cuts.h - how the tensors of a checkpoint are cut, for a writer that keeps it. */
#ifndef UFS_SAVE_CUTS_H
#define UFS_SAVE_CUTS_H

#include "gpu/reader.h"
#include "index/layout.h"

struct arena;
struct cuts;
struct err;

/* All results live in the arena. */
int cuts_new(const struct reader_env *env, int64_t checkpoint, struct arena *a,
             struct cuts **out, struct err *e);

/* Of the tensor of this number in the index; *out NULL: of one without elements. */
int cuts_of(const struct cuts *c, uint32_t ord, const struct layout_cuts **out,
            struct err *e);

#endif
