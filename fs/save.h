/* SPDX-License-Identifier: MIT */
/* fs/save.h - publication: a stage becomes a checkpoint of the source, in one step. */
#ifndef UFS_FS_SAVE_H
#define UFS_FS_SAVE_H

#include <sys/stat.h>

#include "fs/fs.h"
#include "fs/stage.h"
#include "index/layout.h"

struct format_writer;

/*
 * Setting this attribute on the mount's root publishes all that is staged, and fails
 * where something cannot be: what `unshard umount` does first. Getting it tells why.
 */
#define SAVE_ATTRIBUTE "user.unshard.publish"
/* While tensors are written: "DONE TOTAL", in bytes of the checkpoint that is being made. */
#define SAVING_ATTRIBUTE "user.unshard.publishing"

/* save=FORMAT[:ranks=N][:mesh=AxB][:max_shard_size=S][:drop=optimizer+other+objects] */
struct save_format {
    const struct format_writer *writer;
    struct layout_options options;
    bool drop_roles[3], drop_objects;
};

/* NULL: the default. -EINVAL with words. */
int save_format_parse(const char *text, struct save_format *out, struct err *e);

/*
 * A model's safetensors files of up to so many bytes each stand in a new checkpoint as they
 * came; 0: none do.
 */
uint64_t save_format_keeps(const struct save_format *f);

/* Can the tensors of a checkpoint of this format be given other bytes? */
bool save_format_changes(const char *format);

/* The writer that keeps a checkpoint of this format what it is, or NULL. */
const struct format_writer *save_format_of(const char *format);

/*
 * Publishes the stage and ends it. With the lock of stages, which is let go meanwhile.
 * -EBUSY: a file of it is open for writing; -EINVAL: something is not whole; -ENOSPC, ...:
 * then nothing has changed in the source, and the stage stays.
 */
int save_publish(struct fs *fs, struct stage *s, struct err *e);

/*
 * What was made in the staging directory takes the place of the target in one step: of the
 * directory that is there, or of nothing.
 */
int save_put_in_place(struct fs *fs, struct stage *s, struct err *e);

/* Is it that file, and are its bytes as old? (Links that are made of it move its ctime.) */
bool save_is_same(const struct file_id *id, const struct stat *st);

/* A directory of the source is another one by now, or gone; slot: what it was, or NULL. */
void save_tell(struct fs *fs, const char *path, struct slot *slot);

/* With the lock: does anybody write what is to be published? */
bool save_is_written(const struct stage *s);

/*
 * close(2) comes back before its release is sent. While requests are served: waits until no
 * file is open for writing that would not be saved otherwise, a moment at most.
 */
void save_await_closed(struct fs *fs);

/* All stages; the first error, after all were tried. */
int save_all(struct fs *fs, struct err *e);

/* The thread that publishes what was not touched for a while. */
int saver_new(struct fs *fs, struct saver **out, struct err *e);
void saver_free(struct saver *s); /* NULL is fine */

#endif
