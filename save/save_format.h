/* SPDX-License-Identifier: MIT */
/* save/save_format.h - the format in which a mount saves: the value of save=. */
#ifndef UFS_SAVE_SAVE_FORMAT_H
#define UFS_SAVE_SAVE_FORMAT_H

#include "index/catalog.h"
#include "index/layout.h"

struct err;
struct format_writer;

/* FORMAT[:ranks=N][:mesh=AxB][:max_shard_size=S][:drop=optimizer+other+objects] */
struct save_format {
    const struct format_writer *writer;
    struct layout_options options;
    bool drop_roles[3], drop_objects;
};

/* Returns -EINVAL, with words. */
int save_format_parse(const char *text, struct save_format *out, struct err *e);

/* Can the tensors of a checkpoint of this format be given other bytes? */
bool save_format_changes(const char *format);

/* The writer that keeps a checkpoint of this format what it is, or NULL. */
const struct format_writer *save_format_of(const char *format);

/*
 * How a checkpoint that is there is written again: in its own format, with shards about as
 * large as they are. *out has no writer where only bytes of its tensors can change.
 */
int save_format_own(struct catalog *catalog, const struct checkpoint_info *info,
                    struct save_format *out, struct err *e);

#endif
