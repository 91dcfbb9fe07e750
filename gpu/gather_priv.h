/* SPDX-License-Identifier: MIT */
/* gpu/gather_priv.h - a gather as its executors see it. */
#ifndef UFS_GPU_GATHER_PRIV_H
#define UFS_GPU_GATHER_PRIV_H

#include "gpu/cast_core.h"
#include "gpu/gather.h"
#include "index/plan.h"

struct arena;

/* One chunk of the plan: its copies, in bytes as stored, and where they read. */
struct gather_copy {
    struct plan_op op;
    struct source *source; /* one of gather.source */
};

/* Frozen. The plan is that of the part which is wanted, in bytes as they are stored. */
struct gather {
    struct arena *arena;
    const struct plan *plan;
    enum dtype stored, dtype;
    unsigned stored_unit, unit; /* bytes of an element as stored, and of the result */
    struct gather_copy *copy;   /* one a chunk of the plan */
    struct source **source;     /* owned, each once */
    size_t sources;
    bool scaled;
    struct cast_scale scale; /* of the result; its value is on the host */
    uint64_t factors;        /* entries at scale.value */
};

static inline bool gather_casts(const struct gather *g)
{
    return g->stored != g->dtype || g->scaled;
}

/* Are all sources still what they were? -ESTALE. */
int gather_check(const struct gather *g, struct err *e);

#endif
