/* SPDX-License-Identifier: MIT */
/* index/formats/megatron/megatron_write.h - what the writers of both backends share. */
#ifndef UFS_INDEX_FORMATS_MEGATRON_WRITE_H
#define UFS_INDEX_FORMATS_MEGATRON_WRITE_H

#include "index/formats/format.h"
#include "index/formats/torch/torch_object_write.h"
#include "index/layout.h"

struct mega_writing {
    struct layout_input in; /* tensors as the source's, under Megatron's keys */
    struct layout *out;
    struct torch_objects objects; /* taken: tensors that stand in them */
    struct layout_object *cell;   /* sharded objects that can be rebuilt */
    size_t cells;
};

/*
 * The model's tensors get their own names, all else stays as it is called. The common
 * state is written as common.pt (where the source has none it is empty, or tells the
 * iteration), Bridge's train_state.pt beside it; sharded objects are left in w->cell;
 * every other object is told as lost.
 */
int mega_write_begin(const struct layout_input *in, struct layout *out,
                     struct mega_writing *w, struct err *e);

/* metadata.json, the last file. */
int mega_write_end(struct mega_writing *w, const char *backend, struct err *e);

extern const struct format_writer writer_torch_dist, writer_zarr;

#endif
