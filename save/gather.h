/* SPDX-License-Identifier: MIT */
/* save/gather.h - any range of a file of a layout, put together from the tensors. */
#ifndef UFS_SAVE_GATHER_H
#define UFS_SAVE_GATHER_H

#include "base/base.h"
#include "index/layout.h"
#include "save/write.h"

struct err;

/* Where the tensors come from. Any thread, several at once. */
struct gather {
    const struct layout_input *input;
    struct save_source source;
};

/*
 * Bytes [from, from + len) of the file before it is encoded, which must be within it.
 * Checksums are zero bytes: they are the caller's to fill in.
 */
int gather_range(const struct gather *g, const struct layout_file_info *f,
                 uint64_t from, uint64_t len, void *dst, struct err *e);

/* All of a file that is one compressed block; *out is the caller's to free(). */
int gather_encoded(const struct gather *g, const struct layout_file_info *f, void **out,
                   size_t *len, struct err *e);

/* The number of the first piece that holds a byte at `at` or behind; f->pieces: none. */
size_t gather_piece_at(const struct layout_file_info *f, uint64_t at);

#endif
