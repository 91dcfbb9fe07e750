/* SPDX-License-Identifier: MIT */
/* index/formats/hf/hf_dcp_priv.h - one scan of a directory of shards: what its files share. */
#ifndef UFS_INDEX_FORMATS_HF_DCP_PRIV_H
#define UFS_INDEX_FORMATS_HF_DCP_PRIV_H

#include "base/base.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/hf/hf_config.h"
#include "index/formats/hf/hf_dcp.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/hf/safetensors_files.h"
#include "index/shape.h"

struct arena;

extern const char hf_metadata_dir[];

/* shard-RANK-model-K-of-N.safetensors; ranks count from 1. */
struct hf_shard {
    uint32_t rank, k, n;
    /*
     * The lowest rank up to the highest one of all that has no file of model file k, or
     * 0. Not every such file has been lost: a rank with nothing to write writes none.
     */
    uint32_t without;
    bool damaged;      /* it cannot be read, or lacks tensors that it names */
    bool doubtful;     /* one of the same model file is damaged */
    const char *fault; /* why its tensors cannot be placed, or NULL */
};

/* A tensor of one shard: a box of the full one. */
struct hf_piece {
    const struct safetensors_tensor *t;
    uint32_t file;
    const uint64_t *start; /* units, t->nd of them; NULL: it is not told */
};

/* A full tensor. Its pieces are piece[first .. first + count), in order of rank. */
struct hf_tensor {
    size_t first, count;
    enum dtype dtype;
    struct shape units; /* the extent of all pieces, or the size that others tell */
    const char *fault;  /* why the pieces do not fit each other, or NULL */
    const struct safetensors_tensor *copy; /* in the full files, or NULL */
    uint32_t k; /* of the model file it belongs to; 0: of several */
    int axis;   /* the only one that it is cut along; -1: one piece; -2: several */
    bool full;  /* the volume of its pieces is enough */
    bool ended; /* an empty piece at its end tells its size */
    bool last;  /* the piece at its end is of the highest rank */
    bool told;  /* full files or the optimizer tell this very size */
    bool
        named; /* no shard has it, and only the optimizer or a list of names tells of it */
};

/* What the files as a whole prove. */
struct hf_proof {
    bool row;    /* every tensor is cut along one axis at most, in order of the ranks */
    bool flat;   /* and in equal pieces, the n-th one by rank n: all ranks share them */
    bool first;  /* nothing that is cut starts at another rank than 1 */
    bool ranks;  /* the sizes of pieces speak against lost files of higher ranks */
    bool config; /* config.json tells that tensors which all ranks share are whole */
    bool lost;   /* some file has been lost, */
    uint32_t k;  /* of this model file only, or of any: 0 */
    char why[512];
};

struct hf_scan {
    const struct scan_context *c;
    struct sink *sink;
    const struct hf_dcp_how *how;
    struct listing *top;    /* of how->dir */
    struct listing *pieces; /* where the shards lie */
    const char *pieces_dir; /* relative to the checkpoint's directory: "" or "a/b" */
    struct listing *full;   /* where full files lie, or NULL */
    const char *full_dir;
    struct hf_config config;
    struct arena *arena; /* names and offsets */
    struct safetensors_files file, copy;
    struct hf_index index;    /* of the full files */
    struct hf_shard *shard;   /* malloc; one a file, in order of k and rank */
    struct hf_piece *piece;   /* malloc */
    struct hf_tensor *tensor; /* malloc; in order of the key */
    struct safetensors_tensor *full_tensor; /* malloc; what tensor[].copy points to */
    size_t npieces, ntensors;
    uint32_t max_rank, max_n;
    struct hf_proof proof;
};

/* A rank that has no file of the model file that the tensor belongs to, or 0. */
static inline uint32_t hf_without(const struct hf_scan *s, const struct hf_tensor *t)
{
    return t->k ? s->shard[s->piece[t->first].file].without : 0;
}

/* May pieces of the tensor have been in a shard that is damaged? */
static inline bool hf_doubtful(const struct hf_scan *s, const struct hf_tensor *t)
{
    return t->k && s->shard[s->piece[t->first].file].doubtful;
}

/* What tells the name of a tensor. */
const struct safetensors_tensor *hf_name_of(const struct hf_scan *s,
                                            const struct hf_tensor *t);

/* The shape of one piece in units, as many dimensions; false: it is not to be cut. */
bool hf_piece_units(const struct safetensors_tensor *t, struct shape *out);

static inline uint32_t hf_rank_of(const struct hf_scan *s, const struct hf_piece *p)
{
    return s->shard[p->file].rank;
}

/* Where a piece starts along the only axis that its tensor is cut along. */
static inline uint64_t hf_piece_at(const struct hf_tensor *t, const struct hf_piece *p,
                                   uint64_t *size)
{
    struct shape units;

    hf_piece_units(p->t, &units);
    *size = units.dim[t->axis];
    return p->start[t->axis];
}

/* By the bytes of the name. */
int hf_compare_names(const struct safetensors_tensor *a,
                     const struct safetensors_tensor *b);

/* Finds and reads the files and fills in pieces, in order of name and rank. */
int hf_read_shards(struct hf_scan *s, struct err *e);
int hf_read_copies(struct hf_scan *s, struct err *e);

/* Fills in the tensors and what is proven of them. */
int hf_join_pieces(struct hf_scan *s, struct err *e);
int hf_weigh(struct hf_scan *s, struct err *e);

/* Notes that a file of model file `k` is lost, or of any: 0. The first reason is kept. */
void PRINTF(3, 4) hf_lose(struct hf_proof *p, uint32_t k, const char *fmt, ...);

/*
 * After hf_weigh: adds the tensors of which only names are left, and warns of names that
 * may never have been saved.
 */
int hf_check_names(struct hf_scan *s, struct err *e);

/* Is there nothing that makes its full shape doubtful? */
bool hf_trusted(const struct hf_scan *s, const struct hf_tensor *t);

/* Is the full shape of all tensors sure? */
bool hf_all_sure(const struct hf_scan *s);

/* Does the full file have it in this very shape? */
bool hf_same_as_copy(const struct hf_tensor *t);

int hf_report_tensors(struct hf_scan *s, struct err *e);

#endif
