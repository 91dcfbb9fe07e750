/* SPDX-License-Identifier: MIT */
/* save/merge.h - files that came in and the checkpoint that is there, as one that is to be written. */
#ifndef UFS_SAVE_MERGE_H
#define UFS_SAVE_MERGE_H

#include "gpu/reader.h"
#include "index/layout.h"
#include "save/incoming.h"
#include "save/patch.h"
#include "save/write.h"

struct err;
struct intake_file;
struct merge;

/* A file as it came in. Borrowed for as long as the merge. */
struct merge_file {
    const char *path;           /* relative to the checkpoint, as it was written */
    const char *spool;          /* its name in the spool directory */
    const char *dtype;          /* user.unshard.dtype that was set on it, or NULL */
    struct intake_file *intake; /* it is received there; NULL: it is in the spool */
};

struct merge_spec {
    int spool; /* a descriptor of the spool directory */
    const struct merge_file
        *file; /* what was closed later is further behind, and wins */
    size_t files;
    const struct reader_env *env;
    int64_t checkpoint; /* that is there, or 0 */
    /*
     * NULL, or what the checkpoint was written with out of files that belong to these: then it
     * becomes what it would be if all had come together. Tensors of `sets` keep their cuts, as
     * each set is laid out by itself.
     */
    const struct format_writer *made_by;
    bool sets[3];               /* by role */
    const char *const *removed; /* names in tensors/; files of the spec stay */
    size_t removals;
    bool drop_roles[3], drop_objects;
    bool partial; /* other files of a set may be missing: nothing is written of it */
};

/*
 * Every tensor by its full key once: of the files, else of the checkpoint. A whole role
 * replaces that role, other files merge (CONTRACT.md, "Saving"); names of the view are
 * taken back to the keys that they show. -EINVAL with words when a file is not whole, a
 * set is not complete or a key cannot be told.
 */
int merge_new(const struct merge_spec *spec, struct merge **out, struct err *e);
void merge_free(struct merge *m); /* NULL is fine */
void merge_freep(struct merge **m);

/* Does it differ from the checkpoint that is there? If not, only side files came. */
bool merge_changes(const struct merge *m);

/* File number `file` is an index: has every tensor that it lists arrived? -EINVAL: not. */
int merge_check_keys(struct merge *m, size_t file, struct err *e);

/*
 * Is there nothing but other bytes for tensors that keep their dtype and shape? Then the
 * list of them (malloc, the caller's; numbers are those of merge_incoming()), else NULL;
 * -ENOMEM.
 */
int merge_patch(const struct merge *m, struct patch_change **out, size_t *count,
                struct err *e);
struct save_source merge_incoming(struct merge *m);

/*
 * Settles what is to be written anew, which the following give. -EBADMSG: a tensor that
 * would stay cannot be read; -EINVAL: none would be left.
 */
int merge_settle(struct merge *m, struct err *e);
const struct layout_input *merge_input(const struct merge *m);

/* The file of the spec that has this tensor of the input, and where; false: none has. */
bool merge_origin(const struct merge *m, size_t tensor, size_t *file, uint64_t *at);
const struct merge_spec *merge_spec_of(const struct merge *m);
struct save_source merge_source(struct merge *m);

#endif
