/* SPDX-License-Identifier: MIT */
/* tests/unit/tar_build.h - tar archives made up by tests, with whatever is wrong in them. */
#ifndef UFS_TESTS_UNIT_TAR_BUILD_H
#define UFS_TESTS_UNIT_TAR_BUILD_H

#include <stdio.h>
#include <string.h>
#include <zlib.h>

#include "base/buf.h"

/* Sets the checksum of a header block. */
static inline void tb_sum(char *block)
{
    unsigned sum = 0;

    memset(block + 148, ' ', 8);
    for (int i = 0; i < 512; i++)
        sum += (unsigned char)block[i];
    snprintf(block + 148, 8, "%06o", sum & 0777777);
}

static inline void tb_pad(struct buf *b)
{
    while (b->len % 512)
        buf_addc(b, '\0');
}

/* A header of POSIX and, for those that have some, the bytes. */
static inline void tb_add(struct buf *b, const char *name, char type, const void *data,
                          size_t len)
{
    char block[512] = {0}, size[24];

    memcpy(block, name, strnlen(name, 100));
    memcpy(block + 100, "0000644", 8);
    snprintf(size, sizeof size, "%011zo", len);
    memcpy(block + 124, size, 12);
    block[156] = type;
    memcpy(block + 257, "ustar", 6);
    memcpy(block + 263, "00", 2);
    tb_sum(block);
    buf_add(b, block, sizeof block);
    if (data)
        buf_add(b, data, len);
    tb_pad(b);
}

static inline void tb_text(struct buf *b, const char *name, const char *text)
{
    tb_add(b, name, '0', text, strlen(text));
}

static inline void tb_end(struct buf *b)
{
    static const char empty[1024];

    buf_add(b, empty, sizeof empty);
}

/* One gzip member. */
static inline void tb_gzip(const void *data, size_t len, int level, struct buf *out)
{
    z_stream z = {0};
    size_t room = len + len / 100 + 1000;

    if (deflateInit2(&z, level, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK)
        abort();
    z.next_in = (unsigned char *)(uintptr_t)data;
    z.avail_in = (uInt)len;
    z.next_out = buf_grow(out, room);
    z.avail_out = (uInt)room;
    if (!z.next_out || deflate(&z, Z_FINISH) != Z_STREAM_END)
        abort();
    out->len -= z.avail_out;
    deflateEnd(&z);
}

#endif
