/* SPDX-License-Identifier: MIT */
/* base/endian.h - unaligned little-endian loads and stores. */
#ifndef UFS_BASE_ENDIAN_H
#define UFS_BASE_ENDIAN_H

#include <endian.h>
#include <string.h>

#include "base/base.h"

static inline uint16_t get_le16(const void *p)
{
    uint16_t v;

    memcpy(&v, p, sizeof v);
    return le16toh(v);
}

static inline uint32_t get_le32(const void *p)
{
    uint32_t v;

    memcpy(&v, p, sizeof v);
    return le32toh(v);
}

static inline uint64_t get_le64(const void *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof v);
    return le64toh(v);
}

static inline uint64_t get_be64(const void *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof v);
    return be64toh(v);
}

static inline void put_le16(void *p, uint16_t v)
{
    v = htole16(v);
    memcpy(p, &v, sizeof v);
}

static inline void put_le32(void *p, uint32_t v)
{
    v = htole32(v);
    memcpy(p, &v, sizeof v);
}

static inline void put_le64(void *p, uint64_t v)
{
    v = htole64(v);
    memcpy(p, &v, sizeof v);
}

#endif
