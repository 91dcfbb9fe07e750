/* SPDX-License-Identifier: MIT */
/* fs/save_shards.h - shards of torch's own save and the metadata that tell of them. */
#ifndef UFS_FS_SAVE_SHARDS_H
#define UFS_FS_SAVE_SHARDS_H

struct err;
struct publication;

/*
 * Are they of one save? -EINVAL with words, until they are: shards came over those of a
 * checkpoint without the metadata of theirs, or metadata without a shard that they name.
 * Any of the two alone would tell of other bytes than those that lie there.
 */
int save_shards_check(const struct publication *p, struct err *e);

#endif
