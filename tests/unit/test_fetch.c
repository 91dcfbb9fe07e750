/* SPDX-License-Identifier: MIT */
/* tests/unit/test_fetch.c - random runs, read from a file in every way, against a plain loop. */
#include "remote_tmp.h"

#include "base/err.h"
#include "base/guard.h"
#include "gpu/fetch.h"
#include "remote/source.h"

enum { FILE_SIZE = 3 << 20, WINDOW = 2 << 20, UNTOUCHED = 0xee, MAX_RUNS = 40 };

struct fixture {
    struct source *src;
    unsigned char *bytes, *want, *got;
    uint64_t seed;
};

static uint64_t next(struct fixture *x, uint64_t below)
{
    x->seed = x->seed * 6364136223846793005u + 1442695040888963407u;
    return (x->seed >> 33) % below;
}

static void begin(struct fixture *x, const struct tmp *t, uint64_t seed)
{
    struct err e = {0};
    int fd;

    *x = (struct fixture){.bytes = malloc(FILE_SIZE),
                          .want = malloc(WINDOW),
                          .got = malloc(WINDOW),
                          .seed = seed};
    assert_true(x->bytes && x->want && x->got);
    for (size_t i = 0; i < FILE_SIZE; i++)
        x->bytes[i] = (unsigned char)next(x, 256);
    tmp_bytes(t, "shard", x->bytes, FILE_SIZE);
    fd = open(tmp_at(t, "shard"), O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_ok(source_from_fd(fd, "shard", &x->src, &e), &e);
}

static void end(struct fixture *x)
{
    source_put(x->src);
    free(x->bytes);
    free(x->want);
    free(x->got);
}

/*
 * Runs as windows of tensors have them: many go on where the last one ended, in rows of one
 * length; some jump, overlap others, leave bytes out between rows, or go backwards.
 */
static size_t make_runs(struct fixture *x, struct plan_run *run)
{
    static const uint64_t lengths[] = {1, 64, 1000, 4096, 5000, 8192, 65536, 100000};
    uint64_t src = next(x, FILE_SIZE), dst = 0;
    size_t n = 0;

    while (n < MAX_RUNS) {
        struct plan_run r = {.len = lengths[next(x, ARRAY_SIZE(lengths))],
                             .count = 1 + next(x, 9)};

        if (next(x, 4) == 0)
            src = next(x, FILE_SIZE);
        r.src_step = (int64_t)(r.len + (next(x, 3) ? 0 : next(x, 3000)));
        if (next(x, 8) == 0)
            r.src_step = -r.src_step;
        r.src = r.src_step < 0 ? src + (r.count - 1) * (uint64_t)-r.src_step : src;
        r.dst = dst;
        r.dst_step = r.len + next(x, 5000);
        dst += r.count * r.dst_step;
        src += (r.count - 1) * (uint64_t)(r.src_step < 0 ? -r.src_step : r.src_step) +
               r.len;
        if (dst > WINDOW)
            break;
        if (src > FILE_SIZE) {
            src = 0;
            continue;
        }
        run[n++] = r;
    }
    return n;
}

static void read_plainly(const struct fixture *x, const struct plan_run *run, size_t n)
{
    memset(x->want, UNTOUCHED, WINDOW);
    for (size_t i = 0; i < n; i++)
        for (uint64_t k = 0; k < run[i].count; k++)
            memcpy(x->want + run[i].dst + k * run[i].dst_step,
                   x->bytes + run[i].src + k * (uint64_t)run[i].src_step, run[i].len);
}

static void check(const struct fixture *x, struct plan_run *run, size_t n, bool once)
{
    const struct fetch_sources sources = {.src = &x->src, .count = 1, .once = once};
    const struct run_list runs = {.run = run, .count = n};
    struct err e = {0};

    memset(x->got, UNTOUCHED, WINDOW);
    assert_ok(fetch_window(&runs, &sources, NULL, x->got, WINDOW, &e), &e);
    for (size_t at = 0; at < WINDOW; at++)
        if (x->got[at] != x->want[at])
            fail_msg("seed state %#" PRIx64 ", once %d: byte %zu is %#x, want %#x",
                     x->seed, once, at, x->got[at], x->want[at]);
}

/* `once` reads; else a resident file is copied from its mapping, if somebody guards. */
static void check_random(void **state)
{
    struct plan_run run[MAX_RUNS];
    struct fixture x;

    begin(&x, *state, 11);
    for (int i = 0; i < 150; i++) {
        size_t n = make_runs(&x, run);

        read_plainly(&x, run, n);
        check(&x, run, n, false);
        check(&x, run, n, true);
    }
    end(&x);
}

static void test_without_a_guard_all_is_read(void **state)
{
    check_random(state);
}

static void test_with_a_guard(void **state)
{
    assert_int_equal(guard_install(), 0);
    check_random(state);
}

static const struct {
    const char *name;
    struct plan_run run[4];
    size_t n;
} cases[] = {
    {"rows of a window, cut at both ends",
     {{.src = 100, .dst = 0, .len = 6000, .count = 1},
      {.src = 6100,
       .dst = 12000,
       .len = 8192,
       .count = 5,
       .src_step = 8192,
       .dst_step = 16384},
      {.src = 47060, .dst = 98304, .len = 4500, .count = 1}},
     3},
    {"rows of which a later run wants one again",
     {{.src = 0,
       .dst = 0,
       .len = 8192,
       .count = 4,
       .src_step = 8192,
       .dst_step = 16384},
      {.src = 8192, .dst = 8192, .len = 8192, .count = 1}},
     2},
    {"a run longer than a span, and rows behind it",
     {{.src = 0, .dst = 0, .len = 1100000, .count = 1},
      {.src = 1100000,
       .dst = 1200000,
       .len = 8192,
       .count = 2,
       .src_step = 8192,
       .dst_step = 9000}},
     2},
    {"rows that are cut into two spans, of which another run is one",
     {{.src = 0,
       .dst = 0,
       .len = 4096,
       .count = 300,
       .src_step = 4096,
       .dst_step = 4096},
      {.src = 1048576,
       .dst = 1228800,
       .len = 4096,
       .count = 44,
       .src_step = 4096,
       .dst_step = 4096}},
     2},
    {"the same rows twice",
     {{.src = 4096,
       .dst = 0,
       .len = 4096,
       .count = 3,
       .src_step = 4096,
       .dst_step = 8192},
      {.src = 4096,
       .dst = 4096,
       .len = 4096,
       .count = 3,
       .src_step = 4096,
       .dst_step = 8192}},
     2},
};

static void test_cases(void **state)
{
    struct plan_run run[4];
    struct fixture x;

    begin(&x, *state, 5);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        print_message("# %s\n", cases[i].name);
        memcpy(run, cases[i].run, sizeof run);
        read_plainly(&x, run, cases[i].n);
        check(&x, run, cases[i].n, false);
        check(&x, run, cases[i].n, true);
    }
    end(&x);
}

/* The words name the file and the byte, whichever way it was read. */
static void test_a_cut_file(void **state)
{
    struct plan_run run = {
        .src = 0, .len = 8192, .count = 8, .src_step = 8192, .dst_step = 9000};
    const struct run_list runs = {.run = &run, .count = 1};
    struct err e = {0};
    struct fixture x;

    begin(&x, *state, 5);
    assert_int_equal(truncate(tmp_at(*state, "shard"), 20000), 0);
    assert_int_equal(
        fetch_window(&runs,
                     &(struct fetch_sources){.src = &x.src, .count = 1, .once = true},
                     NULL, x.got, WINDOW, &e),
        -EBADMSG);
    assert_has(e.text, "shard: file ends at byte 20000");
    end(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        tmp_test(test_without_a_guard_all_is_read),
        tmp_test(test_cases),
        tmp_test(test_a_cut_file),
        tmp_test(test_with_a_guard),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
