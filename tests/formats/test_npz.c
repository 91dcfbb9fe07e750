/* SPDX-License-Identifier: MIT */
/* tests/formats/test_npz.c - .npy and .npz files: versions, orders, odd members. */
#include "made.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/endian.h"
#include "base/err.h"
#include "tests/unit/unit.h"
#include "tests/unit/zip_build.h"

/* An .npy image: version, dict as text, blanks up to `header` bytes in all, floats. */
static void image(struct buf *out, unsigned version, const char *dict, size_t header,
                  const float *values, size_t n)
{
    size_t prefix = version == 1 ? 10 : 12;
    unsigned char length[4];

    put_le32(length, (uint32_t)(header - prefix));
    buf_add(out, "\x93NUMPY", 6);
    buf_addc(out, (char)version);
    buf_addc(out, 0);
    buf_add(out, length, prefix - 8);
    buf_adds(out, dict);
    while (out->len < header - 1)
        buf_addc(out, ' ');
    buf_addc(out, '\n');
    assert_int_equal(out->len, header);
    buf_add(out, values, n * sizeof *values);
}

static const float six[6] = {0, 1, 2, 3, 4, 5};

static void open_image(struct made *m, struct opened *o, const char *name,
                       const void *data, size_t len)
{
    made_begin(m, "arrays");
    made_file(m, name, data, len);
    made_open(m, o);
}

static void finish(const struct made *m, struct opened *o)
{
    close_checkpoint(o);
    made_end(m);
}

/* All that numpy and its forebears write, and what a person may type. */
static void test_headers(void **state)
{
    static const struct {
        unsigned version;
        const char *dict;
        size_t header;
        float want[6];
    } cases[] = {
        {1,
         "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }",
         128,
         {0, 1, 2, 3, 4, 5}},
        {2,
         "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }",
         128,
         {0, 1, 2, 3, 4, 5}},
        {3,
         "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }",
         192,
         {0, 2, 4, 1, 3, 5}},
        {1,
         "{\"shape\":(2L,3L),\"fortran_order\":False,\"descr\":\"<f4\"}",
         80,
         {0, 1, 2, 3, 4, 5}},
        /* No order told: the machine's, as NumPy reads them. */
        {1,
         "{'descr': '=f4', 'fortran_order': False, 'shape': (2, 3), }",
         128,
         {0, 1, 2, 3, 4, 5}},
        {1,
         "{'descr': '|f4', 'fortran_order': False, 'shape': (2, 3), }",
         128,
         {0, 1, 2, 3, 4, 5}},
        {1,
         "{'descr': 'f4', 'fortran_order': False, 'shape': (2, 3), }",
         128,
         {0, 1, 2, 3, 4, 5}},
        /* No element starts at a multiple of its size. */
        {1,
         " {'descr':'<f4','fortran_order':True,'shape':(6,)}",
         79,
         {0, 1, 2, 3, 4, 5}},
        {1,
         "{'descr': '<f4', 'fortran_order': True, 'shape': (1, 2, 3), }",
         128,
         {0, 2, 4, 1, 3, 5}},
        {2,
         "{'descr': '<f4', 'fortran_order': False, 'shape': (6,), }",
         70000,
         {0, 1, 2, 3, 4, 5}},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        CLEANUP(buf_release) struct buf npy = {0};
        struct zip_builder z = {0};
        struct made m;
        struct opened o;

        image(&npy, cases[i].version, cases[i].dict, cases[i].header, six, 6);
        open_image(&m, &o, "w.npy", npy.data, npy.len);
        check_floats(&o, "w", cases[i].want, 6);
        assert_int_equal(o.info.warnings, 0);
        finish(&m, &o);
        zb_add(&z,
               &(struct zip_member){.name = "s.npy", .data = npy.data, .len = npy.len});
        zb_add(&z, &(struct zip_member){.name = "/d/e.npy",
                                        .data = npy.data,
                                        .len = npy.len,
                                        .deflate = true});
        zb_finish(&z, i % 2, i % 2, "");
        open_image(&m, &o, "w.npz", z.out.data, z.out.len);
        check_floats(&o, "s", cases[i].want, 6);
        check_floats(&o, "/d/e", cases[i].want, 6);
        assert_int_equal(o.count, 2);
        finish(&m, &o);
        zb_release(&z);
    }
}

static void check_refused(const char *dict, size_t values, const char *why)
{
    CLEANUP(buf_release) struct buf npy = {0};
    struct made m;
    struct opened o;

    image(&npy, 1, dict, 128, six, values);
    open_image(&m, &o, "w.npy", npy.data, npy.len);
    if (!o.info.error)
        fail_msg("%s is accepted", dict);
    assert_has(o.info.error, why);
    assert_int_equal(o.count, 0);
    finish(&m, &o);
}

static void test_refused(void **state)
{
#define ONE "'fortran_order': False, 'shape': (6,), }"
    (void)state;
    check_refused("{'descr': '|O', " ONE, 6, "'|O': Python objects");
    check_refused("{'descr': '<U3', " ONE, 6, "'<U3': text");
    check_refused("{'descr': '|S3', " ONE, 6, "'|S3': text");
    check_refused("{'descr': '<M8[ns]', " ONE, 6, "'<M8[ns]': dates");
    check_refused("{'descr': '|V1', " ONE, 6, "'|V1': raw bytes");
    check_refused("{'descr': '<f16', " ONE, 6, "'<f16': floats of an unusual width");
    check_refused("{'descr': '!f4', " ONE, 6, "'!f4'");
    check_refused("{'descr': '<=f4', " ONE, 6, "'<=f4'");
    check_refused("{'descr': '|', " ONE, 6, "'|'");
    check_refused("{'descr': '', " ONE, 6, "''");
    check_refused("{'descr': [('a', '<f4')], " ONE, 6, "a structured type");
    check_refused("{'descr': ('<f4', (2,)), " ONE, 6, "a structured type");
    check_refused("{'descr': '<f4', " ONE " 1", 6, "text behind the dict");
    check_refused("{'descr': '<f4', 'x': 1, " ONE, 6, "none of descr");
    check_refused("{'descr': '<f4', 'shape': (6,)}", 6, "not all there");
    check_refused("{'descr': '<f4', 'fortran_order': 0, 'shape': (6,)}", 6, "True nor");
    check_refused("{'descr': '<f4', 'fortran_order': False, 'shape': (6)}", 6,
                  "number");
    check_refused("{'descr': '<f4', 'fortran_order': False, 'shape': (06,)}", 6,
                  "no number");
    check_refused("{'descr': '<f4', 'fortran_order': False, 'shape': (7,)}", 6,
                  "need 28 bytes, 24 are there");
    check_refused("{'descr': '<f4', 'fortran_order': False, "
                  "'shape': (4294967296, 4294967296, 0)}",
                  6, "2^63");
    check_refused("{'descr': '<f4', 'fortran_order': False, "
                  "'shape': (99999999999999999999,)}",
                  6, "past 2^64");
#undef ONE
}

static void test_trailing(void **state)
{
    CLEANUP(buf_release) struct buf npy = {0};
    struct made m;
    struct opened o;

    (void)state;
    image(&npy, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (5,)}", 128, six,
          6);
    open_image(&m, &o, "w.npy", npy.data, npy.len);
    check_floats(&o, "w", six, 5);
    check_warnings(&o, "trailing-bytes: w: 4 bytes behind the array are not read\n");
    finish(&m, &o);
}

/* A changed bit of the length moves every element. One that is not too short is read. */
static void test_length_of_header(void **state)
{
    static const char dict[] =
        "{'descr': '<f4', 'fortran_order': False, 'shape': (6,)}";
    CLEANUP(buf_release) struct buf npy = {0};
    struct made m;
    struct opened o;

    (void)state;
    image(&npy, 1, dict, 128, six, 6);
    npy.data[8] -= 4;
    open_image(&m, &o, "w.npy", npy.data, npy.len);
    assert_has(o.info.error,
               "no newline ends the .npy header at byte 124, and 4 bytes");
    assert_int_equal(o.count, 0);
    finish(&m, &o);
    npy.data[8] += 4;
    npy.data[127] = ' ';
    open_image(&m, &o, "w.npy", npy.data, npy.len);
    check_floats(&o, "w", six, 6);
    finish(&m, &o);
}

/* What is wrong with one member leaves the others alone. */
static void test_members(void **state)
{
    CLEANUP(buf_release) struct buf good = {0}, objects = {0}, text = {0};
    struct zip_builder z = {0};
    struct made m;
    struct opened o;

    (void)state;
    image(&good, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (6,)}", 128, six,
          6);
    image(&objects, 1, "{'descr': '|O', 'fortran_order': False, 'shape': ()}", 128, six,
          3);
    zb_add(&z, &(struct zip_member){
                   .name = "optimizer/a.npy", .data = good.data, .len = good.len});
    zb_add(&z, &(struct zip_member){
                   .name = "args.npy", .data = objects.data, .len = objects.len});
    zb_add(&z, &(struct zip_member){.name = "cut.npy", .data = good.data, .len = 151});
    zb_add(&z, &(struct zip_member){
                   .name = "tiny.npy", .data = good.data, .len = 9, .deflate = true});
    zb_add(&z, &(struct zip_member){.name = "\xc3\xa9.npy",
                                    .data = good.data,
                                    .len = good.len,
                                    .deflate = true});
    zb_add(&z, &(struct zip_member){.name = "d/", .data = "", .len = 0});
    zb_add(&z, &(struct zip_member){.name = "notes.txt", .data = "hello", .len = 5});
    zb_add(&z, &(struct zip_member){.name = "two", .data = good.data, .len = good.len});
    zb_add(&z,
           &(struct zip_member){.name = "two.npy", .data = good.data, .len = good.len});
    zb_finish(&z, false, false, "");
    open_image(&m, &o, "step_20.npz", z.out.data, z.out.len);
    check_floats(&o, "optimizer/a", six, 6);
    check_floats(&o, "\xc3\xa9", six, 6);
    check_fault(&o, "cut", "the elements need 24 bytes, 23 are there");
    check_fault(&o, "tiny", "does not start as an .npy file does");
    check_fault(&o, "two", "the archive has two and two.npy: two arrays of a name");
    assert_int_equal(o.count, 5);
    assert_true(o.info.has_step);
    assert_int_equal(o.info.step, 20);
    check_warnings(&o,
                   "not-a-tensor: args: elements of type '|O': Python objects, which "
                   "are pickles\nodd-member: notes.txt in the archive is no .npy "
                   "file\nodd-member: two in the archive is no .npy file\n");
    all_objects(&o, &text);
    assert_string_equal(text.data,
                        "args={\"$type\":\"opaque\",\"class\":\"numpy.ndarray\","
                        "\"error\":\"elements of type '|O': Python objects, which are "
                        "pickles\"}\n");
    finish(&m, &o);
    zb_release(&z);
}

/* Bytes that deflate gives back but are not those of the archive's checksum. */
static void test_checksum(void **state)
{
    CLEANUP(buf_release) struct buf npy = {0}, got = {0};
    struct zip_builder z = {0};
    struct made m;
    struct opened o;
    struct err e = {0};
    size_t at;

    (void)state;
    image(&npy, 1, "{'descr': '<f4', 'fortran_order': False, 'shape': (6,)}", 128, six,
          6);
    zb_add(&z, &(struct zip_member){
                   .name = "w.npy", .data = npy.data, .len = npy.len, .deflate = true});
    at = z.out.len;
    zb_finish(&z, false, false, "");
    z.out.data[at + 16] ^= 1; /* the directory's CRC */
    z.out.data[14] ^= 1;      /* and the local header's */
    open_image(&m, &o, "w.npz", z.out.data, z.out.len);
    assert_int_equal(o.count, 1);
    assert_int_equal(read_tensor(&o.w, o.info.id, &o.t[0], &got, &e), -EBADMSG);
    assert_has(e.text, "a wrong checksum");
    finish(&m, &o);
    zb_release(&z);
}

/* A size that nothing of the member's length can inflate to: no room is set aside for it. */
static void test_impossible_size(void **state)
{
    CLEANUP(buf_release) struct buf npy = {0}, got = {0};
    enum { CLAIMED = 100 << 20 };
    struct zip_builder z = {0};
    struct made m;
    struct opened o;
    struct err e = {0};
    size_t at;

    (void)state;
    image(&npy, 1, "{'descr': '|u1', 'fortran_order': False, 'shape': (104857600,)}",
          128, six, 6);
    zb_add(&z, &(struct zip_member){
                   .name = "w.npy", .data = npy.data, .len = npy.len, .deflate = true});
    at = z.out.len;
    zb_finish(&z, false, false, "");
    put_le32(z.out.data + at + 24, CLAIMED + 128); /* in the directory */
    put_le32(z.out.data + 22, CLAIMED + 128);      /* and in the local header */
    open_image(&m, &o, "w.npz", z.out.data, z.out.len);
    assert_int_equal(o.count, 1);
    assert_int_equal(read_tensor(&o.w, o.info.id, &o.t[0], &got, &e), -EBADMSG);
    assert_has(e.text, "104857728 bytes cannot come out of");
    finish(&m, &o);
    zb_release(&z);
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest others[] = {
        {.name = "headers", .test_func = test_headers},
        {.name = "refused", .test_func = test_refused},
        {.name = "trailing", .test_func = test_trailing},
        {.name = "length of the header", .test_func = test_length_of_header},
        {.name = "members", .test_func = test_members},
        {.name = "checksum", .test_func = test_checksum},
        {.name = "impossible size", .test_func = test_impossible_size},
    };

    return run_with_fixtures("npz", argc, argv, others, ARRAY_SIZE(others));
}
