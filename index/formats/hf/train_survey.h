/* SPDX-License-Identifier: MIT */
/* index/formats/hf/train_survey.h - what a directory of Trainer or Accelerate holds. */
#ifndef UFS_INDEX_FORMATS_HF_TRAIN_SURVEY_H
#define UFS_INDEX_FORMATS_HF_TRAIN_SURVEY_H

#include "base/base.h"
#include "index/formats/hf/hf_model.h"
#include "index/formats/hf/train_parts.h"
#include "index/formats/hf/train_ranks.h"

struct listing;

#define TRAIN_STATE_NAME "trainer_state.json"

/* Which of several copies of the model is shown as the model. */
enum train_main {
    MAIN_NONE,
    MAIN_HF,        /* what save_pretrained wrote */
    MAIN_DCP,       /* pytorch_model_fsdp_0/ */
    MAIN_RANK,      /* pytorch_model_fsdp_0_rankR.bin */
    MAIN_LOCAL,     /* pytorch_model_fsdp_rankR.bin */
    MAIN_FILE,      /* pytorch_model_fsdp.bin */
    MAIN_DEEPSPEED, /* global_stepN/ or pytorch_model/ */
    MAIN_LORA,      /* pytorch_lora_weights.safetensors */
};

/* All is borrowed from the listing. */
struct train_survey {
    struct hf_model hf;
    enum train_main main;
    bool passed; /* `hf` is not whole, and something else is: it is not shown */
    uint64_t count[TRAIN_KINDS]; /* of those that are what their names say */
    uint64_t ranks;              /* as files of random states tell */
    uint64_t random_states;      /* of ranks that have such a file */
    struct train_rank_set set[TRAIN_MAX_RANK_SETS];
    size_t nsets;
    bool too_many;     /* sets of files a rank */
    const char *tag;   /* which global_stepN/ is of this save, or NULL */
    uint64_t tag_step; /* N of it */
    const char *lora;  /* the file that counts, or NULL */
    bool json;         /* trainer_state.json is one */
    bool unfinished;   /* .distcp files of the model, without metadata */
};

/* A pure function of names and first bytes: for bids, too. */
void train_survey(struct listing *l, struct train_survey *out);

/* .distcp files in the directory `name`, and no metadata that names them. */
bool train_is_unfinished(struct listing *l, const char *name);

bool train_has_optimizer(const struct train_survey *s);

/*
 * Is this directory of DeepSpeed one of the save? Of several global_stepN/ it is the one
 * that the file `latest` names, else the last one.
 */
bool train_is_deepspeed(const struct train_survey *s, struct listing *l,
                        const char *name, const struct train_part *part);

#endif
