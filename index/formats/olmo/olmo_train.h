/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_train.h - train/rankN.pt: the state of OLMo's trainers, as objects. */
#ifndef UFS_INDEX_FORMATS_OLMO_TRAIN_H
#define UFS_INDEX_FORMATS_OLMO_TRAIN_H

#include "base/base.h"

struct err;
struct listing;
struct scan_context;
struct sink;

/* Is there a train/ with the state of a rank? */
bool olmo_train_find(struct listing *l);

struct olmo_train_told {
    uint64_t ranks; /* as the files are called, or as they say where that is more */
    bool has_step;
    int64_t step;
};

/* Reports what train/ holds, as a part; nothing where there is none. */
int olmo_train_report(const struct scan_context *c, struct sink *sink,
                      struct olmo_train_told *told, struct err *e);

#endif
