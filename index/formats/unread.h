/* SPDX-License-Identifier: MIT */
/* index/formats/unread.h - well-known kinds of files that no driver reads, told by name. */
#ifndef UFS_INDEX_FORMATS_UNREAD_H
#define UFS_INDEX_FORMATS_UNREAD_H

#include "base/base.h"

struct err;
struct listing;

struct unread_kind {
    const char *what; /* "HDF5, as Keras writes it" */
    const char *then; /* how its tensors get into a format that is read */
};

/*
 * What the first file (or directory) of the listing is that is of a kind in the table, or of
 * `only`, one name of it (NULL: any). *name is that name, the listing's. NULL: none is. Meant
 * for places that no driver bids for: it says nothing of what a driver may read as well. A file
 * that cannot be read is of no kind.
 */
const struct unread_kind *unread_find(struct listing *l, const char *only,
                                      const char **name);

/*
 * Sets -ENOENT, "`source`: no checkpoint that a driver recognises: NAME is ...", and what to do
 * as its hint. 0, and nothing set: unread_find() finds none.
 */
int unread_tell(struct listing *l, const char *only, const char *source, struct err *e);

#endif
