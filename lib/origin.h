/* SPDX-License-Identifier: MIT */
/* lib/origin.h - where an open checkpoint's tensors come from: its files, or a mount of it. */
#ifndef UFS_LIB_ORIGIN_H
#define UFS_LIB_ORIGIN_H

#include "base/base.h"
#include "gpu/gather.h"
#include "index/map/mapping.h"

struct arena;
struct err;
struct origin;

struct origin_options {
    const char *cache_dir;
    bool index_memory, follow_symlinks, no_cache;
    uint64_t cache_size; /* 0: as struct reading_options has it */
    unsigned jobs;
    struct mapping_choice mapping;
};

/* One tensor. All of it lives as long as its origin. */
struct row {
    const char *key; /* ends in NUL, and may hold NUL */
    size_t key_len;
    uint32_t ord; /* what the origin knows it by */
    enum dtype dtype;
    const char *role, *fault;
    struct shape shape;
    uint64_t bytes;
};

struct origin_ops {
    /* What has to be done to have the part; any thread. Lives beyond the origin's call. */
    int (*gather)(struct origin *o, const struct row *row,
                  const struct gather_part *part, struct gather **out, struct err *e);
    /*
     * Is it still the checkpoint that was opened? -ESTALE: another stands there now. NULL:
     * it cannot tell.
     */
    int (*current)(struct origin *o, struct err *e);
    void (*close)(struct origin *o);
};

/* Kinds embed this as their first member. */
struct origin {
    const struct origin_ops *ops;
    struct arena *arena;
    struct pool *pool; /* the kind's */
    struct row *row;   /* sorted by key */
    size_t rows, cap;
};

int origin_open(const char *source, const struct origin_options *options,
                struct origin **out, struct err *e);
void origin_close(struct origin *o); /* NULL is fine */

/* ---- for the kinds ---- */

int origin_local(const char *source, const struct origin_options *options,
                 struct origin **out, struct err *e);

/* -ENOTTY: the directory is not that of a checkpoint in a mount of ours. */
int origin_mount(const char *source, const struct origin_options *options,
                 struct origin **out, struct err *e);

int origin_init(struct origin *o, const struct origin_ops *ops, struct err *e);
void origin_release(struct origin *o);

/* Adds a copy of `row`, with its texts. */
int origin_add(struct origin *o, const struct row *row, struct err *e);
void origin_sort(struct origin *o);

#endif
