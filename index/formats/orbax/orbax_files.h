/* SPDX-License-Identifier: MIT */
/* index/formats/orbax/orbax_files.h - the storage files of a scan, by number, a few of them open. */
#ifndef UFS_INDEX_FORMATS_ORBAX_ORBAX_FILES_H
#define UFS_INDEX_FORMATS_ORBAX_ORBAX_FILES_H

#include "base/base.h"

struct err;
struct scan_context;
struct sink;
struct source;

enum { ORBAX_OPEN_FILES = 32 };

/* `struct orbax_files f = {.c = ..., .sink = ..., .dir = ...};` has no files. */
struct orbax_files {
    const struct scan_context *c;
    struct sink *sink;
    const char
        *dir;    /* that paths are relative to; itself to the checkpoint's; borrowed */
    char **path; /* by number, relative to the store; NULL: not ours */
    uint32_t paths;
    struct orbax_open {
        struct source *src;
        uint32_t number;
    } open[ORBAX_OPEN_FILES];
    char *last; /* the path that was added last, since most come many times in a row */
    size_t last_len;
    uint32_t last_number;
};

void orbax_files_release(struct orbax_files *f);

/* The number of sink_file(). The signature is that of struct ocdbt_io and zarr_read_fn. */
int orbax_files_add(void *files, const char *path, size_t len, uint32_t *number,
                    struct err *e);

/*
 * Reads from a file that was added; -ENOENT when it is missing, -ESTALE when it is not the
 * one that the sink has seen.
 */
int orbax_files_read(void *files, uint32_t number, uint64_t off, size_t len, void *dst,
                     struct err *e);

/* The file as a source, borrowed until another one is asked for. */
int orbax_files_source(struct orbax_files *f, uint32_t number, struct source **out,
                       struct err *e);

#endif
