/* SPDX-License-Identifier: MIT */
/* index/formats/pickle/pickle_write.h - the few opcodes that writing checkpoints takes. */
#ifndef UFS_INDEX_FORMATS_PICKLE_WRITE_H
#define UFS_INDEX_FORMATS_PICKLE_WRITE_H

#include "base/base.h"
#include "base/buf.h"

/*
 * A pickle of protocol 2, as torch.save writes them (torch/serialization.py,
 * DEFAULT_PROTOCOL) and every Python 3 reads. Calls follow the stack machine: values are
 * pushed, and what takes values stands behind them. Errors stay in `out` (buf_failed);
 * `struct pickler p = {0}` is ready for pickle_begin().
 */
struct pickler {
    struct buf out;
    struct pickled_global {
        const char *module, *name; /* the caller's: literals */
    } global[64];
    unsigned globals; /* the first memo entries */
    uint32_t memos;   /* further ones: numbers from 64 on */
};

void pickle_begin(struct pickler *p);
void pickle_end(struct pickler *p); /* STOP */
void pickle_release(struct pickler *p);

void pickle_none(struct pickler *p);
void pickle_bool(struct pickler *p, bool v);
void pickle_int(struct pickler *p, int64_t v);
/* Two's complement, little-endian, at most 255 bytes; leading sign bytes are dropped. */
void pickle_long(struct pickler *p, const unsigned char *v, size_t len);
void pickle_double(struct pickler *p, double v);
/* As protocol 2 spells them: _codecs.encode(text, 'latin1'). */
void pickle_bytes(struct pickler *p, const void *data, size_t len);
/* UTF-8 text of less than 4 GiB; what is none would not be read again: check before. */
void pickle_text(struct pickler *p, const char *text, size_t len);
void pickle_string(struct pickler *p, const char *text);

/* A class or function; the second time it comes from the memo. */
void pickle_global(struct pickler *p, const char *module, const char *name);

/* Everything pushed since the mark becomes a tuple. */
void pickle_mark(struct pickler *p);
void pickle_tuple(struct pickler *p);
void pickle_empty_tuple(struct pickler *p);

/* An empty container; items come behind a mark and are taken by _append or _set. */
void pickle_list(struct pickler *p);
void pickle_append(struct pickler *p);
void pickle_dict(struct pickler *p);
void pickle_set(struct pickler *p); /* key, value, key, value, ... since the mark */

void pickle_reduce(struct pickler *p);     /* callable, tuple of arguments */
void pickle_new(struct pickler *p);        /* class, tuple of arguments */
void pickle_build(struct pickler *p);      /* object, state */
void pickle_persistent(struct pickler *p); /* id: what torch's storages are */

/* Remembers what is on top of the stack; pickle_again() pushes it once more. */
uint32_t pickle_remember(struct pickler *p);
void pickle_again(struct pickler *p, uint32_t memo);

/* torch.Size of nd numbers. */
void pickle_torch_size(struct pickler *p, const uint64_t *dim, uint32_t nd);

/* collections.OrderedDict(), empty. */
void pickle_ordered_dict(struct pickler *p);

#endif
