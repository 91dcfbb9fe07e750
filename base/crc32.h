/* SPDX-License-Identifier: MIT */
/* base/crc32.h - CRC-32 (IEEE 802.3), as zip, gzip and zlib use it. */
#ifndef UFS_BASE_CRC32_H
#define UFS_BASE_CRC32_H

#include "base/base.h"

/*
 * Goes on from `crc` (0 at the start), as zlib's crc32 does, at several times its speed
 * where the processor multiplies without carry. (crc32_ieee is another sum's name, in
 * ISA-L.)
 */
uint32_t crc32_zip(uint32_t crc, const void *data, size_t len);

/* For tests: one of the ways in which it is done; NULL: there is none, or none here. */
typedef uint32_t crc32_fn(uint32_t crc, const void *data, size_t len);
enum { CRC32_WAYS = 3 };
crc32_fn *crc32_way(unsigned i);

#endif
