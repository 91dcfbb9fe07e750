/* SPDX-License-Identifier: MIT */
/* save/input.h - a checkpoint of the index as what is to be written. */
#ifndef UFS_SAVE_INPUT_H
#define UFS_SAVE_INPUT_H

#include "gpu/reader.h"
#include "index/layout.h"
#include "save/write.h"

struct arena;
struct err;
struct save_input;

/* What of a checkpoint is taken along. */
struct save_choice {
    const char *only;   /* a pattern of keys as fnmatch(3) has them, or NULL */
    bool drop_roles[3]; /* by enum role */
    bool drop_objects;
    bool leave_faults; /* tensors that cannot be read are left out */
    /* Which of what is left: NULL, all. With it, nothing may be left. */
    bool (*wanted)(void *user, const struct tensor_info *t);
    void *user;
};

/*
 * Tensors in byte order of their keys. -EBADMSG: a tensor that would be taken along cannot
 * be read; -ENOENT: nothing is left to be written.
 */
int save_input_new(const struct reader_env *env, int64_t checkpoint,
                   const struct save_choice *choice, struct save_input **out,
                   struct err *e);
void save_input_free(struct save_input *in); /* NULL is fine */

const struct layout_input *save_input_of(const struct save_input *in);
/* The number in the index of its i-th tensor. */
uint32_t save_input_ord(const struct save_input *in, size_t i);

/* Its tensors' bytes. */
struct save_source save_input_source(struct save_input *in);

/*
 * What tells this source from any other, for a journal: format, and path, size and time of
 * every file. The same on all machines that see the same files.
 */
int save_input_identity(const struct save_input *in, struct buf *out, struct err *e);

/* Sets t->own to its name without what wrappers of modules left in it. -ENOMEM. */
int save_name_own(struct arena *a, struct layout_tensor *t);

#endif
