/* SPDX-License-Identifier: MIT */
/* index/formats/hf/train_parts.h - what Trainer and Accelerate write beside a model. */
#ifndef UFS_INDEX_FORMATS_HF_TRAIN_PARTS_H
#define UFS_INDEX_FORMATS_HF_TRAIN_PARTS_H

#include "base/base.h"

struct listing_entry;

/* Names of accelerate 0.20 to 1.15 (utils/constants.py, utils/fsdp_utils.py) and of
 * transformers 4.0 to 5.23 (trainer.py). */
enum train_kind {
    TRAIN_MODEL_DCP,      /* pytorch_model_fsdp_I/: SHARDED_STATE_DICT */
    TRAIN_MODEL_FILE,     /* pytorch_model_fsdp[_I].bin: FULL_STATE_DICT */
    TRAIN_MODEL_RANK,     /* pytorch_model_fsdp_I_rankR.bin: sharded, without DCP */
    TRAIN_MODEL_LOCAL,    /* pytorch_model_fsdp_rankR.bin: LOCAL_STATE_DICT */
    TRAIN_MORE_MODEL,     /* model_I.safetensors, I from 1 */
    TRAIN_MORE_MODEL_BIN, /* pytorch_model_I.bin, I from 1 */
    TRAIN_LORA,           /* pytorch_lora_weights.safetensors, .bin of diffusers */
    TRAIN_OPTIM_DCP,      /* optimizer_I/ */
    TRAIN_OPTIM_FILE,     /* optimizer.pt, optimizer[_I].bin */
    TRAIN_OPTIM_RANK,     /* optimizer[_I]_rankR.bin */
    TRAIN_RNG,            /* rng_state[_R].pth, random_states_R.pkl */
    TRAIN_STATE,     /* other torch.save files: scheduler, scaler, sampler, custom */
    TRAIN_ARGS,      /* training_args.bin */
    TRAIN_JSON,      /* trainer_state.json */
    TRAIN_DEEPSPEED, /* global_stepN/, pytorch_model[_I]/ */
    TRAIN_KINDS
};

struct train_part {
    enum train_kind kind;
    uint64_t index;   /* I: which model, optimizer, ..., N of DeepSpeed */
    uint64_t rank;    /* R */
    bool safetensors; /* by its suffix */
};

/* By name and kind of entry alone. */
bool train_part_of(const struct listing_entry *entry, struct train_part *out);

#endif
