/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_codecs.c - stored bytes through chains of zarr's codecs: byte 0 names the chain, the next two the size. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

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
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP_FREE unsigned char *dst = NULL;
    struct err e = {0};
    size_t want;
    int rc;

    if (size < 3)
        return 0;
    want = (size_t)data[1] | (size_t)data[2] << 8;
    dst = malloc(want ? want : 1);
    if (!dst || source_from_memory(data + 3, size - 3, false, "chunk", &src, &e) < 0)
        return 0;
    rc = zarr_decode(&chains[data[0] % ARRAY_SIZE(chains)], src, dst, want, &e);
    if (rc != 0 && rc != -EBADMSG && rc != -ENOTSUP && rc != -ENOMEM) {
        fprintf(stderr, "%d: %s\n", rc, e.text);
        abort();
    }
    return 0;
}
