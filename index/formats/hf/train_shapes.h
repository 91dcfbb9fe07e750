/* SPDX-License-Identifier: MIT */
/* index/formats/hf/train_shapes.h - a Hugging Face model against the shapes that FSDP's files tell. */
#ifndef UFS_INDEX_FORMATS_HF_TRAIN_SHAPES_H
#define UFS_INDEX_FORMATS_HF_TRAIN_SHAPES_H

#include "index/formats/hf/train_survey.h"

struct err;

/*
 * Compares the Hugging Face model that would be read with the model in FSDP's files beside it.
 * 1: a tensor of the same name has another shape there, so the Hugging Face model counts as not
 * whole (hf_choice_doubt), and the next survey finds another one. 0: none has; files that
 * cannot be read tell nothing. -ENOMEM.
 */
int train_shapes_compare(struct listing *l, const struct train_survey *s,
                         struct err *e);

#endif
