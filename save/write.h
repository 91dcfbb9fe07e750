/* SPDX-License-Identifier: MIT */
/* save/write.h - runs a layout: tensors are read once and written to all their places. */
#ifndef UFS_SAVE_WRITE_H
#define UFS_SAVE_WRITE_H

#include "base/base.h"
#include "index/layout.h"

struct err;
struct pool;
struct staging;

/* Where the bytes of the tensors come from. Any thread, several at once. */
struct save_source {
    int (*read)(void *user, size_t tensor, uint64_t off, size_t len, void *dst,
                struct err *e);
    void *user;
};

/*
 * Bytes that are read at once; a multiple of every unit of a type. What is written should
 * still be in the processor's cache: 4 MiB took three to four times as long to write to
 * ext4. Journals count in these windows, so that they are to say how large one is.
 */
enum { SAVE_WINDOW = 512 << 10 };

/* Files of the layout that are in `dir` already, with some of their boxes, or all. */
struct save_filled {
    const bool *file; /* of each file of the layout */
    bool (*has)(void *user, uint32_t file, const struct layout_piece *box);
    /* The CRC-32 of bytes [from, from + len) of the file; false: it is to be read. */
    bool (*sum)(void *user, uint32_t file, const struct layout_file_info *f,
                uint64_t from, uint64_t len, uint32_t *crc);
    void *user;
};

struct save_run {
    const struct layout *layout;
    const struct layout_input *input;
    struct save_source source;
    int dir;                 /* a descriptor of where the files go */
    struct staging *staging; /* its journal; NULL: a save that is not taken up again */
    struct pool *pool;       /* may be NULL */
    unsigned part, parts;    /* files of stage 0 that are ours: see save_part() */
    bool first_stage, other_stages;
    /* Called with bytes written since the last call, from any thread, one at a time. */
    void (*progress)(void *user, uint64_t bytes);
    void *user;
    const struct save_filled *filled; /* or NULL */
};

/* Bytes that save_write() will write, of the whole run. */
uint64_t save_bytes(const struct save_run *r);

/*
 * Writes all files of the stages that are asked for, in the order of stages, each durable
 * before the next begins; goes on where the journal of the staging directory ends. -ENOSPC
 * before anything is written when the file system has not the room.
 */
int save_write(const struct save_run *r, struct err *e);

#endif
