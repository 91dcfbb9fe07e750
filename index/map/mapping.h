/* SPDX-License-Identifier: MIT */
/* index/map/mapping.h - the map that a mount or a command works with, and its config. */
#ifndef UFS_INDEX_MAP_MAPPING_H
#define UFS_INDEX_MAP_MAPPING_H

#include <limits.h>

#include "base/base.h"
#include "base/buf.h"
#include "index/dtype.h"
#include "index/sink.h"

struct err;
struct mapping;

/* What a user asks for; all optional. */
struct mapping_choice {
    const char *map; /* a shipped map's name, or the path of a file */
    const char *hf;  /* a directory whose config.json gives "config.NAME" */
    /* of floating-point tensors of role model; DTYPE_NONE: as they are */
    enum dtype dtype;
    bool module_weights; /* DeepSpeed: the 16-bit copy is the model, not the master */
};

/*
 * The directory that hf= means: itself, or of a models--ORG--NAME of Hugging Face's cache the
 * snapshot that refs/main names, else the only one. -ENOENT: it has no snapshot, -EINVAL: which
 * of several is not told.
 */
int mapping_hf_dir(const char *dir, char out[PATH_MAX], struct err *e);

/* The type of a cast by its name, in either case ("bf16"); false: none that we cast to. */
bool mapping_dtype(const char *name, enum dtype *out);

/*
 * Reads and checks what was asked for; *out is NULL when that is nothing. -ENOENT for a map
 * that is neither shipped nor a file (the hint names those that are shipped), -EINVAL for
 * what is wrong in it.
 */
int mapping_open(const struct mapping_choice *choice, struct mapping **out,
                 struct err *e);
void mapping_free(struct mapping *m); /* NULL is fine */

/*
 * The identity of a source's index under this mapping: another map or config gives
 * another index. `m` NULL: the source's own.
 */
int mapping_identity(const struct mapping *m, const char *source, struct buf *out,
                     struct err *e);

/* Does a scan have to bring the checkpoint's own config.json? */
bool mapping_wants_config(const struct mapping *m);

/* A filter for one scan, freed by map_filter_free(). `config`: the checkpoint's, or NULL. */
int mapping_filter(const struct mapping *m, const char *config, size_t config_len,
                   struct sink_filter **out, struct err *e);

#endif
