/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_files.h - the safetensors files of a checkpoint and their headers. */
#ifndef UFS_INDEX_FORMATS_SAFETENSORS_FILES_H
#define UFS_INDEX_FORMATS_SAFETENSORS_FILES_H

#include "base/base.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "index/formats/hf/safetensors_header.h"

struct scan_context;
struct sink;

struct safetensors_file {
    const char *name;  /* relative to the checkpoint's directory; borrowed */
    const char *fault; /* why it is not even opened, or NULL */
    bool missing;
    bool shown; /* stays visible as it is */
    bool copy;  /* of tensors that lie elsewhere: hidden and watched, has no number */
    uint32_t number;
    struct file_id id; /* when it was registered */
    struct safetensors_header h;
    bool read;      /* h is good */
    struct err err; /* why it is not */
};

struct safetensors_files {
    struct safetensors_file *file; /* malloc */
    size_t count;
};

/* `count` empty ones; names are the caller's to set. */
int safetensors_files_new(struct safetensors_files *f, size_t count, struct err *e);
void safetensors_files_release(struct safetensors_files *f);

/*
 * Registers all with the sink and reads their headers, several at once. A file that is
 * missing is told as a warning; what is wrong with one file is kept in it. -EFBIG: the
 * headers of all together are too large; other errors stop the scan.
 */
int safetensors_files_read(const struct scan_context *c, struct sink *sink,
                           struct safetensors_files *f, struct err *e);

/* Damage of one file is told with its tensors; these stop the scan. */
bool safetensors_stops_scan(int code);

#endif
