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
};

void sums_init(struct sums *s);
void sums_release(struct sums *s);

/* Bytes [at, at + len) of the file are these. Any thread. */
void sums_add(struct sums *s, uint32_t file, uint64_t at, const void *data,
              uint64_t len);

/* Nothing is added any more, and sums_find() may be called, from any thread. */
void sums_settle(struct sums *s);

/* The CRC-32 of bytes [from, from + len) of file number `file`; false: not all is known. */
bool sums_find(const struct sums *s, uint32_t file, const struct layout_file_info *f,
               uint64_t from, uint64_t len, uint32_t *out);

#endif
