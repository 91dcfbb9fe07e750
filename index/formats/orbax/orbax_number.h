/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_number.h - Python numbers, which Orbax keeps as arrays. */
#ifndef UFS_INDEX_FORMATS_ORBAX_ORBAX_NUMBER_H
#define UFS_INDEX_FORMATS_ORBAX_ORBAX_NUMBER_H

#include "base/base.h"

struct buf;
struct err;
struct source;
struct zarr_array;

/* Can the array be one: no dimensions, and a type that Python's numbers are saved as? */
bool orbax_is_number(const struct zarr_array *z);

/*
 * Appends the number as JSON of objects.json. `stored` is the only chunk as it is stored,
 * compressed and in a shard of its own as the array's metadata says. -EBADMSG.
 */
int orbax_number(const struct zarr_array *z, struct source *stored, struct buf *out,
                 struct err *e);

#endif
