/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_codecs.c - stored bytes through chains of zarr's codecs: byte 0 names the chain (0x80: sums as they are), the next two the size. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/endian.h"
#include "base/err.h"
#include "index/formats/zarr/zarr_array.h"
#include "index/formats/zarr/zarr_priv.h"
#include "remote/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* As writers have them, and pairs that hand a buffer from one codec to the next. */
static const struct zarr_chain chains[] = {
    {1, {{.kind = ZARR_BLOSC}}},
    {1, {{.kind = ZARR_LZ4}}},
    {1, {{.kind = ZARR_ZSTD}}},
    {1, {{.kind = ZARR_GZIP}}},
    {1, {{.kind = ZARR_ZLIB}}},
    {1, {{.kind = ZARR_BZ2}}},
    {1, {{.kind = ZARR_LZMA}}},
    {1, {{.kind = ZARR_CRC32C}}},
    {1, {{.kind = ZARR_DELTA, .arg = {"<i4", "<i2"}}}},
    {2, {{.kind = ZARR_CRC32C}, {.kind = ZARR_ZSTD}}},
    {2, {{.kind = ZARR_GZIP}, {.kind = ZARR_BLOSC}}},
    {2, {{.kind = ZARR_LZ4}, {.kind = ZARR_DELTA, .arg = {"<u2", "<u2"}}}},
    {3, {{.kind = ZARR_ZLIB}, {.kind = ZARR_BZ2}, {.kind = ZARR_LZMA}}},
    {2, {{.kind = ZARR_SHUFFLE, .arg = {"3"}}, {.kind = ZARR_PACKBITS}}},
    {1, {{.kind = ZARR_CAST, .arg = {"<i2", "<f4"}}}},
    {1, {{.kind = ZARR_SCALE, .arg = {">f4", "|i1"}, .scale = 0.1, .offset = 1}}},
};

/* A right sum, so that what is behind it is looked at. */
static void seal(const struct zarr_chain *chain, uint8_t *stored, size_t size)
{
    if (chain->codec[0].kind == ZARR_CRC32C && size >= 4)
        put_le32(stored + size - 4, crc32c(0, stored, size - 4));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct zarr_chain *chain;
    CLEANUP_FREE uint8_t *stored = NULL;
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP_FREE unsigned char *dst = NULL;
    struct err e = {0};
    size_t want;
    int rc;

    if (size < 3)
        return 0;
    want = (size_t)data[1] | (size_t)data[2] << 8;
    dst = malloc(want ? want : 1);
    stored = malloc(size);
    if (!dst || !stored)
        return 0;
    memcpy(stored, data + 3, size - 3);
    chain = &chains[(data[0] & 0x7f) % ARRAY_SIZE(chains)];
    if (data[0] < 0x80)
        seal(chain, stored, size - 3);
    if (source_from_memory(stored, size - 3, false, "chunk", &src, &e) < 0)
        return 0;
    rc = zarr_decode(chain, src, dst, want, &e);
    if (rc != 0 && rc != -EBADMSG && rc != -ENOTSUP && rc != -ENOMEM) {
        fprintf(stderr, "%d: %s\n", rc, e.text);
        abort();
    }
    return 0;
}
