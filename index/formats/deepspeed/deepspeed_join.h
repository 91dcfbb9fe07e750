/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_join.h - a tensor whose pieces are on tensor-parallel ranks. */
#ifndef UFS_INDEX_FORMATS_DEEPSPEED_JOIN_H
#define UFS_INDEX_FORMATS_DEEPSPEED_JOIN_H

#include "index/formats/deepspeed/deepspeed_scan.h"

/* One tensor of a stage while it is reported. */
struct ds_join {
    struct ds_scan *s;
    struct ds_part *p;   /* of the stage: s->tensor of them */
    struct arena *arena; /* of the cut */
    struct shape *local; /* by rank, as are these: */
    struct ds_runs *runs;
    struct ds_cut cut;
    enum dtype dtype;
    enum rank_rule rule; /* RANK_UNKNOWN: the notes tell */
};

/* `s` and `p` are set; -ENOMEM. */
int ds_join_begin(struct ds_join *j, struct err *e);
void ds_join_release(struct ds_join *j);

/* The tensor that is being reported cannot be read, and why. */
int ds_join_fault(struct ds_scan *s, const char *why, struct err *e);

/* Why, of one that not all ranks have. */
extern const char ds_join_lacks[];

/* What a rank has of it: adds runs; what is wrong is a fault of the tensor. */
typedef int ds_join_runs_fn(struct ds_join *j, const void *what, uint32_t t,
                            struct err *e);

/*
 * Reports parameter `name`: `t` but for type and shape, which are j->dtype and what the cut
 * of j->local makes; `lack`: why it cannot be had, a fault then, or NULL. `fn` is called
 * with `what` for each rank.
 */
int ds_join_report(struct ds_join *j, const char *name, size_t len, const char *lack,
                   struct sink_tensor *t, ds_join_runs_fn *fn, const void *what,
                   struct err *e);

/* The copy that the model computed with, of all ranks of a stage. */
int ds_join_module(struct ds_scan *s, struct ds_part *p, struct err *e);

#endif
