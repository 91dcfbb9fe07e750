/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_npz.c - any bytes as an .npz archive or an .npy file: arrays lie within it. */
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/npz/npz_member.h"
#include "index/formats/torch/zip.h"
#include "remote/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void check(const struct npz_array *a, size_t size)
{
    uint64_t bytes = 0;
    struct err e = {0};

    if (a->offset > size || a->length > size - a->offset ||
        shape_bytes(&a->npy.shape, a->npy.dtype, &bytes, &e) < 0 ||
        (a->packed ? bytes > a->plain : bytes > a->length)) {
        fprintf(stderr, "an array of bytes %" PRIu64 "+%" PRIu64 " in a file of %zu\n",
                a->offset, a->length, size);
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP(zip_freep) struct zip *z = NULL;
    struct npz_array a;
    struct err e = {0};

    if (source_from_memory(data, size, false, "arrays.npz", &src, &e) < 0)
        return 0;
    if (npy_file_read(src, &a, &e) == 0)
        check(&a, size);
    if (zip_open(src, 0, size, &z, &e) < 0)
        return 0;
    for (size_t i = 0; i < zip_count(z); i++)
        if (npz_member_read(src, z, zip_at(z, i), &a, &e) == 0)
            check(&a, size);
    return 0;
}
