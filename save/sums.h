/* SPDX-License-Identifier: MIT */
/* save/sums.h - checksums of what is written, taken while it is at hand. */
#ifndef UFS_SAVE_SUMS_H
#define UFS_SAVE_SUMS_H

#include <pthread.h>

#include "base/base.h"

struct layout_file_info;

/*
 * Pieces of files in the order in which they were written, each with its CRC-32. A range of
 * a file that they fill (with the layout's literal bytes) need not be read again for its
 * checksum; one that an earlier run wrote must be.
 */
struct sums {
    pthread_mutex_t lock; /* of what follows, until sums_settle() */
    struct sums_piece {
        uint32_t file, crc;
        uint64_t at, len;
    } * piece;
    size_t count, cap;
    bool lost; /* no memory for a piece: files are read again */
    bool
        joins; /* pieces that touch are joined: they must not go across layout pieces */
};

void sums_init(struct sums *s);
void sums_release(struct sums *s);

/* Bytes [at, at + len) of the file are these. Any thread. */
void sums_add(struct sums *s, uint32_t file, uint64_t at, const void *data,
              uint64_t len);

/* The same of bytes whose CRC-32 is known. */
void sums_add_crc(struct sums *s, uint32_t file, uint64_t at, uint64_t len,
                  uint32_t crc);

/* Nothing is added any more, and sums_find() may be called, from any thread. */
void sums_settle(struct sums *s);

/* The first piece of the file that starts at `at` or behind it; NULL: there is none. */
const struct sums_piece *sums_from(const struct sums *s, uint32_t file, uint64_t at);

/* The CRC-32 `crc` of some bytes becomes that of them and `len` more, whose own is `more`. */
void sums_append(uint32_t *crc, uint32_t more, uint64_t len);

/* The CRC-32 of bytes [from, from + len) of file number `file`; false: not all is known. */
bool sums_find(const struct sums *s, uint32_t file, const struct layout_file_info *f,
               uint64_t from, uint64_t len, uint32_t *out);

#endif
