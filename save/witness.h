/* SPDX-License-Identifier: MIT */
/* save/witness.h - what a directory holds, so that it can be told later whether it still does. */
#ifndef UFS_SAVE_WITNESS_H
#define UFS_SAVE_WITNESS_H

#include "base/base.h"

struct err;

/* Sums over names, and over who each file is (inode, size, time of its last change). */
struct witness {
    uint64_t entries, sum[2];
    uint64_t dev, ino; /* of the directory itself */
};

/* Which names below it count, with all that is below them; NULL: all do. */
struct witness_filter {
    bool (*counts)(const void *user, const char *path);
    const void *user;
};

/*
 * Looks at all that is below directory `name` of `parent`; what staging directories hold
 * is not looked at, but one that somebody uses is -EBUSY: with the directory it would go.
 */
int witness_take(int parent, const char *name, const struct witness_filter *filter,
                 struct witness *out, struct err *e);

static inline bool witness_equal(const struct witness *a, const struct witness *b)
{
    return a->entries == b->entries && a->sum[0] == b->sum[0] &&
           a->sum[1] == b->sum[1] && a->dev == b->dev && a->ino == b->ino;
}

#endif
