/* SPDX-License-Identifier: MIT */
/* index/formats/torch/torch_holder.h - tensors of a class that only holds another tensor. */
#ifndef UFS_INDEX_FORMATS_TORCH_TORCH_HOLDER_H
#define UFS_INDEX_FORMATS_TORCH_TORCH_HOLDER_H

#include "index/formats/pickle/pickle.h"

/*
 * Of the arguments of _rebuild_from_type_v2 (function, type, arguments, state): is it one
 * whose elements are those of the one tensor that it holds? torchao puts such classes in
 * place of weights that are cast for each multiplication; the weight itself stays what it is.
 * `held`: the call that rebuilds that tensor; `outer`: the arguments with the type and size
 * that the holder has, (class, dtype, size, ...), which must be the tensor's own.
 */
bool torch_held(const struct pv *args, struct pv *held, struct pv *outer);

#endif
