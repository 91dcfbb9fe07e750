/* SPDX-License-Identifier: MIT */
/* tests/kernels/test_gather.c - gathers by the CPU and by the kernel's body, and refusals. */
#include "gpu/gather.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "base/err.h"
#include "base/guard.h"
#include "base/pool.h"
#include "gather_case.h"
#include "gpu/boxes.h"
#include "gpu/gather_priv.h"
#include "remote/source.h"

enum { ROUNDS = 400, GUARD = 64, ROOM = 64 << 10, LARGE = 1 << 30 };

/* Memory with marks on both sides. */
struct guarded {
    unsigned char *all, *at;
    uint64_t size;
};

static struct guarded guarded_new(uint64_t size)
{
    struct guarded g = {.size = size};

    g.all = malloc(size + 2 * GUARD);
    assert_non_null(g.all);
    memset(g.all, 0xee, size + 2 * GUARD);
    g.at = g.all + GUARD;
    return g;
}

static void guarded_free(struct guarded *g)
{
    for (unsigned i = 0; i < GUARD; i++) {
        assert_int_equal(g->all[i], 0xee);
        assert_int_equal(g->at[g->size + i], 0xee);
    }
    free(g->all);
}

static void run_host(const struct gather_case *c, struct pool *pool, const char *who)
{
    struct guarded out = guarded_new(c->bytes);
    struct err e = {0};
    const struct gather_job job = {c->gather, (uintptr_t)out.at};

    assert_int_equal(gather_size(c->gather), c->bytes);
    if (gather_run_host(&job, 1, pool, NULL, &e) < 0)
        fail_msg("%s: %s", who, e.text);
    assert_true(gather_case_equal(c, out.at, who));
    guarded_free(&out);
}

/* ---- the kernel's body, tile by tile and lane by lane, in a scrambled order ---- */

static uint64_t greatest_divisor(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;

        a = b;
        b = rest;
    }
    return a;
}

static void run_tiles(const struct core_box *box, size_t n, uint64_t tiles,
                      uint32_t lanes, struct random *r)
{
    uint64_t step = tiles > 1 ? 1 + random_below(r, tiles - 1) : 1, tile = 0;

    while (greatest_divisor(step, tiles) > 1)
        step++;
    for (uint64_t i = 0; i < tiles; i++, tile = (tile + step) % tiles) {
        const struct core_box *b = &box[core_find(box, (uint32_t)n, tile)];
        uint32_t flip = (uint32_t)random_below(r, lanes);

        for (uint32_t lane = 0; lane < lanes; lane++)
            core_tile(b, tile - b->first_tile, lane ^ flip, lanes);
    }
}

/* Boxes read their sources where they are, or packed into memory of their own. */
static void place_box(struct core_box *b, struct source *src, unsigned char *packed)
{
    struct box_lines l = box_lines_of(b);
    const unsigned char *bytes = source_map(src);

    if (!packed) {
        b->src += (uintptr_t)bytes;
        return;
    }
    for (uint64_t n = 0; n < l.count; n++)
        memcpy(packed + n * box_pitch(&l), bytes + box_line(b, &l, n), l.length);
    box_pack(b, &l, (uintptr_t)packed);
}

static void run_body(const struct gather_case *c, struct random *r, uint64_t room)
{
    CLEANUP(work_list_release) struct work_list list = {0};
    struct guarded out = guarded_new(c->bytes);
    struct work_target target = {
        .gather = c->gather,
        .address = (uintptr_t)out.at,
        .scale = c->gather->scaled ? (uintptr_t)&c->gather->scale : 0};
    struct core_box *box;
    unsigned char **packed;
    uint64_t tiles = 0;
    struct err e = {0};

    for (size_t i = 0; i < plan_chunks(c->gather->plan); i++)
        assert_int_equal(work_add(&list, &target, i, room, &e), 0);
    box = calloc(list.count + 1, sizeof *box);
    packed = calloc(list.count + 1, sizeof *packed);
    assert_true(box && packed);
    for (size_t i = 0; i < list.count; i++) {
        struct box_lines l = box_lines_of(&list.work[i].box);

        box[i] = list.work[i].box;
        assert_true(box_footprint(&l) <= room);
        if (room < LARGE)
            packed[i] = malloc(box_footprint(&l));
        place_box(&box[i], list.work[i].source, packed[i]);
        box_finish(&box[i], &tiles);
    }
    run_tiles(box, list.count, tiles, random_one_in(r, 2) ? 256 : 32, r);
    assert_true(gather_case_equal(c, out.at, room < LARGE ? "body, packed" : "body"));
    for (size_t i = 0; i < list.count; i++)
        free(packed[i]);
    free(packed);
    free(box);
    guarded_free(&out);
}

/* The naive loop, the CPU with and without mappings, the body: all the same. */
static void test_random(void **state)
{
    struct random r = {.state = 0x1234567};
    struct pool *pool;
    struct err e = {0};

    (void)state;
    assert_int_equal(pool_new(2, &pool, &e), 0);
    for (unsigned i = 0; i < ROUNDS; i++) {
        struct gather_case c;

        gather_case_make(&c, &r, i % 20 == 0 ? 1 << 18 : i % 4 == 0 ? 20000 : 600);
        run_host(&c, i % 2 ? pool : NULL, "host");
        run_body(&c, &r, LARGE);
        run_body(&c, &r, ROOM);
        gather_case_release(&c);
        if (i == ROUNDS / 2) /* from now on mappings are touched */
            assert_int_equal(guard_install(), 0);
    }
    pool_free(pool);
}

/* ---- larger shapes, with what only they have ---- */

/* A matrix of bytes in one source, row-major or stored transposed. */
struct matrix {
    uint64_t rows, columns;
    unsigned char *bytes;
    struct source *source;
    uint64_t start[2], size[2];
    int64_t step[2];
    struct gather_piece piece;
    struct shape shape;
};

static void matrix_make(struct matrix *m, uint64_t rows, uint64_t columns,
                        bool transposed)
{
    struct err e = {0};

    *m = (struct matrix){.rows = rows, .columns = columns, .size = {rows, columns}};
    m->bytes = malloc(rows * columns);
    assert_non_null(m->bytes);
    for (uint64_t i = 0; i < rows * columns; i++)
        m->bytes[i] = (unsigned char)(i * 2654435761u >> 13);
    assert_int_equal(
        source_from_memory(m->bytes, rows * columns, true, "matrix", &m->source, &e),
        0);
    m->step[0] = transposed ? 1 : (int64_t)columns;
    m->step[1] = transposed ? (int64_t)rows : 1;
    m->piece =
        (struct gather_piece){.start = m->start, .size = m->size, .step = m->step};
    m->shape = (struct shape){.nd = 2, .dim = {rows, columns}};
}

static struct gather *matrix_gather(const struct matrix *m, const uint64_t *start,
                                    const uint64_t *size)
{
    struct gather *g = NULL;
    struct err e = {0};

    if (gather_new(&(struct gather_request){.shape = &m->shape,
                                            .stored = DTYPE_U8,
                                            .dtype = DTYPE_U8,
                                            .piece = &m->piece,
                                            .pieces = 1,
                                            .source = &m->source,
                                            .sources = 1,
                                            .start = start,
                                            .size = size},
                   &g, &e) < 0)
        fail_msg("%s", e.text);
    return g;
}

static void test_transposed(void **state)
{
    enum { ROWS = 3000, COLUMNS = 1700 };
    struct matrix m;
    struct gather *g;
    unsigned char *out = malloc(ROWS * COLUMNS);
    struct err e = {0};

    (void)state;
    matrix_make(&m, ROWS, COLUMNS, true);
    g = matrix_gather(&m, NULL, NULL);
    assert_int_equal(
        gather_run_host(&(struct gather_job){g, (uintptr_t)out}, 1, NULL, NULL, &e), 0);
    for (uint64_t r = 0; r < ROWS; r++)
        for (uint64_t c = 0; c < COLUMNS; c++)
            if (out[r * COLUMNS + c] != m.bytes[c * ROWS + r])
                fail_msg("row %" PRIu64 ", column %" PRIu64, r, c);
    gather_free(g);
    source_put(m.source);
    free(out);
}

/* ---- what is refused ---- */

struct refusal {
    const char *says;
    int code;
    void (*spoil)(struct gather_request *r, struct gather_piece *piece,
                  struct gather_scale *scale);
};

static uint64_t two_rows[2] = {0, 0}, size_all[2] = {4, 8}, size_half[2] = {2, 8};
static uint64_t far_start[2] = {3, 0}, no_blocks[2] = {0, 0};
static uint64_t size_wide[2] = {4, 9}, tiles[2] = {2, 3};
static int64_t back_step[2] = {-32, 4};
static int64_t long_step[2] = {INT64_MAX / 2, 4}, steps[2] = {32, 4};
static const float one_factor[2] = {1, 1};

static void spoil_none(struct gather_request *r, struct gather_piece *piece,
                       struct gather_scale *scale)
{
    (void)r, (void)piece, (void)scale;
}

static void spoil_hole(struct gather_request *r, struct gather_piece *piece,
                       struct gather_scale *scale)
{
    (void)r, (void)scale;
    piece->size = size_half;
}

static void spoil_twice(struct gather_request *r, struct gather_piece *piece,
                        struct gather_scale *scale)
{
    (void)scale;
    piece[1] = piece[0];
    r->pieces = 2;
}

static void spoil_outside(struct gather_request *r, struct gather_piece *piece,
                          struct gather_scale *scale)
{
    (void)r, (void)scale;
    piece->start = far_start;
}

static void spoil_base(struct gather_request *r, struct gather_piece *piece,
                       struct gather_scale *scale)
{
    (void)r, (void)scale;
    piece->base = 4;
}

static void spoil_steps(struct gather_request *r, struct gather_piece *piece,
                        struct gather_scale *scale)
{
    (void)r, (void)scale;
    piece->step = long_step;
}

static void spoil_source(struct gather_request *r, struct gather_piece *piece,
                         struct gather_scale *scale)
{
    (void)r, (void)scale;
    piece->source = 1;
}

static void spoil_flags(struct gather_request *r, struct gather_piece *piece,
                        struct gather_scale *scale)
{
    (void)r, (void)scale;
    piece->flags = CHUNK_CONJ;
}

static void spoil_part(struct gather_request *r, struct gather_piece *piece,
                       struct gather_scale *scale)
{
    (void)piece, (void)scale;
    r->start = far_start;
    r->size = size_half;
}

static void spoil_cast(struct gather_request *r, struct gather_piece *piece,
                       struct gather_scale *scale)
{
    (void)piece, (void)scale;
    r->dtype = DTYPE_I32;
}

static void spoil_factors(struct gather_request *r, struct gather_piece *piece,
                          struct gather_scale *scale)
{
    (void)piece;
    scale->count = 2;
    r->scale = scale;
}

static void spoil_stored(struct gather_request *r, struct gather_piece *piece,
                         struct gather_scale *scale)
{
    (void)piece, (void)scale;
    r->stored = DTYPE_NONE;
}

static void spoil_dtype(struct gather_request *r, struct gather_piece *piece,
                        struct gather_scale *scale)
{
    (void)piece, (void)scale;
    r->dtype = DTYPE_COUNT;
}

static void spoil_scaled(struct gather_request *r, struct gather_piece *piece,
                         struct gather_scale *scale)
{
    (void)piece;
    r->stored = r->dtype = DTYPE_I32;
    r->scale = scale;
}

static void spoil_start(struct gather_request *r, struct gather_piece *piece,
                        struct gather_scale *scale)
{
    (void)piece, (void)scale;
    r->start = two_rows;
}

static void spoil_size(struct gather_request *r, struct gather_piece *piece,
                       struct gather_scale *scale)
{
    (void)piece, (void)scale;
    r->size = size_half;
}

static void spoil_column(struct gather_request *r, struct gather_piece *piece,
                         struct gather_scale *scale)
{
    (void)piece, (void)scale;
    r->start = two_rows;
    r->size = size_wide;
}

static void spoil_no_source(struct gather_request *r, struct gather_piece *piece,
                            struct gather_scale *scale)
{
    static struct source *const none[1];

    (void)piece, (void)scale;
    r->source = none;
}

static void spoil_before(struct gather_request *r, struct gather_piece *piece,
                         struct gather_scale *scale)
{
    (void)r, (void)scale;
    piece->step = back_step;
}

static void spoil_far_base(struct gather_request *r, struct gather_piece *piece,
                           struct gather_scale *scale)
{
    (void)r, (void)scale;
    piece->base = UINT64_MAX - 63;
}

static void spoil_blocks(struct gather_request *r, struct gather_piece *piece,
                         struct gather_scale *scale)
{
    (void)piece;
    scale->block = tiles;
    r->scale = scale;
}

static void spoil_few_factors(struct gather_request *r, struct gather_piece *piece,
                              struct gather_scale *scale)
{
    (void)piece;
    scale->count = 0;
    r->scale = scale;
}

static const struct refusal refusals[] = {
    {NULL, 0, spoil_none},
    {"hole", EBADMSG, spoil_hole},
    {"overlap", EBADMSG, spoil_twice},
    {"3+4 of dimension 0", EBADMSG, spoil_outside},
    {"outside", EBADMSG, spoil_base},
    {"outside", EBADMSG, spoil_steps},
    {"source 1 of 1", EBADMSG, spoil_source},
    {"flags 0x2", EBADMSG, spoil_flags},
    {"part 3+2 of dimension 0", EINVAL, spoil_part},
    {"a cast of F32 to I32", EINVAL, spoil_cast},
    {"2 factors for 1 blocks", EINVAL, spoil_factors},
    {"0 factors for 1 blocks", EINVAL, spoil_few_factors},
    {"1 factors for 6 blocks", EINVAL, spoil_blocks}, /* 2 rows of 3 columns */
    {"an element type that is not known", EINVAL, spoil_stored},
    {"an element type that is not known", EINVAL, spoil_dtype},
    {"a cast of I32 to I32 with factors", EINVAL, spoil_scaled},
    {"a start and a size, or neither", EINVAL, spoil_start},
    {"a start and a size, or neither", EINVAL, spoil_size},
    {"part 0+9 of dimension 1", EINVAL, spoil_column},
    {"a source that is wanted is not there", EINVAL, spoil_no_source},
    {"outside", EBADMSG, spoil_before},
    {"piece 0 lies outside its source", EBADMSG, spoil_far_base},
};

static void test_refused(void **state)
{
    static unsigned char bytes[4 * 8 * 4];
    const struct shape shape = {.nd = 2, .dim = {4, 8}};
    struct source *src;
    struct err e = {0};

    (void)state;
    assert_int_equal(source_from_memory(bytes, sizeof bytes, false, "shard", &src, &e),
                     0);
    for (size_t i = 0; i < ARRAY_SIZE(refusals); i++) {
        struct gather_piece piece[2] = {
            {.start = two_rows, .size = size_all, .step = steps}};
        struct gather_scale scale = {one_factor, 1, no_blocks};
        struct gather_request r = {.shape = &shape,
                                   .stored = DTYPE_F32,
                                   .dtype = DTYPE_F32,
                                   .piece = piece,
                                   .pieces = 1,
                                   .source = &src,
                                   .sources = 1};
        struct gather *g = NULL;

        e = (struct err){0};
        refusals[i].spoil(&r, piece, &scale);
        assert_int_equal(gather_new(&r, &g, &e), -refusals[i].code);
        if (refusals[i].says && !strstr(e.text, refusals[i].says))
            fail_msg("\"%s\" does not say \"%s\"", e.text, refusals[i].says);
        gather_free(g);
    }
    source_put(src);
}

/* One more dimension with blocks of its own than an element's factor is found by. */
static void test_many_blocks(void **state)
{
    enum { ND = CAST_SCALE_TERMS + 1, N = 1 << ND };
    struct shape shape = {.nd = ND};
    uint64_t start[ND] = {0}, block[ND];
    int64_t step[ND];
    static float bytes[N], factors[N];
    struct source *src;
    struct err e = {0};

    (void)state;
    for (uint32_t k = 0; k < ND; k++) {
        shape.dim[k] = 2;
        block[k] = 1;
        step[k] = (int64_t)sizeof *bytes << (ND - 1 - k);
    }
    assert_int_equal(source_from_memory(bytes, sizeof bytes, false, "shard", &src, &e),
                     0);
    for (unsigned more = 0; more < 2; more++) {
        const struct gather_piece piece = {
            .start = start, .size = shape.dim, .step = step};
        const struct gather_scale scale = {factors, more ? N : N / 2, block};
        const struct gather_request r = {.shape = &shape,
                                         .stored = DTYPE_F32,
                                         .dtype = DTYPE_F32,
                                         .piece = &piece,
                                         .pieces = 1,
                                         .source = &src,
                                         .sources = 1,
                                         .scale = &scale};
        struct gather *g = NULL;

        block[0] = more ? 1 : 2;
        assert_int_equal(gather_new(&r, &g, &e), more ? -EINVAL : 0);
        if (more && !strstr(e.text, "factors of blocks along more than 8 dimensions"))
            fail_msg("%s", e.text);
        gather_free(g);
    }
    source_put(src);
}

/* ---- progress, and sources that fail ---- */

struct seen {
    uint64_t last, stop_at;
    unsigned calls;
};

static int watch(void *user, uint64_t done, uint64_t total)
{
    struct seen *s = user;

    assert_true(done > s->last && done <= total);
    s->last = done;
    s->calls++;
    return s->stop_at && done >= s->stop_at;
}

static void test_watch(void **state)
{
    enum { ROWS = 5 << 10, COLUMNS = 1 << 10 };
    unsigned char *out = malloc(ROWS * COLUMNS);
    struct seen seen = {0}, stopped = {.stop_at = 2 << 20};
    struct matrix m;
    struct gather *g;
    struct gather_job job;
    struct err e = {0};

    (void)state;
    matrix_make(&m, ROWS, COLUMNS, false);
    g = matrix_gather(&m, NULL, NULL);
    job = (struct gather_job){g, (uintptr_t)out};
    assert_int_equal(
        gather_run_host(&job, 1, NULL, &(struct gather_watch){watch, &seen}, &e), 0);
    assert_int_equal(seen.last, ROWS * COLUMNS);
    assert_int_equal(seen.calls, 5);
    assert_int_equal(
        gather_run_host(&job, 1, NULL, &(struct gather_watch){watch, &stopped}, &e),
        -ECANCELED);
    assert_int_equal(stopped.last, 2 << 20);
    gather_free(g);
    source_put(m.source);
    free(out);
}

static void test_stale(void **state)
{
    struct matrix m;
    struct source *good, *bad;
    unsigned char out[64];
    struct gather *g;
    struct err e = {0};

    (void)state;
    matrix_make(&m, 8, 8, false);
    good = m.source;
    assert_int_equal(
        source_with_faults(good, &(struct source_faults){.stale = true}, &bad, &e), 0);
    m.source = bad;
    g = matrix_gather(&m, NULL, NULL);
    assert_int_equal(
        gather_run_host(&(struct gather_job){g, (uintptr_t)out}, 1, NULL, NULL, &e),
        -ESTALE);
    gather_free(g);
    source_put(bad);
    m.source = open_changing(calloc(1, 64), 64); /* while it is read */
    g = matrix_gather(&m, NULL, NULL);
    assert_int_equal(
        gather_run_host(&(struct gather_job){g, (uintptr_t)out}, 1, NULL, NULL, &e),
        -ESTALE);
    gather_free(g);
    source_put(m.source);
    source_put(good);
}

/* Several results of several windows, side by side. */
static void test_many_jobs(void **state)
{
    enum { JOBS = 3, ROWS = 1500, COLUMNS = 1000 };
    struct matrix m[JOBS];
    struct gather_job job[JOBS];
    struct pool *pool;
    struct err e = {0};

    (void)state;
    assert_int_equal(pool_new(2, &pool, &e), 0);
    for (unsigned i = 0; i < JOBS; i++) {
        matrix_make(&m[i], ROWS + i, COLUMNS, false);
        m[i].bytes[0] = (unsigned char)i;
        job[i].gather = matrix_gather(&m[i], NULL, NULL);
        job[i].address = (uintptr_t)calloc(1, (ROWS + i) * COLUMNS);
    }
    assert_int_equal(gather_run_host(job, JOBS, pool, NULL, &e), 0);
    for (unsigned i = 0; i < JOBS; i++) {
        void *out = (void *)(uintptr_t)job[i].address;

        assert_memory_equal(out, m[i].bytes, (ROWS + i) * COLUMNS);
        gather_free((struct gather *)(uintptr_t)job[i].gather);
        source_put(m[i].source);
        free(out);
    }
    pool_free(pool);
}

/* More dimensions than a box has, none of which can be merged: stored in reverse order. */
static void test_many_dims(void **state)
{
    enum { ND = 11, N = 1 << ND };
    struct gather_case c = {.bytes = N * 2, .plan = {.n = 1}};
    struct shape shape = {.nd = ND};
    uint64_t start[ND] = {0};
    int64_t step[ND];
    uint32_t bits[N];
    uint16_t want[N];
    struct random r = {.state = 3};
    struct err e = {0};

    (void)state;
    for (uint32_t k = 0; k < ND; k++) {
        shape.dim[k] = 2;
        step[k] = 4 << k;
    }
    for (uint32_t i = 0; i < N; i++)
        bits[i] = i * 2654435761u;
    for (uint32_t i = 0; i < N; i++) {
        uint32_t from = 0;

        for (uint32_t k = 0; k < ND; k++)
            from |= (i >> (ND - 1 - k) & 1) << k;
        want[i] = (uint16_t)cast_from_f32(bits[from], CAST_BF16);
    }
    assert_int_equal(
        source_from_memory(bits, sizeof bits, false, "shard", &c.source[0], &e), 0);
    c.piece[0] = (struct gather_piece){.start = start, .size = shape.dim, .step = step};
    c.request = (struct gather_request){.shape = &shape,
                                        .stored = DTYPE_F32,
                                        .dtype = DTYPE_BF16,
                                        .piece = c.piece,
                                        .pieces = 1,
                                        .source = c.source,
                                        .sources = 1};
    c.want = (unsigned char *)want;
    assert_int_equal(gather_new(&c.request, &c.gather, &e), 0);
    run_host(&c, NULL, "host");
    run_body(&c, &r, LARGE);
    run_body(&c, &r, ROOM);
    gather_free(c.gather);
    source_put(c.source[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),    cmocka_unit_test(test_transposed),
        cmocka_unit_test(test_refused),   cmocka_unit_test(test_watch),
        cmocka_unit_test(test_stale),     cmocka_unit_test(test_many_jobs),
        cmocka_unit_test(test_many_dims), cmocka_unit_test(test_many_blocks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
