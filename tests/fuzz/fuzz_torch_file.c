/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_torch_file.c - any bytes as a file of torch.save: zip, legacy, deflated. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/torch_origin.h"
#include "index/formats/torch/torch_walk.h"
#include "remote/decoded.h"
#include "remote/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_TENSORS = 1000, DECODED = 64 << 20 };

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

struct run {
    struct source *src;
    struct decoded_cache *decoded;
    uint64_t tensors;
};

/* Bytes that the strides reach behind the first element; false: an empty tensor. */
static bool reach(const struct shape *units, const int64_t *step, uint64_t *out)
{
    *out = 0;
    for (uint32_t k = 0; k < units->nd; k++) {
        if (units->dim[k] == 0)
            return false;
        require(step[k] >= 0, "a negative step", &(struct err){0});
        *out += (units->dim[k] - 1) * (uint64_t)step[k];
    }
    return true;
}

/* A deflated storage: what can be decoded has every element. */
static void check_packed(struct run *r, const struct torch_tensor *x,
                         const struct shape *units)
{
    static const uint64_t zeros[SHAPE_MAX_DIMS];
    char key[64];
    struct chunk_tensor of = {.key = key, .dtype = x->dtype, .units = units};
    struct chunk c = {.encoding = CHUNK_ZIP_DEFLATE,
                      .offset = x->data,
                      .length = x->packed,
                      .start = zeros,
                      .size = units->dim,
                      .first = x->storage_offset,
                      .step = x->stride};
    struct chunk_place place = {0};
    struct err e = {0};
    uint64_t last;

    of.key_len = (size_t)snprintf(key, sizeof key, "%" PRIu64 " %08" PRIx32,
                                  x->data_len, x->crc);
    if (codec_zip_deflate.resolve(r->src, &c, &of, r->decoded, &place, &e) < 0) {
        require(e.code == EBADMSG || e.code == ENOSPC || e.code == EFBIG, "code", &e);
        return;
    }
    require(place.src->size == x->data_len, "decoded size", &e);
    if (reach(units, place.step, &last))
        require(place.base + last + dtype_unit(x->dtype) <= place.src->size, "element",
                &e);
    source_put(place.src);
}

static int on_item(void *user, const struct torch_item *item, struct err *e)
{
    struct run *r = user;
    const struct torch_tensor *x = item->tensor;
    struct shape units;
    uint64_t last, len;

    require(item->key[item->key_len] == '\0' && item->path[item->path_len] == '\0',
            "text", e);
    if (++r->tensors > MAX_TENSORS)
        return err_set(e, E2BIG, "enough");
    if (!x) {
        require(item->why[0] != '\0', "a reason", e);
        return 0;
    }
    len = x->packed ? x->packed : x->data_len;
    require(shape_units(&x->shape, x->dtype, &units, e) == 0, "units", e);
    require(x->data <= r->src->size && len <= r->src->size - x->data, "storage", e);
    if (reach(&units, x->stride, &last))
        require(x->storage_offset + last < x->data_len / dtype_unit(x->dtype),
                "element", e);
    if (x->packed)
        check_packed(r, x, &units);
    return 0;
}

static void check_object(struct torch_zip *zip, const struct pv *root)
{
    struct buf json = {.max = 64 << 20};
    struct json *doc = NULL;
    const struct json_limits limits = {.depth = 256, .nul_ok = true};
    struct err e = {0};
    int rc = object_to_json(zip, root, 10000, NULL, NULL, &json, &e);

    require(rc == 0 || rc == -EFBIG, "objects", &e);
    if (rc == 0)
        require(json_parse(json.data, json.len, &limits, &doc, &e) == 0, "JSON", &e);
    json_free(doc);
    buf_release(&json);
}

static void check_file(struct run *r, struct torch_zip *zip)
{
    struct torch_walk w = {.zip = zip,
                           .fn = on_item,
                           .user = r,
                           .key = {.max = TORCH_MAX_PATH},
                           .path = {.max = TORCH_MAX_PATH}};
    struct pv root = torch_zip_root(zip);
    struct torch_origin from;
    struct err e = {0};
    int rc = torch_walk_value(&w, root, &e);

    torch_origin(zip, &from);
    require(!from.has_step || from.step >= 0, "step", &e);
    require(strlen(from.version) < sizeof from.version, "version", &e);
    require(rc == 0 || rc == -EFBIG || rc == -E2BIG, "walk", &e);
    require(w.key.len == 0 && w.path.len == 0, "paths", &e);
    torch_zip_is_script(zip);
    check_object(zip, &root);
    torch_walk_release(&w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *tmp = getenv("TMPDIR");
    struct torch_zip *zip = NULL;
    struct run r = {0};
    struct err e = {0};
    int rc;

    torch_sniff(data, size);
    if (source_from_memory(data, size, false, "fuzz", &r.src, &e) < 0 ||
        decoded_new(tmp ? tmp : "/tmp", DECODED, &r.decoded, &e) < 0)
        abort();
    rc = torch_open(r.src, &zip, &e);
    require(rc == -e.code, "a code that is not the error's", &e);
    if (rc == 0)
        check_file(&r, zip);
    torch_zip_free(zip);
    decoded_free(r.decoded);
    source_put(r.src);
    return 0;
}
