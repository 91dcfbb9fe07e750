/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_torch_zip.c - any bytes as a torch.save file: no tensor leaves it. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/torch/torch_zip.h"
#include "remote/decoded.h"
#include "remote/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

/* Bytes that unit strides reach beyond the first element; false: an empty tensor. */
static bool reach(const struct shape *units, const int64_t *step, uint64_t *out)
{
    *out = 0;
    for (uint32_t k = 0; k < units->nd; k++) {
        if (units->dim[k] == 0)
            return false;
        *out += (units->dim[k] - 1) * (uint64_t)step[k];
    }
    return true;
}

/* Every element lies within its storage, and the storage within the file. */
static const char *on_tensor(void *user, const char *path, size_t path_len,
                             const struct torch_tensor *t)
{
    const struct source *s = user;
    unsigned unit = dtype_unit(t->dtype);
    struct shape units;
    struct err e = {0};
    uint64_t last;

    require(path[path_len] == '\0', "path", &e);
    require(shape_units(&t->shape, t->dtype, &units, &e) == 0, "units", &e);
    require(t->data <= s->size && t->data_len <= s->size - t->data, "storage", &e);
    if (reach(&units, t->stride, &last))
        require(t->storage_offset + last < t->data_len / unit, "element", &e);
    return path_len % 2 ? "a key" : NULL;
}

/* A tensor alone is what a chunk of a shard may be: as a whole, and its first element. */
static void check_chunk(struct source *s, const struct torch_tensor *t)
{
    static const uint64_t start[SHAPE_MAX_DIMS], one[SHAPE_MAX_DIMS] = {1};
    struct shape units, flat = {.nd = 1, .dim = {1}};
    struct chunk_tensor of = {
        .key = "k", .key_len = 1, .dtype = t->dtype, .units = &units};
    struct chunk c = {.length = s->size, .start = start, .size = units.dim};
    struct chunk_place place = {0};
    struct err e = {0};
    uint64_t last;
    int rc;

    require(shape_units(&t->shape, t->dtype, &units, &e) == 0, "units", &e);
    require(codec_torch_zip.resolve(s, &c, &of, NULL, &place, &e) == 0, "resolve", &e);
    if (reach(&units, place.step, &last))
        require(place.base + last + dtype_unit(t->dtype) <= s->size, "place", &e);
    source_put(place.src);
    of.units = &flat;
    c.size = one;
    c.first = 1;
    rc = codec_torch_zip.resolve(s, &c, &of, NULL, &place, &e);
    require(rc == 0 || rc == -EBADMSG || rc == -ENOTSUP, "flat", &e);
    if (rc == 0) {
        require(place.base + dtype_unit(t->dtype) <= s->size, "flat place", &e);
        source_put(place.src);
    }
}

static void check_archive(struct source *s)
{
    const struct json_limits limits = {.depth = 256, .nul_ok = true};
    CLEANUP(torch_zip_freep) struct torch_zip *t = NULL;
    CLEANUP(json_freep) struct json *doc = NULL;
    struct torch_tensor tensor;
    struct buf out = {0};
    struct err e = {0};
    struct pv root;
    int rc = torch_zip_open(s, 0, s->size, &t, &e);

    require(rc == 0 || rc == -EBADMSG || rc == -EFBIG, "torch_zip_open", &e);
    if (rc < 0)
        return;
    root = torch_zip_root(t);
    require(object_to_json(t, &root, 10000, on_tensor, s, &out, &e) == 0, "JSON", &e);
    require(json_parse(out.data, out.len, &limits, &doc, &e) == 0, out.data, &e);
    buf_release(&out);
    if (torch_zip_tensor(t, &root, &tensor, &e) == 1)
        check_chunk(s, &tensor);
}

/* A zstd frame: decoded within a small budget, or refused. */
static void check_compressed(struct source *s)
{
    static const uint64_t start[1], size[1] = {6};
    const struct shape units = {.nd = 1, .dim = {6}};
    const struct chunk_tensor of = {
        .key = "k", .key_len = 1, .dtype = DTYPE_F32, .units = &units};
    const struct chunk c = {.length = s->size,
                            .start = start,
                            .size = size,
                            .encoding = CHUNK_TORCH_ZIP_ZSTD};
    struct decoded_cache *cache = NULL;
    struct chunk_place place = {0};
    struct err e = {0};

    if (decoded_new("/tmp", 1 << 20, &cache, &e) < 0)
        return;
    if (codec_torch_zip_zstd.resolve(s, &c, &of, cache, &place, &e) == 0) {
        require(place.base + sizeof(float) <= place.src->size, "decoded place", &e);
        source_put(place.src);
    }
    decoded_free(cache);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const unsigned char magic[] = {0x28, 0xb5, 0x2f, 0xfd};
    CLEANUP(source_putp) struct source *s = NULL;
    struct err e = {0};

    if (source_from_memory(data, size, false, "fuzz", &s, &e) < 0)
        return 0;
    if (size >= sizeof magic && memcmp(data, magic, sizeof magic) == 0)
        check_compressed(s);
    else
        check_archive(s);
    return 0;
}
