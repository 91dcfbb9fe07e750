/* SPDX-License-Identifier: MIT */
/* tests/unit/test_remote_archives.c - gzip read at any place, tar's members, archives in stores. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <pthread.h>

#include "base/err.h"
#include "remote/archive.h"
#include "remote/archives.h"
#include "remote/gunzip.h"
#include "remote/source.h"
#include "remote/store.h"
#include "remote/tar.h"

#include "remote_tmp.h"
#include "tar_build.h"

/* ---- gzip ---- */

static uint64_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* Bytes of which some pack well and some do not. */
static void fill(struct buf *b, size_t len)
{
    unsigned char *p = buf_grow(b, len);
    uint64_t state = 1;

    assert_non_null(p);
    for (size_t i = 0; i < len; i++)
        p[i] = (unsigned char)(next_random(&state) & (i / 100000 % 2 ? 0xff : 3));
}

static struct source *memory(const struct buf *b)
{
    struct source *s = NULL;
    struct err e = {0};

    assert_ok(source_from_memory(b->data, b->len, false, "t.gz", &s, &e), &e);
    return s;
}

static int open_gz(const struct buf *gz, struct source **out, struct err *e)
{
    CLEANUP(source_putp) struct source *in = memory(gz);
    CLEANUP(gunzip_scan_freep) struct gunzip_scan *scan = NULL;

    assert_ok(gunzip_scan_begin(in, &scan, e), e);
    return gunzip_scan_finish(scan, out, e);
}

static void check_range(struct source *s, const struct buf *plain, uint64_t off,
                        size_t len)
{
    CLEANUP_FREE char *got = malloc(len + 1);
    struct err e = {0};

    assert_non_null(got);
    assert_ok(source_read(s, off, len, got, &e), &e);
    assert_memory_equal(got, plain->data + off, len);
}

/* Forward, backward, across members and points, and to the very end. */
static void check_reads(struct source *s, const struct buf *plain)
{
    uint64_t state = 7;

    assert_int_equal(s->size, plain->len);
    for (int i = 0; i < 60; i++) {
        uint64_t off = next_random(&state) % plain->len;

        check_range(s, plain, off,
                    (size_t)MIN(next_random(&state) % 70000, plain->len - off));
    }
    for (uint64_t off = 0; off + 4096 <= plain->len; off += plain->len / 50)
        check_range(s, plain, off, 4096);
    check_range(s, plain, 0, plain->len);
    check_range(s, plain, plain->len - 1, 1);
}

static void test_gunzip(void **state)
{
    static const int levels[] = {0, 1, 6};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(levels); i++) {
        CLEANUP(buf_release) struct buf plain = {0}, gz = {0};
        CLEANUP(source_putp) struct source *s = NULL;
        struct err e = {0};

        fill(&plain, 5000000);
        tb_gzip(plain.data, plain.len, levels[i], &gz);
        assert_true(gunzip_sniff(gz.data, gz.len));
        assert_ok(open_gz(&gz, &s, &e), &e);
        check_reads(s, &plain);
    }
}

/* Members one behind another, as cat and pigz make them, and zeros behind the last. */
static void test_members(void **state)
{
    CLEANUP(buf_release) struct buf plain = {0}, gz = {0};
    CLEANUP(source_putp) struct source *s = NULL;
    static const size_t cut[] = {0, 1, 1500000, 1500000, 2900000, 4000000};
    struct err e = {0};

    (void)state;
    fill(&plain, cut[ARRAY_SIZE(cut) - 1]);
    for (size_t i = 1; i < ARRAY_SIZE(cut); i++)
        tb_gzip(plain.data + cut[i - 1], cut[i] - cut[i - 1], 6, &gz);
    for (int i = 0; i < 100; i++)
        buf_addc(&gz, '\0');
    assert_ok(open_gz(&gz, &s, &e), &e);
    check_reads(s, &plain);
}

static void check_damage(struct buf *gz, size_t at, const char *why)
{
    CLEANUP(source_putp) struct source *s = NULL;
    struct err e = {0};

    gz->data[at] = (char)(gz->data[at] ^ 0x55);
    assert_int_equal(open_gz(gz, &s, &e), -EBADMSG);
    assert_has(e.text, why);
    gz->data[at] = (char)(gz->data[at] ^ 0x55);
}

static void test_damaged(void **state)
{
    CLEANUP(buf_release) struct buf plain = {0}, gz = {0};
    CLEANUP(source_putp) struct source *s = NULL;
    struct err e = {0};

    (void)state;
    fill(&plain, 300000);
    tb_gzip(plain.data, plain.len, 6, &gz);
    check_damage(&gz, gz.len - 8, "incorrect data check");
    check_damage(&gz, gz.len - 1, "incorrect length check");
    check_damage(&gz, 2, "unknown compression method");
    gz.len -= 9;
    assert_int_equal(open_gz(&gz, &s, &e), -EBADMSG);
    assert_has(e.text, "cut off");
}

struct reading {
    struct source *s;
    const struct buf *plain;
    uint64_t seed;
    bool wrong;
};

static void *read_often(void *user)
{
    struct reading *r = user;
    struct err e = {0};
    char got[5000];

    for (int i = 0; i < 40; i++) {
        uint64_t off = next_random(&r->seed) % (r->plain->len - sizeof got);

        r->wrong |= source_read(r->s, off, sizeof got, got, &e) < 0 ||
                    memcmp(got, r->plain->data + off, sizeof got) != 0;
    }
    return NULL;
}

static void test_threads(void **state)
{
    CLEANUP(buf_release) struct buf plain = {0}, gz = {0};
    CLEANUP(source_putp) struct source *s = NULL;
    struct reading r[4];
    pthread_t thread[4];
    struct err e = {0};

    (void)state;
    fill(&plain, 3000000);
    tb_gzip(plain.data, plain.len, 1, &gz);
    assert_ok(open_gz(&gz, &s, &e), &e);
    for (size_t i = 0; i < 4; i++) {
        r[i] = (struct reading){.s = s, .plain = &plain, .seed = i};
        assert_int_equal(pthread_create(&thread[i], NULL, read_often, &r[i]), 0);
    }
    for (size_t i = 0; i < 4; i++) {
        pthread_join(thread[i], NULL);
        assert_false(r[i].wrong);
    }
}

/* ---- tar ---- */

static int read_memory(void *user, uint64_t off, size_t len, void *dst, size_t *got,
                       struct err *e)
{
    const struct buf *b = user;

    (void)e;
    *got = off < b->len ? MIN(len, b->len - (size_t)off) : 0;
    if (*got)
        memcpy(dst, b->data + off, *got);
    return 0;
}

/* "name=text" of each member, "name/" of folders, "name!" of what is neither. */
static void tell_tar(struct buf *tar, struct buf *out)
{
    struct tar *t;
    struct err e = {0};

    buf_adds(out, "");
    if (tar_read(read_memory, tar, tar->len, &t, &e) < 0) {
        buf_adds(out, e.text);
        return;
    }
    for (size_t i = 0; i < tar_count(t); i++) {
        const struct tar_member *m = tar_at(t, i);

        buf_addf(out, "%s%s%s", i ? " " : "", m->name,
                 m->kind == ENTRY_FILE  ? "="
                 : m->kind == ENTRY_DIR ? "/"
                                        : "!");
        buf_add(out, tar->data + m->off, (size_t)m->size);
    }
    tar_free(t);
}

static void check_tar(struct buf *tar, const char *want)
{
    CLEANUP(buf_release) struct buf got = {0};

    tell_tar(tar, &got);
    assert_has(got.data, want);
    buf_release(tar);
}

static void test_members_of_tar(void **state)
{
    char name[151];
    struct buf b = {0};

    (void)state;
    tb_add(&b, "./", '5', NULL, 0);
    tb_text(&b, "./b.txt", "bee");
    tb_add(&b, "d/", '5', NULL, 0);
    tb_text(&b, "d//./c", "");
    tb_text(&b, "a", "one");
    tb_text(&b, "a", "two");
    tb_add(&b, "link", '2', NULL, 0);
    tb_add(&b, "old/", '\0', NULL, 0);
    tb_end(&b);
    check_tar(&b, "a=two b.txt=bee d/ d/c= link! old/");

    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    tb_add(&b, "././@LongLink", 'L', name, sizeof name);
    tb_text(&b, "short", "L");
    tb_add(&b, "pax", 'x', "18 path=long/name\n11 mtime=1\n", 29);
    tb_text(&b, "short", "x");
    tb_text(&b, "short", "s");
    tb_end(&b);
    check_tar(&b, "long/name=x nnnnnnn");

    tb_text(&b, "x", "no end");
    check_tar(&b, "x=no end");
    check_tar(&b, "");
}

static void test_pax_size(void **state)
{
    struct buf b = {0};

    (void)state;
    tb_add(&b, "pax", 'x', "9 size=3\n", 9);
    tb_add(&b, "m", '0', NULL, 0); /* the header says 0 */
    buf_adds(&b, "abc");
    tb_pad(&b);
    tb_end(&b);
    check_tar(&b, "m=abc");
}

/* Readers differ about which of two headers counts, and about one without a member. */
static void test_headers_that_readers_take_differently(void **state)
{
    static const char twice[] = "a member whose name or size is told twice";
    static const char alone[] = "a name or size without a member";
    struct buf b = {0};

    (void)state;
    tb_add(&b, "pax", 'x', "10 path=a\n", 10);
    tb_add(&b, "././@LongLink", 'L', "b", 2);
    tb_text(&b, "c", "1");
    check_tar(&b, twice);
    tb_add(&b, "././@LongLink", 'L', "a", 2);
    tb_add(&b, "pax", 'x', "10 path=b\n", 10);
    tb_text(&b, "c", "2");
    check_tar(&b, twice);
    tb_add(&b, "././@LongLink", 'L', "a", 2);
    tb_add(&b, "././@LongLink", 'L', "b", 2);
    tb_text(&b, "c", "3");
    check_tar(&b, twice);
    tb_add(&b, "pax", 'x', "9 size=1\n", 9);
    tb_add(&b, "pax", 'x', "9 size=2\n", 9);
    tb_text(&b, "c", "45");
    check_tar(&b, twice);
    tb_add(&b, "pax", 'x', "9 size=1\n", 9);
    tb_add(&b, "pax", 'x', "10 path=a\n", 10);
    tb_text(&b, "c", "67");
    check_tar(&b, "a=6");

    tb_text(&b, "a", "1");
    tb_add(&b, "pax", 'x', "10 path=a\n", 10);
    check_tar(&b, alone);
    tb_text(&b, "a", "1");
    tb_add(&b, "././@LongLink", 'L', "b", 2);
    tb_end(&b);
    check_tar(&b, alone);
    tb_add(&b, "././@LongLink", 'L', "b", 2);
    tb_add(&b, "label", 'V', NULL, 0);
    tb_text(&b, "a", "1");
    check_tar(&b, alone);
    tb_text(&b, "a/", "1");
    check_tar(&b, "member \"a/\" is a directory with bytes");
}

static void test_prefix(void **state)
{
    struct buf b = {0};

    (void)state;
    tb_text(&b, "name", "p");
    memcpy(b.data + 345, "some/prefix", 12);
    tb_sum(b.data);
    tb_end(&b);
    check_tar(&b, "some/prefix/name=p");
}

static void test_base256(void **state)
{
    static const unsigned char size[12] = {0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2};
    struct buf b = {0};

    (void)state;
    tb_text(&b, "m", "ab");
    memcpy(b.data + 124, size, sizeof size);
    tb_sum(b.data);
    tb_end(&b);
    check_tar(&b, "m=ab");
    tb_text(&b, "m", "ab");
    memcpy(b.data + 124, size, sizeof size);
    b.data[124 + 1] = 1; /* 2^80 */
    tb_sum(b.data);
    check_tar(&b, "size is no number");
    tb_text(&b, "m", "ab");
    memcpy(b.data + 124, size, sizeof size);
    b.data[124 + 7] = 1; /* 2^32 */
    tb_sum(b.data);
    check_tar(&b, "ends behind the archive");
}

static void test_refused(void **state)
{
    static const struct {
        const char *name;
        char type;
        const char *data, *why;
    } cases[] = {
        {"/etc/passwd", '0', "x", "\"/etc/passwd\" leads out"},
        {"a/../../b", '0', "x", "leads out"},
        {"..", '5', NULL, "leads out"},
        {"s", 'S', NULL, "sparse"},
        {"p", 'x', "26 GNU.sparse.realsize=10\n", "sparse"},
        {"p", 'x', "8 size=x\n", "none"},
        {"p", 'x', "9 size=x\n", "no number"},
        {"p", 'x', "99 path=x\n", "none"},
        {"p", 'x', "path=x\n", "none"},
        {"g", 'g', "10 path=x\n", "all members"},
        {"m", 'M', NULL, "type 'M'"},
    };
    struct buf b = {0};

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        tb_add(&b, cases[i].name, cases[i].type, cases[i].data,
               cases[i].data ? strlen(cases[i].data) : 0);
        tb_text(&b, "after", "");
        tb_end(&b);
        check_tar(&b, cases[i].why);
    }
    tb_text(&b, "f", "x");
    tb_text(&b, "f-1", "x");
    tb_text(&b, "f/g", "x");
    tb_end(&b);
    check_tar(&b, "a file and a directory");
    tb_text(&b, "f", "x");
    b.data[0] = 'g';
    check_tar(&b, "checksum");
    tb_text(&b, "f", "x");
    b.len = 700; /* within the bytes: as good as whole, but not known to be */
    check_tar(&b, "f=x");
    tb_add(&b, "f", '0', NULL, 600);
    check_tar(&b, "ends behind");
    tb_text(&b, "f", "x");
    tb_text(&b, "g", "x");
    b.len = 1200;
    check_tar(&b, "cut off");
}

/* ---- stores ---- */

static void tell_listing(struct store *s, const char *path, struct buf *out)
{
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct err e = {0};

    buf_adds(out, "");
    if (s->ops->list(s, path, &l, &e) < 0) {
        buf_addf(out, "%d", e.code);
        return;
    }
    for (size_t i = 0; i < listing_count(l); i++)
        buf_addf(out, "%s%s%s", i ? " " : "", listing_at(l, i)->name,
                 listing_at(l, i)->st.kind == ENTRY_DIR ? "/" : "");
}

static void check_listing(struct store *s, const char *path, const char *want)
{
    CLEANUP(buf_release) struct buf got = {0};

    tell_listing(s, path, &got);
    assert_string_equal(got.data, want);
}

static void check_file(struct store *s, const char *path, const char *want)
{
    CLEANUP(source_putp) struct source *src = NULL;
    struct entry_stat st;
    struct err e = {0};
    char got[64] = {0};

    assert_ok(s->ops->open(s, path, &src, &e), &e);
    assert_int_equal(src->size, strlen(want));
    assert_ok(source_read(src, 0, (size_t)src->size, got, &e), &e);
    assert_string_equal(got, want);
    assert_string_equal(src->name, path);
    assert_ok(s->ops->stat(s, path, &st, &e), &e);
    assert_int_equal(st.kind, ENTRY_FILE);
    assert_true(file_id_equal(&st.id, &src->id));
    assert_ok(source_check(src, &e), &e);
}

static void check_missing(struct store *s, const char *path, int code)
{
    struct source *src = NULL;
    struct entry_stat st;
    struct err e = {0};

    assert_int_equal(s->ops->stat(s, path, &st, &e), -code);
    assert_int_equal(s->ops->open(s, path, &src, &e), -code);
}

static void check_archive(struct store *s, const char *name)
{
    struct entry_stat a, b, st;
    struct err e = {0};
    char path[256];

#define AT(rest) (snprintf(path, sizeof path, "%s%s", name, rest), path)
    assert_ok(s->ops->stat(s, AT(""), &st, &e), &e);
    assert_int_equal(st.kind, ENTRY_FILE);
    check_listing(s, AT(""), "a.txt a.txt0 dir/ sub/");
    check_listing(s, AT("/sub"), "deep/ x");
    check_listing(s, AT("/sub/deep"), "y");
    check_listing(s, AT("/dir"), "");
    check_listing(s, AT("/a.txt"), "20"); /* ENOTDIR */
    check_listing(s, AT("/none"), "2");
    check_file(s, AT("/a.txt"), "alpha");
    check_file(s, AT("/sub/deep/y"), "why");
    check_missing(s, AT("/none"), ENOENT);
    check_missing(s, AT("/a.txt/x"), ENOENT);
    assert_ok(s->ops->stat(s, AT("/sub"), &st, &e), &e);
    assert_int_equal(st.kind, ENTRY_DIR);
    assert_ok(s->ops->stat(s, AT("/a.txt"), &a, &e), &e);
    assert_ok(s->ops->stat(s, AT("/a.txt0"), &b, &e), &e);
    assert_int_not_equal(a.id.ino, b.id.ino);
#undef AT
}

static void make_archive(struct buf *b)
{
    tb_text(b, "./a.txt", "alpha");
    tb_text(b, "./a.txt0", "other");
    tb_add(b, "./dir/", '5', NULL, 0);
    tb_text(b, "./sub/deep/y", "why");
    tb_text(b, "./sub/x", "ex");
    tb_end(b);
}

static void test_store(void **state)
{
    CLEANUP(buf_release) struct buf tar = {0}, gz = {0}, junk = {0};
    CLEANUP(store_closep) struct store *s = NULL;
    CLEANUP(listing_freep) struct listing *l = NULL;
    struct archive_oddities odd;
    const struct tmp *t = *state;
    struct err e = {0};

    make_archive(&tar);
    tb_gzip(tar.data, tar.len, 6, &gz);
    buf_adds(&junk, "no archive at all");
    tmp_bytes(t, "plain.nemo", tar.data, tar.len);
    tmp_bytes(t, "packed.nemo", gz.data, gz.len);
    tmp_bytes(t, "junk.nemo", junk.data, junk.len);
    tmp_bytes(t, "plain.tar", tar.data, tar.len);
    tmp_dir(t, "dir.nemo");
    tmp_file(t, "dir.nemo/in", "x");
    assert_ok(store_open_local(t->path, NULL, &s, &e), &e);

    check_listing(s, "", "dir.nemo/ junk.nemo packed.nemo plain.nemo plain.tar");
    check_archive(s, "plain.nemo");
    check_archive(s, "packed.nemo");
    check_listing(s, "dir.nemo", "in");
    check_listing(s, "plain.tar", "20");
    check_listing(s, "junk.nemo", "74"); /* EBADMSG */
    check_missing(s, "plain.tar/a.txt", ENOTDIR);
    check_missing(s, "none.nemo/a.txt", ENOENT);
    assert_ok(s->ops->list(s, "", &l, &e), &e);
    assert_non_null(listing_below(l, "plain.nemo/sub/deep"));
    assert_null(listing_sub(l, "plain.tar"));
    assert_ok(archives_oddities(s, "packed.nemo", &odd, &e), &e);
    assert_true(odd.packed && !odd.unended && odd.doubles == 0);

    /* Another archive under the same name. */
    buf_clear(&tar);
    tb_text(&tar, "new", "n");
    tb_text(&tar, "new", "m");
    tmp_bytes(t, "plain.nemo", tar.data, tar.len);
    check_listing(s, "plain.nemo", "new");
    check_file(s, "plain.nemo/new", "m");
    assert_ok(archives_oddities(s, "plain.nemo", &odd, &e), &e);
    assert_true(!odd.packed && odd.unended && odd.doubles == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gunzip),
        cmocka_unit_test(test_members),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_members_of_tar),
        cmocka_unit_test(test_headers_that_readers_take_differently),
        cmocka_unit_test(test_pax_size),
        cmocka_unit_test(test_prefix),
        cmocka_unit_test(test_base256),
        cmocka_unit_test(test_refused),
        tmp_test(test_store),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
