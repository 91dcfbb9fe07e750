/* SPDX-License-Identifier: MIT */
/* tests/fuzz/fuzz_scan.c - a whole directory, through bids, scan, index and reads of every tensor. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/log.h"
#include "remote/archives.h"
#include "remote/decoded.h"
#include "tests/formats/read_tensor.h"
#include "tests/fuzz/memory_store.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MEMORY = 64 << 20, TENSOR_MAX = 1 << 16, TENSORS = 32 };

static int world_of(const uint8_t *data, size_t size, struct world *w, struct err *e)
{
    const struct catalog_options options = {.memory = true};

    w->arena = arena_new(MEMORY);
    if (!w->arena || memory_store(data, size, &w->store, e) < 0 ||
        archives_over(steal(&w->store), &w->store, e) < 0 ||
        catalog_open(&options, w->store->identity, &w->catalog, e) < 0 ||
        decoded_new(NULL, MEMORY, &w->decoded, e) < 0 ||
        scanner_new(w->store, w->catalog, NULL, &w->scanner, e) < 0)
        return -ENOMEM;
    return 0;
}

/* What two ways of reading give is the same, or one of them says why not. */
static void read_twice(struct world *w, int64_t checkpoint, const struct tensor_info *t)
{
    CLEANUP(buf_release) struct buf one = {0};
    CLEANUP(buf_release) struct buf other = {0};
    struct err e = {0}, e2 = {0};

    if (t->bytes > TENSOR_MAX || read_tensor(w, checkpoint, t, &one, &e) < 0)
        return;
    if (world_read(w, checkpoint, t, &other, &e2) < 0 && e2.code != EBADMSG)
        return;
    if (e2.code || one.len != t->bytes || other.len != one.len ||
        (one.len && memcmp(one.data, other.data, one.len) != 0)) {
        fprintf(stderr, "%s: two readings differ: %s\n", t->key, e2.text);
        abort();
    }
}

static int try_place(void *user, const char *dir, const char *file,
                     const struct format_driver *d)
{
    struct world *w = user;
    struct checkpoint_info info;
    struct tensor_info *t;
    struct err e = {0};
    size_t n;

    (void)d;
    if (scanner_get(w->scanner, dir, file, w->arena, &info, &e) < 0 || info.error ||
        world_tensors(w, info.id, &t, &n, &e) < 0)
        return 0;
    for (size_t i = 0; i < MIN(n, (size_t)TENSORS); i++)
        if (!t[i].fault)
            read_twice(w, info.id, &t[i]);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct world w = {0};
    struct err e = {0};

    if (world_of(data, size, &w, &e) == 0)
        scanner_walk(w.scanner, "", try_place, &w, &e);
    world_close(&w);
    return 0;
}
