/* SPDX-License-Identifier: MIT */
/* fs/amend.h - what is remembered of a directory follows single names that change. */
#ifndef UFS_FS_AMEND_H
#define UFS_FS_AMEND_H

struct fs;

/*
 * A name of the directory `dir` in the store came, went or became another file through this
 * mount: from now on it is shown as the source has it. In a large directory only this name is
 * looked at, where that is not a name that may make the directory, or the file, another kind
 * of thing; else, and where that cannot be told, all of the directory is, at its next use.
 */
void amend_name(struct fs *fs, const char *dir, const char *name);

/* The same of the directory that holds `path`, and of that name in it. */
void amend_path(struct fs *fs, const char *path);

#endif
