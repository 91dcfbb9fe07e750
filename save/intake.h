/* SPDX-License-Identifier: MIT */
/* save/intake.h - safetensors files that are being received, put into staged shards as they arrive. */
#ifndef UFS_SAVE_INTAKE_H
#define UFS_SAVE_INTAKE_H

#include "base/base.h"
#include "index/layout.h"
#include "save/ranges.h"

struct err;
struct format_writer;
struct intake;
struct intake_file;
struct merge;
struct pool;
struct reader_env;
struct source;

/*
 * All safetensors files of one transaction (one target directory): the model's file or
 * numbered set, an adapter's, the optimizer's. Each incoming file has a directory of its own
 * below intake/ of the staging directory:
 *
 *   intake/NAME/plain      the header, and bytes that arrived before the header was known
 *   intake/NAME/data/PATH  storage files of the checkpoint, already in their final form
 *                          except for literal bytes and checksums
 *
 * When the header is whole, the format's writer lays out this file's tensors. From then on
 * each byte goes to its place in intake/NAME/data, and only there. That layout is a
 * prediction: it is made as if nothing else arrived. intake_finish() makes the layout of the whole checkpoint, keeps each staged
 * file that fits it exactly, and writes all other files from the tensors, wherever those
 * are. So a wrong prediction costs time and never a byte.
 *
 * All functions may be called from any thread, several at once, unless stated otherwise.
 * Errors of the user's data are -EINVAL with words.
 */
struct intake_spec {
    int dir;           /* descriptor of the staging directory; borrowed */
    struct pool *pool; /* may be NULL; borrowed */
    const struct format_writer *writer; /* NULL: files are kept as they arrive */
    struct layout_options options;
    bool drop_roles[3], drop_objects;
    /* What the target has already; 0: no checkpoint, and env may be NULL. Borrowed. */
    const struct reader_env *env;
    int64_t checkpoint;
    const struct format_writer *made_by; /* see struct merge_spec */
    bool sets[3];
};

/*
 * Takes up what is in intake/ of the staging directory, or begins with nothing. Headers that
 * are whole are laid out again; which bytes had arrived the caller tells by intake_restore().
 * Strings of the spec are copied.
 */
int intake_open(const struct intake_spec *spec, struct intake **out, struct err *e);

/* Closes; all that is staged stays on the disk. NULL is fine. */
void intake_free(struct intake *k);

/*
 * The incoming file of this view path ("model-00001-of-00002.safetensors",
 * "optimizer/optimizer.safetensors"), made if it is new. It belongs to the intake, until
 * intake_remove(). -EINVAL: a path that is not received in sets (incoming_is_whole()).
 */
int intake_get(struct intake *k, const char *path, struct intake_file **out,
               struct err *e);
struct intake_file *intake_find(struct intake *k, const char *path); /* NULL: none */

/* All of them, in the order of their names. Not while files are made or removed. */
size_t intake_count(const struct intake *k);
struct intake_file *intake_at(const struct intake *k, size_t i);
const char *intake_path(const struct intake_file *f);

/*
 * Drops the file with all that is staged of it. Nobody may use it then or afterwards.
 */
int intake_remove(struct intake_file *f, struct err *e);

/* ---- as a file: what its handles do ---- */

/*
 * All of it, or an error; then no byte of this range counts as arrived that had not before.
 * The write that completes the header answers for it: -EINVAL a bad header, a tensor that
 * the format cannot hold, bytes behind the end that the header announces (those also at
 * later writes); -ENOSPC no room for the tensors: the file can be continued.
 */
int intake_write(struct intake_file *f, const void *data, size_t len, uint64_t off,
                 struct err *e);

/*
 * What was written there; bytes that have not arrived are zeros. Returns the number of
 * bytes, less than len only at the end of the file.
 */
ssize_t intake_read(struct intake_file *f, void *dst, size_t len, uint64_t off,
                    struct err *e);

/* All of it or an error: -EIO where the file ends before. */
int intake_read_exact(struct intake_file *f, void *dst, size_t len, uint64_t off,
                      struct err *e);

uint64_t intake_size(const struct intake_file *f); /* as stat tells it */

/*
 * ftruncate(2). What lies behind a smaller size has not arrived any more; a size within the
 * header, or 0, makes it a new file. Does not confirm holes.
 */
int intake_truncate(struct intake_file *f, uint64_t size, struct err *e);

/* The program has confirmed its holes (ftruncate, fsync, msync): they have arrived as zeros. */
int intake_confirm(struct intake_file *f, struct err *e);

/* Everything that has arrived is durable when this returns. */
int intake_sync(struct intake_file *f, struct err *e);

/* ---- as a part of a transaction ---- */

/* Which bytes have arrived, for the journal. `out` is {0} or an older set. */
int intake_received(struct intake_file *f, struct ranges *out, struct err *e);

/*
 * After intake_open() of an existing staging directory: these bytes had arrived and are on
 * the disk, and the file had this size. Until this call nothing counts as arrived. The
 * header must be among them or the file starts again as an empty one (0 is returned).
 */
int intake_restore(struct intake_file *f, const struct ranges *received, uint64_t size,
                   struct err *e);

/*
 * The ranges that are missing. *total: the file's size as its header announces it, or 0 when
 * the header is not known yet (then what is missing of the header).
 */
int intake_missing(struct intake_file *f, struct ranges *out, uint64_t *total,
                   struct err *e);

/* Has all arrived that the header announces, and does the file end there? */
bool intake_complete(struct intake_file *f);

/*
 * Are its bytes in staged shards? Else they are in one file, as they arrived: the format of
 * the target has no writer, or not for all that the target has.
 */
bool intake_is_placed(struct intake_file *f);

/* The incoming file as a source of bytes (for save/merge). -EINVAL: no header is known. */
int intake_source(struct intake_file *f, struct source **out, struct err *e);

/* ---- the end ---- */

/* Storage files of the checkpoint, in the order in which they have to be published. */
struct intake_output {
    size_t count;
    struct intake_staged {
        const char *path; /* in data/ of the staging directory, and in the target */
        unsigned stage;   /* files of the highest stage complete the checkpoint */
        bool kept;        /* its bytes were written once: they arrived in this file */
    } * file;
    size_t directories; /* that the format needs even if they are empty */
    const char **directory;
    void *memory; /* of all of that */
};

/*
 * Makes the checkpoint that the merge describes, in data/ of the staging directory: incoming
 * files of this intake, other files that arrived, and what the target has. Staged files that
 * fit are completed and linked there, all others are written. Everything is durable when it
 * returns, and nothing of what was received is moved: it may be called again after a failure,
 * a crash, or with another merge. No file of the merge may be written meanwhile. Needs a
 * writer. -EINVAL: what the format cannot hold.
 *
 * merge_new() gets the incoming files by merge_file.intake, set instead of `spool`. The
 * merge is settled here.
 */
int intake_finish(struct intake *k, struct merge *m, struct intake_output *out,
                  struct err *e);
void intake_output_release(struct intake_output *out);

#endif
