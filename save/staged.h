/* SPDX-License-Identifier: MIT */
/* save/staged.h - what is in a staging directory, and how it is removed. */
#ifndef UFS_SAVE_STAGED_H
#define UFS_SAVE_STAGED_H

#include "base/base.h"

struct err;

#define STAGED_DATA "data" /* files of the target, at their paths */
#define STAGED_SPOOL "in"  /* files as they arrive, by number */
#define STAGED_OLD "old" /* files that a step has taken out of the target, by number */
#define STAGED_LOCK "lock"       /* of a transaction */
#define STAGED_JOURNAL "journal" /* of a transaction */
#define STAGED_REDO "redo"       /* of a step; durable: the step has begun */
#define STAGED_ENDED                                                                   \
    "ended" /* that journal of a step that has ended, while others stay staged */
#define STAGED_DONE                                                                    \
    "done" /* that journal, when the step has ended: the rest is of no use */
/*
 * Made when all is durable, just before data/ is renamed as a whole. Where it is without
 * data/, the rest is what a published save left when it was killed: its journals speak of
 * files that are no longer here, and must not be believed by the next save of this name.
 */
#define STAGED_PUBLISHED "published"

/* "journal.1-of-4": of a part of a conversion. */
bool staged_is_part(const char *name);

/* errno in words: "WHAT PATH: why". Returns -errno. */
int staged_fail(struct err *e, const char *what, const char *path);

/* mkdir that is content with what is there, and a descriptor of it. */
int staged_make_dir(int at, const char *name, int *fd, struct err *e);

/* Our own files only: not deeper than a layout makes directories. `depth`: 0 at first. */
int staged_remove_tree(int at, const char *name, unsigned depth, struct err *e);

/* Empties a directory that stays; one that is not there is empty. */
int staged_empty(int at, const char *name, struct err *e);

/* The staging directory `name` of `parent`, in an order in which any rest is recognised. */
int staged_remove_dir(int parent, const char *name, struct err *e);

/* This boot of the machine; "" where it cannot be told. */
void staged_boot(char boot[64]);

#endif
