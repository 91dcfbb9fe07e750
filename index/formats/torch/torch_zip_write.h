/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_zip_write.h - what torch.save writes, as parts of a layout. */
#ifndef UFS_INDEX_FORMATS_TORCH_TORCH_ZIP_WRITE_H
#define UFS_INDEX_FORMATS_TORCH_TORCH_ZIP_WRITE_H

#include "base/base.h"
#include "index/dtype.h"
#include "index/formats/pickle/pickle_write.h"
#include "index/formats/torch/zip_write.h"
#include "index/shape.h"

struct err;
struct layout_file;
struct layout_input;

enum { TORCH_ALIGN = 64 }; /* of data in an archive (torch/serialization.py) */

/* "bfloat16": the type's name in torch, or NULL where torch has none (F6). */
const char *torch_name_of_dtype(enum dtype d);

/*
 * The shape as torch counts it: F4 is a type of pairs. False: torch has no such tensor (a
 * type it does not have, pairs that cross rows, numbers past 2^63).
 */
bool torch_shape(enum dtype d, const struct shape *s, struct shape *out);

/*
 * Pushes a contiguous tensor (torch/_utils.py, _rebuild_tensor_v2; v3 for types without an
 * old storage class) of this shape as torch counts it, whose bytes are the archive's
 * member data/KEY.
 */
void torch_pickle_tensor(struct pickler *p, enum dtype d, const struct shape *shape,
                         const char *key);

/* Members behind data.pkl that say how to read it; `full`: all that torch 2.15 writes. */
int torch_zip_marks(struct zip_write *z, bool full, struct err *e);
int torch_zip_version(struct zip_write *z, struct err *e);

/*
 * torch.save(tensor) of one box of a tensor of the input (units, whose sizes are torch's),
 * as an item of a DCP file. *len: bytes of the archive.
 */
int torch_zip_item(struct zip_write *z, struct layout_file *f,
                   const struct layout_input *in, size_t tensor, const uint64_t *start,
                   const uint64_t *size, uint64_t *len, struct err *e);

/* torch.save(object): `pickle` is data.pkl. */
int torch_zip_object(struct zip_write *z, struct layout_file *f,
                     const struct buf *pickle, uint64_t *len, struct err *e);

#endif
