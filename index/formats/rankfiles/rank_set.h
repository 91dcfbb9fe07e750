/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/rank_set.h - a torch.save file a rank, merged to full tensors. */
#ifndef UFS_INDEX_FORMATS_RANKFILES_RANK_SET_H
#define UFS_INDEX_FORMATS_RANKFILES_RANK_SET_H

#include "base/base.h"
#include "index/formats/rankfiles/dist_tensor.h"
#include "index/formats/torch/torch_file.h"
#include "index/sink.h"

struct buf;
struct err;
struct rank_boxes;
struct rank_set;
struct scan_context;
struct torch_item;

/*
 * Every rank saved its state dict with torch.save: FSDP's DTensors and ShardedTensors,
 * merged by their placements, and plain tensors, which are
 * - where there is one file: the tensors;
 * - of no dimension, or in a file of the model that has distributed tensors: the same on
 *   all ranks, and the first rank's is shown (a buffer that differs is told);
 * - else this rank's own slices, of which no file tells how they were cut (FSDP 1's
 *   optimizer): shown for each rank as FILE:PATH, as they are, with a warning. Unless the
 *   checksums of all ranks' files prove them equal.
 * Keys are paths in the state dict. What is no tensor is shown once, of the first rank.
 * Ranges of flattened tensors are merged where the caller knows them: rank_set_flat().
 */
struct rank_set_place {
    const char *part; /* sink_tensor.part, or NULL */
    enum role role;
};

/* All of a rank's x is the box that begins at `start` of the tensor `path`. */
struct rank_set_piece {
    const char *path;
    size_t len;
    enum dtype dtype;
    const struct shape *shape; /* of the full tensor; elements */
    const struct torch_tensor *x;
    const uint64_t *start; /* units */
};

struct rank_set_how {
    const char *part;   /* sink_tensor.part, or NULL */
    enum role role;     /* of all tensors */
    bool optimizer;     /* plain tensors with dimensions are slices by default */
    const char *object; /* before the keys of objects, or NULL */
    /*
     * Optional. Sees the first file that can be read, while it is loaded and its tensors
     * are in the set, before any object is reported.
     */
    int (*on_first)(void *user, const struct torch_file *f, struct err *e);
    /* Optional: appends the key to show for the tensor of this path; 0, or -ENOMEM. */
    int (*rename)(void *user, const char *path, size_t len, struct buf *key);
    /*
     * NULL, or the entries of the outermost dict that ranks have shards of. What else is in
     * it each rank has for itself: tensors FILE:PATH of role other, objects FILE:ENTRY.
     */
    const char *const *merged;
    /*
     * Each rank saved what is its own: plain tensors and objects are shown for each of them,
     * FILE:PATH of role other. Distributed tensors are merged.
     */
    bool own;
    /* Optional: part and role of the tensor of this path, in place of those above. */
    void (*place)(void *user, const char *path, size_t len, struct rank_set_place *out);
    /*
     * Optional. Sees the graph of each file, in their order, before its tensors are
     * collected. 1: it has given all that is in it to rank_set_flat(), and nothing else of
     * the file is shown; 0: go on.
     */
    int (*on_file)(void *user, uint32_t file, struct torch_zip *zip, struct err *e);
    /*
     * Optional: each tensor of that file then, in place of rank_set_plain(). Not those that
     * are distributed.
     */
    int (*on_tensor)(void *user, uint32_t file, const struct torch_item *item,
                     struct err *e);
    /*
     * Optional: called once all files are read, before tensors are counted; may call
     * rank_set_require().
     */
    int (*on_read)(void *user, struct rank_set *s, struct err *e);
    /*
     * Optional: sees each piece that a distributed tensor gives; NULL, or why it is not to be
     * believed, which becomes the tensor's fault.
     */
    const char *(*doubt)(void *user, uint32_t file, const struct rank_set_piece *piece);
    void *user;
};

/* Everything that is given is borrowed until the set is freed. */
int rank_set_new(const struct scan_context *c, struct sink *sink,
                 const struct rank_set_how *how, struct rank_set **out, struct err *e);
void rank_set_free(struct rank_set *s); /* NULL is fine */
void rank_set_freep(struct rank_set **s);

/* A rank's file, relative to the checkpoint's directory; in the order of ranks. */
int rank_set_add(struct rank_set *s, const char *path, struct err *e);

/* The same of a safetensors file: each tensor is a plain one, and there are no objects. */
int rank_set_add_safetensors(struct rank_set *s, const char *path, struct err *e);

/* `missing` more files should be there: their names are not, or are no use. */
void rank_set_expect(struct rank_set *s, uint64_t missing);

/*
 * Registers and reads all files, some at a time, and reports objects. A file that cannot be
 * read is a warning, and what only it holds a fault of those tensors; when there is none
 * that can be, its error is returned.
 */
int rank_set_load(struct rank_set *s, struct err *e);

/* Reports all tensors. */
int rank_set_report(struct rank_set *s, struct err *e);

/*
 * For the callbacks of a file: its elements x[offset, offset + count), row-major, are the
 * row-major elements [begin, begin + count) of the tensor `path` of this shape. What does not
 * fit becomes that tensor's fault; -EFBIG where references multiply them.
 */
struct rank_flat {
    const char *path;
    size_t len;
    const struct shape *shape; /* elements of the full tensor */
    const struct torch_tensor *x;
    uint64_t offset, begin, count;
};
int rank_set_flat(struct rank_set *s, uint32_t file, const struct rank_flat *flat,
                  struct err *e);

/*
 * The same where x has these boxes of the tensor, of elements of whole bytes. `exact`: there
 * is one box, and x has its size and no more. A box outside of x is the tensor's fault. How
 * many boxes there may be is the caller's to say.
 */
struct rank_set_boxes {
    const char *path;
    size_t len;
    enum dtype dtype;          /* of the full tensor */
    const struct shape *shape; /* elements of the full tensor */
    const struct torch_tensor *x;
    const struct rank_boxes *boxes; /* within the full tensor */
    bool exact;
};
int rank_set_boxes(struct rank_set *s, uint32_t file, const struct rank_set_boxes *b,
                   struct err *e);

/* What it tells of the tensor of this path cannot be used: that tensor has a fault. */
int rank_set_fault(struct rank_set *s, uint32_t file, const char *path, size_t len,
                   const char *why, struct err *e);

/* For on_read(): there has to be a tensor of this path. Where there is none, it has a fault. */
int rank_set_require(struct rank_set *s, const char *path, size_t len, struct err *e);

/* The same of a tensor that is no shard, under this path. */
int rank_set_plain(struct rank_set *s, uint32_t file, const char *path, size_t len,
                   const struct torch_item *item, struct err *e);

/*
 * What was found, in the order of the first file (of safetensors: that of its bytes); in
 * on_first(), and once it is loaded.
 */
struct rank_set_tensor {
    const char *path; /* NUL-terminated */
    size_t len;
    bool distributed; /* not: a plain one of rank_set_boxes() */
    enum dtype dtype;
    uint32_t nd;
    const uint64_t *dim; /* of the full tensor; elements */
    bool alias;          /* the same elements of the files as an earlier tensor: tied */
};
size_t rank_set_count(const struct rank_set *s);
void rank_set_at(const struct rank_set *s, size_t i, struct rank_set_tensor *out);

/* For people: are the tensors distributed, and on which mesh; naxes 0 where on none. */
bool rank_set_is_distributed(const struct rank_set *s);
const struct dist_mesh *rank_set_mesh(const struct rank_set *s);

#endif
