/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_dir.h - whole safetensors files of a directory, as a part. */
#ifndef UFS_INDEX_FORMATS_SAFETENSORS_DIR_H
#define UFS_INDEX_FORMATS_SAFETENSORS_DIR_H

#include <limits.h>

#include "base/base.h"
#include "index/sink.h"

struct err;
struct scan_context;

/* How they are shown. */
struct safetensors_how {
    const char *dir;  /* relative to the checkpoint's directory, "": itself */
    const char *name; /* the only file that counts; NULL: all *.safetensors */
    const char *part; /* sink_tensor.part of all tensors, or NULL */
    int role;         /* enum role of all tensors, or -1: by part and key */
    bool shown;       /* the files stay visible as they are */
};

struct safetensors_told {
    uint64_t files;
    char metadata[PATH_MAX]; /* the first file, relative to the store; "": none */
};

/*
 * Reports all tensors of the files, each whole in one of them, and hides the files and
 * their index. Tensors that the index names and no file has are listed with a fault. A
 * file that cannot be read is told; the error of the only one is returned, as -ENOTSUP
 * where files hold pieces of tensors.
 */
int safetensors_dir_report(const struct scan_context *c, struct sink *sink,
                           const struct safetensors_how *how,
                           struct safetensors_told *told, struct err *e);

#endif
