/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_deepspeed.c - any object graphs as a DeepSpeed save of two ranks, scanned. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/endian.h"
#include "base/err.h"
#include "index/formats/scan.h"
#include "remote/store.h"
#include "tests/unit/zip_build.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum {
    MAX_FILES = 4,
    STORAGES = 8,
    STORAGE = 256, /* bytes */
    HEAD = 1 + 2 * MAX_FILES,
    MEMORY = 1 << 26,
};

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

/* The files of a kind of save; the n-th graph is in the n-th one. */
static const char *const layouts[][MAX_FILES] = {
    {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt",
     "zero_pp_rank_1_mp_rank_00_optim_states.pt",
     "layer_0_expert_1_mp_rank_00_model_states.pt"},
    {"zero_pp_rank_0_mp_rank_00_model_states.pt",
     "zero_pp_rank_0_mp_rank_00_optim_states.pt",
     "zero_pp_rank_1_mp_rank_00_model_states.pt",
     "zero_pp_rank_1_mp_rank_00_optim_states.pt"},
    {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt",
     "mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt"},
    {"zero_pp_rank_0_mp_rank_00_model_states.pt", "zero/a/fp32.pt", "zero/a/step.pt",
     "zero/optimizer_state.pt"},
};

/* A torch.save zip: the graph, and storages "0" to "7" that count up. */
static void write_file(const char *path, const uint8_t *graph, size_t len)
{
    struct zip_builder zip = {0};
    unsigned char storage[STORAGE];
    struct zip_member m = {.name = "a/data.pkl", .data = graph, .len = len};
    FILE *f;

    zb_add(&zip, &m);
    for (int i = 0; i < STORAGES; i++) {
        char name[32];

        for (int k = 0; k < STORAGE; k++)
            storage[k] = (unsigned char)(k + i);
        snprintf(name, sizeof name, "a/data/%d", i);
        m = (struct zip_member){.name = name, .data = storage, .len = sizeof storage};
        zb_add(&zip, &m);
    }
    m = (struct zip_member){.name = "a/version", .data = "3\n", .len = 2};
    zb_add(&zip, &m);
    zb_finish(&zip, false, false, "");
    f = fopen(path, "wb");
    require(f && fwrite(zip.out.data, 1, zip.out.len, f) == zip.out.len, path,
            &(struct err){0});
    fclose(f);
    zb_release(&zip);
}

/* A byte that chooses the layout, two bytes of length for each graph, the graphs. */
static void write_save(const char *dir, const uint8_t *data, size_t size)
{
    const char *const *names = layouts[data[0] % ARRAY_SIZE(layouts)];
    size_t at = HEAD;

    for (size_t i = 0; i < MAX_FILES; i++) {
        size_t len = MIN((size_t)get_le16(data + 1 + 2 * i), size - at);
        char path[256];

        if (len == 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        write_file(path, data + at, len);
        at += len;
    }
}

static void remove_save(const char *dir)
{
    static const char *const dirs[] = {"zero/a", "zero", ""};
    char path[256];

    for (size_t k = 0; k < ARRAY_SIZE(layouts); k++)
        for (size_t i = 0; i < MAX_FILES; i++) {
            snprintf(path, sizeof path, "%s/%s", dir, layouts[k][i]);
            unlink(path);
        }
    for (size_t i = 0; i < ARRAY_SIZE(dirs); i++) {
        snprintf(path, sizeof path, "%s/%s", dir, dirs[i]);
        rmdir(path);
    }
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
    require(bytes == t->bytes, "size", &e);
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
    if (scanner_get(scanner, "", NULL, a, &info, &e) == 0) {
        require(!info.error || info.error[0], "an error without words", &e);
        require(catalog_tensors(catalog, info.id, 0, check_tensor, NULL, &e) == 0,
                "tensors", &e);
    }
    scanner_free(scanner);
    catalog_close(catalog);
    store_close(store);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char dir[] = "/tmp/fuzz_deepspeed.XXXXXX", sub[64];

    if (size <= HEAD)
        return 0;
    require(mkdtemp(dir), dir, &(struct err){0});
    snprintf(sub, sizeof sub, "%s/zero", dir);
    if (data[0] % ARRAY_SIZE(layouts) == 3) {
        mkdir(sub, 0700);
        strcat(sub, "/a");
        mkdir(sub, 0700);
    }
    write_save(dir, data, size);
    scan(dir);
    remove_save(dir);
    return 0;
}
