/* SPDX-License-Identifier: MIT */
/* index/formats/step.h - the training step that a directory's name tells. */
#ifndef UFS_INDEX_FORMATS_STEP_H
#define UFS_INDEX_FORMATS_STEP_H

#include "base/base.h"

/*
 * "iter_0000100", "global_step100", "step-100", "checkpoint-100", "epoch_1_step_100": 100.
 * false: the name ends in no number, or in one that is no step.
 */
bool step_of_name(const char *name, int64_t *step);

#endif
