/* SPDX-License-Identifier: MIT */
/* fs/save_upload.h - a stage of a mounted bucket goes up as a new checkpoint. */
#ifndef UFS_FS_SAVE_UPLOAD_H
#define UFS_FS_SAVE_UPLOAD_H

#include "fs/stage.h"

struct layout;
struct merge;
struct save_files;

/*
 * All of it appears at once: the object that completes it is the last one. When it fails
 * nothing of it stays in the bucket; the stage does.
 */
int save_upload(struct fs *fs, const struct stage *s, const struct save_files *f,
                struct merge *m, const struct layout *l, struct err *e);

/* A descriptor of a directory of this machine for the spools of this path's directory. */
int save_upload_spools(const struct fs *fs, const char *path, struct err *e);

/* -EROFS in words: what an object store cannot do in one step. */
int save_upload_refuse(const struct fs *fs, const char *path, struct err *e);

#endif
