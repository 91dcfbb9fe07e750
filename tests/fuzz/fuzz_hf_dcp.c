/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_hf_dcp.c - any headers as the shards of a model, joined by a scan. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/endian.h"
#include "base/err.h"
#include "index/formats/format.h"
#include "index/formats/scan.h"
#include "remote/store.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_SHARDS = 4, MEMORY = 1 << 26 };

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

/*
 * Four bytes a shard: bytes of its header, bytes of its data (zeros), both little-endian;
 * then the headers' texts. The n-th one is rank n's.
 */
static size_t write_shards(const char *dir, const uint8_t *data, size_t size)
{
    size_t count = 0, at = (size_t)MAX_SHARDS * 4;

    for (; count < MAX_SHARDS && at < size; count++) {
        size_t text = get_le16(data + 4 * count),
               zeros = get_le16(data + 4 * count + 2);
        CLEANUP(buf_release) struct buf b = {0};
        unsigned char len[8];
        char path[256];
        FILE *f;

        text = MIN(text, size - at);
        put_le64(len, text);
        buf_add(&b, len, sizeof len);
        buf_add(&b, data + at, text);
        memset(buf_grow(&b, zeros + 1), 0, zeros + 1);
        at += text;
        snprintf(path, sizeof path, "%s/shard-%05zu-model-00001-of-00001.safetensors",
                 dir, count + 1);
        f = fopen(path, "wb");
        require(f && fwrite(b.data, 1, b.len - 1, f) == b.len - 1, path,
                &(struct err){0});
        fclose(f);
    }
    return count;
}

static void remove_shards(const char *dir, size_t count)
{
    for (size_t i = 1; i <= count; i++) {
        char path[256];

        snprintf(path, sizeof path, "%s/shard-%05zu-model-00001-of-00001.safetensors",
                 dir, i);
        unlink(path);
    }
    rmdir(dir);
}

/* What is not faulty has bytes for all of its elements. */
static int check_tensor(void *user, const struct tensor_info *t)
{
    uint64_t bytes;
    struct err e = {0};

    (void)user;
    if (t->fault)
        return 0;
    require(shape_bytes(&t->shape, t->dtype, &bytes, &e) == 0, t->key, &e);
    require(bytes == t->bytes && bytes <= (uint64_t)MAX_SHARDS << 16, "size", &e);
    return 0;
}

static void scan(const char *dir)
{
    static const struct store_options store_options;
    const struct catalog_options options = {.memory = true};
    CLEANUP(arena_freep) struct arena *a = arena_new(MEMORY);
    struct checkpoint_info info;
    struct store *store;
    struct catalog *catalog;
    struct scanner *scanner;
    struct err e = {0};

    require(a && store_open_local(dir, &store_options, &store, &e) == 0, "store", &e);
    require(catalog_open(&options, store->identity, &catalog, &e) == 0, "catalog", &e);
    require(scanner_new(store, catalog, NULL, &scanner, &e) == 0, "scanner", &e);
    if (scanner_get(scanner, "", NULL, a, &info, &e) == 0)
        require(catalog_tensors(catalog, info.id, 0, check_tensor, NULL, &e) == 0,
                "tensors", &e);
    scanner_free(scanner);
    catalog_close(catalog);
    store_close(store);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char dir[] = "/tmp/fuzz_hf_dcp.XXXXXX";
    size_t count;

    if (size <= (size_t)MAX_SHARDS * 4)
        return 0;
    require(mkdtemp(dir), dir, &(struct err){0});
    count = write_shards(dir, data, size);
    scan(dir);
    remove_shards(dir, count);
    return 0;
}
