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
 * of more than 255 bytes, a key that Python has no hash of), what `p` has got by then is
 * worth nothing; or -errno.
 */
int object_pickle(const char *json, size_t len, struct pickler *p, struct err *e);

/*
 * More than that, where the archive that the pickle is part of can hold it: tensors, NumPy
 * arrays, and instances of a few classes that trainers keep in their state
 * (argparse.Namespace, io.BytesIO, paths, enums of Megatron, element types and devices of
 * torch). tensor(): pushes the one that the mount shows as `key`; false: it cannot.
 */
struct object_pickle_how {
    bool (*tensor)(void *user, const char *key, struct pickler *p);
    void *user;
};
int object_pickle_with(const char *json, size_t len,
                       const struct object_pickle_how *how, struct pickler *p,
                       struct err *e);

/* One of our arrays (objects-json.md): numpy.ndarray as NumPy itself pickles it. */
struct json;
bool object_pickle_array(struct pickler *p, const struct json *v);

/* BASE64 of objects.json; false: it is none, or there is no memory (buf_failed). */
bool object_base64(const char *text, struct buf *out);

#endif
