/* SPDX-License-Identifier: MIT */
/* index/formats/ranks/rank_files.h - the torch.save files of a checkpoint's ranks, loaded. */
#ifndef UFS_INDEX_FORMATS_RANKS_RANK_FILES_H
#define UFS_INDEX_FORMATS_RANKS_RANK_FILES_H

#include "base/err.h"
#include "index/formats/ranks/rank_merge.h"
#include "index/formats/ranks/rank_tensors.h"
#include "index/formats/torch/torch_file.h"

struct scan_context;
struct sink;

/* One rank's file. `file.path` is the caller's to set, and outlives it. */
struct rank_file {
    struct torch_file file;
    struct rank_tensors tensors; /* the caller's to collect */
    struct err err;              /* code 0: it was loaded; ENOENT: it is missing */
};

/* `n` empty ones, or NULL. */
struct rank_file *rank_files_new(size_t n);
void rank_files_free(struct rank_file *f, size_t n);

/*
 * Registers all files and loads them, several at once. `fn` is called for each that could
 * be loaded, in order and on the calling thread, while its graph is open; what it says of
 * the file's content (-EBADMSG, -ENOTSUP) becomes the file's err. What is wrong with one
 * file is told as a warning; the error of a scan that cannot go on is returned.
 */
typedef int rank_file_fn(void *user, size_t i, struct rank_file *f, struct err *e);
int rank_files_load(const struct scan_context *c, struct sink *sink,
                    struct rank_file *f, size_t n, rank_file_fn *fn, void *user,
                    struct err *e);

/* The first file whose tensors could be collected, or NULL: then *why is the first err. */
const struct rank_file *rank_files_first(const struct rank_file *f, size_t n,
                                         struct err *why);

/* What that file has under a name. */
struct rank_part rank_file_part(const struct rank_file *f, const char *name,
                                size_t len);

/* Has none of the n files before this one a tensor of that name? */
bool rank_files_lack(const struct rank_file *f, size_t n, const struct rank_tensor *x);

/*
 * Everything of a loaded state dict that is no tensor, as objects "FILE:ENTRY". `skip`: as in
 * torch_report, or NULL.
 */
int rank_file_objects(struct sink *sink, const struct rank_file *f,
                      const char *const *skip, struct err *e);

/* A rank's piece of a tensor whose cut is not known: "FILE:NAME", role other. */
int rank_file_raw(struct sink *sink, const struct rank_file *f,
                  const struct rank_tensor *x, struct err *e);

#endif
