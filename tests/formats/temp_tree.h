/* SPDX-License-Identifier: MIT */
/* tests/formats/temp_tree.h - a checkpoint made up in a directory of its own. */
#ifndef UFS_TESTS_FORMATS_TEMP_TREE_H
#define UFS_TESTS_FORMATS_TEMP_TREE_H

#include "base/base.h"

struct temp {
    char top[32]; /* made by mkdtemp() */
    char dir[64]; /* in it: the checkpoint */
};

/* All of these fail the test when something goes wrong. */
void temp_make(struct temp *t, const char *name);
void temp_remove(const struct temp *t);

/* Writes a file of the checkpoint; `name` may have a directory in it. */
void put(const struct temp *t, const char *name, const void *data, size_t len);
void put_text(const struct temp *t, const char *name, const char *text);

/*
 * A file of the directory `from`, with `was` replaced by `is` (of the same length), which
 * must be there `times` times; NULL: as it is.
 */
void put_copy(const struct temp *t, const char *name, const char *from, const char *was,
              const char *is, size_t times);

/* The same of the file `from`, whatever its name; `was` must be there once or more. */
void put_changed(const struct temp *t, const char *name, const char *from,
                 const char *was, const char *is);

#endif
