/* SPDX-License-Identifier: MIT */
/* index/map/map_check.h - for which checkpoints a map is: what it refuses, and what must come out. */
#ifndef UFS_INDEX_MAP_CHECK_H
#define UFS_INDEX_MAP_CHECK_H

#include "index/map/map_work.h"

/*
 * Before any rule is run: is the model of a family that the map has rules for, and is
 * nothing of it what the map refuses? -EINVAL says what.
 */
int map_check_model(struct filter *f, struct err *e);

/* Is the shape of a result what config.json says? -EINVAL. */
int map_check_shape(const struct filter *f, const char *key, size_t len,
                    const struct shape *shape, struct err *e);

#endif
