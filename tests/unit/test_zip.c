/* SPDX-License-Identifier: MIT */
/* tests/unit/test_zip.c - zip archives: members as ranges, and what is refused. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <zlib.h>

#include "base/endian.h"
#include "base/err.h"
#include "index/formats/torch/zip.h"
#include "remote/source.h"

#include "fail_alloc.h"
#include "zip_build.h"

static struct source *source_of(const struct buf *b)
{
    struct source *s = NULL;
    struct err e = {0};

    if (source_from_memory(b->data, b->len, false, "t.zip", &s, &e) < 0)
        fail_msg("%s", e.text);
    return s;
}

static const struct zip_member plain[] = {
    {.name = "archive/data.pkl", .data = "pickle", .len = 6},
    {.name = "archive/data/0", .data = "01234567", .len = 8, .pad = 21},
    {.name = "archive/data/1", .data = "", .len = 0},
    {.name = "archive/version", .data = "3\n", .len = 2},
};

static void add_all(struct zip_builder *z, const struct zip_member *m, size_t n)
{
    for (size_t i = 0; i < n; i++)
        zb_add(z, &m[i]);
}

/* The archive in `b` from byte `off` on has exactly these members and their bytes. */
static void check_archive(const struct buf *b, uint64_t off, const struct zip_member *m,
                          size_t n)
{
    CLEANUP(source_putp) struct source *s = source_of(b);
    CLEANUP(zip_freep) struct zip *z = NULL;
    struct err e = {0};

    if (zip_open(s, off, b->len - off, &z, &e) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(n, zip_count(z));
    for (size_t i = 0; i < n; i++) {
        const struct zip_entry *entry = zip_at(z, i);
        CLEANUP_FREE void *data = NULL;
        uint64_t at = 0;
        size_t len = 0;

        assert_string_equal(m[i].name, entry->name);
        assert_ptr_equal(entry, zip_find(z, m[i].name));
        assert_int_equal(m[i].len, entry->size);
        if (zip_read(z, entry, m[i].len, &data, &len, &e) < 0)
            fail_msg("%s: %s", entry->name, e.text);
        assert_int_equal(m[i].len, len);
        assert_memory_equal(m[i].data, data, len);
        if (m[i].deflate) {
            assert_int_equal(-ENOTSUP, zip_data_offset(z, entry, &at, &e));
            continue;
        }
        if (zip_data_offset(z, entry, &at, &e) < 0)
            fail_msg("%s: %s", entry->name, e.text);
        assert_memory_equal(m[i].data, b->data + at, len);
    }
}

static void test_reads_members(void **state)
{
    static const struct {
        bool zip64, marker;
        const char *comment;
    } ends[] = {{false, false, ""},
                {true, false, ""},
                {true, true, ""},
                {false, false, "a comment"},
                {true, true, "PK\5\6 and so on"}};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(ends); i++) {
        struct zip_builder z = {0};

        add_all(&z, plain, ARRAY_SIZE(plain));
        zb_finish(&z, ends[i].zip64, ends[i].marker, ends[i].comment);
        check_archive(&z.out, 0, plain, ARRAY_SIZE(plain));
        zb_release(&z);
    }
}

static void test_reads_kinds_of_members(void **state)
{
    static const char text[] =
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab";
    static const struct zip_member members[] = {
        {.name = "a", .data = text, .len = sizeof text, .deflate = true},
        {.name = "b", .data = text, .len = sizeof text, .descriptor = true, .pad = 60},
        {.name = "c", .data = text, .len = sizeof text, .zip64 = true},
        {.name = "d/", .data = "", .len = 0},
        {.name = "..b", .data = text, .len = 1, .deflate = true, .descriptor = true},
        {.name = "e/...", .data = text, .len = 1, .flags = 1 << 11},
    };
    struct zip_builder z = {0};

    (void)state;
    add_all(&z, members, ARRAY_SIZE(members));
    zb_finish(&z, true, true, "");
    check_archive(&z.out, 0, members, ARRAY_SIZE(members));
    zb_release(&z);
}

/* Where checksums stand: each place has the member's own, and no other does. */
static void test_places_of_checksums(void **state)
{
    static const char text[] = "some text that has a checksum";
    static const struct zip_member members[] = {
        {.name = "a", .data = text, .len = sizeof text},
        {.name = "b", .data = text, .len = 7, .descriptor = true},
        {.name = "c", .data = text, .len = 9, .zip64 = true},
        {.name = "empty", .data = "", .len = 0},
    };
    static const unsigned places[] = {2, 2, 2, 2};
    struct zip_builder b = {0};
    struct buf file = {0};

    (void)state;
    add_all(&b, members, ARRAY_SIZE(members));
    zb_finish(&b, false, false, "");
    buf_adds(&file, "before");
    buf_add(&file, b.out.data, b.out.len);
    for (size_t i = 0; i < ARRAY_SIZE(members); i++) {
        CLEANUP(source_putp) struct source *s = source_of(&file);
        CLEANUP(zip_freep) struct zip *z = NULL;
        struct zip_crc_places at;
        struct err e = {0};
        uint32_t want =
            (uint32_t)crc32_z(0, (const void *)members[i].data, members[i].len);

        if (zip_open(s, 6, file.len - 6, &z, &e) < 0 ||
            zip_crc_places(z, zip_at(z, i), &at, &e) < 0)
            fail_msg("%s: %s", members[i].name, e.text);
        assert_int_equal(places[i], at.n);
        for (unsigned k = 0; k < at.n; k++)
            assert_int_equal(want, get_le32(file.data + at.at[k]));
        assert_true(at.at[0] > at.at[1]); /* the directory is behind the members */
    }
    buf_release(&file);
    zb_release(&b);
}

/* Offsets of an archive count from its own start, as those in .distcp files do. */
static void test_inside_a_file(void **state)
{
    struct zip_builder z = {0};
    struct buf file = {0};

    (void)state;
    add_all(&z, plain, ARRAY_SIZE(plain));
    zb_finish(&z, true, false, "");
    for (int i = 0; i < 5000; i++)
        buf_addc(&file, 'x');
    buf_add(&file, z.out.data, z.out.len);
    check_archive(&file, 5000, plain, ARRAY_SIZE(plain));
    buf_release(&file);
    zb_release(&z);
}

/* A directory longer than the tail that is read first, and a long comment behind it. */
static void test_long_directory(void **state)
{
    enum { MEMBERS = 3000 };
    struct zip_builder z = {0};
    struct zip_member *m = calloc(MEMBERS, sizeof *m);
    char(*names)[32] = calloc(MEMBERS, sizeof *names), comment[60001];

    (void)state;
    memset(comment, 'c', sizeof comment - 1);
    comment[sizeof comment - 1] = '\0';
    for (int i = 0; i < MEMBERS; i++) {
        snprintf(names[i], sizeof names[i], "archive/data/%d", i * 7919 % MEMBERS);
        m[i] = (struct zip_member){.name = names[i], .data = names[i], .len = 13};
        zb_add(&z, &m[i]);
    }
    zb_finish(&z, true, false, comment);
    check_archive(&z.out, 0, m, MEMBERS);
    zb_release(&z);
    free(names);
    free(m);
}

/* The comment is such that the short tail starts within the locator. */
static void test_tail_cuts_the_locator(void **state)
{
    char comment[4096];

    (void)state;
    for (size_t len = 4096 - 22 - 20 - 1; len <= 4096 - 22; len++) {
        struct zip_builder z = {0};

        memset(comment, 'c', len);
        comment[len] = '\0';
        add_all(&z, plain, ARRAY_SIZE(plain));
        zb_finish(&z, true, true, comment);
        check_archive(&z.out, 0, plain, ARRAY_SIZE(plain));
        zb_release(&z);
    }
}

static void test_find_suffix(void **state)
{
    static const struct zip_member twice[] = {
        {.name = "a/data.pkl", .data = "", .len = 0},
        {.name = "b/data.pkl", .data = "", .len = 0},
        {.name = "c/xdata.pkl", .data = "", .len = 0},
    };
    struct zip_builder b = {0};
    struct zip *z = NULL;
    struct source *s;
    struct err e = {0};

    (void)state;
    add_all(&b, twice, ARRAY_SIZE(twice));
    zb_finish(&b, false, false, "");
    s = source_of(&b.out);
    assert_int_equal(0, zip_open(s, 0, b.out.len, &z, &e));
    assert_null(zip_find_suffix(z, "/data.pkl"));
    assert_null(zip_find_suffix(z, "/version"));
    assert_string_equal("c/xdata.pkl", zip_find_suffix(z, "xdata.pkl")->name);
    assert_null(zip_find(z, "a/data.pk"));
    assert_null(zip_find(z, ""));
    zip_free(z);
    source_put(s);
    zb_release(&b);
}

static void expect_refused(const struct buf *b, const char *why)
{
    CLEANUP(source_putp) struct source *s = source_of(b);
    CLEANUP(zip_freep) struct zip *z = NULL;
    struct err e = {0};

    if (zip_open(s, 0, b->len, &z, &e) != -EBADMSG || !strstr(e.text, why))
        fail_msg("%d \"%s\", not \"%s\"", e.code, e.text, why);
}

static void test_names_refused(void **state)
{
    static const struct {
        const char *names[2], *why;
    } cases[] = {
        {{"a", "a"}, "a name twice"},     {{"a", "../b"}, "unsafe entry name"},
        {{"a", "b/../c"}, "unsafe"},      {{"a", "b/.."}, "unsafe"},
        {{"a", "/../b"}, "unsafe"},       {{"a", "b\\c"}, "unsafe"},
        {{"a", ""}, "unsafe entry name"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct zip_builder z = {0};

        for (size_t k = 0; k < 2; k++)
            zb_add(&z, &(struct zip_member){
                           .name = cases[i].names[k], .data = "x", .len = 1});
        zb_finish(&z, false, false, "");
        expect_refused(&z.out, cases[i].why);
        zb_release(&z);
    }
}

/* Bytes of a good archive (two stored members, zip64 records) changed one by one. */
static void test_damage_refused(void **state)
{
    struct zip_builder good = {0};
    size_t central, end64, locator, end;

    (void)state;
    zb_add(&good, &(struct zip_member){.name = "a", .data = "0123456789", .len = 10});
    zb_add(&good, &(struct zip_member){.name = "b", .data = "0123456789", .len = 10});
    central = good.out.len;
    zb_finish(&good, true, false, "");
    end = good.out.len - 22;
    locator = end - 20;
    end64 = locator - 56;
    const struct {
        size_t at;
        unsigned char value;
        const char *why;
    } cases[] = {
        {end, 'X', "no end of central directory"},
        {end + 20, 1, "no end of central directory"},
        {end + 4, 1, "several disks"},
        {end + 6, 1, "several disks"},
        {end + 8, 3, "several disks"},
        {end + 12, 1, "two end records differ"},
        {end + 16, 1, "two end records differ"},
        {locator + 4, 1, "several disks"},
        {locator + 16, 2, "several disks"},
        {locator + 8, 0xff, "zip64 end record"},
        {locator + 15, 0x7f, "outside the archive"},
        {end64, 'X', "zip64 end record is missing"},
        {end64 + 4, 45, "wrong length"},
        {end64 + 16, 1, "several disks"},
        {end64 + 24, 3, "several disks"},
        {central, 'X', "damaged central directory"},
        {central + 8, 1, "encrypted"},
        {central + 8, 1 << 5, "encrypted or patched"},
        {central + 9, 1 << 5, "encrypted"},
        {central + 28, 2, "damaged central directory"},
        {central + 30, 4, "damaged"},
        {central + 34, 1, "several disks"},
        {central + 20, 11, "stored entry of two sizes"},
        {central + 24, 11, "stored entry of two sizes"},
        {central + 42, 41, "overlap"},
        {central + 47 + 42, 0, "overlap"},
        {central + 47 + 42, 40, "overlap"},
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct buf b = {0};

        buf_add(&b, good.out.data, good.out.len);
        assert_true((unsigned char)b.data[cases[i].at] != cases[i].value);
        b.data[cases[i].at] = (char)cases[i].value;
        expect_refused(&b, cases[i].why);
        buf_release(&b);
    }
    for (size_t len = 0; len < good.out.len; len++) {
        struct buf b = {0};

        buf_add(&b, good.out.data, len);
        expect_refused(&b, "zip");
        buf_release(&b);
    }
    zb_release(&good);
}

/* Entries that lie: a zip64 marker without its field, a size past the next header. */
static void test_entries_refused(void **state)
{
    static const struct zip_member one = {.name = "a", .data = "0123456789", .len = 10};
    struct zip_builder z = {0};

    (void)state;
    zb_add(&z, &one);
    put_le32(z.central.data + 20, UINT32_MAX);
    put_le32(z.central.data + 24, UINT32_MAX);
    zb_finish(&z, false, false, "");
    expect_refused(&z.out, "zip64 entry without its field");
    zb_release(&z);
    zb_add(&z, &one);
    put_le32(z.central.data + 20, 11);
    put_le32(z.central.data + 24, 11);
    zb_finish(&z, false, false, "");
    expect_refused(&z.out, "overlap");
    zb_release(&z);
    zb_add(&z,
           &(struct zip_member){.name = "a", .data = "01", .len = 2, .zip64 = true});
    put_le64(z.central.data + 46 + 1 + 4, UINT64_MAX); /* size */
    put_le64(z.central.data + 46 + 1 + 12, UINT64_MAX);
    zb_finish(&z, true, true, "");
    expect_refused(&z.out, "overlap");
    zb_release(&z);
    zb_add(&z, &one);
    z.count = 60000;
    zb_finish(&z, false, false, "");
    expect_refused(&z.out, "fewer entries than declared");
    zb_release(&z);
}

/* Bytes between directory and end record: another reader would find other entries. */
static void test_gap_refused(void **state)
{
    struct zip_builder z = {0};

    (void)state;
    zb_add(&z, &(struct zip_member){.name = "a", .data = "01", .len = 2});
    zb_add(&z, &(struct zip_member){.name = "b", .data = "01", .len = 2});
    zb_finish(&z, false, false, "");
    put_le16(z.out.data + z.out.len - 22 + 8, 1);
    put_le16(z.out.data + z.out.len - 22 + 10, 1);
    put_le32(z.out.data + z.out.len - 22 + 12, 47);
    expect_refused(&z.out, "not where the end record says");
    zb_release(&z);
}

/* What the end record declares, of an archive that has so many bytes before it. */
static void test_directory_has_a_limit(void **state)
{
    static const struct {
        uint32_t size, entries;
        const char *why;
    } cases[] = {
        {(64 << 20) + 1, 1, "too large"},
        {64 << 20, 1, "damaged central directory"},
        {46 * 1000001, 1000001, "too large"},
        {46 * 1000000, 1000000, "damaged central directory"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct zip_builder z = {0};
        void *zeros = buf_grow(&z.out, cases[i].size);
        char *end64;

        assert_non_null(zeros);
        memset(zeros, 0, cases[i].size);
        zb_finish(&z, true, true, "");
        end64 = z.out.data + cases[i].size;
        put_le32(end64 + 24, cases[i].entries);
        put_le32(end64 + 32, cases[i].entries);
        put_le32(end64 + 40, cases[i].size);
        put_le32(end64 + 48, 0);
        expect_refused(&z.out, cases[i].why);
        zb_release(&z);
    }
}

/* The local header has to agree; each case damages it at one place. */
static void test_local_header(void **state)
{
    static const struct {
        size_t at;
        unsigned char value;
        const char *why;
    } cases[] = {
        {0, 'X', "no local header"},       {30, 'b', "another name"},
        {26, 2, "another name"},           {8, 8, "another method"},
        {6, 1, "another method"},          {18, 9, "another size"},
        {22, 9, "another size"},           {28, 1, "reach into the next entry"},
        {29, 0xff, "reach into the next"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct zip_builder b = {0};
        CLEANUP(source_putp) struct source *s = NULL;
        CLEANUP(zip_freep) struct zip *z = NULL;
        struct err e = {0};
        uint64_t at = 0;

        zb_add(&b, &(struct zip_member){.name = "a", .data = "0123456789", .len = 10});
        b.out.data[cases[i].at] = (char)cases[i].value;
        zb_finish(&b, false, false, "");
        s = source_of(&b.out);
        assert_int_equal(0, zip_open(s, 0, b.out.len, &z, &e));
        if (zip_data_offset(z, zip_at(z, 0), &at, &e) != -EBADMSG ||
            !strstr(e.text, cases[i].why))
            fail_msg("byte %zu: \"%s\", not \"%s\"", cases[i].at, e.text, cases[i].why);
        zb_release(&b);
    }
}

/* Opens an archive of one member, changes one byte of it before, and reads it whole. */
static int read_one(const struct zip_member *m, size_t at, unsigned char xor,
                    size_t max, struct err *e)
{
    struct zip_builder b = {0};
    CLEANUP(source_putp) struct source *s = NULL;
    CLEANUP(zip_freep) struct zip *z = NULL;
    CLEANUP_FREE void *data = NULL;
    size_t len;
    int rc;

    zb_add(&b, m);
    b.out.data[at] = (char)(b.out.data[at] ^ xor);
    zb_finish(&b, false, false, "");
    s = source_of(&b.out);
    rc = zip_open(s, 0, b.out.len, &z, e);
    if (rc == 0)
        rc = zip_read(z, zip_at(z, 0), max, &data, &len, e);
    zb_release(&b);
    return rc;
}

static void test_inflating(void **state)
{
    enum { ZEROS = 8 << 20 };
    struct zip_member m = {
        .name = "a", .data = "some text, some text", .len = 20, .deflate = true};
    char *zeros = calloc(1, ZEROS);
    struct err e = {0};

    (void)state;
    assert_int_equal(0, read_one(&m, 0, 0, 20, &e));
    assert_int_equal(-EFBIG, read_one(&m, 0, 0, 19, &e));
    assert_int_equal(-EBADMSG, read_one(&m, 33, 0x10, 20, &e));
    /* All text comes out, but the last block does not say that it is the last. */
    assert_int_equal(-EBADMSG, read_one(&m, 31, 1, 20, &e));
    m.data = zeros;
    m.len = ZEROS; /* 1:1000 */
    assert_int_equal(-EBADMSG, read_one(&m, 0, 0, ZEROS, &e));
    assert_non_null(strstr(e.text, "inflates more"));
    m.len = 1 << 20;
    assert_int_equal(0, read_one(&m, 0, 0, ZEROS, &e));
    free(zeros);
}

static void test_out_of_memory(void **state)
{
    static const struct zip_member m = {
        .name = "a", .data = "text text text text text", .len = 24, .deflate = true};
    struct zip_builder b = {0};
    struct source *s;

    (void)state;
    zb_add(&b, &m);
    zb_finish(&b, true, false, "");
    s = source_of(&b.out);
    for (long n = 1; fail_alloc_next(&n);) {
        struct zip *z = NULL;
        void *data = NULL;
        struct err e = {0};
        size_t len;
        int rc = zip_open(s, 0, b.out.len, &z, &e);

        if (rc == 0)
            rc = zip_read(z, zip_at(z, 0), 100, &data, &len, &e);
        fail_alloc_end(&n, rc);
        free(data);
        zip_free(z);
    }
    source_put(s);
    zb_release(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_members),
        cmocka_unit_test(test_reads_kinds_of_members),
        cmocka_unit_test(test_places_of_checksums),
        cmocka_unit_test(test_inside_a_file),
        cmocka_unit_test(test_long_directory),
        cmocka_unit_test(test_tail_cuts_the_locator),
        cmocka_unit_test(test_find_suffix),
        cmocka_unit_test(test_names_refused),
        cmocka_unit_test(test_damage_refused),
        cmocka_unit_test(test_entries_refused),
        cmocka_unit_test(test_gap_refused),
        cmocka_unit_test(test_directory_has_a_limit),
        cmocka_unit_test(test_local_header),
        cmocka_unit_test(test_inflating),
        cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
