/* SPDX-License-Identifier: MIT */
/* index/formats/step.h - a step, and a save that goes on, by a directory's name. */
#ifndef UFS_INDEX_FORMATS_STEP_H
#define UFS_INDEX_FORMATS_STEP_H

#include "base/base.h"

struct listing;

/*
 * "iter_0000100", "global_step100", "step-100", "checkpoint-100", "epoch_1_step_100",
 * "epoch0epochstep99globalstep100": 100.
 * false: the name ends in no number, or in one that is no step.
 */
bool step_of_name(const char *name, int64_t *step);

/*
 * Is the directory, or one above it, called as one that Orbax renames when a save is done,
 * "30.orbax-checkpoint-tmp-5"? (orbax-checkpoint 0.5.20 to 0.12.8, _src/path/atomicity.py)
 * Or is it one that torch_checkpointing renames then, "tmp_NAME" with a metadata.pkl? (0.1.1,
 * checkpoint_writer.py) Or is it where a save of ours is made (save/staging.h)?
 */
bool step_is_temporary(const struct listing *l);

/* The last of these alone: `unshard doctor` tells of it. */
bool step_is_ours(const struct listing *l);

#endif
