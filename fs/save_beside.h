/* SPDX-License-Identifier: MIT */
/* fs/save_beside.h - views that came along with the files that hold the same tensors. */
#ifndef UFS_FS_SAVE_BESIDE_H
#define UFS_FS_SAVE_BESIDE_H

#include "fs/stage.h"

struct err;
struct save_files;

/*
 * A copy of a checkpoint out of a mount (cp -r) brings each tensor several times, and that of a
 * Trainer's step also the files that have its optimizer, schedulers and random states. Where all
 * that came in views (tensors/, optimizer/, ...) stands in the other files with the same bytes,
 * these are what its framework would have saved there: the views are taken off the list, and
 * what is left is saved as any. Else nothing is done. Negative errno: it could not be told.
 */
int save_beside(const struct stage *s, struct save_files *f, struct err *e);

#endif
