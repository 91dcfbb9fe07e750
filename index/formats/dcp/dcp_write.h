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

struct dcp_writing {
    const struct layout_input *in;
    struct layout *out;
    struct dcp_cut cut;
    const size_t *object; /* of the input: those that can be written */
    size_t objects;
    struct dcp_placed *placed; /* boxes of all tensors, then objects, in order */
    struct dcp_paths *paths;
};

/* "__3_0.distcp" */
void dcp_file_name(uint32_t rank, char dst[32]);

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

extern const struct format_writer writer_dcp;

#endif
