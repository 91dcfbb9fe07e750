/* SPDX-License-Identifier: MIT */
/*
 * tests/fuzz/fuzz_chunks.c - any blob of chunks: it is refused, or packs to the same again;
 * any set of boxes: a plan holds each byte once, or it is refused.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/arena.h"
#include "base/err.h"
#include "index/plan.h"
#include "remote/source.h"

enum { SIDE = 6, MOST_BYTES = SIDE * SIDE * SIDE };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* abort() rather than assert(): it must hold with NDEBUG too. */
static void require(bool holds, const char *what, const struct err *e)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, e->text);
        abort();
    }
}

static bool same_row(const void *a, const void *b, uint32_t nd)
{
    return (!a && !b) || (a && b && (!nd || !memcmp(a, b, nd * sizeof(uint64_t))));
}

static void check_same(const struct chunk *a, const struct chunk *b, uint32_t nd,
                       const struct err *e)
{
    require(a->file == b->file && a->encoding == b->encoding && a->flags == b->flags,
            "id", e);
    require(a->offset == b->offset && a->length == b->length && a->first == b->first,
            "place", e);
    require(same_row(a->start, b->start, nd) && same_row(a->size, b->size, nd), "box",
            e);
    require(same_row(a->step, b->step, nd), "step", e);
}

static void check_again(struct arena *a, const struct chunk *c, size_t n, uint32_t nd)
{
    CLEANUP(buf_release) struct buf b = {0};
    const struct chunk *again;
    size_t count;
    struct err e = {0};

    require(chunks_pack(c, n, nd, &b, &e) == 0, "pack", &e);
    if (chunks_unpack(a, b.data, b.len, nd, &again, &count, &e) == -ENOMEM)
        return;
    require(e.code == 0 && count == n, "unpack", &e);
    for (size_t i = 0; i < n; i++)
        check_same(&c[i], &again[i], nd, &e);
}

/* Marks the bytes that one chunk of the plan writes. */
static void mark(const struct plan *p, size_t i, struct arena *a, unsigned char *seen)
{
    struct source source = {.size = MOST_BYTES};
    struct chunk_place place = {.src = &source};
    CLEANUP(run_list_release) struct run_list runs = {0};
    struct plan_op op;
    struct err e = {0};

    if (plan_lower(p, plan_chunk(p, i, NULL), &place, 1, a, &op, &e) == -ENOMEM)
        return;
    require(e.code == 0 && plan_op_cut(&op, 0, plan_size(p), 0, &runs, &e) == 0, "cut",
            &e);
    for (size_t k = 0; k < runs.count; k++) {
        const struct plan_run *r = &runs.run[k];

        for (uint64_t n = 0; n < r->count; n++) {
            for (uint64_t at = r->dst + n * r->dst_step, j = 0; j < r->len; j++)
                require(at + j < plan_size(p) && !seen[at + j]++, "written twice", &e);
        }
    }
}

static void check_plan(struct arena *a, const struct chunk *c, size_t n, uint32_t nd)
{
    const struct shape units = {.nd = nd, .dim = {SIDE, SIDE, SIDE}};
    unsigned char seen[MOST_BYTES] = {0};
    struct plan_builder *b;
    const struct plan *p;
    struct err e = {0};

    if (plan_begin(a, &units, 1, &b, &e) < 0 || plan_take(b, c, n, &e) < 0 ||
        plan_finish(b, &p, &e) < 0)
        return;
    for (size_t i = 0; i < plan_chunks(p); i++)
        mark(p, i, a, seen);
    if (arena_used(a) > 1 << 19) /* some may have run out of memory */
        return;
    for (uint64_t i = 0; i < plan_size(p); i++)
        require(seen[i], "a hole", &e);
}

/* The first byte is the rank. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);
    CLEANUP_FREE uint8_t *blob = malloc(size + 1);
    uint32_t nd = size ? data[0] : 0;
    const struct chunk *c;
    size_t n, len = size ? size - 1 : 0;
    struct err e = {0};
    int ret;

    if (!a || !blob)
        return 0;
    if (len)
        memcpy(blob, data + 1, len);
    ret = chunks_unpack(a, blob, len, nd, &c, &n, &e);
    require(ret == 0 || ret == -EBADMSG || ret == -ENOMEM, "chunks_unpack", &e);
    if (ret < 0)
        return 0;
    check_again(a, c, n, nd);
    if (nd <= 3)
        check_plan(a, c, n, nd);
    return 0;
}
