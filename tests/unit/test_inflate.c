/* SPDX-License-Identifier: MIT */
/* tests/unit/test_inflate.c - deflate data in pieces of any size, damaged and cut, by both libraries. */
#include "unit.h"

#include <errno.h>
#include <stdlib.h>
#include <zlib.h>

#include "base/err.h"
#include "base/inflate.h"
#include "guarded.h"

enum { PLAIN = 300000, PACKED = PLAIN + 4096, BEHIND = 40, KINDS = 4, SMALL = 700 };

static uint32_t next(uint32_t *seed)
{
    *seed = *seed * 1664525 + 1013904223;
    return *seed >> 8;
}

/* Equal bytes; any bytes; words that come again; halves of floats, as weights have them. */
static void fill(unsigned char *data, size_t n, unsigned kind, uint32_t seed)
{
    for (size_t i = 0; i < n; i++)
        switch (kind) {
        case 0:
            data[i] = 7;
            break;
        case 1:
            data[i] = (unsigned char)next(&seed);
            break;
        case 2:
            data[i] = (unsigned char)(i > 99 && next(&seed) % 64 ? data[i - 99]
                                                                 : next(&seed));
            break;
        default:
            data[i] =
                (unsigned char)(i % 4 < 2 ? 0 : next(&seed) % (i % 4 == 2 ? 256 : 5));
        }
}

static size_t pack(const unsigned char *data, size_t n, int level, int strategy,
                   unsigned char *out)
{
    z_stream z = {0};

    assert_int_equal(deflateInit2(&z, level, Z_DEFLATED, -MAX_WBITS, 8, strategy),
                     Z_OK);
    z.next_in = (unsigned char *)(uintptr_t)data;
    z.avail_in = (uInt)n;
    z.next_out = out;
    z.avail_out = PACKED;
    assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
    n = z.total_out;
    deflateEnd(&z);
    return n;
}

/*
 * Inflates in[0..n) in pieces of at most `most` bytes at either end: what came out, and
 * whether it ended. -EBADMSG, or 0.
 */
static int inflate_pieces(enum inflate_by by, const unsigned char *in, size_t n,
                          size_t most, uint32_t seed, unsigned char *out, size_t cap,
                          size_t *got, uint64_t *length, bool *ended)
{
    struct guarded from = guarded_new(most), to = guarded_new(most);
    CLEANUP(inflate_freep) struct inflate *s = NULL;
    struct err e = {0};
    size_t at = 0;
    int rc = 0;

    assert_ok(inflate_new(by, &s, &e), &e);
    *got = 0;
    *ended = false;
    while (rc == 0 && !*ended) {
        size_t take = MIN(n - at, (size_t)next(&seed) % most + 1);
        size_t put = MIN(cap - *got, (size_t)next(&seed) % most + 1);
        unsigned char *src = from.data + most - take, *dst = to.data + most - put;

        memcpy(src, in + at, take);
        rc = inflate_some(s, src, &take, dst, &put, ended, &e);
        if (rc < 0 || (!*ended && take == 0 && put == 0))
            break;
        memcpy(out + *got, dst, put);
        at += take;
        *got += put;
    }
    *length = inflate_length(s);
    guarded_free(&from);
    guarded_free(&to);
    return rc;
}

static void check_whole(enum inflate_by by, const unsigned char *plain, size_t n,
                        const unsigned char *packed, size_t len, size_t most)
{
    CLEANUP_FREE unsigned char *out = malloc(n + 1);
    uint64_t length;
    size_t got;
    bool ended;

    assert_int_equal(inflate_pieces(by, packed, len + BEHIND, most, (uint32_t)most, out,
                                    n + 1, &got, &length, &ended),
                     0);
    assert_true(ended);
    assert_int_equal(got, n);
    assert_int_equal(length, len);
    assert_memory_equal(out, plain, n);
}

static void test_pieces(void **state)
{
    static const struct {
        int level, strategy;
    } how[] = {{0, 0},    {1, 0}, {6, 0}, {9, 0}, {6, Z_FIXED}, {6, Z_HUFFMAN_ONLY},
               {6, Z_RLE}};
    static const size_t most[] = {1, 7, 300, 65536, 1 << 20};
    CLEANUP_FREE unsigned char *plain = malloc(PLAIN);
    CLEANUP_FREE unsigned char *packed = calloc(PACKED + BEHIND, 1);

    (void)state;
    for (unsigned kind = 0; kind < KINDS; kind++)
        for (size_t i = 0; i < ARRAY_SIZE(how); i++)
            for (size_t k = 0; k < ARRAY_SIZE(most); k++) {
                size_t n = most[k] < 300 ? PLAIN / 30 : PLAIN, len;

                fill(plain, n, kind, (uint32_t)i);
                len = pack(plain, n, how[i].level, how[i].strategy, packed);
                check_whole(INFLATE_BEST, plain, n, packed, len, most[k]);
                check_whole(INFLATE_ZLIB, plain, n, packed, len, most[k]);
            }
}

static void test_nothing(void **state)
{
    static const unsigned char empty[2 + BEHIND] = {3, 0};

    (void)state;
    check_whole(INFLATE_BEST, empty, 0, empty, 2, 100);
    check_whole(INFLATE_ZLIB, empty, 0, empty, 2, 100);
}

/* What zlib takes for deflate data gives the same bytes by the other. */
static void compare(const unsigned char *packed, size_t len, size_t most)
{
    unsigned char a[4 * SMALL], b[4 * SMALL];
    size_t got_a, got_b;
    uint64_t length_a, length_b;
    bool ended_a, ended_b;
    int rc_a = inflate_pieces(INFLATE_ZLIB, packed, len, most, 1, a, sizeof a, &got_a,
                              &length_a, &ended_a);
    int rc_b = inflate_pieces(INFLATE_BEST, packed, len, most, 1, b, sizeof b, &got_b,
                              &length_b, &ended_b);

    assert_true(rc_a == 0 || rc_a == -EBADMSG);
    assert_true(rc_b == 0 || rc_b == -EBADMSG);
    if (rc_a < 0 || !ended_a)
        return;
    assert_int_equal(rc_b, 0);
    assert_true(ended_b);
    assert_int_equal(got_b, got_a);
    assert_int_equal(length_b, length_a);
    assert_memory_equal(b, a, got_a);
}

static void test_damage(void **state)
{
    unsigned char plain[SMALL], packed[PACKED > 4096 ? 4096 : PACKED];
    CLEANUP_FREE unsigned char *room = malloc(PACKED);

    (void)state;
    for (unsigned kind = 0; kind < KINDS; kind++)
        for (int level = 0; level < 9; level += 4) {
            size_t len;

            fill(plain, SMALL, kind, 3);
            len = pack(plain, SMALL, level, 0, room);
            memcpy(packed, room, len);
            for (size_t cut = 0; cut < len; cut++)
                compare(packed, cut, 4096);
            for (size_t bit = 0; bit < 8 * len; bit++) {
                packed[bit / 8] ^= (unsigned char)(1 << bit % 8);
                compare(packed, len, bit % 2 ? 4096 : 50);
                packed[bit / 8] ^= (unsigned char)(1 << bit % 8);
            }
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_nothing),
        cmocka_unit_test(test_damage),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
