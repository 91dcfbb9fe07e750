/* SPDX-License-Identifier: MIT */
/* index/watched.h - how a directory below a checkpoint is known: has it other names by now? */
#ifndef UFS_INDEX_WATCHED_H
#define UFS_INDEX_WATCHED_H

#include "base/base.h"
#include "remote/listing.h"
#include "remote/store.h"

struct err;

/* Of the names and kinds in a listing, but for directories of saves that are under way; an empty
 * one's is `seed`. */
uint64_t watched_names(const struct listing *l, uint64_t seed);

/*
 * The identity of a watched directory, whose stat is `st`. Its times tell of every later
 * change, but for one within a tick of its clock: where it has just been changed, it is
 * known by its names instead (a time of its own kind, and what stands for them in ctime).
 */
int watched_directory(struct store *s, const char *path, const struct entry_stat *st,
                      struct file_id *out, struct err *e);

/* Is it the one that had this identity, with the same names? */
bool watched_same(struct store *s, const char *path, const struct entry_stat *st,
                  const struct file_id *was);

#endif
