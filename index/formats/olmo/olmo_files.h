/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_files.h - whole tensors in safetensors or torch files, with a prefix. */
#ifndef UFS_INDEX_FORMATS_OLMO_FILES_H
#define UFS_INDEX_FORMATS_OLMO_FILES_H

#include <limits.h>

#include "base/base.h"

struct err;
struct listing;
struct scan_context;
struct sink;

/* The files of a folder that OLMo-core's unshard_checkpoint() writes into. */
enum olmo_set_kind {
    OLMO_SET_NONE,
    OLMO_SET_CHUNKS, /* chunk-00000.safetensors, ... */
    OLMO_SET_SINGLE, /* model-blocks-0-norm-weight.safetensors: one tensor a file */
};

struct olmo_set {
    enum olmo_set_kind kind;
    char suffix[16]; /* ".safetensors", ".pt" */
    char stem[8];    /* "model-": before the names of single ones */
};

/* What is in the folder, whose full keys begin with `root`: "model" or "optim". */
void olmo_set_find(struct listing *l, const char *root, struct olmo_set *out);

/* How files are shown. */
struct olmo_files_how {
    const char *dir;  /* relative to the checkpoint's directory; "": itself */
    const char *part; /* sink_tensor.part, or NULL */
    const char *root; /* before each key and object, with its dot: "model."; or "" */
    int role;
    bool encoded; /* keys as olmo_key.h */
};

struct olmo_files_told {
    uint64_t files;
    char metadata[PATH_MAX]; /* the first file, relative to the store; "": none */
};

/*
 * Reports all tensors of the set's files. A damaged one is told as a warning; where none is
 * good its error is returned.
 */
int olmo_set_report(const struct scan_context *c, struct sink *sink,
                    const struct olmo_files_how *how, const struct olmo_set *set,
                    struct olmo_files_told *told, struct err *e);

/* The same of one file of the folder: safetensors, or of torch.save. */
int olmo_file_report(const struct scan_context *c, struct sink *sink,
                     const struct olmo_files_how *how, const char *name,
                     struct olmo_files_told *told, struct err *e);

#endif
