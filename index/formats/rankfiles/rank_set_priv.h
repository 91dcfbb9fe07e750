/* SPDX-License-Identifier: MIT */
/* index/formats/rankfiles/rank_set_priv.h - the pieces that a set of ranks' files gave. */
#ifndef UFS_INDEX_FORMATS_RANKFILES_RANK_SET_PRIV_H
#define UFS_INDEX_FORMATS_RANKFILES_RANK_SET_PRIV_H

#include "base/arena.h"
#include "base/err.h"
#include "index/formats/hf/safetensors_header.h"
#include "index/formats/rankfiles/rank_set.h"

/* One piece in as few bytes as it takes: there may be a million. */
struct rank_piece {
    struct rank_piece *next; /* of the same tensor, by file */
    uint32_t file;
    uint32_t crc;
    uint8_t dtype, flags, nd;
    uint64_t data, data_len, first, packed;
    /* start (units) in the full tensor, size (elements) and stride: three times nd. */
    uint64_t number[];
};

/* A tensor by its path. */
struct rank_entry {
    const char *path;
    size_t len;
    bool distributed;
    bool plain;       /* distributed only by what rank_set_boxes() was told */
    bool loose;       /* plain, and within an object that is only data to us */
    bool uneven;      /* plain, and of several shapes or types */
    enum dtype dtype; /* of the full tensor; DTYPE_NONE: it is not known */
    uint32_t nd;
    uint64_t *dim;
    uint32_t last_file; /* that had it, counted from 1 */
    const char *why;    /* NULL, or why it cannot be put together */
    struct rank_piece *piece, **last;
    size_t npieces;
    bool alias;
    struct rank_entry *next; /* in the order in which they were met */
};

struct rank_file {
    struct torch_file file;
    char *path;
    bool safetensors;
    struct safetensors_header header; /* then, while it is loaded */
    char *why;                        /* NULL: it was read, or will be */
    struct err err;                   /* while it is loaded */
};

struct rank_set {
    const struct scan_context *c;
    struct sink *sink;
    const struct rank_set_how *how;
    struct arena *arena;
    uint64_t budget; /* bytes of the arena, by what was read */
    struct rank_file *file;
    size_t nfiles, cap;
    uint64_t missing; /* files that are not even known by name */
    size_t read;      /* files that were */
    void *by_path;    /* tsearch: struct rank_entry */
    struct rank_entry *entry, **last;
    size_t count;
    struct rank_entry **at;    /* count of them, once all files are read */
    struct rank_entry *cursor; /* most files have the same paths in the same order */
    bool distributed;          /* some tensor is */
    struct dist_mesh mesh;
};

/*
 * The tensor of this path as this file begins to tell of it: new where it was not met yet.
 * NULL and 0: it was told already by the same file, and has a fault now. -EFBIG when
 * references multiply tensors.
 */
int rank_entry_meet(struct rank_set *s, uint32_t file, const char *path, size_t len,
                    bool distributed, struct rank_entry **out, struct err *e);

/* What the full tensor is, by the first rank that tells; *same: this one tells the same. */
int rank_entry_learn(struct rank_set *s, struct rank_entry *t, enum dtype dtype,
                     const struct shape *shape, bool *same, struct err *e);

/* The same, where another one is a fault. */
int rank_entry_shape(struct rank_set *s, struct rank_entry *t, uint32_t file,
                     enum dtype dtype, const struct shape *shape, struct err *e);

/* A fault of the tensor, which the first one of them stays. */
int rank_entry_fault(struct rank_set *s, struct rank_entry *t, uint32_t file,
                     const char *why, struct err *e);

/* All of x is the box of the tensor that begins at `start` (NULL: it has no box). */
int rank_entry_piece(struct rank_set *s, struct rank_entry *t, uint32_t file,
                     const struct torch_tensor *x, const uint64_t *start,
                     struct err *e);

/* As the rest of the code wants it. */
void rank_piece_open(const struct rank_piece *p, struct torch_tensor *out);

static inline const uint64_t *rank_piece_start(const struct rank_piece *p)
{
    return p->number;
}

static inline const uint64_t *rank_piece_size(const struct rank_piece *p)
{
    return p->number + p->nd;
}

/*
 * Do two pieces of one size hold the same bytes? 1: the checksums of their files say so,
 * 0: they say no, -1: nothing tells.
 */
int rank_piece_equal(const struct rank_piece *a, const struct rank_piece *b);

/*
 * Collects what a loaded file holds. 1: the caller has taken it (on_file), and nothing else
 * of it is shown; 0, or what is wrong with the file.
 */
int rank_collect_file(struct rank_set *s, uint32_t file, struct err *e);

/* The same of safetensors files: reads the header, collects what it names. */
int rank_image_load(const struct scan_context *c, struct rank_file *f, struct err *e);
int rank_image_collect(struct rank_set *s, uint32_t file, struct err *e);

/* Once all files are read: fills in `at`, and finds tied tensors. */
int rank_set_settle(struct rank_set *s, struct err *e);

/*
 * Memory that a file of so many bytes of names and shapes may take: a tensor is 200 bytes of a
 * pickle and about as many here. References can multiply that: one tensor of 64 dimensions
 * under any number of names.
 */
enum { RANK_MEMORY_A_BYTE = 16 };

/* How many files there should be. */
static inline uint64_t rank_set_world(const struct rank_set *s)
{
    return s->nfiles + s->missing;
}

/*
 * An optimizer without distributed tensors: FSDP 1, whose files hold slices of flattened
 * parameters. As far as files were read.
 */
static inline bool rank_set_is_flat(const struct rank_set *s)
{
    return s->how->optimizer && !s->distributed && rank_set_world(s) > 1;
}

#endif
