/* SPDX-License-Identifier: MIT */
/* index/formats/object_pickle.h - values of objects.json as pickles again. */
#ifndef UFS_INDEX_FORMATS_OBJECT_PICKLE_H
#define UFS_INDEX_FORMATS_OBJECT_PICKLE_H

#include "base/base.h"
#include "index/formats/pickle/pickle_write.h"

struct err;

/*
 * Pushes a value as docs/formats/objects-json.md spells it: None, booleans, integers,
 * floats, text, bytes, lists, tuples, sets and dicts of these. 1: done; 0: there is
 * something in it that cannot be built (an opaque object, a tensor, an array, an integer
 * of more than 255 bytes), what `p` has got by then is worth nothing; or -errno.
 */
int object_pickle(const char *json, size_t len, struct pickler *p, struct err *e);

#endif
