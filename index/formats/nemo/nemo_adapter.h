/* SPDX-License-Identifier: MIT */
/* index/formats/nemo/nemo_adapter.h - has an adapter all layers that were trained? */
#ifndef UFS_INDEX_FORMATS_NEMO_ADAPTER_H
#define UFS_INDEX_FORMATS_NEMO_ADAPTER_H

struct err;
struct optim_sizes;
struct scan_context;
struct sink;

/*
 * Warns where the optimizer has states of layers of which the adapter at `path` has
 * nothing. What cannot be read is another's to tell.
 */
int nemo_adapter_check(const struct scan_context *c, struct sink *sink,
                       const char *path, const struct optim_sizes *known,
                       struct err *e);

#endif
