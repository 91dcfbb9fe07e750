/* SPDX-License-Identifier: MIT */
/* index/formats/zarr/zarr_listed.h - tensorstore_index.json, which lists the arrays of a directory. */
#ifndef UFS_INDEX_FORMATS_ZARR_ZARR_LISTED_H
#define UFS_INDEX_FORMATS_ZARR_ZARR_LISTED_H

#include "base/base.h"

struct err;

#define ZARR_LISTED "tensorstore_index.json"

/* Do these first bytes begin such a list? */
bool zarr_is_listed(const char *head, size_t len);

/* Calls fn with the path of each array. -EBADMSG: it is no such list. */
typedef int zarr_listed_fn(void *user, const char *path, struct err *e);
int zarr_listed_each(const char *text, size_t len, zarr_listed_fn *fn, void *user,
                     struct err *e);

#endif
