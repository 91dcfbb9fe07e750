/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_part.h - one folder of early OLMo-core: metadata.json, rank files. */
#ifndef UFS_INDEX_FORMATS_OLMO_PART_H
#define UFS_INDEX_FORMATS_OLMO_PART_H

#include <limits.h>

#include "base/base.h"

struct err;
struct format_writer;
struct listing;
struct scan_context;
struct sink;

/* For bids: 0, or what is there: 1: by its beginning, 2: it names pieces of tensors. */
int olmo_part_find(struct listing *l);

/*
 * A folder of the checkpoint that is a part of it: hidden, and watched, as names that come
 * into it may matter.
 */
int olmo_part_add(struct sink *sink, const char *dir, struct err *e);

struct olmo_part_how {
    const char *dir;  /* relative to the checkpoint's directory; "": itself */
    const char *part; /* sink_tensor.part, or NULL */
    int role;         /* of its tensors: enum role, or -1: by key */
};

struct olmo_part_told {
    uint64_t ranks, files;
    bool legacy;             /* metadata.json as before 13 May 2024 */
    char metadata[PATH_MAX]; /* relative to the store */
};

/*
 * Reports all tensors of the folder and the pickles among them, hides its files, and does
 * not declare it a part. -ENOENT when there is no metadata.json (any more), -EBADMSG when
 * it is of no use; nothing was reported then but hidden names.
 */
int olmo_part_report(const struct scan_context *c, struct sink *sink,
                     const struct olmo_part_how *how, struct olmo_part_told *told,
                     struct err *e);

extern const struct format_writer writer_olmo;

#endif
