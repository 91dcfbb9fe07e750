/* SPDX-License-Identifier: MIT */
/* index/fault_groups.h - faults of many tensors by their cause: one missing shard is one line. */
#ifndef UFS_INDEX_FAULT_GROUPS_H
#define UFS_INDEX_FAULT_GROUPS_H

#include "base/base.h"

enum {
    FAULT_NAMES = 3,    /* of each cause, the first ones */
    FAULT_CAUSES = 200, /* what has another cause is counted together */
};

/*
 * One cause: all faults with this text, whatever numbers stand in it. Texts are cut to fit
 * a line.
 */
struct fault_group {
    uint64_t hash;
    uint64_t count;
    char text[1200]; /* of the first one */
    char name[FAULT_NAMES][200];
};

/* `struct fault_groups g = {0};` is empty. */
struct fault_groups {
    struct fault_group *at;
    size_t n, cap;
    size_t last; /* found: neighbours mostly have one cause */
};

/* -ENOMEM. */
int fault_groups_add(struct fault_groups *g, const char *key, size_t key_len,
                     const char *text);

/*
 * "KEY: TEXT" of a single tensor, "12 tensors: TEXT (KEY, KEY, KEY, ...)" of many. Cut to
 * `size`. Returns dst.
 */
const char *fault_group_line(const struct fault_group *g, char *dst, size_t size);

void fault_groups_release(struct fault_groups *g);

#endif
