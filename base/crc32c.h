/* SPDX-License-Identifier: MIT */
/* base/crc32c.h - CRC-32C (Castagnoli), as zarr, OCDBT and iSCSI use it. */
#ifndef UFS_BASE_CRC32C_H
#define UFS_BASE_CRC32C_H

#include "base/base.h"

/* Goes on from `crc` (0 at the start), as zlib's crc32 does. */
uint32_t crc32c(uint32_t crc, const void *data, size_t len);

#endif
