/* SPDX-License-Identifier: MIT */
/* fs/save_priv.h - what the parts of a publication share. */
#ifndef UFS_FS_SAVE_PRIV_H
#define UFS_FS_SAVE_PRIV_H

#include "fs/save.h"
#include "fs/save_files.h"

struct layout;
struct merge;

struct publication {
    struct fs *fs;
    struct stage *stage;
    struct save_files files; /* that came, and names that are to go */
    struct save_format format;
    struct merge *merge;
    struct layout *layout;
    bool rewritten; /* all storage is new */
};

/* One that is there keeps its format; shards stay about as large as they are. */
int save_format_own(struct fs *fs, const struct slot *slot, struct save_format *out,
                    struct err *e);
/* -EINVAL with words: the format cannot hold all that was laid out. */
int save_format_losses(const struct layout *l, const struct format_writer *w,
                       struct err *e);

/* Makes in the staging directory what is to be in the source. */
int save_build(struct publication *p, struct err *e);
/* It comes to the source, in one step. */
int save_place(struct publication *p, struct err *e);

/* -EINVAL: another writer was there. */
int save_changed(const struct stage *s, struct err *e);

#endif
