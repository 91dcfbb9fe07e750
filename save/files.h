/* SPDX-License-Identifier: MIT */
/* save/files.h - which files of a layout a run writes, stage by stage. */
#ifndef UFS_SAVE_FILES_H
#define UFS_SAVE_FILES_H

#include "base/base.h"
#include "index/layout.h"
#include "save/write.h"

/*
 * Calls fn for each file of the stage that this run writes, in the layout's order: files
 * of stage 0 go to parts by the middle of their bytes. Stops at and returns what is not 0.
 */
typedef int save_file_fn(void *user, uint32_t i, const struct layout_file_info *f);
int save_each_file(const struct save_run *r, unsigned stage, save_file_fn *fn,
                   void *user);

unsigned save_last_stage(const struct layout *l);

#endif
