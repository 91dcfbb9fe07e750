/* SPDX-License-Identifier: MIT */
/* index/formats/deepspeed/deepspeed_files.h - what the files of one save are, by their names. */
#ifndef UFS_INDEX_FORMATS_DEEPSPEED_DEEPSPEED_FILES_H
#define UFS_INDEX_FORMATS_DEEPSPEED_DEEPSPEED_FILES_H

#include "base/base.h"

struct err;
struct listing;

enum ds_kind {
    DS_MODEL,        /* mp_rank_MM_model_states.pt, zero_pp_rank_R_mp_rank_MM_... */
    DS_OPTIM,        /* zero_pp_rank_R_mp_rank_MM_optim_states.pt, bf16_..., fp16_... */
    DS_EXPERT,       /* layer_L_expert_E_mp_rank_MM_model_states.pt, expert_E_... */
    DS_EXPERT_OPTIM, /* expp_rank_R_mp_rank_MM_optim_states.pt */
    DS_LAYER,        /* layer_LL-model_states.pt, layer_LL-model_MM-model_states.pt */
    DS_KINDS,
    DS_NOT = DS_KINDS
};

struct ds_file {
    const char *name; /* borrowed */
    enum ds_kind kind;
    uint32_t mp, dp;          /* model-parallel rank; ZeRO's (or the experts') rank */
    uint32_t layer, expert;   /* DS_EXPERT, DS_LAYER */
    bool sharded;             /* DS_MODEL: one a rank, as stage 3 does */
    uint32_t writer, writers; /* of FastFileWriter: "….pt-0.1"; 0: a plain name */
};

/* Takes a name apart; false: it is none of these (DS_NOT). */
bool ds_file_parse(const char *name, struct ds_file *out);

/* All of a directory: by kind, then by ranks and numbers. */
struct ds_files {
    struct ds_file *file; /* malloc */
    size_t count;
    size_t begin[DS_KINDS + 1]; /* where each kind begins */
    size_t unknown;             /* *_states.pt of other names */
    const char *first_unknown;
    const char **copy; /* malloc: what a further writer wrote of a file that is there */
    size_t copies;
};

static inline size_t ds_files_of(const struct ds_files *f, enum ds_kind kind)
{
    return f->begin[kind + 1] - f->begin[kind];
}

static inline const struct ds_file *ds_files_at(const struct ds_files *f,
                                                enum ds_kind kind, size_t i)
{
    return &f->file[f->begin[kind] + i];
}

/* -EBADMSG: two files are of the same rank (an older save of another dtype). */
int ds_files_list(const struct listing *l, struct ds_files *out, struct err *e);
void ds_files_release(struct ds_files *f);

#endif
