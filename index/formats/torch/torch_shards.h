/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_shards.h - a model in several torch.save files. */
#ifndef UFS_INDEX_FORMATS_TORCH_SHARDS_H
#define UFS_INDEX_FORMATS_TORCH_SHARDS_H

#include "base/base.h"

struct err;
struct scan_context;
struct sink;
struct torch_layout;

/*
 * Reports an indexed or numbered set. Of an indexed file only the tensors that the index
 * puts there count, as for its loaders; what the index names and no file holds is listed
 * with a fault. *files: how many there should be.
 */
int torch_shards_scan(const struct scan_context *c, struct sink *sink,
                      const struct torch_layout *layout, size_t *files, struct err *e);

/*
 * The same for a set of files, relative to the checkpoint's directory, that hold one model
 * together and have no index: a key that two of them have is listed with a fault.
 */
int torch_shards_scan_set(const struct scan_context *c, struct sink *sink,
                          const char *const *names, size_t n, struct err *e);

#endif
