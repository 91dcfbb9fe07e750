/* SPDX-License-Identifier: MIT */
/* tests/kernels/test_device.c - the pipeline: test_device DRIVER|real [ROUNDS]. */
#include "gpu/device.h"

#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/err.h"
#include "driver/standin.h"
#include "gather_case.h"
#include "remote/source.h"

enum { SKIPPED = 77, FAULTS_MAX = 2000 };

/* Which driver the tests are about: a stand-in's path, or NULL for the real one. */
struct fixture {
    const char *driver;
    unsigned rounds;
    standin_live_fn *live; /* NULL: the real one */
    standin_misuse_fn *misuse;
};

static struct device *open_device(const struct fixture *f, unsigned threads,
                                  uint64_t slot)
{
    struct device *d = NULL;
    struct err e = {0};

    if (device_open(&(struct device_options){.driver = f->driver,
                                             .threads = threads,
                                             .slot_bytes = slot},
                    &d, &e) < 0)
        fail_msg("%s", e.text);
    return d;
}

static void expect_quiet(const struct fixture *f)
{
    if (!f->live)
        return;
    assert_int_equal(f->live(), 0);
    assert_int_equal(f->misuse(), 0);
}

/* ---- random gathers ---- */

static void load_case(struct device *d, const struct gather_case *c)
{
    unsigned char *out = malloc(c->bytes + 1);
    struct gather_job job = {.gather = c->gather};
    struct err e = {0};

    assert_non_null(out);
    if (device_alloc(d, c->bytes, &job.address, &e) < 0 ||
        device_load(d, &job, 1, NULL, NULL, &e) < 0 ||
        device_copy_out(d, out, job.address, c->bytes, &e) < 0 ||
        device_free(d, job.address, &e) < 0)
        fail_msg("%s", e.text);
    assert_true(gather_case_equal(c, out, "device"));
    free(out);
}

/* Slots of 64 KiB, so that boxes are cut, and of 4 MiB, so that they are not. */
static void test_random(void **state)
{
    const struct fixture *f = *state;
    struct random r = {.state = 0x7654321};
    struct device *small = open_device(f, 3, 64 << 10), *large = open_device(f, 1, 0);

    for (unsigned i = 0; i < f->rounds; i++) {
        struct gather_case c;

        gather_case_make(&c, &r, i % 10 == 0 ? 1 << 18 : i % 3 == 0 ? 20000 : 600);
        load_case(i % 8 == 7 ? large : small, &c);
        gather_case_release(&c);
    }
    device_close(small);
    device_close(large);
    expect_quiet(f);
}

/* Several results in one pipeline. */
static void test_many_jobs(void **state)
{
    enum { JOBS = 40 };
    const struct fixture *f = *state;
    static struct gather_case c[JOBS];
    struct gather_job job[JOBS];
    struct random r = {.state = 99};
    struct device *d = open_device(f, 4, 64 << 10);
    unsigned char *out;
    struct err e = {0};

    for (unsigned i = 0; i < JOBS; i++) {
        gather_case_make(&c[i], &r, 1 << (i % 16));
        job[i].gather = c[i].gather;
        assert_int_equal(device_alloc(d, c[i].bytes, &job[i].address, &e), 0);
    }
    assert_int_equal(device_load(d, job, JOBS, NULL, NULL, &e), 0);
    for (unsigned i = 0; i < JOBS; i++) {
        out = malloc(c[i].bytes + 1);
        assert_int_equal(device_copy_out(d, out, job[i].address, c[i].bytes, &e), 0);
        assert_true(gather_case_equal(&c[i], out, "one of many"));
        assert_int_equal(device_free(d, job[i].address, &e), 0);
        gather_case_release(&c[i]);
        free(out);
    }
    device_close(d);
    expect_quiet(f);
}

/* ---- what travels how ---- */

/* Rows of bytes in shards side by side, each of `width` columns. */
struct shards {
    struct source *source[4];
    struct gather_piece piece[4];
    uint64_t start[4][2], size[2], rows, width;
    int64_t step[2];
    struct shape shape;
};

static void shards_make(struct shards *s, uint64_t rows, uint64_t width, unsigned n)
{
    struct err e = {0};

    *s = (struct shards){.size = {rows, width}, .rows = rows, .width = width};
    s->step[0] = (int64_t)width;
    s->step[1] = 1;
    s->shape = (struct shape){.nd = 2, .dim = {rows, n * width}};
    for (unsigned i = 0; i < n; i++) {
        unsigned char *bytes = malloc(rows * width);

        assert_non_null(bytes);
        for (uint64_t k = 0; k < rows * width; k++)
            bytes[k] = (unsigned char)((k * n + i) * 2654435761u >> 11);
        assert_int_equal(
            source_from_memory(bytes, rows * width, true, "shard", &s->source[i], &e),
            0);
        s->start[i][1] = i * width;
        s->piece[i] = (struct gather_piece){
            .start = s->start[i], .size = s->size, .step = s->step, .source = i};
    }
}

static void shards_release(struct shards *s)
{
    for (unsigned i = 0; i < ARRAY_SIZE(s->source); i++)
        source_put(s->source[i]);
}

/* Loads it, checks it against the CPU, and tells what was done. */
static struct device_stats load_shards(struct device *d, const struct shards *s,
                                       unsigned n, const uint64_t *start,
                                       const uint64_t *size)
{
    struct gather *g = NULL;
    struct device_stats stats;
    struct gather_job job, host;
    unsigned char *out, *want;
    struct err e = {0};

    if (gather_new(&(struct gather_request){.shape = &s->shape,
                                            .stored = DTYPE_U8,
                                            .dtype = DTYPE_U8,
                                            .piece = s->piece,
                                            .pieces = n,
                                            .source = s->source,
                                            .sources = n,
                                            .start = start,
                                            .size = size},
                   &g, &e) < 0)
        fail_msg("%s", e.text);
    out = malloc(gather_size(g));
    want = malloc(gather_size(g));
    job = (struct gather_job){.gather = g};
    host = (struct gather_job){g, (uintptr_t)want};
    if (device_alloc(d, gather_size(g), &job.address, &e) < 0 ||
        device_load(d, &job, 1, NULL, &stats, &e) < 0 ||
        device_copy_out(d, out, job.address, gather_size(g), &e) < 0 ||
        device_free(d, job.address, &e) < 0 ||
        gather_run_host(&host, 1, NULL, NULL, &e) < 0)
        fail_msg("%s", e.text);
    assert_memory_equal(out, want, gather_size(g));
    gather_free(g);
    free(out);
    free(want);
    return stats;
}

/* One piece: copied to its place, in slots, with no kernel. */
static void test_contiguous(void **state)
{
    const struct fixture *f = *state;
    struct device *d = open_device(f, 2, 1 << 20);
    struct device_stats stats;
    struct shards s;

    shards_make(&s, 5000, 1000, 1);
    stats = load_shards(d, &s, 1, NULL, NULL);
    assert_int_equal(stats.launches, 0);
    assert_int_equal(stats.read_bytes, 5000000);
    assert_int_equal(stats.sent_bytes, 5000000);
    assert_in_range(stats.direct, 5, 7);
    shards_release(&s);
    device_close(d);
    expect_quiet(f);
}

/* Columns: each shard is read once, in order, and the kernel puts rows together. */
static void test_columns(void **state)
{
    const struct fixture *f = *state;
    struct device *d = open_device(f, 2, 1 << 20);
    struct device_stats stats;
    struct shards s;

    shards_make(&s, 5000, 250, 4);
    stats = load_shards(d, &s, 4, NULL, NULL);
    assert_int_equal(stats.direct, 0);
    assert_int_equal(stats.read_bytes, 5000000);
    assert_in_range(stats.launches, 5, 9);
    shards_release(&s);
    device_close(d);
    expect_quiet(f);
}

/* A part of few columns of long rows: what lies between is neither read nor sent. */
static void test_sparse_part(void **state)
{
    const struct fixture *f = *state;
    const uint64_t start[2] = {0, 4096}, size[2] = {100, 1024};
    struct device *d = open_device(f, 2, 1 << 20);
    struct device_stats stats;
    struct shards s;

    shards_make(&s, 100, 64 << 10, 1);
    stats = load_shards(d, &s, 1, start, size);
    assert_int_equal(stats.read_bytes, 100 * 1024);
    assert_in_range(stats.sent_bytes, 100 * 1024, 100 * 1024 + 4096);
    shards_release(&s);

    shards_make(&s, 100, 16 << 10, 1); /* read with what is between, sent without */
    stats = load_shards(d, &s, 1, start, size);
    assert_in_range(stats.read_bytes, 100 * 1024, 100 * 16 << 10);
    assert_in_range(stats.sent_bytes, 100 * 1024, 100 * 1024 + 4096);
    shards_release(&s);
    device_close(d);
    expect_quiet(f);
}

/* Two rows far apart in one file, and two that are near: read apart, and in one. */
static void test_far_apart(void **state)
{
    const struct fixture *f = *state;
    struct device *d = open_device(f, 1, 1 << 20);
    struct shards s;

    for (int near = 0; near < 2; near++) {
        shards_make(&s, 200, 1000, 1);
        s.piece[1] = s.piece[0];
        s.size[0] = 1;
        s.start[1][0] = 1;
        s.piece[1].start = s.start[1];
        s.piece[1].base = near ? 9000 : 150000;
        s.shape.dim[0] = 2;
        assert_int_equal(load_shards(d, &s, 2, NULL, NULL).read_bytes,
                         near ? 10000 : 2000);
        shards_release(&s);
    }
    device_close(d);
    expect_quiet(f);
}

/* More boxes than are held at once: several rounds. Every byte is a piece, backwards. */
static void test_many_pieces(void **state)
{
    enum { PIECES = 150000 };
    const struct fixture *f = *state;
    static uint64_t start[PIECES];
    const uint64_t one = 1;
    const int64_t step = 1;
    const struct shape shape = {.nd = 1, .dim = {PIECES}};
    struct gather_piece *piece = calloc(PIECES, sizeof *piece);
    unsigned char *bytes = malloc(PIECES), *out = malloc(PIECES);
    struct device *d = open_device(f, 4, 64 << 10);
    struct device_stats stats;
    struct gather_job job;
    struct source *src;
    struct gather *g;
    struct err e = {0};

    assert_true(piece && bytes && out);
    for (unsigned i = 0; i < PIECES; i++) {
        start[i] = i;
        bytes[i] = (unsigned char)(i * 2654435761u >> 11);
        piece[i] = (struct gather_piece){
            .start = &start[i], .size = &one, .step = &step, .base = PIECES - 1 - i};
    }
    assert_int_equal(source_from_memory(bytes, PIECES, false, "bytes", &src, &e), 0);
    if (gather_new(&(struct gather_request){.shape = &shape,
                                            .stored = DTYPE_U8,
                                            .dtype = DTYPE_U8,
                                            .piece = piece,
                                            .pieces = PIECES,
                                            .source = &src,
                                            .sources = 1},
                   &g, &e) < 0)
        fail_msg("%s", e.text);
    job = (struct gather_job){.gather = g};
    assert_int_equal(device_alloc(d, PIECES, &job.address, &e), 0);
    assert_int_equal(device_load(d, &job, 1, NULL, &stats, &e), 0);
    assert_int_equal(device_copy_out(d, out, job.address, PIECES, &e), 0);
    for (unsigned i = 0; i < PIECES; i++)
        assert_int_equal(out[i], bytes[PIECES - 1 - i]);
    assert_int_equal(stats.read_bytes, PIECES);
    assert_int_equal(device_free(d, job.address, &e), 0);
    gather_free(g);
    source_put(src);
    device_close(d);
    free(piece);
    free(bytes);
    free(out);
    expect_quiet(f);
}

/* ---- what goes wrong ---- */

static int stop_at_once(void *user, uint64_t done, uint64_t total)
{
    unsigned *calls = user;

    (void)done, (void)total;
    ++*calls;
    return 1;
}

/* After an error nothing is under way, and the device works as before. */
static void test_stopped(void **state)
{
    const struct fixture *f = *state;
    struct device *d = open_device(f, 3, 64 << 10);
    struct source *good, *bad;
    struct gather_case c;
    struct gather_job job;
    struct random r = {.state = 7};
    unsigned calls = 0;
    struct err e = {0};

    do {
        gather_case_make(&c, &r, 1 << 18);
        if (c.bytes < 1 << 20)
            gather_case_release(&c);
    } while (c.bytes < 1 << 20);
    job = (struct gather_job){.gather = c.gather};
    assert_int_equal(device_alloc(d, c.bytes, &job.address, &e), 0);
    assert_int_equal(
        device_load(d, &job, 1, &(struct gather_watch){stop_at_once, &calls}, NULL, &e),
        -ECANCELED);
    assert_true(calls >= 1);
    for (unsigned n = 1; n < 8; n++) { /* the n-th read of the first source fails */
        struct gather *g;

        good = c.source[0];
        assert_int_equal(
            source_with_faults(good, &(struct source_faults){.fail_at = n, .code = EIO},
                               &bad, &e),
            0);
        c.source[0] = bad;
        assert_int_equal(gather_new(&c.request, &g, &e), 0);
        e = (struct err){0};
        job.gather = g;
        if (device_load(d, &job, 1, NULL, NULL, &e) < 0)
            assert_int_equal(e.code, EIO);
        else
            assert_true(n > 1);
        gather_free(g);
        c.source[0] = good;
        source_put(bad);
    }
    assert_int_equal(device_free(d, job.address, &e), 0);
    load_case(d, &c);
    gather_case_release(&c);
    device_close(d);
    expect_quiet(f);
}

/* A shard that changes while it is read gives no result. */
static void test_stale(void **state)
{
    const struct fixture *f = *state;
    const uint64_t start[1] = {0}, size[1] = {1 << 20};
    const int64_t step[1] = {1};
    const struct gather_piece piece = {.start = start, .size = size, .step = step};
    const struct shape shape = {.nd = 1, .dim = {1 << 20}};
    struct device *d = open_device(f, 2, 256 << 10);
    struct source *src = open_changing(calloc(1, 1 << 20), 1 << 20);
    struct gather *g;
    struct gather_job job;
    struct err e = {0};

    assert_int_equal(gather_new(&(struct gather_request){.shape = &shape,
                                                         .stored = DTYPE_U8,
                                                         .dtype = DTYPE_U8,
                                                         .piece = &piece,
                                                         .pieces = 1,
                                                         .source = &src,
                                                         .sources = 1},
                                &g, &e),
                     0);
    job = (struct gather_job){.gather = g};
    assert_int_equal(device_alloc(d, 1 << 20, &job.address, &e), 0);
    assert_int_equal(device_load(d, &job, 1, NULL, NULL, &e), -ESTALE);
    assert_int_equal(device_free(d, job.address, &e), 0);
    gather_free(g);
    source_put(src);
    device_close(d);
    expect_quiet(f);
}

/* All of a session, with a call of the driver that fails somewhere in it. */
static int session(const struct fixture *f, const struct gather_case *c,
                   unsigned char *out, struct err *e)
{
    CLEANUP(device_closep) struct device *d = NULL;
    struct gather_job job = {.gather = c->gather};
    int ret = device_open(&(struct device_options){.driver = f->driver,
                                                   .threads = 2,
                                                   .slot_bytes = 64 << 10},
                          &d, e);

    if (ret == 0)
        ret = device_alloc(d, c->bytes, &job.address, e);
    if (ret == 0)
        ret = device_load(d, &job, 1, NULL, NULL, e);
    if (ret == 0)
        ret = device_copy_out(d, out, job.address, c->bytes, e);
    unsetenv("STANDIN_FAIL"); /* who cannot make the context current cannot free */
    if (job.address)
        assert_int_equal(device_free(d, job.address, e), 0);
    return ret;
}

static void test_faults(void **state)
{
    const struct fixture *f = *state;
    struct gather_case c;
    struct random r = {.state = 5};
    unsigned failed = 0, n;
    unsigned char *out;

    if (!f->live)
        skip();
    do {
        gather_case_make(&c, &r, 1 << 18);
        if (!c.request.scale || c.bytes < 1 << 19)
            gather_case_release(&c);
    } while (!c.request.scale || c.bytes < 1 << 19);
    out = malloc(c.bytes);
    for (n = 1; n < FAULTS_MAX; n++) {
        struct err e = {0};
        char which[32];
        int ret;

        snprintf(which, sizeof which, "any:%u", n);
        setenv("STANDIN_FAIL", which, 1);
        ret = session(f, &c, out, &e);
        if (f->live() || f->misuse())
            fail_msg("call %u fails: %ld left, %ld misuses: %s", n, f->live(),
                     f->misuse(), e.text);
        if (ret == 0)
            assert_true(gather_case_equal(&c, out, "after a fault"));
        else
            failed++;
        if (ret == 0 && n > failed + 20) /* beyond all calls of a session */
            break;
    }
    assert_in_range(failed, 100, FAULTS_MAX - 1);
    print_message("# %u calls of the driver failed, one at a time\n", failed);
    gather_case_release(&c);
    free(out);
}

static void test_no_device(void **state)
{
    const struct fixture *f = *state;
    struct device *d = NULL;
    int count = -1;
    struct err e = {0};

    assert_int_equal(
        device_open(&(struct device_options){.driver = "/nowhere/libcuda.so.1"}, &d,
                    &e),
        -ENODEV);
    assert_non_null(strstr(e.text, "no CUDA driver"));
    assert_int_equal(device_count(f->driver, &count, &e), 0);
    assert_true(count >= 1);
    assert_int_equal(
        device_open(&(struct device_options){.driver = f->driver, .ordinal = count}, &d,
                    &e),
        -ENODEV);
    assert_non_null(strstr(e.text, "CUDA device"));
    assert_non_null(strstr(e.text, "counted from 0"));
    if (!f->live)
        return;
    setenv("STANDIN_DEVICES", "0", 1);
    assert_int_equal(device_count(f->driver, &count, &e), -ENODEV);
    assert_int_equal(count, 0);
    unsetenv("STANDIN_DEVICES");
    expect_quiet(f);
}

static void test_described(void **state)
{
    const struct fixture *f = *state;
    struct device *d = open_device(f, 1, 0);
    struct device_info info;
    uint64_t left, total;
    struct err e = {0};

    assert_int_equal(device_describe(f->driver, 0, &info, &e), 0);
    assert_memory_equal(&info, device_info_of(d), sizeof info);
    assert_true(info.name[0] && info.major > 0 && info.driver >= 11000);
    assert_int_equal(device_memory(d, &left, &total, &e), 0);
    assert_true(left > 0 && left <= total && total <= info.memory);
    device_close(d);
    expect_quiet(f);
}

/* ---- memory that is shared ---- */

static void test_blocks(void **state)
{
    const struct fixture *f = *state;
    struct device *d = open_device(f, 1, 0);
    struct device_block ours, theirs;
    char text[16] = "";
    struct err e = {0};
    int fd = -1;

    if (device_block_new(d, 3 << 20, &ours, &e) < 0)
        fail_msg("%s", e.text);
    assert_true(ours.size >= 3 << 20);
    assert_int_equal(device_block_export(d, &ours, &fd, &e), 0);
    assert_int_equal(device_block_import(d, fd, ours.size, &theirs, &e), 0);
    close(fd);
    assert_true(theirs.address != ours.address);
    assert_int_equal(
        device_copy_in(d, ours.address + ours.size - 16, "seen by both", 13, &e), 0);
    device_block_release(d, &ours); /* who has it, keeps it */
    assert_int_equal(
        device_copy_out(d, text, theirs.address + theirs.size - 16, 13, &e), 0);
    assert_string_equal(text, "seen by both");
    device_block_release(d, &theirs);
    device_close(d);
    expect_quiet(f);
}

static void test_block_faults(void **state)
{
    const struct fixture *f = *state;
    struct device *d;
    struct device_block b;
    struct err e = {0};
    long before;
    unsigned n;

    if (!f->live)
        skip();
    d = open_device(f, 1, 0);
    before = f->live();
    for (n = 1; n < 100; n++) {
        char which[32];
        int ret;

        snprintf(which, sizeof which, "any:%u", n);
        setenv("STANDIN_FAIL", which, 1);
        ret = device_block_new(d, 1, &b, &e);
        unsetenv("STANDIN_FAIL");
        if (ret == 0)
            break;
        assert_int_equal(ret, -ENOMEM);
        assert_int_equal(f->live(), before);
    }
    assert_in_range(n, 7, 20);
    device_block_release(d, &b);
    setenv("STANDIN_NO_SHARING", "1", 1);
    assert_int_equal(device_block_new(d, 1, &b, &e), -ENOTSUP);
    unsetenv("STANDIN_NO_SHARING");
    setenv("STANDIN_MEMORY", "1048576", 1);
    assert_int_equal(device_block_new(d, 2 << 20, &b, &e), -ENOMEM);
    unsetenv("STANDIN_MEMORY");
    device_close(d);
    expect_quiet(f);
}

static bool find_standin(struct fixture *f, const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *live = library ? dlsym(library, "standin_live") : NULL;
    void *misuse = library ? dlsym(library, "standin_misuse") : NULL;

    f->driver = path;
    memcpy(&f->live, &live, sizeof live);
    memcpy(&f->misuse, &misuse, sizeof misuse);
    return live && misuse;
}

int main(int argc, char **argv)
{
    static struct fixture f = {.rounds = 200};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(test_random, &f),
        cmocka_unit_test_prestate(test_many_jobs, &f),
        cmocka_unit_test_prestate(test_contiguous, &f),
        cmocka_unit_test_prestate(test_columns, &f),
        cmocka_unit_test_prestate(test_sparse_part, &f),
        cmocka_unit_test_prestate(test_far_apart, &f),
        cmocka_unit_test_prestate(test_many_pieces, &f),
        cmocka_unit_test_prestate(test_stopped, &f),
        cmocka_unit_test_prestate(test_stale, &f),
        cmocka_unit_test_prestate(test_faults, &f),
        cmocka_unit_test_prestate(test_no_device, &f),
        cmocka_unit_test_prestate(test_described, &f),
        cmocka_unit_test_prestate(test_blocks, &f),
        cmocka_unit_test_prestate(test_block_faults, &f),
    };
    struct device *d;
    struct err e = {0};

    if (argc < 2)
        return 2;
    if (argc > 2)
        f.rounds = (unsigned)strtoul(argv[2], NULL, 10);
    if (strcmp(argv[1], "real") != 0 && !find_standin(&f, argv[1]))
        return 2;
    if (!f.live && device_open(&(struct device_options){0}, &d, &e) < 0) {
        printf("1..0 # SKIP %s\n", e.text);
        return SKIPPED;
    }
    if (!f.live)
        device_close(d);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
