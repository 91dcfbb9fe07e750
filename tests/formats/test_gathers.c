/* SPDX-License-Identifier: MIT */
/* tests/formats/test_gathers.c - every tensor of fixtures by both executors of gathers. */
#include "fixture.h"

#include <stdio.h>
#include <string.h>

#include "base/err.h"
#include "base/guard.h"
#include "base/pool.h"
#include "gpu/cast.h"
#include "gpu/device.h"
#include "gpu/reader.h"
#include "gpu/tensor.h"
#include "index/formats/format.h"
#include "remote/open_files.h"
#include "tests/unit/unit.h"

enum { FIXTURES_MAX = 256, SKIPPED = 77 };

/* What all tests share. */
struct both {
    struct device *device;
    struct pool *pool;
    uint64_t random;
};

struct state {
    struct both *both;
    char *path;
};

static uint64_t below(struct both *b, uint64_t n)
{
    b->random ^= b->random << 13;
    b->random ^= b->random >> 7;
    b->random ^= b->random << 17;
    return n ? b->random % n : 0;
}

/* The box [start, start + size) of row-major elements of `unit` bytes. */
static unsigned char *take_part(const unsigned char *whole, const struct shape *units,
                                unsigned unit, const uint64_t *start,
                                const uint64_t *size, uint64_t *elements)
{
    unsigned char *out;

    *elements = 1;
    for (uint32_t k = 0; k < units->nd; k++)
        *elements *= size[k];
    out = malloc(*elements * unit + 1);
    assert_non_null(out);
    for (uint64_t n = 0; n < *elements; n++) {
        uint64_t rest = n, from = 0, stride = 1;

        for (uint32_t k = units->nd; k-- > 0; stride *= units->dim[k]) {
            from += (start[k] + rest % size[k]) * stride;
            rest /= size[k];
        }
        memcpy(out + n * unit, whole + from * unit, unit);
    }
    return out;
}

static void run_on_host(const struct both *b, const struct gather *g,
                        const unsigned char *want, const char *key)
{
    unsigned char *out = malloc(gather_size(g) + 1);
    const struct gather_job job = {g, (uintptr_t)out};
    struct err e = {0};

    assert_non_null(out);
    assert_ok(gather_run_host(&job, 1, b->pool, NULL, &e), &e);
    if (memcmp(out, want, gather_size(g)) != 0)
        fail_msg("%s: the CPU's bytes differ", key);
    free(out);
}

static void run_on_device(const struct both *b, const struct gather *g,
                          const unsigned char *want, const char *key)
{
    unsigned char *out = malloc(gather_size(g) + 1);
    struct gather_job job = {.gather = g};
    struct err e = {0};

    assert_non_null(out);
    assert_ok(device_alloc(b->device, gather_size(g), &job.address, &e), &e);
    assert_ok(device_load(b->device, &job, 1, NULL, NULL, &e), &e);
    assert_ok(device_copy_out(b->device, out, job.address, gather_size(g), &e), &e);
    assert_ok(device_free(b->device, job.address, &e), &e);
    if (memcmp(out, want, gather_size(g)) != 0)
        fail_msg("%s: the device's bytes differ", key);
    free(out);
}

/* A part of the tensor, as `dtype`, against its bytes as a reader of the file has them. */
static void check_part(struct both *b, struct tensor *t, const struct buf *whole,
                       const struct gather_part *part)
{
    const struct tensor_info *info = tensor_info_of(t);
    struct shape units;
    unsigned char *stored, *want;
    uint64_t elements;
    struct gather *g = NULL;
    struct err e = {0};

    assert_ok(shape_units(&info->shape, info->dtype, &units, &e), &e);
    stored = take_part((const unsigned char *)whole->data, &units,
                       dtype_unit(info->dtype), part->start, part->size, &elements);
    want = malloc(elements * 16 + 16);
    assert_non_null(want);
    if (part->dtype == info->dtype)
        memcpy(want, stored, elements * dtype_unit(info->dtype));
    else
        cast_elements(info->dtype, part->dtype, stored, want, elements);
    assert_ok(gather_new_tensor(t, part, &g, &e), &e);
    assert_int_equal(gather_size(g), elements * dtype_unit(part->dtype));
    run_on_host(b, g, want, info->key);
    run_on_device(b, g, want, info->key);
    gather_free(g);
    free(stored);
    free(want);
}

static void check_tensor_ways(struct both *b, struct tensor *t, const struct buf *whole)
{
    static const enum dtype to[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F8_E4M3};
    const struct tensor_info *info = tensor_info_of(t);
    uint64_t start[SHAPE_MAX_DIMS] = {0}, size[SHAPE_MAX_DIMS];
    struct gather_part part = {.start = start, .size = size, .dtype = info->dtype};
    struct shape units;
    struct err e = {0};

    assert_ok(shape_units(&info->shape, info->dtype, &units, &e), &e);
    memcpy(size, units.dim, sizeof size);
    check_part(b, t, whole, &part);
    for (unsigned i = 0; i < 3; i++) {
        for (uint32_t k = 0; k < units.nd; k++) {
            start[k] = below(b, units.dim[k]);
            size[k] = units.dim[k] ? 1 + below(b, units.dim[k] - start[k]) : 0;
        }
        part.dtype = cast_possible(info->dtype, to[i]) ? to[i] : info->dtype;
        check_part(b, t, whole, &part);
    }
}

static void test_all_tensors(void **state)
{
    const struct state *s = *state;
    struct opened o;
    struct reader_env env;
    struct err e = {0};
    unsigned checked = 0;

    open_checkpoint(s->path, &o);
    env = (struct reader_env){.catalog = o.w.catalog,
                              .decoded = o.w.decoded,
                              .codec = format_codec,
                              .pool = s->both->pool};
    assert_ok(open_files_new(o.w.store, 64, &env.files, &e), &e);
    for (size_t i = 0; i < o.count; i++) {
        CLEANUP(buf_release) struct buf whole = {0};
        struct tensor *t = NULL;

        if (o.t[i].fault)
            continue;
        assert_ok(read_tensor(&o.w, o.info.id, &o.t[i], &whole, &e), &e);
        assert_ok(tensor_open(&env, o.info.id, o.t[i].ord, &t, &e), &e);
        check_tensor_ways(s->both, t, &whole);
        tensor_put(t);
        checked++;
    }
    assert_true(checked > 0);
    open_files_free(env.files);
    close_checkpoint(&o);
}

/* DATA, the driver's path or "real", then FORMAT/NAME of each fixture. */
int main(int argc, char **argv)
{
    static struct CMUnitTest tests[FIXTURES_MAX];
    static struct state states[FIXTURES_MAX];
    static struct both both = {.random = 88172645463325252u};
    struct device_options options = {.slot_bytes = 256 << 10};
    struct err e = {0};
    size_t n = 0;
    int ret;

    if (argc < 4 || guard_install() < 0 || pool_new(2, &both.pool, &e) < 0)
        return 2;
    if (strcmp(argv[2], "real") != 0)
        options.driver = argv[2];
    if (device_open(&options, &both.device, &e) < 0) {
        printf("1..0 # SKIP %s\n", e.text);
        return options.driver ? 2 : SKIPPED;
    }
    for (int i = 3; i < argc && n < FIXTURES_MAX; i++, n++) {
        states[n].both = &both;
        if (asprintf(&states[n].path, "%s/%s", argv[1], argv[i]) < 0)
            return 2;
        tests[n] = (struct CMUnitTest){.name = argv[i],
                                       .test_func = test_all_tensors,
                                       .initial_state = &states[n]};
    }
    ret = _cmocka_run_group_tests("gathers", tests, n, NULL, NULL);
    device_close(both.device);
    pool_free(both.pool);
    for (size_t i = 0; i < n; i++)
        free(states[i].path);
    return ret;
}
