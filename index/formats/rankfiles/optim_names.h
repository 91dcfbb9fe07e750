/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/optim_names.h - which parameter an optimizer's number stands for. */
#ifndef UFS_INDEX_FORMATS_RANKFILES_OPTIM_NAMES_H
#define UFS_INDEX_FORMATS_RANKFILES_OPTIM_NAMES_H

#include "base/base.h"
#include "index/formats/rankfiles/rank_set.h"

struct buf;
struct err;
struct pv;

/*
 * torch.optim numbers parameters in the order in which it was given them. Where a group
 * was given with names ("param_names", torch 2.6 and later) the files tell them. Where there
 * is one group, and as many parameters as the model has, it was model.parameters(): the
 * order of the model's state dict without buffers and without the second name of tied
 * parameters. All else is no answer.
 */
struct optim_names {
    const struct rank_set *model; /* NULL: there is none */
    const char **name; /* malloc; by number; borrowed from `own` or the model */
    size_t count;      /* 0: no answer */
    bool several;      /* there are several groups without names */
    bool numbered;     /* state entries have numbers, and there is no answer */
    char *own;
};

void optim_names_release(struct optim_names *n);

/*
 * Finds the names for the optimizer's state dict `root` ({"state", "param_groups"}), whose
 * tensors are in `optim`: each has the shape of its parameter, or there is no answer.
 */
int optim_names_find(struct optim_names *n, const struct rank_set *model,
                     const struct rank_set *optim, const struct pv *root,
                     struct err *e);

/* Appends "state.NAME.exp_avg" for "state.7.exp_avg", and any other path as it is. */
int optim_names_rename(const struct optim_names *n, const char *path, size_t len,
                       struct buf *key);

/* {"0": NAME, ...} as JSON; 0, or -ENOMEM. */
int optim_names_json(const struct optim_names *n, struct buf *out);

#endif
