/* SPDX-License-Identifier: MIT */
/*
 * tests/fuzz/fuzz_map.c - any map, and behind a NUL any config.json, over a few tensors: it
 * is refused, or every tensor that comes of it has a fault or its bytes in the file.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/catalog.h"
#include "index/map/map.h"

enum { FILE_BYTES = 4096, MEMORY = 64 << 20 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

static int fake_stat(struct store *s UNUSED, const char *path UNUSED,
                     struct entry_stat *out, struct err *e UNUSED)
{
    *out = (struct entry_stat){
        .kind = ENTRY_FILE, .mode = 0644, .id = {1, 2, FILE_BYTES, 3, 4}};
    return 0;
}

static const struct tensor {
    const char *key;
    size_t wrapper;
    enum dtype dtype;
    struct shape shape;
    uint64_t offset;
} tensors[] = {
    {"a", 0, DTYPE_F32, {2, {8, 6}}, 0},
    {"b", 0, DTYPE_F32, {2, {8, 6}}, 200},
    {"h.0.w", 0, DTYPE_BF16, {1, {12}}, 400},
    {"h.1.w", 0, DTYPE_BF16, {1, {12}}, 500},
    {"model.s", 6, DTYPE_F32, {3, {2, 4, 2}}, 600},
    {"none", 0, DTYPE_F32, {2, {0, 3}}, 700},
    {"optimizer.m", 0, DTYPE_F64, {0, {0}}, 704},
    {"p", 0, DTYPE_F4, {1, {8}}, 800},
};

static int report(struct sink *s, struct err *e)
{
    uint32_t file;
    int ret = sink_file(s, "a.bin", 5, &file, e);

    for (size_t i = 0; ret == 0 && i < ARRAY_SIZE(tensors); i++) {
        const struct tensor *x = &tensors[i];
        const struct sink_tensor t = {.key = x->key,
                                      .key_len = strlen(x->key),
                                      .wrapper = x->wrapper,
                                      .dtype = x->dtype,
                                      .shape = &x->shape,
                                      .role = -1};

        ret = sink_tensor_plain(s, &t, file, x->offset, e);
    }
    return ret;
}

struct look {
    struct catalog *c;
    int64_t id;
};

static int check_tensor(void *user, const struct tensor_info *t)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(MEMORY);
    const struct look *l = user;
    const struct chunk *c;
    int64_t step[SHAPE_MAX_DIMS];
    struct shape units;
    struct err e = {0};
    size_t n;

    if (t->fault || !a)
        return 0;
    require(shape_units(&t->shape, t->stored, &units, &e) == 0, "shape", &e);
    require(catalog_chunks(l->c, l->id, t, a, &c, &n, &e) == 0, "chunks", &e);
    for (size_t i = 0; i < n; i++) {
        require(c[i].offset + c[i].length <= FILE_BYTES, "outside of the file", &e);
        require(chunk_steps(&c[i], units.nd, c[i].length / dtype_unit(t->stored), step,
                            &e) == 0,
                "outside of the piece", &e);
    }
    return 0;
}

static void run(struct catalog *c, struct sink_filter *f)
{
    static const struct store_ops ops = {.name = "fake", .stat = fake_stat};
    struct store store = {.ops = &ops};
    const struct catalog_place place = {.path = "x", .store = &store, .filter = f};
    struct look look = {.c = c};
    struct sink *s = NULL;
    struct err e = {0};

    require(sink_begin(c, &place, &s, &e) == 0 && report(s, &e) == 0, "scan", &e);
    require(sink_commit(s, NULL, &look.id, &e) == 0, "commit", &e);
    require(catalog_tensors(c, look.id, 0, check_tensor, &look, &e) == 0, "list", &e);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct catalog_options options = {.memory = true};
    CLEANUP(map_freep) struct map *m = NULL;
    CLEANUP(map_filter_freep) struct sink_filter *f = NULL;
    CLEANUP(catalog_closep) struct catalog *c = NULL;
    const char *text = (const char *)data,
               *config = size ? memchr(text, '\0', size) : NULL;
    size_t len = config ? (size_t)(config++ - text) : size;
    struct err e = {0};
    int ret = map_parse("m", text, len, &m, &e);

    require(ret == 0 || (e.code == -ret && e.text[0]), "words of a refusal", &e);
    if (ret < 0 || map_filter_new(m, config, config ? size - len - 1 : 0, &f, &e) < 0)
        return 0;
    require(catalog_open(&options, "fuzz", &c, &e) == 0, "catalog", &e);
    run(c, f);
    return 0;
}
