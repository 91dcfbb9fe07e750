/* SPDX-License-Identifier: MIT */
/* index/formats/stand_in.h - what stands in a file's place: pointers, links, texts of links. */
#ifndef UFS_INDEX_FORMATS_STAND_IN_H
#define UFS_INDEX_FORMATS_STAND_IN_H

#include "base/base.h"

struct err;
struct listing;
struct listing_entry;
struct sink;

/*
 * Is it not the file that its name says? A pointer of Git LFS, the text of a link (as git
 * writes it where core.symlinks is false), a link to nothing, or one out of the source that is
 * not followed. Then *why has the words, and what to do as its hint.
 */
bool stand_in_is(struct listing *l, const struct listing_entry *entry, struct err *why);

/*
 * The same of any file of the listing whose name is that of weights, or of `only` (NULL: any).
 * -ENOENT and the words in *e, or 0: none.
 */
int stand_in_find(struct listing *l, const char *only, struct err *e);

/*
 * Warns of all that stand in a checkpoint's directory, or in the place of its one file `only`;
 * and of storage files below it that are pointers.
 */
int stand_in_report(struct listing *l, const char *only, struct sink *sink,
                    struct err *e);

#endif
