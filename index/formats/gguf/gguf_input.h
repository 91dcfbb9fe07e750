/* SPDX-License-Identifier: MIT */
/* index/formats/gguf/gguf_input.h - numbers and texts of a GGUF header, one after another. */
#ifndef UFS_INDEX_FORMATS_GGUF_INPUT_H
#define UFS_INDEX_FORMATS_GGUF_INPUT_H

#include "base/base.h"

struct buf;
struct err;
struct source;

enum { GGUF_WINDOW = 64 << 10 };

/* A place in the file, of which a window is in memory. */
struct gguf_input {
    struct source *src;
    uint64_t pos, start;
    size_t have;
    bool big_endian;
    unsigned char *window; /* GGUF_WINDOW bytes, owned */
};

int gguf_input_begin(struct gguf_input *in, struct source *src, struct err *e);
void gguf_input_end(struct gguf_input *in);

/* Bytes from the place to the end of the file. */
uint64_t gguf_input_left(const struct gguf_input *in);

/* An unsigned number of 1, 2, 4 or 8 bytes. -EBADMSG when the file ends before. */
int gguf_take(struct gguf_input *in, unsigned size, uint64_t *out, struct err *e);

/*
 * A string into `out`, whose content it replaces. -EBADMSG over `max` (what a name can
 * have) or past the file's end.
 */
int gguf_take_string(struct gguf_input *in, uint64_t max, struct buf *out,
                     struct err *e);

/* -EBADMSG: "FILE: byte N: WHAT". */
int gguf_bad(const struct gguf_input *in, const char *what, struct err *e);

#endif
