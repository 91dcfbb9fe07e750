/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_dirs.h - the directories that are zarr arrays. */
#ifndef UFS_INDEX_FORMATS_ORBAX_ORBAX_DIRS_H
#define UFS_INDEX_FORMATS_ORBAX_ORBAX_DIRS_H

#include "base/base.h"

struct err;
struct listing;

/*
 * Calls fn for each directory below the listed one that holds .zarray (or zarr.json:
 * zarr3), with its path relative to that. Nothing is looked for inside an array.
 */
typedef int orbax_dir_fn(void *user, const char *path, struct listing *l, bool zarr3,
                         struct err *e);
int orbax_dirs_each(struct listing *l, orbax_dir_fn *fn, void *user, struct err *e);

/* Is this text of a zarr.json that of a group? */
bool orbax_is_group(const char *text, size_t len);

#endif
