/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_tracker.h - which step Megatron Bridge notes as its latest. */
#ifndef UFS_INDEX_FORMATS_MEGATRON_TRACKER_H
#define UFS_INDEX_FORMATS_MEGATRON_TRACKER_H

#include "base/base.h"

struct store;

/*
 * The step that the latest_train_state.pt in directory `dir` names. False: there is none
 * that can be read.
 */
bool megatron_tracked_step(struct store *store, const char *dir, uint64_t *step);

#endif
