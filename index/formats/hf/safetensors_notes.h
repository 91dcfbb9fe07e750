/* SPDX-License-Identifier: MIT */
/* index/formats/hf/safetensors_notes.h - __metadata__ of a model that lies in several files. */
#ifndef UFS_INDEX_FORMATS_SAFETENSORS_NOTES_H
#define UFS_INDEX_FORMATS_SAFETENSORS_NOTES_H

#include "base/buf.h"
#include "index/formats/hf/safetensors_files.h"

/*
 * Appends the object that one file of all their tensors would have: what the files that
 * tell it agree on, and "format": "pt" where none has a format. Not what torch's writer
 * says of pieces. Nothing is appended where there is nothing else than that format. 1: it
 * would be too long, and only the format is there.
 */
int safetensors_notes_join(const struct safetensors_files *f, struct buf *out,
                           struct err *e);

#endif
