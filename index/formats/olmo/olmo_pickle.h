/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_pickle.h - pickles that OLMo put into tensors of bytes, as objects. */
#ifndef UFS_INDEX_FORMATS_OLMO_PICKLE_H
#define UFS_INDEX_FORMATS_OLMO_PICKLE_H

#include "base/base.h"

struct err;
struct safetensors_file;
struct scan_context;
struct sink;

/* Where the bytes of one lie. Names are borrowed. */
struct olmo_pickle {
    const char *key; /* of the object */
    const struct safetensors_file *file;
    uint64_t offset, length; /* in the file */
};

struct olmo_pickles {
    struct olmo_pickle *item; /* malloc */
    size_t count, cap;
};

int olmo_pickles_add(struct olmo_pickles *l, const struct olmo_pickle *p,
                     struct err *e);
void olmo_pickles_release(struct olmo_pickles *l);

/*
 * Reports each as an object, called PART.KEY or KEY. One that cannot be read is an
 * unreadable object and a warning; only errors that stop a scan are returned.
 */
int olmo_pickles_report(const struct scan_context *c, struct sink *sink,
                        const char *part, const struct olmo_pickles *l, struct err *e);

#endif
