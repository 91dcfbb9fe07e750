/* SPDX-License-Identifier: MIT */
/* index/formats/nanotron/nanotron_priv.h - one scan of a nanotron checkpoint. */
#ifndef UFS_INDEX_FORMATS_NANOTRON_NANOTRON_PRIV_H
#define UFS_INDEX_FORMATS_NANOTRON_NANOTRON_PRIV_H

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/keyset.h"
#include "index/formats/nanotron/nanotron_names.h"
#include "index/sink.h"

struct scan_context;

/* One file of model/: all of a parameter, or a rank's piece of it. */
struct nano_file {
    const char *path; /* relative to the checkpoint's directory */
    const char *name; /* the parameter's, "model.decoder.0...weight" */
    size_t len;
    struct nano_ranks rank;
    uint32_t number;
    struct file_id id;
    bool missing;
    /* Of its tensor; malloc until nano_weights_read() has ended. */
    enum dtype dtype;
    uint32_t nd;
    uint64_t *dim; /* malloc; NULL: it was not read */
    uint64_t offset, bytes;
    char *version, *whole, *slices; /* malloc; NULL: the header has none */
    char *why;                      /* malloc; NULL, or why it cannot be read */
    struct rank_boxes boxes;        /* where it stands in the whole */
    bool placed;                    /* boxes are good */
};

/* A parameter: the files of its name, which stand together. */
struct nano_weight {
    const char *name;
    size_t len;
    struct nano_file *file;
    size_t files;
    bool whole;   /* one file holds all of it */
    bool shaped;  /* shape and dtype are known */
    bool jumbled; /* its ranks' slices do not follow each other as the ranks do */
    struct shape *shape; /* of the whole */
    enum dtype dtype;
};

struct nano {
    const struct scan_context *c;
    struct sink *sink;
    struct arena *arena;
    struct nano_file *file; /* malloc; by name and rank */
    size_t files, file_cap;
    struct nano_weight *weight; /* malloc; by name */
    size_t weights;
    /* What checkpoint_metadata.json and the names of files tell. */
    char version[32];
    uint64_t tp, dp, cp, pp, ep;
    const struct nano_file *cut; /* a file of model/ that tells its ranks, or NULL */
    bool has_step;
    int64_t step;
    bool zero;
    uint64_t unnamed; /* states of parameters that no file of model/ is of */
    struct keyset
        lost; /* such parameters, by the names that the optimizer gives them */
    const char *first_lost;
};

/* Finds and reads all files of model/, and reports their tensors. */
int nano_weights_report(struct nano *n, struct err *e);
void nano_weights_release(struct nano *n);

const struct nano_weight *nano_weight_find(const struct nano *n, const char *name,
                                           size_t len);

/* The file whose slices are those of this rank, or NULL; `whole` weights have one for all. */
const struct nano_file *nano_weight_of(const struct nano_weight *w,
                                       const struct nano_ranks *rank);

/* Reports what optimizer/ holds. */
int nano_optimizer_report(struct nano *n, struct err *e);

/* The shape of the piece that a file has. */
void nano_file_shape(const struct nano_file *f, struct shape *out);

/* Is it of a save by as many stages and tensor ranks as the files of model/ are? */
bool nano_same_save(const struct nano *n, const struct nano_ranks *rank);

/* Keeps the largest number of ranks. */
void nano_learn_ranks(struct nano *n, const struct nano_ranks *rank);

/* What one piece is in the whole, so that copies are found: in bytes. */
int nano_boxes_key(const struct rank_boxes *b, struct buf *out, struct err *e);

#endif
