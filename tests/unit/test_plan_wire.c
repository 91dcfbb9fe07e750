/* SPDX-License-Identifier: MIT */
/* tests/unit/test_plan_wire.c - plans of other processes: what is taken, what is refused. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"
#include "base/fsutil.h"
#include "gpu/plan_wire.h"
#include "index/chunk.h"
#include "unit.h"

static int parse_file(const char *name, struct arena *a, struct plan_wire *out,
                      struct err *e)
{
    CLEANUP(buf_release) struct buf data = {0};
    char path[512];
    struct stat st;
    CLEANUP_FD int fd = -1;

    snprintf(path, sizeof path, "%s/%s", CORPUS, name);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0 && fstat(fd, &st) == 0);
    assert_ok(
        read_exact(fd, buf_grow(&data, (size_t)st.st_size), (size_t)st.st_size, 0, e),
        e);
    return wire_parse(a, data.data, data.len, out, e);
}

static void test_a_good_one(void **state)
{
    struct arena *a = arena_new(1 << 20);
    struct plan_wire p;
    struct err e = {0};

    (void)state;
    assert_ok(parse_file("good", a, &p, &e), &e);
    assert_string_equal(p.key, "w");
    assert_int_equal(p.key_len, 1);
    assert_int_equal(p.dtype, DTYPE_F32);
    assert_int_equal(p.stored, DTYPE_F32);
    assert_int_equal(p.shape.nd, 2);
    assert_int_equal(p.shape.dim[0], 4);
    assert_int_equal(p.shape.dim[1], 2);
    assert_int_equal(p.bytes, 32);
    assert_false(p.through);
    assert_int_equal(p.sources, 1);
    assert_string_equal(p.source[0].path, "/a");
    assert_int_equal(p.source[0].size, 100);
    assert_int_equal(p.source[0].mtime_ns, 7);
    assert_int_equal(p.pieces, 2);
    assert_int_equal(p.piece[1].base, 64);
    assert_int_equal(p.piece[1].flags, CHUNK_SWAP);
    assert_int_equal(p.piece[1].start[0], 2);
    assert_int_equal(p.piece[1].size[0], 2);
    assert_int_equal(p.piece[1].step[0], -8);
    assert_int_equal(p.piece[1].step[1], 4);
    arena_free(a);
}

static void test_fills_casts_and_packed_types(void **state)
{
    struct arena *a = arena_new(1 << 20);
    struct plan_wire p;
    struct err e = {0};

    (void)state;
    assert_ok(parse_file("fill", a, &p, &e), &e);
    assert_true(p.piece[0].fill);
    assert_memory_equal(p.piece[0].value, "\0\0\x80?", 4);
    assert_ok(parse_file("cast", a, &p, &e), &e);
    assert_int_equal(p.dtype, DTYPE_BF16);
    assert_int_equal(p.bytes, 16);
    assert_ok(parse_file("packed", a, &p, &e), &e);
    assert_int_equal(p.shape.dim[1], 4);
    assert_int_equal(p.units.dim[1], 2);
    assert_ok(parse_file("through", a, &p, &e), &e);
    assert_true(p.through);
    arena_free(a);
}

static void test_refusals(void **state)
{
    static const struct {
        const char *file, *words;
    } bad[] = {
        {"bad_magic", "not a plan of a version that is known"},
        {"bad_length", "bytes of 10"},
        {"bad_cast", "a cast of F32 to I8"},
        {"bad_dtype", "an unknown element type"},
        {"bad_bytes", "a tensor of 32 bytes says it has 33"},
        {"bad_dims", "pieces of 3 dimensions, the tensor has 2"},
        {"bad_shape", "an impossible shape"},
        {"bad_source", "plan, piece 0: source 1 of 1"},
        {"bad_kind", "an unknown kind of piece"},
        {"bad_flags", "an unknown kind of piece"},
        {"bad_path", "source 0: a path that is not absolute"},
        {"nul_path", "source 0: a path that is not absolute"},
        {"many_pieces", "cannot hold"},
        {"many_sources", "cannot hold"},
        {"through_with_pieces", "unknown flags"},
        {"tail", "8 bytes behind the last piece"},
        {"cut", "bytes of"},
        {"cut_head", "bytes of"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        struct arena *a = arena_new(1 << 20);
        struct plan_wire p;
        struct err e = {0};

        assert_int_equal(parse_file(bad[i].file, a, &p, &e), -EBADMSG);
        assert_has(e.text, "plan");
        assert_has(e.text, bad[i].words);
        arena_free(a);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_good_one),
        cmocka_unit_test(test_fills_casts_and_packed_types),
        cmocka_unit_test(test_refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
