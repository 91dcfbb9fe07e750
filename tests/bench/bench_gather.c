/* SPDX-License-Identifier: MIT */
/*
 * tests/bench/bench_gather.c - GB/s of gathering a matrix from 8 column shards, window by
 * window as reads ask for it, beside memcpy. Processor time, best of several rounds.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/arena.h"
#include "base/err.h"
#include "gpu/assemble.h"
#include "gpu/cast.h"
#include "index/plan.h"
#include "remote/source.h"

enum { SHARDS = 8, ROUNDS = 7, WINDOW = 1 << 20, TENSOR = 64 << 20 };

struct bench {
    struct arena *arena;
    const struct plan *plan;
    struct plan_op op[SHARDS];
    unsigned char *shard[SHARDS], *window;
    bool transposed; /* each shard is stored column by column */
    uint8_t flags;
};

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void must(int ret, const struct err *e)
{
    if (ret < 0) {
        fprintf(stderr, "%s\n", e->text);
        exit(1);
    }
}

/* A matrix of 2-byte elements with rows of `row` bytes a shard. */
static void make(struct bench *b, uint64_t row)
{
    uint64_t cols = row / 2, rows = TENSOR / (row * SHARDS), size[2] = {rows, cols};
    struct shape units = {.nd = 2, .dim = {rows, cols * SHARDS}};
    struct source whole = {.size = TENSOR / SHARDS};
    struct plan_builder *build;
    struct err e = {0};

    b->arena = arena_new(SIZE_MAX);
    must(plan_begin(b->arena, &units, 2, &build, &e), &e);
    for (uint64_t i = 0; i < SHARDS; i++) {
        uint64_t start[2] = {0, i * cols};

        must(plan_add(build, &(struct chunk){.start = start, .size = size}, &e), &e);
    }
    must(plan_finish(build, &b->plan, &e), &e);
    for (unsigned i = 0; i < SHARDS; i++) {
        struct chunk_place place = {
            .src = &whole, .flags = b->flags, .step = {(int64_t)row, 2}};

        if (b->transposed) {
            place.step[0] = 2;
            place.step[1] = (int64_t)rows * 2;
        }
        must(plan_lower(b->plan, plan_chunk(b->plan, i, NULL), &place, 2, b->arena,
                        &b->op[i], &e),
             &e);
    }
}

static void gather(struct bench *b, uint64_t off, struct run_list *runs,
                   struct assemble_run **mapped, size_t *cap)
{
    struct err e = {0};

    runs->count = 0;
    for (unsigned i = 0; i < SHARDS; i++)
        must(plan_op_cut(&b->op[i], off, WINDOW, i, runs, &e), &e);
    if (runs->count > *cap) {
        *cap = runs->cap;
        *mapped = realloc(*mapped, *cap * sizeof **mapped);
        if (!*mapped)
            exit(1);
    }
    for (size_t i = 0; i < runs->count; i++) {
        const struct plan_run *r = &runs->run[i];

        (*mapped)[i] = (struct assemble_run){.piece = b->shard[r->tag] + r->src,
                                             .at = r->dst,
                                             .len = r->len,
                                             .count = r->count,
                                             .piece_step = r->src_step,
                                             .at_step = r->dst_step,
                                             .flags = r->flags,
                                             .component = r->component};
    }
    must(assembler_cpu.gather(&assembler_cpu, *mapped, runs->count, b->window, WINDOW,
                              &e),
         &e);
}

static double rate(struct bench *b, uint64_t row)
{
    CLEANUP(run_list_release) struct run_list runs = {0};
    struct assemble_run *mapped = NULL;
    size_t cap = 0;
    double best = 1e9;

    make(b, row);
    for (int round = 0; round < ROUNDS; round++) {
        double start = now();

        for (uint64_t off = 0; off < TENSOR; off += WINDOW)
            gather(b, off, &runs, &mapped, &cap);
        best = MIN(best, now() - start);
    }
    free(mapped);
    arena_free(b->arena);
    return TENSOR / best / 1e9;
}

static double rate_memcpy(struct bench *b)
{
    double best = 1e9;

    for (int round = 0; round < ROUNDS; round++) {
        double start = now();

        for (uint64_t off = 0; off < TENSOR; off += WINDOW)
            memcpy(b->window,
                   b->shard[off / (TENSOR / SHARDS)] + off % (TENSOR / SHARDS), WINDOW);
        best = MIN(best, now() - start);
    }
    return TENSOR / best / 1e9;
}

/* Elements of a window cast over and over; GB/s of what is read and written together. */
static double rate_cast(struct bench *b, enum dtype from, enum dtype to,
                        const struct cast_scale *scale)
{
    enum { PART = WINDOW / 8, TIMES = 256 };
    double best = 1e9;

    for (int round = 0; round < ROUNDS; round++) {
        double start = now();

        for (int i = 0; i < TIMES; i++)
            cast_scaled_elements(from, to, b->shard[0], b->window, PART, scale, 0);
        best = MIN(best, now() - start);
    }
    return (double)PART * TIMES * (dtype_unit(from) + dtype_unit(to)) / best / 1e9;
}

static void print_casts(struct bench *b)
{
    static const enum dtype pair[][2] = {
        {DTYPE_F32, DTYPE_BF16},     {DTYPE_BF16, DTYPE_F32},
        {DTYPE_F32, DTYPE_F16},      {DTYPE_F16, DTYPE_F32},
        {DTYPE_F8_E4M3, DTYPE_F32},  {DTYPE_F8_E4M3, DTYPE_BF16},
        {DTYPE_BF16, DTYPE_F8_E4M3}, {DTYPE_F64, DTYPE_F32},
        {DTYPE_F64, DTYPE_BF16},
    };
    static const float factor[64] = {1};
    const struct cast_scale tiles = {
        .value = (uintptr_t)factor,
        .terms = 2,
        .term = {{.stride = 4096, .dim = WINDOW, .block = 128, .step = 0},
                 {.stride = 1, .dim = 4096, .block = 128, .step = 1}}};

    for (size_t i = 0; i < ARRAY_SIZE(pair); i++)
        printf("cast %-8s to %-8s     %6.2f GB/s\n", dtype_name(pair[i][0]),
               dtype_name(pair[i][1]), rate_cast(b, pair[i][0], pair[i][1], NULL));
    printf("the same by tiles of 128x128\n");
    printf("cast F8_E4M3  to BF16         %6.2f GB/s\n",
           rate_cast(b, DTYPE_F8_E4M3, DTYPE_BF16, &tiles));
}

int main(void)
{
    struct bench b = {.window = malloc(WINDOW)};

    for (unsigned i = 0; i < SHARDS; i++) {
        b.shard[i] = malloc(TENSOR / SHARDS);
        if (!b.shard[i] || !b.window)
            return 1;
        memset(b.shard[i], (int)i, TENSOR / SHARDS);
    }
    memset(b.window, 0, WINDOW);
    printf("memcpy                      %6.2f GB/s\n", rate_memcpy(&b));
    for (uint64_t row = 8; row <= 64 << 10; row *= row < 64 ? 2 : 8) {
        b.flags = 0;
        b.transposed = false;
        printf("rows of %5" PRIu64 " bytes         %6.2f GB/s\n", row, rate(&b, row));
        b.flags = CHUNK_SWAP;
        printf("rows of %5" PRIu64 ", swapped      %6.2f GB/s\n", row, rate(&b, row));
        b.flags = 0;
        b.transposed = true;
        printf("rows of %5" PRIu64 ", transposed   %6.2f GB/s\n", row, rate(&b, row));
    }
    print_casts(&b);
    return 0;
}
