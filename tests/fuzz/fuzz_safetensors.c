/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_safetensors.c - any bytes as a file, as a header's text, as an index. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "index/formats/hf/hf_index.h"
#include "index/formats/hf/safetensors_header.h"
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

/* What an accepted header promises: whole tensors, back to back, of `data_size` bytes. */
static void check_header(const struct safetensors_header *h, uint64_t data_size)
{
    struct err e = {0};
    uint64_t at = 0;

    for (size_t i = 0; i < h->count; i++) {
        const struct safetensors_tensor *t = &h->tensor[i];
        struct shape shape;
        uint64_t bytes;

        require(t->begin == at && t->end >= at, "not back to back", &e);
        at = t->end;
        require(t->nd <= SHAPE_MAX_DIMS && t->dtype != DTYPE_NONE, "rank, dtype", &e);
        safetensors_shape(t, &shape);
        require(shape_bytes(&shape, t->dtype, &bytes, &e) == 0, "shape_bytes", &e);
        require(bytes == t->end - t->begin, "bytes", &e);
        require(t->name[t->name_len] == '\0', "name without its NUL", &e);
        if (i < 50)
            require(safetensors_find(h, t->name, t->name_len) == t, "find", &e);
    }
    require(at == data_size, "data is not covered", &e);
}

/* The image's own tensor as a chunk lies where the header says. */
static void check_codec(struct source *src, const struct safetensors_header *h)
{
    static const uint64_t start[SHAPE_MAX_DIMS];
    struct err e = {0};

    for (size_t i = 0; i < h->count && i < 4; i++) {
        const struct safetensors_tensor *t = &h->tensor[i];
        struct shape shape, units;
        struct chunk_place place = {0};
        struct chunk c = {
            .encoding = CHUNK_SAFETENSORS, .length = src->size, .start = start};
        struct chunk_tensor about = {
            .key = t->name, .key_len = t->name_len, .dtype = t->dtype, .units = &units};

        safetensors_shape(t, &shape);
        require(shape_units(&shape, t->dtype, &units, &e) == 0, "units", &e);
        c.size = units.dim;
        require(safetensors_codec.resolve(src, &c, &about, NULL, &place, &e) == 0,
                "codec", &e);
        require(place.base == h->data + t->begin && place.src == src, "place", &e);
        source_put(place.src);
    }
}

static void read_file(const uint8_t *data, size_t size)
{
    CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
    CLEANUP(source_putp) struct source *src = NULL;
    struct err e = {0};
    int rc;

    require(source_from_memory(data, size, false, "m", &src, &e) == 0, "source", &e);
    safetensors_magic(data, size, size);
    rc = safetensors_read(src, 0, size, &h, &e);
    require(rc == 0 || rc == -EBADMSG, "safetensors_read", &e);
    if (rc < 0)
        return;
    require(safetensors_magic(data, size, size), "magic", &e);
    check_header(&h, size - h.data);
    check_codec(src, &h);
}

static void read_header(const uint8_t *data, size_t size)
{
    CLEANUP(safetensors_header_release) struct safetensors_header h = {0};
    struct err e = {0};
    int rc = safetensors_parse((const char *)data, size, 16, &h, &e);

    require(rc == 0 || rc == -EBADMSG, "safetensors_parse", &e);
    if (rc == 0)
        check_header(&h, 16);
}

static void read_index(const uint8_t *data, size_t size)
{
    CLEANUP(hf_index_release) struct hf_index x = {0};
    struct err e = {0};
    int rc = hf_index_parse((const char *)data, size, ".safetensors", &x, &e);

    require(rc == 0 || rc == -EBADMSG, "hf_index_parse", &e);
    for (size_t i = 0; rc == 0 && i < x.count; i++) {
        const char *key = x.entry[i].key;

        require(x.entry[i].file < x.nfiles, "file number", &e);
        require(hf_index_find(&x, key, strlen(key)) == (ptrdiff_t)i, "find", &e);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t empty[1];

    data = size ? data : empty;
    read_file(data, size);
    read_header(data, size);
    read_index(data, size);
    return 0;
}
