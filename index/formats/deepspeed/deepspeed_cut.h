/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_cut.h - how tensor-parallel ranks have cut a parameter. */
#ifndef UFS_INDEX_FORMATS_DEEPSPEED_DEEPSPEED_CUT_H
#define UFS_INDEX_FORMATS_DEEPSPEED_DEEPSPEED_CUT_H

#include "index/formats/deepspeed/deepspeed_pattern.h"
#include "index/formats/pickle/pickle.h"
#include "index/formats/ranks/rank_merge.h"
#include "index/shape.h"

struct arena;
struct err;

/* The kinds of patterns of universal_checkpoint_info. */
enum ds_note {
    DS_NOTE_AFFINE,      /* affine_map.params */
    DS_NOTE_UNSUPPORTED, /* autotp_unsupported_parameter_patterns */
    DS_NOTE_SAME,        /* tp_replicated_parameter_patterns */
    DS_NOTE_MEAN,        /* parameter_to_average_patterns */
    DS_NOTE_HALVES,      /* parameter_with_2_sub_params_cat_dim_0 */
    DS_NOTE_SUBS,        /* parameter_with_sub_params */
    DS_NOTE_COLUMNS,     /* parameter_with_row_parallelism_patterns */
    DS_NOTE_VOCABULARY,  /* vocabulary_parameter_patterns */
    DS_NOTES
};

/*
 * What `universal_checkpoint_info` tells, by which DeepSpeed's converter joins the pieces of
 * tensor-parallel ranks (DeepSpeed 0.15 to 0.19.8, checkpoint/ds_to_universal.py,
 * merge_tp_slices()). Borrows from the pickle.
 */
struct ds_notes {
    struct arena *arena;
    uint32_t ranks; /* tensor-parallel ones */
    struct ds_patterns kind[DS_NOTES];
    struct pv
        *value[DS_NOTES]; /* by ds_pattern.number: what is noted beside it, if any */
    double version;       /* 0: none is noted */
    bool has_vocabulary;  /* its size is noted: */
    uint64_t vocabulary;  /* rows without padding */
    struct pv widths;     /* sub_param_shard_widths; PV_NONE: there are none */
    uint64_t effort;      /* spent so far */
    bool partial;         /* AutoTP until 0.19.5: not all that is cut is noted, */
    bool left;            /* but what it left alone is (from 0.19.4 on) */
};

/*
 * Takes the notes of `root`, an object of model states, for so many ranks. 1: they tell, 0:
 * there are none, or they do not say which parameters are cut and which are not. -ENOTSUP:
 * a pattern or a version that is not supported.
 */
int ds_notes_take(struct arena *a, const struct pv *root, uint32_t ranks,
                  struct ds_notes *out, struct err *e);

/* A pattern that matched no name that was asked for; NULL: there is none. */
const struct ds_pattern *ds_notes_unused(const struct ds_notes *n);

enum ds_cut_kind {
    DS_CUT_JOINED, /* boxes of all ranks */
    DS_CUT_SAME,   /* every rank has all of it */
    DS_CUT_MEAN,   /* the mean of what the ranks have */
};

/* The boxes of one rank's piece. */
struct ds_boxes {
    struct rank_boxes all;
    struct rank_box *box; /* the same, to be filled in */
    uint64_t *number;     /* three times nd of a box */
};

struct ds_cut {
    enum ds_cut_kind kind;
    struct shape whole;
    struct shape *piece;    /* by rank: as boxes see it, with the file's elements */
    struct ds_boxes *boxes; /* by rank */
    bool by_name;           /* by rows, as its name says: then the pieces differ */
    char why[300];          /* not empty: it cannot be joined, and this is why */
};

/*
 * How the parameter is cut, of which the ranks have pieces of these shapes; boxes are in the
 * arena `a`. What does not fit is out->why. -EBADMSG, -ENOTSUP: the notes ask for more work
 * than any real ones do; -ENOMEM.
 */
int ds_cut_find(struct ds_notes *n, struct arena *a, const char *name, size_t len,
                struct shape *local, struct ds_cut *out, struct err *e);

/*
 * The rule of a parameter that `partial` notes say nothing of; RANK_UNKNOWN: nothing tells.
 * `nd`: its dimensions.
 */
enum rank_rule ds_cut_unnoted(struct ds_notes *n, const char *name, size_t len,
                              uint32_t nd);

/* The same by a rule that is no sum and known. */
int ds_cut_by_rule(struct ds_notes *n, struct arena *a, enum rank_rule rule,
                   struct shape *local, struct ds_cut *out, struct err *e);

/* ---- deepspeed_affine.c, for deepspeed_cut.c ---- */

/* The cut that an entry of affine_map.params tells. */
int ds_cut_affine(struct ds_notes *n, struct arena *a, const struct pv *map,
                  struct shape *local, struct ds_cut *out, struct err *e);

/* Room for `count` boxes of a rank, all zero, to be filled with ds_cut_box(). */
int ds_cut_room(struct ds_notes *n, struct arena *a, uint32_t nd, size_t count,
                struct ds_boxes *out, struct err *e);

/* Appends a box unless it is empty. */
void ds_cut_box(struct ds_boxes *b, const uint64_t *from, const uint64_t *to,
                const uint64_t *size);

/* Sets out->why, and returns 0. */
int ds_cut_refuse(struct ds_cut *out, const char *fmt, ...) PRINTF(2, 3);

#endif
