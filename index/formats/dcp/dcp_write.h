/* SPDX-License-Identifier: MIT */
/* index/formats/dcp/dcp_write.h - what the writer of DCP knows while it lays files out. */
#ifndef UFS_INDEX_FORMATS_DCP_DCP_WRITE_H
#define UFS_INDEX_FORMATS_DCP_DCP_WRITE_H

#include "base/base.h"
#include "index/formats/dcp/dcp_cut.h"
#include "index/formats/format.h"
#include "index/layout.h"

struct dcp_paths;

/* Where an item lies in its file. */
struct dcp_placed {
    uint64_t at, len;
};

/* How a DCP directory is written. All zero: it is the whole checkpoint. */
struct torch_objects;
struct dcp_write_how {
    const char *dir; /* of the checkpoint; NULL: itself */
    /* The same tensors by the names that the user knows; NULL: the input's own. */
    const struct layout_tensor *known;
    /* Tensors of the input that stand elsewhere; NULL: none. */
    const bool *skip;
    /* Optional, as dcp_how.role_of: what its reader takes a key for, or -1. */
    int (*role_of)(const char *key, size_t len);
    /*
     * Where objects may have tensors: those of the input that are written, each in a list
     * of one (Megatron Core). NULL: objects are plain values.
     */
    const struct torch_objects *objects;
    bool no_paths; /* keys are no paths of a nested state dict: planner_data is None */
};

struct dcp_writing {
    const struct layout_input *in;
    const struct dcp_write_how *how;
    struct layout *out;
    struct dcp_cut cut;
    const size_t *object; /* of the input: those that can be written */
    size_t objects;
    struct dcp_placed *placed; /* boxes of all tensors, then objects, in order */
    struct dcp_paths *paths;
};

/* "__3_0.distcp": a file per rank and group of tensors. */
void dcp_file_name(uint32_t rank, uint32_t number, char dst[32]);

/* The path of a key in the nested state dict that planner_data tells: a tuple of parts. */
struct pickler;
int dcp_paths_new(const struct dcp_writing *w, struct dcp_paths **out, struct err *e);
void dcp_paths_free(struct dcp_paths *p); /* NULL is fine */
void dcp_path_tensor(const struct dcp_writing *w, const struct layout_tensor *t,
                     struct pickler *p);
void dcp_path_object(const struct dcp_writing *w, const struct layout_object *o,
                     struct pickler *p);

/* The file .metadata, of stage 1. */
int dcp_write_metadata(const struct dcp_writing *w, struct err *e);

/* Lays out a DCP directory; what it cannot hold of what is not skipped is a loss. */
int dcp_write(const struct layout_input *in, const struct layout_options *o,
              const struct dcp_write_how *how, struct layout *out, struct err *e);

/* "NAME" or "DIR/NAME" */
void dcp_path(const struct dcp_writing *w, const char *name, char *dst, size_t size);

extern const struct format_writer writer_dcp;

#endif
