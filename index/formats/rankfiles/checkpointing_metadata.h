/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/checkpointing_metadata.h - torch_checkpointing's metadata.pkl. */
#ifndef UFS_INDEX_FORMATS_RANKFILES_CHECKPOINTING_METADATA_H
#define UFS_INDEX_FORMATS_RANKFILES_CHECKPOINTING_METADATA_H

#include "base/base.h"
#include "index/formats/pickle/pickle.h"
#include "index/formats/ranks/rank_boxes.h"
#include "index/shape.h"

struct arena;
struct err;

/*
 * A pickled dict of plain values (torch_checkpointing 0.1.1, distributed_metadata.py), of
 * version 2.0: {"metadata": {ITEM: {"nested_path_to_metadata": {PATH: [group, ...]},
 * "rank_to_layout_info": {rank: layout or None}}}, "world_size", "version"}. PATH is a JSON
 * list of the keys and positions that lead to a tensor.
 */

/* Of the largest runs: some 10^4. */
enum { CHECKPOINTING_MAX_RANKS = 1 << 16 };

enum checkpointing_format {
    CHECKPOINTING_UNTOLD, /* no layout: ITEM_RANK.pt, if the rank has the item at all */
    CHECKPOINTING_TORCH,
    CHECKPOINTING_SAFETENSORS,
    CHECKPOINTING_OTHER /* JSON, or bytes */
};

/* The file of one rank. */
struct checkpointing_file {
    enum checkpointing_format format;
    const char *path; /* relative to the checkpoint's directory; NULL: untold */
};

/* Ranks with the position at which each stood in a list. */
struct checkpointing_ranks {
    size_t count;
    struct checkpointing_rank {
        uint32_t rank, at;
    } * rank; /* by rank */
};

/* Metadata that several ranks share. */
struct checkpointing_group {
    struct pv sharding; /* {"type", "data"} */
    const struct checkpointing_ranks *ranks;
    const struct checkpointing_ranks *mesh; /* NULL: the kind has none */
};

/* A tensor of an item. */
struct checkpointing_path {
    const char *path; /* keys and positions, joined by dots; NUL-terminated */
    size_t len;
    bool twice; /* two paths give this name */
    struct checkpointing_group *group;
    size_t groups;
};

struct checkpointing_item {
    const char *key;                 /* letters, digits, '-' and '_' */
    struct checkpointing_file *file; /* one for each rank */
    struct checkpointing_path *path; /* by path */
    size_t paths;
};

struct checkpointing_metadata {
    uint32_t world;
    struct checkpointing_item *item; /* in the order of the file */
    size_t items;
    uint64_t len; /* of the file */
    /* Boxes of default_tensor_v1 that an honest file of this size can still have for: */
    uint64_t boxes;
    uint32_t rank;
};

/*
 * `root` is that of a pickle of `len` bytes, which has to outlive `out`; all else is in the
 * arena. -EBADMSG for what its own reader refuses (a rank without an entry, two ranks with one
 * file) or what is no such dict, -ENOTSUP for another version, -EFBIG where references
 * multiply what is in it.
 */
int checkpointing_metadata_read(const struct pv *root, uint64_t len, struct arena *a,
                                struct checkpointing_metadata *out, struct err *e);

const struct checkpointing_path *
checkpointing_find(const struct checkpointing_item *item, const char *path, size_t len);

bool checkpointing_has_rank(const struct checkpointing_ranks *ranks, uint32_t rank);

/* What a rank holds of a tensor. Boxes are in the arena; empty where it holds nothing. */
struct checkpointing_part {
    enum dtype dtype;
    struct shape whole; /* elements */
    struct rank_boxes boxes;
    bool exact; /* the piece has the size of its one box, and no more */
};

/*
 * 1 and the part; 0: nothing is told of this rank. -EBADMSG when it contradicts itself,
 * -ENOTSUP for kinds of metadata, types and placements that are not known, -EFBIG where
 * references multiply boxes. To be asked once for each tensor and rank, and for all tensors
 * of one rank before those of the next: ranks with the same boxes are told of them once.
 */
int checkpointing_part(struct checkpointing_metadata *m,
                       const struct checkpointing_path *p, uint32_t rank,
                       struct arena *a, struct checkpointing_part *out, struct err *e);

#endif
