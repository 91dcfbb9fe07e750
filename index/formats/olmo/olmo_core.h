/* SPDX-License-Identifier: MIT */
/* index/formats/olmo/olmo_core.h - what the reader and the writer of stepN/ share. */
#ifndef UFS_INDEX_FORMATS_OLMO_CORE_H
#define UFS_INDEX_FORMATS_OLMO_CORE_H

#include "index/formats/format.h"

/* enum role of a tensor of model_and_optim/, by its key. */
int olmo_core_role(const char *key, size_t len);

extern const struct format_writer writer_olmo_step;

#endif
