/* SPDX-License-Identifier: MIT */
/* save/parts.h - a file as the parts of a multipart upload, and checksums across them. */
#ifndef UFS_SAVE_PARTS_H
#define UFS_SAVE_PARTS_H

#include "base/base.h"
#include "index/layout.h"

struct err;
struct gather;

/*
 * What stores take (AWS, "Amazon S3 multipart upload limits", and the same for Google Cloud
 * Storage's XML API): parts 1 to 10,000, each but the last of at least 5 MiB; an object of
 * at most 5 TiB.
 */
enum { PARTS_MAX = 10000, PART_LEAST = 8 << 20 };

/*
 * All parts of a file are of one size (the last may be shorter), which is a function of the
 * file's size alone: whoever takes an upload up again cuts it in the same way.
 */
struct parts {
    uint64_t size; /* of the file */
    uint64_t part;
    uint32_t count; /* an empty file has one, which is empty */
};

/* -EFBIG: no store takes a file so large. */
int parts_of(const struct layout_file_info *f, struct parts *out, struct err *e);

/* Part number n, from 0. */
static inline uint64_t part_at(const struct parts *p, uint32_t n)
{
    return n * p->part;
}

static inline uint64_t part_len(const struct parts *p, uint32_t n)
{
    return MIN(p->part, p->size - part_at(p, n));
}

/*
 * The checksums of one file. Their ranges go across parts: each part notes the sums of what
 * it has of each range, and a checksum is known when all of its range was noted.
 */
struct part_sums;

/*
 * `workers` threads make parts of all files that share a `turn`. Parts that `skipped` says
 * (or NULL) are not made by anyone now: what a checksum needs of them is read again.
 */
struct part_turn;
int part_turn_new(unsigned workers, struct part_turn **out, struct err *e);
void part_turn_free(struct part_turn *t); /* NULL is fine */

/* Somebody failed: nobody waits any more. */
void part_turn_stop(struct part_turn *t);

int part_sums_new(struct part_turn *t, const struct layout_file_info *f,
                  const struct parts *p, const bool *skipped, struct part_sums **out,
                  struct err *e);
void part_sums_free(struct part_sums *s); /* NULL is fine */

/*
 * Bytes of part n, with its checksums: gathers it, notes its sums, and waits for those of
 * later parts that other threads make, or reads them. Parts must be begun in ascending
 * order, each once.
 */
int part_make(struct part_sums *s, const struct gather *g, uint32_t n, void *dst,
              struct err *e);

#endif
