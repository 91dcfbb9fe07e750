/* SPDX-License-Identifier: MIT */
/* tests/unit/zip_build.h - writes zip archives for tests, honest ones and others. */
#ifndef UFS_TESTS_UNIT_ZIP_BUILD_H
#define UFS_TESTS_UNIT_ZIP_BUILD_H

#include <string.h>
#include <zlib.h>

#include "base/base.h"
#include "base/buf.h"

struct zip_member {
    const char *name;
    const void *data;
    size_t len;
    size_t pad;        /* bytes of extra field in the local header only: alignment */
    bool deflate;      /* compress */
    bool descriptor;   /* as torch: sizes only in the directory and behind the data */
    bool zip64;        /* sizes and offset in a zip64 field of the directory */
    const char *local; /* another name in the local header */
    uint16_t flags;    /* more flags in both headers */
};

struct zip_builder {
    struct buf out, central;
    unsigned count;
};

static inline void zb_le(struct buf *b, uint64_t v, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        buf_addc(b, (char)(v >> 8 * i));
}

/* Raw deflate; the caller frees. */
static inline unsigned char *zb_deflate(const void *data, size_t len, size_t *out_len)
{
    size_t cap = len + len / 10 + 64;
    unsigned char *out = malloc(cap);
    z_stream s = {.next_in = (Bytef *)(uintptr_t)data,
                  .avail_in = (uInt)len,
                  .next_out = out,
                  .avail_out = (uInt)cap};

    deflateInit2(&s, 9, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
    deflate(&s, Z_FINISH);
    *out_len = s.total_out;
    deflateEnd(&s);
    return out;
}

static inline void zb_local(struct zip_builder *z, const struct zip_member *m,
                            uint32_t crc, size_t stored, uint16_t flags)
{
    const char *name = m->local ? m->local : m->name;
    bool sizes = !m->descriptor;

    zb_le(&z->out, 0x04034b50, 4);
    zb_le(&z->out, 20, 2);
    zb_le(&z->out, flags, 2);
    zb_le(&z->out, m->deflate ? 8 : 0, 2);
    zb_le(&z->out, 0, 4);
    zb_le(&z->out, sizes ? crc : 0, 4);
    zb_le(&z->out, sizes ? stored : 0, 4);
    zb_le(&z->out, sizes ? m->len : 0, 4);
    zb_le(&z->out, strlen(name), 2);
    zb_le(&z->out, m->pad, 2);
    buf_adds(&z->out, name);
    for (size_t i = 0; i < m->pad; i++)
        buf_addc(&z->out, 'Z');
}

static inline void zb_central(struct zip_builder *z, const struct zip_member *m,
                              uint32_t crc, size_t stored, uint16_t flags, size_t at)
{
    zb_le(&z->central, 0x02014b50, 4);
    zb_le(&z->central, 0, 2);
    zb_le(&z->central, 20, 2);
    zb_le(&z->central, flags, 2);
    zb_le(&z->central, m->deflate ? 8 : 0, 2);
    zb_le(&z->central, 0, 4);
    zb_le(&z->central, crc, 4);
    zb_le(&z->central, m->zip64 ? UINT32_MAX : stored, 4);
    zb_le(&z->central, m->zip64 ? UINT32_MAX : m->len, 4);
    zb_le(&z->central, strlen(m->name), 2);
    zb_le(&z->central, m->zip64 ? 28 : 0, 2);
    zb_le(&z->central, 0, 8); /* comment, disk, attributes: 10 bytes */
    zb_le(&z->central, 0, 2);
    zb_le(&z->central, m->zip64 ? UINT32_MAX : at, 4);
    buf_adds(&z->central, m->name);
    if (!m->zip64)
        return;
    zb_le(&z->central, 1, 2);
    zb_le(&z->central, 24, 2);
    zb_le(&z->central, m->len, 8);
    zb_le(&z->central, stored, 8);
    zb_le(&z->central, at, 8);
}

static inline void zb_add(struct zip_builder *z, const struct zip_member *m)
{
    uint32_t crc = (uint32_t)crc32(0, m->data, (uInt)m->len);
    uint16_t flags = (uint16_t)(m->flags | (m->descriptor ? 8 : 0));
    CLEANUP_FREE unsigned char *packed = NULL;
    size_t stored = m->len, at = z->out.len;

    if (m->deflate)
        packed = zb_deflate(m->data, m->len, &stored);
    zb_local(z, m, crc, stored, flags);
    buf_add(&z->out, packed ? packed : m->data, stored);
    if (m->descriptor) {
        zb_le(&z->out, 0x08074b50, 4);
        zb_le(&z->out, crc, 4);
        zb_le(&z->out, stored, 4);
        zb_le(&z->out, m->len, 4);
    }
    zb_central(z, m, crc, stored, flags, at);
    z->count++;
}

static inline void zb_end64(struct zip_builder *z, size_t at)
{
    size_t here = z->out.len;

    zb_le(&z->out, 0x06064b50, 4);
    zb_le(&z->out, 44, 8);
    zb_le(&z->out, 45, 2);
    zb_le(&z->out, 45, 2);
    zb_le(&z->out, 0, 8);
    zb_le(&z->out, z->count, 8);
    zb_le(&z->out, z->count, 8);
    zb_le(&z->out, z->central.len, 8);
    zb_le(&z->out, at, 8);
    zb_le(&z->out, 0x07064b50, 4);
    zb_le(&z->out, 0, 4);
    zb_le(&z->out, here, 8);
    zb_le(&z->out, 1, 4);
}

/* The archive is then in z->out; `marker`: only the zip64 record has the numbers. */
static inline void zb_finish(struct zip_builder *z, bool zip64, bool marker,
                             const char *comment)
{
    size_t at = z->out.len;

    buf_add(&z->out, z->central.data ? z->central.data : "", z->central.len);
    if (zip64)
        zb_end64(z, at);
    zb_le(&z->out, 0x06054b50, 4);
    zb_le(&z->out, 0, 4);
    zb_le(&z->out, marker ? UINT16_MAX : z->count, 2);
    zb_le(&z->out, marker ? UINT16_MAX : z->count, 2);
    zb_le(&z->out, marker ? UINT32_MAX : z->central.len, 4);
    zb_le(&z->out, marker ? UINT32_MAX : at, 4);
    zb_le(&z->out, strlen(comment), 2);
    buf_adds(&z->out, comment);
}

static inline void zb_release(struct zip_builder *z)
{
    buf_release(&z->out);
    buf_release(&z->central);
    z->count = 0;
}

#endif
