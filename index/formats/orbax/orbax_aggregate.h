/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_aggregate.h - the file `checkpoint`: small leaves in one MessagePack. */
#ifndef UFS_INDEX_FORMATS_ORBAX_ORBAX_AGGREGATE_H
#define UFS_INDEX_FORMATS_ORBAX_ORBAX_AGGREGATE_H

#include "base/base.h"

struct err;
struct listing;
struct orbax_files;

/* Is there such a file, by its first bytes? TensorFlow has a text of that name. */
bool orbax_has_aggregate(struct listing *l);

/*
 * Reports the arrays and values of the file, which Orbax wrote until 0.5 (and flax before
 * it): leaves that are arrays elsewhere stand in it as "PLACEHOLDER://NAME". Keys that are
 * there already are left out. T5X's has arrays below "optimizer", which their keys lack.
 */
struct orbax_aggregate {
    const char *part;
    int (*role)(const char *part, const char *key, size_t len);
    /* Is told the NAME of each placeholder. */
    int (*elsewhere)(void *user, const char *name, size_t len, struct err *e);
    bool leaves_told; /* _METADATA has told what is null or an empty container */
    void *user;
};

int orbax_aggregate_report(struct orbax_files *files, const struct orbax_aggregate *how,
                           struct err *e);

#endif
