/* SPDX-License-Identifier: MIT */
/* fs/save_whole.h - new directories whose files stay what they are. */
#ifndef UFS_FS_SAVE_WHOLE_H
#define UFS_FS_SAVE_WHOLE_H

#include "fs/stage.h"

struct err;
struct merge;
struct save_files;

/*
 * Is it a new directory, or a checkpoint of no tensors? That stands for a directory that was
 * made and waits for some: it is saved as a new one is.
 */
bool save_waits(const struct stage *s);

/* Is there one that only ever holds tensors of another format, or says where they are? */
bool save_whole_has_storage(const struct save_files *f);

/*
 * Is what came into a new directory to stay as it came, under the names that it has? So it
 * is where no tensors came that could be written in a format, and what came is a checkpoint
 * that a framework has written by itself, or a piece of one (.distcp, .pt); and where
 * safetensors files are shards of another format: as one model most of it would be lost.
 * Other safetensors files are merged, the last close of a tensor wins. All else gets a checkpoint
 * of no tensors, to which they may come later; that is a new directory, too. Negative errno.
 */
int save_whole(const struct stage *s, const struct save_files *f, const struct merge *m,
               bool remote, bool *out, struct err *e);

#endif
