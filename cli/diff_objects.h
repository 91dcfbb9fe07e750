/* SPDX-License-Identifier: MIT */
/* cli/diff_objects.h - the non-tensor state of two checkpoints, by key. */
#ifndef UFS_CLI_DIFF_OBJECTS_H
#define UFS_CLI_DIFF_OBJECTS_H

#include "base/base.h"

struct catalog;
struct err;

enum object_state { OBJECT_ONLY_A, OBJECT_ONLY_B, OBJECT_DIFFERS, OBJECT_STATES };

struct object_totals {
    uint64_t equal, other[OBJECT_STATES];
};

/*
 * Calls tell() for each object that is not the same on both sides, in order of keys. Equal
 * are equal texts, or equal values whose members stand in another order. -EFBIG when the
 * objects of a side are more than 512 MiB of JSON.
 */
int diff_objects(struct catalog *a, int64_t checkpoint_a, struct catalog *b,
                 int64_t checkpoint_b,
                 void (*tell)(void *user, enum object_state state, const char *key,
                              size_t key_len),
                 void *user, struct object_totals *out, struct err *e);

/* Are two JSON texts the same value? Texts that are no JSON are when they are the same. */
int same_json(const char *a, size_t a_len, const char *b, size_t b_len, bool *same,
              struct err *e);

#endif
