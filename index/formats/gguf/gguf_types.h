/* SPDX-License-Identifier: MIT */
/* index/formats/gguf/gguf_types.h - the element types of ggml: names and sizes. */
#ifndef UFS_INDEX_FORMATS_GGUF_TYPES_H
#define UFS_INDEX_FORMATS_GGUF_TYPES_H

#include "base/base.h"
#include "index/dtype.h"

/*
 * A type packs `elements` along the innermost dimension into `bytes`. Plain types have
 * one element a block and a dtype; quantised ones DTYPE_NONE.
 */
struct gguf_type {
    const char *name;
    enum dtype dtype;
    uint16_t elements, bytes;
};

/* NULL when the number is not known, was taken back by ggml, or is never in files. */
const struct gguf_type *gguf_type_of(uint32_t number);

/* Why not, in words: "type 4 (Q4_2), which ggml took back". */
const char *gguf_type_why(uint32_t number, char *dst, size_t size);

#endif
