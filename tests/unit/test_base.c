/* SPDX-License-Identifier: MIT */
/* tests/unit/test_base.c - errors, arithmetic, endianness, arena, buffers, text, log. */
#include "unit.h"

#include <errno.h>
#include <stdio.h>
#include <sys/socket.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/checked.h"
#include "base/crc32c.h"
#include "base/endian.h"
#include "base/err.h"
#include "base/keyset.h"
#include "base/log.h"
#include "base/utf8.h"

#include "fail_alloc.h"

static void test_err_grows_outward(void **state)
{
    struct err e = {0};
    char line[256];

    (void)state;
    assert_int_equal(err_set(&e, EBADMSG, "ends after %d bytes", 7), -EBADMSG);
    assert_int_equal(err_wrap(&e, "shard %s", "a.bin"), -EBADMSG);
    assert_int_equal(err_wrap(&e, "read w"), -EBADMSG);
    assert_string_equal(e.text, "read w: shard a.bin: ends after 7 bytes");
    assert_int_equal(err_hint(&e, "copy it again"), -EBADMSG);
    assert_string_equal(err_line(&e, line, sizeof line),
                        "read w: shard a.bin: ends after 7 bytes (copy it again)");
    assert_int_equal(err_set(&e, EIO, "%s, again", e.text), -EIO);
    assert_string_equal(e.text, "read w: shard a.bin: ends after 7 bytes, again");
    assert_string_equal(e.hint, "");
    assert_int_equal(err_nomem(&e), -ENOMEM);
    assert_string_equal(e.text, "out of memory");
}

static void test_err_wrap_of_nothing_has_no_colon(void **state)
{
    struct err e = {0};

    (void)state;
    assert_int_equal(err_wrap(&e, "place"), 0);
    assert_string_equal(e.text, "place");
}

static void test_err_long_text_is_cut(void **state)
{
    struct err e = {0};
    char big[5000], line[40];

    (void)state;
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    err_set(&e, EIO, "%s", big);
    assert_int_equal(strlen(e.text), sizeof e.text - 1);
    err_wrap(&e, "%s", big);
    assert_int_equal(strlen(e.text), sizeof e.text - 1);
    err_hint(&e, "%s", big);
    assert_int_equal(strlen(e.hint), sizeof e.hint - 1);
    assert_int_equal(strlen(err_line(&e, line, sizeof line)), sizeof line - 1);
    err_set(&e, EIO, "0123456789");
    err_hint(&e, "%s", big);
    assert_string_equal(err_line(&e, line, 20), "0123456789 (xxxxxx)");
    assert_string_equal(err_line(&e, line, 14), "0123456789");
    assert_string_equal(err_line(&e, line, 1), "");
}

static void test_err_for_reader(void **state)
{
    static const struct {
        int code, want;
    } cases[] = {
        {0, 0},           {EBADMSG, EIO},   {ENOENT, EIO},    {EXDEV, EIO},
        {ELOOP, EIO},     {ESTALE, ESTALE}, {ENOMEM, ENOMEM}, {EINTR, EINTR},
        {EIO, EIO},       {EFBIG, EIO},     {EACCES, EACCES}, {ENOTDIR, EIO},
        {EOVERFLOW, EIO}, {EISDIR, EIO},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct err e = {.code = cases[i].code};

        assert_int_equal(err_for_reader(&e), cases[i].want);
    }
}

static void test_text_escape(void **state)
{
    static const struct {
        const char *text, *want;
    } cases[] = {
        {"plain \xc3\xa9", "plain \xc3\xa9"},
        {"a\nb\x1b[2J\x7f", "a%0Ab%1B[2J%7F"},
        {"\xc2\x9b"
         "31m",
         "%C2%9B31m"}, /* C1: a terminal's CSI */
        {"\xc0\x80", "%C0%80"},
        {"\xed\xa0\x80", "%ED%A0%80"},
        {"\xe2\x80\xa8", "%E2%80%A8"},
        {"cut\xe2\x82", "cut%E2%82"},
    };
    char dst[64];

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        assert_int_equal(text_escape(dst, sizeof dst, cases[i].text),
                         strlen(cases[i].want));
        assert_string_equal(dst, cases[i].want);
    }
    assert_int_equal(text_escape(dst, 4, "ab\n"), 2); /* no half escape */
    assert_string_equal(dst, "ab");
    assert_int_equal(text_escape(dst, 4, "ab\xc3\xa9"), 2); /* no half character */
    assert_int_equal(text_escape(dst, 0, "ab"), 0);
}

/* Against the definition: decode each sequence by hand and judge the number. */
static size_t slow_utf8(const unsigned char *p, size_t len)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t n = p[0] < 0x80           ? 1
               : (p[0] >> 5) == 6    ? 2
               : (p[0] >> 4) == 14   ? 3
               : (p[0] >> 3) == 0x1e ? 4
                                     : 0;
    uint32_t c = n == 1 ? p[0] : p[0] & (0xffu >> (n + 1));

    if (n == 0 || n > len)
        return 0;
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (p[i] & 0x3f);
    }
    return c < least[n] || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff) ? 0 : n;
}

static void test_utf8_char_by_definition(void **state)
{
    static const unsigned char tails[] = {0x7f, 0x80, 0xbf, 0xc0};
    unsigned char s[4];

    (void)state;
    assert_int_equal(utf8_char("", 0), 0);
    for (unsigned i = 0; i < 0x10000 * 16; i++) {
        s[0] = (unsigned char)(i >> 12);
        s[1] = (unsigned char)(i >> 4);
        s[2] = tails[i & 3];
        s[3] = tails[i >> 2 & 3];
        for (size_t len = 1; len <= 4; len++)
            if (utf8_char(s, len) != slow_utf8(s, len))
                fail_msg("%02x %02x %02x %02x of %zu: %zu, not %zu", s[0], s[1], s[2],
                         s[3], len, utf8_char(s, len), slow_utf8(s, len));
    }
}

static void test_checked(void **state)
{
    uint64_t v;

    (void)state;
    assert_false(add_overflows(UINT64_MAX - 1, 1, &v));
    assert_true(v == UINT64_MAX);
    assert_true(add_overflows(UINT64_MAX, 1, &v));
    assert_false(mul_overflows(1ull << 32, (1ull << 32) - 1, &v));
    assert_true(mul_overflows(1ull << 32, 1ull << 32, &v));
    assert_false(range_outside(10, 0, 10));
    assert_false(range_outside(4, 6, 10));
    assert_true(range_outside(4, 7, 10));
    assert_true(range_outside(11, 0, 10));
    assert_true(range_outside(4, UINT64_MAX, 10));
}

/* The check value of the CRC catalogue, the vectors of RFC 3720, and any cut of them. */
static void test_crc32c(void **state)
{
    unsigned char zeros[32] = {0}, ones[32], up[32];

    (void)state;
    for (unsigned i = 0; i < 32; i++) {
        ones[i] = 0xff;
        up[i] = (unsigned char)i;
    }
    assert_int_equal(crc32c(0, "", 0), 0);
    assert_int_equal(crc32c(0, "123456789", 9), 0xe3069283);
    assert_int_equal(crc32c(0, zeros, 32), 0x8a9136aa);
    assert_int_equal(crc32c(0, ones, 32), 0x62a8ab43);
    for (size_t cut = 0; cut <= 32; cut++)
        assert_int_equal(crc32c(crc32c(0, up, cut), up + cut, 32 - cut), 0x46dd794e);
}

static void test_endian(void **state)
{
    static const unsigned char bytes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    unsigned char out[9] = {0};

    (void)state;
    assert_int_equal(get_le16(bytes + 1), 0x0201);
    assert_int_equal(get_le32(bytes + 1), 0x04030201);
    assert_true(get_le64(bytes + 1) == 0x0807060504030201);
    assert_true(get_be64(bytes + 1) == 0x0102030405060708);
    put_le64(out + 1, 0x0807060504030201);
    assert_memory_equal(out, bytes, sizeof out);
    put_le16(out + 1, 0xbbaa);
    put_le32(out + 3, 0xffeeddcc);
    assert_memory_equal(out, "\0\xaa\xbb\xcc\xdd\xee\xff\7\10", 9);
}

static void test_arena_zeroed_aligned_apart(void **state)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(SIZE_MAX);
    unsigned char *last = NULL;

    (void)state;
    for (size_t i = 0; i < 5000; i++) {
        size_t size = i % 97 == 0 ? 100000 : i % 50;
        unsigned char *p = arena_alloc(a, size);

        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 16, 0);
        assert_ptr_not_equal(p, last);
        for (size_t k = 0; k < size; k++)
            assert_int_equal(p[k], 0);
        memset(p, 0xff, size); /* would show in a later one if they overlapped */
        last = p;
    }
}

static void test_arena_ceiling(void **state)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(160);

    (void)state;
    assert_non_null(arena_alloc(a, 100));
    assert_int_equal(arena_used(a), 112);
    assert_null(arena_alloc(a, 49));
    assert_null(arena_alloc(a, SIZE_MAX));
    assert_null(arena_alloc(a, SIZE_MAX - 15));
    assert_null(arena_array(a, SIZE_MAX / 8, 16));
    assert_null(arena_memdup(a, "", SIZE_MAX));
    assert_non_null(arena_alloc(a, 48));
    assert_null(arena_alloc(a, 0));
    assert_int_equal(arena_used(a), 160);
}

static void test_arena_memdup(void **state)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);

    (void)state;
    assert_string_equal(arena_memdup(a, "abcdef", 3), "abc");
    assert_string_equal(arena_memdup(a, NULL, 0), "");
}

static int use_arena(void)
{
    CLEANUP(arena_freep) struct arena *a = arena_new(1 << 20);

    if (!a)
        return -ENOMEM;
    for (size_t size = 1; size < 1 << 16; size *= 2)
        if (!arena_alloc(a, size))
            return -ENOMEM;
    return 0;
}

static void test_arena_out_of_memory(void **state)
{
    (void)state;
    for (long n = 1; fail_alloc_next(&n);)
        fail_alloc_end(&n, use_arena());
}

static void test_buf_grows_to_its_ceiling(void **state)
{
    CLEANUP(buf_release) struct buf b = {.max = 1000};

    (void)state;
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(buf_addc(&b, 'x'), 0);
        assert_int_equal(strlen(b.data), i + 1);
    }
    assert_int_equal(buf_add(&b, NULL, 0), 0);
    assert_int_equal(buf_addc(&b, 'y'), -EFBIG);
    assert_int_equal(buf_add(&b, NULL, 0), -EFBIG);
    assert_null(buf_grow(&b, 0));
    assert_int_equal(buf_failed(&b), -EFBIG);
    assert_int_equal(b.len, 1000);
    buf_clear(&b);
    assert_int_equal(buf_failed(&b), 0);
    assert_int_equal(buf_adds(&b, "again"), 0);
    assert_string_equal(b.data, "again");
    assert_int_equal(buf_add(&b, b.data, SIZE_MAX), -EFBIG);
}

static void test_buf_addf_and_steal(void **state)
{
    struct buf b = {0};
    size_t len;
    char *text;

    (void)state;
    assert_int_equal(buf_addf(&b, "%s-%0200d", "a", 7), 0);
    assert_int_equal(b.len, 202);
    text = buf_steal(&b, &len);
    assert_int_equal(len, 202);
    assert_int_equal(text[201], '7');
    assert_int_equal(text[202], '\0');
    free(text);
    assert_null(b.data);
    text = buf_steal(&b, NULL);
    assert_string_equal(text, "");
    free(text);
    b.max = 1;
    assert_int_equal(buf_adds(&b, "ab"), -EFBIG);
    assert_null(buf_steal(&b, &len)); /* half of it must not get out */
    assert_int_equal(len, 0);
    buf_release(&b);
}

static int use_buf(void)
{
    CLEANUP(buf_release) struct buf b = {0};

    for (int i = 0; i < 1000; i++)
        buf_addf(&b, "%d,", i);
    return buf_failed(&b);
}

static void test_buf_out_of_memory(void **state)
{
    (void)state;
    for (long n = 1; fail_alloc_next(&n);)
        fail_alloc_end(&n, use_buf());
}

static void test_buf_add_json(void **state)
{
    static const char text[] =
        "a\"b\\c\n\r\t\x01\0 \xc3\xa9 \xf0\x9f\x98\x80 \xff\xed\xa0/";
    CLEANUP(buf_release) struct buf b = {0};

    (void)state;
    assert_int_equal(buf_add_json(&b, text, sizeof text - 1), 0);
    assert_string_equal(b.data,
                        "\"a\\\"b\\\\c\\n\\r\\t\\u0001\\u0000 \xc3\xa9 "
                        "\xf0\x9f\x98\x80 \xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd/\"");
    buf_clear(&b);
    assert_int_equal(buf_add_json(&b, "", 0), 0);
    assert_string_equal(b.data, "\"\"");
}

static void test_varint(void **state)
{
    static const struct {
        uint64_t value;
        size_t size;
    } cases[] = {
        {0, 1},           {127, 1},         {128, 2},        {16383, 2},
        {16384, 3},       {UINT32_MAX, 5},  {1ull << 62, 9}, {(1ull << 63) - 1, 9},
        {1ull << 63, 10}, {UINT64_MAX, 10},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf b = {0};
        size_t pos = 0;
        uint64_t v;

        assert_int_equal(buf_add_varint(&b, cases[i].value), 0);
        assert_int_equal(b.len, cases[i].size);
        assert_false(varint_get((unsigned char *)b.data, b.len - 1, &pos, &v));
        assert_int_equal(pos, 0);
        assert_true(varint_get((unsigned char *)b.data, b.len, &pos, &v));
        assert_true(v == cases[i].value);
        assert_int_equal(pos, cases[i].size);
    }
}

static void test_varint_too_long(void **state)
{
    static const unsigned char past_64_bits[] =
        "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02",
                               eleven[] =
                                   "\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00";
    size_t pos = 0;
    uint64_t v;

    (void)state;
    assert_false(varint_get(past_64_bits, 10, &pos, &v));
    assert_false(varint_get(eleven, 11, &pos, &v));
    assert_int_equal(pos, 0);
}

static void test_keyset(void **state)
{
    CLEANUP(keyset_release) struct keyset s = {0};
    char key[32];

    (void)state;
    for (int round = 0; round < 3; round++) {
        int count = round == 1 ? 5 : 20000;

        for (int i = 0; i < count; i++) {
            snprintf(key, sizeof key, "key %d", i);
            assert_int_equal(keyset_add(&s, key, strlen(key)), 1);
        }
        for (int i = 0; i < count; i++) {
            snprintf(key, sizeof key, "key %d", i);
            assert_int_equal(keyset_add(&s, key, strlen(key)), 0);
        }
        assert_int_equal(keyset_add(&s, "", 0), 1);
        assert_int_equal(keyset_add(&s, "", 0), 0);
        keyset_clear(&s);
    }
}

/* A datagram socket shows each write(2) as one message. */
static void read_message(int fd, char *dst, size_t size)
{
    ssize_t n = recv(fd, dst, size - 1, MSG_DONTWAIT);

    dst[n > 0 ? n : 0] = '\0';
}

static void test_log_lines(void **state)
{
    char line[8192], big[6000];
    struct err e = {0};
    int fds[2];

    (void)state;
    assert_int_equal(socketpair(AF_UNIX, SOCK_DGRAM, 0, fds), 0);
    log_to(fds[1]);
    log_msg(LOG_FS, LOG_WARN, "bad name %s", "a\nb\x1b\xff");
    log_msg(LOG_FS, LOG_INFO, "not by default");
    read_message(fds[0], line, sizeof line);
    assert_string_equal(line, "unshard: fs warn: bad name a%0Ab%1B%FF\n");
    read_message(fds[0], line, sizeof line);
    assert_string_equal(line, "");
    err_set(&e, EIO, "it broke");
    err_hint(&e, "mend it");
    errno = ESTALE;
    log_err(LOG_REMOTE, &e);
    assert_int_equal(errno, ESTALE);
    read_message(fds[0], line, sizeof line);
    assert_string_equal(line, "unshard: remote error: it broke (mend it)\n");
    memset(big, '\n', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    log_msg(LOG_CLI, LOG_ERROR, "%s", big);
    read_message(fds[0], line, sizeof line);
    assert_in_range(strlen(line), 4090, 4096);
    assert_ptr_equal(strchr(line, '\n'), line + strlen(line) - 1);
    log_to(2);
    close(fds[0]);
    close(fds[1]);
}

/* A missing shard of a thousand tensors is no thousand lines. */
static void test_log_groups_errors(void **state)
{
    char line[65536];
    int fds[2];
    ssize_t n;
    size_t lines = 0;

    (void)state;
    assert_int_equal(pipe(fds), 0);
    log_to(fds[1]);
    for (int i = 0; i < 120; i++) {
        struct err e;

        err_set(&e, EIO, "shard a_1 ends at byte 7, chunk needs bytes %d to %d", i,
                i + 1);
        err_wrap(&e, "tensor t%d", i);
        log_err(LOG_GPU, &e);
    }
    for (int i = 0; i < 2; i++) {
        struct err e;

        err_set(&e, EIO, "shard a_%d is missing", i);
        log_err(LOG_GPU, &e);
    }
    log_to(2);
    close(fds[1]);
    n = read(fds[0], line, sizeof line - 1);
    assert_true(n > 0);
    line[n] = '\0';
    close(fds[0]);
    for (const char *p = line; (p = strchr(p, '\n')); p++)
        lines++;
    assert_int_equal(lines, 3 + 2 + 2);
    assert_has(line, "100 errors of one cause, the last: tensor t99: shard a_1 ends");
    assert_has(line, "shard a_0 is missing");
    assert_has(line, "shard a_1 is missing");
}

static void test_log_configure(void **state)
{
    (void)state;
    assert_true(log_enabled(LOG_GPU, LOG_WARN));
    assert_false(log_enabled(LOG_GPU, LOG_INFO));
    assert_true(log_configure("info,fs:debug,gpu:error"));
    assert_true(log_enabled(LOG_BASE, LOG_INFO));
    assert_false(log_enabled(LOG_BASE, LOG_DEBUG));
    assert_true(log_enabled(LOG_FS, LOG_DEBUG));
    assert_false(log_enabled(LOG_GPU, LOG_WARN));
    assert_true(log_enabled(LOG_GPU, LOG_ERROR));
    assert_false(log_configure("nosuch:info,cli:debug,index:loud"));
    assert_true(log_enabled(LOG_CLI, LOG_DEBUG)); /* the good part */
    assert_false(log_enabled(LOG_INDEX, LOG_DEBUG));
    assert_false(log_configure("fs:"));
    assert_false(log_configure(":info"));
    assert_true(log_configure(""));
    assert_true(log_configure(NULL));
    assert_true(log_configure("warn"));
    assert_false(log_enabled(LOG_FS, LOG_INFO));
}

static void test_base_macros(void **state)
{
    char *p = malloc(1), *q = p;
    int fd = 7;

    (void)state;
    assert_ptr_equal(steal(&p), q);
    assert_null(p);
    free(q);
    assert_int_equal(steal_fd(&fd), 7);
    assert_int_equal(fd, -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_err_grows_outward),
        cmocka_unit_test(test_err_wrap_of_nothing_has_no_colon),
        cmocka_unit_test(test_err_long_text_is_cut),
        cmocka_unit_test(test_err_for_reader),
        cmocka_unit_test(test_text_escape),
        cmocka_unit_test(test_utf8_char_by_definition),
        cmocka_unit_test(test_checked),
        cmocka_unit_test(test_crc32c),
        cmocka_unit_test(test_endian),
        cmocka_unit_test(test_arena_zeroed_aligned_apart),
        cmocka_unit_test(test_arena_ceiling),
        cmocka_unit_test(test_arena_memdup),
        cmocka_unit_test(test_arena_out_of_memory),
        cmocka_unit_test(test_buf_grows_to_its_ceiling),
        cmocka_unit_test(test_buf_addf_and_steal),
        cmocka_unit_test(test_buf_out_of_memory),
        cmocka_unit_test(test_buf_add_json),
        cmocka_unit_test(test_varint),
        cmocka_unit_test(test_varint_too_long),
        cmocka_unit_test(test_keyset),
        cmocka_unit_test(test_log_lines),
        cmocka_unit_test(test_log_groups_errors),
        cmocka_unit_test(test_log_configure),
        cmocka_unit_test(test_base_macros),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
