/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_flax.c - any bytes as flax's msgpack: arrays lie within the file. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/json.h"
#include "index/formats/flax/flax_elsewhere.h"
#include "index/formats/flax/flax_tree.h"
#include "remote/source.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

static int on_array(void *user, struct buf *key, const struct flax_array *a,
                    struct err *e)
{
    const size_t *size = user;
    uint64_t sum = 0, want = 0;

    require(memchr(key->data, '\0', key->len) == NULL, "key");
    require(a->dtype != DTYPE_NONE && a->count > 0 && a->shape.nd <= SHAPE_MAX_DIMS,
            "array");
    for (size_t i = 0; i < a->count; i++) {
        require(a->piece[i].off <= *size && a->piece[i].len <= *size - a->piece[i].off,
                "outside");
        sum += a->piece[i].len;
    }
    if (!a->fault)
        require(shape_bytes(&a->shape, a->dtype, &want, e) == 0 && want == sum,
                "bytes");
    return 0;
}

static int on_elsewhere(void *user, struct buf *key, const char *path, struct err *e)
{
    (void)user;
    (void)path;
    (void)e;
    require(memchr(key->data, '\0', key->len) == NULL, "key of an array elsewhere");
    return 0;
}

static void require_json(const char *json, size_t len)
{
    static const struct json_limits limits = {.depth = 512, .nul_ok = true};
    CLEANUP(json_freep) struct json *doc = NULL;
    struct err e = {0};

    if (json_parse(json, len, &limits, &doc, &e) < 0) {
        fprintf(stderr, "%.*s: %s\n", (int)len, json, e.text);
        require(false, "not JSON");
    }
}

static int on_object(void *user, const char *key, size_t len, const char *json,
                     size_t json_len, struct err *e)
{
    CLEANUP(buf_release) struct buf rest = {0};

    (void)user;
    require(memchr(key, '\0', len) == NULL, "key");
    require_json(json, json_len);
    if (flax_has_elsewhere(json, json_len) &&
        flax_elsewhere(key, len, json, json_len, on_elsewhere, NULL, &rest, e) == 0 &&
        rest.len > 0)
        require_json(rest.data, rest.len);
    *e = (struct err){0};
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct flax_visitor v = {
        .array = on_array, .object = on_object, .user = &size};
    CLEANUP(source_putp) struct source *s = NULL;
    struct err e = {0};
    int rc;

    if (source_from_memory(data, size, false, "fuzz", &s, &e) < 0)
        return 0;
    rc = flax_walk(s, 0, size, &v, &e);
    require(rc == 0 || rc == -EBADMSG || rc == -ENOTSUP || rc == -EFBIG, e.text);
    flax_sniff(data, size);
    return 0;
}
