/* SPDX-License-Identifier: MIT */
/* fs/overlay.h - files laid over every checkpoint: config and tokenizer (hf=DIR). */
#ifndef UFS_FS_OVERLAY_H
#define UFS_FS_OVERLAY_H

#include "base/base.h"
#include "remote/store.h"

struct err;
struct overlay;
struct side;

/*
 * What stands in the directory now: its regular files, without weights and their indexes,
 * which are the checkpoint's to give. Links lead anywhere: the user has named it, and in a
 * Hugging Face cache all are links. -ENOTDIR, -ENOENT.
 */
int overlay_open(const char *dir, struct overlay **out, struct err *e);
void overlay_free(struct overlay *o); /* NULL is fine */

/* In byte order of the names. */
struct overlay_file {
    const char *name;
    struct entry_stat st;
};
size_t overlay_count(const struct overlay *o); /* NULL: 0 */
const struct overlay_file *overlay_at(const struct overlay *o, size_t i);

/* Where the files are, under their names. */
struct store *overlay_store(const struct overlay *o);

/* -ESTALE: another file has the name by now. */
int overlay_open_file(const struct overlay *o, size_t i, struct side **out,
                      struct err *e);

#endif
