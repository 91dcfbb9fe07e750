/* SPDX-License-Identifier: MIT */
/* tests/unit/test_torch_walk.c - walks over object graphs: odd shapes, and without memory. */
#include "tests/unit/unit.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/err.h"
#include "index/formats/torch/torch_file.h"
#include "index/formats/torch/torch_walk.h"
#include "remote/source.h"
#include "tests/unit/fail_alloc.h"

/* What the walk finds, as text: "KEY KEY(why) ..." and the counts. */
static int note(void *user, const struct torch_item *item, struct err *e)
{
    struct buf *out = user;

    buf_addf(out, "%s%.*s", out->len ? " " : "", (int)item->key_len, item->key);
    if (!item->tensor)
        buf_addf(out, "(%s)", item->why);
    return buf_failed(out) ? err_nomem(e) : 0;
}

static int walk_file(struct source *src, struct buf *out, struct err *e)
{
    CLEANUP(torch_zip_freep) struct torch_zip *zip = NULL;
    CLEANUP(torch_walk_release)
    struct torch_walk w = {.fn = note,
                           .user = out,
                           .key = {.max = TORCH_MAX_PATH},
                           .path = {.max = TORCH_MAX_PATH}};

    if (torch_open(src, &zip, e) < 0)
        return -e->code;
    w.zip = zip;
    if (torch_walk_value(&w, torch_zip_root(zip), e) < 0)
        return -e->code;
    if (w.too_deep || w.unnamed)
        buf_addf(out, " deep=%" PRIu64 " unnamed=%" PRIu64, w.too_deep, w.unnamed);
    return buf_failed(out) ? err_nomem(e) : 0;
}

/* ---- made-up legacy files, in protocol 0 and whatever is needed ---- */

static const char head[] = "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
                           "\x80\x02M\xe9\x03."
                           "\x80\x02}X\x0d\0\0\0little_endian\x88s.";

/* Two bytes: storage '1'. */
static const char tail[] = "(lS'1'\na.\2\0\0\0\0\0\0\0ab";

#define TENSOR                                                                         \
    "ctorch._utils\n_rebuild_tensor\n"                                                 \
    "((S'storage'\nctorch\nByteStorage\nS'1'\nS'cpu'\nI2\ntQI0\n(I2\nt(I1\nttR"

static struct source *file_of(const void *object, size_t len)
{
    struct buf b = {0};
    struct source *s = NULL;
    struct err e = {0};

    buf_add(&b, head, sizeof head - 1);
    buf_add(&b, object, len);
    buf_add(&b, tail, sizeof tail - 1);
    assert_int_equal(buf_failed(&b), 0);
    assert_ok(source_from_memory(b.data, b.len, true, "f.pt", &s, &e), &e);
    return s;
}

static void check(const void *object, size_t len, const char *want)
{
    CLEANUP(source_putp) struct source *s = file_of(object, len);
    CLEANUP(buf_release) struct buf out = {0};
    struct err e = {0};

    buf_adds(&out, "");
    if (walk_file(s, &out, &e) < 0)
        assert_has(e.text, want);
    else
        assert_string_equal(out.data, want);
}

#define CHECK(object, want) check(object, sizeof(object) - 1, want)

static void test_keys(void **state)
{
    (void)state;
    CHECK(TENSOR ".", "");
    CHECK("(dS'a'\n" TENSOR "s.", "a");
    CHECK("(lI5\na" TENSOR "a" TENSOR "a.", "1 2");
    /* Keys that are no text, as str() has them. */
    CHECK("(dI-7\n" TENSOR "sN" TENSOR "s(I1\ntp1\n" TENSOR "s.", "-7 None (1,)");
    CHECK("(dI01\n" TENSOR "sI00\n" TENSOR "s.", "True False");
    CHECK("(dF1.5\n" TENSOR "sF2\n" TENSOR "sF0.1\n" TENSOR "sF-0.0\n" TENSOR
          "sF1e-4\n" TENSOR "sF1e-5\n" TENSOR "s.",
          "1.5 2.0 0.1 -0.0 0.0001 1e-05");
    CHECK("(dF1e15\n" TENSOR "sF1e16\n" TENSOR "sF1e22\n" TENSOR
          "sF123456789.125\n" TENSOR "sF5e-324\n" TENSOR
          "sF1.7976931348623157e308\n" TENSOR "sFinf\n" TENSOR "sF-inf\n" TENSOR
          "sFnan\n" TENSOR "s.",
          "1000000000000000.0 1e+16 1e+22 123456789.125 5e-324 1.7976931348623157e+308 "
          "inf -inf nan");
    CHECK("(dC\3a'\xff" TENSOR "s.", "b\"a'\\xff\"");
    CHECK("(d(I1\nS'a'\n(tF0.5\n(Ntt" TENSOR "s(I1\n(I2\ntt" TENSOR "s.",
          "(1, 'a', (), 0.5, (None,)) (1, (2,))");
    /* What has no such text, or a long one, by its position. */
    CHECK("(d(((((tttt"
          "t" TENSOR "s(cx\nY\n)Rt" TENSOR "s.",
          "0 1");
    /* An empty key at the start gives no part. */
    CHECK("(dS''\n(dS'b'\n" TENSOR "ss.", "b");
    /* An instance of a class that nobody knows: arguments, then its state. */
    CHECK("(I1\n" TENSOR "icfg\nC\n.", "1");
    CHECK("ccfg\nC\n)\x81(dS'x'\n" TENSOR "sb.", "x");
    /* A parameter of a tensor, and a damaged tensor by its key. */
    CHECK("(dS'p'\nctorch._utils\n_rebuild_parameter\n(" TENSOR "I00\nNtRs.", "p");
    CHECK("(dS'o'\n" TENSOR "sS'p'\nctorch._utils\n_rebuild_tensor\n(I1\ntRs.",
          "o p(f.pt: tensor: a rebuild call with a wrong number of arguments)");
    /* A storage by itself. */
    CHECK("(dS's'\n(S'storage'\nctorch\nByteStorage\nS'1'\nS'cpu'\nI2\ntQs.", "s");
}

/* Of 512 bytes and one more: text in a tuple, and bytes, have their position. */
static void test_long_texts(void **state)
{
    (void)state;
    for (size_t n = 512; n <= 513; n++) {
        CLEANUP(buf_release) struct buf tuple = {0}, bytes = {0}, want = {0};
        char text[513], count[4] = {(char)n, (char)(n >> 8), 0, 0};

        memset(text, 'x', sizeof text);
        buf_adds(&tuple, "(d(S'");
        buf_add(&tuple, text, n);
        buf_adds(&tuple, "'\nt" TENSOR "s.");
        check(tuple.data, tuple.len, "0");
        buf_adds(&bytes, "(dB");
        buf_add(&bytes, count, sizeof count);
        buf_add(&bytes, text, n);
        buf_adds(&bytes, TENSOR "s.");
        buf_addf(&want, "b'%.512s'", text);
        check(bytes.data, bytes.len, n > 512 ? "0" : want.data);
    }
}

/* A list that holds itself, and one that is nested 600 deep. */
static void test_depth(void **state)
{
    struct buf b = {0};

    (void)state;
    CHECK("(lp1\n" TENSOR "ag1\na.", "0 deep=1 unnamed=0");
    for (int i = 0; i < 600; i++)
        buf_adds(&b, "(l");
    buf_adds(&b, TENSOR "a");
    for (int i = 0; i < 599; i++)
        buf_adds(&b, "a");
    buf_adds(&b, ".");
    check(b.data, b.len, " deep=1 unnamed=0");
    buf_release(&b);
}

/* Forty lists, each twice in the next: 2^40 paths to one tensor. */
static void test_multiplied(void **state)
{
    struct buf b = {0};

    (void)state;
    buf_adds(&b, TENSOR "p0\n0");
    for (int i = 1; i <= 40; i++)
        buf_addf(&b, "(lg%d\nag%d\nap%d\n0", i - 1, i - 1, i);
    buf_adds(&b, "g40\n.");
    check(b.data, b.len, "references multiply them");
    buf_release(&b);
}

/* Keys of 1 KiB, nested until no path can hold them. */
static void test_long_keys(void **state)
{
    struct buf b = {0};

    (void)state;
    for (int i = 0; i < 70; i++)
        buf_addf(&b, "(dS'%01024d'\n", i);
    buf_adds(&b, TENSOR);
    for (int i = 0; i < 70; i++)
        buf_adds(&b, "s");
    buf_adds(&b, ".");
    check(b.data, b.len, " deep=0 unnamed=1");
    buf_release(&b);
}

/* One text that is in many places is written at each, but not more than the pickle allows. */
static void test_shared_text(void **state)
{
    CLEANUP(buf_release) struct buf b = {0}, json = {0};
    CLEANUP(torch_zip_freep) struct torch_zip *zip = NULL;
    CLEANUP(source_putp) struct source *s = NULL;
    struct err e = {0};
    struct pv root;

    (void)state;
    buf_addf(&b, "(l" TENSOR "aS'%01000d'\np0\na", 0);
    for (int i = 1; i < 300; i++)
        buf_adds(&b, "g0\na");
    buf_adds(&b, ".");
    s = file_of(b.data, b.len);
    assert_ok(torch_open(s, &zip, &e), &e);
    assert_int_equal(torch_zip_json_left(zip), (64 << 10) + 128 * b.len);
    root = torch_zip_root(zip);
    assert_ok(object_to_json(zip, &root, 0, NULL, NULL, &json, &e), &e);
    assert_true(json.len > 300 * 1003);
    assert_int_equal(torch_zip_json_left(zip), (64 << 10) + 128 * b.len - json.len);
    buf_clear(&json);
    assert_int_equal(object_to_json(zip, &root, 0, NULL, NULL, &json, &e), -EFBIG);
    assert_string_equal(e.text, "the object is too large for objects.json");
    assert_int_equal(torch_zip_json_left(zip), 0);
}

static void test_sniff(void **state)
{
    static const char zip[] = "PK\3\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
                              "\x10\0\0\0archive/data.pkl";
    char tar[TORCH_HEAD] = "pickle";

    (void)state;
    memcpy(tar + 257, "ustar", 5);
    assert_int_equal(torch_sniff(head, sizeof head - 1), TORCH_LEGACY);
    assert_int_equal(torch_sniff(head, 14), TORCH_LEGACY);
    assert_int_equal(torch_sniff(head, 13), TORCH_NOT);
    assert_int_equal(torch_sniff("L119547037146038801333356L\n.", 28), TORCH_LEGACY);
    assert_int_equal(torch_sniff(zip, sizeof zip - 1), TORCH_ZIP);
    assert_int_equal(torch_sniff(zip, sizeof zip - 3), TORCH_MAYBE);
    assert_int_equal(torch_sniff(zip, 4), TORCH_MAYBE);
    assert_int_equal(torch_sniff(zip, 3), TORCH_NOT);
    assert_int_equal(torch_sniff(tar, sizeof tar), TORCH_TAR);
    tar[0] = 'P';
    assert_int_equal(torch_sniff(tar, sizeof tar), TORCH_NOT);
    assert_int_equal(torch_sniff("", 0), TORCH_NOT);
}

static void out_of_memory(const char *name)
{
    char path[4096];
    struct err e = {0};
    struct source *src = NULL;
    int fd;

    snprintf(path, sizeof path, "%s/%s", TEST_DATA, name);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_ok(source_from_fd(fd, name, &src, &e), &e);
    for (long n = 1; fail_alloc_next(&n);) {
        struct buf out = {0};
        int rc;

        e = (struct err){0};
        rc = walk_file(src, &out, &e);
        fail_alloc_end(&n, rc);
        buf_release(&out);
    }
    source_put(src);
}

static void test_out_of_memory(void **state)
{
    (void)state;
    out_of_memory("torch_file/pt_legacy_views/model.pth");
    out_of_memory("torch_file/pt_zip_quantized_sparse/model.pt");
    out_of_memory("torch_file/deflated/model.pt");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keys),      cmocka_unit_test(test_long_texts),
        cmocka_unit_test(test_depth),     cmocka_unit_test(test_multiplied),
        cmocka_unit_test(test_long_keys), cmocka_unit_test(test_shared_text),
        cmocka_unit_test(test_sniff),     cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
