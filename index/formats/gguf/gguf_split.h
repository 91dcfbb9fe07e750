/* SPDX-License-Identifier: MIT */
/* index/formats/gguf/gguf_split.h - models in several GGUF files: NAME-0000K-of-0000N.gguf. */
#ifndef UFS_INDEX_FORMATS_GGUF_SPLIT_H
#define UFS_INDEX_FORMATS_GGUF_SPLIT_H

#include "base/base.h"

struct listing;

/* A name of such a file: its stem ("NAME"), K from 1 on, and N. */
struct gguf_split {
    size_t stem;
    uint32_t k, n;
};

bool gguf_is_named(const char *name);

/* False: it is not such a name (K of 1 to N, five digits each). */
bool gguf_split_parse(const char *name, struct gguf_split *out);

/* Are both files of one set? */
bool gguf_split_same(const char *a, const struct gguf_split *x, const char *b,
                     const struct gguf_split *y);

/*
 * The first present file of the one set that a directory holds, when there are no other
 * GGUF files; else NULL. `present` counts its files.
 */
const char *gguf_split_only(const struct listing *l, struct gguf_split *out,
                            uint32_t *present);

#endif
