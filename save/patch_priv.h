/* SPDX-License-Identifier: MIT */
/* save/patch_priv.h - what the parts of a patch know of it. */
#ifndef UFS_SAVE_PATCH_PRIV_H
#define UFS_SAVE_PATCH_PRIV_H

#include <sys/stat.h>

#include "index/catalog.h"
#include "index/plan.h"
#include "save/patch.h"

struct arena;
struct source;

/* A file of which a changed copy is made. */
struct patch_file {
    uint32_t number;  /* in the index */
    const char *path; /* in the checkpoint */
    struct file_id id;
    struct stat st;     /* whose, and with which rights */
    struct source *src; /* as it is */
    int fd;             /* the copy; -1: not made yet */
};

/* Bytes of a file in which a changed tensor lies, and of the item that they are in. */
struct patch_range {
    uint32_t file;           /* of patch.file */
    uint32_t ord;            /* the tensor */
    uint64_t from, to;       /* of the file */
    uint64_t reach;          /* the farthest `to` of it and those before in the file */
    uint64_t item, item_len; /* what its codec opens; 0, 0: the file */
    bool whole;              /* every byte of it is written */
};

/* A changed tensor. */
struct patch_tensor {
    struct patch_change change;
    bool differs;
    uint64_t bytes;
    struct patch_piece {
        struct plan_op op;
        uint32_t file;         /* of patch.file */
        uint64_t first, after; /* bytes of the tensor that it has, and others between */
    } * piece;
    size_t pieces;
};

struct patch {
    struct patch_spec spec;
    struct arena *arena;
    const char *dir; /* of the checkpoint, in the store */
    struct patch_file *file;
    size_t files, files_cap;
    struct patch_tensor *tensor;
    size_t tensors;
    struct patch_range *range; /* by file and place */
    size_t ranges, ranges_cap;
    int out; /* the directory that is written to */
};

/* All of these bytes to this place of the copy. */
int patch_write_at(const struct patch_file *f, const void *data, uint64_t len,
                   uint64_t at, struct err *e);

/* The checksums that the file has of the changed bytes, in its copy, which is whole. */
int patch_sum_zip(const struct patch *p, uint32_t file, struct err *e);

/* The files that hold digests of changed ones: written to where those were. */
int patch_sum_digests(const struct patch *p, struct err *e);

#endif
