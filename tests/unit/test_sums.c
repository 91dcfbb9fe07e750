/* SPDX-License-Identifier: MIT */
/* tests/unit/test_sums.c - checksums of pieces, against zlib's of the whole. */
#include "save/sums.h"

#include <stdlib.h>
#include <zlib.h>

#include "base/crc32.h"
#include "index/layout.h"
#include "tests/unit/unit.h"

enum { SIZE = 5000 };

static unsigned char data[SIZE];

static int fill(void **state)
{
    uint64_t x = 88172645463325252u;

    (void)state;
    for (size_t i = 0; i < SIZE; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        data[i] = (unsigned char)(x >> 56);
    }
    return 0;
}

/* Every length and every alignment to where folding sets in and well behind. */
static void check_crc(crc32_fn *crc)
{
    for (size_t at = 0; at < 33; at++) {
        for (size_t len = 0; len < 900; len++) {
            assert_int_equal(crc(0, data + at, len), crc32_z(0, data + at, len));
            assert_int_equal(crc(0x12345678, data + at, len),
                             crc32_z(0x12345678, data + at, len));
        }
    }
    assert_int_equal(crc(0, data, SIZE), crc32(0, data, SIZE));
    assert_int_equal(crc(0, "123456789", 9), 0xcbf43926);
}

static void test_crc(void **state)
{
    (void)state;
    check_crc(crc32_zip);
    for (unsigned i = 0; i < CRC32_WAYS; i++)
        if (crc32_way(i))
            check_crc(crc32_way(i));
}

/* A literal, a box in three windows that come in another order, a literal, a box. */
static void test_pieces(void **state)
{
    const struct layout_piece piece[] = {
        {.kind = LAYOUT_LITERAL, .at = 0, .len = 100, .data = data},
        {.kind = LAYOUT_BOX, .at = 100, .len = 3000},
        {.kind = LAYOUT_LITERAL, .at = 3100, .len = 7, .data = data + 3100},
        {.kind = LAYOUT_BOX, .at = 3107, .len = 1},
        {.kind = LAYOUT_CRC32, .at = 3108, .len = 4},
    };
    const struct layout_file_info f = {.piece = piece, .pieces = 5};
    struct sums s;
    uint32_t crc;

    (void)state;
    sums_init(&s);
    sums_add(&s, 7, 2100, data + 2100, 1000);
    sums_add(&s, 8, 100, data, 3000);
    sums_add(&s, 7, 3107, data + 3107, 1);
    sums_add(&s, 7, 100, data + 100, 50);
    sums_settle(&s);
    /* one window is not there: it was written by an earlier run */
    assert_false(sums_find(&s, 7, &f, 100, 3000, &crc));
    assert_false(sums_find(&s, 7, &f, 0, 3108, &crc));
    assert_true(sums_find(&s, 7, &f, 3100, 8, &crc));
    assert_int_equal(crc, crc32(0, data + 3100, 8));
    sums_add(&s, 7, 150, data + 150, 1950);
    sums_settle(&s);
    assert_true(sums_find(&s, 7, &f, 100, 3000, &crc));
    assert_int_equal(crc, crc32(0, data + 100, 3000));
    assert_true(sums_find(&s, 7, &f, 0, 3108, &crc));
    assert_int_equal(crc, crc32(0, data, 3108));
    assert_true(sums_find(&s, 7, &f, 0, 100, &crc));
    assert_int_equal(crc, crc32(0, data, 100));
    /* the next piece, whatever is between */
    assert_int_equal(sums_from(&s, 7, 101)->at, 150);
    assert_int_equal(sums_from(&s, 8, 0)->len, 3000);
    assert_null(sums_from(&s, 7, 3108));
    /* not of whole pieces, of none, behind the end, over a checksum */
    assert_false(sums_find(&s, 7, &f, 1, 99, &crc));
    assert_false(sums_find(&s, 7, &f, 0, 99, &crc));
    assert_false(sums_find(&s, 7, &f, 3107, 2, &crc));
    assert_false(sums_find(&s, 7, &f, 3108, 4, &crc));
    assert_true(sums_find(&s, 7, &f, 3112, 0, &crc));
    assert_int_equal(crc, 0);
    sums_release(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_crc),
        cmocka_unit_test(test_pieces),
    };

    return cmocka_run_group_tests_name("sums", tests, fill, NULL);
}
