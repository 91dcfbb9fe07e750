/* SPDX-License-Identifier: MIT */
/* index/formats/object_json_priv.h - bytes and NumPy values, as pickles spell them. */
#ifndef UFS_INDEX_FORMATS_OBJECT_JSON_PRIV_H
#define UFS_INDEX_FORMATS_OBJECT_JSON_PRIV_H

#include "base/base.h"
#include "index/formats/pickle/pickle.h"

/* Bytes of a graph; `own` is set (and to be freed) where they had to be decoded. */
struct object_bytes {
    const char *data;
    size_t len;
    char *own;
};

void object_bytes_release(struct object_bytes *b);

/* The functions below that give an int: 1 it is one, 0 it is none, or -ENOMEM. */

/*
 * Bytes, a bytearray, or one of the calls by which older protocols spell them:
 * _codecs.encode(text, 'latin1'), bytes(), bytearray(text, 'latin-1').
 */
int object_bytes(const struct pv *v, struct object_bytes *out);

/* An element type of NumPy without fields or metadata. */
struct object_dtype {
    char descr[16]; /* "<f4" */
    char kind;      /* b i u f c V S U */
    bool big;
    uint32_t size; /* bytes of an element */
};

/* numpy.dtype('f4', False, True) with its state. */
bool object_dtype(const struct pv *v, struct object_dtype *out);

/* A scalar of NumPy as the number it is. */
struct object_number {
    enum { OBJECT_BOOL, OBJECT_INT, OBJECT_UINT, OBJECT_FLOAT } kind;
    union {
        bool b;
        int64_t i;
        uint64_t u;
        double f;
    };
};

/* numpy.core.multiarray.scalar(dtype, bytes), for booleans, integers and floats. */
int object_number(const struct pv *v, struct object_number *out);

struct object_array {
    struct object_dtype dtype;
    struct pv shape; /* tuple of integers >= 0 */
    bool fortran;    /* column-major */
    struct object_bytes data;
};

/* _reconstruct() with its state, or _frombuffer(): size and shape agree. */
int object_array(const struct pv *v, struct object_array *out);

#endif
