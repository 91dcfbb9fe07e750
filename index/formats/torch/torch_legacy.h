/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_legacy.h - the container of torch.save before 1.6: pickles, storages. */
#ifndef UFS_INDEX_FORMATS_TORCH_LEGACY_H
#define UFS_INDEX_FORMATS_TORCH_LEGACY_H

#include "base/base.h"

struct err;
struct pickle;
struct pv;
struct source;
struct torch_legacy;

/*
 * Reads the five pickles of the file and finds its storages, whose counts must all be as
 * the object says; those that lie behind a count that is not, or behind the end, are no
 * longer to be found. *graph is the fourth pickle (the caller's), *len its length.
 * -ENOTSUP names what the file is instead; -EBADMSG.
 */
int torch_legacy_open(struct source *s, struct torch_legacy **out,
                      struct pickle **graph, uint64_t *len, bool *big_endian,
                      struct err *e);
void torch_legacy_free(struct torch_legacy *t); /* NULL is fine */

/*
 * Where the storage of a persistent id ('storage', class, key, location, count[, view])
 * lies in the file, and its bytes: with a view those of the view. -EBADMSG.
 */
int torch_legacy_find(const struct torch_legacy *t, const struct pv *id, uint64_t *data,
                      uint64_t *bytes, struct err *e);

/* Do these first bytes begin the pickle of the magic number? */
bool torch_legacy_magic(const void *head, size_t len);

#endif
