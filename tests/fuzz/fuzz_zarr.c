/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_zarr.c - zarr's metadata, keys of chunks, and stored chunks through codecs. */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/zarr/zarr_array.h"
#include "index/formats/zarr/zarr_priv.h"
#include "remote/source.h"

enum { MAX_CHUNK = 1 << 20 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What an array without a fault promises to who reads its chunks. */
static void check_array(const struct zarr_array *a)
{
    CLEANUP(zarr_chunks_freep) struct zarr_chunks *c = NULL;
    static const char *const keys[] = {"0",       "c",   "0.0", "c/0/0",
                                       "c.0.0.0", "0/0", "1",   "99999999999999999999"};
    uint64_t bytes = 0, seen = 0;
    struct err e = {0};

    assert(a->shape.nd <= SHAPE_MAX_DIMS);
    if (a->why[0])
        return;
    assert(a->inner.nd == a->shape.nd && a->grid_chunk.nd == a->shape.nd);
    assert(shape_bytes(&a->inner, a->dtype, &bytes, &e) == 0 && bytes == a->bytes);
    for (uint32_t k = 0; k < a->shape.nd; k++) {
        assert(a->inner.dim[k] > 0 && a->grid_chunk.dim[k] % a->inner.dim[k] == 0);
        assert(a->order[k] < a->shape.nd);
        seen |= 1ull << a->order[k];
    }
    assert(a->shape.nd == 64 || seen == (1ull << a->shape.nd) - 1);
    assert(zarr_chunks_new(a, &c, &e) == 0);
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        (void)zarr_chunks_is_key(c, keys[i], strlen(keys[i]));
}

static void try_metadata(const char *text, size_t size)
{
    struct zarr_array a;
    struct err e = {0};

    if (zarr_parse_v2(text, size, &a, &e) == 0)
        check_array(&a);
    if (zarr_parse_v3(text, size, &a, &e) == 0)
        check_array(&a);
}

/* What the index keeps, and the stored bytes behind it. */
static void try_chunk(const char *text, size_t size)
{
    CLEANUP(source_putp) struct source *src = NULL;
    CLEANUP_FREE unsigned char *dst = NULL;
    struct zarr_spec spec;
    struct err e = {0};

    if (zarr_spec_read(text, size, &spec, &e) < 0 || !spec.literal ||
        spec.bytes > MAX_CHUNK || spec.bytes == 0)
        return;
    dst = malloc(spec.bytes);
    if (!dst || source_from_memory(spec.literal, spec.literal_len, false, "chunk", &src,
                                   &e) < 0)
        return;
    (void)zarr_decode(&spec.chain, src, dst, spec.bytes, &e);
}

static int count_member(void *user, const char *key, size_t key_len, const char *text,
                        size_t len, struct err *e)
{
    size_t *n = user;

    (void)text;
    (void)e;
    assert(key[key_len] == '\0' && len > 0);
    (*n)++;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    struct err e = {0};
    size_t n = 0;

    try_metadata(text, size);
    try_chunk(text, size);
    (void)zarr_each_member(text, size, count_member, &n, &e);
    return 0;
}
