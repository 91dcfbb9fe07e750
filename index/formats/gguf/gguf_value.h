/* SPDX-License-Identifier: MIT */
/* index/formats/gguf/gguf_value.h - one value of a GGUF file's metadata as JSON. */
#ifndef UFS_INDEX_FORMATS_GGUF_VALUE_H
#define UFS_INDEX_FORMATS_GGUF_VALUE_H

#include "base/buf.h"

struct err;
struct gguf_input;

/* The types of values, as the file counts them. */
enum gguf_kind {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
    GGUF_KINDS
};

struct gguf_value {
    struct buf json; /* of the last value */
    struct buf text; /* scratch */
    uint64_t odd_bools;
    /* Of the last value, when it is such a one (not in an array). */
    bool is_number, is_text;
    uint64_t number; /* of an integer that is not negative */
};

void gguf_value_release(struct gguf_value *v);

/* Reads the value of type `kind` at the place: of a text `v->text` keeps the bytes. */
int gguf_value_read(struct gguf_input *in, uint64_t kind, struct gguf_value *v,
                    struct err *e);

#endif
