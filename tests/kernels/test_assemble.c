/* SPDX-License-Identifier: MIT */
/*
 * tests/kernels/test_assemble.c - random plans: plan, windows, spans and the CPU executor
 * give the bytes of the simplest loop. test_assemble [SEED [CASES]] repeats a failure.
 */
#include "../unit/unit.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/arena.h"
#include "base/err.h"
#include "gpu/assemble.h"
#include "index/plan.h"
#include "index/spans.h"
#include "random_plan.h"
#include "remote/source.h"

enum { GUARD = 64, GUARD_BYTE = 0xa5, NOISE = 0x5a };

/* One random plan, lowered. */
struct trial {
    uint64_t seed;
    struct random random;
    struct random_plan made;
    struct source source[SOURCES]; /* only their sizes matter */
    struct arena *arena;
    const struct plan *plan;
    struct plan_op *op; /* one a chunk of the plan */
};

/* cmocka's failures leave the test; the seed must be told first. */
#define CHECK(t, holds, ...)                                                           \
    do {                                                                               \
        if (!(holds)) {                                                                \
            fprintf(stderr, "seed %" PRIu64 ": %s\n", (t)->seed, #holds);              \
            fail_msg(__VA_ARGS__);                                                     \
        }                                                                              \
    } while (0)

/* The box as a chunk; its number travels in `offset`. */
static struct chunk chunk_of(const struct trial *t, size_t i)
{
    const struct box *b = &t->made.box[i];

    return (struct chunk){.file = b->source,
                          .flags = b->place.flags,
                          .offset = i,
                          .start = b->start,
                          .size = b->size,
                          .step = b->place.step};
}

static const struct box *box_of(const struct trial *t, size_t chunk)
{
    return &t->made.box[plan_chunk(t->plan, chunk, NULL)->offset];
}

static struct plan_builder *begin(struct trial *t)
{
    struct plan_builder *b;
    struct err e = {0};

    CHECK(t, plan_begin(t->arena, &t->made.units, t->made.unit, &b, &e) == 0, "%s",
          e.text);
    return b;
}

static void build(struct trial *t)
{
    struct plan_builder *b = begin(t);
    struct err e = {0};

    for (size_t i = 0; i < t->made.n; i++) {
        struct chunk c = chunk_of(t, i);

        CHECK(t, plan_add(b, &c, &e) == 0, "%s", e.text);
    }
    CHECK(t, plan_finish(b, &t->plan, &e) == 0, "%s", e.text);
    CHECK(t, plan_size(t->plan) == t->made.bytes, "size");
}

static void lower(struct trial *t)
{
    size_t n = plan_chunks(t->plan);
    struct err e = {0};

    t->op = arena_array(t->arena, n + 1, sizeof *t->op);
    CHECK(t, t->op, "memory");
    for (size_t i = 0; i < n; i++) {
        struct chunk_place place = box_of(t, i)->place;

        place.src = &t->source[box_of(t, i)->source];
        CHECK(t,
              plan_lower(t->plan, plan_chunk(t->plan, i, NULL), &place,
                         t->made.component, t->arena, &t->op[i], &e) == 0,
              "%s", e.text);
    }
}

static void trial_begin(struct trial *t, uint64_t seed, uint64_t most)
{
    *t = (struct trial){.seed = seed, .random.state = seed * 0x9e3779b97f4a7c15 + 1};
    random_plan_make(&t->made, &t->random, most);
    for (unsigned s = 0; s < SOURCES; s++)
        t->source[s].size = t->made.source_size[s];
    t->arena = arena_new(SIZE_MAX);
    CHECK(t, t->arena, "memory");
}

static void trial_end(struct trial *t)
{
    arena_free(t->arena);
    random_plan_release(&t->made);
}

/* The runs of a window, by way of the chunks that it touches. */
struct cut {
    struct trial *t;
    uint64_t off, len;
    struct run_list runs;
    size_t last;            /* chunk found before, SIZE_MAX: none */
    unsigned char *touched; /* by number of the box */
};

static int cut_chunk(void *user, size_t i)
{
    struct cut *c = user;
    const struct box *b = box_of(c->t, i);
    struct err e = {0};
    size_t before = c->runs.count;

    CHECK(c->t, c->last == SIZE_MAX || i > c->last, "chunks out of order");
    c->last = i;
    c->touched[b - c->t->made.box] = 1;
    CHECK(c->t, plan_op_cut(&c->t->op[i], c->off, c->len, b->source, &c->runs, &e) == 0,
          "%s", e.text);
    CHECK(c->t, c->runs.count > before, "chunk %zu does not touch the window", i);
    return 0;
}

/* What plan_touched must find. */
static void check_touched(const struct cut *c)
{
    const struct random_plan *m = &c->t->made;
    CLEANUP_FREE unsigned char *must = calloc(1, m->n);

    assert_non_null(must);
    for (uint64_t i = c->off; i < c->off + c->len; i++)
        must[m->owner[i / m->unit]] = 1;
    CHECK(c->t, memcmp(must, c->touched, m->n) == 0, "window %" PRIu64 "+%" PRIu64,
          c->off, c->len);
}

/* Exactly the bytes of the window, each from within its source. */
static void check_runs(const struct cut *c)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < c->runs.count; i++) {
        const struct plan_run *r = &c->runs.run[i];

        CHECK(c->t, r->len && r->count, "empty run");
        sum += r->len * r->count;
    }
    CHECK(c->t, sum == c->len, "runs write %" PRIu64 " of %" PRIu64 " bytes", sum,
          c->len);
}

static void cut_window(struct trial *t, uint64_t off, uint64_t len, struct cut *c)
{
    *c = (struct cut){.t = t, .off = off, .len = len, .last = SIZE_MAX};
    c->touched = calloc(1, t->made.n);
    assert_non_null(c->touched);
    CHECK(t, plan_touched(t->plan, off, len, cut_chunk, c) == 0, "stopped");
    check_touched(c);
    check_runs(c);
}

static void cut_release(struct cut *c)
{
    run_list_release(&c->runs);
    free(c->touched);
}

static struct assemble_run *runs_on(const struct cut *c, unsigned char *const *source)
{
    struct assemble_run *out = calloc(c->runs.count + 1, sizeof *out);

    assert_non_null(out);
    for (size_t i = 0; i < c->runs.count; i++) {
        const struct plan_run *r = &c->runs.run[i];

        out[i] = (struct assemble_run){.piece = source[r->tag] + r->src,
                                       .at = r->dst,
                                       .len = r->len,
                                       .count = r->count,
                                       .piece_step = r->src_step,
                                       .at_step = r->dst_step,
                                       .flags = r->flags,
                                       .component = r->component};
    }
    return out;
}

static void check_guards(const struct trial *t, const unsigned char *guarded,
                         uint64_t len)
{
    for (uint64_t i = 0; i < GUARD; i++)
        CHECK(t, guarded[i] == GUARD_BYTE && guarded[GUARD + len + i] == GUARD_BYTE,
              "guard byte %" PRIu64, i);
}

static void check_gather(const struct cut *c)
{
    CLEANUP_FREE struct assemble_run *run = runs_on(c, c->t->made.source);
    CLEANUP_FREE unsigned char *guarded = malloc(c->len + 2 * GUARD);
    const unsigned char *want = c->t->made.tensor + c->off;
    struct err e = {0};

    assert_non_null(guarded);
    memset(guarded, GUARD_BYTE, c->len + 2 * GUARD);
    CHECK(c->t,
          assembler_cpu.gather(&assembler_cpu, run, c->runs.count, guarded + GUARD,
                               c->len, &e) == 0,
          "%s", e.text);
    check_guards(c->t, guarded, c->len);
    for (uint64_t i = 0; i < c->len; i++)
        CHECK(c->t, guarded[GUARD + i] == want[i],
              "window %" PRIu64 "+%" PRIu64 ", byte %" PRIu64 ": %02x, not %02x",
              c->off, c->len, i, guarded[GUARD + i], want[i]);
}

static bool copy_is_covered(const struct span_list *l, uint32_t tag, uint64_t off,
                            uint64_t len)
{
    size_t i = spans_find(l, tag, off);

    return i < l->count && l->span[i].tag == tag && l->span[i].off <= off &&
           off + len <= l->span[i].off + l->span[i].len;
}

/* Does any box read the same bytes for several elements? */
static bool repeats(const struct trial *t)
{
    for (size_t i = 0; i < t->made.n; i++) {
        for (uint32_t k = 0; k < t->made.units.nd; k++) {
            if (!t->made.box[i].place.step[k])
                return true;
        }
    }
    return false;
}

/* Spans hold all runs, rise without overlap, and are joined as far as the rules say. */
static void check_spans(const struct cut *c, uint64_t gap, uint64_t max)
{
    CLEANUP(span_list_release) struct span_list l = {0};
    uint64_t longest = 0;
    struct err e = {0};

    CHECK(c->t, spans_cover(c->runs.run, c->runs.count, gap, max, &l, &e) == 0, "%s",
          e.text);
    for (size_t i = 0; i < c->runs.count; i++) {
        const struct plan_run *r = &c->runs.run[i];

        for (uint64_t k = 0; k < r->count; k++)
            CHECK(
                c->t,
                copy_is_covered(&l, r->tag, r->src + k * (uint64_t)r->src_step, r->len),
                "run %zu, copy %" PRIu64, i, k);
        longest = MAX(longest, r->len);
    }
    for (size_t i = 1; i < l.count; i++) {
        const struct span *a = &l.span[i - 1], *b = &l.span[i];

        CHECK(c->t, a->tag < b->tag || (a->tag == b->tag && a->off + a->len <= b->off),
              "span %zu", i);
        CHECK(c->t, max || a->tag < b->tag || b->off - (a->off + a->len) > gap,
              "spans %zu and the one before are not joined", i);
    }
    for (size_t i = 0; max && !repeats(c->t) && i < l.count; i++)
        CHECK(c->t, l.span[i].len <= MAX(max, longest), "span %zu is too long", i);
}

static void check_window(struct trial *t, uint64_t off, uint64_t len)
{
    struct cut c;

    plan_widen(t->plan, &off, &len);
    cut_window(t, off, len, &c);
    check_gather(&c);
    check_spans(&c, random_below(&t->random, 200), 0);
    check_spans(&c, random_one_in(&t->random, 2) ? 0 : random_below(&t->random, 200),
                1 + random_below(&t->random, 500));
    cut_release(&c);
}

/* Plain copies may be cut at any byte. */
static bool any_flags(const struct trial *t)
{
    for (size_t i = 0; i < t->made.n; i++) {
        if (t->made.box[i].place.flags)
            return true;
    }
    return false;
}

static void check_bytewise_window(struct trial *t, uint64_t off, uint64_t len)
{
    struct cut c;

    cut_window(t, off, len, &c);
    check_gather(&c);
    cut_release(&c);
}

/* Scatters the tensor, window by window, into sources full of noise. */
static void check_scatter(struct trial *t)
{
    unsigned char *source[SOURCES];
    uint64_t step = 1 + random_below(&t->random, t->made.bytes);
    struct err e = {0};

    step += t->made.unit - 1 - (step - 1) % t->made.unit;
    for (unsigned s = 0; s < SOURCES; s++) {
        source[s] = malloc(t->made.source_size[s] + !t->made.source_size[s]);
        assert_non_null(source[s]);
        memset(source[s], NOISE, t->made.source_size[s]);
    }
    for (uint64_t off = 0; off < t->made.bytes; off += step) {
        struct cut c;

        cut_window(t, off, MIN(step, t->made.bytes - off), &c);
        CLEANUP_FREE struct assemble_run *run = runs_on(&c, source);
        CHECK(t,
              assembler_cpu.scatter(&assembler_cpu, run, c.runs.count,
                                    t->made.tensor + off, c.len, &e) == 0,
              "%s", e.text);
        cut_release(&c);
    }
    for (unsigned s = 0; s < SOURCES; s++) {
        for (uint64_t i = 0; i < t->made.source_size[s]; i++)
            CHECK(t,
                  source[s][i] == (t->made.used[s][i] ? t->made.source[s][i] : NOISE),
                  "source %u, byte %" PRIu64, s, i);
        free(source[s]);
    }
}

/* One byte less than an op needs in its source is an error. */
static void check_short_source(struct trial *t)
{
    size_t n = plan_chunks(t->plan), i;
    struct chunk_place place;
    struct source cut = {0};
    struct plan_op op;
    struct err e = {0};
    uint64_t high = 0;

    if (!n)
        return;
    i = random_below(&t->random, n);
    place = box_of(t, i)->place;
    high = place.base + t->made.unit;
    for (uint32_t k = 0; k < t->made.units.nd; k++) {
        if (place.step[k] > 0)
            high += (box_of(t, i)->size[k] - 1) * (uint64_t)place.step[k];
    }
    place.src = &cut;
    cut.size = high;
    CHECK(t,
          plan_lower(t->plan, plan_chunk(t->plan, i, NULL), &place, t->made.component,
                     t->arena, &op, &e) == 0,
          "%s", e.text);
    cut.size = high - 1;
    CHECK(t,
          plan_lower(t->plan, plan_chunk(t->plan, i, NULL), &place, t->made.component,
                     t->arena, &op, &e) == -EBADMSG,
          "one byte too few");
}

static void check_windows(struct trial *t, int windows)
{
    uint64_t bytes = t->made.bytes;
    bool flags = any_flags(t);

    check_window(t, 0, bytes);
    if (!bytes)
        return;
    for (int i = 0; i < windows; i++) {
        uint64_t off = random_below(&t->random, bytes);
        uint64_t len = random_one_in(&t->random, 2)
                           ? random_below(&t->random, MIN(bytes - off + 1, 100))
                           : random_below(&t->random, bytes - off + 1);

        check_window(t, off, len);
        if (!flags)
            check_bytewise_window(t, off, len);
    }
    check_window(t, random_below(&t->random, bytes), 1);
    check_window(t, random_below(&t->random, bytes), 0);
    check_scatter(t);
}

static void run_trial(uint64_t seed, uint64_t most, int windows)
{
    struct trial t;

    trial_begin(&t, seed, most);
    build(&t);
    lower(&t);
    check_windows(&t, windows);
    check_short_source(&t);
    trial_end(&t);
}

/* What plan_finish says with box `drop` left out and box `change` as `instead`. */
static int finish_with(struct trial *t, size_t drop, size_t change,
                       const struct chunk *instead, struct err *e)
{
    struct plan_builder *b = begin(t);
    const struct plan *plan;

    for (size_t i = 0; i < t->made.n; i++) {
        struct chunk c = chunk_of(t, i);
        int ret;

        if (i == drop)
            continue;
        ret = plan_add(b, i == change ? instead : &c, e);
        if (ret < 0)
            return ret;
    }
    return plan_finish(b, &plan, e);
}

static void check_hole(struct trial *t, size_t i)
{
    struct shape first = {.nd = t->made.units.nd};
    struct buf want = {0};
    struct err e = {0};

    memcpy(first.dim, t->made.box[i].start, first.nd * sizeof first.dim[0]);
    buf_adds(&want, "hole at ");
    shape_format(&first, &want);
    buf_adds(&want, ": no chunk holds it");
    CHECK(t, finish_with(t, i, SIZE_MAX, NULL, &e) == -EBADMSG, "a hole passed");
    CHECK(t, strcmp(e.text, want.data) == 0, "%s, not %s", e.text, want.data);
    buf_release(&want);
}

/* Box i grown or moved by one in dimension d. */
static void check_moved(struct trial *t, size_t i, uint32_t d, bool grow)
{
    uint64_t start[SHAPE_MAX_DIMS], size[SHAPE_MAX_DIMS];
    struct chunk c = chunk_of(t, i);
    bool edge = c.start[d] + c.size[d] == t->made.units.dim[d];
    struct err e = {0};

    memcpy(start, c.start, sizeof start);
    memcpy(size, c.size, sizeof size);
    *(grow ? &size[d] : &start[d]) += 1;
    c.start = start;
    c.size = size;
    CHECK(t, finish_with(t, SIZE_MAX, i, &c, &e) == -EBADMSG, "a wrong box passed");
    CHECK(t, strstr(e.text, edge ? "lies outside the tensor" : "overlap"), "%s",
          e.text);
}

static void check_twice(struct trial *t, size_t i)
{
    struct plan_builder *b = begin(t);
    const struct plan *plan;
    struct err e = {0};

    for (size_t k = 0; k <= t->made.n; k++) {
        struct chunk c = chunk_of(t, k == t->made.n ? i : k);

        CHECK(t, plan_add(b, &c, &e) == 0, "%s", e.text);
    }
    CHECK(t, plan_finish(b, &plan, &e) == -EBADMSG, "a chunk passed twice");
    CHECK(t, strstr(e.text, "overlap"), "%s", e.text);
}

static bool box_is_empty(const struct trial *t, size_t i)
{
    for (uint32_t k = 0; k < t->made.units.nd; k++) {
        if (!t->made.box[i].size[k])
            return true;
    }
    return false;
}

static void run_mutations(uint64_t seed)
{
    struct trial t;

    trial_begin(&t, seed, 2000);
    for (size_t i = 0; i < t.made.n; i++) {
        if (box_is_empty(&t, i))
            continue;
        check_hole(&t, i);
        check_twice(&t, i);
        for (uint32_t d = 0; d < t.made.units.nd; d++) {
            check_moved(&t, i, d, true);
            check_moved(&t, i, d, false);
        }
    }
    trial_end(&t);
}

struct options {
    uint64_t seed, cases;
};

/* The same cases each time, and some that nobody has seen yet. */
static void for_cases(void **state, uint64_t fixed, uint64_t fresh,
                      void (*run)(uint64_t seed))
{
    const struct options *o = *state;

    if (o->cases) {
        for (uint64_t i = 0; i < o->cases; i++)
            run(o->seed + i);
        return;
    }
    for (uint64_t i = 0; i < fixed; i++)
        run(i);
    for (uint64_t i = 0; i < fresh; i++)
        run(o->seed + i);
}

static void small(uint64_t seed)
{
    run_trial(seed, 600, 6);
}

/* Windows of many blocks, runs of many copies. */
static void large(uint64_t seed)
{
    run_trial(seed, 100000, 2);
}

static void test_small_plans(void **state)
{
    for_cases(state, 6000, 3000, small);
}

static void test_large_plans(void **state)
{
    for_cases(state, 200, 100, large);
}

static void test_damage_is_found(void **state)
{
    for_cases(state, 200, 100, run_mutations);
}

/* A refused run, behind a good one: nothing is written, nothing is read. */
static void check_refused(struct assemble_run bad)
{
    unsigned char piece[64], window[32], noise[64];
    struct assemble_run run[2] = {{.piece = piece, .len = 4, .count = 1}, bad};
    struct err e = {0};

    memset(noise, NOISE, sizeof noise);
    memset(piece, 1, sizeof piece);
    memset(window, NOISE, sizeof window);
    run[1].piece = piece;
    assert_int_equal(
        assembler_cpu.gather(&assembler_cpu, run, 2, window, sizeof window, &e),
        -EINVAL);
    assert_memory_equal(window, noise, sizeof window);
    memset(piece, NOISE, sizeof piece);
    memset(window, 1, sizeof window);
    assert_int_equal(
        assembler_cpu.scatter(&assembler_cpu, run, 2, window, sizeof window, &e),
        -EINVAL);
    assert_memory_equal(piece, noise, sizeof piece);
}

static void test_runs_outside_the_window_are_refused(void **state)
{
    (void)state;
    check_refused((struct assemble_run){.at = 29, .len = 4, .count = 1});
    check_refused((struct assemble_run){.at = 33, .len = 1, .count = 1});
    check_refused((struct assemble_run){.at = UINT64_MAX, .len = 4, .count = 1});
    check_refused((struct assemble_run){.len = UINT64_MAX, .count = 1});
    check_refused((struct assemble_run){.len = 4, .count = 5, .at_step = 8});
    check_refused((struct assemble_run){.len = 4, .count = 2, .at_step = UINT64_MAX});
    check_refused((struct assemble_run){
        .len = 4, .count = ((uint64_t)1 << 62) + 1, .at_step = 4});
    check_refused((struct assemble_run){.len = 4, .count = 2, .at_step = 3});
    check_refused((struct assemble_run){.len = 4, .count = 2});
}

static void test_broken_components_are_refused(void **state)
{
    (void)state;
    check_refused(
        (struct assemble_run){.len = 6, .count = 1, .flags = 1, .component = 4});
    check_refused(
        (struct assemble_run){.len = 4, .count = 1, .flags = 2, .component = 4});
    check_refused(
        (struct assemble_run){.len = 6, .count = 1, .flags = 4, .component = 3});
    check_refused((struct assemble_run){.len = 4, .count = 1, .flags = 4});
    check_refused(
        (struct assemble_run){.len = 4, .count = 1, .flags = 8, .component = 4});
}

static void test_runs_up_to_the_edge_pass(void **state)
{
    unsigned char piece[32], window[32];
    struct assemble_run run[] = {
        {.piece = piece, .len = 4, .count = 4, .piece_step = 4, .at_step = 8},
        {.piece = piece + 28,
         .at = 4,
         .len = 4,
         .count = 4,
         .piece_step = -4,
         .at_step = 8},
        {.piece = piece, .at = UINT64_MAX, .len = 0, .count = 3, .at_step = 0},
    };
    static const unsigned char want[32] = {0,  1,  2,  3,  28, 29, 30, 31, 4,  5,  6,
                                           7,  24, 25, 26, 27, 8,  9,  10, 11, 20, 21,
                                           22, 23, 12, 13, 14, 15, 16, 17, 18, 19};
    struct err e = {0};

    (void)state;
    for (unsigned i = 0; i < sizeof piece; i++)
        piece[i] = (unsigned char)i;
    assert_ok(assembler_cpu.gather(&assembler_cpu, run, 3, window, sizeof window, &e),
              &e);
    assert_memory_equal(window, want, sizeof want);
}

int main(int argc, char **argv)
{
    static struct options options;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(test_small_plans, &options),
        cmocka_unit_test_prestate(test_large_plans, &options),
        cmocka_unit_test_prestate(test_damage_is_found, &options),
        cmocka_unit_test(test_runs_outside_the_window_are_refused),
        cmocka_unit_test(test_broken_components_are_refused),
        cmocka_unit_test(test_runs_up_to_the_edge_pass),
    };

    options.seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL) << 16;
    if (argc > 1)
        options.cases = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
