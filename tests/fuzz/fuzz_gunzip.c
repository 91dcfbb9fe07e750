/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_gunzip.c - any bytes as gzip, and as what gzip packs: a read at any place gives what one pass gave. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <zlib.h>

#include "base/crc32.h"
#include "base/endian.h"
#include "base/err.h"
#include "remote/gunzip.h"
#include "remote/source.h"

enum { MAX_PLAIN = 1 << 22 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

static void compare(struct source *s, const char *plain, uint64_t off, size_t len)
{
    CLEANUP_FREE char *got = malloc(len + 1);
    struct err e = {0};

    require(got && source_read(s, off, len, got, &e) == 0, e.text);
    require(memcmp(got, plain + off, len) == 0, "other bytes");
}

static void check(const uint8_t *data, size_t size)
{
    CLEANUP(source_putp) struct source *in = NULL, *s = NULL;
    CLEANUP(gunzip_scan_freep) struct gunzip_scan *scan = NULL;
    CLEANUP_FREE char *plain = malloc(MAX_PLAIN);
    struct err e = {0};
    size_t got = 0;
    int rc;

    if (!plain || source_from_memory(data, size, false, "fuzz", &in, &e) < 0 ||
        gunzip_scan_begin(in, &scan, &e) < 0)
        return;
    rc = gunzip_scan_read(scan, 0, MAX_PLAIN, plain, &got, &e);
    if (rc == 0)
        rc = gunzip_scan_finish(scan, &s, &e);
    require(rc == 0 || rc == -EBADMSG, e.text);
    if (rc < 0 || got == 0 || s->size > got)
        return;
    require(s->size == got, "size");
    compare(s, plain, got / 2, got - got / 2);
    compare(s, plain, 0, got);
    compare(s, plain, got - 1, 1);
    compare(s, plain, got / 3, 1);
}

/* The input as one deflated stream, with the header, sum and length that belong to it. */
static size_t wrap(const uint8_t *data, size_t size, uint8_t *out)
{
    static const uint8_t header[10] = {0x1f, 0x8b, 8};
    CLEANUP_FREE uint8_t *plain = malloc(MAX_PLAIN);
    z_stream z = {.next_in = (uint8_t *)(uintptr_t)data,
                  .avail_in = (unsigned)size,
                  .next_out = plain,
                  .avail_out = MAX_PLAIN};
    size_t len = 0;

    if (!plain || inflateInit2(&z, -MAX_WBITS) != Z_OK)
        return 0;
    if (inflate(&z, Z_FINISH) == Z_STREAM_END) {
        memcpy(out, header, sizeof header);
        memcpy(out + sizeof header, data, z.total_in);
        len = sizeof header + z.total_in;
        put_le32(out + len, crc32_zip(0, plain, z.total_out));
        put_le32(out + len + 4, (uint32_t)z.total_out);
        len += 8;
    }
    inflateEnd(&z);
    return len;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP_FREE uint8_t *whole = malloc(size + 18);
    size_t len;

    if (!whole || size > UINT32_MAX)
        return 0;
    check(data, size);
    len = wrap(data, size, whole);
    if (len > 0)
        check(whole, len);
    return 0;
}
