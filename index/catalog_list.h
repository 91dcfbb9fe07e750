/* SPDX-License-Identifier: MIT */
/* index/catalog_list.h - the indexes in a cache directory, for `unshard cache`. */
#ifndef UFS_INDEX_CATALOG_LIST_H
#define UFS_INDEX_CATALOG_LIST_H

#include "base/base.h"

struct err;

/* One index; strings are valid during the call only. */
struct catalog_listed {
    const char *name;   /* of its file in DIR/index */
    const char *source; /* what it is of, as people name it; NULL: it cannot be read */
    uint64_t bytes;     /* with its journals */
    int64_t used;       /* seconds since 1970 of its last change */
    bool in_use;        /* a process has it open (told where it lies on a local disk) */
};

/* Stops at and returns what is not 0. No directory: none. */
typedef int catalog_list_fn(void *user, const struct catalog_listed *index);
int catalog_list(const char *dir, catalog_list_fn *fn, void *user, struct err *e);

/* Deletes one, by name. -EBUSY: a process has it open. */
int catalog_remove(const char *dir, const char *name, struct err *e);

#endif
